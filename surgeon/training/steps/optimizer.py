"""AdamW with a float32 copy of the parameters that train, and a learning-rate schedule with a floor.

A model in bfloat16 trains in the dtype of its later use: forward and backward are in bfloat16, so the loss at step 0
is the base's own, and frozen parameters keep their bits. Only parameters that train have a float32 master, in the
optimizer: updates too small for bfloat16 accumulate there until they change the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from surgeon.training.config.settings import Settings
from surgeon.training.processes.sharding import dealt_out

# The numbers of a part of the parameters: their gradients in float32 take 16 MiB, more where one parameter has more.
_PART = 4 * 1024 * 1024


class MasterAdamW(AdamW):
    """torch's AdamW on float32 masters of all parameters of narrower dtypes; its moments are float32 too."""

    def __init__(self, groups: Any, **options: Any) -> None:
        """Make a float32 master of every parameter of a narrower dtype; the arguments are those of AdamW."""
        super().__init__(groups, **options)
        # The fused kernel passes once over memory instead of about a dozen times.
        where = {parameter.device.type for group in self.param_groups for parameter in group["params"]}
        if where <= {"cpu", "cuda"}:
            for group in self.param_groups:
                group["fused"] = True
        self.masters: dict[Tensor, Tensor] = {
            parameter: parameter.detach().to(torch.float32, copy=True)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.dtype.itemsize < 4
        }

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update the masters, and copy them to the parameters; `closure` must be None.

        Each part of the parameters is updated by itself, so that only its gradients exist in float32. Gradients are
        set to None as they are used.
        """
        assert closure is None
        trained = [parameter for group in self.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in trained]
        for parameter in trained:
            parameter.grad = None
        for part in _parts(trained):
            updated = [self.masters.get(parameter, parameter) for parameter in part]
            for stepped in updated:
                gradient = gradients.pop(0)
                stepped.grad = None if gradient is None else gradient.float()
                del gradient
            with self._on_masters():
                super().step()
            for parameter, stepped in zip(part, updated, strict=True):
                stepped.grad = None
                if stepped is not parameter:
                    parameter.copy_(stepped)

    def state_dict(self) -> dict[str, Any]:
        """Return AdamW's state, and the `masters` in the order of the parameters."""
        with self._on_masters():
            return super().state_dict() | {"masters": list(self.masters.values())}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state with its float32 moments and masters; of sharded parameters this process takes its shards."""
        state = dict(state_dict)
        masters = state.pop("masters")
        for master, kept in zip(self.masters.values(), masters, strict=True):
            master.copy_(dealt_out(kept, master))
        # torch numbers the parameters through all groups.
        numbered = enumerate(parameter for group in self.param_groups for parameter in group["params"])
        state["state"] = {
            number: {key: dealt_out(value, parameter) for key, value in state["state"][number].items()}
            for number, parameter in numbered
            if number in state["state"]
        }
        # torch casts what it loads to the parameter's dtype.
        with self._on_masters():
            super().load_state_dict(state)

    @contextmanager
    def _on_masters(self) -> Iterator[None]:
        """Replace parameters by their masters in AdamW's groups within the context; AdamW's state belongs to these."""
        held = [group["params"] for group in self.param_groups]
        for group in self.param_groups:
            group["params"] = [self.masters.get(parameter, parameter) for parameter in group["params"]]
        try:
            yield
        finally:
            # `load_state_dict` replaces the groups, so parameters are put back into the present ones.
            for group, parameters in zip(self.param_groups, held, strict=True):
                group["params"] = parameters


def _parts(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the parameters in order, in parts that end as soon as they have `_PART` numbers."""
    part: list[Tensor] = []
    for parameter in parameters:
        part.append(parameter)
        if sum(each.numel() for each in part) >= _PART:
            yield part
            part = []
    if part:
        yield part


def make_optimizer(model: torch.nn.Module, settings: Settings, *, decayed: set[str]) -> MasterAdamW:
    """Return AdamW over the parameters that train, with weight decay only on those named in `decayed`."""
    training = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for name, p in training if name in decayed], "weight_decay": settings.weight_decay},
        {"params": [p for name, p in training if name not in decayed], "weight_decay": 0.0},
    ]
    return MasterAdamW([group for group in groups if group["params"]], lr=settings.lr, betas=settings.betas)


def make_schedule(optimizer: Any, settings: Settings) -> LambdaLR:
    """Return a schedule: linear warm-up, then constant, or linear or cosine decay to `min_lr` at the last step."""
    floor = settings.min_lr / settings.lr

    def factor(step: int) -> float:
        """Return the learning rate of a step as a share of the peak rate."""
        if step < settings.warmup_steps:
            return (step + 1) / settings.warmup_steps
        if settings.schedule == "constant":
            return 1.0
        done = min(1.0, (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps))
        falling = 1 - done if settings.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return floor + (1 - floor) * falling

    return LambdaLR(optimizer, factor)
