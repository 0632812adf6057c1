"""Whether heads of attention lie one after the other in a layer's tensors, found by trial on a twin.

Whole heads may change places where all that belongs to them moves along: groups of query heads with their key and value
head, and query heads within a group. With a wrong reading of query, key, value and output the layer computes something
else. So `heads: blocks` depends on nothing that a class says of its heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from surgeon.common.devices import one_thread
from surgeon.common.library import LOAD_FAILURES
from surgeon.families.family import Part, Role, Sizes
from surgeon.families.growth import part_of
from surgeon.families.silence import Run, captured
from surgeon.families.skeleton import build
from surgeon.families.twin import shrunk, twin_of_small

if TYPE_CHECKING:
    from torch import Tensor

_GROUPS, _OF_GROUP = 2, 2
# Of the layer's largest output: rounding stays below the one, what is computed otherwise is above the other.
_SAME, _OTHER = 1e-4, 1e-3
_OF_HEADS: tuple[Role, ...] = ("query", "key", "value")
_NORM_OF: Mapping[Role, Role] = {"query_norm": "query", "key_norm": "key"}


def heads_move(
    config: Mapping[str, Any], layer: int, parts: Sequence[Part], places: Mapping[str, str], sizes: Sizes
) -> bool:
    """Whether whole heads of a layer may change places.

    Args:
        config: The base's config.json.
        layer: The layer's number.
        parts: The layer's parts, with their roles.
        places: The names in memory, below the layer, of those that are in memory as they are on disk, by suffix.
        sizes: The base's sizes.

    Returns:
        False also where query, key, value or output are not known, or no twin with several groups of heads can be run.
    """
    import torch

    try:
        path = build(config).path
        small = shrunk(config, heads_left=_GROUPS * _OF_GROUP)
        part = small if not path else _inside(small, path)
        each = _OF_GROUP if sizes.heads > sizes.kv_heads else 1
        part |= {"num_attention_heads": _GROUPS * each, "num_key_value_heads": _GROUPS}
        part.setdefault("head_dim", part_of(small, path).get("hidden_size", 0) // (_GROUPS * _OF_GROUP))
        with one_thread(), torch.no_grad():
            twin = twin_of_small(small)
            run = captured(twin, [layer])[layer]
            return _moved(run, parts, places, sizes, part["head_dim"], each)
    except (*LOAD_FAILURES, KeyError):
        return False


def _inside(config: dict[str, Any], path: Sequence[str]) -> dict[str, Any]:
    for key in path:
        config = config[key]
    return config


def _moved(run: Run, parts: Sequence[Part], places: Mapping[str, str], sizes: Sizes, head_dim: int, each: int) -> bool:
    """Whether the layer computes what it did once its heads change places, and something else where half moves."""
    import torch

    held = dict(run.layer.named_parameters())
    orders = {"query": _rows(each, head_dim), "key": _rows(1, head_dim), "value": _rows(1, head_dim)}
    before = run.output()
    scale = before.abs().max()
    found: set[Role] = set()
    written: list[tuple[Tensor, Tensor]] = []
    for part in parts:
        roles = [_NORM_OF.get(role, role) for role, _ in part.blocks]
        # A norm over one head is the same for all.
        if part.kind == "norm" and part.shape[0] == sizes.head_dim:
            continue
        if "output" in roles and part.kind == "weight" and part.suffix in places:
            written.append((held[places[part.suffix]], orders["query"]))
        if not roles or not set(roles) <= set(_OF_HEADS):
            continue
        if part.suffix not in places:
            return False
        value = held[places[part.suffix]]
        rows = _stacked([orders[role] for role in roles])
        if len(value) != len(rows):
            return False
        value.copy_(value[rows])
        found |= set(roles) if part.kind == "weight" else set()
    if found != set(_OF_HEADS) or len(written) != 1:
        return False
    half = (run.output() - before).abs().max() / scale
    output, order = written[0]
    if output.shape[1] != len(order):
        return False
    output.copy_(output[:, order])
    whole = (run.output() - before).abs().max() / scale
    return bool(whole < _SAME) and bool(half > _OTHER) and bool(torch.isfinite(before).all())


def _rows(each: int, head_dim: int) -> Tensor:
    """The rows of all heads, groups in another order and, where there are several, the heads within each too."""
    import torch

    heads = torch.arange(_GROUPS * each).reshape(_GROUPS, each).flip(0).flip(1).flatten()
    return (heads[:, None] * head_dim + torch.arange(head_dim)).flatten()


def _stacked(orders: Sequence[Tensor]) -> Tensor:
    """Rows of several modules, the one below the other."""
    import torch

    starts = [sum(len(order) for order in orders[:nth]) for nth in range(len(orders))]
    return torch.cat([order + start for order, start in zip(orders, starts, strict=True)])
