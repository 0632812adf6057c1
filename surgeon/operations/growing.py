"""The growth of layers that become wider: fields of a config.json, and the tensors that grow with them.

For usual types whose layers have one FFN of plain matrices, and attention of four, this is known without building
anything; for others transformers' class is built wider and its shapes are compared.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from surgeon.anatomy.anatomy import Anatomy, LayerKind
from surgeon.anatomy.family import Part, Role, inner_width
from surgeon.anatomy.growth import part_of
from surgeon.anatomy.widening import growths, inner_fields
from surgeon.blueprint.draft import Draft
from surgeon.blueprint.recipes import Constant, Copy, Joined, Recipe, side_by_side, sliced_along
from surgeon.errors import BadInput, printable
from surgeon.operations.sites import IN_SHARED

# Widths of experts must be a multiple of this: 16 bytes of bfloat16.
_OF_EXPERTS = 8
# For each kind of layers, the tensors that grow, by suffix: (axis, old size, new size).
Growths = Sequence[Mapping[str, tuple[int, int, int]]]


@dataclass(frozen=True)
class New:
    """The new part of one module in a tensor of a layer: `more` slices along `axis`.

    They follow the `count` old slices that begin at `begin`. `role` is empty where it is not known.
    """

    layer: int
    part: Part
    role: Role | Literal[""]
    of: Copy
    axis: int
    begin: int
    count: int
    more: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the new part."""
        return (*self.of.shape[: self.axis], self.more, *self.of.shape[self.axis + 1 :])

    @property
    def reads(self) -> bool:
        """Return whether it belongs to a weight that reads the stream, or values computed from the stream."""
        writes = self.role in ("down", "output") or (not self.role and self.axis == len(self.of.shape) - 1)
        return self.part.kind == "weight" and not writes

    @property
    def zeros(self) -> tuple[Recipe, ...]:
        """Return zeros for the new part."""
        return (Constant(0.0, self.of.dtype, self.shape),)

    @property
    def repeated(self) -> tuple[Recipe, ...]:
        """Return copies of the lowest existing slices, repeated in turn."""
        turns = [min(self.count, self.more - done) for done in range(0, self.more, self.count)]
        return tuple(sliced_along(self.of, self.axis, self.begin, self.begin + n, again=True) for n in turns)


# K-quants pack so many numbers together; no kernel needs more.
MOST_DIVIDED = 256


def divisor_of(size: int) -> int:
    """Return the largest power of two, up to `MOST_DIVIDED`, that divides a size."""
    return math.gcd(size, MOST_DIVIDED)


_FFN: tuple[Role, ...] = ("gate", "up", "down")


def wider_ffns(draft: Draft, *, by: int = 0, multiple_of: int = 1) -> tuple[dict[str, int], Growths]:
    """Return (fields, growths): the config fields of wider FFNs, and what grows with them by kind of layer.

    The width grows by `by` neurons, or up to a multiple of `multiple_of`. Raises BadInput where no known field
    determines an FFN's width, where something besides FFNs would grow, or experts would get an unfit width.
    """
    fields = inner_fields(draft.anatomy.derivation, by=by, multiple_of=multiple_of)
    grown = list(growths(draft.anatomy.derivation, fields)) if fields else []
    for number, found in enumerate(grown):
        known = {part.suffix for part in draft.anatomy.kinds[number].parts if _of_ffn(part)}
        if unknown := sorted(found.keys() - known):
            raise BadInput(
                f"layer {draft.anatomy.kind_of.index(number)} ({printable(unknown[0])}): grows with"
                f" {' and '.join(f'`{field}`' for field in fields)}, and what of it is a neuron is not known, so this"
                " model's FFNs cannot become wider"
            )
        _check_experts(draft, number, found)
    return fields, grown


def _check_experts(draft: Draft, number: int, grown: Mapping[str, tuple[int, int, int]]) -> None:
    """Raise BadInput where experts would get a width that kernels for all experts at once do not take."""
    for part in draft.anatomy.kinds[number].parts:
        if part.suffix not in grown or part.expert is None or not _writes(part):
            continue
        _, before, after = grown[part.suffix]
        width = inner_width(part) * after // before
        if width % _OF_EXPERTS and not inner_width(part) % _OF_EXPERTS:
            raise BadInput(
                f"layer {draft.anatomy.kind_of.index(number)}: experts of {inner_width(part)} neurons would have"
                f" {width}, and kernels that multiply all experts at once take rows of 16 bytes: widen them by a"
                f" multiple of {_OF_EXPERTS}"
            )


def inner_widths(draft: Draft) -> list[int]:
    """Return the widths of FFNs and experts, each once, in ascending order. Raises BadInput where none is known."""
    if draft.anatomy.shared:
        raise BadInput(
            f"{printable(draft.anatomy.shared[0])}: {IN_SHARED}, and such a block does not become wider; use grafts"
        )
    widths = {inner_width(p) for kind in draft.anatomy.kinds for p in kind.parts if p.kind == "weight" and _writes(p)}
    if not widths:
        raise BadInput("no layer has an FFN whose projections are known, so none can become wider; widen another model")
    return sorted(widths)


def shown_growth(draft: Draft, growths: Growths) -> str:
    """Return words for the manifest: which widths of FFNs become which."""
    grown = {
        (before := inner_width(part)): before * after // size
        for kind, here in zip(draft.anatomy.kinds, growths, strict=True)
        for part in kind.parts
        if part.kind == "weight" and _writes(part) and part.suffix in here
        for _, size, after in [here[part.suffix]]
    }
    each = [f"of {before} become {after}" for before, after in sorted(grown.items())]
    return f"FFNs {', '.join(each)}"


def _writes(part: Part) -> bool:
    """Return whether a part is, or includes, a down projection."""
    return any(role == "down" for role, _ in part.blocks)


def _of_ffn(part: Part) -> bool:
    """Return whether a part belongs to an FFN or to an expert."""
    return any(role in _FFN for role, _ in part.blocks)


def neurons_of(part: Part) -> tuple[int, tuple[tuple[Role, int], ...]]:
    """Return (axis, modules): the axis along which a tensor of an FFN or of experts holds neurons, and what is on it.

    Each module is (role, number of neurons). Where rows of gate and up alternate they count as one module.
    """
    expert, role = part.expert, part.blocks[0][0]
    turned = expert is not None and expert.transposed
    stacked = expert is not None and expert.number is None
    axis = int(stacked) + (int((role == "down") != turned) if part.kind == "weight" else 0)
    if role == "down" or (expert is not None and expert.interleaved):
        return axis, ((role, part.shape[axis]),)
    return axis, part.blocks


_HEAD_NORMS: frozenset[str] = frozenset({"query_norm", "key_norm"})
# Fields that count heads of keys and values.
KEYS = re.compile(r"(.*[._])?num_(global_)?(key_value|kv)_heads|(.*\.)?kv_n_heads")
_HEAD_DIM = "head_dim"


def wider_heads(draft: Draft, groups: int) -> tuple[dict[str, int], Growths]:
    """Return (fields, growths) with which all attention has `groups` more groups of heads; see `wider_ffns`.

    Each tensor must grow in the same proportion as the heads. Raises BadInput where one does not, because old heads
    would change, or where there are no heads.
    """
    sizes = draft.anatomy.sizes
    if not sizes.heads or sizes.heads % sizes.kv_heads:
        raise BadInput("config.json: its layers have no heads of attention in groups, so none can be added")
    each, after = sizes.heads // sizes.kv_heads, sizes.kv_heads + groups
    fields = {"num_attention_heads": after * each, "num_key_value_heads": after}
    part = part_of(draft.config, draft.anatomy.derivation.path)
    # Some layers may have other numbers of key-value heads, in fields of their own.
    others = {key: value for key, value in part.items() if KEYS.fullmatch(key) and type(value) is int}
    fields |= {key: value * after // sizes.kv_heads for key, value in others.items()}
    found = _head_growths(draft.anatomy, fields)
    if found is None:
        raise BadInput(f"config.json: with {after * each} heads {_SMALLER_HEADS}")
    return found


# The reason why heads cannot be added in some classes.
_SMALLER_HEADS = (
    "transformers' class builds heads of another size, or tensors that do not grow with them, as one does that divides"
    " `hidden_size` by their number: the old ones would compute something else; try another number of heads, or"
    " widen_ffn"
)


def _head_growths(anatomy: Anatomy, fields: Mapping[str, int]) -> tuple[dict[str, int], Growths] | None:
    """Return (fields, growths), with a head size among the fields if the class needs it; None if growth is uneven."""
    before, after = anatomy.sizes.kv_heads, fields["num_key_value_heads"]
    for more in ({}, {_HEAD_DIM: anatomy.sizes.head_dim}):
        with contextlib.suppress(BadInput):
            grown = growths(anatomy.derivation, {**fields, **more})
            if any(grown) and all(of * after == to * before for here in grown for _, of, to in here.values()):
                return {**fields, **more}, grown
    return None


def norms_of_all_heads(kind: LayerKind, head_dim: int) -> list[Part]:
    """Return the norms of queries and keys that have a number for each dimension of all heads."""
    norms = [part for part in kind.parts if part.kind == "norm" and {role for role, _ in part.blocks} & _HEAD_NORMS]
    return [part for part in norms if part.shape[0] != head_dim]


def lengthen(
    draft: Draft, growths: Growths, born: Callable[[New], Sequence[Recipe]], *, scales: bool = False
) -> list[int]:
    """Make the tensors of all layers as long as `growths` says; return which layers changed.

    `born` makes the new part of a matrix that reads the stream. New columns that write, biases and single numbers are
    zeros; new norm scales are one, or with `scales` copies. Raises BadInput where a layer is quantised.
    """
    changed: list[int] = []
    for index, layer in enumerate(draft.layers):
        kind = draft.kind_of(index)
        grown = growths[draft.anatomy.kind_of[layer.like]]
        if grown and kind.packed:
            raise BadInput(f"layer {index} is quantised: widen the full-precision model, and quantise the output")
        parts = {part.suffix: part for part in kind.parts}
        for suffix, growth in grown.items():
            recipe = layer.tensors[suffix]
            assert isinstance(recipe, Copy), suffix
            layer.tensors[suffix] = _longer(index, recipe, parts[suffix], growth, born, scales=scales)
            layer.rewritten[suffix] = draft.number
        changed += [index] if grown else []
    return changed


def _longer(
    layer: int,
    of: Copy,
    part: Part,
    growth: tuple[int, int, int],
    born: Callable[[New], Sequence[Recipe]],
    *,
    scales: bool,
) -> Joined:
    """Return a tensor with a new part after each of its modules, in the proportion in which the tensor grows."""
    axis, before, after = growth
    blocks: Sequence[tuple[Role | Literal[""], int]] = part.blocks
    if _of_ffn(part):
        axis, blocks = neurons_of(part)
    elif not (part.kind in ("weight", "bias") and axis == 0 and blocks):
        blocks = [(part.blocks[0][0] if part.blocks else "", part.shape[axis])]
    pieces: list[Recipe] = []
    begin = 0
    for role, count in blocks:
        new = New(layer, part, role, of, axis, begin, count, count * (after - before) // before)
        pieces.append(of if len(blocks) == 1 else sliced_along(of, axis, begin, begin + count))
        if new.reads:
            pieces += born(new)
        else:
            again = scales and part.kind == "norm"
            pieces += new.repeated if again else (Constant(part.identity or 0.0, of.dtype, new.shape),)
        begin += count
    return side_by_side(pieces, axis)
