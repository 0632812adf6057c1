"""`widen_attention`: whole new groups of heads, whose columns of the output projection are zero at birth.

A group is a key-value head with the query heads that read it, as many as in the base. [W_q; Q], [W_k; K], [W_v; V] and
[W_o, 0], heads of the same size: the native class with more heads, and the same function (Gesmundo and Maile, 2023).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft
from surgeon.blueprint.recipes import Recipe
from surgeon.errors import BadInput
from surgeon.operations.growing import New, lengthen, wider_heads
from surgeon.operations.operation import OneOf, Operation, Paper, TrainingDefaults
from surgeon.operations.widen_ffn import COMPOSABLE, drawn
from surgeon.operations.widths import ROUNDING, check_alone, check_free, which_layers
from surgeon.runtime.adapters_rules import VARIANCES


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
        check_alone(draft, "num_attention_heads")
        check_free(draft, beside=("adapters",))
        sizes = draft.anatomy.sizes
        groups = sizes.kv_heads if self.groups == "double" else self.groups
        fields, growths = wider_heads(draft, groups)
        check_norms(draft, growths)
        wider = lengthen(draft, growths, partial(self._born, draft))
        draft.sizes |= fields
        heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
        return OperationRecord(
            op=self.op,
            matched=f"heads of {sizes.head_dim}: {sizes.heads} become {heads}, key-value heads {sizes.kv_heads} become"
            f" {kv_heads}, in {which_layers(wider, draft)}, {self.init}",
            claim=Claim("rounding", f"new columns of the output projections are zero; {ROUNDING}"),
            trains="new",
        )

    def _born(self, draft: Draft, new: New) -> tuple[Recipe, ...]:
        if self.init == "copy":
            return new.repeated
        return (drawn(draft, new, self.init, new.of.shape[-1]),)


def check_norms(draft: Draft, growing: Sequence[Collection[str]]) -> None:
    """Raise BadInput where a norm grows, of each kind by suffix: queries or keys are normalised over all heads then."""
    for number, (kind, grown) in enumerate(zip(draft.anatomy.kinds, growing, strict=True)):
        wide = [part for part in kind.parts if part.kind == "norm" and len(part.shape) == 1 and part.suffix in grown]
        if wide:
            raise BadInput(
                f"layer {draft.anatomy.kind_of.index(number)} ({wide[0].suffix}): queries and keys are normalised over"
                " all heads together, so new heads would change what the old ones compute"
            )
