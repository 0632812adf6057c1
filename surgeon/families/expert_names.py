"""The two layouts of experts on disk: a tensor for all of them, as transformers' model has, or tensors for each.

transformers itself is asked how it would save a model's tensors: of one whose rows are numbered, it makes those that it
saves, and the numbers in them say which rows each of these holds.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from typing import Any

from surgeon.common.library import LOAD_FAILURES, quiet_transformers
from surgeon.families.skeleton import Skeleton

# A tensor in memory as transformers saves it: of each expert the tensors, one below the other, with their rows. Of what
# it saves whole under another name there is one.
Saved = list[list[tuple[str, int]]]


def saved_layouts(skeleton: Skeleton, layer: int) -> dict[str, Saved]:
    """The tensors of a layer that transformers saves in rows, or under another name, by their names below the layer.

    Those that it turns, or makes together with others, are left out.
    """
    stem = f"{skeleton.stack}.{layer}."
    found: dict[str, Saved] = {}
    for name, value in skeleton.layers[layer].state_dict(keep_vars=True).items():
        with contextlib.suppress(*LOAD_FAILURES):
            saved = _saved(skeleton.model, f"{stem}{name}", tuple(value.shape), f".{layer}.")
            if saved is not None and saved != [[(name, saved[0][0][1])]]:
                found[name] = saved
    return found


def _saved(model: Any, place: str, shape: tuple[int, ...], below: str) -> Saved | None:
    """How a tensor is saved, by names below its layer; None where not as rows of it, each once and in order."""
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    axes = min(len(shape), 2)
    count = math.prod(shape[:axes])
    numbered = torch.arange(count).view(*shape[:axes], *[1] * (len(shape) - axes))
    with quiet_transformers():
        made = revert_weight_conversion(model, {place: numbered})
    if not count or not all(value.numel() for value in made.values()):
        return None
    parts = sorted((int(value.flatten()[0]), name.partition(below)[2], value) for name, value in made.items())
    if not torch.equal(torch.cat([value.flatten() for *_, value in parts]), numbered.flatten()):
        return None
    if len(parts) == 1:
        return [[(parts[0][1], shape[0])]] if parts[0][2].shape == numbered.shape else None
    each = count // shape[0]
    experts = [
        [(name, len(value)) for _, name, value in own]
        for _, own in itertools.groupby(parts, key=lambda part: part[0] // each)
    ]
    whole = len(experts) == shape[0] and all(sum(rows for _, rows in expert) == each for expert in experts)
    return experts if whole and all(value.ndim == len(shape) - 1 for *_, value in parts) else None
