"""Blocks that several layers run and a checkpoint stores once (Zamba): their tensors are no single layer's.

Such a block's tensors stand beside the layers (`Anatomy.outer`), under the name that they have in the lowest layer that
runs it. A layer's own tensors are what is left of it. A block may hold tensors for each of the layers that run it (the
adapters of Zamba 2), which are numbered in it; which layer uses which is found on a twin.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surgeon.anatomy.skeleton import Skeleton
from surgeon.anatomy.twin import stored_buffers

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Shared:
    """The blocks that layers share: `paths` are their modules in a layer; `owner[i]` is the layer that stores layer
    `i`'s (itself, where it is the lowest that runs it; None where it has no such block)."""

    paths: tuple[str, ...]
    owner: tuple[int | None, ...]

    def holds(self, suffix: str) -> bool:
        """Whether a tensor of a layer, by its name in memory there, is a shared block's."""
        return within(suffix, self.paths)


def shared_in(skeleton: Skeleton, paths: Sequence[str] | None = None) -> Shared | None:
    """The blocks that layers of a built model share, or those at `paths`, also where only one layer runs one.

    None where there are none.
    """
    held = [dict(layer.named_parameters(remove_duplicate=False)) | stored_buffers(layer) for layer in skeleton.layers]
    tied, first = skeleton.model.all_tied_weights_keys, dict[int, str]()

    def stored(index: int, name: str) -> str:
        """The tensor that this one is, by the name of the one that is stored."""
        whole = f"{skeleton.stack}.{index}.{name}"
        whole = first.setdefault(id(held[index][name]), whole)
        return str(tied.get(whole, whole))

    users: dict[str, list[int]] = {}
    for index, tensors in enumerate(held):
        for name in tensors:
            users.setdefault(stored(index, name), []).append(index)
    if paths is None:
        found: dict[str, None] = {}
        for index, layer in enumerate(skeleton.layers):
            several = {name for name in held[index] if len({*users[stored(index, name)]}) > 1}
            found |= dict.fromkeys(_tops(layer, set(held[index]), several))
        paths = tuple(found)
    if not paths:
        return None
    owner = []
    for index, tensors in enumerate(held):
        inside = [users[stored(index, name)][0] for name in tensors if within(name, paths)]
        owner.append(min(inside, default=None))
    return Shared(tuple(paths), tuple(owner))


def within(name: str, paths: Sequence[str]) -> bool:
    """Whether a tensor of a layer stands in one of these modules, or is one of them."""
    return any(name == path or name.startswith(f"{path}.") for path in paths)


def _tops(layer: nn.Module, names: set[str], several: Collection[str]) -> list[str]:
    """The topmost modules of a layer all of whose tensors are among `several`; single tensors where there is none."""
    tops: list[str] = []
    for path in [*(name for name, _ in layer.named_modules() if name), *sorted(several)]:
        inside = {name for name in names if within(name, [path])}
        if inside and inside <= set(several) and not within(path, tops):
            tops.append(path)
    return tops


def first_of_another(built: Skeleton, shared: Shared | None, order: Sequence[int]) -> tuple[int | None, str]:
    """The first layer of a grown model that runs another block than the layer that it is as, and why; or None.

    Layer `n` of `built` is as layer `order[n]` of the model whose blocks are `shared`. What one block was may not
    become two: each would have to learn for itself.
    """
    found = shared_in(built, None if shared is None else shared.paths)
    if shared is None:
        if found is None:
            return None, ""
        several = [index for index, owner in enumerate(found.owner) if owner not in (None, index)]
        return min(several), "it would share a block with another layer, which no layer of the base does"
    owners = found.owner if found is not None else (None,) * len(order)
    there: dict[int, int] = {}
    back: dict[int, int] = {}
    for index, (owner, source) in enumerate(zip(owners, order, strict=True)):
        before = shared.owner[source]
        if owner is None or before is None:
            same = owner == before
        else:
            same = there.setdefault(owner, before) == before and back.setdefault(before, owner) == owner
        if not same:
            return index, "it would run another of the blocks that layers share"
    return None, ""
