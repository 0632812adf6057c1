"""The finished blueprint: for every tensor of the output one recipe, and what each operation promises.

Preview shows it, `apply` writes it and `verify` checks against it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from surgeon.blueprint.recipes import (
    Coupling,
    Imported,
    KeptRows,
    Means,
    Recipe,
)
from surgeon.checkpoint.pieces import Pieces

# What training changes: an operation's new tensors, every tensor, or its new ones once, before the first step.
Trains = Literal["new", "all", "fitted"]
# From the strongest to the weakest.
Promise = Literal["exact", "rounding", "none"]


def weakest(promises: Iterable[Promise]) -> Promise:
    """Return the weakest of several promises; of none, the strongest."""
    return max(promises, key=get_args(Promise).index, default="exact")


@dataclass(frozen=True, slots=True)
class Claim:
    """What an operation promises about the base's function.

    `exact`: every logit is bit-identical at birth, in the checkpoint's dtype and with the same attention
    implementation. `rounding`: the same function, computed in another order, so logits differ by rounding. `none`: the
    function changes. `reason` says why, in one sentence. `tail_alone`: what is rounded otherwise are the logits of the
    base's last V mod `HEAD_BLOCK` tokens; all others are bit-identical. `in_float32`: of `none`, a twin in float32
    shows that the function is the same, to rounding.
    """

    promise: Promise
    reason: str
    tail_alone: bool = False
    in_float32: bool = False


@dataclass(frozen=True, slots=True)
class GraftNote:
    """One graft of a layer, as preview and manifest show it; `operation` None: the base brought it."""

    text: str
    operation: int | None


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of the output, as preview and manifest show it. `sources` are its sources' numbers in the output."""

    index: int
    base: int | None
    operation: int | None
    init: str
    sources: tuple[int, ...]
    layer_type: str | None
    like: int
    grafts: tuple[GraftNote, ...] = ()
    opened: bool = False


@dataclass(frozen=True)
class Output:
    """One tensor of the output; `operation` made it, None where the base has it.

    `new` says that one did: training may then change it, unless it holds parts of old layers. The other fields are
    those of its recipe, which are asked for often: `pieces` are the bytes of the base that it holds as they are, `kept`
    those among them that stay so where what is new trains.
    """

    name: str
    recipe: Recipe
    operation: int | None
    new: bool = field(init=False, repr=False, compare=False)
    computed: bool = field(init=False, repr=False, compare=False)
    is_hole: bool = field(init=False, repr=False, compare=False)
    numel: int = field(init=False, repr=False, compare=False)
    nbytes: int = field(init=False, repr=False, compare=False)
    pieces: Pieces = field(init=False, repr=False, compare=False)
    kept: Pieces = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "new", self.operation is not None)
        for name in ("computed", "is_hole", "numel", "nbytes", "pieces"):
            object.__setattr__(self, name, getattr(self.recipe, name))
        object.__setattr__(self, "kept", self.recipe.kept if self.new else self.pieces)


@dataclass(frozen=True, slots=True)
class OperationRecord:
    """What one operation of the plan did: its name, what its selector matched, its claim, what it lets train."""

    op: str
    matched: str
    claim: Claim
    trains: Trains


@dataclass(frozen=True)
class Blueprint:
    """The output, tensor by tensor, in the order of the model.

    `couplings` maps the names of transport maps to how they are made, in an order in which each comes after
    those it needs. `native` says that the output is the base's own class with more layers; where it is not,
    `code_files` of the shipped runtime are copied beside the weights.
    """

    seed: int
    outputs: tuple[Output, ...]
    couplings: dict[str, Coupling]
    layers: tuple[Layer, ...]
    operations: tuple[OperationRecord, ...]
    config: dict[str, Any]
    code_files: tuple[str, ...] = ()
    # The layers of the base that each operation took out, by its number.
    dropped: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    # The sizes that operations changed and layers share, by their fields of the config (`with_fields`).
    resized: Mapping[str, int] = field(default_factory=dict)
    # The tensors of the base that each operation left behind, by its number: of towers beside the text, and what a
    # layer that was taken out alone used of a block that it shared with others.
    left_behind: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    # Whether config.json is another one than the base's with more or fewer layers: of another class, or other parts.
    converted: bool = False

    def recipes(self) -> Iterator[Recipe]:
        """Every recipe, and all that these are made of."""
        for output in self.outputs:
            yield from output.recipe.walk()

    @property
    def sources(self) -> set[str]:
        """The tensors of the base that outputs are made of."""
        return {name for output in self.outputs for name in output.recipe.sources}

    @property
    def changes(self) -> list[str]:
        """The names under which it is recorded what merges changed, and what rounding left of that."""
        found = (recipe.own_change for output in self.outputs if output.computed for recipe in output.recipe.walk())
        return sorted({name for name in found if name is not None})

    @property
    def native(self) -> bool:
        """Whether the output loads without custom code."""
        return not self.code_files

    @property
    def promise(self) -> Promise:
        """The weakest promise of all operations: what the output as a whole promises."""
        return weakest(record.claim.promise for record in self.operations)

    @property
    def tail_alone(self) -> bool:
        """Whether nothing else is promised to rounding than `Claim.tail_alone` says."""
        rounded = [record.claim for record in self.operations if record.claim.promise == "rounding"]
        return bool(rounded) and all(claim.tail_alone for claim in rounded)

    @property
    def new_rows(self) -> range:
        """The rows of the embeddings that are not the base's."""
        means = (r for o in self.outputs for r in o.recipe.walk() if isinstance(r, Means))
        return next((range(each.first, each.first + len(each.made_of)) for each in means), range(0))

    @property
    def kept_tokens(self) -> tuple[int, ...] | None:
        """The base's ids of the output's tokens, in the order of theirs, where some were taken out; else None."""
        return next((r.numbers for o in self.outputs for r in o.recipe.walk() if isinstance(r, KeptRows)), None)

    @property
    def taken(self) -> dict[str, dict[str, Imported]]:
        """The tensors that are taken from other models, by the plan's names for these, each with one recipe."""
        found: dict[str, dict[str, Imported]] = {}
        for recipe in self.recipes():
            if isinstance(recipe, Imported) and recipe.place == "model":
                found.setdefault(recipe.name, {})[recipe.tensor] = recipe
        return found

    @property
    def layer_of_base(self) -> tuple[int, ...]:
        """For every base layer, its number in the output; of one taken out, that of the layer below it (-1: none)."""
        kept = {layer.base: layer.index for layer in self.layers if layer.base is not None}
        places: list[int] = []
        for layer in range(len(kept) + sum(map(len, self.dropped.values()))):
            places.append(kept.get(layer, places[-1] if places else -1))
        return tuple(places)
