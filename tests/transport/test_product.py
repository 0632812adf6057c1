"""Matrix products by oneDNN and by torch's own `mm` agree, and the second takes over where the first is gone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from surgeon.transport import cost as room


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    room._one_dnn.cache_clear()
    yield
    room._one_dnn.cache_clear()


class Gone:
    """torch.ops.mkldnn of a torch that has dropped the operator."""


class Changed:
    """… of one that has changed what it takes, or gives."""

    @staticmethod
    def _linear_pointwise(*_: object) -> torch.Tensor:
        raise RuntimeError("expected 7 arguments")


class Wrong:
    @staticmethod
    def _linear_pointwise(left: torch.Tensor, *_: object) -> torch.Tensor:
        return left


@pytest.mark.parametrize("operator", [None, Gone, Changed, Wrong])
def test_products_are_right_with_and_without_one_dnn(operator: type | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if operator is not None:
        monkeypatch.setattr(torch.ops, "mkldnn", operator)
        assert room._one_dnn() is None
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(37, 19, generator=generator)
    right = torch.randn(19, 23, generator=generator)
    bias = torch.randn(23, generator=generator)
    exact = left.double() @ right.double()
    torch.testing.assert_close(room.product(left, right).double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(room.product(left, right, bias).double(), exact + bias, rtol=1e-5, atol=1e-5)
    tall = torch.randn(19, 2050, generator=generator)
    torch.testing.assert_close(
        room.product(tall.T, right).double(), tall.double().T @ right.double(), rtol=1e-5, atol=1e-5
    )
