"""PMoE's experts (Jung and Kim, section 3.1): what `config.surgery` says of them, and what they are born with.

    "experts": [{"layer": 0, "routed": false, "slots": [{"slot": 0, "rank": 4, "targets": ["self_attn.q_proj"]}]},
                {"layer": 6, "routed": true, "slots": [{"slot": 0, …}, {"slot": 1, …}]}],
    "expert_router": [{"layer": 6, "slots": [{"slot": 0}, {"slot": 1}]}],
    "router_loss": {"task_id": 0.0}

The `layer` of experts may be of the trunk or of the tail. Several entries may name one layer: each surgery that added
slots has its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from .births import Birth, Fill, linear_birth, low_rank_births
from .rules import (
    BRANCH,
    GraftRules,
    Kind,
    Surgery,
    built,
    check_layers,
    loss_weight,
    without_numbers,
)

# What the graft is called.
EXPERTS = "experts"
ROUTER = "expert_router."
_SLOT = re.compile(r"(?P<target>.+)\.slots\.(?P<slot>0|[1-9][0-9]{0,5})\.lora_[AB]")
_COLUMN = re.compile(r"expert_router\.slots\.(?P<slot>0|[1-9][0-9]{0,5})\.(weight|mass)")


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

    def check(self) -> None:
        """ValueError for what no slot is."""
        for rank in (self.rank, *self.ranks.values()):
            if rank < 1:
                raise ValueError(f"config.surgery: slot {self.slot} has rank {rank}; at least 1 is needed")
        for scale in (self.scale, *self.scales.values()):
            if not math.isfinite(scale):
                raise ValueError(f"config.surgery: slot {self.slot} has scale {scale}; a finite number is needed")
        strangers = sorted({*self.ranks, *self.scales} - set(self.targets))
        if strangers:
            raise ValueError(f"config.surgery: slot {self.slot} has a rank or scale at {strangers}, no targets of it")
        if not self.targets:
            raise ValueError(f"config.surgery: slot {self.slot} targets no module")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"config.surgery: slot {self.slot} has dropout {self.dropout}; it must lie in [0, 1)")

    def births(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Birth]:
        """Its tensors in a layer at birth, for the shapes (out × in) of the layer's modules."""
        tensors: dict[str, Birth] = {}
        for target in self.targets:
            rows, columns = shapes[target]
            low_rank = low_rank_births(self.at(target).rank, columns, rows)
            tensors |= {f"{slot_name(target, self.slot)}.{name}": birth for name, birth in low_rank.items()}
        return tensors


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

    def column_births(self, column: RouterSlotSpec, width: int) -> dict[str, Birth]:
        """A column's tensors at birth; a mass is zero."""
        mass: dict[str, Birth] = {"mass": Fill((1,))} if self.enters_with(column) else {}
        return {"weight": linear_birth(1, width)} | mass


@dataclass(frozen=True)
class RouterLossSpec:
    """Weight of −log G_k for tokens of a known task (PMoE, Eq. 7); 0 is off."""

    task_id: float = 0.0

    def check(self) -> None:
        """ValueError for what is no weight."""
        loss_weight("router_loss task_id", self.task_id)


@dataclass(frozen=True)
class Experts:
    """The slots of a model by layer of trunk or tail, their router, and its loss."""

    by_layer: Mapping[int, ExpertsSpec] = field(default_factory=dict)
    router: RouterSpec | None = None
    router_loss: RouterLossSpec = field(default_factory=RouterLossSpec)


class _SlotKind(Kind):
    """Entries that hold several slots, each frozen by itself."""

    def kept(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Frozen slot by slot."""
        kept = without_numbers(entry)
        return kept | {"slots": [slot | {"frozen": True} for slot in kept["slots"]]}

    def thawed(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Thawed slot by slot."""
        thawed = super().thawed(entry)
        slots = [{key: value for key, value in slot.items() if key != "frozen"} for slot in thawed["slots"]]
        return thawed | {"slots": slots}


class ExpertsKind(_SlotKind):
    """LoRA slots at a layer's linear modules."""

    key = "experts"
    in_twin = "copied"

    def text(self, entry: Mapping[str, Any], where: str = "") -> str:
        """`slot 1 of rank 4 at q_proj, v_proj`."""
        return ", ".join(_slot_text(slot, routed=entry["routed"]) for slot in entry["slots"]) + where

    def sign(self, entry: Mapping[str, Any]) -> str:
        """L for the shared LoRA, S and their numbers for slots."""
        if not entry["routed"]:
            return "L"
        numbers = [slot["slot"] for slot in entry["slots"]]
        return f"S{numbers[0]}" if len(numbers) == 1 else f"S{numbers[0]}–{numbers[-1]}"

    def claims(self, suffix: str) -> bool:
        """A or B of a slot, in a twin too."""
        return not suffix.startswith(ROUTER) and _SLOT.fullmatch(suffix.removeprefix(BRANCH)) is not None

    def owns(self, entry: Mapping[str, Any], suffix: str) -> bool:
        """A or B of one of the entry's slots at one of its targets."""
        found = _SLOT.fullmatch(suffix.removeprefix(BRANCH)) if self.claims(suffix) else None
        if found is None:
            return False
        held = next((slot for slot in entry["slots"] if slot["slot"] == int(found["slot"])), None)
        return held is not None and found["target"] in held["targets"]


def _slot_text(slot: Mapping[str, Any], *, routed: bool) -> str:
    name = f"slot {slot['slot']}" if routed else "shared LoRA"
    targets = ", ".join(target.rpartition(".")[2] for target in slot["targets"])
    ranks = sorted({slot.get("ranks", {}).get(target, slot["rank"]) for target in slot["targets"]})
    rank = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
    return f"{name} of rank {rank} at {targets}"


class RouterKind(_SlotKind):
    """Columns of the router, which reads what goes into the layer."""

    key = "expert_router"
    mark = "R"

    def text(self, entry: Mapping[str, Any], where: str = "") -> str:
        """`router column 0, column 1`."""
        return "router " + ", ".join(f"column {slot['slot']}" for slot in entry["slots"])

    def claims(self, suffix: str) -> bool:
        """A column, or a group's mass."""
        return _COLUMN.fullmatch(suffix) is not None

    def owns(self, entry: Mapping[str, Any], suffix: str) -> bool:
        """Those of the entry's slots."""
        found = _COLUMN.fullmatch(suffix)
        return found is not None and any(slot["slot"] == int(found["slot"]) for slot in entry["slots"])


class ExpertRules(GraftRules):
    """Experts and their router."""

    name = EXPERTS
    keys = ("experts", "expert_router", "router_loss")
    kinds = (ExpertsKind(), RouterKind())
    losses: ClassVar[Mapping[str, str]] = {"router_loss": "the experts' router against the tasks"}
    part = "surgeon.runtime.experts"
    module = "ExpertGraft"
    roles = ()
    brings = ("ROUTES",)

    def read(self, raw: Mapping[str, Any]) -> Experts:
        """Slots by layer, entries of one layer joined; the router's columns joined."""
        return Experts(
            _joined([_experts(entry) for entry in raw.get("experts", ())]),
            _router([_columns(entry) for entry in raw.get("expert_router", ())]),
            built(RouterLossSpec, raw.get("router_loss") or {}, "router_loss"),
        )

    def check(self, surgery: Surgery, config: Any) -> None:
        """Entries hold together; the router stands below what it weighs and has a column for every slot."""
        found: Experts = surgery.of[self.name]
        found.router_loss.check()
        for slot in (slot for experts in found.by_layer.values() for slot in experts.slots):
            slot.check()
        check_layers(found.by_layer, surgery.layers, "experts")
        if found.router_loss.task_id > 0 and found.router is None:
            raise ValueError("config.surgery: router_loss task_id needs an expert_router, and there is none")
        if found.router is not None:
            check_layers([found.router.layer], surgery.trunk_layers, "expert_router")
            _check_columns(found.router)
        for experts in found.by_layer.values():
            numbers = [slot.slot for slot in experts.slots]
            if numbers != sorted(set(numbers)):
                raise ValueError(f"config.surgery: experts of layer {experts.layer} have slots {numbers}, not in order")
            for slot in experts.slots if experts.routed else ():
                _check_slot(found.router, experts, slot, surgery.homes.get(experts.layer, experts.layer))

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


def _check_columns(router: RouterSpec) -> None:
    numbers = [column.slot for column in router.slots]
    if numbers != list(range(len(numbers))):
        raise ValueError(f"config.surgery: expert_router has columns for slots {numbers}; they must run from 0 up")
    groups = [column.group for column in router.slots]
    if groups != sorted(groups) or set(groups) != set(range(groups[-1] + 1)):
        raise ValueError(f"config.surgery: expert_router has groups {groups}; they must run from 0 up, in order")


def _check_slot(router: RouterSpec | None, experts: ExpertsSpec, slot: SlotSpec, home: int) -> None:
    if router is None or home < router.layer:
        raise ValueError(
            f"config.surgery: experts of layer {experts.layer} are routed, and no expert_router lies below"
        )
    column = next((column for column in router.slots if column.slot == slot.slot), None)
    if column is None or column.group != slot.group:
        raise ValueError(
            f"config.surgery: slot {slot.slot} of layer {experts.layer}, group {slot.group}, has no such column in "
            "expert_router"
        )


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
