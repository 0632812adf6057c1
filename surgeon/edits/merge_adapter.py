"""`merge_adapter`: a PEFT adapter becomes a part of the weights that it adapts: W + s · B A (Hu et al., 2022).

The whole adapter must be merged, with everything that its config names: a merge in part is refused. Changes that are
much smaller than the steps of the weights' dtype are rounded so that they stay (recipes/adapted.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from surgeon.anatomy.anatomy import Anatomy, with_dtype
from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft
from surgeon.blueprint.recipes import Adapted, Product, Recipe, Rounding, Step, Trained, one_expert, stacked_experts
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.peft_folder import ADAPTER_CONFIG, AdapterFolder, is_of_tokenizer
from surgeon.checkpoint.strict_json import json_object, parse_json_strict
from surgeon.checkpoint.tokenizer_files import TOKENIZER_FILE, TokenizerJson
from surgeon.checkpoint.trust import leads_to_code
from surgeon.edits.adapter_changes import Sorted, name_for_peft, sets_whole
from surgeon.edits.adapter_places import Model, Place, Settings, settings_of
from surgeon.edits.embeddings import further_rows, has_other_rows, is_untied, set_rows, untie, vocabulary_tensors
from surgeon.errors import BadInput, printable
from surgeon.models.templates import template_of
from surgeon.operations.imported_lora import AdapterFacts
from surgeon.operations.operation import Operation, Paper, Spec, TrainingDefaults
from surgeon.operations.prepare import Facts, OpenedBase, SideFile

Name = Annotated[str, Field(min_length=1, max_length=4096)]
# Side files of which a tokenizer needs one to have tokens.
_VOCABULARY = re.compile(r"^(tokenizer\.|vocab)|\.model$|\.tiktoken$|tekken")
# Settings of an adapter's config that are supported here.
_KNOWN = {"bias", "use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "target_parameters"}
_REASONS = {
    "layer_replication": "it is for a base with repeated layers; repeat them first (`stack_layers`)",
    "alora_invocation_tokens": "it is active only after certain tokens, and merged weights would be always",
}


class Weighted(Spec):
    """An adapter, and the factor of its change."""

    adapter: Annotated[Name, Field(description="a folder or a Hub id, as in `from`")]
    weight: Annotated[float, Field(allow_inf_nan=False, description="by how much its change counts")] = 1.0


class MergedAdapter(Spec):
    """The facts of a merged adapter, without its weights."""

    facts: AdapterFacts
    settings: Settings


class MergeFacts(Facts):
    """The adapters that a merge uses, in the plan's order."""

    adapters: list[MergedAdapter]


class MergeAdapter(Operation):
    """Merge PEFT adapters into the weights that they adapt; the output has the base's own class."""

    model_config = ConfigDict(populate_by_name=True)

    papers = (
        Paper(
            "hu2022lora",
            "Hu, Edward J. and Shen, Yelong and Wallis, Phillip and others",
            "LoRA: Low-Rank Adaptation of Large Language Models",
            2022,
            "2106.09685",
            "ICLR",
        ),
        Paper(
            "liu2024dora",
            "Liu, Shih-Yang and Wang, Chien-Yi and Yin, Hongxu and others",
            "DoRA: Weight-Decomposed Low-Rank Adaptation",
            2024,
            "2402.09353",
            "ICML",
        ),
    )
    training = TrainingDefaults("ours, no paper's: the merged weights", lr=1e-5)
    examples = ({"from": "adapter"},)

    facts = MergeFacts

    op: Literal["merge_adapter"]
    source: Annotated[
        Name | Weighted | Annotated[list[Name | Weighted], Field(min_length=1, max_length=100)],
        Field(
            alias="from",
            description="a PEFT adapter: a folder (a relative path starts at the plan's folder) or a Hub id; or a list"
            " of them, merged in turn; `{adapter: …, weight: …}` counts one by that much",
        ),
    ]
    rounding: Annotated[
        Rounding,
        Field(
            description="auto: to nearest, and guided in rows that would lose more than a hundredth of their change;"
            " or one of the two everywhere"
        ),
    ] = "auto"
    dtype: Annotated[
        Literal["keep", "float32"],
        Field(description="what changed tensors are stored in: the base's dtype, or float32, where nothing is lost"),
    ] = "keep"

    tokenizer: Annotated[
        Literal["base", "adapter"],
        Field(
            description="whose tokenizer and chat template the output has; an adapter that was trained after embeddings"
            " were resized brings its own in any case"
        ),
    ] = "base"

    @property
    def listed(self) -> list[Weighted]:
        """Return the adapters with their weights."""
        every = self.source if isinstance(self.source, list) else [self.source]
        return [each if isinstance(each, Weighted) else Weighted(adapter=each) for each in every]

    def prepare(self, base: OpenedBase) -> MergeFacts:
        """Open the adapters, and sort their tensors by what they change.

        Their tokenizer files replace the base's where the output is to have them. Raises BadInput where an adapter
        cannot be merged.
        """
        found: list[MergedAdapter] = []
        rows: int | None = None
        model = Model.of(base.anatomy)
        for each in self.listed:
            folder, shown = base.adapter(each.adapter), printable(each.adapter)
            trained_on = _trained_on(folder, base)
            try:
                adapter, more = read_adapter(folder, each.adapter, model)
            except BadInput as error:
                said = f"; its config says that it was {trained_on}" if trained_on else ""
                raise BadInput(f"{error}{said}") from error
            if trained_on:
                base.notes.append(f"{shown}: {trained_on}, its config says")
            found.append(adapter)
            rows = more or rows
        folders = [base.adapter(each.adapter) for each in self.listed]
        if rows or self.tokenizer == "adapter":
            side_files = _brought(base, folders, rows or base.anatomy.sizes.vocabulary)
            return MergeFacts(adapters=found, side_files=side_files)
        base.notes.extend(
            f"{printable(folder.facts.id)}: {own} in this folder, and the output has the base's; `tokenizer: adapter`"
            " takes it, with the tokenizer there"
            for folder in folders
            if (own := " and ".join(_left(folder, base.folder)))
        )
        return MergeFacts(adapters=found)

    def edit(self, draft: Draft, facts: MergeFacts | None) -> OperationRecord:
        """Replace the base's tensors by the merged ones."""
        if facts is None or len(facts.adapters) != len(self.listed):
            raise BadInput("the adapters are not known: they were not opened, and surgery.json does not record them")
        model = Model.of(draft.anatomy)
        found = [
            Sorted(each.adapter, known.facts.adapter, known.settings, each.weight, model)
            for each, known in zip(self.listed, facts.adapters, strict=True)
        ]
        merged = _together(found)
        rows = next((each.rows for each in found if each.rows is not None), None)
        if facts.side_files and rows is None and self.tokenizer == "base":
            raise BadInput("the adapters bring a tokenizer that nobody asked for; was surgery.json edited?")
        if rows is not None and (found[1:] or has_other_rows(draft)):
            raise BadInput(
                "an adapter that brings embeddings of another size is merged first and alone: apply two plans"
            )
        untied = any(each.apart for each in found) and not is_untied(draft)
        if untied:
            untie(draft)
        for name, steps in merged.items():
            place = model.find(name)
            assert place is not None, name
            self._merge(draft, place, steps)
        said = ""
        if rows is not None:
            set_rows(draft, rows)
            lacking = [name for name in vocabulary_tensors(draft) if draft.outer[name].recipe.shape[0] != rows]
            if lacking:
                raise BadInput(
                    f"the adapter has {rows} rows for tokens and none for {printable(lacking[0])}; save it with"
                    " `save_pretrained(NEW, save_embedding_layers=True)`"
                )
            said = f"; {rows} rows for tokens, the adapter's, in place of {draft.anatomy.sizes.vocabulary}"
        said += "; the output head gets a tensor of its own, apart from the embeddings" if untied else ""
        places = (place for name in merged if (place := model.find(name)) is not None)
        if any(map(model.has_tokens, places)) and (further := further_rows(draft.anatomy)):
            said += f"; {printable(', '.join(further))}, for further tokens, stay as they were"
        return OperationRecord(
            op=self.op,
            matched=f"{_shown(self.listed)}: {count_of(merged)}{said}",
            claim=Claim("none", "adapters change outputs as they were trained to"),
            trains="new",
        )

    def with_adapters(self, facts: MergeFacts | None, names: Sequence[str], anatomy: Anatomy) -> Callable[[Any], Any]:
        """Return a function that loads the adapters with PEFT onto a model, merging all but the last.

        Raises BadInput where the folders `names` differ from the facts.
        """
        if facts is None:
            raise BadInput("surgery.json does not record the adapters")
        if any(each.weight != 1 for each in self.listed):
            raise BadInput("merged with weights, which PEFT has no such thing for; leave `--adapter` out")
        if len(names) != len(facts.adapters):
            raise BadInput(
                f"{len(facts.adapters)} adapters were merged, and {len(names)} are given; give `--adapter` for each, in"
                " the plan's order"
            )
        for name, known in zip(names, facts.adapters, strict=True):
            folder = AdapterFolder.open(Path(name), id=Path(name).resolve().name)
            if folder.facts.tensors != known.facts.adapter.tensors:
                raise BadInput(
                    f"{printable(name)}: not the adapter that was merged ({printable(known.facts.id)}); give that"
                )
        model = Model.of(anatomy)

        def adapted(loaded: Any) -> Any:
            """Return the model with all adapters loaded, and all but the last merged."""
            from surgeon.models.load import with_adapter

            for number, name in enumerate(names, start=1):
                loaded = with_adapter(loaded, Path(name), lambda tensor: name_for_peft(tensor, model))
                loaded = loaded if number == len(names) else loaded.merge_and_unload()
            return loaded

        return adapted

    def _merge(self, draft: Draft, place: Place, steps: list[Step]) -> None:
        """Replace one tensor by its merged value.

        Raises BadInput where its layer was removed, is quantised or has a graft.
        """
        if place.layer is None:
            draft.set_outer(place.stored, self._adapted(draft, place, draft.outer[place.stored].recipe, steps))
            return
        index = next((index for index, layer in enumerate(draft.layers) if layer.base == place.layer), None)
        if index is None:
            raise BadInput(
                f"an adapter adapts layer {place.layer}, which an earlier operation took out: merge it first"
            )
        home = draft.layers[index]
        if home.grafts:
            raise BadInput(
                f"layer {index} carries a graft ({home.grafts[0].text}), which an adapter of the base knows nothing of:"
                " merge the adapter into the base, and attach grafts after it"
            )
        if draft.kind_of(index).packed:
            raise BadInput(
                f"{printable(place.stored)} is quantised: merge into the full-precision model, and quantise the output"
            )
        home.tensors[place.suffix] = self._adapted(draft, place, home.tensors[place.suffix], steps)
        home.rewritten[place.suffix] = draft.number

    def _adapted(self, draft: Draft, place: Place, recipe: Recipe, steps: list[Step]) -> Recipe:
        """Return the recipe of a tensor after the adapters' steps: expert by expert where the product is for experts.

        Resized embeddings are replaced by the adapter's own rows. Raises BadInput where an earlier operation changed
        the shape.
        """
        first = steps[0]
        resized = first.values if sets_whole(first) and first.values.shape != place.shape else None
        if resized is not None:
            recipe, steps = replace(resized, dtype=recipe.dtype), steps[1:]
        elif recipe.shape != place.shape:
            raise BadInput(
                f"{printable(place.stored)}: shape {list(recipe.shape)} after earlier operations, the base's"
                f" {list(place.shape)}: merge the adapter before them"
            )
        wider = self.dtype == "float32" and recipe.dtype in ("F16", "BF16")
        if wider:
            draft.config_edits["dtype"] = lambda config: with_dtype(config, self.dtype)
        dtype = "F32" if wider else recipe.dtype
        if resized is not None and not steps:
            return replace(resized, dtype=dtype)
        of_all = [step for step in steps if isinstance(step, Product) and step.expert is not None]
        if not of_all or place.form == "linear":
            return Adapted(recipe, tuple(steps), place.stored, dtype, self.rounding, turned=place.form == "turned")
        experts = [
            Adapted(
                one_expert(recipe, number, place.layout),
                tuple(step.of_expert(number) for step in of_all),
                f"{place.stored}, expert {number}",
                dtype,
                self.rounding,
            )
            for number in range(recipe.shape[0])
        ]
        return stacked_experts(experts, place.layout)


def _trained_on(folder: AdapterFolder, base: OpenedBase) -> str:
    """Return words on the base that an adapter's config names, and whether its name differs from this base.

    The text is empty where the config names no base.
    """
    found, own = folder.config.get("base_model_name_or_path"), base.folder.source.shown
    if not isinstance(found, str) or not found:
        return ""
    alike = _last(found) == _last(own)
    return f"trained on {printable(found)}" + ("" if alike else f" (this base is {own}: is it the same model?)")


def _last(name: str) -> str:
    """Return a model's own name, without its folder, organisation or revision."""
    return name.rstrip("/").rpartition("/")[2].partition("@")[0].lower()


def _together(adapters: list[Sorted]) -> dict[str, list[Step]]:
    """Return the steps of all adapters by the tensor they change, in the adapters' order.

    Where an adapter gives a tied head its own values, the head's steps are listed separately from the embeddings'.
    """
    merged: dict[str, list[Step]] = {}
    steps = [each.sort() for each in adapters]
    apart = any(each.apart for each in adapters)
    for each, found in zip(adapters, steps, strict=True):
        tied = each.model.tied if apart or each.shared else None
        if tied is not None:
            own, reads = (found.pop(place.parameter, []) for place in (tied.head, tied.reads))
            # Trained rows of the head replace the embeddings' rows.
            rows = any(isinstance(step, Trained) and step.rows for step in own)
            both = [step for step in each.shared if sets_whole(step) or not rows]
            heads = _whole_first([*both, *own]) if apart else []
            settled = {tied.reads.parameter: _whole_first([*each.shared, *reads]), tied.head.parameter: heads}
            found |= {name: of for name, of in settled.items() if of}
        for name, of in found.items():
            merged.setdefault(name, []).extend(of)
    return merged


def _whole_first(steps: list[Step]) -> list[Step]:
    """Return the steps without repeats, the steps that set all rows first."""
    return sorted(dict.fromkeys(steps), key=lambda step: not sets_whole(step))


def _left(folder: AdapterFolder, base: CheckpointFolder) -> Iterator[str]:
    """Yield words on an adapter's tokenizer files that an output with the base's files would lack."""
    own = template_of(folder)
    if own and own != template_of(base):
        yield "a chat template of its own lies"
    ids = _ids(base)
    if other := [token for token, number in _ids(folder).items() if ids.get(token) != number]:
        named = ", ".join(printable(repr(token), 40) for token in other[:5])
        yield f"a tokenizer with {len(other)} tokens or ids that the base's lacks ({named}) lies"


def _ids(folder: AdapterFolder | CheckpointFolder) -> dict[str, int]:
    """Return token -> id of a folder; empty where its tokenizer.json is missing or cannot be read."""
    if TOKENIZER_FILE not in folder.side_files:
        return {}
    content = folder.read_side_file(TOKENIZER_FILE)
    try:
        added = json_object(content).get("added_tokens") or ()
        return {**TokenizerJson.parse(content).vocabulary, **{each["content"]: each["id"] for each in added}}
    except (BadInput, KeyError, TypeError):
        return {}


def _brought(base: OpenedBase, folders: list[AdapterFolder], rows: int) -> dict[str, SideFile]:
    """Replace the base's tokenizer files in the output by the adapters'; return the record of each file.

    Where the adapters have no vocabulary, the base's files stay besides. Raises BadInput for files that no output gets,
    or a token id that is not below `rows`.
    """
    found: dict[str, bytes | None] = {}
    for folder in folders:
        for name in folder.side_files:
            found[name] = content = folder.read_side_file(name)
            if name.endswith("_config.json") and (code := leads_to_code(parse_json_strict(content, file=name))):
                raise BadInput(f"the adapter's {printable(name)} {code}, which no output gets; take that out of it")
            if name == TOKENIZER_FILE and (highest := max(TokenizerJson.parse(content).ids)) >= rows:
                raise BadInput(
                    f"{printable(folder.facts.id)}: {name} has the id {highest}, and the output {rows} rows: the model"
                    " was not resized for it in training; take its files, or such tokens, out of a copy of the folder"
                )
    if any(map(_VOCABULARY.search, found)):
        found = dict.fromkeys(filter(is_of_tokenizer, base.folder.side_files)) | found
    else:
        base.notes.append("no vocabulary lies in the adapter's folder: the output has the base's, and its ids")
    base.side_files.update(found)
    return {name: SideFile.of(content) for name, content in found.items()}


def read_adapter(folder: AdapterFolder, called: str, model: Model) -> tuple[MergedAdapter, int | None]:
    """Return (facts, rows): the facts of an adapter of `model`, called `called` in the plan, and its embedding rows.

    `rows` is None where embeddings were not resized before training. Raises BadInput for settings that cannot be
    merged, tensors that do not fit, and an adapter that changes nothing.
    """
    folder.check_settings(_KNOWN, _REASONS, "such an adapter cannot be merged; merge it with PEFT")
    settings = settings_of(folder)
    known = Sorted(called, folder.facts, settings, 1.0, model)
    known.sort()
    if len(folder.facts.tensors) == 2 * len(known.pairs):
        pairs = known.pairs.values()
        why = ""
        if not any(product.scale for product in pairs):
            why = f"`lora_alpha` is {folder.facts.alpha:g}; give the adapter's own {ADAPTER_CONFIG}"
        elif not any(folder.read(product.up.tensor).strip(b"\0") for product in pairs):
            why = f"B is zero in all {len(pairs)} matrices, as before training; give one that was saved after it"
        if why:
            raise BadInput(f"{printable(called)}: this adapter does nothing: {why}")
    adapter = MergedAdapter(facts=AdapterFacts.of(folder.facts), settings=settings)
    return adapter, known.rows


def _shown(listed: list[Weighted]) -> str:
    """Return the adapters' names and weights for the manifest."""
    return ", ".join(printable(each.adapter) + (f" × {each.weight:g}" if each.weight != 1 else "") for each in listed)


def count_of(merged: Mapping[str, list[Step]]) -> str:
    """Describe what was merged: how many matrices by products of which ranks, and what else."""
    found = [(name, step) for name, steps in merged.items() for step in steps if isinstance(step, Product)]
    products = [step for _, step in found]
    ranks = sorted({step.rank for step in products})
    rank = f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}" if ranks else ""
    kind = "DoRA" if any(step.magnitude for step in products) else "LoRA"
    names = dict.fromkeys(name.removesuffix(".weight").rpartition(".")[2] for name, _ in found)
    whole = [name for name, steps in merged.items() if any(isinstance(step, Trained) for step in steps)]
    return "; ".join(
        [
            *([f"{kind} of rank {rank} in {len(products)} matrices ({', '.join(names)})"] if products else []),
            *([f"trained values in {len(whole)} tensors"] if whole else []),
        ]
    )
