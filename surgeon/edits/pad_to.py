"""`pad_to`: pad heads, neurons and vocabulary rows to numbers that suit devices and kernels.

New heads go inside their groups, so that each group still reads its own keys and values: 28 query heads in groups of 7
become 32 in groups of 8. New heads and neurons read and write zeros, and never change what the others compute (Gesmundo
and Maile, 2023). A new row of the vocabulary is the mean of the others: a row of zeros could outweigh them. Tensor
parallelism gives each device equally many heads and neurons (Shoeybi et al., 2019).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from surgeon.anatomy.family import LARGEST_SIZE, Role
from surgeon.anatomy.rows_of_ids import VOCABULARY_KEY
from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft, LayerDraft
from surgeon.blueprint.recipes import HEAD_BLOCK, Constant, Copy, Recipe, extended, side_by_side, sliced_along
from surgeon.edits.embeddings import has_other_rows, set_rows, stored, vocabulary_tensors
from surgeon.edits.rows import bound_of_rows, claim_of_rows
from surgeon.edits.widths import (
    COMPOSABLE,
    ROUNDING,
    check_alone,
    check_free,
    check_norms,
    parts_with,
)
from surgeon.errors import BadInput
from surgeon.operations.growing import inner_widths, lengthen, norms_of_all_heads, shown_growth, wider_ffns, wider_heads
from surgeon.operations.operation import NEURONS, Operation, Paper, TrainingDefaults
from surgeon.operations.prepare import Scale

_HEADS: tuple[Role, ...] = ("query", "key", "value", "output")
# Beyond this factor most of the model would be padding.
_MOST_TIMES = 4


class PadTo(Operation):
    """Pad heads, neurons and vocabulary rows to numbers that divide evenly; the padding computes nothing."""

    papers = (
        Paper(
            "shoeybi2019megatron",
            "Shoeybi, Mohammad and Patwary, Mostofa and Puri, Raul and others",
            "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
            2019,
            "1909.08053",
        ),
        COMPOSABLE,
    )
    training = TrainingDefaults("ours, no paper's: padding is not to train", lr=1e-4)
    examples = ({"tensor_parallel": 8}, {"multiple_of": 256})
    way_on = "pad something else, or leave it as it is"

    op: Literal["pad_to"]
    tensor_parallel: Annotated[
        int | None,
        Field(
            ge=2,
            le=1024,
            description="number of devices: it divides heads and neurons, and key-value heads (or these divide it)",
        ),
    ] = None
    multiple_of: Annotated[
        int | None, Field(ge=2, le=65536, description="`intermediate_size` becomes a multiple of this")
    ] = None
    vocabulary: Annotated[
        int | None, Field(ge=2, le=65536, description="rows of embeddings and head become a multiple of this")
    ] = None

    @model_validator(mode="after")
    def _asks(self) -> Self:
        """Check that some padding is asked for. Raises ValueError."""
        if self.tensor_parallel is None and self.multiple_of is None and self.vocabulary is None:
            raise ValueError("give at least one of `tensor_parallel`, `multiple_of` and `vocabulary`")
        return self

    def small(self, facts: None, scale: Scale) -> tuple[Operation, None]:
        """Return (operation, no facts) for a twin: the base's heads, fewer neurons, and fewer embedding rows."""
        sizes, rows = scale.blueprint.resized, scale.blueprint.new_rows
        heads, neurons = sizes.keys() & _COUNTS, sizes.keys() - {*_COUNTS, "head_dim", VOCABULARY_KEY}
        return self.model_copy(
            update={
                "tensor_parallel": self.tensor_parallel if heads else None,
                "multiple_of": NEURONS + 8 if neurons else None,
                "vocabulary": scale.twin.sizes.vocabulary + HEAD_BLOCK if rows else None,
            }
        ), None

    def edit(self, draft: Draft, facts: None) -> OperationRecord:
        """Pad what does not divide yet."""
        done = [*self._heads(draft), *self._neurons(draft)]
        claim = Claim("rounding", f"padding reads and writes zeros; {ROUNDING}")
        if rows := self._rows(draft):
            before = draft.anatomy.sizes.vocabulary
            done.append(f"rows of the vocabulary: {before} become {before + rows}")
            both = Claim("rounding", f"{claim.reason}; {bound_of_rows(before, rows)}")
            claim = both if draft.widths else claim_of_rows(before, rows, rows)
        if not done:
            asked = {key: value for key in _FIELDS if (value := getattr(self, key)) is not None}
            wanted = ", ".join(f"`{key}: {value}`" for key, value in asked.items())
            raise BadInput(f"{wanted}: the base divides already, so there is nothing to pad; leave this operation out")
        return OperationRecord(self.op, "; ".join(done), claim, trains="new")

    def _heads(self, draft: Draft) -> Iterator[str]:
        """Pad the attention of every layer where the devices do not divide the heads; yield what was done, in words.

        Raises BadInput where grafts or norms over all heads are in the way.
        """
        sizes = draft.anatomy.sizes
        heads, kv_heads = self._head_counts(draft)
        if (heads, kv_heads) == (sizes.heads, sizes.kv_heads):
            return
        check_alone(draft, "num_attention_heads")
        if draft.bank is not None or any(layer.grafts for layer in draft.layers):
            raise BadInput("the model carries grafts beside its heads; fold, merge or revert them first")
        groups = f"groups of {sizes.heads // sizes.kv_heads} become {heads // kv_heads}"
        shown = f"heads of {sizes.head_dim}: {sizes.heads} / {sizes.kv_heads} become {heads} / {kv_heads} ({groups})"
        if heads * sizes.kv_heads == sizes.heads * kv_heads:
            fields, growths = wider_heads(draft, kv_heads - sizes.kv_heads)
            check_norms(draft, growths)
            lengthen(draft, growths, lambda new: new.zeros)
            draft.widths |= fields
            yield shown
            return
        norms = [norms_of_all_heads(kind, sizes.head_dim) for kind in draft.anatomy.kinds]
        check_norms(draft, [{part.suffix for part in here} for here in norms])
        for index, layer in enumerate(draft.layers):
            parts = parts_with(draft, index, _HEADS)
            # Parameters with a number for each head, such as attention sinks.
            single = [p for p in draft.kind_of(index).parts if p.kind == "other" and p.shape == (sizes.heads,)]
            for part in single:
                pieces = [*_padded(_plain(layer, part.suffix), None, 0, sizes.heads, draft, (heads, kv_heads))]
                layer.tensors[part.suffix] = side_by_side(pieces, 0)
                layer.rewritten[part.suffix] = draft.number
            for suffix, part in parts.items():
                recipe = _plain(layer, suffix)
                if part.blocks[0][0] == "output" and part.kind != "weight":
                    continue
                begins = itertools.accumulate((rows for _, rows in part.blocks), initial=0)
                pieces = []
                for begin, (role, rows) in zip(begins, part.blocks, strict=False):
                    pieces += _padded(recipe, role, begin, rows, draft, (heads, kv_heads))
                if not any(isinstance(piece, Constant) for piece in pieces):
                    continue
                layer.tensors[suffix] = side_by_side(pieces, int(part.blocks[0][0] == "output"))
                layer.rewritten[suffix] = draft.number
        # Without `head_dim` a class would divide the hidden size by the number of heads.
        draft.widths |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": sizes.head_dim}
        yield shown

    def _head_counts(self, draft: Draft) -> tuple[int, int]:
        """Return (query heads, key-value heads): the fewest that the devices divide, with groups of equal size.

        Raises BadInput where these are more than `_MOST_TIMES` times as many.
        """
        sizes, devices = draft.anatomy.sizes, self.tensor_parallel
        heads, kv_heads, each = sizes.heads, sizes.kv_heads, sizes.heads // sizes.kv_heads
        if devices is None or (heads % devices == 0 and _divide(kv_heads, devices)):
            return heads, kv_heads
        fitting = [
            (more_each * more, more)
            for more in range(kv_heads, _MOST_TIMES * max(kv_heads, devices) + 1)
            if _divide(more, devices)
            for more_each in (range(each, each + devices + 1) if each > 1 else (1,))
            if more_each * more % devices == 0
        ]
        # Where heads make up the hidden size, many classes need them to divide it; building shows whether this one
        # does.
        found = [counts for counts in fitting if sizes.hidden == sizes.query_width and sizes.hidden % counts[0] == 0]
        best = min(found or fitting, key=lambda counts: (counts[0] + 2 * counts[1], counts))
        if best[0] > _MOST_TIMES * heads:
            raise BadInput(
                f"`tensor_parallel: {devices}`: {heads} heads would become {best[0]}, more than {_MOST_TIMES} times as"
                " many; choose fewer devices"
            )
        return best

    def _neurons(self, draft: Draft) -> Iterator[str]:
        """Pad the FFN of every layer; yield what was done, in words, and nothing where all widths divide."""
        wanted = math.lcm(self.multiple_of or 1, self.tensor_parallel or 1)
        if wanted == 1 or not any(width % wanted for width in inner_widths(draft)):
            return
        check_alone(draft, "intermediate_size")
        check_free(draft)
        fields, growths = wider_ffns(draft, multiple_of=wanted)
        for field in fields:
            check_alone(draft, field)
        lengthen(draft, growths, lambda new: new.zeros)
        draft.widths |= fields
        yield shown_growth(draft, growths)

    def _rows(self, draft: Draft) -> int:
        """Pad embeddings and head; return the number of new rows, which may be 0."""
        before = draft.anatomy.sizes.vocabulary
        more = 0 if self.vocabulary is None else -before % self.vocabulary
        if not more:
            return 0
        if has_other_rows(draft):
            raise BadInput("an earlier operation of this plan changes the vocabulary; apply two plans")
        if before + more > LARGEST_SIZE:
            raise BadInput(f"the vocabulary would have {before + more} rows; beyond 2^31 is refused")
        for name in vocabulary_tensors(draft):
            draft.set_outer(name, extended(stored(draft, name), ((),) * more))
        set_rows(draft, before + more)
        return more


_COUNTS = ("num_attention_heads", "num_key_value_heads")
_FIELDS = ("tensor_parallel", "multiple_of", "vocabulary")


def _divide(kv_heads: int, devices: int) -> bool:
    """Return whether devices share key-value heads evenly: each has its own, or shares them with equally many."""
    return kv_heads % devices == 0 or devices % kv_heads == 0


def _plain(layer: LayerDraft, suffix: str) -> Copy:
    """Return a layer's tensor, which no operation has changed."""
    recipe = layer.tensors[suffix]
    assert isinstance(recipe, Copy), suffix
    return recipe


def _padded(
    source: Copy, role: Role | None, begin: int, rows: int, draft: Draft, counts: tuple[int, int]
) -> Iterator[Recipe]:
    """Yield a module's rows (columns of the output projection), with zeros after each group and at the end.

    The rows begin at `begin`. `counts` are the query and key-value heads of the output. Without a role each row is one
    head's.
    """
    sizes, (heads, kv_heads) = draft.anatomy.sizes, counts
    columns, size = role == "output", 1 if role is None else draft.anatomy.sizes.head_dim
    if columns:
        rows = source.shape[1]

    def zeros(count: int) -> Constant:
        """Return `count` rows of zeros (columns of the output projection)."""
        return Constant(0.0, source.dtype, (source.shape[0], count) if columns else (count, *source.shape[1:]))

    def taken(start: int, stop: int) -> Copy:
        """Return the source's rows `start:stop` (columns of the output projection)."""
        return sliced_along(source, int(columns), start, stop)

    if role in ("key", "value"):
        yield taken(begin, begin + rows)
        if kv_heads > sizes.kv_heads:
            yield zeros((kv_heads - sizes.kv_heads) * size)
        return
    each, more_each = (count * size for count in (sizes.heads // sizes.kv_heads, heads // kv_heads))
    if more_each == each:
        yield taken(begin, begin + rows)
    else:
        for start in range(begin, begin + rows, each):
            yield taken(start, start + each)
            yield zeros(more_each - each)
    if kv_heads > sizes.kv_heads:
        yield zeros((kv_heads - sizes.kv_heads) * more_each)
