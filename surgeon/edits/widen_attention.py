"""`widen_attention`: whole new groups of heads, whose columns of the output projection are zero at birth.

A group is a key-value head with the query heads that read it, as many as in the base. [W_q; Q], [W_k; K], [W_v; V] and
[W_o, 0], heads of the same size: the native class with more heads, and the same function (Gesmundo and Maile, 2023).
Under a norm over all heads, x / √(mean x² + ε), Q and K are copies: with every head copied equally often, the mean does
not change.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Annotated, Literal

from pydantic import Field

from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft
from surgeon.blueprint.recipes import Recipe
from surgeon.edits.widths import (
    COMPOSABLE,
    ROUNDING,
    check_alone,
    check_free,
    drawn,
    norms_that_grow,
    which_layers,
)
from surgeon.errors import BadInput
from surgeon.grafts.adapters import VARIANCES
from surgeon.operations.growing import New, lengthen, norms_of_all_heads, wider_heads
from surgeon.operations.operation import OneOf, Operation, TrainingDefaults


class WidenAttention(Operation):
    """Add groups of attention heads, which add nothing at birth."""

    papers = (COMPOSABLE,)
    training = TrainingDefaults("ours, no paper's: new heads alone", lr=2e-4)
    examples = ({"groups": 1}, {"groups": "double"})
    way_on = "something else in its code depends on what grows; widen something else, or insert layers"

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
            " 1/(d·L) (low_variance) or 2/d (he); under a norm over all heads queries and keys are copies; the columns"
            " of the output projection are zero"
        ),
    ] = "low_variance"

    def edit(self, draft: Draft, facts: None) -> OperationRecord:
        """Widen the attention of every layer.

        Raises BadInput where heads cannot be added, and where a norm over all heads needs copies of all heads.
        """
        check_alone(draft, "num_attention_heads")
        check_free(draft, beside=("adapters",))
        sizes = draft.anatomy.sizes
        groups = sizes.kv_heads if self.groups == "double" else self.groups
        fields, growths = wider_heads(draft, groups)
        _check_widths_of_norms(draft, growths)
        normed = norms_that_grow(draft, growths)
        if normed and groups % sizes.kv_heads:
            layer, suffix = next(iter(normed.items()))
            raise BadInput(
                f"layer {layer} ({suffix}): queries and keys are normalised over all heads together, which new heads"
                f" leave as it is where every old one is copied as often: `groups` must be a multiple of the"
                f" {sizes.kv_heads} that there are (`groups: double`)"
            )
        wider = lengthen(draft, growths, partial(self._born, draft, bool(normed)), scales=True)
        draft.widths |= fields
        heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
        return OperationRecord(
            op=self.op,
            matched=f"heads of {sizes.head_dim}: {sizes.heads} become {heads}, key-value heads {sizes.kv_heads} become"
            f" {kv_heads}, in {which_layers(wider, draft)}, {self.init}"
            + (" (queries and keys are copies, as they are normalised over all heads together)" if normed else ""),
            claim=Claim("rounding", f"new columns of the output projections are zero; {ROUNDING}"),
            trains="new",
        )

    def _born(self, draft: Draft, normed: bool, new: New) -> tuple[Recipe, ...]:
        """Return the new part of a query, key or value matrix: random, or copies by `init` or under a norm."""
        if self.init == "copy" or (normed and new.role != "value"):
            return new.repeated
        return (drawn(draft, new, self.init, new.of.shape[-1]),)


def _check_widths_of_norms(draft: Draft, growing: Sequence[Collection[str]]) -> None:
    """Raise BadInput where a norm over all heads would not grow with the heads."""
    sizes = draft.anatomy.sizes
    for number, (kind, grown) in enumerate(zip(draft.anatomy.kinds, growing, strict=True)):
        for part in norms_of_all_heads(kind, sizes.head_dim) if grown else ():
            if part.shape in ((sizes.query_width,), (sizes.kv_width,)) and part.suffix not in grown:
                raise BadInput(
                    f"layer {draft.anatomy.kind_of.index(number)} ({part.suffix}): transformers' class makes this norm"
                    " over all heads as wide as the stream, whatever their number, so no head can be added; widen_ffn"
                    " may widen it"
                )
