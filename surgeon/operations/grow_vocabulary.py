"""`grow_vocabulary`: more tokens, in the tokenizer and as rows of the embeddings.

Every new row of the output head is the mean of all old rows. Old logits are untouched (where the old rows are no
multiple of `HEAD_BLOCK`, to rounding for the last few tokens), and as exp is convex, a new token never gets more
probability than the mean old one: the loss on any old token rises by at most log(1 + k/V) (Jensen's inequality). New
rows of input embeddings are the mean of the rows of the pieces that the old tokenizer makes of the token (as in Gee et
al., 2022, Fast Vocabulary Transfer); old text never reads them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from surgeon.blueprint.draft import Claim, Draft, OperationRecord
from surgeon.blueprint.recipes import HEAD_BLOCK, Copy, Extended
from surgeon.checkpoint.tokenizer_files import GrownVocabulary
from surgeon.errors import BadInput
from surgeon.families.anatomy import vocabulary_tensors
from surgeon.families.family import LARGEST_SIZE
from surgeon.operations.operation import NewTokens, Operation, Paper, Spec, TrainingDefaults

Paths = str | Annotated[list[str], Field(min_length=1)]


class Learn(Spec):
    """Tokens that are learned from a text."""

    learn: Annotated[
        Paths, Field(description="text to learn from, seen from the plan: .jsonl with a text a line, or plain")
    ]
    count: Annotated[int, Field(ge=1, le=1_000_000, description="how many tokens")]
    keep: Annotated[Paths | None, Field(description="text that is to tokenise as before (for `how: unseen`)")] = None
    how: Annotated[
        Literal["unseen", "appended", "non_ascii"],
        Field(description="which pairs may be joined: those that `keep` never has, every one, those beyond ASCII"),
    ] = "unseen"


class GrowVocabulary(Operation):
    """New tokens: pieces of the tokenizer and rows of the embeddings, which leave old logits what they are."""

    papers: ClassVar[tuple[Paper, ...]] = (
        Paper(
            "gee2022fast",
            "Gee, Leonidas and Zugarini, Andrea and Rigutini, Leonardo and Torroni, Paolo",
            "Fast Vocabulary Transfer for Language Model Compression",
            2022,
            "2402.09977",
            "EMNLP 2022 Industry Track",
        ),
    )
    training: ClassVar[TrainingDefaults] = TrainingDefaults("ours, no paper's: rows of embeddings alone", lr=1e-3)
    examples: ClassVar[tuple[Mapping[str, object], ...]] = ({"tokens": ["surgeonvocabulary"]},)

    op: Literal["grow_vocabulary"]
    tokens: Annotated[
        list[str] | str | Learn,
        Field(description="words, or a UTF-8 file with one a line, or what to learn them from"),
    ]
    output_init: Annotated[
        Literal["mean"], Field(description="new rows of the output head: the mean of all old ones")
    ] = "mean"
    input_init: Annotated[
        Literal["pieces", "mean"] | None,
        Field(description="new rows of input embeddings; default: pieces, and mean where embeddings are tied"),
    ] = None
    pad_to_multiple_of: Annotated[
        int, Field(ge=1, le=65536, description="add rows up to a multiple of this, which no token uses")
    ] = 1
    measure: Annotated[
        Paths | None, Field(description="text on which is measured what tokenises otherwise than before")
    ] = None

    @model_validator(mode="after")
    def _check_keep(self) -> GrowVocabulary:
        asked = self.tokens
        if isinstance(asked, Learn) and asked.how == "unseen" and asked.keep is None:
            raise ValueError("`how: unseen` needs `keep`, the text that is to tokenise as before")
        if isinstance(asked, Learn) and asked.how != "unseen" and asked.keep is not None:
            raise ValueError(
                f"`keep` has no meaning with `how: {asked.how}`; name the text in `measure` to see what changes"
            )
        return self

    @property
    def new_tokens(self) -> NewTokens:
        """The words, or the file of them, or what to learn them from."""
        measure = _listed(self.measure)
        if isinstance(self.tokens, Learn):
            asked = self.tokens
            return NewTokens(
                learn=_listed(asked.learn),
                count=asked.count,
                keep=_listed(asked.keep),
                how=asked.how,
                measure=measure,
            )
        if isinstance(self.tokens, str):
            return NewTokens(file=self.tokens, measure=measure)
        return NewTokens(words=tuple(self.tokens), measure=measure)

    def edit(self, draft: Draft, number: int) -> OperationRecord:
        """Extend embeddings and output head."""
        grown = draft.vocabularies.get(number)
        if draft.extended:
            raise BadInput("an earlier operation of this plan grows the vocabulary; join the two, or apply two plans")
        if grown is None:
            raise BadInput("the tokens to add are not known: give a base with its tokenizer.json")
        rows, tied = draft.anatomy.sizes.vocabulary, draft.anatomy.tied
        if grown.rows != rows:
            raise BadInput(f"the tokens begin at id {grown.rows}, the model has {rows} rows; was the plan edited?")
        if tied and self.input_init == "pieces":
            raise BadInput(
                "`input_init: pieces`: input and output embeddings are tied, so each new row is both, and the mean of"
                " all rows keeps the promise; leave `input_init` out"
            )
        tokens = len(grown.made_of)
        added = math.ceil((rows + tokens) / self.pad_to_multiple_of) * self.pad_to_multiple_of - rows
        if rows + added > LARGEST_SIZE:
            raise BadInput(f"the vocabulary would have {rows + added} ids; beyond 2^31 is refused")
        pieces = not tied and self.input_init != "mean"
        means: tuple[tuple[int, ...], ...] = ((),) * added
        for name, reads in vocabulary_tensors(draft.anatomy).items():
            info = draft.anatomy.outer[name]
            made_of = (*grown.made_of, *means[tokens:]) if reads and pieces else means
            draft.extended[name] = Extended(Copy.of(info), made_of), number
        draft.rows = rows + added
        return OperationRecord(
            op=self.op,
            matched=_matched(grown, rows, added),
            claim=_claim(rows, added),
            trains="new",
        )


def _claim(rows: int, added: int) -> Claim:
    """What old logits are, and what new tokens take from them."""
    bound = (
        "new rows of the output are the mean of the old ones, so the loss on any old token rises by at most"
        f" log(1 + {added}/{rows}) = {math.log1p(added / rows):.4g} nats"
    )
    tail = rows % HEAD_BLOCK
    if not tail:
        return Claim("exact", f"old logits are bit-identical; {bound}")
    last = f"those of the last {tail} old tokens" if tail > 1 else "that of the last old token"
    return Claim(
        "rounding",
        f"old logits are bit-identical but for {last}: {rows} rows are no multiple of {HEAD_BLOCK}, and for a few"
        " positions at once in float32 (cached decoding) a processor sums these in another order than in a wider head;"
        f" {bound}",
        tail_alone=True,
    )


def _listed(paths: Paths | None) -> tuple[str, ...]:
    return () if paths is None else (paths,) if isinstance(paths, str) else tuple(paths)


def _matched(grown: GrownVocabulary, rows: int, added: int) -> str:
    tokens = len(grown.made_of)
    padding = f" and {added - tokens} rows of padding" if added > tokens else ""
    return f"{tokens} tokens{padding}, ids {rows} to {rows + tokens - 1}, {grown.kind}: {grown.how}"
