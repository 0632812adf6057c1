"""A check that new parts compute finite numbers: a part that ends in zeros adds 0 × f(x), which is NaN if f overflows.

It runs when all is written and before it is published, on one text, with one layer in memory at a time; and only where
the weights allow an overflow. In float16 most do; in other dtypes weights must be far larger than learned ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from surgeon.anatomy.anatomy import places_of
from surgeon.blueprint.blueprint import Blueprint
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.header import TensorInfo
from surgeon.errors import BadInput
from surgeon.operations.prepare import OpenedBase

if TYPE_CHECKING:
    from torch import Tensor

_TOKENS = 24
# How large the inputs of a block may be, apart from those that its norm makes.
_STREAM = 1e2
# The largest finite number of each dtype.
_LARGEST = {"F16": 65504.0, "BF16": 3.389e38, "F32": 3.402e38, "F64": 1.797e308}
# How many numbers of a tensor are checked at a time.
_AT_ONCE = 2**22


def check_finite(
    staged: Path, opened: OpenedBase, blueprint: Blueprint, *, device: str, say: Callable[[str], None]
) -> None:
    """Run the output of an exact plan on a text, where its new parts may overflow; otherwise do nothing.

    Where it cannot be run, `say` is called with the reason. Raises BadInput where a layer of the output computes NaN or
    infinity, and the base does not.
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
    # This import loads torch, which hardly any base needs here.
    from surgeon.models.tokens import token_batches

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
    """Return whether these layers' weights allow a number beyond the dtype's range, by a generous bound.

    With w the largest weight and D the widest sum, a norm's numbers are below w √D, and a projection makes its input w
    D times as large; two projections are multiplied, summed and projected again: w⁵ D⁴.
    """
    held = [out.tensors[name] for name, (_, layer, _) in places_of(out.tensors).items() if layer in layers]
    floats = [info for info in held if info.dtype in _LARGEST and info.numel]
    width = max((max(info.shape, default=1) for info in held), default=1)
    largest = max((_largest(out, info) for info in floats), default=1.0)
    most = min((_LARGEST[info.dtype] for info in floats), default=math.inf)
    return math.prod([_STREAM**2 * width**4, *[max(largest, 1.0)] * 5]) > most


def _largest(out: CheckpointFolder, info: TensorInfo) -> float:
    """Return the largest absolute value in a tensor; infinity where a number is not finite."""
    width = info.nbytes // info.numel
    stored = np.memmap(out.path / info.file, f"<i{width}", "r", info.begin, (info.numel,))
    # Without the sign bit, numbers are ordered as their bits; with it, unsigned, negative ones are above all others.
    mask = (1 << 8 * width - 1) - 1
    bits = 0
    for at in range(0, info.numel, _AT_ONCE):
        block = stored[at : at + _AT_ONCE]
        bits = max(bits, int(block.max()), int(block.view(f"<u{width}").max()) & mask)
    if info.dtype == "BF16":
        bits, width = bits << 16, 4
    found = float(np.array(bits, f"<u{width}").view(f"<f{width}"))
    return found if math.isfinite(found) else math.inf


def _first_odd(folder: CheckpointFolder, ids: Tensor, device: str) -> int | None:
    """Return the first layer with an output that is not finite; None where there is none."""
    import torch

    from surgeon.models.load import running
    from surgeon.models.stream import StreamedModel

    model = StreamedModel(folder, device=device).module
    with torch.inference_mode(), running(model):
        made = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    states = [*(made.hidden_states or ())[1:], made.logits]
    return next((layer for layer, values in enumerate(states) if not bool(values.isfinite().all())), None)
