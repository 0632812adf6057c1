from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from surgeon.transport import solving
from surgeon.transport.maps import TransportSettings
from surgeon.transport.solving import solve
from tests.transport.problems import uneven

ROWS = torch.ones(3, 4)


@pytest.mark.parametrize("solver", ["sinkhorn", "emd"])
@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (torch.full((3, 4), math.nan), ROWS, "the source holds values that are not finite"),
        (ROWS, torch.full((3, 4), math.inf), "the target holds values that are not finite"),
        (torch.ones(0, 4), ROWS, r"the source must be a matrix .* not of shape \(0, 4\)"),
        (ROWS, torch.ones(3, 0), "the target must be a matrix"),
        (torch.ones(4), ROWS, r"not of shape \(4,\)"),
        (ROWS, torch.ones(1, 3, 4), "the target must be a matrix"),
        (ROWS, torch.ones(3, 5), "rows of 4 and of 5 numbers cannot be compared"),
        (ROWS.int(), ROWS, "floating-point numbers, not torch.int32"),
    ],
)
def test_inputs_that_cannot_be_compared(solver: Any, source: torch.Tensor, target: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        solve(source, target, TransportSettings(solver=solver))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
)
def test_too_little_memory_is_said_in_a_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> torch.Tensor:
        raise error

    monkeypatch.setattr(solving, "distances", fail)
    with pytest.raises(ValueError, match="20 × 30 rows needs more memory than is free on cpu"):
        solve(*uneven(20, 30, 8), TransportSettings())


def test_other_errors_are_not_taken_for_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("something else")

    monkeypatch.setattr(solving, "distances", fail)
    with pytest.raises(RuntimeError, match="something else"):
        solve(*uneven(3, 3, 4), TransportSettings())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("reg", [0.06, 1e-3])
def test_device_agrees_with_the_processor(reg: float) -> None:
    source, target = uneven(300, 260, 64)
    settings = TransportSettings(reg=reg, cost_scale="mean")
    here, there = solve(source, target, settings), solve(source.cuda(), target.cuda(), settings)
    assert there.matrix().is_cuda
    assert there.solution.cost == pytest.approx(here.solution.cost, rel=1e-4)
    torch.testing.assert_close(there.matrix().cpu() * 300, here.matrix() * 300, rtol=0, atol=1e-3)
