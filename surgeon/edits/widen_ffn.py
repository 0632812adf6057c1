"""`widen_ffn`: more neurons in every FFN, whose columns of the down projection are zero at birth.

[W_g; G], [W_u; U], [W_d, 0] (Gesmundo and Maile, 2023, after Net2Net, Chen et al. 2016), in each expert of a mixture
too. The native class with larger widths, and the same function.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from surgeon.anatomy.family import LARGEST_SIZE
from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft
from surgeon.blueprint.recipes import Recipe
from surgeon.edits.widths import COMPOSABLE, ROUNDING, check_alone, check_free, drawn, which_layers
from surgeon.errors import BadInput
from surgeon.grafts.adapters import VARIANCES
from surgeon.operations.growing import New, inner_widths, lengthen, shown_growth, wider_ffns
from surgeon.operations.operation import NEURONS, OneOf, Operation, Paper, TrainingDefaults
from surgeon.operations.prepare import Scale

NET2NET = Paper(
    "chen2016net2net",
    "Chen, Tianqi and Goodfellow, Ian and Shlens, Jonathon",
    "Net2Net: Accelerating Learning via Knowledge Transfer",
    2016,
    "1511.05641",
    "ICLR 2016",
)


class WidenFFN(Operation):
    """Add neurons to every FFN, which add nothing at birth."""

    papers = (NET2NET, COMPOSABLE)
    training = TrainingDefaults("ours, no paper's: new neurons alone", lr=2e-4)
    examples = ({"by": 8},)
    way_on = "something else in its code depends on what grows; widen something else, or insert layers"

    op: Literal["widen_ffn"]
    to: Annotated[int | None, Field(ge=1, le=LARGEST_SIZE, description="the new width, where all FFNs have one")] = None
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
        """Check that one width is given. Raises ValueError."""
        if (self.to is None) == (self.by is None):
            raise ValueError("give either `to` (the new width) or `by` (how many neurons more)")
        return self

    def small(self, facts: None, scale: Scale) -> tuple[Operation, None]:
        """Return (operation, no facts) for a twin: a few neurons more, by a multiple of what kernels process."""
        by = self.by if self.by is not None and self.by < NEURONS else NEURONS
        return self.model_copy(update={"to": None, "by": by}), None

    def edit(self, draft: Draft, facts: None) -> OperationRecord:
        """Widen the FFN of every layer.

        Raises BadInput where FFNs cannot become wider, or not by the plan's number.
        """
        check_alone(draft, "intermediate_size")
        check_free(draft, beside=("adapters",))
        widths = inner_widths(draft)
        if self.to is not None and len(widths) > 1:
            raise BadInput(
                f"`to` {self.to}: FFNs and experts of this model have widths of {', '.join(map(str, widths))}; say `by`"
                " how many neurons each becomes wider"
            )
        by = self.by if self.to is None else self.to - widths[0]
        assert by is not None
        if widths[-1] + by > LARGEST_SIZE:
            raise BadInput(f"FFNs of {widths[-1]} would have {widths[-1] + by} neurons; beyond 2^31 is refused")
        if by <= 0:
            raise BadInput(f"`to` {self.to}: the FFNs have {widths[0]} neurons already, and only become wider")
        fields, growths = wider_ffns(draft, by=by)
        for field in fields:
            check_alone(draft, field)
        wider = lengthen(draft, growths, partial(self._born, draft))
        draft.widths |= fields
        return OperationRecord(
            op=self.op,
            matched=f"{shown_growth(draft, growths)} in {which_layers(wider, draft)}, {self.init}",
            claim=Claim("rounding", f"new columns of the down projections are zero; {ROUNDING}"),
            trains="new",
        )

    def _born(self, draft: Draft, new: New) -> tuple[Recipe, ...]:
        """Return the new rows of a matrix that reads: copies, or random."""
        if self.init == "copy":
            return new.repeated
        return (drawn(draft, new, self.init, draft.anatomy.sizes.hidden),)
