"""What a recipe is: its inputs, the bytes of the base that it holds, and its computation, in one class.

A recipe may build on other recipes (an average of a layer that an earlier operation of the same plan fused), so a chain
of operations is an expression, and a later operation sees exactly what the earlier one would have written: inner
results are rounded to their dtype before they are used.

Recipes are frozen data. Making one reads and computes nothing; `Recipe.compute` does, with what a `Bench` offers, and
imports torch where it runs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from surgeon.anatomy.anatomy import of_graft
from surgeon.blueprint.recipes.alignment import MapRef
from surgeon.checkpoint.header import DTYPE_BITS
from surgeon.checkpoint.pieces import Pieces
from surgeon.common.formatting import listed

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    from surgeon.transport.maps import TransportMap

_ROW_BYTES_AT_ONCE = 1 << 19

# Where a tensor that is not the base's comes from.
Place = Literal["adapter", "model"]
# What becomes of the base's bytes in a new tensor: they stay where what is new trains, they train, or they are a copy
# of a tensor that keeps a place of its own.
Holds = Literal["kept", "moved", "copied"]


@dataclass(frozen=True)
class Recipe(ABC):
    """How one tensor comes to be. A subclass is a frozen dataclass that has `dtype` and `shape`.

    It names its `inputs`, and makes the tensor in `compute`. What follows from these two is defined here once.
    """

    # Whether weights are read into memory; without, the tensor is bytes of the base, or values that the recipe names.
    computed: ClassVar[bool] = True

    if TYPE_CHECKING:

        @property
        def dtype(self) -> str:
            """What a checkpoint's header calls the dtype of the tensor."""
            raise NotImplementedError

        @property
        def shape(self) -> tuple[int, ...]:
            """The shape of the tensor."""
            raise NotImplementedError

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        """The recipes whose results it needs."""
        return ()

    @property
    def how(self) -> str:
        """How the tensor is made, in a line for people: the recipe's name, and what of the base it is made of."""
        return f"{type(self).__name__.lower()} {listed(self.sources)}".rstrip()

    @abstractmethod
    def compute(self, bench: Bench) -> Tensor:
        """Make the tensor, on any device; the bench rounds it to `dtype`.

        Raises ValueError, or BadInput, for weights of which it cannot be made.
        """

    def compute_in_pieces(self, bench: Bench) -> Iterator[memoryview | Tensor]:
        """Make the tensor one part after the other: bytes of the base as they are, and tensors that are new."""
        yield bench.compute(self)

    def nth(self, number: int, bench: Bench) -> Tensor:
        """Slice `number` of the tensor along its first axis."""
        return bench.kept(self)[number]

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.numel * DTYPE_BITS[self.dtype] // 8

    @property
    def is_hole(self) -> bool:
        """Whether the tensor is all zeros, which a file stores as a hole: no bytes are written to disk."""
        return False

    @property
    def pieces(self) -> Pieces:
        """The bytes of the base that the tensor holds as they are, and where."""
        return Pieces(self.nbytes, ())

    @property
    def own(self) -> Pieces:
        """Those bytes among `pieces` that have no other place in the output; of a whole copy, all of it."""
        return Pieces(self.nbytes, ())

    @property
    def holds(self) -> Holds:
        """What becomes of the bytes in `own`."""
        return "kept"

    @property
    def kept(self) -> Pieces:
        """Those bytes among `own` that stay as they are where what is new trains."""
        return that_stay(self.own, self.holds)

    @property
    def named_values(self) -> Iterable[tuple[str, Pieces]]:
        """Parts whose values the recipe itself names: the digest of each, and which bytes of the tensor it is.

        Those are pieces of a tensor called "", the recipe's own.
        """
        return ()

    @property
    def sources(self) -> Iterable[str]:
        """The tensors of the base that it is made of, each once."""
        return dict.fromkeys(span.tensor for leaf in self.leaves for span in leaf.pieces.spans)

    @property
    def reads(self) -> tuple[str, ...]:
        """The tensors of the base that are read whole to compute it; others are read a part at a time."""
        return tuple(name for each in self.inputs for name in each.reads)

    @cached_property
    def maps(self) -> tuple[str, ...]:
        """Names of the couplings whose maps it and its inputs need, each once."""
        return tuple(dict.fromkeys([*self.own_maps, *(name for each in self.inputs for name in each.maps)]))

    @property
    def own_fit(self) -> str | None:
        """Under which name the fit of the network that predicts it is recorded; None where none does."""
        return None

    @property
    def own_change(self) -> str | None:
        """Under which name it is recorded what a merge changed, and rounding left of that; None where nothing is."""
        return None

    @property
    def own_maps(self) -> tuple[str, ...]:
        """Names of the couplings whose maps it needs itself."""
        return ()

    @property
    def working_set(self) -> int:
        """An estimate of the bytes of memory that computing it takes: two inputs, a sum and the result."""
        return 4 * 4 * self.numel

    @property
    def leaves(self) -> Iterator[Recipe]:
        """The recipes at the bottom of the expression, in order, repeats included."""
        return (each for each in self.walk() if not each.inputs)

    def walk(self) -> Iterator[Recipe]:
        """The recipe and all that it is made of, depth first."""
        yield self
        for each in self.inputs:
            yield from each.walk()


def row_batches(recipe: Recipe) -> Iterator[tuple[int, int]]:
    """The rows of a tensor a few at a time, as (first, stop): as many as fit a core's cache in float64."""
    count = recipe.shape[0]
    at_once = max(1, _ROW_BYTES_AT_ONCE * count // max(1, recipe.nbytes))
    return ((begin, min(begin + at_once, count)) for begin in range(0, count, at_once))


def that_stay(own: Pieces, holds: Holds | None) -> Pieces:
    """Pieces of the base without those that train with what is new; a graft of the base is as new as it was."""
    spans = (span for span in own.spans if holds == "kept" and not of_graft(span.tensor))
    return Pieces(own.nbytes, tuple(spans))


class Predictor(Protocol):
    """A network that predicts a matrix from its neighbours."""

    def between(self, lower: Tensor, upper: Tensor) -> Tensor:
        """The matrix between two, in their shape, float32."""


class Bench(Protocol):
    """What recipes compute with: results of other recipes, bytes of the base, transport maps, random numbers."""

    @property
    def device(self) -> torch.device:
        """Where arithmetic is done."""

    def dtype(self, name: str) -> torch.dtype:
        """The torch dtype of what a header calls `name`."""

    def compute(self, recipe: Recipe) -> Tensor:
        """A recipe's result, rounded to its dtype."""

    def working(self, recipe: Recipe) -> Tensor:
        """A recipe's result in float32 (float64 stays) on the device, a copy of its own."""

    def kept(self, recipe: Recipe) -> Tensor:
        """A recipe's result, computed once for the output under way; nobody may change it."""

    def read(self, recipe: Recipe) -> Tensor:
        """The pieces of the base that a recipe is, as a tensor. Raises BadInput where a number of it is not finite."""

    def read_rows(self, recipe: Recipe, begin: int, end: int) -> tuple[memoryview, Tensor]:
        """Some rows of a tensor of the base: bytes, and numbers. Raises BadInput where one is not finite."""

    def imported(self, place: Place, name: str, tensor: str) -> Tensor:
        """A tensor of an adapter, or of another model. Raises BadInput where a number of it is not finite."""

    def draws(self, key: str) -> np.random.Generator:
        """Random numbers by the plan's seed and `key`: the same on every platform, in any order of tensors."""

    def map_of(self, ref: MapRef) -> TransportMap:
        """The map of a coupling, solved at its first use."""

    def aligned(self, coupling: str) -> Tensor:
        """The rows of the lower layer, after T_in, that the map of a coupling was solved for."""

    def align_columns(self, matrix: Tensor, ref: MapRef) -> Tensor:
        """The columns of a matrix along a map."""

    def align_rows(self, matrix: Tensor, ref: MapRef) -> Tensor:
        """The rows of a matrix along a map."""

    def forget(self, couplings: Iterable[str]) -> None:
        """Free maps that nothing needs soon; one that is needed again is solved again."""

    def prompted(self, prompts: Sequence[Sequence[str]], against: Sequence[Sequence[str]]) -> Mapping[int, Tensor]:
        """For every layer a row of length 1 for each list of prompts: what its MLP reads of them on average."""

    def predictor(
        self, stack: tuple[Recipe, ...], key: str, settings: tuple[tuple[str, Any], ...], *, fit: str, keep_poor: bool
    ) -> Predictor:
        """The network that predicts matrices of a stack, learned at its first use; draws are by `key`.

        How well it fits is recorded as `fit`. Raises BadInput where it explains nothing, unless that is kept.
        """

    def record(self, name: str, figures: Mapping[str, float | int | None]) -> None:
        """Keep what a merge changed in a tensor, and what rounding left of it, as `name`."""

    def stage(self, name: str) -> AbstractContextManager[object]:
        """Time a stage of the work."""
