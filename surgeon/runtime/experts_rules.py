"""PMoE's experts (Jung and Kim, section 3.1): what `config.surgery` says of them.

    "experts": [{"layer": 0, "routed": false, "slots": [{"slot": 0, "rank": 4, "targets": ["self_attn.q_proj"]}]},
                {"layer": 6, "routed": true, "slots": [{"slot": 0, …}, {"slot": 1, …}]}],
    "expert_router": [{"layer": 6, "slots": [{"slot": 0}, {"slot": 1}]}],
    "router_loss": {"task_id": 0.0}

The `layer` of experts may be of the trunk or of the tail. Several entries may name one layer: each surgery that added
slots has its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from .rules import GraftRules, Surgery, built

# What the graft is called.
EXPERTS = "experts"
ROUTER = "expert_router."


@dataclass(frozen=True)
class SlotSpec:
    """Slot `slot` of PMoE in one layer: a LoRA of `rank` at the layer's modules `targets`.

    Its product counts times `scale` (LoRA's alpha / rank). Slots of one `group` are computed as one product; those of
    another group by themselves, so that what earlier groups compute never changes, to the bit, when one is added.
    `ranks` and `scales` name the targets where the LoRA is of another rank or counts differently.
    """

    slot: int
    rank: int
    targets: tuple[str, ...]
    scale: float = 1.0
    dropout: float = 0.0
    group: int = 0
    frozen: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)
    scales: Mapping[str, float] = field(default_factory=dict)

    def at(self, target: str) -> SlotSpec:
        """The slot as it is at one of its targets."""
        return replace(
            self,
            targets=(target,),
            rank=self.ranks.get(target, self.rank),
            scale=self.scales.get(target, self.scale),
            ranks={},
            scales={},
        )


def slot_name(target: str, slot: int) -> str:
    """Where a slot stands in its layer."""
    return f"{target}.slots.{slot}"


@dataclass(frozen=True)
class ExpertsSpec:
    """The slots of one layer; `routed` says that the router's distribution weighs them (layers above τ)."""

    layer: int
    routed: bool
    slots: tuple[SlotSpec, ...]


@dataclass(frozen=True)
class RouterSlotSpec:
    """One column of the router. The first of a group after the first holds the group's mass."""

    slot: int
    group: int = 0
    frozen: bool = False


@dataclass(frozen=True)
class RouterSpec:
    """PMoE's router, which reads what goes into `layer`: h_τ."""

    layer: int
    slots: tuple[RouterSlotSpec, ...]

    def enters_with(self, column: RouterSlotSpec) -> bool:
        """Whether a column holds the mass by which a group after the first enters."""
        first = next(other for other in self.slots if other.group == column.group)
        return column.group > 0 and column == first


@dataclass(frozen=True)
class RouterLossSpec:
    """Weight of −log G_k for tokens of a known task (PMoE, Eq. 7); 0 is off."""

    task_id: float = 0.0


@dataclass(frozen=True)
class Experts:
    """The slots of a model by layer of trunk or tail, their router, and its loss."""

    by_layer: Mapping[int, ExpertsSpec] = field(default_factory=dict)
    router: RouterSpec | None = None
    router_loss: RouterLossSpec = field(default_factory=RouterLossSpec)


class ExpertRules(GraftRules):
    """Experts and their router."""

    name = EXPERTS
    keys = ("experts", "expert_router", "router_loss")
    losses: ClassVar[Mapping[str, str]] = {"router_loss": "the experts' router against the tasks"}

    def read(self, raw: Mapping[str, Any]) -> Experts:
        """Slots by layer, entries of one layer joined; the router's columns joined."""
        return Experts(
            _joined([_experts(entry) for entry in raw.get("experts", ())]),
            _router([_columns(entry) for entry in raw.get("expert_router", ())]),
            built(RouterLossSpec, raw.get("router_loss") or {}, "router_loss"),
        )

    def trains(self, surgery: Surgery) -> list[str]:
        """Slots and columns that are not frozen."""
        found: Experts = surgery.of[self.name]
        owners = [
            f"layers.{experts.layer}.{slot_name(target, slot.slot)}."
            for experts in found.by_layer.values()
            for slot in experts.slots
            if not slot.frozen
            for target in slot.targets
        ]
        if found.router is not None:
            columns = [column for column in found.router.slots if not column.frozen]
            owners += [f"layers.{found.router.layer}.{ROUTER}slots.{column.slot}." for column in columns]
        return owners

    def needs_domains(self, surgery: Surgery) -> bool:
        """Whether the router's loss has a weight."""
        found: Experts = surgery.of[self.name]
        return found.router_loss.task_id > 0

    def crosses(self, surgery: Surgery) -> int | None:
        """The router's layer, whose distribution does."""
        found: Experts = surgery.of[self.name]
        return None if found.router is None else found.router.layer


def _experts(entry: Mapping[str, Any]) -> ExpertsSpec:
    slots = tuple(
        built(SlotSpec, dict(slot) | {"targets": tuple(slot.get("targets", ()))}, "slot")
        for slot in entry.get("slots", ())
    )
    return built(ExpertsSpec, dict(entry) | {"slots": slots}, "experts")


def _columns(entry: Mapping[str, Any]) -> RouterSpec:
    slots = tuple(built(RouterSlotSpec, slot, "expert_router slot") for slot in entry.get("slots", ()))
    return built(RouterSpec, dict(entry) | {"slots": slots}, "expert_router")


def _joined(entries: list[ExpertsSpec]) -> dict[int, ExpertsSpec]:
    """Entries of one layer as one, slots in order."""
    joined: dict[int, ExpertsSpec] = {}
    for entry in entries:
        earlier = joined.get(entry.layer)
        if earlier is not None and earlier.routed != entry.routed:
            raise ValueError(f"config.surgery: experts of layer {entry.layer} are both routed and not")
        slots = entry.slots if earlier is None else earlier.slots + entry.slots
        joined[entry.layer] = ExpertsSpec(entry.layer, entry.routed, slots)
    return joined


def _router(entries: list[RouterSpec]) -> RouterSpec | None:
    if not entries:
        return None
    layers = {entry.layer for entry in entries}
    if len(layers) > 1:
        raise ValueError(f"config.surgery: expert_router stands at layers {sorted(layers)}; a model has one")
    return RouterSpec(entries[0].layer, tuple(slot for entry in entries for slot in entry.slots))
