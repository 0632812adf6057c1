"""The base class of recipes: a recipe's inputs, the bytes of the base that it holds, and its computation, in one class.

A recipe may build on other recipes (an average of a layer that an earlier operation of the same plan fused), so a chain
of operations is an expression, and a later operation sees exactly what the earlier one would have written: inner
results are rounded to their dtype before they are used.

Recipes are frozen data. Making a recipe reads and computes nothing; `Recipe.compute` does, with what a `Bench` offers,
and imports torch at that point.
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

# The source of a tensor that is not the base's.
Place = Literal["adapter", "model"]
# What happens to the base's bytes in a new tensor during training of new tensors: they stay ("kept"), they train
# ("moved"), or they train as a copy of a tensor that keeps its own place ("copied").
Holds = Literal["kept", "moved", "copied"]


@dataclass(frozen=True)
class Recipe(ABC):
    """How one tensor is made. A subclass is a frozen dataclass that has `dtype` and `shape`.

    It lists its `inputs`, and makes the tensor in `compute`. What follows from these two is defined here once.
    """

    # Whether weights are read into memory; if not, the tensor is bytes of the base, or values that the recipe names.
    computed: ClassVar[bool] = True

    if TYPE_CHECKING:

        @property
        def dtype(self) -> str:
            """Return the dtype of the tensor, as a checkpoint's header names it."""
            raise NotImplementedError

        @property
        def shape(self) -> tuple[int, ...]:
            """Return the shape of the tensor."""
            raise NotImplementedError

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        """Return the recipes whose results this recipe needs; none by default."""
        return ()

    @property
    def how(self) -> str:
        """Describe in a line how the tensor is made: the recipe's name, and the base's tensors that it uses."""
        return f"{type(self).__name__.lower()} {listed(self.sources)}".rstrip()

    @abstractmethod
    def compute(self, bench: Bench) -> Tensor:
        """Make the tensor, on any device; the bench rounds it to `dtype`.

        Raises ValueError, or BadInput, where it cannot be made of these weights.
        """

    def compute_in_pieces(self, bench: Bench) -> Iterator[memoryview | Tensor]:
        """Yield the tensor part by part: unchanged bytes of the base, and computed tensors."""
        yield bench.compute(self)

    def nth(self, number: int, bench: Bench) -> Tensor:
        """Return slice `number` of the tensor along its first axis."""
        return bench.kept(self)[number]

    @cached_property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """Return the size of the tensor in bytes."""
        return self.numel * DTYPE_BITS[self.dtype] // 8

    @property
    def is_hole(self) -> bool:
        """Return whether the tensor is all zeros, which a file stores as a hole: no bytes are written to disk."""
        return False

    @property
    def pieces(self) -> Pieces:
        """Return the bytes of the base that the tensor holds unchanged, and their places."""
        return Pieces(self.nbytes, ())

    @property
    def own(self) -> Pieces:
        """Return the bytes among `pieces` that have no other place in the output; for a whole copy, all of them."""
        return Pieces(self.nbytes, ())

    @property
    def holds(self) -> Holds:
        """Return what happens to the bytes in `own` during training."""
        return "kept"

    @property
    def kept(self) -> Pieces:
        """Return the bytes among `own` that stay unchanged when new tensors train."""
        return that_stay(self.own, self.holds)

    @property
    def named_values(self) -> Iterable[tuple[str, Pieces]]:
        """Return (digest, pieces) for each part of the tensor whose values the recipe itself fixes; nothing by default.

        The pieces are bytes of a tensor called "", which stands for the recipe itself.
        """
        return ()

    @property
    def sources(self) -> Iterable[str]:
        """Return the names of the base's tensors that this tensor is made of, each once."""
        return dict.fromkeys(span.tensor for leaf in self.leaves for span in leaf.pieces.spans)

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the base's tensors that are read whole to compute it; others are read a part at a time."""
        return tuple(name for each in self.inputs for name in each.reads)

    @cached_property
    def maps(self) -> tuple[str, ...]:
        """Return the names of the couplings whose maps it and its inputs need, each once."""
        return tuple(dict.fromkeys([*self.own_maps, *(name for each in self.inputs for name in each.maps)]))

    @property
    def own_fit(self) -> str | None:
        """Return the name under which its predicting network's fit is recorded; None where none predicts it."""
        return None

    @property
    def own_change(self) -> str | None:
        """Return the name under which a merge records its change and what rounding keeps; None where none does."""
        return None

    @property
    def own_maps(self) -> tuple[str, ...]:
        """Return the names of the couplings whose maps the recipe itself needs."""
        return ()

    @property
    def working_set(self) -> int:
        """Estimate the bytes of memory that computing it takes: two inputs, a sum and the result."""
        return 4 * 4 * self.numel

    @property
    def leaves(self) -> Iterator[Recipe]:
        """Return the recipes at the bottom of the expression, in order, repeats included."""
        return (each for each in self.walk() if not each.inputs)

    def walk(self) -> Iterator[Recipe]:
        """Yield the recipe and every recipe that it is made of, depth first, repeats included."""
        yield self
        for each in self.inputs:
            yield from each.walk()


def row_batches(recipe: Recipe) -> Iterator[tuple[int, int]]:
    """Yield a tensor's rows in batches (first, stop), at least one row each.

    A batch has at most about `_ROW_BYTES_AT_ONCE` stored bytes, so that it fits a core's cache in float64 too.
    """
    count = recipe.shape[0]
    at_once = max(1, _ROW_BYTES_AT_ONCE * count // max(1, recipe.nbytes))
    return ((begin, min(begin + at_once, count)) for begin in range(0, count, at_once))


def that_stay(own: Pieces, holds: Holds | None) -> Pieces:
    """Return the pieces that stay unchanged when new tensors train; pieces of the base's grafts never do."""
    spans = (span for span in own.spans if holds == "kept" and not of_graft(span.tensor))
    return Pieces(own.nbytes, tuple(spans))


class Predictor(Protocol):
    """A network that predicts a matrix from its neighbours."""

    def between(self, lower: Tensor, upper: Tensor) -> Tensor:
        """Return the predicted matrix between `lower` and `upper`, of their shape, in float32."""


class Bench(Protocol):
    """The services that recipes compute with: other recipes' results, the base's bytes, transport maps, draws."""

    @property
    def device(self) -> torch.device:
        """Return the device on which arithmetic is done."""

    def dtype(self, name: str) -> torch.dtype:
        """Return the torch dtype for the name that a header uses."""

    def compute(self, recipe: Recipe) -> Tensor:
        """Return a recipe's result, rounded to its dtype."""

    def working(self, recipe: Recipe) -> Tensor:
        """Return a recipe's result in float32 (float64 stays) on the device, as a copy that the caller may change."""

    def kept(self, recipe: Recipe) -> Tensor:
        """Return a recipe's result, computed once for the current output; the caller must not change it."""

    def read(self, recipe: Recipe) -> Tensor:
        """Read a recipe's pieces of the base as a tensor. Raises BadInput where a number is not finite."""

    def read_rows(self, recipe: Recipe, begin: int, end: int) -> tuple[memoryview, Tensor]:
        """Read rows `begin:end` of a tensor of the base; return (bytes, numbers).

        Raises BadInput where a number is not finite.
        """

    def imported(self, place: Place, name: str, tensor: str) -> Tensor:
        """Return a tensor of the adapter or other model `name`. Raises BadInput where a number of it is not finite."""

    def draws(self, key: str) -> np.random.Generator:
        """Return a generator seeded by the plan's seed and `key`: equal on all platforms, in any tensor order."""

    def map_of(self, ref: MapRef) -> TransportMap:
        """Return the map of a coupling, solved at its first use."""

    def aligned(self, coupling: str) -> Tensor:
        """Return the rows of the lower layer, after T_in, for which the map of a coupling was solved."""

    def align_columns(self, matrix: Tensor, ref: MapRef) -> Tensor:
        """Return a matrix with its columns aligned along the map of `ref`."""

    def align_rows(self, matrix: Tensor, ref: MapRef) -> Tensor:
        """Return a matrix with its rows aligned along the map of `ref`."""

    def forget(self, couplings: Iterable[str]) -> None:
        """Free maps that are not needed soon; a map that is needed again is solved again."""

    def prompted(self, prompts: Sequence[Sequence[str]], against: Sequence[Sequence[str]]) -> Mapping[int, Tensor]:
        """Return for every layer one row of length 1 per list of prompts: the mean input of its MLP over them."""

    def predictor(
        self, stack: tuple[Recipe, ...], key: str, settings: tuple[tuple[str, Any], ...], *, fit: str, keep_poor: bool
    ) -> Predictor:
        """Return the network that predicts matrices of a stack, trained at its first use; `key` seeds its draws.

        Its fit is recorded as `fit`. Raises BadInput where it explains no variance, unless `keep_poor`.
        """

    def record(self, name: str, figures: Mapping[str, float | int | None]) -> None:
        """Record under `name` what a merge changed in a tensor, and how much of it rounding keeps."""

    def stage(self, name: str) -> AbstractContextManager[object]:
        """Return a context manager that records under `name` how long the work within it takes."""
