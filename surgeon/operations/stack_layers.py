"""`stack_layers`: layers of the base once more, on top of themselves, without silencing them.

SOLAR (Kim et al. 2024): the bottom `bottom` layers are followed by the top `top` layers of the same base; the layers
both copies share occur twice. SOLAR takes three quarters of the stack for each (24 of 32). G_stack (Du et al. 2024,
equation 1): the whole stack `times` times, of which `range` takes a block alone (repeated blocks, as in self-merges).
The function is not preserved, and both papers train every layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft
from surgeon.common.formatting import layers_have, show
from surgeon.errors import BadInput
from surgeon.operations.insert_layers import InsertLayers
from surgeon.operations.operation import Operation, Paper, TrainingDefaults
from surgeon.operations.selectors import Index, Range, select_layers

Share = Annotated[float, Field(gt=0, le=1)] | Annotated[int, Field(ge=1)]


class StackLayers(Operation):
    """Layers of the base once more: its top above its bottom (SOLAR), the whole stack (G_stack), or a block."""

    papers: ClassVar[tuple[Paper, ...]] = (
        Paper(
            "kim2023solar",
            "Kim, Dahyun and others",
            "SOLAR 10.7B: Scaling Large Language Models with Simple yet Effective Depth Up-Scaling",
            2023,
            "2312.15166",
        ),
        Paper(
            "du2024stacking",
            "Du, Wenyu and others",
            "Stacking Your Transformers: A Closer Look at Model Growth for Efficient LLM Pre-Training",
            2024,
            "2405.15319",
        ),
    )
    # SOLAR's paper does not say what it trained with, G_stack's is about pre-training; another paper's depth growth
    # comes nearest.
    training: ClassVar[TrainingDefaults] = replace(
        InsertLayers.training,
        source="SOLAR's paper gives none; OpT-DeUS, section 5.5: 1e-4 (1.7B models), 64 sequences of 2048",
    )

    examples: ClassVar[tuple[Mapping[str, object], ...]] = ({"bottom": 0.75, "top": 0.75}, {"times": 2})

    op: Literal["stack_layers"]
    bottom: Annotated[
        Share | None, Field(description="layers of the lower copy: a number, or a share of all below 1.0; with `top`")
    ] = None
    top: Annotated[
        Share | None, Field(description="layers of the upper copy: a number, or a share of all below 1.0")
    ] = None
    times: Annotated[
        int | None, Field(ge=2, le=64, description="how often the stack occurs, or of it `range`; instead of `bottom`")
    ] = None
    range: Annotated[
        list[Index] | None,
        Field(min_length=2, max_length=2, description="of `times`: the block, [first, last]; default: all layers"),
    ] = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.times is None and (self.bottom is None or self.top is None):
            raise ValueError(
                "give `bottom` and `top` (two overlapping copies), or `times` (how often the stack occurs)"
            )
        if self.times is not None and not self.bottom is self.top is None:
            raise ValueError(
                "`times` repeats the stack or a `range` of it; `bottom` and `top` are another way: give one"
            )
        if self.times is None and self.range is not None:
            raise ValueError("`range` is of `times`: which block is repeated")
        return self

    def edit(self, draft: Draft, facts: None) -> OperationRecord:
        """Insert copies of layers above themselves."""
        block = self._block(len(draft.layers))
        carrying = [source for source in block if draft.layers[source].grafts]
        if carrying:
            raise BadInput(
                f"{layers_have(carrying)} grafts, and a layer with grafts cannot be copied; stack layers before"
                " you add grafts"
            )
        times = self.times or 2
        copies = [draft.copy_of(source, operation=draft.number) for _ in range(times - 1) for source in block]
        draft.insert({block[-1]: copies})
        often = "twice" if times == 2 else f"{times} times"
        return OperationRecord(
            op=self.op,
            matched=f"layers {show(block)} occur {often}, the copies after layer {block[-1]}",
            claim=Claim("none", f"whole layers run {often}, so the function changes; every layer is to be trained on"),
            trains="all",
        )

    def _block(self, total: int) -> list[int]:
        """The layers that occur more than once, bottom up. Raises BadInput where there are none."""
        if self.bottom is None or self.top is None:
            return list(range(total)) if self.range is None else select_layers(Range(range=self.range), total)
        bottom, top = _layers(self.bottom, total, "bottom"), _layers(self.top, total, "top")
        if bottom + top <= total:
            raise BadInput(
                f"`bottom` {bottom} and `top` {top} do not overlap in a model of {total} layers: nothing would be"
                " added, or layers lost; their sum must exceed the number of layers"
            )
        return list(range(total - top, bottom))


def _layers(share: float | int, total: int, key: str) -> int:
    if isinstance(share, float):
        return max(1, round(share * total))
    if share > total:
        raise BadInput(f"`{key}` is {share}, the model has {total} layers at this point")
    return share
