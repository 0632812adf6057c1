"""Blocks that several layers run and a checkpoint stores once (Zamba); their tensors belong to no single layer.

Such a block's tensors are listed outside the layers (`Anatomy.outer`), under their name in the lowest layer that runs
the block. The layer's other tensors are its own. A block may hold separate tensors for each layer that runs it (the
adapters of Zamba 2), numbered inside the block; a twin shows which layer uses which.
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
    """The blocks that layers share: `paths` are their modules in a layer.

    `owner[i]` is the layer under whose name layer `i`'s blocks are stored: the lowest that runs them, perhaps `i`
    itself; None where layer `i` has no such block.
    """

    paths: tuple[str, ...]
    owner: tuple[int | None, ...]

    def holds(self, suffix: str) -> bool:
        """Return whether a layer's tensor, by its name in memory, belongs to a shared block."""
        return within(suffix, self.paths)


def shared_in(skeleton: Skeleton, paths: Sequence[str] | None = None) -> Shared | None:
    """Return the blocks that layers of a built model share, or None where there are none.

    With `paths`: the blocks at these paths, even where only one layer runs them.
    """
    held = [dict(layer.named_parameters(remove_duplicate=False)) | stored_buffers(layer) for layer in skeleton.layers]
    tied, first = skeleton.model.all_tied_weights_keys, dict[int, str]()

    def stored(index: int, name: str) -> str:
        """Return the name of the stored tensor that this tensor is tied to."""
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
    """Return whether a tensor of a layer is in one of the modules `paths`, or is itself one of the paths."""
    return any(name == path or name.startswith(f"{path}.") for path in paths)


def _tops(layer: nn.Module, names: set[str], several: Collection[str]) -> list[str]:
    """Return the topmost modules of a layer whose tensors are all in `several`; single tensors where no module is."""
    tops: list[str] = []
    for path in [*(name for name, _ in layer.named_modules() if name), *sorted(several)]:
        inside = {name for name in names if within(name, [path])}
        if inside and inside <= set(several) and not within(path, tops):
            tops.append(path)
    return tops


def first_of_another(built: Skeleton, shared: Shared | None, order: Sequence[int]) -> tuple[int | None, str]:
    """Return (the first layer of a grown model that runs another block than it should, why), or (None, "").

    Layer `n` of `built` is like layer `order[n]` of the model whose blocks are `shared`, and should run the same block.
    One shared block may not become two: the two would be trained separately.
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
