"""Whole attention heads, found by trial: whether they can change places together with all their parts.

Groups of query heads change places with their key and value head, and query heads within a group. With a wrong reading
of query, key, value and output the layer computes something else. So `heads: blocks` depends on nothing that a class
states about its heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from surgeon.anatomy.family import Part, Role, Sizes
from surgeon.anatomy.growth import part_of
from surgeon.anatomy.moving import Move, Mover
from surgeon.anatomy.seen import Seen
from surgeon.anatomy.silence import Run, captured
from surgeon.anatomy.twin import shrunk, twin_of_small
from surgeon.common.devices import one_thread
from surgeon.common.library import LOAD_FAILURES

if TYPE_CHECKING:
    from torch import Tensor


_TWIN_GROUPS, _OF_GROUP = 2, 2
_OF_HEADS: tuple[Role, ...] = ("query", "key", "value")
_NORM_OF: Mapping[Role, Role] = {"query_norm": "query", "key_norm": "key"}


def heads_move(seen: Seen, kind: int) -> bool:
    """Return whether whole heads of a kind of layers may change places.

    False also where query, key, value or output are not known, or no twin with several groups of heads can be run.
    """
    import torch

    try:
        part = small = shrunk(seen.config, heads_left=_TWIN_GROUPS * _OF_GROUP)
        for key in seen.skeleton.path:
            part = part[key]
        sizes = seen.skeleton.sizes
        each = _OF_GROUP if sizes.heads > sizes.kv_heads else 1
        part |= {"num_attention_heads": _TWIN_GROUPS * each, "num_key_value_heads": _TWIN_GROUPS}
        part.setdefault(
            "head_dim", part_of(small, seen.skeleton.path).get("hidden_size", 0) // (_TWIN_GROUPS * _OF_GROUP)
        )
        with one_thread(), torch.no_grad():
            twin = twin_of_small(small)
            layer = seen.firsts[kind][0]
            run = captured(twin, [layer])[layer]
            return _moved(run, seen.parts[kind], seen.places(kind), sizes, part["head_dim"], each)
    except (*LOAD_FAILURES, KeyError):
        return False


def _moved(run: Run, parts: Sequence[Part], places: Mapping[str, str], sizes: Sizes, head_dim: int, each: int) -> bool:
    """Return whether the layer computes the same once heads move, and something else if the output matrix does not."""
    held = dict(run.layer.named_parameters())
    orders = {"query": _rows(each, head_dim), "key": _rows(1, head_dim), "value": _rows(1, head_dim)}
    found: set[Role] = set()
    inside: list[Move] = []
    written: list[Move] = []
    for part in parts:
        roles = [_NORM_OF.get(role, role) for role, _ in part.blocks]
        # A norm over one head is the same for all.
        if part.kind == "norm" and part.shape[0] == sizes.head_dim:
            continue
        if "output" in roles and part.kind == "weight" and part.suffix in places:
            written.append(Move(held[places[part.suffix]], 1, orders["query"]))
        if not roles or not set(roles) <= set(_OF_HEADS):
            continue
        if part.suffix not in places:
            return False
        inside.append(Move(held[places[part.suffix]], 0, _stacked([orders[role] for role in roles])))
        found |= set(roles) if part.kind == "weight" else set()
    fits = all(value.shape[axis] == len(order) for value, axis, order in (*inside, *written))
    if found != set(_OF_HEADS) or len(written) != 1 or not fits:
        return False
    return Mover(run).holds([*inside, *written], [inside])


def _rows(each: int, head_dim: int) -> Tensor:
    """Return the row order of all heads with the groups reversed, and the heads within each group too."""
    import torch

    heads = torch.arange(_TWIN_GROUPS * each).reshape(_TWIN_GROUPS, each).flip(0).flip(1).flatten()
    return (heads[:, None] * head_dim + torch.arange(head_dim)).flatten()


def _stacked(orders: Sequence[Tensor]) -> Tensor:
    """Return the row order of several modules stacked one below another."""
    import torch

    starts = [sum(len(order) for order in orders[:nth]) for nth in range(len(orders))]
    return torch.cat([order + start for order, start in zip(orders, starts, strict=True)])
