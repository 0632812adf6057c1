"""Experts that lie below one another in the rows of matrices (DBRX): which matrices these are, and what each does.

All of them have a row for each neuron of each expert, and a column for each dimension of the stream: those that read
it are outputs by inputs, the one that writes it inputs by outputs. What a class calls them says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from surgeon.families.family import Role
from surgeon.families.silence import Run

if TYPE_CHECKING:
    from torch import Tensor, nn


def matrices_of_rows(layer: nn.Module) -> dict[str, dict[str, Tensor]]:
    """The modules of a layer, by their paths, whose own parameters are two or three matrices of one shape."""
    found: dict[str, dict[str, Tensor]] = {}
    for path, module in layer.named_modules():
        own = {name: value for name, value in module._parameters.items() if value is not None}
        if path and len(own) in (2, 3) and len({value.shape for value in own.values()}) == 1:
            found |= {path: own} if next(iter(own.values())).ndim == 2 else {}
    return found


def for_each(value: Tensor, count: int) -> bool:
    """Whether a tensor has a row, or a number, for each of so many experts."""
    return value.is_floating_point() and (value.shape[:1] == (count,) or tuple(value.shape) == (1, count))


def routers_of_rows(run: Run, path: str, matrices: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """What may be the router of the experts in a module, by names in the layer: a matrix, and numbers beside it.

    It is sought in the module around them, then in the one around that.
    """
    rows, hidden = next(iter(matrices.values())).shape
    held = {**dict(run.layer.named_parameters()), **dict(run.layer.named_buffers())}
    outside = {name: value for name, value in held.items() if not name.startswith(f"{path}.")}
    around = path
    while around:
        around = around.rpartition(".")[0]
        near = {name: value for name, value in outside.items() if not around or name.startswith(f"{around}.")}
        for name, value in near.items():
            if value.ndim != 2 or value.shape[1] != hidden or not 1 < len(value) < rows or rows % len(value):
                continue
            beside = {other: v for other, v in near.items() if v.numel() == len(value) and for_each(v, len(value))}
            yield {name: value, **beside}


def roles_of_rows(run: Run, path: str, matrices: dict[str, Tensor]) -> dict[str, Role]:
    """Gate, up and down, by name: found from what the experts make; empty where it does not say it.

    A column of zeros in the matrix that writes is a dimension in which nothing is written. What is made changes its
    sign with the up projection, and does not with what an activation follows.
    """
    import torch

    def made() -> Tensor:
        return _made(run, path)

    def changed(value: Tensor, column: int | None) -> Tensor:
        kept = value.detach().clone()
        if column is None:
            value.neg_()
        else:
            value[:, column] = 0.0
        try:
            return made()
        finally:
            value.copy_(kept)

    before = made()
    if not before.numel() or not before[:, 0].any():
        return {}
    down = [name for name, value in matrices.items() if not changed(value, 0)[:, 0].any()]
    reading = [name for name in matrices if name not in down]
    linear = [name for name in reading if torch.equal(changed(matrices[name], None), -before)]
    if len(down) != 1 or (len(reading) == 2 and len(linear) != 1):
        return {}
    up = linear if len(reading) == 2 else reading
    return {name: "down" if name in down else "up" if name in up else "gate" for name in matrices}


def _made(run: Run, path: str) -> Tensor:
    """What the experts in a module, or the nearest module around them that runs as such, make of the layer's input.

    Shape: (tokens of all its runs, width of the stream).
    """
    import torch

    names = [path]
    while names[-1]:
        names.append(names[-1].rpartition(".")[0])
    ran: dict[str, list[Tensor]] = {}

    def keep(name: str, output: object) -> None:
        first = output[0] if isinstance(output, tuple | list) else output
        if isinstance(first, torch.Tensor):
            ran.setdefault(name, []).append(first.reshape(-1, first.shape[-1]))

    hooks = [
        run.layer.get_submodule(name).register_forward_hook(lambda _, __, output, name=name: keep(name, output))
        for name in names
        if name
    ]
    try:
        run.output()
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat(next((ran[name] for name in names if name in ran), [run.stream[:, :0].flatten(0, 1)]))
