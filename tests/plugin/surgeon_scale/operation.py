"""`scale_ffn`: a learned scale of what the FFN of chosen layers puts out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from surgeon_scale.rules import SCALE, ScaleSpec

from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft
from surgeon.blueprint.grafts import Graft, recipes_of
from surgeon.common.formatting import show
from surgeon.operations.operation import Legend, Operation, TrainingDefaults
from surgeon.operations.selectors import LayerSelector, select_layers


class ScaleFeedForward(Operation):
    """A learned scale of the FFN's output in chosen layers."""

    training: ClassVar[TrainingDefaults] = TrainingDefaults("a guess", lr=1e-3)
    grafts: ClassVar[tuple[str, ...]] = ("scales",)
    legend: ClassVar[Mapping[str, Legend]] = {"F": Legend("learned scale of the FFN", 4)}

    op: Literal["scale_ffn"]
    layers: Annotated[LayerSelector, Field(description="the layers that get a scale")] = "all"

    def edit(self, draft: Draft, facts: None) -> OperationRecord:
        """Attach the scales."""
        number = draft.number
        layers = select_layers(self.layers, len(draft.layers))
        for layer in layers:
            home = draft.layers[layer]
            dtype = home.tensors[draft.anatomy.parts[0].suffix].dtype
            births = ScaleSpec(layer).births(draft.anatomy.sizes.hidden)
            tensors = recipes_of(births, SCALE, f"operations[{number}].layer[{layer}].", dtype)
            home.grafts.append(Graft("scales", {}, tensors, number))
        claim = Claim("exact", "every scale is 1")
        return OperationRecord(self.op, f"scales at layers {show(layers)}", claim, trains="new")
