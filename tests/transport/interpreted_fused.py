"""The fused kernels against torch's passes, on the CPU: run by test_fused.py in a process that interprets Triton."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surgeon.transport import fused, passes, sinkhorn
from surgeon.transport.maps import TransportSettings
from surgeon.transport.passes import TORCH
from surgeon.transport.solving import solve
from tests.transport.problems import PROBLEMS, seeded

SHAPES = [(1, 1), (1, 40), (40, 1), (37, 53), (300, 17), (5, 1025), (130, 64), (6, 4097), (3, 14336), (2, 16384)]


def spanning(n: int, m: int) -> Tensor:
    """Entries from 1e-30 to 1, with a zero, each row and column reaching one."""
    made = 10 ** -(torch.rand(n, m, generator=seeded(n + m)) * 30)
    made[torch.arange(n), torch.arange(n) % m] = 1.0
    made[torch.arange(m) % n, torch.arange(m)] = 1.0
    if n > 1 < m:
        made[0, 1 if m > n else m - 1] *= 0.0 if n > 2 else 1.0
    return made


def scaling(m: int) -> Tensor:
    return (torch.randn(m, generator=seeded(m)) * 3).exp_()


@pytest.mark.parametrize(("n", "m"), SHAPES)
def test_sweep(n: int, m: int) -> None:
    kernel, v = spanning(n, m), scaling(m)
    found = fused.PASSES.sweep(kernel, v)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, TORCH.sweep(kernel.double(), v.double()), rtol=2e-6, atol=0)
    assert torch.equal(found, fused.PASSES.sweep(kernel, v))


@pytest.mark.parametrize(("n", "m"), SHAPES)
@pytest.mark.parametrize("epsilon", [0.06, 1e-4])
def test_make_kernel(n: int, m: int, epsilon: float) -> None:
    generator = seeded(n * m)
    cost, g = torch.rand(n, m, generator=generator) * 5, torch.randn(m, generator=generator)
    expected = cost.clone()
    f, shift = TORCH.make_kernel(expected, g, epsilon)
    found_f, found_shift = fused.PASSES.make_kernel(cost, g, epsilon)
    # Minima of the same differences: the same numbers, whatever the order.
    assert torch.equal(found_f, f)
    assert torch.equal(found_shift, shift)
    torch.testing.assert_close(cost, expected, rtol=1e-5, atol=1e-37)
    assert torch.equal(cost.amax(0), torch.ones(m))


@pytest.mark.parametrize(("n", "m"), SHAPES)
@pytest.mark.parametrize("factor", [1.0, 53.0])
def test_finish(n: int, m: int, factor: float) -> None:
    kernel, v = spanning(n, m), scaling(m)
    wide = kernel.double()
    again = kernel.clone()
    expected = TORCH.finish(wide, v.double(), factor)
    found = fused.PASSES.finish(kernel, v, factor)
    torch.testing.assert_close(kernel, wide.float(), rtol=5e-6, atol=1e-37)
    for name in ("u_N", "row_mass_N", "column_mass_M"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=5e-6, atol=1e-37)
    torch.testing.assert_close(found.log_kernel, expected.log_kernel, rtol=1e-5, atol=1e-7)
    repeated = fused.PASSES.finish(again, v, factor)
    assert torch.equal(again, kernel)
    assert torch.equal(repeated.log_kernel, found.log_kernel)


# Sharp problems' passes differ by some whenever sums are taken in another order, torch's own too.
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize(
    ("n", "m", "reg", "tolerance", "slack"),
    [(60, 45, 0.06, 1e-6, 1), (33, 129, 1e-2, 1e-4, 1), (48, 48, 1e-3, 1e-4, 15), (1, 9, 0.06, 1e-6, 0)],
)
def test_solutions(
    problem: str, n: int, m: int, reg: float, tolerance: float, slack: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = PROBLEMS[problem](n, m, 24, norm=2.0)
    settings = TransportSettings(reg=reg, tolerance=tolerance)
    expected = solve(source, target, settings)
    used: list[Tensor] = []
    monkeypatch.setattr(sinkhorn, "passes_for", lambda matrix: used.append(matrix) or fused.PASSES)
    found = solve(source, target, settings)
    assert used
    assert abs(found.solution.iterations - expected.solution.iterations) <= slack
    assert found.solution.converged
    assert expected.solution.converged
    assert max(found.solution.row_error, found.solution.column_error) <= tolerance
    assert (found.matrix() - expected.matrix()).abs().sum() < 50 * tolerance
    assert found.solution.cost == pytest.approx(expected.solution.cost, rel=tolerance)
    assert found.solution.entropy == pytest.approx(expected.solution.entropy, abs=50 * tolerance)
    assert torch.equal(solve(source, target, settings).matrix(), found.matrix())


def test_a_trial_finds_kernels_that_err(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert sinkhorn._works(cpu, 64)
    wrong = passes.Passes(TORCH.make_kernel, lambda kernel, v: TORCH.sweep(kernel, v) * 1.01, TORCH.finish)
    monkeypatch.setattr(fused, "PASSES", wrong)
    with pytest.warns(RuntimeWarning, match="fused kernels are not used on cpu: their sums are not torch's"):
        assert not sinkhorn._works(cpu, 128)

    def uncompiled(*_: object) -> Tensor:
        raise RuntimeError("Failed to find C compiler.\nSecond line")

    monkeypatch.setattr(fused, "PASSES", passes.Passes(TORCH.make_kernel, uncompiled, TORCH.finish))
    with pytest.warns(RuntimeWarning, match="RuntimeError: Failed to find C compiler.$"):
        assert not sinkhorn._works(cpu, 256)
