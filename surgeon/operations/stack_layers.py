"""`stack_layers`: layers of the base repeated on top of the stack, without silencing them.

SOLAR (Kim et al. 2024): the bottom `bottom` layers are followed by the top `top` layers of the same base; the layers in
both copies occur twice. SOLAR uses three quarters of the stack for each (24 of 32). G_stack (Du et al. 2024, equation
1): the whole stack `times` times; with `range` only a block is repeated (as in self-merges). mergekit's passthrough of
one model with itself: `slices` of its layers in any order and number. A slice's layers are the base's own where their
order allows that, otherwise copies; the function is not preserved, and both papers train every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from surgeon.anatomy.family import MOST_LAYERS
from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft, LayerDraft
from surgeon.checkpoint.header import FLOAT_DTYPES
from surgeon.common.formatting import layers_have, show
from surgeon.errors import BadInput, printable
from surgeon.operations.operation import Operation, Paper, TrainingDefaults
from surgeon.operations.selectors import Index, Range, select_layers
from surgeon.operations.sites import check_grafts

Slice = Annotated[list[Index], Field(min_length=2, max_length=2)]
Share = Annotated[float, Field(gt=0, le=1)] | Annotated[int, Field(ge=1)]


class StackLayers(Operation):
    """Repeat layers of the base: its top above its bottom (SOLAR), the whole stack (G_stack), or a block."""

    papers = (
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
    # SOLAR's paper does not state its training settings, and G_stack's is about pre-training; so these are another
    # depth-growth paper's.
    training = TrainingDefaults(
        "SOLAR's paper gives none; OpT-DeUS, section 5.5: 1e-4 (1.7B models), 64 sequences of 2048", lr=1e-4
    )

    examples = (
        {"bottom": 0.75, "top": 0.75},
        {"times": 2},
        {"slices": [[0, 1], [0, 1]]},
    )

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
    slices: Annotated[
        list[Slice] | None,
        Field(
            min_length=1,
            description="instead of these: all layers, bottom up, in slices [first, end], whose ends are not included",
        ),
    ] = None

    dtype: Annotated[
        str | None, Field(description="of mergekit's configs: refuse a base that is stored in another dtype")
    ] = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        """Check that exactly one way to stack is given, and that slices are neither empty nor too many layers.

        Raises ValueError.
        """
        given = {key for key in ("bottom", "top", "times", "range", "slices") if getattr(self, key) is not None}
        if given not in ({"bottom", "top"}, {"times"}, {"times", "range"}, {"slices"}):
            raise ValueError(
                "give `bottom` and `top` (two overlapping copies), or `times` (how often the stack occurs, or a `range`"
                " of it), or `slices`"
            )
        counts = [end - first for first, end in self.slices or [[0, 1]]]
        if min(counts) < 1 or sum(counts) > MOST_LAYERS:
            raise ValueError(f"a slice is [first, end], without its end; all hold {MOST_LAYERS} layers at most")
        return self

    def edit(self, draft: Draft, facts: None) -> OperationRecord:
        """Insert copies of layers, and remove layers that no longer occur.

        Raises BadInput for another `dtype` than the base's, for layers that do not exist, and where nothing would
        change.
        """
        total = len(draft.layers)
        stored = FLOAT_DTYPES[draft.dtype_of(0)].torch
        if self.dtype not in (None, stored):
            raise BadInput(
                f"`dtype` is {printable(str(self.dtype))}, and the base is stored in {stored}: its bytes are copied as"
                " they are, so leave `dtype` out, or convert the base first"
            )
        order = [layer for first, end in self._slices(total) for layer in range(first, end)]
        if max(order) >= total:
            raise BadInput(
                f"`slices` go up to layer {max(order)}, the model has layers 0 to {total - 1} at this point; a slice is"
                f" [first, end], and its end, {total} at most, is not included"
            )
        if order == list(range(total)):
            raise BadInput("`slices` are the layers as they stand, so nothing would change")
        _stack(draft, order)
        return OperationRecord(
            op=self.op,
            matched=f"{len(order)} layers of {total}: {show(order)}",
            claim=Claim(
                "none",
                "layers run again or in another order, so the function changes; every layer is to be trained on",
            ),
            trains="all",
        )

    def _slices(self, total: int) -> list[list[int]]:
        """Return the slices of layers, bottom up, as [first, end] without the end; a slice may be empty.

        Raises BadInput where `bottom` and `top` do not overlap.
        """
        if self.slices is not None:
            return self.slices
        if self.bottom is None or self.top is None:
            block = list(range(total)) if self.range is None else select_layers(Range(range=self.range), total)
            end = block[-1] + 1
            return [[0, end], *[[block[0], end]] * ((self.times or 2) - 1), [end, total]]
        bottom, top = _layers(self.bottom, total, "bottom"), _layers(self.top, total, "top")
        if bottom + top <= total:
            raise BadInput(
                f"`bottom` {bottom} and `top` {top} do not overlap in a model of {total} layers: nothing would be"
                " added, or layers lost; their sum must exceed the number of layers"
            )
        return [[0, bottom], [total - top, total]]


def _stack(draft: Draft, order: Sequence[int]) -> None:
    """Make the stack of the layers `order` (numbers of the current stack).

    A layer is itself where it is above all before it, otherwise a copy. Raises BadInput where a layer with grafts would
    be copied or removed.
    """
    highest, before = -1, draft.layers
    copies: dict[int, list[LayerDraft]] = {}
    for layer in order:
        if layer > highest:
            highest = layer
            copies[layer] = []
            continue
        if before[layer].grafts:
            raise BadInput(
                f"{layers_have([layer])} grafts, and a layer with grafts cannot be copied; stack layers before you add"
                " grafts"
            )
        copies[highest].append(draft.copy_of(layer, operation=draft.number))
    gone = [layer for number, layer in enumerate(before) if number not in copies]
    draft.insert(copies)
    if gone:
        numbers = [number for number, layer in enumerate(draft.layers) if any(layer is each for each in gone)]
        check_grafts(draft, numbers)
        draft.drop(numbers, operation=draft.number)


def _layers(share: float | int, total: int, key: str) -> int:
    """Return a share of `total` layers as a number, at least 1. Raises BadInput where a number exceeds `total`."""
    if isinstance(share, float):
        return max(1, round(share * total))
    if share > total:
        raise BadInput(f"`{key}` is {share}, the model has {total} layers at this point")
    return share
