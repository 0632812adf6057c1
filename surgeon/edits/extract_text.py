"""`extract_text`: the text tower of an image-text model becomes a causal model of its own.

Every tensor of the tower and the head is kept as bytes, under the name that the causal class uses; image towers are
left out. LLaVA (Liu et al., 2023) is an example of such a model.
"""

from __future__ import annotations

from typing import Literal

from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft
from surgeon.checkpoint.source import IMAGE_FILES
from surgeon.edits.text_tower import text_model
from surgeon.errors import BadInput, printable
from surgeon.operations.operation import Operation, Paper, TrainingDefaults
from surgeon.operations.prepare import Facts, OpenedBase, SideFile

# A chat template that only processors read, and the one that tokenizers read.
_PROCESSOR_TEMPLATE, _TEMPLATE = "chat_template.json", "chat_template.jinja"


class ExtractText(Operation):
    """Extract the text tower of an image-text model, in the causal class of transformers that holds it."""

    papers = (
        Paper(
            "liu2023visual",
            "Liu, Haotian and Li, Chunyuan and Wu, Qingyang and Lee, Yong Jae",
            "Visual Instruction Tuning",
            2023,
            "2304.08485",
            "NeurIPS",
        ),
    )
    training = TrainingDefaults("ours, no paper's: nothing is new", lr=1e-5)

    facts = Facts

    op: Literal["extract_text"]

    def prepare(self, base: OpenedBase) -> Facts:
        """Leave the side files for images out of the output, with a note; return facts that record them."""
        names = base.folder.side_files
        if left := [name for name in names if name in IMAGE_FILES]:
            base.notes.append(f"left behind, as they are for images: {', '.join(left)}")
            base.side_files.update(dict.fromkeys(left))
        if _PROCESSOR_TEMPLATE in names and _TEMPLATE not in names:
            base.notes.append(
                f"{_PROCESSOR_TEMPLATE} comes along, and processors alone read it: put its template into {_TEMPLATE}"
            )
        return Facts(side_files=dict.fromkeys(left, SideFile.of(None)))

    def edit(self, draft: Draft, facts: Facts | None) -> OperationRecord:
        """Set the causal class's config, and rename the tower's tensors as the class names them."""
        if draft.records:
            raise BadInput("the text is extracted by a plan of its own: apply the operations before it first")
        if draft.bank is not None or any(layer.grafts for layer in draft.layers):
            raise BadInput("the model carries grafts, which are of the image-text class; merge or revert them first")
        draft.converted, draft.renamed = text_model(draft.anatomy.derivation)
        anatomy = draft.anatomy
        held = [info.name for of in (anatomy.outer, *anatomy.layers, *anatomy.beyond) for info in of.values()]
        left = [name for name in held if name not in draft.renamed]
        return OperationRecord(
            op=self.op,
            matched=f"the text tower as {printable(draft.converted['architectures'][0])}, {len(draft.renamed)} tensors;"
            f" left behind: {len(left)} tensors ({printable(_beginnings(left))})",
            claim=Claim("exact", "on text every logit is the image-text model's"),
            trains="new",
        )


def _beginnings(names: list[str]) -> str:
    """Return the prefixes of tensors' names, which name their towers."""
    return ", ".join(
        dict.fromkeys(".".join(name.split(".")[: 2 if name.startswith("model.") else 1]) for name in names)
    )
