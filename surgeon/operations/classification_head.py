"""`classification_head`: a head for labels on an encoder without one. `surgeon train` adds it; no plan can name it.

Its values are random, so its outputs mean nothing before training; the base's tensors, also of an old head, are kept.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from surgeon.anatomy.heads import head_of, labelled
from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft
from surgeon.blueprint.grafts import recipe_of
from surgeon.errors import BadInput, printable
from surgeon.operations.operation import Operation


class ClassificationHead(Operation):
    """The tensors that transformers' text-classification class has besides the encoder, for the labels of some data."""

    op: Literal["classification_head"] = "classification_head"
    labels: Annotated[list[str], Field(min_length=2, description="names of the labels, by their numbers")]

    on_encoders = True

    def edit(self, draft: Draft, facts: None) -> OperationRecord:
        """Add the tensors that the checkpoint lacks, and set class and labels in the config.

        Raises BadInput for a decoder, and where the checkpoint has a head tensor of another shape.
        """
        if not draft.anatomy.family.encoder:
            raise BadInput(f"the base is a decoder ({draft.anatomy.family.model_type}); heads are made for encoders")
        outer = draft.anatomy.outer
        draft.config = labelled(draft.config, self.labels)
        dtype = draft.dtype_of(0)
        names = {*outer, *(info.name for layer in draft.anatomy.layers for info in layer.values())}
        births = head_of(draft.config, names).births
        for name, birth in births.items():
            if name not in outer:
                draft.set_outer(name, recipe_of(birth, f"operations[{draft.number}].{name}", dtype))
            elif tuple(outer[name].shape) != birth.shape:
                raise BadInput(
                    f"{printable(name)}: {list(outer[name].shape)}, and a head for {len(self.labels)} labels has it as"
                    f" {list(birth.shape)}, so it is another head's; take it out, or use a base without a head"
                )
        return OperationRecord(
            op=self.op,
            matched=f"a head for {len(self.labels)} labels, {len(births.keys() - outer.keys())} new tensors",
            claim=Claim("exact", "the base's own tensors stay, and no class but the new head's reads what is new"),
            trains="new",
        )
