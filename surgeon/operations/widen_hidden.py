"""`widen_hidden`: a wider residual stream that carries itself several times, [x; x].

Whatever writes to the stream (embeddings, attention output, down projection, norms behind these) does so several times,
and whatever reads it reads the first part alone: [W, 0]. The root mean square of [x; x] is that of x, so norms keep
their weights and their ε: [γ; γ] (the doubling form of bert2BERT, Chen et al. 2022, and LEMON, Wang et al. 2024, with
all of a reader's weight on the first copy). The native class with a larger `hidden_size`, and the same function.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft
from surgeon.blueprint.recipes import Constant, Copy, Joined, Recipe, side_by_side, sliced
from surgeon.checkpoint.header import FLOAT_DTYPES
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import Anatomy
from surgeon.families.family import LARGEST_SIZE, Part, Role
from surgeon.operations.operation import Operation, Paper, TrainingDefaults
from surgeon.operations.widths import ROUNDING, check_alone

_READING: tuple[Role, ...] = ("query", "key", "value", "gate", "up")
_WRITING: tuple[Role, ...] = ("output", "down")
_NORMS: tuple[Role, ...] = ("pre_attention_norm", "post_attention_norm", "pre_mlp_norm", "post_mlp_norm")
# What has nothing of the stream's width: norms of query and key.
_INSIDE: tuple[Role, ...] = ("query_norm", "key_norm")
# Far beyond any use; each copy is a part of each tensor that writes.
_MOST = 64


class WidenHidden(Operation):
    """A wider residual stream, which adds nothing at birth."""

    papers: ClassVar[tuple[Paper, ...]] = (
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
    training: ClassVar[TrainingDefaults] = TrainingDefaults("ours, no paper's: what the wider stream brings", lr=2e-4)
    examples: ClassVar[tuple[dict[str, object], ...]] = ({"times": 2},)

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
        if (self.to is None) == (self.times is None):
            raise ValueError("give either `to` (the new hidden_size) or `times` (how many times as wide)")
        return self

    def edit(self, draft: Draft, facts: None) -> OperationRecord:
        """Widen what reads, writes and scales the stream, in every layer and outside of them."""
        number = draft.number
        check_alone(draft, "hidden_size")
        _check(draft)
        before = draft.anatomy.sizes.hidden
        times = self._times(before)
        for index, layer in enumerate(draft.layers):
            for part in draft.kind_of(index).parts:
                wider = _of_layer(layer.tensors[part.suffix], part, times, where=f"layer {index}")
                if wider is not None:
                    layer.tensors[part.suffix] = wider
                    layer.rewritten[part.suffix] = number
        for name, recipe in _outside(draft, times).items():
            draft.set_outer(name, recipe)
        # Without `head_dim` a class would divide the hidden size by the heads.
        draft.sizes |= {"hidden_size": before * times, "head_dim": draft.anatomy.sizes.head_dim}
        return OperationRecord(
            op=self.op,
            matched=f"a stream of {before} becomes {before * times}, itself {times} times, in all {len(draft.layers)}"
            " layers, embeddings and head",
            claim=Claim("rounding", f"what reads the stream has zeros for all but its first part; {ROUNDING}"),
            trains="new",
        )

    def _times(self, before: int) -> int:
        """How many times as wide. Raises BadInput where that is no whole number, or too much."""
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


def _again(source: Copy, times: int) -> tuple[Recipe, ...]:
    """A tensor and copies of it."""
    return (source, *(sliced(source, 0, source.shape[0], again=True) for _ in range(times - 1)))


def _zeros(source: Copy, times: int) -> tuple[Recipe, ...]:
    """A matrix, and zeros for the further copies of what it reads."""
    rows, columns = source.shape
    return (source, Constant(0.0, source.dtype, (rows, columns * (times - 1))))


def _null_scale(anatomy: Anatomy) -> float:
    """The stored scale with which a norm gives zeros: −1 where it multiplies by one plus it."""
    known = (part.identity for part in anatomy.parts if part.kind == "norm" and part.identity is not None)
    return next(known, 1.0) - 1.0


def _plain(recipe: Recipe, name: str) -> Copy:
    """A tensor of the base. Raises BadInput for one in another format."""
    assert isinstance(recipe, Copy), name
    if recipe.dtype not in FLOAT_DTYPES:
        raise BadInput(
            f"{printable(name)}: quantised ({recipe.dtype}); widen the full-precision model, and quantise the output"
        )
    return recipe


def _of_layer(recipe: Recipe, part: Part, times: int, *, where: str) -> Joined | None:
    """A layer's tensor for the wider stream; None for one that it does not touch.

    Raises BadInput for one of which this is not known.
    """
    roles = {role for role, _ in part.blocks}
    reads = bool(roles) and roles <= set(_READING)
    if roles and (roles <= set(_INSIDE) or (reads and part.kind == "bias")):
        return None
    source = _plain(recipe, part.suffix)
    if reads and part.expert is None and part.kind == "weight":
        return side_by_side(_zeros(source, times), 1)
    if roles and roles <= {*_WRITING, *_NORMS} and part.expert is None:
        return side_by_side(_again(source, times), 0)
    raise BadInput(
        f"{where} ({printable(part.suffix)}): whether it reads or writes the residual stream is not known, so the"
        " stream of this model cannot become wider; widen_ffn may widen it"
    )


def _outside(draft: Draft, times: int) -> dict[str, Joined]:
    """Embeddings, last norm and head for the wider stream, by name. Raises BadInput for what is neither.

    Of tied embeddings, which write several times, the last norm silences all but the first copy: its further values
    learn. Of a head of its own further columns are zero, and learn as the norm passes all copies.
    """
    anatomy = draft.anatomy
    found: dict[str, Joined] = {}
    for name, info in anatomy.outer.items():
        if name in anatomy.idle or "rotary_emb" in name:
            continue
        source = _plain(Copy.of(info), name)
        if name == anatomy.outer_name("embed_tokens.weight"):
            found[name] = side_by_side(_again(source, times), 1)
        elif name == anatomy.outer_name("norm.weight"):
            off = Constant(_null_scale(anatomy), info.dtype, (info.shape[0] * (times - 1),))
            found[name] = side_by_side((source, off) if anatomy.tied else _again(source, times), 0)
        elif name == anatomy.outer_name("norm.bias"):
            # The mean of [x; x] is that of x too, so LayerNorm takes both as it takes one.
            off = Constant(0.0, info.dtype, (info.shape[0] * (times - 1),))
            found[name] = side_by_side((source, off) if anatomy.tied else _again(source, times), 0)
        elif name == "lm_head.weight":
            found[name] = side_by_side(_again(source, times) if anatomy.tied else _zeros(source, times), 1)
        else:
            raise BadInput(f"{printable(name)}: what it does with the stream is not known, so that cannot become wider")
    return found
