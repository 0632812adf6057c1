"""`trim_vocabulary`: fewer tokens, in the tokenizer and as rows of the embeddings.

The rows that stay are the base's bytes, so the logits of the tokens that stay are unchanged on every text of such
tokens. These texts are tokenised as before (`surgeon.edits.vocabulary.trimmed`). The softmax is over fewer tokens, so
their loss does not rise.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, model_validator

from surgeon.anatomy.skeleton import wordless_auto
from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft, Outer
from surgeon.blueprint.recipes import HEAD_BLOCK, Copy, kept_rows
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.header import FLOAT_DTYPES
from surgeon.checkpoint.tokenizer_files import TOKENIZER_FILE
from surgeon.common.check import Check, some
from surgeon.edits.embeddings import further_rows, has_other_rows, set_rows, vocabulary_tensors
from surgeon.edits.vocabulary.trimmed import from_bits, to_bits, trimmed_files, with_tokens
from surgeon.errors import BadInput, printable
from surgeon.operations.operation import Operation, Paper, TrainingDefaults
from surgeon.operations.prepare import Facts, OpenedBase, Paths, Scale, SideFile

# By default, the number of rows that stay is a multiple of the largest of these that divides the base's rows.
_MULTIPLES = (1, 2, 4, 8, 16, 32, 64, 128)
# Settings of per-layer tables with a row for each id, which are not trimmed.
_PER_LAYER = ("vocab_size_per_layer_input", "hidden_size_per_layer_input")


class TrimFacts(Facts):
    """The facts of a vocabulary trim that surgery.json keeps.

    `kept` are the ids that stay, of the base's `rows`, as bits (`surgeon.edits.vocabulary.trimmed.to_bits`).
    """

    kind: str
    how: str
    rows: Annotated[int, Field(ge=1)]
    kept: Annotated[str, Field(pattern=r"^[0-9a-f]+$")]

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """Return the ids that stay, in order."""
        return from_bits(self.kept)

    def small(self, scale: Scale) -> TrimFacts:
        """Return the facts for a twin: two of every three tokens stay, up to a multiple of `HEAD_BLOCK`."""
        rows = scale.twin.sizes.vocabulary
        kept = [token for token in range(rows) if token % 3]
        kept = kept[: len(kept) - len(kept) % HEAD_BLOCK]
        few = {"rows": rows, "kept": to_bits(kept, rows), "side_files": {}, "texts": []}
        return type(self)(**self.model_dump() | few)

    def check(self, file: str) -> None:
        """Raise BadInput where an id stays that the base does not have, or none stays."""
        if not self.tokens or self.tokens[-1] >= self.rows or self.kept != to_bits(self.tokens, self.rows):
            raise BadInput(f"{printable(file)}: `kept` names ids that the base has not; was it edited by hand?")

    def checks(self, base: CheckpointFolder | None, out: CheckpointFolder) -> list[Check]:
        """Return the check that side files equal the base's without the removed tokens; none where `base` is None."""
        if base is None:
            return []
        made = trimmed_files({name: base.read_side_file(name) for name in base.side_files}, self.tokens)
        there = {name: out.read_side_file(name) if name in out.side_files else None for name in made}
        wrong = [name for name in {**made, **self.side_files} if name not in made or made[name] != there[name]]
        wrong += [name for name in made if self.side_files.get(name) != SideFile.of(made[name]) and name not in wrong]
        kept = f"the base's with new ids, for the tokens that stay: {some(sorted(made))}"
        return [Check.of("tokenizer", sorted(wrong), "not the base's without the tokens that went", kept)]


class TrimVocabulary(Operation):
    """Keep the tokens of a text, a list or a script, with unchanged logits, and remove all others."""

    papers = (
        Paper(
            "abdaoui2020load",
            "Abdaoui, Amine and Pradel, Camille and Sigel, Grégoire",
            "Load What You Need: Smaller Versions of Multilingual BERT",
            2020,
            "2010.05609",
            "SustaiNLP 2020",
        ),
    )
    training = TrainingDefaults("ours, no paper's: nothing is new, so nothing trains", lr=1e-5)
    examples = ({"scripts": ["Latin"]},)

    facts = TrimFacts

    op: Literal["trim_vocabulary"]
    text: Annotated[Paths | None, Field(description="text whose tokens stay: .jsonl with a text a line, or plain")] = (
        None
    )
    least: Annotated[int, Field(ge=1, description="how often the text must use a token")] = 1
    most: Annotated[
        int | None, Field(ge=1, description="at most so many tokens of the text, those that it uses most often")
    ] = None
    tokens: Annotated[
        list[str] | str | None, Field(description="words whose tokens stay, or a UTF-8 file with one a line")
    ] = None
    scripts: Annotated[
        list[str] | None, Field(min_length=1, description="Unicode scripts whose tokens stay, as Latin or Cyrillic")
    ] = None
    pad_to_multiple_of: Annotated[
        int | None,
        Field(
            ge=1,
            le=65536,
            description="keep further tokens up to a multiple of this; default: the largest power of two up to 128 that"
            " divides the base's rows",
        ),
    ] = None
    measure: Annotated[
        Paths | None, Field(description="text on which is measured what tokenises otherwise than before")
    ] = None

    @model_validator(mode="after")
    def _check_wanted(self) -> TrimVocabulary:
        """Check that something is to stay, and that `least` and `most` have a text. Raises ValueError."""
        if self.text is None and not self.tokens and self.scripts is None:
            raise ValueError("name what stays: `text`, `tokens` or `scripts`, or several of them")
        if self.text is None and (self.least != 1 or self.most is not None):
            raise ValueError("`least` and `most` count tokens of `text`; name one")
        return self

    def prepare(self, base: OpenedBase) -> TrimFacts | None:
        """Choose the tokens that stay, and make the files without the others.

        Return None where an earlier operation changed the tokenizer: `edit` then refuses. Raises BadInput where the
        vocabulary cannot be trimmed.
        """
        if TOKENIZER_FILE in base.side_files:
            # `edit` explains why a second change is refused.
            return None
        _check(base)
        # This import loads torch and transformers.
        from surgeon.edits.vocabulary.trim import Wanted, trim

        rows = base.anatomy.sizes.vocabulary
        words = base.lines(self.tokens).values() if isinstance(self.tokens, str) else self.tokens
        wanted = Wanted(base.texts(self.text), self.least, self.most, tuple(words or ()), tuple(self.scripts or ()))
        multiple = self.pad_to_multiple_of or max(n for n in _MULTIPLES if rows % n == 0)
        made = trim(base.folder, wanted, rows=rows, multiple=multiple, measure=base.texts(self.measure))
        base.side_files.update(made.files)
        left = sorted(name for name, content in made.files.items() if content is None)
        base.notes.extend(
            f"{printable(name)} is left out: what reads it in place of tokenizer.json would take the old ids"
            for name in left
        )
        return TrimFacts(
            kind=made.kind,
            how=made.how,
            rows=rows,
            kept=to_bits(made.kept, rows),
            side_files={name: SideFile.of(content) for name, content in made.files.items()},
            texts=list(made.measured),
        )

    def edit(self, draft: Draft, facts: TrimFacts | None) -> OperationRecord:
        """Remove rows from embeddings and output head, and renumber the ids in the config.

        Raises BadInput where an earlier operation changed the vocabulary, or the facts do not fit the model.
        """
        if has_other_rows(draft):
            raise BadInput("an earlier operation of this plan changes the vocabulary; apply two plans")
        if facts is None:
            raise BadInput("the tokens that stay are not known: give a base with its tokenizer.json")
        rows, kept = draft.anatomy.sizes.vocabulary, facts.tokens
        if facts.rows != rows or len(kept) >= rows:
            raise BadInput(f"{len(kept)} of {facts.rows} tokens stay, the model has {rows} rows; was the plan edited?")
        further = further_rows(draft.anatomy)
        for name in (*vocabulary_tensors(draft, further=further), *further):
            held, key = _place_of(draft, name)
            recipe = held[key].recipe
            if not isinstance(recipe, Copy) or recipe.source is None or recipe.dtype not in FLOAT_DTYPES:
                raise BadInput(
                    f"{printable(name)}: {recipe.dtype} {list(recipe.shape)}, which is quantised, or an earlier"
                    " operation of this plan changed it; trim the vocabulary first, in a plan of its own"
                )
            held[key] = Outer(kept_rows(recipe, kept), draft.number)
        set_rows(draft, len(kept))
        draft.config_edits["tokens"] = lambda config: with_tokens(config, kept)
        return OperationRecord(op=self.op, matched=_matched(facts), claim=_claim(facts), trains="new")


def _place_of(draft: Draft, name: str) -> tuple[dict[str, Outer], str]:
    """Return (dict, key) of a tensor outside the stack's layers: the draft's dict that holds it, and its key there."""
    for held, infos in zip(draft.beyond, draft.anatomy.beyond, strict=True):
        if (suffix := next((s for s, info in infos.items() if info.name == name), None)) is not None:
            return held, suffix
    return draft.outer, name


def _check(base: OpenedBase) -> None:
    """Raise BadInput for a model that uses ids outside its embeddings, or has no head for words."""
    config = base.folder.config
    if wordless_auto(config) is not None:
        raise BadInput("config.json: a model with a head for labels or answers, which writes no words: not supported")
    parts = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    if named := next((key for part in parts for key in _PER_LAYER if part.get(key)), None):
        raise BadInput(
            f"config.json: `{named}`: its layers have embeddings of their own with a row for each id, which surgeon"
            " does not cut; this model's vocabulary cannot be trimmed"
        )


def _matched(facts: TrimFacts) -> str:
    """Return words for the manifest: how many rows stay and go, and the effect on texts."""
    gone = facts.rows - len(facts.tokens)
    found = f"{len(facts.tokens):,} of {facts.rows:,} rows stay, {gone / facts.rows:.1%} go ({facts.kind}: {facts.how})"
    shares = [f"{t.unchanged:,} of {t.documents:,} documents of {printable(t.text)}" for t in facts.texts]
    return found + (f"; as before are cut {', '.join(shares)}" if shares else "")


def _claim(facts: TrimFacts) -> Claim:
    """Return the claim for logits on texts of tokens that stay."""
    same = "on texts of tokens that stay, which are cut as before, their logits are bit-identical"
    odd = [count for count in (facts.rows, len(facts.tokens)) if count % HEAD_BLOCK]
    if not odd:
        return Claim("exact", f"{same}; the probability of tokens that go is shared among them")
    return Claim(
        "rounding",
        f"{same} but for those of the last tokens: {odd[0]} rows are no multiple of {HEAD_BLOCK}, and a processor sums"
        " these in another order",
    )
