"""`grow_vocabulary`: more tokens, in the tokenizer and as rows of the embeddings.

Every new row of the output head is the mean of all old rows. Old logits are untouched (where the old rows are no
multiple of `HEAD_BLOCK`, to rounding for the last few tokens), and as exp is convex, a new token never gets more
probability than the mean old one: the loss on any old token rises by at most log(1 + k/V) (Jensen's inequality). New
rows of input embeddings are the mean of the rows of the pieces that the old tokenizer makes of the token (as in Gee et
al., 2022, Fast Vocabulary Transfer); old text never reads them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft
from surgeon.blueprint.recipes import HEAD_BLOCK, extended
from surgeon.checkpoint.source import MAX_SIDE_FILE_BYTES
from surgeon.checkpoint.tokenizer_files import TOKENIZER_FILE, GrownVocabulary
from surgeon.common.json_results import plain_fields
from surgeon.common.schema import Many
from surgeon.errors import BadInput, printable
from surgeon.families.family import LARGEST_SIZE
from surgeon.families.vocabulary import VOCABULARY_KEY
from surgeon.operations.operation import Operation, Paper, Spec, TrainingDefaults
from surgeon.operations.prepare import Facts, OpenedBase

Paths = str | Annotated[list[str], Field(min_length=1)]
# Tokenizer files of other programs, which hold a vocabulary of their own.
_OTHER_VOCABULARIES = re.compile(r"(\.model(\.v\w+)?|\.tiktoken|tekken\.json)$")


class TextCounts(Spec):
    """What a growth of the vocabulary makes of a text (`surgeon.checkpoint.tokenizer_files.MeasuredText`)."""

    use: str
    text: str
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    documents: Many
    unchanged: Many
    words: Many
    before: Many
    after: Many

    @property
    def fertility(self) -> tuple[float, float]:
        """Tokens a word, before and after."""
        return self.before / max(1, self.words), self.after / max(1, self.words)


class VocabularyFacts(Facts):
    """A growth of the vocabulary, of whatever operation: what surgery.json keeps of the new tokens.

    `rows` are the base's rows of embeddings, so the first new id. `made_of` has a line for each new token: the old ids
    that the old tokenizer made of it (none: it knew none). `inserted` are the bytes that side files of the base got, as
    begin and length; `verify` and `revert` take them out again.
    """

    section: ClassVar[str] = "vocabularies"

    kind: str
    how: str
    rows: Annotated[int, Field(ge=1)]
    made_of: list[Annotated[str, Field(pattern=r"^([0-9]{1,9}( [0-9]{1,9}){0,255})?$")]]
    inserted: dict[str, list[Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2, max_length=2)]]]
    measured: list[TextCounts]

    @classmethod
    def of(cls, grown: GrownVocabulary) -> VocabularyFacts:
        """The facts of a tokenizer that has grown."""
        return cls(
            kind=grown.kind,
            how=grown.how,
            rows=grown.rows,
            made_of=[" ".join(map(str, named)) for named in grown.made_of],
            inserted={name: [list(place) for place in where] for name, where in grown.inserted.items()},
            measured=[TextCounts(**plain_fields(text)) for text in grown.measured],
        )

    @property
    def pieces(self) -> tuple[tuple[int, ...], ...]:
        """For each new token the old ids that the old tokenizer made of it."""
        return tuple(tuple(map(int, line.split())) for line in self.made_of)

    def check(self, file: str) -> None:
        """Raise BadInput where a new token is made of ids that the base does not have."""
        if any(token >= self.rows for named in self.pieces for token in named):
            raise BadInput(f"{printable(file)}: `vocabularies` names a token beyond the base's; was it edited by hand?")


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

    facts: ClassVar[type[Facts] | None] = VocabularyFacts

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
        tokens = self.tokens
        if isinstance(tokens, Learn) and tokens.how == "unseen" and tokens.keep is None:
            raise ValueError("`how: unseen` needs `keep`, the text that is to tokenise as before")
        if isinstance(tokens, Learn) and tokens.how != "unseen" and tokens.keep is not None:
            raise ValueError(
                f"`keep` has no meaning with `how: {tokens.how}`; name the text in `measure` to see what changes"
            )
        return self

    def prepare(self, base: OpenedBase) -> VocabularyFacts | None:
        """Grow the tokenizer: what the old one makes of the new tokens, and the files that have them."""
        if TOKENIZER_FILE in base.side_files:
            # Why a second growth is refused, `edit` says.
            return None
        # Imports torch and transformers.
        from surgeon.models.vocabulary.grow import grow
        from surgeon.models.vocabulary.learned import LearnedTokens
        from surgeon.models.vocabulary.requested_words import Listed

        rows, measure = base.anatomy.sizes.vocabulary, paths_of(base, self.measure)
        if isinstance(self.tokens, Learn):
            learn = self.tokens
            learned = LearnedTokens(paths_of(base, learn.learn), learn.count, paths_of(base, learn.keep), learn.how)
            grown = grow(base.folder, learned, rows=rows, measure=measure, listener=base.listener)
        elif isinstance(self.tokens, str):
            path = base.text(self.tokens)
            lines = lines_of(path)
            listed = Listed(printable(str(path)), tuple(lines))
            grown = grow(base.folder, tuple(lines.values()), rows=rows, measure=measure, listed=listed)
        else:
            if not self.tokens:
                raise BadInput("`tokens`: empty, so there is nothing to add; name at least one word")
            grown = grow(base.folder, tuple(self.tokens), rows=rows, measure=measure)
        base.side_files.update(grown.files)
        base.notes.extend(
            f"{printable(name)} is carried along as it is: what reads it in place of tokenizer.json knows no new token"
            for name in base.folder.side_files
            if _OTHER_VOCABULARIES.search(name)
        )
        return VocabularyFacts.of(grown.facts)

    def edit(self, draft: Draft, facts: VocabularyFacts | None) -> OperationRecord:
        """Extend embeddings and output head."""
        if VOCABULARY_KEY in draft.sizes:
            raise BadInput("an earlier operation of this plan changes the vocabulary; join the two, or apply two plans")
        if facts is None:
            raise BadInput("the tokens to add are not known: give a base with its tokenizer.json")
        rows, tied = draft.anatomy.sizes.vocabulary, draft.anatomy.tied
        if draft.untied and self.input_init != "mean":
            raise BadInput(
                "an earlier operation of this plan unties the head, so with `input_init: pieces` its new rows would"
                " not be the embeddings'; write grow_vocabulary first, say `input_init: mean`, or apply two plans"
            )
        if facts.rows != rows:
            raise BadInput(f"the tokens begin at id {facts.rows}, the model has {rows} rows; was the plan edited?")
        if tied and self.input_init == "pieces":
            raise BadInput(
                "`input_init: pieces`: input and output embeddings are tied, so each new row is both, and the mean of"
                " all rows keeps the promise; leave `input_init` out"
            )
        tokens = len(facts.made_of)
        added = math.ceil((rows + tokens) / self.pad_to_multiple_of) * self.pad_to_multiple_of - rows
        if rows + added > LARGEST_SIZE:
            raise BadInput(f"the vocabulary would have {rows + added} ids; beyond 2^31 is refused")
        pieces = not tied and self.input_init != "mean"
        means: tuple[tuple[int, ...], ...] = ((),) * added
        for name, reads in draft.vocabulary_tensors().items():
            made_of = (*facts.pieces, *means[tokens:]) if reads and pieces else means
            draft.set_outer(name, extended(draft.stored(name), made_of))
        draft.sizes[VOCABULARY_KEY] = rows + added
        return OperationRecord(
            op=self.op,
            matched=_matched(facts, rows, added),
            claim=claim_of_rows(rows, added),
            trains="new",
        )


def bound_of_rows(rows: int, added: int) -> str:
    """What new tokens take from old ones, in words."""
    return (
        "new rows of the output are the mean of the old ones, so the loss on any old token rises by at most"
        f" log(1 + {added}/{rows}) = {math.log1p(added / rows):.4g} nats"
    )


def claim_of_rows(rows: int, added: int) -> Claim:
    """What old logits are, and what new tokens take from them."""
    bound = bound_of_rows(rows, added)
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


def paths_of(base: OpenedBase, names: Paths | None) -> tuple[Path, ...]:
    """The paths of the texts that a plan names."""
    listed = [names] if isinstance(names, str) else names or []
    return tuple(base.text(name) for name in listed)


def lines_of(path: Path) -> dict[int, str]:
    """The words of a file that has one a line, by the numbers of their lines. Raises BadInput."""
    shown = printable(str(path))
    if path.stat().st_size > MAX_SIDE_FILE_BYTES:
        raise BadInput(f"{shown}: more than {MAX_SIDE_FILE_BYTES:,} bytes of tokens; is this the right file?")
    try:
        # Some editors put a byte order mark before the first word.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise BadInput(f"{shown}: not UTF-8 (byte {error.start}: {error.reason}); save it as UTF-8") from None
    words = {number: line for number, line in enumerate(lines, start=1) if line.strip()}
    if not words:
        raise BadInput(f"{shown}: empty, so there is nothing to add; write at least one word, one a line")
    return words


def _matched(grown: VocabularyFacts, rows: int, added: int) -> str:
    tokens = len(grown.made_of)
    padding = f" and {added - tokens} rows of padding" if added > tokens else ""
    return f"{tokens} tokens{padding}, ids {rows} to {rows + tokens - 1}, {grown.kind}: {grown.how}"
