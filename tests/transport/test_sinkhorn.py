from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surgeon.transport import sinkhorn
from surgeon.transport.cost import distances
from surgeon.transport.maps import TransportSettings
from surgeon.transport.sinkhorn import schedule
from surgeon.transport.solving import solve, solve_cost
from tests.transport.problems import PROBLEMS, cost64, permuted, pot_log, solved_by_pot, uneven

# Powers of two near 1e-3 and 1e3: rows scaled by them are the same rows, to the last bit. Others are of norm 1 below.
NORMS = [2.0**-10, 2.0**10]


def wide(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().numpy()


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("share", [1.0, 0.1, 0.01])
def test_plan_agrees_with_pot_in_float64(problem: str, norm: float, share: float) -> None:
    """Entry by entry, for regularisations from a hundredth of the cost's scale to all of it."""
    source, target = PROBLEMS[problem](60, 60, 40, norm=norm)
    cost = cost64(source, target)
    found = solve(source, target, TransportSettings(reg=share * cost.mean(), tolerance=1e-7, max_iterations=2000))
    expected = solved_by_pot(problem, 60, 60, 40, share)
    assert np.abs(wide(found.matrix()) - expected).max() * len(cost) < 1e-4
    assert found.solution.cost == pytest.approx((expected * cost).sum(), rel=1e-5)
    assert found.solution.entropy == pytest.approx(-(expected * np.log(expected)).sum(), abs=1e-3)


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("share", [1e-2, 1e-3])
def test_cost_agrees_with_pot_at_equal_error(problem: str, norm: float, share: float) -> None:
    source, target = PROBLEMS[problem](48, 64, 40, norm=norm)
    cost = cost64(source, target)
    found = solve(source, target, TransportSettings(reg=share * cost.mean()))
    error = max(found.solution.row_error, found.solution.column_error)
    # POT's error is an L2 norm, at most the L1 norm that ours is.
    expected = (solved_by_pot(problem, 48, 64, 40, share, error=2e-6) * cost).sum()
    assert found.solution.cost == pytest.approx(expected, rel=1e-4)
    assert error < 5e-6


@pytest.mark.parametrize("share", [1e-2, 1e-3, 1e-4, 1e-6])
@pytest.mark.parametrize("norm", [1e-20, 1e-3, 1e3, 1e20])
def test_nothing_under_or_overflows(share: float, norm: float) -> None:
    source, target = uneven(40, 50, 32, norm=norm)
    found = solve(source, target, TransportSettings(reg=share, cost_scale="mean", max_iterations=1500))
    plan = wide(found.matrix())
    assert np.isfinite(plan).all()
    assert (plan >= 0).all()
    assert plan.sum() == pytest.approx(1, abs=1e-5)
    # Never far from feasible, however sharp: that is what a plain Sinkhorn loses first.
    # A share of 1e-6 is near float32's rounding of the cost: how far so many passes get depends on the processor.
    bound = 1e-3 if share > 1e-6 else 5e-2
    assert max(found.solution.row_error, found.solution.column_error) < bound
    assert math.isfinite(found.solution.entropy)
    assert math.log(50) - 1e-3 < found.solution.entropy <= math.log(40 * 50)


def test_solution_tells_what_the_plan_is() -> None:
    source, target = uneven(30, 45, 20)
    found = solve(source, target, TransportSettings(reg=0.05))
    plan = wide(found.matrix())
    assert found.solution.converged
    assert (found.n, found.m) == plan.shape == (30, 45)
    assert found.solution.row_error == pytest.approx(np.abs(plan.sum(1) - 1 / 30).sum(), abs=1e-7)
    assert found.solution.column_error == pytest.approx(np.abs(plan.sum(0) - 1 / 45).sum(), abs=1e-7)
    assert found.solution.entropy == pytest.approx(-(plan * np.log(plan)).sum(), rel=1e-5)
    assert found.solution.cost == pytest.approx((plan * cost64(source, target)).sum(), rel=1e-5)
    assert max(found.solution.row_error, found.solution.column_error) <= 2e-6
    report = found.solution.to_report()
    assert report["iterations"] == found.solution.iterations >= 1
    assert report["converged"] is True


def test_float64_inputs_are_solved_in_float64() -> None:
    source, target = (rows.double() for rows in uneven(40, 40, 30))
    cost = cost64(source, target)
    settings = TransportSettings(reg=0.02, cost_scale="mean", tolerance=1e-12)
    found = solve(source, target, settings)
    assert found.matrix().dtype == torch.float64
    assert found.solution.converged
    assert np.abs(wide(found.matrix()) - pot_log(cost, 0.02 * cost.mean(), error=1e-14)).max() * 40 < 1e-8


def test_cost_scale_divides_the_cost() -> None:
    source, target = uneven(40, 40, 30, norm=7.0)
    cost = cost64(source, target)
    for scale, unit in (("none", 1.0), ("max", cost.max()), ("mean", cost.mean())):
        found = solve(source, target, TransportSettings(reg=0.1, cost_scale=scale))
        plain = solve(source, target, TransportSettings(reg=0.1 * unit))
        assert np.abs(wide(found.matrix()) - wide(plain.matrix())).max() * 40 < 1e-4
        assert found.solution.cost == pytest.approx(plain.solution.cost, rel=1e-5)  # in the unit of the cost itself


def test_too_few_iterations_are_told() -> None:
    source, target = uneven(64, 64, 40)
    for most in (1, 2, 10):
        found = solve(source, target, TransportSettings(reg=1e-3, max_iterations=most))
        assert not found.solution.converged
        assert found.solution.iterations <= most
        assert max(found.solution.row_error, found.solution.column_error) > 2e-6
        assert np.isfinite(wide(found.matrix())).all()


def test_acceleration_beats_the_plain_iteration() -> None:
    """POT's plain iteration, at the paper's reg on rows of differing norms, needs several times the passes."""
    import ot

    source, target = uneven(200, 200, 100, norm=3.0)
    cost = cost64(source, target)
    found = solve(source, target, TransportSettings())
    assert found.solution.converged
    uniform = np.full(200, 1 / 200)
    _, log = ot.sinkhorn(
        uniform, uniform, cost, 0.06, numItermax=4 * found.solution.iterations, stopThr=2e-6, log=True, warn=False
    )
    assert log["err"][-1] > 2e-6


@pytest.mark.parametrize(("reg", "computed"), [(0.06, 1), (0.008, 2)])
def test_the_cost_is_computed_again_only_where_the_kernel_lost_it(
    reg: float, computed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stages need one cost, three need two; what the kernel gives back leaves the plan where it was."""
    source, target = uneven(80, 60, 40, norm=3.0)
    cost = distances(target, source)
    calls: list[torch.Tensor] = []

    def make() -> torch.Tensor:
        calls.append(cost)
        return cost.clone()

    options = TransportSettings(reg=reg, tolerance=1e-7)
    found = solve_cost(make, options)
    assert len(calls) == computed
    monkeypatch.setattr(sinkhorn, "_WHOLE_KERNEL", math.inf)
    calls.clear()
    again = solve_cost(make, options)
    assert len(calls) == len(schedule(float(cost.max() - cost.min()), reg)) == computed + 1
    assert np.abs(wide(found.matrix()) - wide(again.matrix())).max() * len(source) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_reg_below_the_rounding_of_the_costs_is_refused(dtype: torch.dtype) -> None:
    """Its map would be nonsense or NaN; where all costs are equal any reg is large."""
    rows = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    for reg in (5e-324, 1e-300, float(torch.finfo(dtype).eps) / 100):
        with pytest.raises(ValueError, match="is below the rounding of the costs, which differ by up to"):
            solve(rows, rows.flip(0), TransportSettings(reg=reg))
    same = solve(torch.ones_like(rows), torch.ones_like(rows), TransportSettings(reg=1e-30))
    assert torch.isfinite(torch.as_tensor(same.matrix())).all()


def test_schedule_ends_at_reg() -> None:
    assert schedule(1.0, 0.06) == [0.06]
    assert schedule(0.0, 0.06) == [0.06]
    assert schedule(20.0, 0.06) == [0.3125, 0.06]
    steps = schedule(3.0, 1e-4)
    assert steps[-1] == 1e-4
    assert all(first > second for first, second in itertools.pairwise(steps))


@settings(max_examples=25)
@given(
    n=st.integers(1, 20),
    m=st.integers(1, 20),
    seed=st.integers(0, 99),
    reg=st.sampled_from([1e-3, 0.01, 0.06, 1.0, 1e6]),
    problem=st.sampled_from(sorted(PROBLEMS)),
)
def test_plans_are_couplings(n: int, m: int, seed: int, reg: float, problem: str) -> None:
    source, target = PROBLEMS[problem](n, m, 6, seed=seed)
    arguments: dict[str, Any] = {"reg": reg, "cost_scale": "mean", "max_iterations": 3000}
    found = solve(source, target, TransportSettings(**arguments))
    plan = wide(found.matrix())
    assert (plan >= 0).all()
    assert plan.sum() == pytest.approx(1, abs=1e-5)
    assert np.abs(plan.sum(1) - 1 / n).sum() == pytest.approx(found.solution.row_error, abs=1e-6)
    assert max(found.solution.row_error, found.solution.column_error) < 1e-3
    assert found.solution.converged == (max(found.solution.row_error, found.solution.column_error) <= 2e-6)


@pytest.mark.parametrize("share", [1e-2, 1e-3])
def test_sharp_plans_of_permuted_copies_are_permutations(share: float) -> None:
    source, target, order = permuted(50, 40)
    found = solve(source, target, TransportSettings(reg=share, cost_scale="mean"))
    assert found.solution.converged
    torch.testing.assert_close(found.align_rows(source), target, rtol=0, atol=1e-5)
    assert torch.equal(found.matrix().argmax(0), order)
    assert found.solution.entropy == pytest.approx(math.log(50), abs=1e-3)
