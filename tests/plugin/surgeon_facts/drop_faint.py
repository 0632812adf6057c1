"""`drop_faint`: the layers go whose weights are smallest where they write to the residual stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft
from surgeon.common.formatting import show_layers
from surgeon.errors import BadInput
from surgeon.operations.operation import Operation, TrainingDefaults
from surgeon.operations.prepare import Facts, OpenedBase


class Loudness(Facts):
    """The layers of the base that go, and the largest number in what each layer writes by."""

    faint: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    loudest: list[float]


class DropFaint(Operation):
    """Take out the layers whose largest weight among those that write to the stream is smallest."""

    training: ClassVar[TrainingDefaults] = TrainingDefaults("a guess", lr=1e-5)
    examples: ClassVar[tuple[Mapping[str, object], ...]] = ({"count": 1},)
    facts: ClassVar[type[Facts] | None] = Loudness

    op: Literal["drop_faint"]
    count: Annotated[int, Field(ge=1, description="how many layers go")] = 1

    def prepare(self, base: OpenedBase) -> Loudness:
        """Read what every layer writes by."""
        base.need_weights("how loud each layer is")
        import torch

        from surgeon.models.load import stored_dtype

        loudest: list[float] = []
        for layer, tensors in enumerate(base.anatomy.layers):
            writing = base.anatomy.kinds[base.anatomy.kind_of[layer]].silence
            infos = [tensors[suffix] for suffix in writing]
            values = [torch.frombuffer(base.folder.read(i.name), dtype=stored_dtype(i.dtype)) for i in infos]
            loudest.append(max(float(value.abs().max()) for value in values))
        order = sorted(range(len(loudest)), key=lambda layer: (loudest[layer], layer))
        base.notes.append(f"loudness of layers was measured: {min(loudest):.3g} to {max(loudest):.3g}")
        return Loudness(faint=sorted(order[: self.count]), loudest=loudest)

    def edit(self, draft: Draft, facts: Loudness | None) -> OperationRecord:
        """Take the faint layers out, wherever the operations before put them."""
        if facts is None or len(facts.faint) != self.count:
            raise BadInput("which layers are faint is not known: it is measured on the base's own weights")
        places = [index for index, layer in enumerate(draft.layers) if layer.base in facts.faint]
        if len(places) != self.count or len(places) >= len(draft.layers):
            raise BadInput(f"{show_layers(facts.faint)}: not so many layers of the base are there to take out")
        draft.drop(places, operation=draft.number)
        matched = f"{show_layers(facts.faint)} of {len(facts.loudest)}, the faintest"
        return OperationRecord(self.op, matched, Claim("none", "what the layers added is gone"), trains="all")
