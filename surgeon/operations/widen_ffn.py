"""`widen_ffn`: more neurons in every FFN, whose columns of the down projection are zero at birth.

[W_g; G], [W_u; U], [W_d, 0] (Gesmundo and Maile, 2023, after Net2Net, Chen et al. 2016). The native class with a larger
`intermediate_size`, and the same function.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft
from surgeon.blueprint.recipes import Constant, Copy, Random, Recipe, sliced
from surgeon.errors import BadInput
from surgeon.families.family import LARGEST_SIZE, Part, Role
from surgeon.operations.operation import OneOf, Operation, Paper, TrainingDefaults
from surgeon.operations.widths import ROUNDING, check_alone, check_free, ffn_roles, parts_with, which_layers, widen
from surgeon.runtime.adapters_rules import VARIANCES

NET2NET = Paper(
    "chen2016net2net",
    "Chen, Tianqi and Goodfellow, Ian and Shlens, Jonathon",
    "Net2Net: Accelerating Learning via Knowledge Transfer",
    2016,
    "1511.05641",
    "ICLR 2016",
)
COMPOSABLE = Paper(
    "gesmundo2023composable",
    "Gesmundo, Andrea and Maile, Kaitlin",
    "Composable Function-preserving Expansions for Transformer Architectures",
    2023,
    "2308.06103",
)


class WidenFFN(Operation):
    """More neurons in every FFN, which add nothing at birth."""

    papers: ClassVar[tuple[Paper, ...]] = (NET2NET, COMPOSABLE)
    training: ClassVar[TrainingDefaults] = TrainingDefaults("ours, no paper's: new neurons alone", lr=2e-4)
    examples: ClassVar[tuple[Mapping[str, object], ...]] = ({"by": 8},)

    op: Literal["widen_ffn"]
    to: Annotated[int | None, Field(ge=1, le=LARGEST_SIZE, description="the new `intermediate_size`")] = None
    by: Annotated[int | None, Field(ge=1, le=LARGEST_SIZE, description="how many neurons more, instead of `to`")] = None
    init: Annotated[
        str,
        OneOf(lambda: ("copy", *VARIANCES)),
        Field(
            description="new rows of gate and up: copies of the lowest ones in turn, or normal with variance 1/(d·L)"
            " (low_variance) or 2/d (he); the columns of down are zero"
        ),
    ] = "low_variance"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.to is None) == (self.by is None):
            raise ValueError("give either `to` (the new intermediate_size) or `by` (how many neurons more)")
        return self

    def edit(self, draft: Draft, facts: None) -> OperationRecord:
        """Widen the FFN of every layer."""
        number = draft.number
        check_alone(draft, "intermediate_size")
        check_free(draft, beside=("adapters",))
        before = draft.anatomy.sizes.intermediate
        if not before:
            raise BadInput(
                "config.json: `intermediate_size` is not one number for all layers; widen a model where it is"
            )
        after = self.to if self.to is not None else before + (self.by or 0)
        if after > LARGEST_SIZE:
            raise BadInput(f"FFNs of {before} would have {after} neurons; beyond 2^31 is refused")
        if after <= before:
            raise BadInput(f"`to` {after}: the FFNs have {before} neurons already, and only become wider")
        wider = {index: roles for index in range(len(draft.layers)) if (roles := ffn_roles(draft, index))}
        if not wider:
            raise BadInput("no layer has an FFN that could become wider; widen another model")
        for index, roles in wider.items():
            parts = parts_with(draft, index, roles)
            more = {role: self._pieces(draft, number, index, parts, role, after - before) for role in roles}
            draft.layers[index].rewritten |= dict.fromkeys(widen(draft, index, roles[:-1], "down", more), number)
        draft.sizes["intermediate_size"] = after
        return OperationRecord(
            op=self.op,
            matched=f"FFNs of {before} become {after} in {which_layers(wider, draft)}, {self.init}",
            claim=Claim("rounding", f"new columns of the down projections are zero; {ROUNDING}"),
            trains="new",
        )

    def _pieces(
        self, draft: Draft, number: int, layer: int, parts: Mapping[str, Part], role: Role, count: int
    ) -> tuple[Recipe, ...]:
        hidden, dtype = draft.anatomy.sizes.hidden, draft.dtype_of(layer)
        if role == "down":
            return (Constant(0.0, dtype, (hidden, count)),)
        if self.init != "copy":
            std = math.sqrt(VARIANCES[self.init](hidden, len(draft.layers)))
            return (Random(f"operations[{number}].layer[{layer}].{role}", std, dtype, (count, hidden)),)
        suffix, begin = place_of(parts, role)
        source = draft.layers[layer].tensors[suffix]
        assert isinstance(source, Copy), suffix
        return repeated(source, begin, draft.anatomy.sizes.intermediate, count)


def place_of(parts: Mapping[str, Part], role: Role) -> tuple[str, int]:
    """The weight that holds a module, and the first of its rows there."""
    for suffix, part in parts.items():
        begin = 0
        for other, rows in part.blocks if part.kind == "weight" else ():
            if other == role:
                return suffix, begin
            begin += rows
    raise AssertionError(role)


def repeated(source: Copy, begin: int, rows: int, count: int) -> tuple[Recipe, ...]:
    """`count` rows: copies of the `rows` rows from `begin` on, from the first, over and over."""
    turns = [min(rows, count - done) for done in range(0, count, rows)]
    return tuple(sliced(source, begin, begin + taken, again=True) for taken in turns)
