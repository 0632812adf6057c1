"""`drop_layers`: remove layers, by list or by how little they add on a text.

Criteria: block influence BI_l = 1 − E cos(x_l, x_{l+1}) (ShortGPT, Men et al. 2024); the angular distance of a block of
n layers, arccos(cos(x_l, x_{l+n})) / π (Gromov et al. 2024); the loss itself, greedily; or LaCo (Yang et al. 2024),
which merges layers into the one below: θ_l + Σ_k (θ_{l+k} − θ_l). For a single layer that is θ_l + (θ_{l+1} − θ_l) =
θ_{l+1}: nothing is merged, and layer l is deleted. Removing layers that are still silent changes no output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from surgeon.anatomy.anatomy import Anatomy
from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft
from surgeon.blueprint.recipes import Constant, Recipe, Summed
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.header import DTYPE_BITS
from surgeon.common.formatting import show_layers
from surgeon.edits.losses import Finite, TextLoss, check_first, claim_of_cost, said_of
from surgeon.errors import BadInput
from surgeon.models.layer_choice import By, LayersOut
from surgeon.operations.operation import Operation, Paper, TrainingDefaults
from surgeon.operations.prepare import Facts, OpenedBase, digest_of_file
from surgeon.operations.selectors import Index, select_layers
from surgeon.operations.sites import check_grafts

# How many bytes of a tensor are compared at once.
_BYTES = 1 << 20
_Layer = Annotated[int, Field(ge=0)]
_Number = Annotated[str, Field(pattern=r"^[0-9]{1,4}$")]
_WORDS = {
    "block_influence": "least block influence",
    "angular": "least angular distance",
    "loss": "least loss",
}


class LayerLoss(TextLoss):
    """The losses without the layers; `scores` are the values by which layers were chosen, in order.

    For `angular` these are of blocks, for `laco` of the places where layers were merged.
    """

    scores: list[Finite]


class LayerFacts(Facts):
    """The base's layers that an operation removes, and what weights and text show about them.

    `layers` are the removed layers, where they were `chosen` by a measurement. `merged` gives, for each layer that
    others are merged into, the factor of each layer in the sum; `silent` are layers of the base that add exactly
    nothing.
    """

    layers: list[_Layer] = []  # noqa: RUF012  # pydantic copies them
    chosen: bool = False
    merged: dict[_Number, dict[_Number, int]] = {}  # noqa: RUF012
    silent: list[_Layer] = []  # noqa: RUF012
    text: LayerLoss | None = None

    @property
    def becomes(self) -> dict[int, dict[int, int]]:
        """Return, for each layer that others are merged into, the factor of each layer in the sum."""
        return {int(layer): {int(of): by for of, by in made.items()} for layer, made in self.merged.items()}


class DropLayers(Operation):
    """Remove layers from the stack: the ones listed, or the ones that matter least on a text."""

    papers = (
        Paper(
            "men2024shortgpt",
            "Men, Xin and others",
            "ShortGPT: Layers in Large Language Models are More Redundant Than You Expect",
            2024,
            "2403.03853",
        ),
        Paper(
            "gromov2024unreasonable",
            "Gromov, Andrey and Tirumala, Kushal and Shapourian, Hassan and Glorioso, Paolo and Roberts, Daniel A.",
            "The Unreasonable Ineffectiveness of the Deeper Layers",
            2024,
            "2403.17887",
        ),
        Paper(
            "yang2024laco",
            "Yang, Yifei and Cao, Zouying and Zhao, Hai",
            "LaCo: Large Language Model Pruning via Layer Collapse",
            2024,
            "2402.11187",
        ),
    )
    training = TrainingDefaults("ours, no paper's: every weight of what is left", lr=5e-5)
    examples = ({"layers": [1]},)
    facts = LayerFacts
    way_on = "leave one of these layers in, or take out others"

    op: Literal["drop_layers"]
    layers: Annotated[list[Index] | None, Field(min_length=1, description="the layers that go, instead of `count`")] = (
        None
    )
    count: Annotated[int | None, Field(ge=1, description="how many go, chosen `by` what `text` shows")] = None
    by: Annotated[
        By | None,
        Field(
            description="block_influence (default): the layers that turn the stream least; angular: the block"
            " of `count` layers that turns it least; loss: greedily, the least loss; laco: merged into the layer"
            " below"
        ),
    ] = None
    text: Annotated[
        str | None,
        Field(description="text to measure on, seen from the plan: .jsonl with a text a line, or plain"),
    ] = None
    window: Annotated[int, Field(ge=2, le=2**20, description="tokens that are read at once")] = 128
    windows: Annotated[int, Field(ge=1, le=2**20, description="how many windows of the text are read")] = 16
    candidates: Annotated[
        int | None, Field(ge=1, description="of `loss`: layers of least influence tried at each step; default 4")
    ] = None
    merge: Annotated[
        int | None,
        Field(ge=1, description="of `laco`: how many layers at most go into the one below; default 2; 1 deletes it"),
    ] = None
    threshold: Annotated[
        float | None,
        Field(
            ge=-1,
            le=1,
            description="of `laco`: cosine of last states with the base's above which a merge is kept; default 0.6",
        ),
    ] = None
    interval: Annotated[
        int | None, Field(ge=1, description="of `laco`: layers from one merge down to the next; default 1")
    ] = None
    range: Annotated[
        list[Index] | None,
        Field(min_length=2, max_length=2, description="of `laco`: the lowest and the highest layer that may take part"),
    ] = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        """Check that layers are chosen in exactly one way, with the fields of that way only. Raises ValueError."""
        if (self.layers is None) == (self.count is None):
            raise ValueError("give either `layers` (which go) or `count` (how many, chosen on `text`)")
        if self.count is not None and self.text is None:
            raise ValueError("`count` needs `text`: which layers matter least is measured on it")
        if self.layers is not None and self.by is not None:
            raise ValueError(f"`by: {self.by}` chooses layers; with `layers` it has no meaning")
        if self.candidates is not None and self.by != "loss":
            raise ValueError("`candidates` is of `by: loss` only")
        given = (self.merge, self.threshold, self.interval, self.range)
        if given != (None,) * 4 and self.by != "laco":
            raise ValueError("`merge`, `threshold`, `interval` and `range` are of `by: laco` only")
        if self.range is not None and self.range[0] >= self.range[1]:
            raise ValueError(f"`range: {self.range}`: give [lowest, highest], two layers at least")
        return self

    def prepare(self, base: OpenedBase) -> LayerFacts:
        """Find the base's silent layers; on a text, choose the layers to drop, or measure the cost of the listed ones.

        Raises BadInput where the weights are not at hand, or another operation comes first.
        """
        base.need_weights("which layers are silent, and what a loss is without some")
        silent = silent_layers(base.folder, base.anatomy)
        if self.text is None:
            return LayerFacts(silent=silent)
        check_first(base, "layers")
        # This import loads torch and transformers.
        from surgeon.models.depth import Depth

        path, anatomy = base.text(self.text), base.anatomy
        kinds = [anatomy.pattern[layer] for layer in range(anatomy.sizes.layers)]
        depth = Depth.of(
            base.folder,
            path,
            kinds,
            vocabulary=anatomy.sizes.vocabulary,
            window=self.window,
            windows=self.windows,
            listener=base.listener,
        )
        out = self._layers_out()
        choice = depth.choose(out)
        return LayerFacts(
            layers=[] if out.layers else list(choice.layers),
            chosen=not out.layers,
            merged={str(layer): {str(of): by for of, by in made.items()} for layer, made in choice.merged.items()},
            silent=silent,
            text=LayerLoss(
                text=self.text,
                sha256=digest_of_file(path),
                tokens=depth.predictions,
                before=depth.before,
                after=choice.loss,
                scores=list(choice.scores),
            ),
        )

    def _layers_out(self) -> LayersOut:
        """Return what to measure, with defaults for what the plan leaves out."""
        return LayersOut(
            layers=tuple(sorted(set(self.layers or ()))),
            count=self.count or 0,
            by=self.by or "block_influence",
            candidates=self.candidates or 4,
            # As in the authors' notebook for Baichuan-13B: three layers become one.
            merge=self.merge or 2,
            threshold=0.6 if self.threshold is None else self.threshold,
            interval=self.interval or 1,
            range=None if self.range is None else (self.range[0], self.range[1]),
        )

    def edit(self, draft: Draft, facts: LayerFacts | None) -> OperationRecord:
        """Remove the layers, or merge them into the layers below."""
        number, facts = draft.number, facts or LayerFacts()
        total = len(draft.layers)
        gone = self._gone(facts, total)
        merged = self._merged(draft, facts, gone)
        check_grafts(draft, [*gone, *merged])
        silent = not merged and all(_is_silent(draft, layer, facts.silent) for layer in gone)
        for layer, made_of in _recipes(draft, merged).items():
            home = draft.layers[layer]
            home.tensors, home.init = made_of, "replaced" if layer in _replaced(merged) else "merged"
            home.rewritten |= dict.fromkeys(made_of, number)
        draft.drop(gone, operation=number)
        return OperationRecord(
            op=self.op,
            matched=self._matched(gone, merged, total, facts.text),
            claim=_claim(silent, len(merged) > len(_replaced(merged)), facts.text),
            trains="new" if silent else "all",
        )

    def _gone(self, facts: LayerFacts, total: int) -> list[int]:
        """Return the layers to remove, ascending.

        Raises BadInput where they are not known, do not exist, or are all layers.
        """
        if self.layers is None:
            if not facts.chosen or not facts.layers:
                raise BadInput("which layers go is not known: it is measured on the base's own weights")
            gone = select_layers(list(facts.layers), total)
        else:
            gone = select_layers(self.layers, total)
        if len(gone) >= total:
            raise BadInput(f"all {total} layers would go; at least one must stay")
        return gone

    def _merged(self, draft: Draft, facts: LayerFacts, gone: Sequence[int]) -> Mapping[int, Mapping[int, int]]:
        """Return, for each layer that others are merged into, the factor of each layer in the sum; else an empty dict.

        Raises BadInput where recorded merges do not fit the model.
        """
        if self.by != "laco":
            return {}
        found = facts.becomes
        named = {layer for made in found.values() for layer in made} | found.keys()
        if not found or max(named) >= len(draft.layers) or found.keys() & set(gone):
            raise BadInput("what was merged does not fit this model; was the manifest edited?")
        return found

    def _matched(
        self, gone: Sequence[int], merged: Mapping[int, Mapping[int, int]], total: int, text: LayerLoss | None
    ) -> str:
        """Return words for the manifest: the layers, how they were chosen, and the loss."""
        how = _into(merged) if self.by == "laco" else ""
        if self.count is not None and self.by != "laco":
            how = f", {_WORDS[self.by or 'block_influence']}"
        return f"{show_layers(list(gone))} of {total}{how}{said_of(text)}"


def _replaced(merged: Mapping[int, Mapping[int, int]]) -> dict[int, int]:
    """Return the layers that a merge merely replaces by one other layer, as {layer: other layer}."""
    alone = {layer: next(iter(made)) for layer, made in merged.items() if len(made) == 1}
    return {layer: of for layer, of in alone.items() if merged[layer][of] == 1}


def _into(merged: Mapping[int, Mapping[int, int]]) -> str:
    """Return words on what LaCo makes of the layers that stay: which are merged, and which are replaced by another."""
    replaced = _replaced(merged)
    real = sorted(merged.keys() - replaced.keys())
    said = [f", merged into {show_layers(real)}"] if real else []
    if replaced:
        which = ", ".join(f"{layer} by {of}" for layer, of in sorted(replaced.items()))
        said.append(
            f"; replaced: layer {which} (θ_l + (θ_l+1 − θ_l) is θ_l+1: nothing is merged there, the lower layer is what"
            " is deleted)"
        )
    return "".join(said)


def _is_silent(draft: Draft, layer: int, silent: Sequence[int]) -> bool:
    """Return whether a draft's layer adds exactly nothing: by the base's weights, or by the plan's constants."""
    home, values = draft.layers[layer], draft.kind_of(layer).silence
    if home.base is not None and not home.rewritten:
        return home.base in silent
    recipes = {suffix: home.tensors[suffix] for suffix in values}
    return bool(recipes) and all(
        isinstance(recipe, Constant) and recipe.value == values[suffix] for suffix, recipe in recipes.items()
    )


def _recipes(draft: Draft, merged: Mapping[int, Mapping[int, int]]) -> dict[int, dict[str, Recipe]]:
    """Return the tensors of the layers that others are merged into; quantised ones in full precision."""
    found: dict[int, dict[str, Recipe]] = {}
    for layer, made_of in merged.items():
        draft.open(layer)
        terms = {of: draft.opened(of) for of in made_of}
        factors = tuple(made_of.values())
        found[layer] = {
            suffix: Summed(tuple(terms[of][suffix] for of in made_of), factors)
            for suffix in draft.layers[layer].tensors
        }
    return found


def _claim(silent: bool, merged: bool, text: LayerLoss | None) -> Claim:
    """Return the claim: exact where all removed layers are silent, else none, with the cost where it was measured."""
    if silent:
        return Claim("exact", "the layers that go add exactly zero to the residual stream: what writes to it is zero")
    what = "what the layers added is gone" if not merged else "a layer is not linear in its weights"
    return claim_of_cost(what, text)


def silent_layers(base: CheckpointFolder, anatomy: Anatomy) -> list[int]:
    """Return the layers that add exactly zero, by the bytes of their tensors that write to the residual stream.

    Raises BadInput where the tensors cannot be read.
    """
    found: list[int] = []
    for index, tensors in enumerate(anatomy.layers):
        kind = anatomy.kinds[anatomy.kind_of[index]]
        plain = not kind.packed and not anatomy.grafted[index]
        if kind.silence and plain and all(_holds(base, tensors[s].name, value) for s, value in kind.silence.items()):
            found.append(index)
    return found


def _holds(base: CheckpointFolder, name: str, value: float) -> bool:
    """Return whether every element of a tensor has this value, by its bytes."""
    info = base.tensors[name]
    width = DTYPE_BITS[info.dtype] // 8
    pattern = Constant(value, info.dtype, (_BYTES // width,)).data
    # First a few bytes, which suffice to exclude a layer that is not silent.
    ends = [64, *range(_BYTES, info.nbytes, _BYTES), info.nbytes]
    begin = 0
    for end in ends:
        end = min(end, info.nbytes)
        if bytes(base.read_part(name, slice(begin, end))) != pattern[: end - begin]:
            return False
        begin = end
    return True
