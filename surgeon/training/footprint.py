"""The size and time of a run: bytes of a checkpoint, room on disk, peak memory, and seconds on a device."""

from __future__ import annotations

import resource
import sys
import time

import torch

from surgeon.common.disk_space import check_room
from surgeon.common.formatting import size
from surgeon.training.run import Run
from surgeon.training.saved.checkpoints import KEPT


def checkpoint_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of a checkpoint: the parameters that train, and AdamW's state.

    The state is two moments in float32, and a float32 master where the parameter has a narrower dtype.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return sum(p.numel() * (p.dtype.itemsize + (8 if p.dtype.itemsize >= 4 else 12)) for p in trained)


def check_room_of(run: Run, model: torch.nn.Module) -> None:
    """Raise BadInput where the disk has no room for the checkpoints, the published run and the files of remedies.

    One checkpoint more is counted than is kept, because a new one is written before an old one is removed.
    """
    checkpoint = checkpoint_bytes(model)
    published = sum(info.nbytes for info in run.out.tensors.values())
    final = sum(run.out.tensors[name].nbytes for name in run.wanted.names)
    kept = KEPT + 1 + (run.loaded.config.keep_best is not None)
    beside = [remedy.room(model) for remedy in run.remedies]
    words = "".join(f", {size(count)} for {what}" for count, what in beside if count)
    there = sum(path.lstat().st_blocks * 512 for path in run.work.rglob("*"))
    check_room(
        run.work,
        kept * checkpoint + final + published + sum(count for count, _ in beside) - there,
        what=f" ({kept} checkpoints of {size(checkpoint)}{words}, and {size(published)} for the run)",
    )


def peak_memory(device: str) -> int:
    """Return the peak memory in bytes: on the GPU where `device` is cuda, else of this process."""
    if device == "cuda":
        return int(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def seconds_since(begun: float, device: str) -> float:
    """Wait until the device has finished its work, and return the wall seconds since `begun`."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun
