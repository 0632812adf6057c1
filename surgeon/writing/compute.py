"""The part of an execution that needs weights in memory, and torch: the bench that recipes compute with.

Arithmetic is in float32; each result is rounded once to its dtype. One output at a time is made.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surgeon.blueprint.blueprint import Blueprint, Output
from surgeon.blueprint.recipes import Imported, MapRef, Place, Predicted, Recipe
from surgeon.checkpoint.folder import CheckpointFolder, ReadAhead
from surgeon.checkpoint.header import FLOAT_DTYPES
from surgeon.checkpoint.peft_folder import AdapterFolder
from surgeon.checkpoint.piece_bytes import Gap, in_files, read_in_order
from surgeon.checkpoint.pieces import Pieces
from surgeon.checkpoint.source import OpenShards
from surgeon.common.listener import Stopwatch
from surgeon.errors import BadInput, printable
from surgeon.models.load import stored_dtype
from surgeon.transport.maps import TransportMap
from surgeon.writing.couplings import Maps
from surgeon.writing.finiteness import FiniteCheck
from surgeon.writing.prediction import PredictionSettings, Predictor, learn
from surgeon.writing.prompts import read_by_mlps

# The torch dtypes of quantised tensors.
PACKED = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}

# A list of prompts for each expert.
_Prompts = Sequence[Sequence[str]]


class Evaluator:
    """The bench that recipes compute with: it makes the tensors of a blueprint from a base, one after another."""

    def __init__(
        self,
        blueprint: Blueprint,
        base: CheckpointFolder,
        *,
        device: str = "cpu",
        stopwatch: Stopwatch | None = None,
        adapters: Mapping[str, AdapterFolder] | None = None,
        models: Mapping[str, CheckpointFolder] | None = None,
    ) -> None:
        """Begin with nothing computed, and count how often each map, network and adapter tensor is needed."""
        self.blueprint = blueprint
        self.base = base
        self.adapters = adapters or {}
        self.models = models or {}
        self.device = torch.device(device)
        self.stopwatch = stopwatch or Stopwatch()
        self.maps = Maps(blueprint.couplings, self)
        self._ahead = ReadAhead(base)
        self._fits: dict[str, dict[str, Any]] = {}
        self._changes: dict[str, dict[str, Any]] = {}
        self._prompted: dict[tuple[_Prompts, _Prompts], dict[int, Tensor]] = {}
        # Results from which several parts of the current output are taken; and tensors of adapters, kept while outputs
        # still need them.
        self._kept: dict[Recipe, Tensor] = {}
        # The networks that predict matrices; each is kept while outputs still need it.
        self._predictors: dict[tuple[object, ...], Predictor] = {}
        new = [output for output in blueprint.outputs if output.new]
        self._imports = Counter(each for output in new for each in _imports(output.recipe))
        self._predicted = Counter(network for output in new for network in _networks(output.recipe))
        self._needs = {output.name: self.maps.needed_by(output.recipe) for output in new}
        self._users = Counter(name for names in self._needs.values() for name in names)

    def expect(self, now: Sequence[Output], then: Sequence[Output]) -> None:
        """Read the base's tensors ahead in the background: for the outputs made now, and for those made next."""
        self._ahead.expect(self._tensors_of(now), self._tensors_of(then))

    def close(self) -> None:
        """Stop reading ahead."""
        self._ahead.close()

    def take_reports(self) -> dict[str, dict[str, Any]]:
        """Return the reports since the last call, by name, and forget them.

        Reports are about transport maps, networks' fits, and merged changes.
        """
        taken = self.maps.reports | self._fits | self._changes
        self.maps.reports, self._fits, self._changes = {}, {}, {}
        return taken

    def make(self, output: Output) -> Iterator[memoryview]:
        """Yield the bytes of the output's tensor in its dtype, in order. Raises BadInput where it cannot be made."""
        recipe, made = output.recipe, 0
        try:
            for part in recipe.compute_in_pieces(self):
                data = part if isinstance(part, memoryview) else self._bytes_of(part, output)
                made += len(data)
                yield data
        except ValueError as error:
            raise BadInput(f"{printable(output.name)}: {error}") from error
        if made != recipe.nbytes:
            raise BadInput(
                f"{printable(output.name)}: {made} bytes were made by {type(recipe).__name__}, its {recipe.dtype}"
                f" {list(recipe.shape)} has {recipe.nbytes}; the operation that brings this recipe is wrong"
            )
        self.skip(output)
        self._kept = {each: made for each, made in self._kept.items() if self._imports[each] > 0}

    def skip(self, output: Output) -> None:
        """Count an output as done (made now, or by an earlier run) and free the maps that are no longer needed."""
        self._users.subtract(self._needs.get(output.name, ()))
        # Maps for one expert of a layer that the plan fused before may be solved again after their last counted use.
        self.maps.forget([name for name in self.maps.solved if self._users[name] <= 0])
        self._imports.subtract(_imports(output.recipe))
        for network in _networks(output.recipe):
            self._predicted[network] -= 1
            if self._predicted[network] <= 0:
                self._predictors.pop(network, None)

    # The methods of surgeon.blueprint.recipes.Bench.

    def dtype(self, name: str) -> torch.dtype:
        """Return the torch dtype for the name that a header uses."""
        return stored_dtype(name) if name in FLOAT_DTYPES else PACKED[name]

    def compute(self, recipe: Recipe) -> Tensor:
        """Return a recipe's result, rounded to its dtype. Raises ValueError where its shape is not as planned."""
        made = recipe.compute(self)
        if not isinstance(made, Tensor) or tuple(made.shape) != recipe.shape:
            found = f"a tensor of shape {list(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
            raise ValueError(
                f"{type(recipe).__name__} makes {found}, where a tensor of shape {list(recipe.shape)} is planned; the"
                " operation that brings this recipe is wrong"
            )
        return made.to(stored_dtype(recipe.dtype))

    def working(self, recipe: Recipe) -> Tensor:
        """Return a recipe's result in float32 (float64 stays) on the working device, as a copy of its own."""
        made = self.compute(recipe)
        dtype = torch.float64 if made.dtype == torch.float64 else torch.float32
        return made.to(self.device, dtype, copy=True)

    def kept(self, recipe: Recipe) -> Tensor:
        """Return a recipe's result, computed once for the current output; the caller must not change it.

        A tensor of an adapter or another model is kept longer, while outputs still need it.
        """
        if recipe not in self._kept:
            self._kept[recipe] = self.compute(recipe)
        return self._kept[recipe]

    def read(self, recipe: Recipe) -> Tensor:
        """Read a recipe's pieces of the base as a tensor. Raises BadInput where a number is not finite."""
        pieces = recipe.pieces
        with self.stopwatch.stage("read"):
            raw = self._read(pieces)
        tensor = _tensor(raw, self.dtype(recipe.dtype), recipe.shape)
        if not _all_finite(raw, recipe.dtype):
            raise self._not_finite(pieces, tensor)
        return tensor

    def read_rows(self, recipe: Recipe, begin: int, end: int) -> tuple[memoryview, Tensor]:
        """Read rows `begin:end` of a tensor of the base; return (bytes, numbers).

        Raises BadInput where one is not finite.
        """
        (name,) = recipe.pieces.tensors
        width = recipe.nbytes // recipe.shape[0]
        raw = self.base.read_part(name, slice(begin * width, end * width))
        tensor = _tensor(raw, self.dtype(recipe.dtype), (end - begin, *recipe.shape[1:]))
        if not _all_finite(raw, recipe.dtype):
            raise self._not_finite(recipe.pieces, tensor, first=begin * width)
        return memoryview(raw), tensor

    def imported(self, place: Place, name: str, tensor: str) -> Tensor:
        """Return a tensor of the adapter or other model `name`. Raises BadInput where a number of it is not finite."""
        source: AdapterFolder | CheckpointFolder = self.adapters[name] if place == "adapter" else self.models[name]
        with self.stopwatch.stage("read"):
            raw = source.read(tensor)
        facts = source.facts.tensors[tensor] if isinstance(source, AdapterFolder) else source.tensors[tensor]
        if not _all_finite(raw, facts.dtype):
            raise BadInput(
                f"{printable(name)}: tensor {printable(tensor)} holds NaN or infinity; the {place} is broken, get it"
                " again"
            )
        return _tensor(raw, stored_dtype(facts.dtype), facts.shape)

    def draws(self, key: str) -> np.random.Generator:
        """Return a generator seeded by the plan's seed and `key`."""
        # Philox, seeded by a hash: the same numbers on every platform, in any order of tensors and processes.
        digest = hashlib.sha256(f"{self.blueprint.seed}:{key}".encode()).digest()
        return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))

    def map_of(self, ref: MapRef) -> TransportMap:
        """Return the map of a coupling, solved at its first use."""
        return self.maps.get(ref)

    def aligned(self, coupling: str) -> Tensor:
        """Return the rows of the lower layer, after T_in, for which the map of a coupling was solved."""
        return self.maps.aligned(coupling)

    def align_columns(self, matrix: Tensor, ref: MapRef) -> Tensor:
        """Return a matrix with its columns aligned along the map of `ref`; the matrix itself for the identity."""
        if ref.coupling is None:
            return matrix
        found = self.maps.get(ref)
        with self.stopwatch.stage("align columns"):
            return found.align_columns(matrix)

    def align_rows(self, matrix: Tensor, ref: MapRef) -> Tensor:
        """Return a matrix with its rows aligned along the map of `ref`; the matrix itself for the identity."""
        return matrix if ref.coupling is None else self.maps.get(ref).align_rows(matrix)

    def forget(self, couplings: Iterable[str]) -> None:
        """Free maps that are not needed soon; a map that is needed again is solved again."""
        self.maps.forget(couplings)

    def prompted(self, prompts: _Prompts, against: _Prompts) -> Mapping[int, Tensor]:
        """Return router rows from prompts, of length 1, for every layer with an MLP; the base is run once."""
        if (prompts, against) not in self._prompted:
            with self.stopwatch.stage("run the base"):
                found = read_by_mlps(self.base, prompts, against, device=self.device)
            scaled = {layer: rows / rows.norm(dim=-1, keepdim=True) for layer, rows in found.items()}
            self._prompted[prompts, against] = scaled
        return self._prompted[prompts, against]

    def predictor(
        self, stack: tuple[Recipe, ...], key: str, settings: tuple[tuple[str, Any], ...], *, fit: str, keep_poor: bool
    ) -> Predictor:
        """Return the network that predicts matrices of a stack, trained at its first use; `key` seeds its draws.

        Its fit is recorded as `fit`. Raises BadInput where it explains no variance, unless `keep_poor`.
        """
        network = stack, key, settings
        if network not in self._predictors:
            with self.stopwatch.stage("learn to predict"):
                self._predictors[network] = learn(
                    lambda number: self.working(stack[number]).float(),
                    len(stack),
                    PredictionSettings(**dict(settings)),
                    self.draws(key),
                )
            found = self._predictors[network].fit
            if found.explained <= 0 and not keep_poor:
                raise BadInput(
                    f"{printable(fit)}: the network explains {found.explained:.1%} of the variance of the"
                    f" {found.triples} layers that it learned from, no more than zeros would; use another init, more"
                    " `epochs`, a smaller `norm_weight`, or `poor_fit: keep` to have such layers all the same"
                )
            self._fits[fit] = found.to_report()
        return self._predictors[network]

    def record(self, name: str, figures: Mapping[str, float | int | None]) -> None:
        """Record under `name` what a merge changed in a tensor, and how much of it rounding keeps."""
        self._changes[name] = dict(figures)

    def stage(self, name: str) -> AbstractContextManager[object]:
        """Return a context manager that records under `name` how long the work within it takes."""
        return self.stopwatch.stage(name)

    def _bytes_of(self, made: Tensor, output: Output) -> memoryview:
        """Return a computed tensor's bytes in the output's dtype.

        Raises BadInput where numbers leave the range of the dtype.
        """
        dtype = output.recipe.dtype
        data: memoryview = made.to("cpu", stored_dtype(dtype)).contiguous().view(-1).view(torch.uint8).numpy().data
        if not _all_finite(data, dtype):
            why = f"the new values leave the range of {dtype}; use a base in a wider dtype"
            if bool(made.isnan().any()):
                recipe = type(output.recipe).__name__
                why = f"the new values are NaN: a scale of the base is NaN (get it again), or {recipe} computes wrongly"
            raise BadInput(f"{printable(output.name)}: {why}")
        return data

    def _tensors_of(self, outputs: Sequence[Output]) -> list[str]:
        """Return the base's tensors that computing `outputs` reads, each once, about in the order of their use."""
        found: dict[str, None] = {}
        for output in outputs:
            if output.recipe.computed:
                made_from = [output.recipe]
                for name in sorted(self._needs.get(output.name, ())):
                    coupling = self.blueprint.couplings[name]
                    made_from.extend((coupling.first, coupling.second))
                found.update((name, None) for top in made_from for name in top.reads)
        return list(found)

    def _read(self, pieces: Pieces) -> bytearray:
        """Read the base's bytes that `pieces` lists: a whole tensor from the read-ahead, otherwise only the pieces."""
        span = pieces.spans[0]
        if pieces.is_all_of(self.base.tensors[span.tensor]):
            return self._ahead.read(span.tensor)
        if len(pieces.spans) == 1 and span.count == 1:
            return self.base.read_part(span.tensor, slice(span.offset, span.offset + span.length))
        found = bytearray()
        with OpenShards({"": self.base.source}) as shards:
            for piece in read_in_order(in_files({"": pieces}, self.base.tensors)[""], shards.opened):
                assert not isinstance(piece, Gap), pieces
                found += piece
        return found

    def _not_finite(self, pieces: Pieces, tensor: Tensor, *, first: int = 0) -> BadInput:
        """Return the error that names the first number that is not finite; `tensor` begins at byte `first`."""
        # FP8 dtypes have no `isfinite`.
        flat = tensor.flatten().double()
        number = int((~torch.isfinite(flat)).nonzero()[0])
        name, offset = pieces.origin_of(first + number * tensor.element_size())
        info = self.base.tensors[name]
        at = [int(i) for i in np.unravel_index(offset // tensor.element_size(), info.shape)]
        return BadInput(
            f"{printable(name)} ({printable(info.file)}): holds {flat[number].item()} at {at}; nothing can be"
            " computed from it (a copy of this layer would be as broken)"
        )


def _networks(recipe: Recipe) -> Iterator[tuple[object, ...]]:
    """Yield the key of each network that predicts a part of a recipe."""
    return (each.network for each in recipe.walk() if isinstance(each, Predicted))


def _imports(recipe: Recipe) -> Iterator[Recipe]:
    """Yield the tensors of adapters, or of other models, that a recipe is made of."""
    return (each for each in recipe.walk() if isinstance(each, Imported))


def _tensor(raw: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return bytes as a tensor; frombuffer rejects an empty buffer."""
    return torch.frombuffer(raw, dtype=dtype).view(shape) if raw else torch.empty(shape, dtype=dtype)


def _all_finite(data: bytearray | memoryview, dtype: str) -> bool:
    """Return whether all numbers are finite, by their bits: torch itself takes twenty times as long for bfloat16."""
    look = FiniteCheck(dtype)
    look(data)
    return look.finite
