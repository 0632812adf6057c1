"""Sharding by FSDP2: every process has a shard of each parameter, of its gradient and of its optimizer state.

A unit is one layer of the trunk with everything grafted onto it. Parameters that layers share (Mixture-of-Control's
bank, the norm, the head, tied embeddings) belong to the model's own unit, which stays gathered from its forward to its
backward. surgeon shards the model itself, before anything is computed. So no process ever has the whole model on its
device, not even for the held-out losses before the first step.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


@contextlib.contextmanager
def views_allowed() -> Iterator[None]:
    """Silence FSDP2's warning of views within the context: losses that layers return are views, and never changed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        yield


def shard(model: Any, *, device: torch.device) -> None:
    """Shard the model over all processes, in place; `device` is the device of this process.

    Gradients are reduced over processes in float32, whatever the model's dtype.
    """
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}
    kinds = set(model._no_split_modules)
    layers = [module for module in model.modules() if type(module).__name__ in kinds]
    assert layers, model._no_split_modules
    for layer in layers:
        fully_shard(layer, reshard_after_forward=True, **options)
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embeddings.weight:
        fully_shard(embeddings, reshard_after_forward=True, **options)
    fully_shard(model, **options)
    # Otherwise accelerate would wrap it in DDP.
    model._is_accelerate_prepared = True


def let_go(model: nn.Module) -> None:
    """Free the weights that a forward gathered and no backward freed; parameters are shards again, and up to date."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gathered(state: Any) -> Any:
    """Return the same nest of dictionaries, lists and tensors, with every shard gathered to a whole tensor on the CPU.

    All processes call this.
    """
    if isinstance(state, dict):
        return {key: gathered(value) for key, value in state.items()}
    if isinstance(state, list):
        return [gathered(value) for value in state]
    if isinstance(state, DTensor):
        return state.full_tensor().cpu()
    return state


def dealt_out(whole: Tensor, like: Tensor) -> Tensor:
    """Return this process's shard of a whole tensor where `like` is sharded, else the tensor; all processes call."""
    if not isinstance(like, DTensor) or whole.shape != like.shape:
        return whole
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements)
