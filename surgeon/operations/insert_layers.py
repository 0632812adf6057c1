"""`insert_layers`: new layers between those of the base (OpT-DeUS, LLaMA PRO and the inits they compare).

With `zero_init` the projections that write to the residual stream are zero (in families with post-norms: the
scale of those norms), so that the grown model computes what the base computes, to the bit.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from surgeon.blueprint.draft import Claim, Draft, LayerDraft, OperationRecord, silence
from surgeon.blueprint.recipes import Average, Constant, Random, Recipe, Shuffled, TextSupport
from surgeon.errors import BadInput
from surgeon.families.family import Family, Part
from surgeon.operations.fusion import Flow, Heads, fuse_layers
from surgeon.operations.selectors import GapSelector, select_gaps, show, spread


class _Init(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _TransportInit(_Init):
    reg: Annotated[
        float,
        Field(gt=0, allow_inf_nan=False, description="entropic regularisation, in the unit of the cost"),
    ] = 0.06
    solver: Annotated[Literal["sinkhorn", "emd"], Field(description="entropic or exact transport")] = "sinkhorn"
    cost_scale: Annotated[
        Literal["none", "max", "mean"],
        Field(description="divide the cost by nothing (paper), its maximum, its mean"),
    ] = "none"
    rescale: Annotated[
        Literal["marginal", "paper"],
        Field(description="T times n, so that aligned rows are averages of rows (marginal); T as it is (paper)"),
    ] = "marginal"
    flow: Annotated[Flow, Field(description="which T_in each module takes (Tables 1 and 7)")] = "opt_deus"
    heads: Annotated[
        Heads,
        Field(description="align rows wherever they go (free) or whole attention heads, rotary pairs kept (blocks)"),
    ] = "free"
    max_iterations: Annotated[int, Field(ge=1, description="most Sinkhorn iterations")] = 10_000
    support: Annotated[
        Literal["weights", "activations"],
        Field(description="compare rows of weights, or what the modules put out on a text (needs a cost_scale)"),
    ] = "weights"
    text: Annotated[
        str | None,
        Field(min_length=1, description="for activations: a text or JSON-lines file, seen from the plan"),
    ] = None
    samples: Annotated[int, Field(ge=2, le=2**20, description="for activations: how many tokens of the text")] = 512
    window: Annotated[int, Field(ge=2, le=2**16, description="for activations: tokens in each sequence")] = 128

    @model_validator(mode="after")
    def _support_fits(self) -> Self:
        if self.support == "weights":
            given = sorted({"text", "samples", "window"} & self.model_fields_set)
            if given:
                raise ValueError(f"`{given[0]}` has a meaning with `support: activations` only")
            return self
        if self.text is None:
            raise ValueError("`support: activations` needs a `text`, on which the base is run")
        if self.cost_scale == "none":
            raise ValueError(
                "`support: activations` needs `cost_scale: max` or `mean`: distances of activations have another scale"
                " at every module and with every number of samples"
            )
        if self.heads == "blocks":
            raise ValueError("`heads: blocks` compares weights; it does not go with `support: activations`")
        return self

    def text_support(self) -> TextSupport | None:
        """Where the rows' activations come from; None where weights are compared."""
        return None if self.text is None else TextSupport(self.text, self.samples, self.window)

    def transport_settings(self) -> dict[str, object]:
        """Keyword arguments for `surgeon.transport.TransportSettings`."""
        return {
            "reg": self.reg,
            "solver": self.solver,
            "cost_scale": self.cost_scale,
            "rescale": self.rescale,
            "max_iterations": self.max_iterations,
        }


class OtFusion(_TransportInit):
    """The layers below and above, aligned by optimal transport and averaged (OpT-DeUS, Algorithm 1)."""

    kind: Literal["ot_fusion"]


class Shuffle(_TransportInit):
    """As ot_fusion, then the elements of every matrix in random order (Table 7's ablation)."""

    kind: Literal["shuffle"]


class AverageInit(_Init):
    """The plain average of the layers below and above."""

    kind: Literal["average"]


class CopyInit(_Init):
    """A copy of the layer below (LLaMA PRO; with `per_gap: p`, of the p layers below)."""

    kind: Literal["copy"]


class RandomInit(_Init):
    """Normal weights of the config's `initializer_range`, biases zero, norms the identity."""

    kind: Literal["random"]


Init = Annotated[OtFusion | AverageInit | CopyInit | RandomInit | Shuffle, Field(discriminator="kind")]


class InsertLayers(BaseModel):
    """New layers between those of the base: fused by optimal transport, averaged, copied or random."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    op: Literal["insert_layers"]
    where: Annotated[GapSelector, Field(description="the gaps to fill, each named by the layer below it")]
    count: Annotated[
        int | None,
        Field(
            ge=1,
            description="how many new layers in all; fewer than the gaps are spread evenly; default: all gaps",
        ),
    ] = None
    per_gap: Annotated[int, Field(ge=1, description="new layers in each gap (LLaMA PRO's p)")] = 1
    init: Init
    zero_init: Annotated[bool, Field(description="write nothing to the residual stream at birth")] = True

    def edit(self, draft: Draft, number: int) -> OperationRecord:
        """Insert the layers and say what was matched and what is promised."""
        gaps = self._gaps(len(draft.layers))
        self._check_gaps(gaps, draft)
        inserted = {gap: [self._layer(draft, number, gap, nth) for nth in range(self.per_gap)] for gap in gaps}
        draft.insert(inserted)
        after = f"after {'layer' if len(gaps) == 1 else 'layers'} {show(gaps)}"
        return OperationRecord(
            op=self.op,
            matched=f"{len(gaps) * self.per_gap} new layers, {after}",
            claim=self._claim(draft.anatomy.family, draft.anatomy.parts),
            trains="new",
        )

    def _gaps(self, layers: int) -> list[int]:
        gaps = select_gaps(self.where, layers)
        if self.count is None:
            return gaps
        if self.count % self.per_gap:
            raise BadInput(f"`count` {self.count} is not a multiple of `per_gap` {self.per_gap}")
        return spread(gaps, self.count // self.per_gap)

    def _check_gaps(self, gaps: list[int], draft: Draft) -> None:
        top = len(draft.layers) - 1
        if self.init.kind in ("ot_fusion", "average", "shuffle"):
            if self.per_gap > 1:
                raise BadInput(
                    f"`per_gap` {self.per_gap} with init {self.init.kind} would make equal layers; use copy or random"
                )
            if top in gaps:
                raise BadInput(
                    f"init {self.init.kind} needs a layer above; after the top layer {top} there is none: leave that"
                    " gap out of `where`, or use copy or random"
                )
        if self.init.kind == "copy" and gaps[0] + 1 < self.per_gap:
            raise BadInput(
                f"`per_gap` {self.per_gap} copies the {self.per_gap} layers below each gap; after layer {gaps[0]} there"
                f" are only {gaps[0] + 1}"
            )

    def _layer(self, draft: Draft, number: int, gap: int, nth: int) -> LayerDraft:
        below = draft.layers[gap]
        # Random draws are seeded by this label: it names the layer by the model as this operation found it.
        label = f"operations[{number}].after[{gap}].{nth}"
        sources: tuple[int, ...] = (gap, gap + 1)
        match self.init:
            case OtFusion() | Shuffle():
                parts = draft.anatomy.parts
                tensors = fuse_layers(
                    draft,
                    below=gap,
                    label=label,
                    flow=self.init.flow,
                    heads=self.init.heads,
                    settings=self.init.transport_settings(),
                    skip=self._silenced(draft.anatomy.family, parts),
                    support=self.init.text_support(),
                )
                if isinstance(self.init, Shuffle):
                    matrices = {part.suffix for part in parts if part.kind == "weight"}
                    tensors = {
                        suffix: Shuffled(recipe, f"{label}.{suffix}") if suffix in matrices else recipe
                        for suffix, recipe in tensors.items()
                    }
            case AverageInit():
                above = draft.layers[gap + 1]
                tensors = {suffix: Average(recipe, above.tensors[suffix]) for suffix, recipe in below.tensors.items()}
            case CopyInit():
                sources = (gap - self.per_gap + 1 + nth,)
                below = draft.layers[sources[0]]
                tensors = dict(below.tensors)
            case RandomInit():
                sources = ()
                tensors = _random_tensors(draft, gap, label)
        if self.zero_init:
            tensors = silence(tensors, draft.anatomy.family, draft.anatomy.parts)
        return LayerDraft(
            tensors=tensors,
            base=None,
            # A fused layer takes the attention type of the layer below it; at birth it writes nothing either way.
            layer_type=below.layer_type,
            per_layer=dict(below.per_layer),
            operation=number,
            sources=sources,
            init=self.init.kind + (", zero-init" if self.zero_init else ""),
        )

    def _silenced(self, family: Family, parts: tuple[Part, ...]) -> frozenset[str]:
        return frozenset(family.silence(parts)) if self.zero_init else frozenset()

    def _claim(self, family: Family, parts: tuple[Part, ...]) -> Claim:
        if not self.zero_init:
            return Claim("none", f"the new layers ({self.init.kind}) write to the residual stream from the start")
        silenced = family.silence(parts)
        what = "have effective scale zero" if any("norm" in suffix for suffix in silenced) else "are zero"
        return Claim("exact", f"new layers add exactly zero to the residual stream: {', '.join(silenced)} {what}")


def _random_tensors(draft: Draft, gap: int, label: str) -> dict[str, Recipe]:
    std = draft.config.get("initializer_range", 0.02)
    if not isinstance(std, int | float) or isinstance(std, bool) or not 0 < std < 1e3:
        raise BadInput(f"config.json: `initializer_range` is {std!r}, not a positive number")
    kinds = {part.suffix: part.kind for part in draft.anatomy.parts}
    tensors: dict[str, Recipe] = {}
    for suffix, recipe in draft.layers[gap].tensors.items():
        match kinds.get(suffix):
            case "weight":
                tensors[suffix] = Random(f"{label}.{suffix}", float(std), recipe.dtype, recipe.shape)
            case "bias":
                tensors[suffix] = Constant(0.0, recipe.dtype, recipe.shape)
            case "norm":
                identity = 1.0 - draft.anatomy.family.norm_offset
                tensors[suffix] = Constant(identity, recipe.dtype, recipe.shape)
            case None:  # an old buffer, the same in every layer
                tensors[suffix] = recipe
    return tensors
