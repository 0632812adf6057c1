"""A layer's experts in memory: how their matrices lie, and what the router holds of each, found by trial.

An expert's neurons may change places, and experts may, where all that belongs to them moves along: the layer computes
what it did. With a wrong reading of its tensors it does not. So nothing depends on what a class calls its parts.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surgeon.families.expert_trial import DOWN, Trial
from surgeon.families.family import Role
from surgeon.families.row_experts import for_each, matrices_of_rows, roles_of_rows, routers_of_rows
from surgeon.families.silence import Run, captured
from surgeon.families.skeleton import Skeleton

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Mixture:
    """The experts of a layer, by names below it: `experts` is the module that holds a matrix of each in one parameter.

    `transposed`: matrices are inputs by outputs; `interleaved`: in `gate_up_proj`, rows of gate and up alternate.
    `router` are parameters and buffers with a row, or a number, for each expert. Where experts lie below one another in
    the rows of matrices of two axes, a row for each neuron, `in_rows` are these, by their names, with their roles.
    """

    experts: str
    transposed: bool
    interleaved: bool
    router: tuple[str, ...]
    in_rows: tuple[tuple[str, Role], ...] = ()


def groups_of(text: object) -> int:
    """How many groups a config's experts form, of which its routers choose some first: 1 where they choose at once."""
    found = getattr(text, "n_group", None)
    return found if type(found) is int and found > 1 else 1


def mixtures(twin: Skeleton, layers: list[int]) -> dict[int, Mixture | None]:
    """For each of these layers of a twin its experts; None: it has none, or several sets, or none that is understood.

    The twin's weights stay as they were.
    """
    if not any(_expert_modules(layer) or matrices_of_rows(layer) for layer in (twin.layers[i] for i in layers)):
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
    with torch.no_grad():
        if not modules:
            return _in_rows(run, groups)
        if len(modules) != 1:
            return None
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
        and for_each(value, len(own[DOWN]))
    }


def _in_rows(run: Run, groups: int) -> Mixture | None:
    """The same of experts that lie below one another in the rows of matrices."""
    for path, matrices in matrices_of_rows(run.layer).items():
        roles = roles_of_rows(run, path, matrices)
        for router in routers_of_rows(run, path, matrices) if roles else ():
            count = next(len(value) for value in router.values() if value.ndim == 2 and len(value) > 1)
            views = {
                f"{roles[name]}_proj": value.detach().view(count, -1, value.shape[-1])
                for name, value in matrices.items()
            }
            views[DOWN] = views[DOWN].transpose(1, 2)
            trial = Trial(run, views, router)
            try:
                if trial.neurons_move(transposed=False, interleaved=False) and trial.experts_move(groups):
                    return Mixture(path, False, False, tuple(router), tuple(roles.items()))
            finally:
                trial.restore()
    return None
