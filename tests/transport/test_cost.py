from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surgeon.transport import cost
from surgeon.transport.cost import distances
from tests.transport.problems import cost64, gaussian, seeded, uneven


def relative_error(found: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> float:
    expected = torch.from_numpy(cost64(source, target))
    return float(((found.double() - expected).abs() / expected.clamp(min=1e-300)).max())


@pytest.mark.parametrize("norm", [1e-3, 1.0, 1e3])
def test_agrees_with_float64(norm: float) -> None:
    for source, target in (gaussian(70, 90, 300, norm=norm), uneven(70, 90, 300, norm=norm)):
        assert relative_error(distances(source, target), source, target) < 3e-6


@pytest.mark.parametrize("apart", [1e-2, 1e-4, 1e-6])
def test_near_equal_rows(apart: float) -> None:
    """The plain expansion has no correct digit here: the squares agree in all but the last few bits."""
    source, noise = gaussian(60, 60, 200, norm=1.0)
    target = source + apart * noise
    found = distances(source, target)
    assert relative_error(found, source, target) < 1e-5
    plain = (source.square().sum(1)[:, None] + target.square().sum(1) - 2 * source @ target.T).clamp(min=0).sqrt()
    if apart <= 1e-4:
        assert relative_error(plain, source, target) > 1e-2


def test_rows_far_from_the_origin() -> None:
    source, target = gaussian(40, 50, 64)
    far = 1000 * torch.ones(64)
    found = distances(source + far, target + far)
    assert relative_error(found, source + far, target + far) < 1e-5


def test_clusters_of_near_equal_rows() -> None:
    """So many close pairs that whole blocks are made anew in float64."""
    centres, _ = gaussian(2, 1, 128)
    rows = centres.repeat(50, 1) + 1e-5 * torch.randn(100, 128, generator=seeded(3))
    assert relative_error(distances(rows[:48], rows[48:]), rows[:48], rows[48:]) < 1e-4


def test_equal_rows_are_at_distance_zero() -> None:
    source, _ = gaussian(30, 1, 50)
    assert float(distances(source, source).diagonal().max()) == 0.0
    assert float(distances(torch.ones(5, 7), torch.ones(4, 7)).max()) == 0.0
    assert float(distances(torch.zeros(5, 7), torch.zeros(4, 7)).max()) == 0.0


@pytest.mark.parametrize("norm", [1e-30, 1e-20, 1e20, 1e30])
def test_rows_whose_squares_leave_the_floats(norm: float) -> None:
    source, target = gaussian(20, 30, 16, norm=norm)
    assert relative_error(distances(source, target), source, target) < 3e-6


def test_distances_beyond_the_floats_are_refused() -> None:
    with pytest.raises(ValueError, match="farther apart than float32 can hold"):
        distances(torch.full((2, 64), 3e38), torch.full((2, 64), -3e38))


def test_row_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = uneven(37, 29, 40)
    target[5] = source[7] + 1e-4
    whole = distances(source, target)
    monkeypatch.setattr(cost, "_BLOCK_ELEMENTS", 30)
    blocked = distances(source, target)
    assert relative_error(blocked, source, target) < 1e-5
    torch.testing.assert_close(blocked, whole, rtol=1e-6, atol=0)


@settings(max_examples=30)
@given(
    n=st.integers(1, 12), m=st.integers(1, 12), d=st.integers(1, 9), seed=st.integers(0, 99), power=st.integers(-9, 9)
)
def test_any_shape(n: int, m: int, d: int, seed: int, power: int) -> None:
    source, target = gaussian(n, m, d, seed=seed, norm=10.0**power)
    assert relative_error(distances(source, target), source, target) < 1e-4
