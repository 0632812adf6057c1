"""The finished blueprint: one recipe for every tensor of the output, and what each operation promises.

Preview shows the blueprint, `apply` writes it and `verify` checks the output against it.
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

# Which tensors training changes: an operation's new ones, all, or the new ones in one fit before the first step.
Trains = Literal["new", "all", "fitted"]
# In order, from the strongest to the weakest.
Promise = Literal["exact", "rounding", "none"]


def weakest(promises: Iterable[Promise]) -> Promise:
    """Return the weakest of several promises; "exact", the strongest, where there are none."""
    return max(promises, key=get_args(Promise).index, default="exact")


@dataclass(frozen=True, slots=True)
class Claim:
    """What an operation promises about the base's function.

    `exact`: every logit is bit-identical at birth, in the checkpoint's dtype and with the same attention
    implementation. `rounding`: the same function, computed in another order, so logits differ by rounding. `none`: the
    function changes. `reason` says why, in one sentence. `tail_alone`: only the logits of the base's last V mod
    `HEAD_BLOCK` tokens differ by rounding; all others are bit-identical. `in_float32`: the promise is `none`, but a
    twin in float32 shows that the function is the same up to rounding.
    """

    promise: Promise
    reason: str
    tail_alone: bool = False
    in_float32: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError where `promise` is none of the three."""
        if self.promise not in get_args(Promise):
            raise ValueError(f"a claim promises one of {', '.join(get_args(Promise))}, not {self.promise!r}")


@dataclass(frozen=True, slots=True)
class GraftNote:
    """One graft of a layer, as preview and manifest show it; `operation` is None where the base brought the graft."""

    text: str
    operation: int | None


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of the output, as preview and manifest show it; `sources` are numbers of layers of the output."""

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
    """One tensor of the output; `operation` is the number of the operation that made it, None for a tensor of the base.

    `new` is true where an operation made it: training may then change it, unless it holds parts of old layers. The
    other fields repeat properties of its recipe, because they are asked for often: `pieces` are the bytes that it takes
    unchanged from the base, `kept` the part of `pieces` that stays unchanged when new tensors train.
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
        """Fill the fields that repeat properties of the recipe, and `new` and `kept`."""
        object.__setattr__(self, "new", self.operation is not None)
        for name in ("computed", "is_hole", "numel", "nbytes", "pieces"):
            object.__setattr__(self, name, getattr(self.recipe, name))
        object.__setattr__(self, "kept", self.recipe.kept if self.new else self.pieces)


@dataclass(frozen=True, slots=True)
class OperationRecord:
    """What one operation of the plan did: its name, what its selector matched, its claim, and which tensors train."""

    op: str
    matched: str
    claim: Claim
    trains: Trains

    def __post_init__(self) -> None:
        """Raise ValueError where `trains` is not one of the known words."""
        if self.trains not in get_args(Trains):
            raise ValueError(f"an operation trains one of {', '.join(get_args(Trains))}, not {self.trains!r}")


@dataclass(frozen=True)
class Blueprint:
    """The output, tensor by tensor, in the order of the model.

    `couplings` maps the name of each transport map to how the map is made; each coupling comes after the couplings it
    needs. `native` means that the output has the base's own class with more layers; where it does not, `code_files` of
    the shipped runtime are copied next to the weights.
    """

    seed: int
    outputs: tuple[Output, ...]
    couplings: dict[str, Coupling]
    layers: tuple[Layer, ...]
    operations: tuple[OperationRecord, ...]
    config: dict[str, Any]
    code_files: tuple[str, ...] = ()
    # By operation number, the layers of the base that the operation took out.
    dropped: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    # The sizes that operations changed and that layers share, by their config field (`with_fields`).
    resized: Mapping[str, int] = field(default_factory=dict)
    # By operation number, the tensors of towers next to the text model that the operation left behind.
    left_behind: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    # Whether config.json differs from the base's in more than the number of layers: another class, or other parts.
    converted: bool = False

    def recipes(self) -> Iterator[Recipe]:
        """Yield the recipe of every output, and every recipe that such a recipe is made of."""
        for output in self.outputs:
            yield from output.recipe.walk()

    @property
    def sources(self) -> set[str]:
        """Return the names of the base's tensors that outputs are made of."""
        return {name for output in self.outputs for name in output.recipe.sources}

    @property
    def changes(self) -> list[str]:
        """Return the names under which merges record what they changed and how much of the change rounding keeps."""
        found = (recipe.own_change for output in self.outputs if output.computed for recipe in output.recipe.walk())
        return sorted({name for name in found if name is not None})

    @property
    def native(self) -> bool:
        """Return whether the output loads without custom code."""
        return not self.code_files

    @property
    def promise(self) -> Promise:
        """Return the weakest promise of all operations, which is what the output as a whole promises."""
        return weakest(record.claim.promise for record in self.operations)

    @property
    def tail_alone(self) -> bool:
        """Return whether some promise is `rounding`, and each concerns only the last logits (`Claim.tail_alone`)."""
        rounded = [record.claim for record in self.operations if record.claim.promise == "rounding"]
        return bool(rounded) and all(claim.tail_alone for claim in rounded)

    @property
    def new_rows(self) -> range:
        """Return the range of embedding rows that are new, not the base's; an empty range where there are none."""
        means = (r for o in self.outputs for r in o.recipe.walk() if isinstance(r, Means))
        return next((range(each.first, each.first + len(each.made_of)) for each in means), range(0))

    @property
    def kept_tokens(self) -> tuple[int, ...] | None:
        """Return the base's ids of the tokens that stay, in the output's order; None where no token was taken out."""
        return next((r.numbers for o in self.outputs for r in o.recipe.walk() if isinstance(r, KeptRows)), None)

    @property
    def taken(self) -> dict[str, dict[str, Imported]]:
        """Return the tensors taken from other models, by the model's name in the plan, then by tensor name."""
        found: dict[str, dict[str, Imported]] = {}
        for recipe in self.recipes():
            if isinstance(recipe, Imported) and recipe.place == "model":
                found.setdefault(recipe.name, {})[recipe.tensor] = recipe
        return found

    @property
    def layer_of_base(self) -> tuple[int, ...]:
        """Return each base layer's number in the output.

        A dropped layer gets the number of the next kept layer below it (-1: none).
        """
        kept = {layer.base: layer.index for layer in self.layers if layer.base is not None}
        places: list[int] = []
        for layer in range(len(kept) + sum(map(len, self.dropped.values()))):
            places.append(kept.get(layer, places[-1] if places else -1))
        return tuple(places)
