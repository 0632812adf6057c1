"""The tensors of an FFN that stands in a block which several layers run, with what their rows and columns are.

They stand outside the layers, in as many tensors as the checkpoint stores: the FFN's own, and (Zamba 2) low-rank
adapters of each layer on top of its projections, as high as these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surgeon.families.family import Part, Role
from surgeon.families.roles import MLP_WORDS
from surgeon.families.shared import shared_in
from surgeon.families.skeleton import Skeleton
from surgeon.families.widening import Layers

# A block's parts by the layer that stores it: names in that layer in memory, by name on disk, and the parts so named.
SharedParts = Mapping[int, tuple[dict[str, tuple[str, ...]], tuple[Part, ...]]]


def shared_parts(skeleton: Skeleton, outer: Mapping[str, str], hidden: int) -> SharedParts:
    """The FFNs of shared blocks; `outer` are the names in memory of what stands outside the layers, by name on disk."""
    shared = shared_in(skeleton)
    if shared is None:
        return {}
    held = skeleton.model.state_dict(keep_vars=True)
    found: dict[int, tuple[dict[str, tuple[str, ...]], tuple[Part, ...]]] = {}
    for owner in sorted({index for index in shared.owner if index is not None}):
        stem = f"{skeleton.stack}.{owner}."
        own = {name: target.removeprefix(stem) for name, target in outer.items() if target.startswith(stem)}
        shapes = {name: tuple(held[stem + target].shape) for name, target in own.items() if shared.holds(target)}
        parts: list[Part] = []
        for name, shape in shapes.items():
            above, word = _above(own[name])
            if MLP_WORDS.get(word) == "down" and len(shape) == 2 and shape[0] == hidden:
                inside = {each: own[each] for each in shapes if own[each].startswith(f"{above}.")}
                parts += _of_ffn(inside, shapes, down=name)
        if parts:
            found[owner] = {part.suffix: (own[part.suffix],) for part in parts}, tuple(parts)
    return found


def as_layers(found: SharedParts) -> tuple[Layers, list[tuple[Part, ...]]]:
    """The same as kinds of layers, of one layer each."""
    return [(owner, names) for owner, (names, _) in found.items()], [parts for _, parts in found.values()]


def _above(target: str) -> tuple[str, str]:
    """The module that holds a tensor's module, and the word by which it does."""
    above, _, word = target.rpartition(".")[0].rpartition(".")
    return above, word


def _of_ffn(inside: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], *, down: str) -> list[Part]:
    """The tensors of one FFN that are as wide as it: the projection that writes, and what reads, gate above up."""
    width = shapes[down][1]
    found = [Part(down, shapes[down], "weight", (("down", shapes[down][0]),))]
    for name, target in inside.items():
        shape, (_, word) = shapes[name], _above(target)
        role: Role = MLP_WORDS.get(word, "up")
        if name == down or role == "down" or shape[0] not in (width, 2 * width):
            continue
        blocks: tuple[tuple[Role, int], ...] = (("gate", width), ("up", width))
        kind: Any = "weight" if len(shape) > 1 else "bias"
        found.append(Part(name, shape, kind, blocks if shape[0] == 2 * width else ((role, width),)))
    return found
