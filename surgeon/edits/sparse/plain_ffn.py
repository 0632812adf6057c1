"""FFNs of plain matrices, which routed experts next to the model's own FFN can copy at birth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surgeon.anatomy.family import Part, Role
from surgeon.blueprint.draft import Draft
from surgeon.common.formatting import show
from surgeon.edits.sparse.dense import Mixture, Take
from surgeon.edits.sparse.target import Made
from surgeon.errors import BadInput, printable
from surgeon.grafts.composition import FFN
from surgeon.operations.selectors import LayerSelector
from surgeon.operations.sites import IN_SHARED, select_sites
from surgeon.runtime.routed_rules import ROUTED

_READING: tuple[Role, ...] = ("gate", "up")


@dataclass(frozen=True)
class PlainFFN:
    """An FFN of plain matrices; `reading` maps gate and up, in this order, to the rows of weight and bias (or None).

    `down` is the suffix of the matrix that writes, `width` the number of neurons.
    """

    reading: Mapping[Role, tuple[Take, Take | None]]
    down: str
    width: int

    @property
    def biased(self) -> bool:
        """Return whether all projections that read have biases."""
        return all(bias is not None for _, bias in self.reading.values())

    def settings(self, activation: str) -> dict[str, Any]:
        """Return the settings of a `routed_experts` entry that differ from the usual: no gate, biases, activation."""
        made: dict[str, Any] = {} if "gate" in self.reading else {"gated": False}
        made |= {"biased": True} if self.biased else {}
        return made | ({"activation": activation} if activation else {})


def dense_sites(draft: Draft, selector: LayerSelector) -> dict[int, PlainFFN]:
    """Return the layers that the selector matches, each with its FFN; for `all`, only layers with a plain FFN.

    Raises BadInput where another selector matches a layer without a plain FFN, or no layer has one.
    """
    sites = select_sites(draft, selector, FFN)
    found = {index: ffn for index in sites if (ffn := _plain_ffn(draft.kind_of(index).parts)) is not None}
    lacking = next((index for index in sites if index not in found), None)
    if lacking is None or (selector == "all" and found):
        return found
    if draft.anatomy.shared and not any(part.blocks for part in draft.kind_of(lacking).parts):
        raise BadInput(
            f"layer {lacking}: {IN_SHARED}, and experts begin as copies of a layer's own; use gated_adapters, or a"
            " dense model whose layers share none"
        )
    mixed = any(part.expert is not None for part in draft.kind_of(lacking).parts)
    why = (
        "is a mixture of experts already; use the dense original"
        if mixed
        else "has no matrices that are known as its up and down projections, of which experts could begin as copies"
    )
    raise BadInput(
        f"the FFN of layer {lacking} of this {printable(draft.anatomy.family.model_type)} {why}"
        + (f"; choose `layers` among {show(sorted(found))}" if found else "")
    )


def _plain_ffn(parts: tuple[Part, ...]) -> PlainFFN | None:
    """Return the FFN of a layer with these parts; None where it has experts, or its matrices are not known."""
    if any(part.expert is not None for part in parts):
        return None
    takes: dict[tuple[str, Role], Take] = {}
    for part in parts:
        begin = 0
        for role, rows in part.blocks:
            takes[part.kind, role] = Take(part.suffix, begin, begin + rows)
            begin += rows
    reading = {role: (take, takes.get(("bias", role))) for role in _READING if (take := takes.get(("weight", role)))}
    down = next((part for part in parts if part.kind == "weight" and ("down", part.shape[0]) in part.blocks), None)
    if down is None or "up" not in reading or any(t.stop - t.start != down.shape[1] for t, _ in reading.values()):
        return None
    return PlainFFN(reading, down.suffix, down.shape[1])


def routed_tensors(ffn: PlainFFN, mixture: Mixture, hidden: int) -> list[Made]:
    """Return the tensors of a layer's routed experts; each tensor holds all experts."""
    size = ffn.width // mixture.segments
    numbers = [expert % mixture.segments for expert in range(mixture.count)]

    def all_of(take: Take) -> tuple[Take, ...]:
        """Return the rows of all experts, each its segment."""
        return tuple(take.part(number, mixture.segments) for number in numbers)

    made = [Made(f"{ROUTED}router", (mixture.count, hidden), "router")]
    inner = (mixture.count, size, hidden)
    made += [Made(f"{ROUTED}{role}_proj", inner, "inner", all_of(take)) for role, (take, _) in ffn.reading.items()]
    made += [
        Made(f"{ROUTED}{role}_bias", (mixture.count, size), "copied", all_of(bias))
        for role, (_, bias) in ffn.reading.items()
        if bias is not None and ffn.biased
    ]
    down = Take(ffn.down, 0, hidden)
    return [*made, Made(f"{ROUTED}down_proj", (mixture.count, hidden, size), "down", (down,) * mixture.count)]
