"""`add_tokens`: words that become tokens, each with the mean of the old rows in both embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft
from surgeon.blueprint.recipes import Copy, extended
from surgeon.edits.embeddings import set_rows, vocabulary_tensors
from surgeon.edits.rows import VocabularyFacts
from surgeon.errors import BadInput
from surgeon.operations.operation import Operation, TrainingDefaults
from surgeon.operations.prepare import Facts, OpenedBase


class AddTokens(Operation):
    """New tokens, whose rows are the mean of all old ones."""

    training: ClassVar[TrainingDefaults] = TrainingDefaults("a guess", lr=1e-3)
    examples: ClassVar[tuple[Mapping[str, object], ...]] = ({"words": ["surgeonplugin"]},)
    facts: ClassVar[type[Facts] | None] = VocabularyFacts

    op: Literal["add_tokens"]
    words: Annotated[list[str], Field(min_length=1, description="the words")]

    def prepare(self, base: OpenedBase) -> VocabularyFacts:
        """Grow the tokenizer by the words."""
        from surgeon.edits.vocabulary.grow import grow

        grown = grow(base.folder, self.words, rows=base.anatomy.sizes.vocabulary)
        base.side_files.update(grown.files)
        return VocabularyFacts.of(grown)

    def edit(self, draft: Draft, facts: VocabularyFacts | None) -> OperationRecord:
        """Give embeddings and head a row for each token."""
        rows = draft.anatomy.sizes.vocabulary
        if facts is None or facts.rows != rows:
            raise BadInput(f"the new tokens are not known, or do not begin at id {rows}")
        for name in vocabulary_tensors(draft):
            info = draft.anatomy.outer[name]
            means: tuple[tuple[int, ...], ...] = ((),) * len(facts.made_of)
            draft.set_outer(name, extended(Copy.of(info), means))
        set_rows(draft, rows + len(facts.made_of))
        claim = Claim("exact", "old logits are bit-identical: new rows stand behind the old ones")
        return OperationRecord(self.op, f"{len(facts.made_of)} tokens from id {rows}", claim, trains="new")
