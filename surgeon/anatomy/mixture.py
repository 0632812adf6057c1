"""A layer's experts in memory: the layout of their matrices, and the router's rows per expert, found by trial.

An expert's neurons may change places, and so may experts, together with everything that belongs to them: the layer
computes the same. With a wrong reading of its tensors it does not. So nothing depends on the names that a class uses.
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
# The matrices that read an expert's input. In one matrix for both, gate and up are its halves, or its alternating rows.
_BOTH = "gate_up_proj"
_FIRST = (_BOTH, "gate_proj", "up_proj")


class Trial:
    """A layer's experts, with one tensor for the matrices of all experts, and its router.

    A reading of these tensors is tried: neurons or experts change places, and everything else stays.
    """

    def __init__(self, run: Run, experts: dict[str, Tensor], router: dict[str, Tensor]) -> None:
        import torch

        self._mover, self._hidden, self.experts, self.router = Mover(run), run.stream.shape[-1], experts, router
        self._count = len(experts[DOWN])
        self._draws = torch.Generator().manual_seed(0)

    def readings(self) -> Iterator[tuple[bool, bool]]:
        """Yield the readings (transposed, interleaved) that the shapes allow."""
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
        """Return whether a matrix that reads the stream, and its bias, have the shapes for `inner` neurons."""
        value, bias = self.experts[key], self.experts.get(f"{key}_bias")
        rows = inner * (2 if key == _BOTH else 1)
        wanted = (self._count, self._hidden, rows) if inputs == 1 else (self._count, rows, self._hidden)
        return value.shape == wanted and (bias is None or bias.shape == (self._count, rows))

    def neurons_move(self, transposed: bool, interleaved: bool) -> bool:
        """Return whether each expert's neurons may change places, but not in its first matrices only."""
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
        """Return whether experts, in groups and within them, may change places together with the router's rows.

        They may not without the router's rows, or nothing is proven.
        """
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
    """Return the order of the rows of gate and up in one matrix for this order of neurons."""
    import torch

    return torch.stack([2 * order, 2 * order + 1], 1).flatten() if interleaved else torch.cat([order, order + inner])


@dataclass(frozen=True)
class Mixture:
    """The experts of a layer, with names relative to the layer.

    `experts` is the module with one parameter for the matrices of all experts.
    `transposed`: matrices are inputs by outputs; `interleaved`: in `gate_up_proj`, rows of gate and up alternate.
    `router` are parameters and buffers with a row, or a number, for each expert.
    """

    experts: str
    transposed: bool
    interleaved: bool
    router: tuple[str, ...]


def groups_of(text: object) -> int:
    """Return the number of groups of a config's experts, among which its router chooses first; 1 without groups."""
    found = getattr(text, "n_group", None)
    return found if type(found) is int and found > 1 else 1


def mixtures(twin: Skeleton, layers: list[int]) -> dict[int, Mixture | None]:
    """Return the experts of each of these layers of a twin; None without experts, or where they are not understood.

    Several sets of experts in one layer are not understood. The twin's weights are unchanged afterwards.
    """
    if not any(expert_modules(twin.layers[index]) for index in layers):
        return dict.fromkeys(layers)
    runs, groups = captured(twin, layers), groups_of(twin.text)
    found: dict[int, Mixture | None] = dict.fromkeys(layers)
    for index, run in runs.items():
        # A model's code may raise anything on moved weights. Then experts stay unknown, which no proof of exactness
        # needs.
        with contextlib.suppress(Exception):
            found[index] = _understood(run, groups)
    return found


def expert_modules(layer: nn.Module) -> list[str]:
    """Return the names of a layer's modules with one tensor for the down matrices of all experts."""
    return [
        name
        for name, module in layer.named_modules()
        if (down := module._parameters.get(DOWN)) is not None and down.ndim == 3
    ]


def _understood(run: Run, groups: int) -> Mixture | None:
    """Return the experts of a layer in the first reading whose symmetries hold; None where there is none."""
    import torch

    modules = expert_modules(run.layer)
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
    """Return the tensors of the module `experts`, by their names in it, and those that may belong to its router."""
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
