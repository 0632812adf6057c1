"""A layer's experts in memory: how their matrices lie, and what the router holds of each, found by trial.

An expert's neurons may change places, and experts may, where all that belongs to them moves along: the layer computes
what it did. With a wrong reading of its tensors it does not. So nothing depends on what a class calls its parts.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surgeon.families.expert_trial import DOWN, Trial
from surgeon.families.silence import Run, captured
from surgeon.families.skeleton import Skeleton

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Mixture:
    """The experts of a layer, by names below it: `experts` is the module that holds a matrix of each in one parameter.

    `transposed`: matrices are inputs by outputs; `interleaved`: in `gate_up_proj`, rows of gate and up alternate.
    `router` are parameters and buffers with a row, or a number, for each expert.
    """

    experts: str
    transposed: bool
    interleaved: bool
    router: tuple[str, ...]


def groups_of(text: object) -> int:
    """How many groups a config's experts form, of which its routers choose some first: 1 where they choose at once."""
    found = getattr(text, "n_group", None)
    return found if type(found) is int and found > 1 else 1


def mixtures(twin: Skeleton, layers: list[int]) -> dict[int, Mixture | None]:
    """For each of these layers of a twin its experts; None: it has none, or several sets, or none that is understood.

    The twin's weights stay as they were.
    """
    if not any(_expert_modules(twin.layers[index]) for index in layers):
        return dict.fromkeys(layers)
    runs, groups = captured(twin, layers), groups_of(twin.text)
    found: dict[int, Mixture | None] = dict.fromkeys(layers)
    for index, run in runs.items():
        # Whatever a model's code raises on weights that were moved, experts are not needed to prove what is exact.
        with contextlib.suppress(Exception):
            found[index] = _understood(run, groups)
    return found


def _expert_modules(layer: nn.Module) -> list[str]:
    return [
        name
        for name, module in layer.named_modules()
        if (down := module._parameters.get(DOWN)) is not None and down.ndim == 3
    ]


def _understood(run: Run, groups: int) -> Mixture | None:
    """The experts of a layer as the first reading has them with which its symmetries hold."""
    import torch

    modules = _expert_modules(run.layer)
    if len(modules) != 1:
        return None
    with torch.no_grad():
        trial = Trial(run, *_held(run, modules[0]))
        try:
            for transposed, interleaved in trial.readings():
                if trial.neurons_move(transposed, interleaved):
                    moves = trial.experts_move(groups)
                    return Mixture(modules[0], transposed, interleaved, tuple(trial.router)) if moves else None
        finally:
            trial.restore()
    return None


def _held(run: Run, experts: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of the module `experts`, by their names in it, and those that may be its router's."""
    inside = f"{experts}." if experts else ""
    held = {**dict(run.layer.named_parameters()), **dict(run.layer.named_buffers())}
    own = {name.removeprefix(inside): value for name, value in held.items() if name.startswith(inside)}
    block = experts.rpartition(".")[0]
    return own, {
        name: value
        for name, value in held.items()
        if not name.startswith(inside)
        and (name.startswith(f"{block}.") if block else "router" in name)
        and _for_each(value, len(own[DOWN]))
    }


def _for_each(value: Tensor, count: int) -> bool:
    """Whether a tensor has a row, or a number, for each of so many experts."""
    return value.is_floating_point() and (value.shape[:1] == (count,) or tuple(value.shape) == (1, count))
