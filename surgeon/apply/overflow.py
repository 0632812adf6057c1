"""Whether what a surgery added computes numbers: what ends in zeros adds 0 × f(x), which is none where f overflows.

Looked at once all is written and before it is published, on one text, a layer in memory at a time; and only where the
weights allow an overflow. In float16 most do; in other dtypes numbers must be far larger than any that are learned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from surgeon.blueprint.blueprint import Blueprint
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.header import FLOAT_DTYPES
from surgeon.errors import BadInput
from surgeon.families.anatomy import places_of
from surgeon.models.load import running, stored_dtype
from surgeon.models.stream import StreamedModel
from surgeon.models.tokens import token_batches
from surgeon.operations.prepare import OpenedBase

_TOKENS = 24
# How large numbers may be that a block reads, beside those that its norm makes.
_STREAM = 1e2


def check_finite(
    staged: Path, opened: OpenedBase, blueprint: Blueprint, *, device: str, say: Callable[[str], None]
) -> None:
    """Run what an exact plan made on a text, where new parts of its layers may overflow; `say` gets why it cannot be.

    Raises BadInput where a layer computes what is no number, and the base computes numbers.
    """
    base = opened.folder
    grown = {
        layer.index
        for layer in blueprint.layers
        if blueprint.resized or layer.base is None or any(graft.operation is not None for graft in layer.grafts)
    }
    out = CheckpointFolder.open(staged, trust_remote_code=base.own is not None)
    if not _may_overflow(out, grown):
        return
    try:
        rows, kept = opened.anatomy.sizes.vocabulary, blueprint.kept_tokens
        tokens = token_batches(base.path, text=None, window=_TOKENS, windows=1, vocabulary=rows, kept=kept)
        ids = tokens.ids.to(device)
        odd = _first_odd(out, ids, device)
        if odd is None or _first_odd(base, ids, device) is not None:
            return
    except BadInput as error:
        say(f"not looked at: whether what is new stays finite ({error}); `surgeon verify` compares logits")
        return
    raise BadInput(
        f"{base.source.shown}: layer {odd} of the output computes no numbers where the base does: what is new there"
        " ends in zeros, but overflows inside, and 0 × infinity is none; choose other layers or sources for it, or"
        " store the base in a dtype with more range"
    )


def _may_overflow(out: CheckpointFolder, layers: Collection[int]) -> bool:
    """Whether the weights of these layers allow a number beyond the dtype's largest, by a bound that is never reached.

    With w the largest weight and D the widest sum, a norm's numbers are below w √D, and a projection makes its input
    w D times as large; two projections are multiplied, summed and projected again: w⁵ D⁴.
    """
    held = [out.tensors[name] for name, (_, layer, _) in places_of(out.tensors).items() if layer in layers]
    largest, width, most = 1.0, 1, float("inf")
    for info in held:
        width = max(width, *info.shape, 1)
        if info.dtype in FLOAT_DTYPES and info.numel:
            most = min(most, torch.finfo(stored_dtype(info.dtype)).max)
            with safe_open(out.path / info.file, framework="pt") as shard:
                # Mapped: nothing of it is kept.
                largest = max(largest, *(abs(float(end)) for end in torch.aminmax(shard.get_tensor(info.name))))
    return math.prod([_STREAM**2 * width**4, *[largest] * 5]) > most


def _first_odd(folder: CheckpointFolder, ids: Tensor, device: str) -> int | None:
    """The first layer of a model that puts out what is no number; None where none does."""
    model = StreamedModel(folder, device=device).module
    with torch.inference_mode(), running(model):
        made = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    states = [*(made.hidden_states or ())[1:], made.logits]
    return next((layer for layer, values in enumerate(states) if not bool(values.isfinite().all())), None)
