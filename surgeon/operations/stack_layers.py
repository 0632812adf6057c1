"""`stack_layers`: two overlapping copies of the stack, one on top of the other (SOLAR, Kim et al. 2024).

The bottom `bottom` layers are followed by the top `top` layers of the same base; the layers both copies
share occur twice. SOLAR takes three quarters of the stack for each (24 of 32). The function is not preserved
and the paper trains every layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft
from surgeon.common.formatting import show
from surgeon.errors import BadInput
from surgeon.operations.insert_layers import InsertLayers
from surgeon.operations.operation import Operation, Paper, TrainingDefaults

Share = Annotated[float, Field(gt=0, le=1)] | Annotated[int, Field(ge=1)]


class StackLayers(Operation):
    """Bottom layers of the base followed by its top layers; what overlaps occurs twice (SOLAR)."""

    papers: ClassVar[tuple[Paper, ...]] = (
        Paper(
            "kim2023solar",
            "Kim, Dahyun and others",
            "SOLAR 10.7B: Scaling Large Language Models with Simple yet Effective Depth Up-Scaling",
            2023,
            "2312.15166",
        ),
    )
    # Its paper does not say what it trained with; another paper's depth growth comes nearest.
    training: ClassVar[TrainingDefaults] = replace(
        InsertLayers.training,
        source="SOLAR's paper gives none; OpT-DeUS, section 5.5: 1e-4 (1.7B models), 64 sequences of 2048",
    )

    examples: ClassVar[tuple[Mapping[str, object], ...]] = ({"bottom": 0.75, "top": 0.75},)

    op: Literal["stack_layers"]
    bottom: Annotated[Share, Field(description="layers of the lower copy: a number, or a share of all below 1.0")]
    top: Annotated[Share, Field(description="layers of the upper copy: a number, or a share of all below 1.0")]

    def edit(self, draft: Draft, facts: None) -> OperationRecord:
        """Insert copies of the shared layers above the lower copy."""
        number = draft.number
        total = len(draft.layers)
        bottom, top = _layers(self.bottom, total, "bottom"), _layers(self.top, total, "top")
        if bottom + top <= total:
            raise BadInput(
                f"`bottom` {bottom} and `top` {top} do not overlap in a model of {total} layers: nothing would be"
                " added, or layers lost; their sum must exceed the number of layers"
            )
        twice = list(range(total - top, bottom))
        carrying = [source for source in twice if draft.layers[source].grafts]
        if carrying:
            raise BadInput(
                f"layers {show(carrying)} have grafts, and a layer with grafts cannot be copied; stack layers before"
                " you add grafts"
            )
        copies = [draft.copy_of(source, operation=number) for source in twice]
        draft.insert({bottom - 1: copies})
        return OperationRecord(
            op=self.op,
            matched=f"layers {show(twice)} occur twice, the copies after layer {bottom - 1}",
            claim=Claim("none", "whole layers run twice, so the function changes; every layer is to be trained on"),
            trains="all",
        )


def _layers(share: float | int, total: int, key: str) -> int:
    if isinstance(share, float):
        return max(1, round(share * total))
    if share > total:
        raise BadInput(f"`{key}` is {share}, the model has {total} layers at this point")
    return share
