"""Whole heads: groups of heads that share keys stay together, and scores stay those of attention heads."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from surgeon.transport.heads import AttentionWeights, head_maps
from surgeon.transport.maps import TransportSettings
from tests.transport.problems import seeded

HEAD_DIM, WIDTH = 8, 24
LAYOUTS = [(6, 6), (6, 3), (8, 2), (4, 1), (1, 1)]
SETTINGS = {
    "emd": TransportSettings(solver="emd"),
    "sinkhorn": TransportSettings(reg=1e-3),
}


def layer(n_heads: int, n_kv_heads: int, *, seed: int) -> AttentionWeights:
    generator = seeded(seed)

    def rows(heads: int) -> Tensor:
        return torch.randn(heads * HEAD_DIM, WIDTH, generator=generator) * WIDTH**-0.5

    return AttentionWeights(rows(n_heads), rows(n_kv_heads), rows(n_kv_heads), rows(n_heads).T)


def some_order(n_heads: int, n_kv_heads: int, seed: int) -> tuple[Tensor, Tensor]:
    """An order of the query rows and one of the key rows that keep the groups: whole groups, and heads in each."""
    generator = seeded(seed)
    group = n_heads // n_kv_heads
    groups = torch.randperm(n_kv_heads, generator=generator)
    heads = torch.cat([g * group + torch.randperm(group, generator=generator) for g in groups])

    def rows(order: Tensor) -> Tensor:
        return (order[:, None] * HEAD_DIM + torch.arange(HEAD_DIM)).flatten()

    return rows(heads), rows(groups)


def reordered(weights: AttentionWeights, order: tuple[Tensor, Tensor]) -> AttentionWeights:
    query, key = order
    return AttentionWeights(weights.query[query], weights.key[key], weights.value[key], weights.output[:, query])


def aligned(
    first: AttentionWeights, second: AttentionWeights, layout: tuple[int, int], solver: str
) -> AttentionWeights:
    maps = head_maps(first, second, SETTINGS[solver], n_heads=layout[0], n_kv_heads=layout[1], head_dim=HEAD_DIM)
    return AttentionWeights(
        maps.query.align_rows(first.query),
        maps.key.align_rows(first.key),
        maps.key.align_rows(first.value),
        maps.query.align_columns(first.output),
    )


def scores(weights: AttentionWeights, n_kv_heads: int) -> Tensor:
    """Rotary attention scores (heads, tokens, tokens) of a few tokens."""
    tokens = torch.randn(5, WIDTH, generator=seeded(77))
    angle = torch.arange(5)[:, None] * 10.0 ** -torch.arange(HEAD_DIM // 2)

    def turned(rows: Tensor) -> Tensor:
        x, y = (tokens @ rows.T).view(5, -1, HEAD_DIM).transpose(0, 1).chunk(2, -1)
        return torch.cat([x * angle.cos() - y * angle.sin(), y * angle.cos() + x * angle.sin()], -1)

    query, key = turned(weights.query), turned(weights.key)
    return query @ key.repeat_interleave(len(query) // n_kv_heads, 0).transpose(1, 2)


def assert_same(found: AttentionWeights, expected: AttentionWeights, tolerance: float) -> None:
    for field in dataclasses.fields(found):
        torch.testing.assert_close(
            getattr(found, field.name), getattr(expected, field.name), rtol=0, atol=tolerance, msg=field.name
        )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("solver", SETTINGS)
def test_head_permuted_copies_are_recovered_with_their_scores(layout: tuple[int, int], solver: str) -> None:
    first = layer(*layout, seed=1)
    second = reordered(first, some_order(*layout, seed=2))
    found = aligned(first, second, layout, solver)
    assert_same(found, second, 0 if solver == "emd" else 1e-5)
    torch.testing.assert_close(scores(found, layout[1]), scores(second, layout[1]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("solver", SETTINGS)
def test_order_of_heads_does_not_matter(layout: tuple[int, int], solver: str) -> None:
    """Permuting the lower layer's heads changes nothing; permuting the upper layer's permutes the result."""
    first, second = layer(*layout, seed=1), layer(*layout, seed=9)
    order = some_order(*layout, seed=2)
    plain = aligned(first, second, layout, solver)
    tolerance = 0 if solver == "emd" else 1e-4
    assert_same(aligned(reordered(first, order), second, layout, solver), plain, tolerance)
    assert_same(aligned(first, reordered(second, order), layout, solver), reordered(plain, order), tolerance)


def test_rows_matched_freely_tear_heads_apart() -> None:
    """The fault this is for: the plain method's maps of Q and of K differ, and the scores are lost."""
    from surgeon.transport.solving import solve

    layout = (4, 2)
    first, second = layer(*layout, seed=1), layer(*layout, seed=9)
    exact = TransportSettings(solver="emd")
    torn = dataclasses.replace(
        first,
        query=solve(first.query, second.query, exact).align_rows(first.query),
        key=solve(first.key, second.key, exact).align_rows(first.key),
    )
    whole = aligned(first, second, layout, "emd")

    def is_one_of(found: Tensor, heads: Tensor) -> bool:
        return any(torch.allclose(found, head, atol=1e-4) for head in heads)

    expected = scores(first, 2)
    assert all(is_one_of(head, expected) for head in scores(whole, 2))
    assert not any(is_one_of(head, expected) for head in scores(torn, 2))


@pytest.mark.parametrize("rescale", ["paper", "marginal"])
@pytest.mark.parametrize("solver", ["sinkhorn", "emd"])
def test_map_is_its_matrix(rescale: str, solver: str) -> None:
    first, second = layer(6, 3, seed=1), layer(6, 3, seed=9)
    settings = TransportSettings(solver=solver, rescale=rescale, reg=0.1)
    maps = head_maps(first, second, settings, n_heads=6, n_kv_heads=3, head_dim=HEAD_DIM)
    for found, rows in ((maps.query, first.query), (maps.key, first.key)):
        n = len(rows)
        plan = found.matrix()
        assert plan.shape == (found.n, found.m) == (n, n)
        torch.testing.assert_close(plan.sum(0), torch.full((n,), 1 / n))
        torch.testing.assert_close(plan.sum(1), torch.full((n,), 1 / n))
        factor = n if rescale == "marginal" else 1
        torch.testing.assert_close(found.align_rows(rows), factor * plan.T @ rows)
        torch.testing.assert_close(found.align_columns(rows.T), factor * rows.T @ plan)
        torch.testing.assert_close(found.align_rows(rows[:, 0]), factor * plan.T @ rows[:, 0])  # a bias
        assert found.solution.entropy == pytest.approx(-float(torch.xlogy(plan, plan).sum()), abs=1e-3)
        # Numbers of a head stay at their place: rotary pairs are never torn apart.
        places = plan.view(n // HEAD_DIM, HEAD_DIM, n // HEAD_DIM, HEAD_DIM).sum((0, 2))
        assert torch.equal(places, places.diagonal().diag())


def test_groups_go_whole() -> None:
    maps = head_maps(
        layer(8, 2, seed=1), layer(8, 2, seed=9), SETTINGS["emd"], n_heads=8, n_kv_heads=2, head_dim=HEAD_DIM
    )
    queries = maps.query.matrix().view(2, 4 * HEAD_DIM, 2, 4 * HEAD_DIM).sum((1, 3))
    keys = maps.key.matrix().view(2, HEAD_DIM, 2, HEAD_DIM).sum((1, 3))
    torch.testing.assert_close(queries, keys)
    assert maps.query.solution.entropy == pytest.approx(math.log(8 * HEAD_DIM))
