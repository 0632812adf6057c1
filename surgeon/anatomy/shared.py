"""Blocks that several layers run and a checkpoint stores once (Zamba); their tensors belong to no single layer.

Such a block's tensors are listed outside the layers (`Anatomy.outer`), under their name in the lowest layer that runs
the block. The layer's other tensors are its own. transformers ties such blocks by the numbers of layers, so the stack
keeps its layers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from surgeon.anatomy.skeleton import Skeleton
from surgeon.anatomy.twin import stored_buffers

if TYPE_CHECKING:
    from torch import nn


def shared_in(skeleton: Skeleton) -> tuple[str, ...]:
    """Return the paths, in a layer, of the blocks that layers of a built model share; empty where there are none."""
    held = [dict(layer.named_parameters(remove_duplicate=False)) | stored_buffers(layer) for layer in skeleton.layers]
    tied, first = skeleton.model.all_tied_weights_keys, dict[int, str]()

    def stored(index: int, name: str) -> str:
        """Return the name of the stored tensor that this tensor is tied to."""
        whole = f"{skeleton.stack}.{index}.{name}"
        whole = first.setdefault(id(held[index][name]), whole)
        return str(tied.get(whole, whole))

    users: dict[str, set[int]] = {}
    for index, tensors in enumerate(held):
        for name in tensors:
            users.setdefault(stored(index, name), set()).add(index)
    found: dict[str, None] = {}
    for index, layer in enumerate(skeleton.layers):
        several = {name for name in held[index] if len(users[stored(index, name)]) > 1}
        found |= dict.fromkeys(_tops(layer, set(held[index]), several))
    return tuple(found)


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
