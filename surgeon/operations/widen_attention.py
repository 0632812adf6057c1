"""`widen_attention`: whole new groups of heads, whose columns of the output projection are zero at birth.

A group is a key-value head with the query heads that read it, as many as in the base. [W_q; Q], [W_k; K], [W_v; V] and
[W_o, 0], heads of the same size: the native class with more heads, and the same function (Gesmundo and Maile, 2023).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft
from surgeon.blueprint.recipes import Constant, Copy, Random, Recipe
from surgeon.errors import BadInput
from surgeon.families.family import Part, Role
from surgeon.operations.operation import OneOf, Operation, Paper, TrainingDefaults
from surgeon.operations.widen_ffn import COMPOSABLE, place_of, repeated
from surgeon.operations.widths import ROUNDING, check_alone, check_free, parts_with, which_layers, widen
from surgeon.runtime.adapters_rules import VARIANCES

_READING: tuple[Role, ...] = ("query", "key", "value")
_OF_HEADS: frozenset[Role] = frozenset({"query_norm", "key_norm"})


class WidenAttention(Operation):
    """New groups of attention heads, which add nothing at birth."""

    papers: ClassVar[tuple[Paper, ...]] = (COMPOSABLE,)
    training: ClassVar[TrainingDefaults] = TrainingDefaults("ours, no paper's: new heads alone", lr=2e-4)
    examples: ClassVar[tuple[Mapping[str, object], ...]] = ({"groups": 1}, {"groups": "double"})

    op: Literal["widen_attention"]
    groups: Annotated[
        Annotated[int, Field(ge=1, le=4096)] | Literal["double"],
        Field(
            description="new key-value heads, each with as many query heads as there are to one; `double`: as many as"
            " there are"
        ),
    ] = 1
    init: Annotated[
        str,
        OneOf(lambda: ("copy", *VARIANCES)),
        Field(
            description="new rows of query, key and value: copies of the lowest groups in turn, or normal with variance"
            " 1/(d·L) (low_variance) or 2/d (he); the columns of the output projection are zero"
        ),
    ] = "low_variance"

    def edit(self, draft: Draft, facts: None) -> OperationRecord:
        """Widen the attention of every layer."""
        number = draft.number
        check_alone(draft, "num_attention_heads")
        check_free(draft, beside=("adapters",))
        sizes = draft.anatomy.sizes
        each = sizes.heads // sizes.kv_heads
        groups = sizes.kv_heads if self.groups == "double" else self.groups
        narrow = groups * sizes.head_dim
        wide = narrow * each
        rows: dict[Role, int] = {"query": wide, "key": narrow, "value": narrow, "output": wide}
        wider = [index for index in range(len(draft.layers)) if _has_heads(draft, index)]
        for index in wider or [0]:
            parts = parts_with(draft, index, (*_READING, "output"))
            check_norms(draft, index)
            more = {role: self._pieces(draft, number, index, parts, role, count) for role, count in rows.items()}
            draft.layers[index].rewritten |= dict.fromkeys(widen(draft, index, _READING, "output", more), number)
        heads, kv_heads = sizes.heads + groups * each, sizes.kv_heads + groups
        # Without `head_dim` a class would divide the hidden size by the heads.
        draft.sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": sizes.head_dim}
        return OperationRecord(
            op=self.op,
            matched=f"heads of {sizes.head_dim}: {sizes.heads} become {heads}, key-value heads {sizes.kv_heads} become"
            f" {kv_heads}, in {which_layers(wider, draft)}, {self.init}",
            claim=Claim("rounding", f"new columns of the output projections are zero; {ROUNDING}"),
            trains="new",
        )

    def _pieces(
        self, draft: Draft, number: int, layer: int, parts: Mapping[str, Part], role: Role, count: int
    ) -> tuple[Recipe, ...]:
        sizes, dtype = draft.anatomy.sizes, draft.dtype_of(layer)
        if role == "output":
            return (Constant(0.0, dtype, (sizes.hidden, count)),)
        if self.init != "copy":
            std = math.sqrt(VARIANCES[self.init](sizes.hidden, len(draft.layers)))
            return (Random(f"operations[{number}].layer[{layer}].{role}", std, dtype, (count, sizes.hidden)),)
        suffix, begin = place_of(parts, role)
        source = draft.layers[layer].tensors[suffix]
        assert isinstance(source, Copy), suffix
        return repeated(source, begin, sizes.query_width if role == "query" else sizes.kv_width, count)


def check_norms(draft: Draft, layer: int) -> None:
    """Raise BadInput where queries or keys are normalised over all heads together."""
    norms = [p for p in draft.kind_of(layer).parts if p.kind == "norm" and {role for role, _ in p.blocks} & _OF_HEADS]
    if wide := [part.suffix for part in norms if part.shape[0] != draft.anatomy.sizes.head_dim]:
        raise BadInput(
            f"layer {layer} ({wide[0]}): queries and keys are normalised over all heads together, so new heads would"
            " change what the old ones compute"
        )


def _has_heads(draft: Draft, layer: int) -> bool:
    """Whether a layer has attention as it is known; others (state spaces, convolutions) have no heads to add to.

    Attention that is not known has other shapes once there are more heads, by which the model is then refused.
    """
    return bool({role for part in draft.kind_of(layer).parts for role, _ in part.blocks} & set(_READING))
