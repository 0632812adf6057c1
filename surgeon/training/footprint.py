"""The size and time of a run: bytes of a checkpoint, room on disk, peak memory, and seconds on a device."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from surgeon.common import devices
from surgeon.common.disk_space import check_room
from surgeon.common.formatting import size
from surgeon.errors import BadInput
from surgeon.training.config.settings import fitting_micro_batch
from surgeon.training.losses.cross_entropy import CHUNK_BYTES, FusedHead
from surgeon.training.run import Run
from surgeon.training.saved.checkpoints import KEPT

# Memory beyond what autograd keeps for a sequence, as a share of it: intermediate results, and gaps of the allocator.
_BEYOND = 0.3
# Tensors of the size of all logits that torch's cross-entropy holds at a time: logits, log-softmax, two gradients.
_LOGITS_AT_A_TIME = 4


def checkpoint_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of a checkpoint: the parameters that train, and AdamW's state.

    The state is two moments in float32, and a float32 master where the parameter has a narrower dtype.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return sum(p.numel() * (p.dtype.itemsize + (8 if p.dtype.itemsize >= 4 else 12)) for p in trained)


def check_room_of(run: Run, model: torch.nn.Module) -> None:
    """Raise BadInput where the disk has no room for the checkpoints, the published run and the files of remedies.

    One checkpoint more is counted than is kept, because a new one is written before an old one is removed. The trained
    tensors are counted once more, as the last step keeps them until the run is published; files of an earlier try count
    as free room.
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


def fitting(run: Run, model: Any, fused: FusedHead | None) -> Run:
    """Return the run with the most sequences at a time, up to those of its settings, that are predicted to fit.

    A prediction is made because a CPU raises no error where memory ends: the system ends the process. One sequence is
    run forward, on the model's device, and the tensors are counted that autograd keeps for the backward pass. Random
    numbers are drawn from a copy of the generator. Several processes keep the settings, since they must agree.

    Raises BadInput where the config's own `micro_batch`, else one sequence, is not predicted to fit.
    """
    free = devices.free_memory(run.device)
    if run.ranks.size > 1 or free is None:
        return run
    # Gradients, AdamW's moments and its masters; the parameters themselves are loaded.
    fixed = checkpoint_bytes(model)
    each, chunk = _bytes_a_sequence(run, model, fused)
    settings, own = run.settings, run.loaded.config.micro_batch
    most = int((free - fixed - chunk) / each)
    if most < (own or 1):
        needed = fixed + chunk + each * (own or 1)
        raise BadInput(
            f"{run.loaded.source}: {own or 1} × {settings.length:,} tokens at a time and AdamW's state need about"
            f" {size(needed)} beyond the loaded model, and {size(free)} are free; use a smaller"
            f" {'`micro_batch` or ' if own else ''}`length`, or `checkpointing: true`"
        )
    if own is not None or most >= settings.micro_batch:
        return run
    fewer = fitting_micro_batch(settings, most)
    run.say(f"micro_batch: {fewer.micro_batch}, since {size(free)} are free and a sequence takes about {size(each)}")
    return replace(run, settings=fewer)


def _bytes_a_sequence(run: Run, model: Any, fused: FusedHead | None) -> tuple[int, int]:
    """Return (bytes that one sequence needs from forward to backward, bytes that the loss needs for any number)."""
    length = run.settings.length
    ids = torch.zeros(1, length, dtype=torch.int64, device=next(model.parameters()).device)
    given: dict[str, Any] = {"input_ids": ids}
    if run.objective.packs:
        given |= {"labels": ids, "use_cache": False}
    if hasattr(model, "surgery"):
        # Text of a new domain, for which gates are open.
        given["domain_ids"] = torch.ones_like(ids[:, 0])
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        """Count the memory of a tensor that is kept for the backward pass, each storage once."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        # Without its place in the graph: a node that kept its own output so would never be freed.
        return tensor.detach()

    training = model.training
    model.train()
    with (
        torch.random.fork_rng([ids.device] if ids.device.type == "cuda" else []),
        contextlib.nullcontext() if fused is None else fused.armed(),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        # The graph has to live until all of it is counted: memory that was freed would get its address again.
        out = model(**given)
        del out
    model.train(training)
    each = int(sum(kept.values()) * (1 + _BEYOND)) + 1
    if not run.objective.packs:
        return each, 0
    logits = 4 * length * int(model.config.get_text_config().vocab_size)
    return (each + _LOGITS_AT_A_TIME * logits, 0) if fused is None else (each, 2 * CHUNK_BYTES)


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
