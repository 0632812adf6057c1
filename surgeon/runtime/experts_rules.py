"""PMoE's experts (Jung and Kim, section 3.1) in `config.surgery`:

    "experts": [{"layer": 0, "routed": false, "slots": [{"slot": 0, "rank": 4, "targets": ["self_attn.q_proj"]}]},
                {"layer": 6, "routed": true, "slots": [{"slot": 0, …}, {"slot": 1, …}]}],
    "expert_router": [{"layer": 6, "slots": [{"slot": 0}, {"slot": 1}]}],
    "router_loss": {"task_id": 0.0}

The `layer` of experts may be in the trunk or in the tail. Several entries may have the same layer: each surgery that
added slots wrote its own entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from .rules import GraftRules, Surgery, built

# The graft's name.
EXPERTS = "experts"
ROUTER = "expert_router."


@dataclass(frozen=True)
class SlotSpec:
    """Slot number `slot` of PMoE in one layer: a LoRA of `rank` at the layer's modules `targets`.

    Its product is multiplied by `scale` (LoRA's alpha / rank). Slots of one `group` are computed as one product, and
    each group has its own, so that adding a group never changes what earlier groups compute, to the bit. `ranks` and
    `scales` list the targets where the LoRA has another rank or scale.
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
        """Return the slot's settings at one of its targets: the rank and scale that apply there."""
        return replace(
            self,
            targets=(target,),
            rank=self.ranks.get(target, self.rank),
            scale=self.scales.get(target, self.scale),
            ranks={},
            scales={},
        )


def slot_name(target: str, slot: int) -> str:
    """Return the path of a slot's module in its layer."""
    return f"{target}.slots.{slot}"


@dataclass(frozen=True)
class ExpertsSpec:
    """The slots of one layer; `routed`: the router's distribution weighs them (layers deeper than τ)."""

    layer: int
    routed: bool
    slots: tuple[SlotSpec, ...]


@dataclass(frozen=True)
class RouterSlotSpec:
    """A column of the router, for slot `slot`. In every group but group 0 the first column holds the group's mass."""

    slot: int
    group: int = 0
    frozen: bool = False


@dataclass(frozen=True)
class RouterSpec:
    """PMoE's router, which reads h_τ, the input of `layer`."""

    layer: int
    slots: tuple[RouterSlotSpec, ...]

    def enters_with(self, column: RouterSlotSpec) -> bool:
        """Return whether a column holds its group's mass: it is the first of its group, and the group is not 0."""
        first = next(other for other in self.slots if other.group == column.group)
        return column.group > 0 and column == first


@dataclass(frozen=True)
class RouterLossSpec:
    """The weight `task_id` of the loss −log G_k for tokens of a known task (PMoE, Eq. 7); 0 is off."""

    task_id: float = 0.0


@dataclass(frozen=True)
class Experts:
    """The slots of a model by layer of trunk or tail, their router, and its loss."""

    by_layer: Mapping[int, ExpertsSpec] = field(default_factory=dict)
    router: RouterSpec | None = None
    router_loss: RouterLossSpec = field(default_factory=RouterLossSpec)


class ExpertRules(GraftRules):
    """The rules of PMoE's experts and their router."""

    name = EXPERTS
    keys = ("experts", "expert_router", "router_loss")
    losses: ClassVar[Mapping[str, str]] = {"router_loss": "the experts' router against the tasks"}

    def read(self, raw: Mapping[str, Any]) -> Experts:
        """Return slots by layer and the router, with entries of one layer joined, and the weight of its loss.

        Raises ValueError for entries of one layer that are both routed and not, and for routers in several layers.
        """
        return Experts(
            _joined([_experts(entry) for entry in raw.get("experts", ())]),
            _router([_columns(entry) for entry in raw.get("expert_router", ())]),
            built(RouterLossSpec, raw.get("router_loss") or {}, "router_loss"),
        )

    def trains(self, surgery: Surgery) -> list[str]:
        """Return the name prefixes of the slots and router columns that are not frozen."""
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
        """Return whether the router's loss has a weight above 0."""
        found: Experts = surgery.of[self.name]
        return found.router_loss.task_id > 0

    def crosses(self, surgery: Surgery) -> int | None:
        """Return the router's layer, whose distribution deeper layers use; None: there is no router."""
        found: Experts = surgery.of[self.name]
        return None if found.router is None else found.router.layer


def _experts(entry: Mapping[str, Any]) -> ExpertsSpec:
    """Return the slots of an entry of `experts`. Raises ValueError for a key that is not known."""
    slots = tuple(
        built(SlotSpec, dict(slot) | {"targets": tuple(slot.get("targets", ()))}, "slot")
        for slot in entry.get("slots", ())
    )
    return built(ExpertsSpec, dict(entry) | {"slots": slots}, "experts")


def _columns(entry: Mapping[str, Any]) -> RouterSpec:
    """Return the columns of an entry of `expert_router`. Raises ValueError for a key that is not known."""
    slots = tuple(built(RouterSlotSpec, slot, "expert_router slot") for slot in entry.get("slots", ()))
    return built(RouterSpec, dict(entry) | {"slots": slots}, "expert_router")


def _joined(entries: list[ExpertsSpec]) -> dict[int, ExpertsSpec]:
    """Join the entries of each layer into one, with the slots in order; ValueError where their `routed` differs."""
    joined: dict[int, ExpertsSpec] = {}
    for entry in entries:
        earlier = joined.get(entry.layer)
        if earlier is not None and earlier.routed != entry.routed:
            raise ValueError(f"config.surgery: experts of layer {entry.layer} are both routed and not")
        slots = entry.slots if earlier is None else earlier.slots + entry.slots
        joined[entry.layer] = ExpertsSpec(entry.layer, entry.routed, slots)
    return joined


def _router(entries: list[RouterSpec]) -> RouterSpec | None:
    """Join the router's entries; None without entries. Raises ValueError where they name several layers."""
    if not entries:
        return None
    layers = {entry.layer for entry in entries}
    if len(layers) > 1:
        raise ValueError(f"config.surgery: expert_router stands at layers {sorted(layers)}; a model has one")
    return RouterSpec(entries[0].layer, tuple(slot for entry in entries for slot in entry.slots))
