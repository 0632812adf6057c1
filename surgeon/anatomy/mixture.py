"""A layer's experts in memory: how their matrices lie, and what the router holds of each, found by trial.

An expert's neurons may change places, and experts may, where all that belongs to them moves along: the layer computes
what it did. With a wrong reading of its tensors it does not. So nothing depends on what a class calls its parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surgeon.anatomy.moving import Move, Mover
from surgeon.anatomy.silence import Run, captured
from surgeon.anatomy.skeleton import Skeleton

if TYPE_CHECKING:
    from torch import Tensor, nn


DOWN = "down_proj"
# What an expert's input passes first; in one matrix, gate and up are halves of it, or its rows in turn.
_BOTH = "gate_up_proj"
_FIRST = (_BOTH, "gate_proj", "up_proj")


class Trial:
    """A layer's experts, a matrix of each in one tensor, and its router.

    What they are taken for is tried: they, and their neurons, change places, and all else stays.
    """

    def __init__(self, run: Run, experts: dict[str, Tensor], router: dict[str, Tensor]) -> None:
        import torch

        self._mover, self._hidden, self.experts, self.router = Mover(run), run.stream.shape[-1], experts, router
        self._count = len(experts[DOWN])
        self._draws = torch.Generator().manual_seed(0)

    def readings(self) -> Iterator[tuple[bool, bool]]:
        """(transposed, interleaved), as far as the shapes allow."""
        down = self.experts[DOWN]
        held = [key for key in _FIRST if key in self.experts]
        for transposed in (False, True):
            inputs, outputs = (1, 2) if transposed else (2, 1)
            fits = down.shape[outputs] == self._hidden and all(self._fits(k, inputs, down.shape[inputs]) for k in held)
            if held and fits:
                yield transposed, False
                if _BOTH in self.experts:
                    yield transposed, True

    def _fits(self, key: str, inputs: int, inner: int) -> bool:
        """Whether a matrix that reads the stream, and its bias, are as large as for `inner` neurons."""
        value, bias = self.experts[key], self.experts.get(f"{key}_bias")
        rows = inner * (2 if key == _BOTH else 1)
        wanted = (self._count, self._hidden, rows) if inputs == 1 else (self._count, rows, self._hidden)
        return value.shape == wanted and (bias is None or bias.shape == (self._count, rows))

    def neurons_move(self, transposed: bool, interleaved: bool) -> bool:
        """Whether each expert's neurons may change places; and whether that is seen where only half of them moves."""
        import torch

        down = self.experts[DOWN]
        inner = down.shape[1 if transposed else 2]
        named = [(key, name) for key in _FIRST for name in (key, f"{key}_bias") if name in self.experts]
        first: list[Move] = []
        last: list[Move] = []
        for number in range(self._count):
            order = torch.randperm(inner, generator=self._draws)
            for key, name in named:
                value = self.experts[name][number]
                rows = _both(order, inner, interleaved) if key == _BOTH else order
                first.append(Move(value, 1 if transposed and value.ndim == 2 else 0, rows))
            last.append(Move(down[number], 0 if transposed else 1, order))
        return self._mover.holds([*first, *last], [first])

    def experts_move(self, groups: int) -> bool:
        """Whether experts may change places, groups and those within each; and whether the router must follow them."""
        import torch

        size = self._count // groups
        if not self.router or size * groups != self._count:
            return False
        order = torch.cat(
            [
                group * size + torch.randperm(size, generator=self._draws)
                for group in torch.randperm(groups, generator=self._draws)
            ]
        )
        experts = [Move(value, 0, order) for value in self.experts.values() if len(value) == self._count]
        router = [Move(value, 0 if len(value) == self._count else 1, order) for value in self.router.values()]
        return self._mover.holds([*experts, *router], [experts])


def _both(order: Tensor, inner: int, interleaved: bool) -> Tensor:
    """The rows of gate and up in one matrix, neurons in this order."""
    import torch

    return torch.stack([2 * order, 2 * order + 1], 1).flatten() if interleaved else torch.cat([order, order + inner])


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
        for transposed, interleaved in trial.readings():
            if trial.neurons_move(transposed, interleaved):
                moves = trial.experts_move(groups)
                return Mixture(modules[0], transposed, interleaved, tuple(trial.router)) if moves else None
    return None


def _held(run: Run, experts: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of the module `experts`, by their names in it, and those that may be its router's."""
    inside = f"{experts}." if experts else ""
    held = {**dict(run.layer.named_parameters()), **dict(run.layer.named_buffers())}
    own = {name.removeprefix(inside): value for name, value in held.items() if name.startswith(inside)}
    block = experts.rpartition(".")[0]
    return (
        own,
        {
            name: value
            for name, value in held.items()
            if not name.startswith(inside)
            and (name.startswith(f"{block}.") if block else "router" in name)
            and value.is_floating_point()
            # A row, or a number, for each expert.
            and (value.shape[:1] == (len(own[DOWN]),) or value.shape == (1, len(own[DOWN])))
        },
    )
