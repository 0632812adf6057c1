"""`widen_hidden`: a wider residual stream that holds several copies of the old one, [x; x].

Tensors that write to the stream (embeddings, attention output, down projection, norms after these) write every copy,
and tensors that read the stream read only the first copy: [W, 0]. The root mean square of [x; x] is that of x, so norms
keep their weights and their ε: [γ; γ] (the doubling form of bert2BERT, Chen et al. 2022, and LEMON, Wang et al. 2024,
with a reader's whole weight on the first copy). The native class with a larger `hidden_size`, and the same function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from surgeon.anatomy.family import LARGEST_SIZE, Axes, Axis
from surgeon.anatomy.growth import part_of
from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft
from surgeon.blueprint.recipes import Constant, Copy, Joined, Recipe, side_by_side, sliced_along
from surgeon.checkpoint.header import FLOAT_DTYPES
from surgeon.edits.streams.width import wider_stream
from surgeon.edits.widths import ROUNDING, check_alone
from surgeon.errors import BadInput, printable
from surgeon.operations.operation import Operation, Paper, TrainingDefaults

# Far beyond any use; each copy is a part of each tensor that writes.
_MOST = 64
_MOST_AXES = 2


class WidenHidden(Operation):
    """Widen the residual stream, which adds nothing at birth."""

    papers = (
        Paper(
            "chen2022bert2bert",
            "Chen, Cheng and Yin, Yichun and Shang, Lifeng and others",
            "bert2BERT: Towards Reusable Pretrained Language Models",
            2022,
            "2110.07143",
            "ACL",
        ),
        Paper(
            "wang2024lemon",
            "Wang, Yite and Su, Jiahao and Lu, Hanlin and others",
            "LEMON: Lossless model expansion",
            2024,
            "2310.07999",
            "ICLR",
        ),
    )
    training = TrainingDefaults("ours, no paper's: what the wider stream brings", lr=2e-4)
    examples = ({"times": 2},)
    way_on = "something else in its code depends on what grows; widen something else, or insert layers"

    op: Literal["widen_hidden"]
    times: Annotated[
        int | None, Field(ge=2, le=_MOST, description="how many times as wide the stream becomes, instead of `to`")
    ] = None
    to: Annotated[
        int | None,
        Field(ge=2, le=LARGEST_SIZE, description="the new `hidden_size`, a whole multiple of the base's"),
    ] = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        """Check that one width is given. Raises ValueError."""
        if (self.to is None) == (self.times is None):
            raise ValueError("give either `to` (the new hidden_size) or `times` (how many times as wide)")
        return self

    def edit(self, draft: Draft, facts: None) -> OperationRecord:
        """Widen the tensors that read, write and scale the stream, in every layer and outside the layers."""
        number = draft.number
        check_alone(draft, "hidden_size")
        _check(draft)
        before = draft.anatomy.sizes.hidden
        times = self._times(before)
        fields, kinds, outer = wider_stream(draft.anatomy.derivation, times)
        for layer in draft.layers:
            for suffix, axes in kinds[draft.anatomy.kind_of[layer.like]].items():
                layer.tensors[suffix] = _wider(_plain(layer.tensors[suffix], suffix), axes, times)
                layer.rewritten[suffix] = number
        for name, axes in outer.items():
            draft.set_outer(name, _wider(_plain(Copy.of(draft.anatomy.outer[name]), name), axes, times))
        draft.widths |= fields
        return OperationRecord(
            op=self.op,
            matched=f"a stream of {before} becomes {before * times}, itself {times} times, in all {len(draft.layers)}"
            f" layers, embeddings and head{_other_fields(draft, fields)}",
            claim=Claim("rounding", f"what reads the stream has zeros for all but its first part; {ROUNDING}"),
            trains="new",
        )

    def _times(self, before: int) -> int:
        """Return how many times as wide the stream becomes.

        Raises BadInput where it is no whole number, or too large.
        """
        if self.times is None:
            assert self.to is not None
            if self.to <= before or self.to % before:
                below = max(2, self.to // before) * before
                raise BadInput(
                    f"`to` {self.to}: the stream of {before} becomes wider by carrying itself several times, so that"
                    f" norms stay as they are; give a multiple of {before}, {below} say"
                )
        times = self.times or (self.to or 0) // before
        if times > _MOST or before * times > LARGEST_SIZE:
            raise BadInput(
                f"a hidden_size of {before * times} is {times} times the base's; at most {_MOST} times are made"
            )
        return times


def _check(draft: Draft) -> None:
    """Raise BadInput for a model whose stream cannot become wider."""
    grafted = next((index for index, layer in enumerate(draft.layers) if layer.grafts), None)
    if grafted is not None or draft.bank is not None:
        what = "the model carries control states" if grafted is None else f"layer {grafted} carries a graft"
        raise BadInput(f"{what} as wide as the stream is now; revert it, or fold or merge it first")


def _other_fields(draft: Draft, fields: dict[str, int]) -> str:
    """Return words on the config fields that change in addition to the stream's width; empty where there are none."""
    part = part_of(draft.config, draft.anatomy.derivation.path)
    hidden = draft.anatomy.sizes.hidden
    others = {key: value for key, value in fields.items() if key in part and part[key] not in (hidden, value)}
    return "".join(f", `{key}` {printable(str(part[key]))} becomes {value}" for key, value in others.items())


def _plain(recipe: Recipe, name: str) -> Copy:
    """Return a tensor of the base. Raises BadInput where it is quantised."""
    assert isinstance(recipe, Copy), name
    if recipe.dtype not in FLOAT_DTYPES:
        raise BadInput(
            f"{printable(name)}: quantised ({recipe.dtype}); widen the full-precision model, and quantise the output"
        )
    return recipe


def _wider(of: Copy, axes: Axes, times: int) -> Joined:
    """Return a tensor for the wider stream, along one axis or two; the parts of an axis grow separately.

    Raises BadInput where it grows along more axes.
    """
    if len(axes) == 1:
        return _along(of, axes[0], times, lambda part: part)
    # The axis of copies comes first: they also copy the zeros along the axis that reads the stream.
    one, other = sorted(axes, key=lambda axis: axis.new is not None)
    if len(axes) > _MOST_AXES or len(other.shares) > 1 or (new := other.new) is None:
        raise BadInput(
            f"{printable(str(of.source))}: grows along {len(axes)} axes in a way that surgeon cannot follow; widen_ffn"
            " may widen this model"
        )
    more = of.shape[other.axis] * (times - 1)
    return _along(of, one, times, lambda part: side_by_side((part, _filled(part, other.axis, more, new)), other.axis))


def _along(of: Copy, axis: Axis, times: int, beside: Callable[[Copy], Recipe]) -> Joined:
    """Return a tensor grown along one axis; `beside` widens each of its parts along the other axis."""
    number, size = axis.axis, of.shape[axis.axis]
    pieces: list[Recipe] = []
    begin = 0
    for share in axis.shares:
        end = begin + size * share // sum(axis.shares)
        own = of if len(axis.shares) == 1 else sliced_along(of, number, begin, end)
        pieces.append(beside(own))
        if axis.new is None:
            where = (number, begin, end) if len(axis.shares) > 1 else (0, 0, of.shape[0])
            pieces += [beside(sliced_along(of, *where, again=True)) for _ in range(times - 1)]
        else:
            pieces.append(_filled(pieces[-1], number, (end - begin) * (times - 1), axis.new))
        begin = end
    return side_by_side(pieces, number)


def _filled(like: Recipe, axis: int, more: int, value: float) -> Constant:
    """Return `more` slices along `axis` with this value, for a tensor like `like`."""
    return Constant(value, like.dtype, (*like.shape[:axis], more, *like.shape[axis + 1 :]))
