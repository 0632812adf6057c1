"""`surgeon preview`: what a plan would do to a base, from headers and config alone."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from surgeon.apply.job import twins_in
from surgeon.apply.layer_choice import measured_layers
from surgeon.apply.models import check_models, models_of_plan, tensors_taken
from surgeon.apply.proofs import NOTHING_TO_PROVE, Proof, known_proof, prove
from surgeon.apply.vocabulary import Vocabularies, vocabularies_of
from surgeon.blueprint.draft import Blueprint, Layer, Output
from surgeon.blueprint.measured import MeasuredLayers
from surgeon.blueprint.recipes import Predicted, Prompted
from surgeon.blueprint.shards import MAX_NEW_SHARD_BYTES, Shard, group_by_layer, is_unchanged, lay_out
from surgeon.checkpoint.card_metadata import metadata_of
from surgeon.checkpoint.folder import MOST_AHEAD, CheckpointFolder
from surgeon.checkpoint.header import DTYPE_BITS, TensorInfo
from surgeon.checkpoint.hub import locate_adapter, remote_folder
from surgeon.checkpoint.own_code import OwnCode, has_own_code
from surgeon.checkpoint.peft_folder import AdapterFolder
from surgeon.checkpoint.tokenizer_files import MeasuredText
from surgeon.common.formatting import count, size, span
from surgeon.common.json_results import plain
from surgeon.common.promises import PROMISE_STYLES
from surgeon.common.tables import FittedTable
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import Anatomy, without_a_place
from surgeon.families.anatomy_cache import keep, recalled
from surgeon.families.dissect import dissect
from surgeon.families.family import OWN_CONFIG
from surgeon.families.format_depth import other_scale
from surgeon.families.periods import broken_pattern
from surgeon.manifest.card import layer_runs
from surgeon.manifest.lineage import Lineage
from surgeon.manifest.manifest import MANIFEST_FILE
from surgeon.manifest.reading import manifest_of
from surgeon.plan.plan import LoadedPlan, draw, parse_plan
from surgeon.plan.shipped import load_named


@dataclass(frozen=True)
class Preview:
    """What a plan would do to a base, from headers and config alone.

    Parameters are counts of numbers; tied embeddings count once. Bytes are of tensor data; `bytes_holes` is
    the part of the output that is zeros and takes no room on disk, `bytes_unchanged` that in shards which are the
    base's byte for byte: with `link` nothing of it is written. `peak_memory` is an estimate in bytes.
    """

    plan: LoadedPlan
    blueprint: Blueprint
    shards: tuple[Shard, ...]
    model_type: str
    parameters_before: int
    parameters_after: int
    parameters_new: int
    parameters_trainable: int
    bytes_to_read: int
    bytes_to_write: int
    bytes_holes: int
    bytes_unchanged: int
    peak_memory: int
    notes: tuple[str, ...]
    vocabularies: Vocabularies = field(default_factory=Vocabularies)
    # What was measured of the base's layers, by the operation that takes some out.
    layers: Mapping[int, MeasuredLayers] = field(default_factory=dict)
    link: bool = False
    proof: Proof = NOTHING_TO_PROVE

    @property
    def notes_on_it(self) -> tuple[str, ...]:
        """The notes but for the one that only matters where the output is pushed, which `surgeon push` shows."""
        return tuple(note for note in self.notes if note != _NO_LICENSE)

    def __repr__(self) -> str:
        layers = f"{sum(e.base is not None for e in self.blueprint.layers)} → {len(self.blueprint.layers)} layers"
        return (
            f"Preview({self.model_type}, {layers}, {self.parameters_before:,} → {self.parameters_after:,} parameters,"
            f" {self.parameters_new:,} new, promise {self.blueprint.promise!r})"
        )

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`."""
        blueprint = self.blueprint
        return {
            "model_type": self.model_type,
            "native": blueprint.native,
            "promise": blueprint.promise,
            "proof": self.proof.to_json(),
            "operations": [
                {
                    "op": r.op,
                    "matched": r.matched,
                    "promise": r.claim.promise,
                    "reason": r.claim.reason,
                    "trains": r.trains,
                }
                for r in blueprint.operations
            ],
            "layers": [
                {
                    "layer": e.index,
                    "base": e.base,
                    "init": e.init or None,
                    "sources": list(e.sources),
                    "grafts": [graft.text for graft in e.grafts],
                }
                for e in blueprint.layers
            ],
            "parameters": {
                "before": self.parameters_before,
                "after": self.parameters_after,
                "new": self.parameters_new,
                "trainable": self.parameters_trainable,
            },
            "bytes": {
                "read": self.bytes_to_read,
                "written": self.bytes_to_write,
                "holes": self.bytes_holes,
                "unchanged": self.bytes_unchanged,
                "linked": self.bytes_unchanged if self.link else 0,
            },
            "peak_memory": self.peak_memory,
            "shards": [{"file": s.file, "bytes": s.nbytes, "new": s.twin is None} for s in self.shards],
            "notes": list(self.notes),
            "texts": plain(self.measured),
        }

    @property
    def measured(self) -> list[MeasuredText]:
        """What a growth of the vocabulary makes of texts."""
        return [text for grown in self.vocabularies.facts.values() for text in grown.measured]


# What a process that only moves bytes takes, interpreter included.
_STREAMING_MEMORY = 90_000_000

_TORCH_MEMORY = 450_000_000
_NO_LICENSE = "no licence known: the base's README.md names none, so the card says unknown (`surgeon push --license`)"


def preview(
    plan: str | Path | LoadedPlan,
    base: str | Path,
    *,
    overrides: Sequence[str] = (),
    revision: str | None = None,
    link: bool = False,
    trust_remote_code: bool = False,
) -> Preview:
    """Show what `apply` would do (with `link`: link what it can), reading headers and config only.

    `plan` is a file, the name of a shipped plan, or what `parse_plan` made of a text, with values of it replaced by
    `overrides` (`operations.0.init.reg=0.1`); `base` a folder or a Hub id (whose weights are not downloaded). Raises
    BadInput for everything `apply` would refuse before writing.
    """
    loaded = loaded_plan(plan, overrides)
    folder = open_headers(base, revision=revision, trust_remote_code=trust_remote_code)
    models = models_of_plan(loaded, weights=False)
    return preview_of(loaded, folder, adapters_of_plan(loaded), models, recall=True, link=link)


def open_headers(base: str | Path, *, revision: str | None, trust_remote_code: bool) -> CheckpointFolder:
    """A base, given as a folder or a Hub id, for whoever reads no byte of its weights. Raises BadInput."""
    if Path(base).exists():
        return CheckpointFolder.open(Path(base), trust_remote_code=trust_remote_code)
    return remote_folder(str(base), revision, trust_remote_code=trust_remote_code)


def loaded_plan(plan: str | Path | LoadedPlan, overrides: Sequence[str] = ()) -> LoadedPlan:
    """The plan with `overrides` in it: a file, the name of a shipped plan, or one parsed already. Raises BadInput."""
    if not isinstance(plan, LoadedPlan):
        return load_named(plan, overrides)
    return parse_plan(plan.text, source=plan.source, overrides=overrides) if overrides else plan


def preview_of(
    loaded: LoadedPlan,
    folder: CheckpointFolder,
    adapters: Mapping[str, AdapterFolder],
    models: Mapping[str, CheckpointFolder],
    *,
    max_shard_bytes: int = MAX_NEW_SHARD_BYTES,
    recall: bool = False,
    link: bool = False,
) -> Preview:
    """The preview of a plan on an opened base; `adapters` and `models` are what else it takes. Raises BadInput.

    With `recall`, what an earlier preview proved of this base and plan is not proven again: for what writes nothing.
    """
    if folder.manifest is not None:
        # The output's lineage will hold the base's surgeries: what cannot be read is refused before any work.
        Lineage.of(manifest_of(folder), file=str(folder.path / MANIFEST_FILE))
    anatomy = (recalled if recall else dissect)(folder.config, folder.tensors, folder.own)
    known = {name: adapter.facts for name, adapter in adapters.items()}
    vocabularies = vocabularies_of(loaded.plan.operations, loaded.source, folder, anatomy)
    layers = measured_layers(loaded.plan.operations, loaded.source, folder, anatomy)
    blueprint = draw(loaded, anatomy, folder.config, known, vocabularies.facts, layers)
    check_models(blueprint, folder, models)
    check_shapes(blueprint, anatomy, folder.own)
    proof = known_proof(blueprint, anatomy, folder.config, folder.own)
    if not recall or proof.how != "cached":
        proof = prove(blueprint, anatomy, folder.config, folder.own)
    if recall:
        keep(anatomy, folder.config, folder.tensors, folder.own)
    shards = lay_out(blueprint.outputs, folder.tensors, max_new_shard_bytes=max_shard_bytes)
    texts = texts_of(blueprint, loaded)
    notes = [*folder.notes, *([without_a_place(anatomy.idle)] if anatomy.idle else [])]
    notes.append(anatomy.derivation.evidence)
    if folder.own is not None:
        notes.append(f"the base's own code goes along as it is: {', '.join(sorted(folder.own.files))}")
    bases = [layer.base for layer in blueprint.layers]
    before = (folder.config, len(blueprint.layer_of_base)) if blueprint.dropped else None
    broken = broken_pattern(blueprint.config, bases, before) if blueprint.native else None
    whole = "take out whole periods to keep it" if blueprint.dropped else "`where: {every_period: 1}` keeps the pattern"
    notes += [f"{broken}; {whole}"] if broken is not None else []
    scaled = other_scale(blueprint.config) if blueprint.native else None
    notes += [scaled] if scaled is not None else []
    notes += [f"the base is run on {printable(str(path))}" for path in texts.values()]
    notes += _of_vocabularies(vocabularies, folder)
    if any(isinstance(each, Prompted) for each in blueprint.recipes()):
        notes.append("the base is run on the prompts of the routers")
        if not any(name.startswith("tokenizer") for name in folder.side_files):
            raise BadInput(f"{folder.source.shown}: no tokenizer, and routers are made of prompts; add its files")
    if metadata_of(folder).license is None:
        notes.append(_NO_LICENSE)
    outputs = blueprint.outputs
    new = sum(_new_numbers(output, folder) for output in outputs if output.new)
    # Copies of old layers' parts that new layers read, and no training changes.
    fixed = sum(_new_numbers(output, folder) for output in outputs if output.new and output.kept.covered)
    after = sum(output.numel for output in outputs)
    trains_all = any(record.trains == "all" for record in blueprint.operations)
    headers = twins_in(folder, shards)
    copied = {o.name: None if o.whole is None else folder.tensors[o.whole] for o in outputs}
    unchanged = [
        shard
        for shard in shards
        if shard.file in headers
        and is_unchanged(shard, [copied[output.name] for output in shard.outputs], headers[shard.file])
    ]
    # `apply` proves again what a preview knows from the cache.
    runs_twin = proof.how != "none"
    return Preview(
        plan=loaded,
        blueprint=blueprint,
        shards=shards,
        model_type=anatomy.family.model_type,
        parameters_before=sum(info.numel for info in folder.tensors.values()),
        parameters_after=after,
        parameters_new=new,
        parameters_trainable=after if trains_all else new - fixed,
        bytes_to_read=sum(folder.tensors[name].nbytes for name in blueprint.sources)
        + sum(models[m].tensors[name].nbytes for m, taken in tensors_taken(blueprint).items() for name in taken),
        bytes_to_write=sum(output.nbytes for output in outputs if not output.is_hole),
        bytes_holes=sum(output.nbytes for output in outputs if output.is_hole),
        bytes_unchanged=sum(shard.nbytes for shard in unchanged),
        peak_memory=_peak_memory(blueprint, runs_twin=runs_twin),
        notes=tuple(notes),
        vocabularies=vocabularies,
        layers=layers,
        link=link,
        proof=proof,
    )


def proved(shown: Preview, folder: CheckpointFolder) -> Preview:
    """A preview whose promise is proven on a twin, where it was not yet. Raises BadInput where it does not hold."""
    if shown.proof.how != "promised":
        return shown
    anatomy = dissect(folder.config, folder.tensors, folder.own)
    return replace(shown, proof=prove(shown.blueprint, anatomy, folder.config, folder.own))


def _new_numbers(output: Output, folder: CheckpointFolder) -> int:
    """How many numbers of a new tensor are new. A part of a new layer is a copy of an old one's."""
    kept = output.kept
    numbers = sum(span.nbytes for span in kept.spans) * 8 // DTYPE_BITS[output.recipe.dtype]
    return output.numel - min(numbers, sum(folder.tensors[name].numel for name in kept.tensors))


# Tokenizer files of other programs, which hold a vocabulary of their own.
_OTHER_VOCABULARIES = (".model", ".tiktoken", "tekken.json")


def _of_vocabularies(vocabularies: Vocabularies, folder: CheckpointFolder) -> list[str]:
    """Of a vocabulary that grows, the files that do not grow with it."""
    others = [name for name in folder.side_files if name.endswith(_OTHER_VOCABULARIES)] if vocabularies.facts else []
    return [
        f"{printable(name)} is carried along as it is: what reads it in place of tokenizer.json knows no new token"
        for name in others
    ]


def check_shapes(blueprint: Blueprint, anatomy: Anatomy, own: OwnCode | None = None) -> None:
    """Where widths changed: the config must ask for just the tensors that there will be. Raises BadInput."""
    if blueprint.resized:
        planned = [TensorInfo(o.name, o.recipe.dtype, o.recipe.shape, "", 0, 0) for o in blueprint.outputs]
        from surgeon.families.skeleton import build

        try:
            if blueprint.native and own is None:
                build(blueprint.config)
            dissect(blueprint.config, {info.name: info for info in planned}, own)
        except BadInput as error:
            shown = printable(anatomy.family.model_type)
            advice = _groups_that_fit(blueprint, anatomy) or "choose other widths"
            why = str(error).removesuffix(f"; {OWN_CONFIG}")
            raise BadInput(f"{shown}: a model of these widths cannot be described; {advice}: {why}") from error


# Groups of heads that are tried where a plan's number does not fit.
_MOST_GROUPS = 4096


def _groups_that_fit(blueprint: Blueprint, anatomy: Anatomy) -> str:
    """Where heads were added, in a number that transformers does not take: the fewest new groups that it takes.

    The rule of its classes is that heads divide the hidden size, also where the config says `head_dim`; what is named
    was tried. Empty where nothing is known.
    """
    from surgeon.families.skeleton import build

    sizes, config = anatomy.sizes, blueprint.config
    if not blueprint.native or config.get("num_attention_heads") == sizes.heads:
        return ""
    each = sizes.heads // sizes.kv_heads
    for groups in range(1, min(_MOST_GROUPS, sizes.hidden // each) + 1):
        heads = sizes.heads + groups * each
        if sizes.hidden % heads == 0:
            fitting = {"num_attention_heads": heads, "num_key_value_heads": sizes.kv_heads + groups}
            with contextlib.suppress(BadInput):
                build({**config, **fitting})
                return f"write `groups: {groups}` in `widen_attention` ({heads} heads), the fewest that fit"
    return ""


def texts_of(blueprint: Blueprint, loaded: LoadedPlan) -> dict[str, Path]:
    """The texts that the plan has the base run on, by their names in the plan; BadInput where one is missing."""
    found: dict[str, Path] = {}
    for coupling in blueprint.couplings.values():
        if coupling.support is not None:
            path = Path(loaded.source).parent / coupling.support.text
            if not path.is_file():
                raise BadInput(
                    f"{printable(str(path))}: no such text, which `support: activations` of the plan asks for"
                )
            found[coupling.support.text] = path
    return found


def adapters_of_plan(loaded: LoadedPlan) -> dict[str, AdapterFolder]:
    """The PEFT adapters that the plan imports, opened, by their names in the plan."""
    opened: dict[str, AdapterFolder] = {}
    for name in (name for operation in loaded.plan.operations for name in operation.adapters):
        beside = Path(loaded.source).parent / name
        path = beside if beside.exists() else Path(name)
        if path.exists():
            opened[name] = AdapterFolder.open(path, id=path.resolve().name)
        else:
            located = locate_adapter(name)
            opened[name] = AdapterFolder.open(located.path, id=located.repo_id or name, revision=located.revision)
    return opened


def _peak_memory(blueprint: Blueprint, *, runs_twin: bool) -> int:
    """An estimate, in bytes: the interpreter, and the largest working set of a recipe that computes, or a twin's."""
    computed = [output.recipe for output in blueprint.outputs if output.computed]
    if not computed:
        return _STREAMING_MEMORY if blueprint.native and not runs_twin else _TORCH_MEMORY
    # Two sources and a result in float32 and one in the tensor's dtype; transport adds the cost (rows × rows),
    # the lower source after T_in, and the map of the attention output that stays for gate and up.
    largest = max(recipe.working_set for recipe in computed)
    # Maps of whole heads are a number for each pair of heads.
    rows = [c.stop - c.start for c in blueprint.couplings.values() if c.whole_heads is None]
    maps = sorted((4 * n * n for n in rows), reverse=True)
    # One layer's sources, read ahead, and finished tensors that wait to be written.
    new = [[o for o in layer if o.computed] for layer in group_by_layer(blueprint.outputs)]
    ahead = min(2 * max(sum(o.nbytes for o in layer) for layer in new), MOST_AHEAD)
    waiting = ahead + 3 * max(o.nbytes for layer in new for o in layer)
    # U and the network of every module that is predicted are kept from one new layer to the next.
    networks = {r.network: r for r in computed if isinstance(r, Predicted)}
    kept = sum(recipe.network_memory for recipe in networks.values())
    return _TORCH_MEMORY + largest + kept + (2 * maps[0] if maps else 0) + waiting


def preview_view(preview: Preview, base: str) -> RenderableType:
    """The new layer list beside the old, what each operation promises, and what it costs."""
    blueprint = preview.blueprint
    return Group(
        Text.assemble((printable(base), "bold"), f" ({printable(preview.model_type)})"),
        *(Text(f"note: {printable(note)}", style="yellow") for note in preview.notes_on_it),
        Text(),
        _stack(blueprint),
        Text(),
        _operations(blueprint),
        *_proof(preview),
        Text(),
        *_measured(preview),
        _budget(preview),
    )


def _stack(blueprint: Blueprint) -> FittedTable:
    """Old and new layers side by side, from the top of the stack down; runs of kept layers take one row."""
    table = FittedTable(names=4)
    table.add_column("base", style="cyan")
    table.add_column("")
    table.add_column("output")
    table.add_column("", number=False)
    gone = sorted(layer for dropped in blueprint.dropped.values() for layer in dropped)
    above = len(blueprint.layer_of_base)
    for run in reversed(layer_runs(blueprint.layers)):
        first, last = run[0], run[-1]
        if last.base is not None:
            _add_gone(table, [layer for layer in gone if last.base < layer < above])
            above = first.base if first.base is not None else above
        if first.base is not None and last.base is not None:
            table.add_row(span(first.base, last.base), "──▶", span(first.index, last.index), _kept(first))
        else:
            made = Text(span(first.index, last.index), style="green")
            table.add_row("", Text("✚", style="bold green"), made, _made(run))
    _add_gone(table, [layer for layer in gone if layer < above])
    return table


def _add_gone(table: FittedTable, layers: list[int]) -> None:
    """A row for layers of the base that were taken out between two runs."""
    if layers:
        table.add_row(
            span(layers[0], layers[-1]), Text("✕", style="bold yellow"), "", Text("taken out", style="yellow")
        )


def _kept(layer: Layer) -> Text:
    return _with_grafts(Text(layer.init, style="yellow") if layer.init else Text("kept", style="dim"), layer)


def _with_grafts(text: Text, layer: Layer) -> Text:
    for graft in layer.grafts:
        text.append(f" + {graft.text}", style="green")
        origin = "the base's" if graft.operation is None else f"operation {graft.operation}"
        text.append(f" ({origin})", style="dim")
    return text


def _made(run: list[Layer]) -> Text:
    first, last = run[0], run[-1]
    text = Text(f"new: {first.init}", style="green")
    if first.sources and len(run) == 1:
        text.append(f" of {' and '.join(str(s) for s in first.sources)}")
    elif first.sources and last.sources:
        text.append(f" of {span(first.sources[0], last.sources[-1])}")
    if first.operation is not None:
        text.append(f"  (operation {first.operation})", style="dim")
    return _with_grafts(text, first)


def _operations(blueprint: Blueprint) -> FittedTable:
    table = FittedTable("operation", "matched", "promise", "why", "trains")
    for number, record in enumerate(blueprint.operations):
        claim = record.claim
        table.add_row(
            f"{number} {record.op}", record.matched, PROMISE_STYLES[claim.promise], claim.reason, record.trains
        )
    return table


def _proof(preview: Preview) -> list[RenderableType]:
    """How the promise of exactness is known; nothing where the plan as a whole promises less."""
    if not preview.proof.text:
        return []
    return [Text.assemble(PROMISE_STYLES["exact"], f": {preview.proof.text}")]


def _measured(preview: Preview) -> list[RenderableType]:
    """What a growth of the vocabulary makes of texts: tokens a word, and documents that tokenise as before."""
    if not preview.measured:
        return []
    table = FittedTable("use", "text")
    for heading in ("tokens a word", "now", "documents", "as before"):
        table.add_column(heading)
    for text in preview.measured:
        before, after = text.fertility
        counts = (f"{text.documents:,}", f"{text.unchanged:,}")
        table.add_row(text.use, printable(text.text), f"{before:.3f}", f"{after:.3f}", *counts)
    return [table, Text()]


def _links(nbytes: int) -> str:
    if not nbytes:
        return "nothing: every shard of the base changes, as tensors in it are renumbered, widened or left out"
    return f"{size(nbytes)}, hard links to the base's files: one file under two names, which becomes read-only"


def _budget(preview: Preview) -> FittedTable:
    table = FittedTable(headings=False)
    grown = preview.parameters_after / preview.parameters_before
    table.add_row("parameters", f"{count(preview.parameters_before)} → {count(preview.parameters_after)}, ×{grown:.3g}")
    table.add_row("new", count(preview.parameters_new))
    table.add_row("trainable", count(preview.parameters_trainable))
    holes = f" and {size(preview.bytes_holes)} of zeros as holes" if preview.bytes_holes else ""
    table.add_row("reads", size(preview.bytes_to_read))
    linked = preview.bytes_unchanged if preview.link else 0
    table.add_row("writes", f"{size(preview.bytes_to_write - linked)}{holes}, {len(preview.shards)} shards")
    if preview.link:
        table.add_row("links", _links(linked))
    elif preview.bytes_unchanged:
        unchanged = f"of that in shards that are the base's: {size(preview.bytes_unchanged)}"
        table.add_row("", f"{unchanged}; reflinked, not written, where the file system can, hard-linked with --link")
    table.add_row("peak memory", f"about {size(preview.peak_memory)}")
    native = "native: loads without custom code"
    if has_own_code(preview.blueprint.config):
        native = "the base's own class and code: loads with trust_remote_code=True"
    elif not preview.blueprint.native:
        native = "loads with trust_remote_code=True"
    table.add_row("output", native)
    return table
