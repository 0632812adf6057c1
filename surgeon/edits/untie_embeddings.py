"""`untie_embeddings`: the output head gets its own tensor, a copy of the embeddings that it was tied to.

Tying (Press and Wolf, 2017) makes one matrix both read tokens and score them. The copy has the same bytes, so the
logits are the base's; from then on each matrix trains by itself.
"""

from __future__ import annotations

from typing import Literal

from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft
from surgeon.edits.embeddings import is_untied, untie
from surgeon.errors import BadInput, printable
from surgeon.operations.operation import Operation, Paper, TrainingDefaults


class UntieEmbeddings(Operation):
    """Give the output head its own tensor, a copy of the embeddings that it was tied to."""

    papers = (
        Paper(
            "press2017using",
            "Press, Ofir and Wolf, Lior",
            "Using the Output Embedding to Improve Language Models",
            2017,
            "1608.05859",
            "EACL",
        ),
    )
    training = TrainingDefaults("ours, no paper's: the new head alone", lr=1e-4)

    op: Literal["untie_embeddings"]

    def edit(self, draft: Draft, facts: None) -> OperationRecord:
        """Add the tensors that the head lacks, and set the config to an untied head."""
        if is_untied(draft):
            raise BadInput("an earlier operation of this plan unties the embeddings; once is enough")
        if not draft.anatomy.tied:
            raise BadInput(
                "the embeddings are untied already: the output head has a tensor of its own; leave this operation out"
            )
        lacking = untie(draft)
        made = ", ".join(f"{printable(name)} is a copy of {printable(source)}" for name, source in lacking.items())
        return OperationRecord(
            op=self.op,
            matched=made or "the head is stored beside the embeddings already, and stays as it is",
            claim=Claim("exact", "the head has the bytes that it had when it was tied"),
            trains="new",
        )
