"""`grow_vocabulary`: more tokens, in the tokenizer and as rows of the embeddings.

Every new row of the output head is the mean of all old rows. Old logits are unchanged (where the number of old rows is
no multiple of `HEAD_BLOCK`, the last few only up to rounding). As exp is convex, a new token never gets more
probability than the mean old one: the loss on any old token rises by at most log(1 + k/V) (Jensen's inequality). New
rows of input embeddings are the mean of the rows of the pieces into which the old tokenizer cuts the token (as in Gee
et al., 2022, Fast Vocabulary Transfer); old text never reads them.

Special and added tokens get the next free ids, as in transformers. Many bases have padded rows there: these are
overwritten, no shape changes, and the bound is the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from surgeon.anatomy.family import LARGEST_SIZE
from surgeon.blueprint.blueprint import OperationRecord
from surgeon.blueprint.draft import Draft
from surgeon.blueprint.recipes import extended
from surgeon.checkpoint.source import MAX_SIDE_FILE_BYTES
from surgeon.checkpoint.strict_json import json_object
from surgeon.checkpoint.tokenizer_files import TOKENIZER_FILE
from surgeon.edits.embeddings import has_other_rows, is_untied, set_rows, stored, vocabulary_tensors
from surgeon.edits.rows import VocabularyFacts, claim_of_rows
from surgeon.edits.vocabulary.trimmed import OTHER_VOCABULARIES, ids_named
from surgeon.errors import BadInput, printable
from surgeon.operations.operation import Operation, Paper, Spec, TrainingDefaults
from surgeon.operations.prepare import OpenedBase, Paths, Scale

# The most characters of an added token.
_LONGEST = 200


class Learn(Spec):
    """Settings for tokens that are learned from a text."""

    learn: Annotated[
        Paths, Field(description="text to learn from, seen from the plan: .jsonl with a text a line, or plain")
    ]
    count: Annotated[int, Field(ge=1, le=1_000_000, description="how many tokens")]
    keep: Annotated[Paths | None, Field(description="text that is to tokenise as before (for `how: unseen`)")] = None
    how: Annotated[
        Literal["unseen", "appended"],
        Field(description="which pairs may be joined: those that `keep` never has, or every one"),
    ] = "unseen"


class GrowVocabulary(Operation):
    """Add tokens, as pieces of the tokenizer and rows of the embeddings, without changing old logits."""

    papers = (
        Paper(
            "gee2022fast",
            "Gee, Leonidas and Zugarini, Andrea and Rigutini, Leonardo and Torroni, Paolo",
            "Fast Vocabulary Transfer for Language Model Compression",
            2022,
            "2402.09977",
            "EMNLP 2022 Industry Track",
        ),
    )
    training = TrainingDefaults("ours, no paper's: rows of embeddings alone", lr=1e-3)
    examples = ({"tokens": ["surgeonvocabulary"]},)

    facts = VocabularyFacts

    op: Literal["grow_vocabulary"]
    tokens: Annotated[
        list[str] | str | Learn | None,
        Field(description="words, or a UTF-8 file with one a line, or what to learn them from"),
    ] = None
    special: Annotated[
        Sequence[str], Field(description="special tokens, as `<think>`, which decoding can leave out")
    ] = ()
    added: Annotated[Sequence[str], Field(description="added tokens that are not special, as `<tool>`")] = ()
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
        """Check that there is something to add, and that `keep` is given exactly where `how` needs it.

        Raises ValueError.
        """
        tokens = self.tokens
        if not (tokens or self.special or self.added):
            raise ValueError(
                "empty, so there is nothing to add: name words in `tokens`, or `special` or `added` tokens"
            )
        for mark, times in Counter((*self.special, *self.added)).items():
            if not 0 < len(mark.strip()) <= len(mark) <= _LONGEST:
                raise ValueError(
                    f"{printable(repr(mark), 60)}: write a token of 1 to {_LONGEST} characters, not of white space only"
                )
            if times > 1:
                raise ValueError(f"{printable(repr(mark), 60)}: {times} times in `special` and `added`; list it once")
        if isinstance(tokens, Learn) and tokens.how == "unseen" and tokens.keep is None:
            raise ValueError("`how: unseen` needs `keep`, the text that is to tokenise as before")
        if isinstance(tokens, Learn) and tokens.how != "unseen" and tokens.keep is not None:
            raise ValueError(
                f"`keep` has no meaning with `how: {tokens.how}`; name the text in `measure` to see what changes"
            )
        return self

    def prepare(self, base: OpenedBase) -> VocabularyFacts | None:
        """Extend the tokenizer: find the old tokens that each new token consists of, and make the new files.

        Return None where an earlier operation changed the tokenizer: `edit` then refuses. Raises BadInput where a token
        cannot be added, or a config file uses a new id already.
        """
        if TOKENIZER_FILE in base.side_files:
            # `edit` explains why a second growth is refused.
            return None
        # These imports load torch and transformers.
        from surgeon.edits.vocabulary.grow import grow
        from surgeon.edits.vocabulary.learned import LearnedTokens
        from surgeon.edits.vocabulary.requested_words import Listed

        wanted: tuple[str, ...] | LearnedTokens
        listed = Listed()
        added = {mark: mark in self.special for mark in (*self.special, *self.added)}
        if isinstance(self.tokens, Learn):
            learn = self.tokens
            wanted = LearnedTokens(base.texts(learn.learn), learn.count, base.texts(learn.keep), learn.how)
        elif isinstance(self.tokens, str):
            path = base.text(self.tokens)
            lines = base.lines(self.tokens)
            wanted, listed = tuple(lines.values()), Listed(printable(str(path)), tuple(lines))
        else:
            wanted = tuple(self.tokens or ())
        grown = grow(
            base.folder,
            wanted,
            rows=base.anatomy.sizes.vocabulary,
            added=added,
            measure=base.texts(self.measure),
            listed=listed,
            listener=base.listener,
        )
        new = {*range(grown.rows, grown.rows + len(grown.made_of))}
        source = base.folder.source
        for name in (name for name in source.listing() if name.endswith("config.json")):
            if used := ids_named(json_object(source.small(name, max_bytes=MAX_SIDE_FILE_BYTES))) & new:
                raise BadInput(
                    f"{printable(name)}: uses the id {min(used)}, which the tokenizer gives no token and would give a"
                    f" new one; give that id its token first, or take it out of {printable(name)}"
                )
        base.side_files.update(grown.files)
        base.notes.extend(
            f"{printable(name)} is carried along as it is: what reads it in place of tokenizer.json knows no new token"
            for name in base.folder.side_files
            if OTHER_VOCABULARIES.search(name)
        )
        return VocabularyFacts.of(grown)

    def small(self, facts: VocabularyFacts | None, scale: Scale) -> tuple[Operation, VocabularyFacts | None]:
        """Return (operation, facts) for a twin, without rows of padding, which need no separate check."""
        return self.model_copy(update={"pad_to_multiple_of": 1}), None if facts is None else facts.small(scale)

    def edit(self, draft: Draft, facts: VocabularyFacts | None) -> OperationRecord:
        """Add rows to embeddings and output head.

        Raises BadInput where an earlier operation changed the vocabulary, or the new tokens do not fit the model.
        """
        if has_other_rows(draft):
            raise BadInput("an earlier operation of this plan changes the vocabulary; join the two, or apply two plans")
        if facts is None:
            raise BadInput("the tokens to add are not known: give a base with its tokenizer.json")
        rows, tied = draft.anatomy.sizes.vocabulary, draft.anatomy.tied
        if is_untied(draft) and self.input_init != "mean":
            raise BadInput(
                "an earlier operation of this plan unties the head, so with `input_init: pieces` its new rows would"
                " not be the embeddings'; write grow_vocabulary first, say `input_init: mean`, or apply two plans"
            )
        if facts.rows > rows:
            raise BadInput(f"the tokens begin at id {facts.rows}, the model has {rows} rows; was the plan edited?")
        if tied and self.input_init == "pieces":
            raise BadInput(
                "`input_init: pieces`: input and output embeddings are tied, so each new row is both, and the mean of"
                " all rows keeps the promise; leave `input_init` out"
            )
        tokens = len(facts.made_of)
        whole = math.ceil(max(rows, facts.rows + tokens) / self.pad_to_multiple_of) * self.pad_to_multiple_of
        if whole > LARGEST_SIZE:
            raise BadInput(f"the vocabulary would have {whole} ids; beyond 2^31 is refused")
        # Rows that no token uses become padding where rows are added; otherwise they keep their values.
        new = tokens if whole == rows else whole - facts.rows
        pieces = not tied and self.input_init != "mean"
        means: tuple[tuple[int, ...], ...] = ((),) * new
        for name, reads in vocabulary_tensors(draft).items():
            made_of = (*facts.pieces, *means[tokens:]) if reads and pieces else means
            draft.set_outer(name, extended(stored(draft, name), made_of, facts.rows))
        set_rows(draft, whole)
        return OperationRecord(
            op=self.op,
            matched=_matched(facts, rows, new),
            claim=claim_of_rows(rows, whole - rows, new),
            trains="new",
        )


def _matched(grown: VocabularyFacts, rows: int, new: int) -> str:
    """Return words for the manifest: how many tokens and rows, and their ids."""
    tokens, first = len(grown.made_of), grown.rows
    padding = f" and {new - tokens} rows of padding" if new > tokens else ""
    free = f", in {min(new, rows - first)} rows of the base that no token used" if first < rows else ""
    return f"{tokens} tokens{padding}, ids {first} to {first + tokens - 1}{free}, {grown.kind}: {grown.how}"
