"""Cooking recipes: the part of an execution that needs weights in memory, and torch.

Arithmetic is in float32; each result is rounded once to its dtype. One output at a time is made, transport
maps are computed at their first use and freed after their last.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surgeon.apply.finiteness import FiniteCheck
from surgeon.apply.prediction import Fit, PredictionSettings, Predictor, learn
from surgeon.apply.prompts import read_by_mlps
from surgeon.blueprint.draft import Blueprint, Output
from surgeon.blueprint.recipes import (
    Average,
    Block,
    Columns,
    Constant,
    Copy,
    Coupling,
    Dequantised,
    Extended,
    Fused,
    Imported,
    Interpolated,
    Joined,
    Listed,
    MapRef,
    Matched,
    Moved,
    Noised,
    OneExpert,
    PerLayer,
    Piled,
    Predicted,
    Prompted,
    Random,
    Recipe,
    Redrawn,
    Repeated,
    Shuffled,
    Sliced,
    Stacked,
    Summed,
    Taken,
    TextSupport,
    WholeHeads,
    Widened,
    is_computed,
    maps_used,
    sources,
)
from surgeon.checkpoint.folder import CheckpointFolder, ReadAhead
from surgeon.checkpoint.header import TensorInfo
from surgeon.checkpoint.peft_folder import AdapterFolder
from surgeon.common.devices import one_thread
from surgeon.common.listener import Stopwatch
from surgeon.errors import BadInput, printable
from surgeon.families.dissect import dissect
from surgeon.models.load import running, stored_dtype
from surgeon.models.stream import StreamedModel
from surgeon.models.tokens import token_batches
from surgeon.transport.assignment import match_rows
from surgeon.transport.heads import AttentionWeights, head_maps
from surgeon.transport.maps import AssignmentMap, HalfIdentity, TransportMap, TransportSettings
from surgeon.transport.solving import solve

# Quantised tensors: what torch calls them, the sixteen values of four bits, and what an exponent of zero is stored as.
_PACKED = {"F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "U8": torch.uint8}
_FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_EXPONENT_BIAS = 127

# Lists of prompts, one an expert.
_Prompts = tuple[tuple[str, ...], ...]

# More would save reading the base again, and cost memory for attention.
_WINDOWS_AT_ONCE = 16


class Workshop:
    """Makes the tensors of a blueprint from a base, one after the other, sharing its transport maps."""

    def __init__(
        self,
        blueprint: Blueprint,
        base: CheckpointFolder,
        *,
        device: str = "cpu",
        stopwatch: Stopwatch | None = None,
        plan_source: str = "",
        adapters: Mapping[str, AdapterFolder] | None = None,
        models: Mapping[str, CheckpointFolder] | None = None,
    ) -> None:
        self.blueprint = blueprint
        self.plan_source = plan_source
        self.base = base
        self.adapters = adapters or {}
        self.models = models or {}
        self.device = torch.device(device)
        self.stopwatch = stopwatch or Stopwatch()
        self.reports: dict[str, dict[str, Any]] = {}
        self._ahead = ReadAhead(base)
        self._maps: dict[str, TransportMap] = {}
        # The lower layer's rows after T_in: the cost needs them and so does the fusion.
        self._aligned: dict[str, Tensor] = {}
        self._read_by_mlps: dict[tuple[_Prompts, _Prompts], list[Tensor]] = {}
        self._fired: dict[TextSupport, dict[str, Tensor]] = {}
        # Tensors of all experts that were computed, for the output under way: one expert after the other is taken.
        self._whole: dict[Recipe, Tensor] = {}
        # Of matrices that a network predicts: the networks, and how many outputs still need each.
        self._predictors: dict[tuple[object, ...], Predictor] = {}
        self._predicted = Counter(n for output in blueprint.outputs if output.new for n in _networks(output.recipe))
        self._needs = {output.name: self._all_maps(output.recipe) for output in blueprint.outputs if output.new}
        self._users = Counter(name for names in self._needs.values() for name in names)

    def expect(self, now: Sequence[Output], then: Sequence[Output]) -> None:
        """Have the base's tensors read while others are computed: for the outputs made now, and those made next."""
        self._ahead.expect(self._tensors_of(now), self._tensors_of(then))

    def close(self) -> None:
        """Read ahead no more."""
        self._ahead.close()

    def take_reports(self) -> dict[str, dict[str, Any]]:
        """Reports since the last call: of maps by the name of their coupling, of networks by that of their fit."""
        taken, self.reports = self.reports, {}
        return taken

    def make(self, output: Output) -> memoryview:
        """The bytes of the output's tensor in its dtype. BadInput names what stands in the way."""
        try:
            made = self._cook(output.recipe).to("cpu", stored_dtype(output.recipe.dtype)).contiguous()
        except ValueError as error:
            raise BadInput(f"{printable(output.name)}: {error}") from error
        self._whole.clear()
        data = made.view(-1).view(torch.uint8).numpy().data
        if not _all_finite(data, output.recipe.dtype):
            raise BadInput(
                f"{printable(output.name)}: the new values leave the range of {output.recipe.dtype}; use a base in a"
                " wider dtype"
            )
        self.skip(output)
        return data

    def make_in_pieces(self, output: Output) -> Iterator[memoryview]:
        """The bytes of a tensor with more rows, in order: the base's as they are, then the new ones.

        Embeddings may take gigabytes, so they are never in memory as a whole. BadInput names what stands in the way.
        """
        assert isinstance(output.recipe, Extended), output.name
        yield from _extended(self.base, output.recipe)
        self.skip(output)

    def skip(self, output: Output) -> None:
        """Count an output as done (made, or found done by an earlier run) and free the maps nobody needs now."""
        needed = self._needs.get(output.name, frozenset())
        self._users.subtract(needed)
        # Those of one expert of a layer that a plan fused before may be solved again after their last known use.
        self.forget([name for name in self._maps if self._users[name] <= 0])
        for network in _networks(output.recipe):
            self._predicted[network] -= 1
            if self._predicted[network] <= 0:
                self._predictors.pop(network, None)

    def forget(self, names: Iterable[str]) -> None:
        """Free maps; one that is needed again is solved again."""
        for name in names:
            self._maps.pop(name, None)
            self._aligned.pop(name, None)

    def map_of(self, name: str) -> TransportMap:
        """The map of the coupling `name`, solved now if it is not yet; its report is in `reports`."""
        return self._map(MapRef(name))

    def _tensors_of(self, outputs: Sequence[Output]) -> list[str]:
        """The base's tensors that computing `outputs` takes, each once, about in the order of their use."""
        found: dict[str, None] = {}
        for output in outputs:
            if is_computed(output.recipe):
                made_from = [output.recipe]
                for name in sorted(self._needs.get(output.name, ())):
                    coupling = self.blueprint.couplings[name]
                    made_from.extend((coupling.first, coupling.second))
                found.update((name, None) for top in made_from for name in _read_whole(top))
        return list(found)

    def _all_maps(self, recipe: Recipe) -> frozenset[str]:
        """Couplings a recipe needs, those included that other couplings are made with."""
        found: set[str] = set()
        waiting = list(maps_used(recipe))
        while waiting:
            name = waiting.pop()
            if name in found:
                continue
            found.add(name)
            coupling = self.blueprint.couplings[name]
            made_from = [coupling.first, coupling.second]
            if coupling.whole_heads is not None:
                waiting.extend(coupling.whole_heads.names)
                made_from.extend(coupling.whole_heads.output)
            for source in made_from:
                waiting.extend(maps_used(source))
            if coupling.t_in.coupling is not None:
                waiting.append(coupling.t_in.coupling)
        return frozenset(found)

    def _cook(self, recipe: Recipe) -> Tensor:
        match recipe:
            case Copy(source):
                return self._read(source)
            case Constant(value, dtype, shape):
                return torch.full(shape, value, dtype=stored_dtype(dtype))
            case Listed(listed, dtype, shape):
                return torch.tensor(listed, dtype=stored_dtype(dtype)).view(shape)
            case Random(key, std, dtype, shape):
                values = self._generator(key).standard_normal(shape, dtype=np.float32)
                return torch.from_numpy(values).mul_(std).to(stored_dtype(dtype))
            case Imported():
                return self._imported(recipe).to(stored_dtype(recipe.dtype))
            case Prompted(prompts, layer, norm):
                return self._prompted(prompts, recipe.against)[layer].mul(norm).to(stored_dtype(recipe.dtype))
            case Taken(model, tensor, start, stop):
                info = self.models[model].tensors[tensor]
                with self.stopwatch.stage("read"):
                    raw = self.models[model].read(tensor)
                return _finite(raw, info, info.shape)[start:stop].to(stored_dtype(recipe.dtype))
            case Dequantised():
                return self._dequantise(recipe).to(stored_dtype(recipe.dtype))
            case Average(first, second):
                lower, upper = self._working(first), self._working(second)
                return lower.add_(upper).mul_(0.5).to(stored_dtype(recipe.dtype))
            case Fused():
                return self._fuse(recipe).to(stored_dtype(recipe.dtype))
            case OneExpert():
                return self._one_expert(recipe)
            case Moved() | PerLayer():
                raise AssertionError("moved as bytes, and nothing is made of it")
            case Extended():
                raise AssertionError("made in pieces, and nothing is made of it")
            case Joined(pieces):
                rows = [self._read(piece.of.source)[piece.start : piece.stop] for piece in pieces]
                return torch.cat([each.flatten() for each in rows]).view(recipe.shape)
            case Noised():
                return self._noised(recipe).to(stored_dtype(recipe.dtype))
            case Redrawn():
                return self._redraw(recipe).to(stored_dtype(recipe.dtype))
            case Columns(of, start, stop, factor):
                return self._working(of)[:, start:stop].mul(factor).to(stored_dtype(recipe.dtype))
            case Repeated(of, times):
                return self._cook(of).repeat_interleave(times, 0)
            case Piled(parts):
                return torch.cat([self._cook(part).flatten() for part in parts]).view(recipe.shape)
            case Matched(experts, number, by):
                matching = self._map(MapRef(by))
                assert isinstance(matching, AssignmentMap), by
                return self._cook(experts[matching.source_of(number)])
            case Stacked():
                return self._stack(recipe)
            case Predicted():
                return self._predict(recipe).to(stored_dtype(recipe.dtype))
            case Interpolated(first, second, alpha):
                share = alpha if isinstance(alpha, float) else float(torch.sigmoid(self._working(alpha)))
                return self._working(first).lerp_(self._working(second), share).to(stored_dtype(recipe.dtype))
            case Sliced(of, start, stop):
                return self._cook(of)[start:stop]
            case Widened(parts, axis):
                return torch.cat([self._cook(part).to("cpu") for part in parts], dim=axis)
            case Summed(terms, factors, divisor):
                total = self._working(terms[0]).mul_(factors[0])
                for term, factor in zip(terms[1:], factors[1:], strict=True):
                    total.add_(self._working(term), alpha=factor)
                return total.div_(divisor).to(stored_dtype(recipe.dtype))
            case Shuffled(of, key):
                # A copy in the element's own width: the order of bits, not of values, is what is shuffled.
                flat = self._cook(of).to("cpu").contiguous().flatten().clone()
                width = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[flat.element_size()]
                bits = flat.view(torch.uint8).numpy().view(width)
                self._generator(key).shuffle(bits)
                return flat.view(recipe.shape)

    def _prompted(self, prompts: _Prompts, against: _Prompts) -> list[Tensor]:
        """Of every layer the rows of a router by prompts, of length 1; the base is run once for all of them."""
        if (prompts, against) not in self._read_by_mlps:
            with self.stopwatch.stage("run the base"):
                found = read_by_mlps(self.base, prompts, against, device=self.device)
            self._read_by_mlps[prompts, against] = [rows / rows.norm(dim=-1, keepdim=True) for rows in found]
        return self._read_by_mlps[prompts, against]

    def _neurons(self, recipe: Noised | Redrawn, values: Tensor) -> Tensor:
        """The numbers of the neurons that an init changes, ascending; the same in all matrices of an expert."""
        width = values.shape[recipe.axis]
        order = self._generator(recipe.neurons).permutation(width)[: max(1, int(recipe.share * width))]
        return torch.from_numpy(np.sort(order)).to(values.device)

    def _noised(self, recipe: Noised) -> Tensor:
        """A matrix with noise on some of its neurons."""
        values = self._working(recipe.of)
        chosen = self._neurons(recipe, values)
        shape = tuple(values.index_select(recipe.axis, chosen).shape)
        std = recipe.std * (float(values.double().std()) if recipe.relative else 1.0)
        noise = torch.from_numpy(self._generator(recipe.key).standard_normal(shape, dtype=np.float32)).mul_(std)
        return values.index_add_(recipe.axis, chosen, noise.to(values))

    def _redraw(self, recipe: Redrawn) -> Tensor:
        """Drop-upcycling of one matrix (Nakamura et al., 2025, section 3.1)."""
        values = self._working(recipe.of)
        chosen = self._neurons(recipe, values)
        before = values.index_select(recipe.axis, chosen).double()
        drawn = torch.from_numpy(self._generator(recipe.key).standard_normal(tuple(before.shape), dtype=np.float32))
        made = drawn.mul_(float(before.std())).add_(float(before.mean())).to(values)
        return values.index_copy_(recipe.axis, chosen, made)

    def _one_expert(self, recipe: OneExpert) -> Tensor:
        """Of a tensor of the base only the expert's bytes are read."""
        if isinstance(recipe.of, Copy):
            own = self._read_expert(recipe.of.source, recipe.number)
        else:
            if recipe.of not in self._whole:
                self._whole[recipe.of] = self._cook(recipe.of)
            own = self._whole[recipe.of][recipe.number]
        own = own.T.contiguous() if recipe.transposed else own
        return torch.cat([own[::2], own[1::2]]) if recipe.interleaved else own

    def _predict(self, recipe: Predicted) -> Tensor:
        if recipe.network not in self._predictors:
            with self.stopwatch.stage("learn to predict"):
                self._predictors[recipe.network] = learn(
                    lambda number: self._working(recipe.stack[number]).float(),
                    len(recipe.stack),
                    PredictionSettings(**dict(recipe.settings)),
                    self._generator(recipe.key),
                )
            self._check_fit(recipe, self._predictors[recipe.network].fit)
        lower, upper = (self._working(side).float() for side in recipe.stack[recipe.below : recipe.below + 2])
        return self._predictors[recipe.network].between(lower, upper)

    def _check_fit(self, recipe: Predicted, fit: Fit) -> None:
        """Keep the report of a network. Raises BadInput where it explains nothing, and nobody asked to keep it."""
        if fit.explained <= 0 and not recipe.keep_poor:
            raise BadInput(
                f"{printable(recipe.fit)}: the network explains {fit.explained:.1%} of the variance of the"
                f" {fit.triples} layers that it learned from, no more than zeros would; use another init, more"
                " `epochs`, a smaller `norm_weight`, or `poor_fit: keep` to have such layers all the same"
            )
        self.reports[recipe.fit] = fit.to_report()

    def _stack(self, recipe: Stacked) -> Tensor:
        """One expert after the other, whose maps are freed before the next one's are solved."""
        whole = torch.empty(recipe.shape, dtype=stored_dtype(recipe.dtype))
        for own, fused in zip(whole, recipe.experts, strict=True):
            target = own.T if recipe.transposed else own
            made = self._fuse(fused).to("cpu", whole.dtype)
            if recipe.interleaved:
                target[::2], target[1::2] = made.chunk(2)
            else:
                target.copy_(made)
            self.forget([block.t_out.coupling for block in fused.blocks if block.t_out.coupling is not None])
        return whole

    def _fuse(self, recipe: Fused) -> Tensor:
        upper = self._working(recipe.second)
        lower = self._working(recipe.first)
        for block in recipe.blocks:
            rows = slice(block.start, block.stop)
            aligned = lower[rows]
            if aligned.ndim == 2:
                upper[rows] += self._fused_rows(aligned, block)
            else:
                upper[rows] += self._align_rows(aligned.unsqueeze(1), block.t_out).squeeze(1)
        return upper.mul_(0.5)

    def _fused_rows(self, lower: Tensor, block: Block) -> Tensor:
        if block.t_out.coupling is None:
            return self._align_columns(lower, block.t_in)
        solved = self._map(block.t_out)
        with self.stopwatch.stage("align rows"):
            return solved.align_rows(self._aligned[block.t_out.coupling])

    def _align_columns(self, matrix: Tensor, ref: MapRef) -> Tensor:
        if ref.coupling is None:
            return matrix
        found = self._map(ref)
        with self.stopwatch.stage("align columns"):
            return found.align_columns(matrix)

    def _align_rows(self, matrix: Tensor, ref: MapRef) -> Tensor:
        if ref.coupling is None:
            return matrix
        return self._map(ref).align_rows(matrix)

    def _map(self, ref: MapRef) -> TransportMap:
        assert ref.coupling is not None
        if ref.coupling not in self._maps:
            coupling = self.blueprint.couplings[ref.coupling]
            if coupling.whole_heads is None:
                self._solve(coupling)
            else:
                self._solve_heads(coupling.whole_heads)
        found = self._maps[ref.coupling]
        return HalfIdentity(found) if ref.half_identity else found

    def _solve(self, coupling: Coupling) -> None:
        lower, upper = self._rows(coupling)
        compared = self._compared(coupling, lower, upper)
        if coupling.groups is not None:
            self._match(coupling, compared, lower, coupling.groups)
            return
        try:
            with self.stopwatch.stage(f"solve {coupling.name.rpartition('.')[2]}"):
                solved = solve(*compared, TransportSettings(**dict(coupling.settings)))
        except ValueError as error:
            raise BadInput(f"transport map {coupling.name}: {error}") from error
        self._keep(coupling.name, solved, lower)

    def _match(self, coupling: Coupling, compared: tuple[Tensor, Tensor], lower: Tensor, groups: int) -> None:
        try:
            with self.stopwatch.stage("match experts"):
                found = match_rows(*compared, groups=groups)
        except ValueError as error:
            raise BadInput(f"experts {coupling.name}: {error}") from error
        self._keep(coupling.name, found, lower)
        # Of each expert of the upper layer its partner in the lower one.
        self.reports[coupling.name]["partners"] = [found.source_of(number) for number in range(found.m)]

    def _solve_heads(self, whole: WholeHeads) -> None:
        """The maps of query, key and value at once: a choice of heads is one for all three."""
        couplings = [self.blueprint.couplings[name] for name in whole.names]
        (query, key, value) = [self._rows(coupling) for coupling in couplings]
        outputs = [self._working(recipe) for recipe in whole.output]
        first, second = (AttentionWeights(query[i], key[i], value[i], outputs[i]) for i in (0, 1))
        try:
            with self.stopwatch.stage("solve heads"):
                found = head_maps(
                    first,
                    second,
                    TransportSettings(**dict(couplings[0].settings)),
                    n_heads=whole.heads,
                    n_kv_heads=whole.kv_heads,
                    head_dim=whole.head_dim,
                )
        except ValueError as error:
            raise BadInput(f"transport maps {', '.join(whole.names)}: {error}") from error
        self._keep(whole.query, found.query, query[0])
        self._keep(whole.key, found.key, key[0])
        self._keep(whole.value, found.value, value[0])

    def _rows(self, coupling: Coupling) -> tuple[Tensor, Tensor]:
        """What a coupling compares: rows of the lower layer after T_in, and of the upper layer."""
        rows = slice(coupling.start, coupling.stop)
        lower = self._align_columns(self._working(coupling.first)[rows], coupling.t_in)
        return lower, self._working(coupling.second)[rows]

    def _compared(self, coupling: Coupling, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
        """What a coupling's cost is of, whose rows, the lower ones after T_in, are given."""
        if coupling.support is not None:
            return self._activations(coupling, coupling.support)
        if coupling.cost_first:
            return self._working(coupling.first)[coupling.start : coupling.stop], upper
        return lower, upper

    def _activations(self, coupling: Coupling, support: TextSupport) -> tuple[Tensor, Tensor]:
        """What the coupling's rows put out on its text; the base is run once for all couplings of that text."""
        if support not in self._fired:
            wanted = [c for c in self.blueprint.couplings.values() if c.support == support]
            names = {recipe.source for c in wanted for recipe in (c.first, c.second) if isinstance(recipe, Copy)}
            with self.stopwatch.stage("run the base"):
                self._fired[support] = activations(
                    self.base,
                    sorted(names),
                    support,
                    text=Path(self.plan_source).parent / support.text,
                    device=self.device,
                )
        rows = slice(coupling.start, coupling.stop)
        assert isinstance(coupling.first, Copy), coupling.name
        assert isinstance(coupling.second, Copy), coupling.name
        fired = self._fired[support]
        return fired[coupling.first.source][rows].to(self.device), fired[coupling.second.source][rows].to(self.device)

    def _keep(self, name: str, solved: TransportMap, lower: Tensor) -> None:
        self._maps[name] = solved
        self._aligned[name] = lower
        self.reports[name] = solved.solution.to_report()

    def _working(self, recipe: Recipe) -> Tensor:
        """A recipe's result in float32 (float64 stays) on the working device, a copy of its own."""
        made = self._cook(recipe)
        dtype = torch.float64 if made.dtype == torch.float64 else torch.float32
        return made.to(self.device, dtype, copy=True)

    def _read(self, name: str) -> Tensor:
        info = self.base.tensors[name]
        with self.stopwatch.stage("read"):
            raw = self._ahead.read(name)
        return _finite(raw, info, info.shape)

    def _read_expert(self, name: str, number: int) -> Tensor:
        """One expert's share of a tensor of all of them, as it is stored."""
        info = self.base.tensors[name]
        size = info.nbytes // info.shape[0]
        with self.stopwatch.stage("read"):
            raw = self.base.read_part(name, slice(number * size, (number + 1) * size))
        return _finite(raw, info, info.shape[1:], (number,))

    def _dequantise(self, recipe: Dequantised) -> Tensor:
        """In float32, in which every product of a quantised number and its scale is exact, or rounded as little."""
        weight, scales = self._stored(recipe.weight), self._stored(recipe.scales)
        if recipe.block is None:
            codes = torch.stack([weight & 15, weight >> 4], dim=-1).flatten(-2).int()
            numbers = torch.tensor(_FOUR_BITS)[codes]
            numbers = torch.ldexp(numbers, (scales.int() - _EXPONENT_BIAS)[..., None])
            return numbers.flatten(-2).transpose(-1, -2).contiguous()
        spread = torch.exp2(scales.float() - _EXPONENT_BIAS) if scales.dtype == torch.uint8 else scales.float()
        if spread.numel() > 1:
            rows, columns = weight.shape[-2:]
            spread = spread.repeat_interleave(recipe.block[0], -2).repeat_interleave(recipe.block[1], -1)
            spread = spread[..., :rows, :columns]
        return weight.float() * spread

    def _stored(self, recipe: Copy) -> Tensor:
        """A tensor of the base as it is stored, quantised or not."""
        with self.stopwatch.stage("read"):
            raw = self._ahead.read(recipe.source)
        dtype = _PACKED.get(recipe.dtype) or stored_dtype(recipe.dtype)
        return torch.frombuffer(raw, dtype=dtype).view(recipe.shape)

    def _imported(self, recipe: Imported) -> Tensor:
        adapter = self.adapters[recipe.adapter]
        with self.stopwatch.stage("read"):
            raw = adapter.read(recipe.tensor)
        dtype = stored_dtype(adapter.facts.tensors[recipe.tensor].dtype)
        tensor = torch.frombuffer(raw, dtype=dtype).view(recipe.shape)
        if not bool(torch.isfinite(tensor).all()):
            raise BadInput(
                f"{printable(recipe.adapter)}: tensor {printable(recipe.tensor)} holds NaN or infinity; the adapter is"
                " broken, get it again"
            )
        return tensor

    def _generator(self, key: str) -> np.random.Generator:
        # Philox, seeded by hash: the same numbers on every platform, in any order of tensors and processes.
        digest = hashlib.sha256(f"{self.blueprint.seed}:{key}".encode()).digest()
        return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


def _finite(
    raw: bytearray, info: TensorInfo, shape: tuple[int, ...], begins: tuple[int, ...] = (), *, first: int = 0
) -> Tensor:
    """The numbers of a tensor, or of what begins in it at `begins`, or of its rows from `first` on.

    Raises BadInput where one is not finite.
    """
    dtype = stored_dtype(info.dtype)
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=dtype)
    tensor = torch.frombuffer(raw, dtype=dtype).view(shape)
    if not _all_finite(raw, info.dtype):
        finite = torch.isfinite(tensor)
        at = [int(i) for i in (~finite).nonzero()[0]]
        where = [*begins, at[0] + first, *at[1:]]
        raise BadInput(
            f"{printable(info.name)} ({printable(info.file)}): holds {tensor[tuple(at)].item()} at"
            f" {where}; new layers cannot be computed from it (a copy of this layer would be as broken)"
        )
    return tensor


def _all_finite(data: bytearray | memoryview, dtype: str) -> bool:
    """Whether all numbers are, seen on their bits: torch takes twenty times as long for bfloat16."""
    look = FiniteCheck(dtype)
    look(data)
    return look.finite


def _read_whole(recipe: Recipe) -> Iterator[str]:
    """The tensors of the base that a recipe takes as a whole; others are read a part at a time, where needed.

    Of a stack only the two neighbours: a network that is to be learnt reads all of it, one layer after the other.
    """
    if isinstance(recipe, Copy):
        yield recipe.source
    elif isinstance(recipe, Predicted):
        for neighbour in recipe.stack[recipe.below : recipe.below + 2]:
            yield from _read_whole(neighbour)
    elif not (isinstance(recipe, Extended) or (isinstance(recipe, OneExpert) and isinstance(recipe.of, Copy))):
        for source in sources(recipe):
            yield from _read_whole(source)


def _networks(recipe: Recipe) -> Iterator[tuple[object, ...]]:
    """The networks that predict something a recipe is made of."""
    if isinstance(recipe, Predicted):
        yield recipe.network
    for source in sources(recipe):
        yield from _networks(source)


# Bytes of embeddings in memory at once: their rows in float64 fit a core's cache.
_ROW_BYTES_AT_ONCE = 1 << 19


def _extended(base: CheckpointFolder, recipe: Extended) -> Iterator[memoryview]:
    """The rows of a tensor of the base, then the mean of those named, or of all; in float64, rounded once."""
    info, count = base.tensors[recipe.of.source], recipe.of.shape[0]
    total = torch.zeros(info.shape[1:], dtype=torch.float64)
    at_once = max(1, _ROW_BYTES_AT_ONCE * count // max(1, info.nbytes))
    for begin in range(0, count, at_once):
        raw, rows = _rows(base, info, begin, min(begin + at_once, count))
        total += _summed(rows)
        yield memoryview(raw)
    everything = (total / count).to(stored_dtype(info.dtype))
    for begin in range(0, len(recipe.made_of), at_once):
        named = recipe.made_of[begin : begin + at_once]
        held = {number: _rows(base, info, number, number + 1)[1][0] for number in {n for each in named for n in each}}
        means = [_mean([held[n] for n in each]) if each else everything for each in named]
        yield torch.stack(means).view(-1).view(torch.uint8).numpy().data


def _summed(rows: Tensor) -> Tensor:
    """The sum of a few rows in float64; threads that wait for each other would take longer than the sum."""
    with one_thread():
        return rows.double().sum(0)


def _rows(base: CheckpointFolder, info: TensorInfo, begin: int, end: int) -> tuple[bytearray, Tensor]:
    """The bytes of rows of a tensor, and their numbers. Raises BadInput where one is not finite."""
    width = info.nbytes // info.shape[0]
    raw = base.read_part(info.name, slice(begin * width, end * width))
    return raw, _finite(raw, info, (end - begin, *info.shape[1:]), first=begin)


def _mean(rows: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(rows)).double().mean(0).to(rows[0].dtype)


def activations(
    base: CheckpointFolder, weights: Iterable[str], support: TextSupport, *, text: Path, device: torch.device
) -> dict[str, Tensor]:
    """For each named weight of a linear module, the module's outputs on the text: (rows, samples), float32, on the CPU.

    The support of `support: activations` (Singh and Jaggi, 2020): two neurons correspond where they fire alike, not
    where their weights lie close. The base runs once, in the memory of one layer (verification's streamed model).

    Samples are the text's first tokens in windows of `support.window`. Raises BadInput for a text that cannot be
    read or gives too few tokens, and for a base without tokenizer.
    """
    windows = -(-support.samples // support.window)
    vocabulary = dissect(base.config, base.tensors, base.own).sizes.vocabulary
    tokens = token_batches(base.path, text=text, window=support.window, windows=windows, vocabulary=vocabulary)
    if tokens.ids.numel() < support.samples:
        raise BadInput(
            f"{printable(str(text))} gives {tokens.ids.numel()} tokens in windows of {support.window}, `samples` asks"
            f" for {support.samples}"
        )
    streamed = StreamedModel(base, dtype="float32", device=str(device))
    named = {stored: name for name, all_of_it in streamed.stored_as.items() for stored in all_of_it}
    kept: dict[str, list[Tensor]] = {weight: [] for weight in weights}
    for weight in kept:
        module = streamed.module.get_submodule(named[weight].removesuffix(".weight"))
        module.register_forward_hook(_keeping(kept[weight]))
    with torch.inference_mode():
        for ids in torch.split(tokens.ids, _WINDOWS_AT_ONCE):
            with running(streamed.module):
                streamed.module(ids.to(device), use_cache=False, logits_to_keep=1)
    return {weight: torch.cat(parts)[: support.samples].T.contiguous() for weight, parts in kept.items()}


def _keeping(parts: list[Tensor]) -> Callable[[Any, Any, Tensor], None]:
    def keep(_module: Any, _arguments: Any, output: Tensor) -> None:
        # Cloned outside of inference mode's views: the caller computes with it.
        parts.append(output.flatten(0, -2).float().cpu().clone())

    return keep
