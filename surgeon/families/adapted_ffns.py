"""What layers compute with where they run one FFN together: its matrices, and low-rank pairs that each layer adds.

Zamba 2 stores such an FFN once, and for every layer that runs it a pair of matrices A and B on top of gate and up: the
layer reads with W + B A. Which pair is which layer's, gradients on a twin show; that a layer's FFN is the formula with
these matrices and no other, its numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from surgeon.common.devices import one_thread
from surgeon.families.family import Part, Role
from surgeon.families.shared import shared_in
from surgeon.families.shared_places import used_by_layer
from surgeon.families.silence import captured
from surgeon.families.skeleton import Skeleton
from surgeon.families.twin import twin_of

if TYPE_CHECKING:
    from torch import Tensor

# By layer: the tensors of its FFN that are as wide as it, by name on disk, each with what the layer adds to it: pairs
# (A, B), by names on disk.
AdaptedFFNs = dict[int, dict[str, tuple[tuple[str, str], ...]]]
# The same of one layer.
_Pairs = dict[str, tuple[tuple[str, str], ...]]
_TOLERANCE = 1e-4


def adapted_ffns(
    config: Mapping[str, Any],
    parts: Mapping[str, Part],
    outer: Mapping[str, str],
    activation: Callable[[int], str],
    *,
    heads: int,
) -> AdaptedFFNs:
    """The FFNs of layers that run a block which others run too; those that a twin does not confirm are left out.

    `parts` are the tensors of such FFNs by name on disk, `outer` the names in memory of what stands outside the layers;
    `activation` names that of a layer's FFN.
    """
    twin = twin_of(config, heads=heads)
    shared = shared_in(twin)
    if shared is None:
        return {}
    on_disk = {target: name for name, target in outer.items()}
    found: AdaptedFFNs = {}
    for layer, names in used_by_layer(twin, shared.paths).items():
        stem = f"{twin.stack}.{shared.owner[layer]}."
        mine = {on_disk[stem + name]: name for name in names if stem + name in on_disk}
        pairs = _pairs(mine, parts, _held(twin, layer))
        if pairs and _computes(twin, layer, mine, pairs, parts, activation(layer)):
            found[layer] = pairs
    return found


def _held(twin: Skeleton, layer: int) -> dict[str, Tensor]:
    return dict(twin.layers[layer].named_parameters(remove_duplicate=False))


def _pairs(mine: Mapping[str, str], parts: Mapping[str, Part], held: Mapping[str, Tensor]) -> _Pairs:
    """The tensors of a layer's FFN, each with the pairs on top of it, by their names; empty where one is neither.

    `mine` are the names in the layer of those that it computes with, by name on disk.
    """
    above = {_parent(mine[name]) for name in mine if name in parts and _does(parts[name], "down")}
    if len(above) != 1:
        return {}
    (ffn,) = above
    inside = {name: target for name, target in mine.items() if target.startswith(f"{ffn}.")}
    own = {name: target for name, target in inside.items() if _parent(target) == ffn}
    found: _Pairs = {name: () for name in own if name in parts}
    others = sorted((target.rsplit(".", 2)[0], name) for name, target in inside.items() if name not in own)
    for module, group in itertools.groupby(others, key=lambda each: each[0]):
        names = [name for _, name in group]
        on = [name for name in found if module.startswith(mine[name].rpartition(".")[0]) and held[mine[name]].ndim > 1]
        if len(names) != 2 or len(on) != 1:
            return {}
        down, up = (held[mine[name]] for name in names)
        whole = held[mine[on[0]]]
        if down.ndim != 2 or up.ndim != 2 or (up.shape[0], down.shape[1]) != whole.shape or up.shape[1] != len(down):
            return {}
        found[on[0]] += ((names[0], names[1]),)
    return found if found.keys() == own.keys() else {}


def _parent(target: str) -> str:
    """The module that holds a tensor's module."""
    return target.rpartition(".")[0].rpartition(".")[0]


def _does(part: Part, role: Role) -> bool:
    return part.kind == "weight" and any(each == role for each, _ in part.blocks)


def _computes(
    twin: Skeleton, layer: int, mine: Mapping[str, str], pairs: _Pairs, parts: Mapping[str, Part], activation: str
) -> bool:
    """Whether a layer's FFN is W_d (σ(W_g x) ⊙ W_u x), or without a gate, with each W + Σ B A in the place of W."""
    import torch
    from transformers.activations import ACT2FN

    held, rows = _held(twin, layer), dict[tuple[str, Role], Any]()
    for name, own in pairs.items():
        value = held[mine[name]].detach().clone()
        for down, up in own:
            value += held[mine[up]].detach() @ held[mine[down]].detach()
        part = parts[name]
        # A twin's FFN is as wide as it likes, and its tensors are put together as the base's.
        sizes = [len(value) * count // part.shape[0] for _, count in part.blocks]
        rows |= {(part.kind, role): own for (role, _), own in zip(part.blocks, torch.split(value, sizes), strict=True)}
    if activation not in ACT2FN or ("weight", "up") not in rows:
        return False
    sigma = ACT2FN[activation]

    def linear(x: Tensor, role: Role) -> Tensor:
        return torch.nn.functional.linear(x, rows["weight", role], rows.get(("bias", role)))

    ffn = next(_parent(mine[name]) for name in pairs)
    given: list[tuple[Any, Tensor]] = []
    with torch.no_grad(), one_thread():
        run = captured(twin, [layer])[layer]
        module = run.layer.get_submodule(ffn)
        handle = module.register_forward_hook(lambda _module, args, output: given.append((args, output)))
        run.output()
        handle.remove()
        (x, *_), output = given[0]
        first = sigma(linear(x, "gate" if ("weight", "gate") in rows else "up"))
        made = linear(first * linear(x, "up") if ("weight", "gate") in rows else first, "down")
    return bool((made - output).abs().max() <= _TOLERANCE * output.abs().max())
