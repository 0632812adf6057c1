"""Experts matched by their routers' rows: the best permutation, groups kept, by trying all of them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from surgeon.transport.solving import match_rows


def draw(count: int, width: int, seed: int) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def best(source: Tensor, target: Tensor, groups: int) -> list[int]:
    """Which row of the source goes to each of the target, by all permutations that keep groups together."""
    size = len(source) // groups

    def keeps(order: tuple[int, ...]) -> bool:
        return all(len({place // size for place in order[g * size : (g + 1) * size]}) == 1 for g in range(groups))

    tried = [order for order in itertools.permutations(range(len(source))) if keeps(order)]
    return list(min(tried, key=lambda order: float((source[list(order)] - target).square().sum())))


def partners(source: Tensor, target: Tensor, groups: int = 1) -> list[int]:
    found = match_rows(source, target, groups=groups)
    return [found.source_of(row) for row in range(len(target))]


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_it_is_the_best_of_all_permutations(groups: int) -> None:
    for seed in range(3):
        source, target = draw(6, 4, seed), draw(6, 4, 100 + seed)
        assert partners(source, target, groups) == best(source, target, groups)


def test_neither_scale_nor_a_common_shift_changes_it() -> None:
    source, target = draw(7, 5, 1), draw(7, 5, 2)
    plain = partners(source, target)
    assert plain != list(range(7))
    assert partners(source * 1e-4, target) == plain
    assert partners(source, target + 3 * draw(1, 5, 3)) == plain


def test_the_map_moves_rows_and_scales_nothing() -> None:
    rows = draw(6, 3, 4)
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    found = match_rows(rows.float(), rows[order].float())
    assert torch.equal(found.align_rows(rows), rows[order].float())
    assert torch.equal(found.align_columns(rows.T), rows[order].T.float())
    assert found.solution.cost == 0
    assert found.solution.converged


def test_what_cannot_be_matched_is_refused() -> None:
    for source, target, groups, words in (
        (draw(4, 3, 1), draw(5, 3, 1), 1, "4 and 5 experts in 1 groups"),
        (draw(4, 3, 1), draw(4, 3, 1), 3, "4 and 4 experts in 3 groups"),
        (draw(4, 3, 1), draw(4, 2, 1), 1, "rows of 3 and of 2"),
        (draw(4, 3, 1) * torch.nan, draw(4, 3, 1), 1, "not finite"),
    ):
        with pytest.raises(ValueError, match=words):
            match_rows(source, target, groups=groups)
