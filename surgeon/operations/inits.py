"""The inits of `insert_layers`: how a new layer is made. Each init is one class, with everything about it.

An init declares which layers around its gap it reads and which paper it comes from, and makes the recipes of one layer.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Union

from pydantic import BeforeValidator, Field

from surgeon.anatomy.anatomy import Anatomy
from surgeon.blueprint.draft import Draft
from surgeon.blueprint.recipes import Constant, Predicted, Random, Recipe, Shuffled, average
from surgeon.common.formatting import show_layers
from surgeon.errors import BadInput, printable
from surgeon.operations.fusion import Flow, Order, Unaligned, fuse_layers, ways
from surgeon.operations.operation import Origin, Paper, Spec

OPT_DEUS = Paper(
    "cao2025progressive",
    "Cao, Mingzi and Wang, Xi and Aletras, Nikolaos",
    "Progressive Depth Up-scaling via Optimal Transport",
    2025,
    "2508.08011",
)

_LLAMA_PRO = Paper(
    "wu2024llama",
    "Wu, Chengyue and Gan, Yukang and Ge, Yixiao and Lu, Zeyu and Wang, Jiahao and Feng, Ye and Shan, Ying"
    " and Luo, Ping",
    "LLaMA Pro: Progressive LLaMA with Block Expansion",
    2024,
    "2401.02415",
)


_LESA = Paper(
    "yang2025lesa",
    "Yang, Yifei and Cao, Zouying and Ma, Xinbei and Yao, Yao and Chen, Zhi and Qin, Libo and Zhao, Hai",
    "LESA: Learnable LLM Layer Scaling-Up",
    2025,
    "2502.13794",
)


@dataclass(frozen=True)
class Gap:
    """The place of one new layer: new layer number `nth` (from 0) of `per_gap` above layer `below` of the draft.

    `label` names the layer in the numbering of the model that the operation received: the keys of its random draws
    begin with it. `zeroed` are the suffixes whose recipes a constant replaces afterwards.
    """

    draft: Draft
    below: int
    nth: int
    per_gap: int
    label: str
    zeroed: frozenset[str]

    def check_alike(self) -> None:
        """Raise BadInput where the layers below and above are of different kinds: their tensors cannot be compared."""
        kinds = [self.draft.kind_of(layer).opened for layer in range(len(self.draft.layers))]
        lower, upper = kinds[self.below : self.below + 2]
        if lower.is_like(upper):
            return
        alike = [gap for gap, (one, other) in enumerate(itertools.pairwise(kinds)) if one.is_like(other)]
        instead = "no two neighbours of this model are alike: use init copy"
        if alike:
            instead = f"use a gap whose two sides are of one kind (after {show_layers(alike)}), or init copy"
        one, other = (f" ({printable(kind.title)})" if kind.title else "" for kind in (lower, upper))
        raise BadInput(
            f"layers {self.below}{one} and {self.below + 1}{other} are of different kinds, so there is nothing between"
            f" them; {instead}"
        )


@dataclass(frozen=True)
class NewLayer:
    """The recipes of a new layer, by suffix, and the layers of the draft that it is made from, lowest first.

    The new layer's other settings (attention type) come from the first of `sources`; without sources, from the layer
    below.
    """

    tensors: dict[str, Recipe]
    sources: tuple[int, ...]


class Init(Spec):
    """How a new layer is made. A subclass gives `kind` its one value.

    `make` may read only the layers that `reads_*` declare; LESA learns from all of the base.
    """

    # The paper to cite for a layer made by this init.
    paper: ClassVar[Paper] = OPT_DEUS
    # How a picture of the stack shows such a layer.
    origin: ClassVar[Origin] = "made"
    # Whether it reads the layer above its gap; the topmost gap has none, and several new layers in one gap would be
    # equal.
    reads_above: ClassVar[bool] = False

    kind: str

    def reads_below(self, per_gap: int) -> int:
        """Return how many layers below its gap it reads, where each gap gets `per_gap` new layers."""
        return 1

    @property
    def transport_settings(self) -> dict[str, object] | None:
        """Return its optimal-transport settings (keywords of `TransportSettings`); None if it uses no transport."""
        return None

    def ways(self, anatomy: Anatomy, layer: int, zeroed: frozenset[str]) -> str:
        """Describe for a preview how layers like base layer `layer` are made; `zeroed` as in `Gap`."""
        return ""

    @abstractmethod
    def make(self, gap: Gap) -> NewLayer:
        """Return the new layer in this gap. Raises BadInput for what the model does not allow."""


class TransportInit(Init):
    """The base of inits that align the layers below and above by optimal transport."""

    origin: ClassVar[Origin] = "fused"
    reads_above = True

    reg: Annotated[
        float,
        Field(gt=0, le=1e12, allow_inf_nan=False, description="entropic regularisation, in the unit of the cost"),
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
    order: Annotated[
        Order,
        Field(description="the cost is of rows after T_in (the authors' code), or before it (Algorithm 1 as printed)"),
    ] = "align_first"
    unaligned: Annotated[
        Unaligned,
        Field(description="modules that nothing is known to align by: refuse the layer, or average them as they stand"),
    ] = "refuse"
    max_iterations: Annotated[int, Field(ge=1, le=1_000_000, description="most Sinkhorn iterations")] = 10_000

    def fused(self, gap: Gap) -> dict[str, Recipe]:
        """Return the recipes of the fused layer: the layer below, aligned along its maps, averaged with the one above.

        Raises BadInput where the layers cannot be aligned (`fuse_layers`).
        """
        gap.check_alike()
        return fuse_layers(
            gap.draft,
            below=gap.below,
            label=gap.label,
            flow=self.flow,
            settings=self.transport_settings,
            skip=gap.zeroed,
            unaligned=self.unaligned,
            order=self.order,
        )

    def ways(self, anatomy: Anatomy, layer: int, zeroed: frozenset[str]) -> str:
        """Describe how experts are matched, and what is only averaged; empty for an ordinary layer."""
        return str(ways(anatomy, layer, anatomy.kinds[anatomy.kind_of[layer]].opened, zeroed))

    @property
    def transport_settings(self) -> dict[str, object]:
        """Return the settings of the transport problems, from the plan."""
        return {
            "reg": self.reg,
            "solver": self.solver,
            "cost_scale": self.cost_scale,
            "rescale": self.rescale,
            "max_iterations": self.max_iterations,
        }


class OtFusion(TransportInit):
    """The layers below and above, aligned by optimal transport and averaged (OpT-DeUS, Algorithm 1)."""

    kind: Literal["ot_fusion"]

    def make(self, gap: Gap) -> NewLayer:
        """Return the fused layer."""
        return NewLayer(self.fused(gap), (gap.below, gap.below + 1))


class Shuffle(TransportInit):
    """A layer made as by ot_fusion, with the elements of every matrix in random order (Table 7's ablation)."""

    origin = "made"

    kind: Literal["shuffle"]

    def make(self, gap: Gap) -> NewLayer:
        """Return the fused layer with its matrices shuffled."""
        matrices = {part.suffix for part in gap.draft.kind_of(gap.below).parts if part.kind == "weight"}
        tensors = {
            suffix: Shuffled(recipe, f"{gap.label}.{suffix}") if suffix in matrices else recipe
            for suffix, recipe in self.fused(gap).items()
        }
        return NewLayer(tensors, (gap.below, gap.below + 1))


class AverageInit(Init):
    """The plain average of the layers below and above."""

    origin = "fused"
    reads_above = True

    kind: Literal["average"]

    def make(self, gap: Gap) -> NewLayer:
        """Return the average, tensor by tensor."""
        lower, upper = gap.draft.opened(gap.below), gap.draft.opened(gap.below + 1)
        gap.check_alike()
        tensors: dict[str, Recipe] = {suffix: average(recipe, upper[suffix]) for suffix, recipe in lower.items()}
        return NewLayer(tensors, (gap.below, gap.below + 1))


class CopyInit(Init):
    """A copy of the layer below (LLaMA PRO; with `per_gap: p`, of the p layers below)."""

    paper = _LLAMA_PRO
    origin = "copied"

    kind: Literal["copy"]

    def reads_below(self, per_gap: int) -> int:
        """Return the number of copied layers."""
        return per_gap

    def make(self, gap: Gap) -> NewLayer:
        """Return the copy; the group of copies is in the order of the layers below."""
        source = gap.below - gap.per_gap + 1 + gap.nth
        return NewLayer(gap.draft.opened(source), (source,))


class RandomInit(Init):
    """Normal weights of the config's `initializer_range`, biases zero, norms the identity."""

    kind: Literal["random"]

    def make(self, gap: Gap) -> NewLayer:
        """Return weights seeded by the layer's label.

        Raises BadInput where `initializer_range` is no positive number.
        """
        std = gap.draft.config.get("initializer_range", 0.02)
        if not isinstance(std, int | float) or isinstance(std, bool) or not 0 < std < 1e3:
            raise BadInput(f"config.json: `initializer_range` is {std!r}, not a positive number")
        parts = {part.suffix: part for part in gap.draft.kind_of(gap.below).opened.parts}
        tensors: dict[str, Recipe] = {}
        for suffix, recipe in gap.draft.opened(gap.below).items():
            part = parts.get(suffix)
            match part and part.kind:
                case "weight":
                    tensors[suffix] = Random(f"{gap.label}.{suffix}", float(std), recipe.dtype, recipe.shape)
                case "bias":
                    tensors[suffix] = Constant(0.0, recipe.dtype, recipe.shape)
                case "norm":
                    identity = None if part is None else part.identity
                    tensors[suffix] = Constant(1.0 if identity is None else identity, recipe.dtype, recipe.shape)
                case _:  # an old buffer, the same in every layer, or a tensor for which no random draw is right
                    tensors[suffix] = recipe
        return NewLayer(tensors, ())


class Lesa(Init):
    """Matrices that a small network predicts from the layers below and above (LESA); everything else their average."""

    paper = _LESA
    origin = "made"
    reads_above = True

    kind: Literal["lesa"]
    hidden: Annotated[int, Field(ge=1, le=2**16, description="units of each of the network's two hidden layers")] = 256
    epochs: Annotated[
        int, Field(ge=1, le=10_000, description="times that it sees every triple of layers (notebook: 10)")
    ] = 10
    batch: Annotated[int, Field(ge=1, le=2**16, description="singular directions that it sees at once")] = 64
    rate: Annotated[float, Field(gt=0, lt=1, description="AdamW's learning rate")] = 1e-3
    norm_weight: Annotated[
        float, Field(ge=0, le=1, description="λ, the share of the difference of norms in its loss (notebook: 5e-4)")
    ] = 5e-4
    poor_fit: Annotated[
        Literal["refuse", "keep"],
        Field(description="a network that explains no variance of the layers that it learned from: refuse, or keep"),
    ] = "refuse"

    def ways(self, anatomy: Anatomy, layer: int, zeroed: frozenset[str]) -> str:
        """Describe when the fit is known, and what happens to a poor one."""
        poor = "is refused" if self.poor_fit == "refuse" else "is kept, with a warning"
        return (
            "how much variance the fitted networks explain is known after apply, which shows it; a network that"
            f" explains none {poor} (`poor_fit: {self.poor_fit}`)"
        )

    def make(self, gap: Gap) -> NewLayer:
        """Return the predicted layer.

        Raises BadInput for mixtures of experts, next to a layer that an earlier operation made, and where fewer than
        three layers have the same tensors.
        """
        gap.check_alike()
        draft, kind = gap.draft, gap.draft.kind_of(gap.below).opened
        if any(part.expert is not None for part in kind.parts):
            raise BadInput(
                "init lesa predicts from the same module of neighbouring layers, and experts of two layers do not"
                " correspond by their number; use init ot_fusion, average or copy"
            )
        alike = [
            index
            for index, layer in enumerate(draft.layers)
            if layer.base is not None and not layer.rewritten and draft.kind_of(index).opened.is_like(kind)
        ]
        if not {gap.below, gap.below + 1} <= set(alike):
            raise BadInput(
                f"init lesa needs layers of the base on both sides of a gap; one beside layer {gap.below} was made"
                " by an earlier operation: put this one first"
            )
        if len(alike) < 3:
            raise BadInput(
                f"init lesa learns from three neighbouring layers, and only {len(alike)} are of this kind"
                f" ({printable(kind.title) or 'of any'}); use init ot_fusion, average or copy"
            )
        stacks = [draft.opened(index) for index in alike]
        lower, upper = stacks[alike.index(gap.below)], stacks[alike.index(gap.below) + 1]
        matrices = {part.suffix for part in kind.parts if part.kind == "weight" and len(part.shape) == 2}
        settings = tuple(sorted((name, getattr(self, name)) for name in _OF_LESA))
        # Fits are named by operation and kind of layer, because each kind has its own networks.
        label = f"{gap.label.partition('.')[0]}.lesa.{draft.layers[alike[0]].base}"
        tensors: dict[str, Recipe] = {}
        for suffix, recipe in lower.items():
            if suffix in matrices:
                stack = tuple(layer[suffix] for layer in stacks)
                keep, fit = self.poor_fit == "keep", f"{label}.{suffix}"
                tensors[suffix] = Predicted(stack, alike.index(gap.below), f"lesa.{suffix}", settings, fit, keep)
            else:
                tensors[suffix] = average(recipe, upper[suffix])
        return NewLayer(tensors, (gap.below, gap.below + 1))


_OF_LESA = ("hidden", "epochs", "batch", "rate", "norm_weight")

# An init's `kind` in plans → its class. To add an init, write its class above and its name here.
INITS: dict[str, type[Init]] = {
    init.key("kind"): init for init in (OtFusion, AverageInit, CopyInit, RandomInit, Shuffle, Lesa)
}

if TYPE_CHECKING:
    AnyInit = Init
else:
    _Mapping = Annotated[Union[tuple(INITS.values())], Field(discriminator="kind")]  # noqa: UP007
    # A plan may give an init's name instead of a mapping; its settings then have their defaults.
    AnyInit = Annotated[
        _Mapping,
        BeforeValidator(
            lambda value: {"kind": value} if isinstance(value, str) else value,
            json_schema_input_type=_Mapping | Literal[tuple(INITS)],
        ),
    ]
