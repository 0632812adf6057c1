"""Spaces inside a layer: dimensions that the layer's own tensors write and read, such as channels, latents or heads.

The units of a space may change places in every tensor that holds them, and the layer computes the same. Names and
shapes propose which tensors hold a space (channel mixers, state spaces, latent attention, fused projections). A twin
proves it: when units move everywhere, nothing changes; when they move everywhere except in one place, something does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surgeon.anatomy.family import Slot, Space
from surgeon.anatomy.moving import SAME, Move, Mover
from surgeon.anatomy.silence import Run, captured
from surgeon.anatomy.skeleton import Skeleton
from surgeon.anatomy.twin import shrunk, stored_buffers, twin_of_small
from surgeon.common.devices import one_thread
from surgeon.common.library import LOAD_FAILURES
from surgeon.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor, nn


# Eight first: some classes keep heads in four blocks (CodeGen), and with four heads a block would be one head.
_HEADS = (8, 4, 2)
_GROUPS = ("n_groups", "mamba_n_groups", "mamba_ngroups")
_FUSED = ("query_key_value", "qkv_proj", "Wqkv", "qkv")
_OUTPUTS = ("dense", "out_proj", "o_proj", "c_proj")
_ROWS, _COLUMNS = 0, 1


@dataclass(frozen=True)
class _Layer:
    """The tensors of a layer in memory by their shapes, with its module and the number of heads."""

    shapes: Mapping[str, tuple[int, ...]]
    module: nn.Module
    heads: int

    def count(self, stem: str, *names: str, default: int) -> int:
        """Return an integer attribute, under one of these names, of the module at `stem`; else `default`."""
        held = self.module.get_submodule(stem.removesuffix("."))
        found = [getattr(held, name, None) for name in names]
        return next((value for value in found if type(value) is int and value > 0), default)

    def slots(self, units: int, *places: tuple[str, int, int, int]) -> tuple[Slot, ...]:
        """Return the given places whose tensor the layer has; for a matrix with units in its rows, its bias too."""
        found = [Slot(*place) for place in places if place[0] in self.shapes]
        biases = [slot._replace(suffix=slot.suffix.removesuffix("weight") + "bias") for slot in found if not slot.axis]
        known = {*found}
        return (*found, *(b for b in biases if b.suffix in self.shapes and b not in known))

    def fits(self, space: Space) -> bool:
        """Return whether every place lies inside its tensor, and the space has several units and several places."""
        ends = [slot.start + space.units * slot.each <= self.shapes[slot.suffix][slot.axis] for slot in space.slots]
        return space.units > 1 and len(space.slots) > 1 and all(ends) and all(slot.each > 0 for slot in space.slots)


def inner_spaces(config: Mapping[str, Any], skeleton: Skeleton, layer: int, heads: int) -> tuple[Space, ...]:
    """Return the spaces of a layer, by its tensors' names in memory, that a twin proves.

    `heads` is the model's number of heads. Empty where no twin with several units can be run.
    """
    import torch

    own = _described(_layer_of(skeleton, layer, heads))
    if not own:
        return ()
    for twin_heads in sorted({min(each, heads) for each in _HEADS}, reverse=True):
        try:
            with one_thread(), torch.no_grad():
                # Two groups of a state space, enough to show that its units are groups.
                groups = {key: 2 for key in _GROUPS if type(config.get(key)) is int and config[key] > 1}
                twin = twin_of_small(shrunk(config, heads_left=twin_heads) | groups)
                run = captured(twin, [layer])[layer]
                of_twin = dict(_named(_described(_layer_of(twin, layer, twin_heads))))
                proven = {name for name, space in of_twin.items() if _holds(run, space)}
        except (*LOAD_FAILURES, BadInput, KeyError):
            continue
        found: dict[str, Space] = {}
        for key, space in _named(own):
            if key in proven:
                found.setdefault(space.name, space)
        return tuple(found.values())
    return ()


def _named(spaces: Sequence[Space]) -> Iterator[tuple[tuple[str, tuple[tuple[str, int], ...]], Space]]:
    """Yield each space with a key that identifies it in a model of any size."""
    for space in spaces:
        yield (space.name, tuple((slot.suffix, slot.axis) for slot in space.slots)), space


def _layer_of(skeleton: Skeleton, index: int, heads: int) -> _Layer:
    """Return layer `index` of a model with the shapes of its parameters and stored buffers."""
    module = skeleton.layers[index]
    held = dict(module.named_parameters()) | stored_buffers(module)
    return _Layer({name: tuple(value.shape) for name, value in held.items()}, module, heads)


def _described(layer: _Layer) -> list[Space]:
    """Return the spaces that names and shapes propose; several readings of one space follow each other."""
    found: list[Space] = []
    for name in layer.shapes:
        stem, _, word = name.removesuffix(".weight").rpartition(".")
        stem = f"{stem}." if stem else ""
        if not name.endswith(".weight"):
            continue
        if word in ("conv", "conv1d"):
            found += _convolved(layer, stem, word)
        elif word == "kv_b_proj":
            found += _latent(layer, stem)
        elif word in _FUSED:
            found += _fused_heads(layer, stem, word)
    return [space for space in found if layer.fits(space)]


def _convolved(layer: _Layer, stem: str, conv: str) -> Iterator[Space]:
    """Yield the inner width of a gated convolution (LFM2), or of the state spaces of Mamba and Mamba 2."""
    shapes = layer.shapes
    inside, out, decay = (shapes.get(f"{stem}{word}", ()) for word in ("in_proj.weight", "out_proj.weight", "A_log"))
    rows = shapes[f"{stem}{conv}.weight"][0]
    if len(inside) != 2 or len(out) != 2:
        return
    width, writes = out[1], f"{stem}in_proj.weight"
    read, mixed = (f"{stem}out_proj.weight", _COLUMNS, 0), (f"{stem}{conv}.weight", _ROWS, 0)
    if len(decay) == 1 and inside[0] == width + rows + decay[0]:
        yield from _state_heads(layer, stem, conv, rows - width)
    elif rows == width and inside[0] % width == 0:
        thirds = [(writes, _ROWS, width * nth, 1) for nth in range(inside[0] // width)]
        own = [(f"{stem}{word}", _ROWS, 0, 1) for word in ("dt_proj.weight", "A_log", "D", "norm.weight")]
        reads = (f"{stem}x_proj.weight", _COLUMNS, 0, 1)
        yield Space(f"{stem}channels", width, layer.slots(width, *thirds, (*mixed, 1), reads, *own, (*read, 1)))


def _state_heads(layer: _Layer, stem: str, conv: str, states: int) -> Iterator[Space]:
    """Yield Mamba 2's heads or, where several groups of heads have states of their own, the groups (z, x, B, C, dt)."""
    width, heads = layer.shapes[f"{stem}out_proj.weight"][1], layer.shapes[f"{stem}A_log"][0]
    groups = layer.count(stem, "n_groups", default=1)
    units = heads if groups == 1 else groups
    if width % units or heads % units or states % (2 * units):
        return
    each, half = width // units, states // 2
    writes, mixes = f"{stem}in_proj.weight", f"{stem}{conv}.weight"
    places = [(writes, _ROWS, 0, each), (writes, _ROWS, width, each), (mixes, _ROWS, 0, each)]
    if groups > 1:
        places += [(writes, _ROWS, 2 * width + at, half // units) for at in (0, half)]
        places += [(mixes, _ROWS, width + at, half // units) for at in (0, half)]
    places.append((writes, _ROWS, 2 * width + states, heads // units))
    places += [(f"{stem}{word}", _ROWS, 0, heads // units) for word in ("A_log", "D", "dt_bias")]
    places += [(f"{stem}norm.weight", _ROWS, 0, each), (f"{stem}out_proj.weight", _COLUMNS, 0, each)]
    yield Space(f"{stem}{'heads' if groups == 1 else 'groups'}", units, layer.slots(units, *places))


def _latent(layer: _Layer, stem: str) -> Iterator[Space]:
    """Yield the spaces of latent attention (DeepSeek's): latents of queries, latents of keys and values, and heads."""
    shapes = layer.shapes
    heads = layer.count(stem, "num_heads", "num_attention_heads", default=layer.heads)
    for side, down in (("q", "q_a_proj"), ("kv", "kv_a_proj_with_mqa")):
        rank = shapes.get(f"{stem}{side}_a_layernorm.weight", (0,))[0]
        places = [(f"{stem}{word}.weight", _ROWS, 0, 1) for word in (down, f"{side}_a_layernorm")]
        places.append((f"{stem}{side}_b_proj.weight", _COLUMNS, 0, 1))
        yield Space(f"{stem}{side}_latent", rank, layer.slots(rank, *places))
    names = [f"{stem}{word}.weight" for word in ("q_b_proj", "q_proj", "kv_b_proj")]
    places = [(name, _ROWS, 0, shapes[name][0] // heads) for name in names if name in shapes]
    out = f"{stem}o_proj.weight"
    if out in shapes:
        places.append((out, _COLUMNS, 0, shapes[out][1] // heads))
        yield Space(f"{stem}heads", heads, layer.slots(heads, *places))


def _fused_heads(layer: _Layer, stem: str, word: str) -> Iterator[Space]:
    """Yield groups of query heads with their key and value head in a fused matrix, in two readings.

    The rows of one group may follow those of another, or all query rows come first, then all key, then all value rows.
    """
    shapes, fused = layer.shapes, f"{stem}{word}.weight"
    out = next((name for name in (f"{stem}{each}.weight" for each in _OUTPUTS) if name in shapes), None)
    if out is None or len(shapes[fused]) != 2:
        return
    heads = layer.count(stem, "num_heads", "num_attention_heads", default=layer.heads)
    groups = layer.count(stem, "num_key_value_heads", "num_kv_heads", default=heads)
    rows, width = shapes[fused][0], shapes[out][1]
    if heads < 1 or width % heads or heads % groups or rows != width + 2 * groups * (width // heads):
        return
    read, size = (out, _COLUMNS, 0, width // groups), width // heads
    yield Space(f"{stem}heads", groups, layer.slots(groups, (fused, _ROWS, 0, rows // groups), read))
    stacked = [(fused, _ROWS, start, each) for start, each in ((0, width // groups), (width, size))]
    stacked.append((fused, _ROWS, width + groups * size, size))
    yield Space(f"{stem}heads", groups, layer.slots(groups, *stacked, read))


def _holds(run: Run, space: Space) -> bool:
    """Return whether the layer computes the same once units move, and something else where one place does not move."""
    held = dict(run.layer.named_parameters()) | stored_buffers(run.layer)
    moves = [_turned(held[slot.suffix], slot, space.units) for slot in space.slots]
    return Mover(run).holds(moves, [[each for each in moves if each is not left] for left in moves], least=SAME)


def _turned(value: Tensor, slot: Slot, units: int) -> Move:
    """Return a move that puts every unit in the place of the next."""
    import torch

    own = value.narrow(slot.axis, slot.start, units * slot.each)
    return Move(own, slot.axis, torch.arange(units * slot.each).roll(slot.each))
