"""`insert_clipped`: a new layer, a copy of the one below with its matrices clipped softly, silent at birth."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from surgeon_scale.recipe import Clipped

from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft, silence
from surgeon.blueprint.recipes import Recipe
from surgeon.operations.operation import Operation, TrainingDefaults


class InsertClipped(Operation):
    """A layer above another, made of that one by a recipe of this package."""

    training: ClassVar[TrainingDefaults] = TrainingDefaults("a guess", lr=1e-3)

    op: Literal["insert_clipped"]
    after: Annotated[int, Field(ge=0, description="the layer below the new one")]
    limit: Annotated[float, Field(gt=0, description="no number of the new layer's matrices is larger")] = 0.01

    def edit(self, draft: Draft, facts: None) -> OperationRecord:
        """Insert the layer."""
        made = draft.copy_of(self.after, operation=draft.number, opened=True)
        made.sources, made.init = (self.after,), "clipped, zero-init"
        clipped: dict[str, Recipe] = {
            suffix: Clipped(recipe, self.limit) if len(recipe.shape) == 2 else recipe
            for suffix, recipe in made.tensors.items()
        }
        made.tensors = silence(clipped, draft.kind_of(self.after).opened)
        draft.insert({self.after: [made]})
        claim = Claim("exact", "the new layer adds exactly zero")
        return OperationRecord(self.op, f"a clipped layer after {self.after}", claim, trains="new")
