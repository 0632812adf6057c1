"""Maps of every solver against T formed in float64, and what `rescale` does to a layer."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import ot
import pytest
import torch

from surgeon.transport.maps import HalfIdentity, TransportSettings
from surgeon.transport.solving import solve
from tests.transport.problems import cost64, gaussian, permuted, seeded, uneven

SOLVERS = ["sinkhorn", "emd"]


def settings(solver: str, **others: Any) -> TransportSettings:
    return TransportSettings(solver=solver, **({"reg": 1e-3, "cost_scale": "mean"} | others))


def assert_close(found: torch.Tensor, expected: np.ndarray, tolerance: float = 1e-5) -> None:
    assert found.shape == expected.shape
    assert np.abs(found.double().numpy() - expected).max() <= tolerance * max(1e-30, np.abs(expected).max())


SHAPES = [(1, 1), (1, 7), (7, 1), (24, 24), (24, 30), (30, 24)]


@pytest.mark.parametrize(
    ("solver", "n", "m"), [*(("sinkhorn", *shape) for shape in SHAPES), ("emd", 1, 1), ("emd", 24, 24)]
)
@pytest.mark.parametrize("rescale", ["paper", "marginal"])
def test_applying_a_map_is_multiplying_by_its_matrix(solver: str, rescale: str, n: int, m: int) -> None:
    source, target = gaussian(n, m, 16)
    found = solve(source, target, settings(solver, reg=0.1, rescale=rescale))
    plan = found.matrix().double().numpy()
    assert plan.shape == (n, m)
    assert np.abs(plan.sum(1) - 1 / n).max() < 1e-6
    assert np.abs(plan.sum(0) - 1 / m).max() < 1e-6
    factor = m if rescale == "marginal" else 1
    weight = torch.randn(n, 5, generator=seeded(8))
    assert_close(found.align_rows(weight), factor * plan.T @ weight.double().numpy())
    assert_close(found.align_columns(weight.T), factor * weight.T.double().numpy() @ plan)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_permuted_copies_are_recovered(solver: str, dtype: torch.dtype) -> None:
    source, _, order = permuted(40, 64)
    source = source.to(dtype)
    target = source[order]
    found = solve(source, target, settings(solver))
    working = torch.float64 if dtype == torch.float64 else torch.float32
    tolerance = 0.0 if solver == "emd" else 1e-5
    aligned = found.align_rows(source)
    assert aligned.dtype == working
    torch.testing.assert_close(aligned, target.to(working), rtol=0, atol=tolerance)
    torch.testing.assert_close(found.align_columns(source.T), target.T.to(working), rtol=0, atol=tolerance)
    assert found.solution.entropy == pytest.approx(math.log(40), abs=1e-3)
    assert found.solution.converged


@pytest.mark.parametrize("solver", SOLVERS)
def test_rescale_marginal_keeps_the_norm_that_paper_loses(solver: str) -> None:
    """T sums to one, so that the aligned half of a layer, taken as it is, is 1/n of what it should be."""
    source, target, _ = permuted(64, 32)
    norms = {}
    for rescale in ("paper", "marginal"):
        aligned = solve(source, target, settings(solver, rescale=rescale)).align_rows(source)
        norms[rescale] = float(((aligned + target) / 2).norm() / target.norm())
    assert norms["marginal"] == pytest.approx(1.0, abs=1e-5)
    assert norms["paper"] == pytest.approx((1 + 1 / 64) / 2, abs=1e-5)


@pytest.mark.parametrize("problem", [gaussian, uneven])
def test_rescale_paper_is_the_public_formula(problem: Any) -> None:
    """T = ot.sinkhorn(1/n, 1/n, cdist(W1, W2), 0.06); aligned = Tᵀ W1; fused = (aligned + W2) / 2."""
    source, target = problem(48, 48, 32)
    uniform = np.full(48, 1 / 48)
    plan = ot.sinkhorn(uniform, uniform, cost64(source, target), 0.06, numItermax=10_000)
    expected = (plan.T @ source.double().numpy() + target.double().numpy()) / 2
    found = solve(source, target, TransportSettings(reg=0.06, rescale="paper"))
    fused = (found.align_rows(source) + target) / 2
    assert_close(fused, expected, tolerance=1e-6)
    aligned = found.align_rows(source)
    assert_close(aligned, plan.T @ source.double().numpy(), tolerance=2e-4)


def test_exact_transport_agrees_with_pot() -> None:
    source, target = uneven(20, 20, 16)
    cost = cost64(source, target)
    expected = ot.emd2(np.full(20, 1 / 20), np.full(20, 1 / 20), cost)
    found = solve(source, target, TransportSettings(solver="emd"))
    assert found.solution.converged
    assert max(found.solution.row_error, found.solution.column_error) < 1e-9
    assert found.solution.cost == pytest.approx(expected, rel=1e-6)
    plan = found.matrix().double().numpy()
    assert (plan * cost).sum() == pytest.approx(expected, rel=1e-6)
    assert sorted(np.unique(plan)) == pytest.approx([0, 1 / 20])
    assert found.solution.entropy == pytest.approx(-(plan[plan > 0] * np.log(plan[plan > 0])).sum(), rel=1e-6)
    with pytest.raises(ValueError, match="20 rows cannot be mapped one to one onto 27; use the solver sinkhorn"):
        solve(source, uneven(27, 3, 16)[0], TransportSettings(solver="emd"))


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("kind", ["equal", "zero", "duplicated"])
@pytest.mark.parametrize("scale", ["none", "max", "mean"])
def test_degenerate_rows(solver: str, kind: str, scale: str) -> None:
    base, _ = gaussian(4, 1, 6)
    source = {"equal": base[:1].repeat(12, 1), "zero": torch.zeros(12, 6), "duplicated": base.repeat(3, 1)}[kind]
    found = solve(source, source.clone(), settings(solver, reg=0.01, cost_scale=scale))
    assert found.solution.converged
    assert max(found.solution.row_error, found.solution.column_error) < 2e-6
    # Whichever copy a row is sent to, the aligned rows are the rows.
    torch.testing.assert_close(found.align_rows(source), source, rtol=0, atol=1e-6)
    if solver == "sinkhorn":
        spread = {"equal": 12, "zero": 12, "duplicated": 3}[kind]
        assert found.solution.entropy == pytest.approx(math.log(12 * spread), abs=1e-3)


def test_half_identity() -> None:
    source, target = uneven(20, 20, 12)
    inner = solve(source, target, TransportSettings())
    half = HalfIdentity(inner)
    plan = (20 * inner.matrix() + torch.eye(20)) / 2
    weight = torch.randn(20, 3, generator=seeded(5))
    torch.testing.assert_close(half.align_rows(weight), plan.T @ weight)
    torch.testing.assert_close(half.align_columns(weight.T), weight.T @ plan)
    torch.testing.assert_close(half.matrix(), plan / 20)
    assert half.solution.to_report() == inner.solution.to_report()
    with pytest.raises(ValueError, match="square map, not one of 20 × 9"):
        HalfIdentity(solve(source, target[:9], TransportSettings()))


@pytest.mark.parametrize("solver", SOLVERS)
def test_maps_leave_their_inputs_alone(solver: str) -> None:
    source, target = uneven(16, 16, 8)
    kept = source.clone(), target.clone()
    found = solve(source, target, settings(solver))
    for apply in (found, HalfIdentity(found)):
        apply.align_rows(source)
        apply.align_columns(source.T)
        apply.matrix().zero_()
    assert torch.equal(source, kept[0])
    assert torch.equal(target, kept[1])
    assert float(found.matrix().sum()) == pytest.approx(1, abs=1e-5)
