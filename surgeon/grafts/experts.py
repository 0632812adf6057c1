"""PMoE's experts for planners: the checks of their entries, and their initial values."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from surgeon.grafts.checks import check_layers, loss_weight
from surgeon.grafts.kinds import Kind, KnownGraft, linear_birth, low_rank_births, without_numbers
from surgeon.runtime.births import Birth, Fill
from surgeon.runtime.experts_rules import (
    ROUTER,
    ExpertRules,
    Experts,
    ExpertsSpec,
    RouterSlotSpec,
    RouterSpec,
    SlotSpec,
    slot_name,
)
from surgeon.runtime.rules import BRANCH, Surgery

_SLOT = re.compile(r"(?P<target>.+)\.slots\.(?P<slot>0|[1-9][0-9]{0,5})\.lora_[AB]")
_COLUMN = re.compile(r"expert_router\.slots\.(?P<slot>0|[1-9][0-9]{0,5})\.(weight|mass)")


class _SlotKind(Kind):
    """A kind whose entries hold several slots, each frozen separately."""

    def kept(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entry without layer numbers and with every slot frozen."""
        kept = without_numbers(entry)
        return kept | {"slots": [slot | {"frozen": True} for slot in kept["slots"]]}

    def thawed(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of the entry with no slot frozen."""
        thawed = super().thawed(entry)
        slots = [{key: value for key, value in slot.items() if key != "frozen"} for slot in thawed["slots"]]
        return thawed | {"slots": slots}


class ExpertsKind(_SlotKind):
    """LoRA slots at a layer's linear modules."""

    key = "experts"
    in_twin = "copied"

    def text(self, entry: Mapping[str, Any], where: str = "") -> str:
        """Return a text like `slot 1 of rank 4 at q_proj, v_proj`."""
        return ", ".join(_slot_text(slot, routed=entry["routed"]) for slot in entry["slots"]) + where

    def sign(self, entry: Mapping[str, Any]) -> str:
        """Return L for the shared LoRA, S with their numbers for slots."""
        if not entry["routed"]:
            return "L"
        numbers = [slot["slot"] for slot in entry["slots"]]
        return f"S{numbers[0]}" if len(numbers) == 1 else f"S{numbers[0]}–{numbers[-1]}"

    def claims(self, suffix: str) -> bool:
        """Return whether the tensor is A or B of a slot, also in a twin."""
        return not suffix.startswith(ROUTER) and _SLOT.fullmatch(suffix.removeprefix(BRANCH)) is not None

    def owns(self, entry: Mapping[str, Any], suffix: str) -> bool:
        """Return whether the tensor is A or B of one of the entry's slots at one of its targets."""
        found = _SLOT.fullmatch(suffix.removeprefix(BRANCH)) if self.claims(suffix) else None
        if found is None:
            return False
        held = next((slot for slot in entry["slots"] if slot["slot"] == int(found["slot"])), None)
        return held is not None and found["target"] in held["targets"]


def _slot_text(slot: Mapping[str, Any], *, routed: bool) -> str:
    """Return a text like `slot 1 of rank 4 at q_proj, v_proj`; `shared LoRA` where it is not `routed`."""
    name = f"slot {slot['slot']}" if routed else "shared LoRA"
    targets = ", ".join(target.rpartition(".")[2] for target in slot["targets"])
    ranks = sorted({slot.get("ranks", {}).get(target, slot["rank"]) for target in slot["targets"]})
    rank = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
    return f"{name} of rank {rank} at {targets}"


class RouterKind(_SlotKind):
    """Columns of the router, which reads the layer's input."""

    key = "expert_router"
    mark = "R"

    def text(self, entry: Mapping[str, Any], where: str = "") -> str:
        """Return a text like `router column 0, column 1`."""
        return "router " + ", ".join(f"column {slot['slot']}" for slot in entry["slots"])

    def claims(self, suffix: str) -> bool:
        """Return whether the tensor is a column, or a group's mass."""
        return _COLUMN.fullmatch(suffix) is not None

    def owns(self, entry: Mapping[str, Any], suffix: str) -> bool:
        """Return whether the tensor belongs to the column of one of the entry's slots."""
        found = _COLUMN.fullmatch(suffix)
        return found is not None and any(slot["slot"] == int(found["slot"]) for slot in entry["slots"])


class KnownExperts(KnownGraft, ExpertRules):
    """Experts and their router, as planners use them."""

    kinds = (ExpertsKind(), RouterKind())
    part = "surgeon.runtime.experts"
    module = "ExpertGraft"
    roles = ()

    def check(self, surgery: Surgery, config: Any) -> None:
        """Check that entries are consistent. Raises ValueError.

        The router must not be above the experts that it weighs, and must have a column for every slot.
        """
        found: Experts = surgery.of[self.name]
        loss_weight("router_loss task_id", found.router_loss.task_id)
        for slot in (slot for experts in found.by_layer.values() for slot in experts.slots):
            _check(slot)
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


def _check(slot: SlotSpec) -> None:
    """Raise ValueError for settings that no slot can have."""
    for rank in (slot.rank, *slot.ranks.values()):
        if rank < 1:
            raise ValueError(f"config.surgery: slot {slot.slot} has rank {rank}; at least 1 is needed")
    for scale in (slot.scale, *slot.scales.values()):
        if not math.isfinite(scale):
            raise ValueError(f"config.surgery: slot {slot.slot} has scale {scale}; a finite number is needed")
    strangers = sorted({*slot.ranks, *slot.scales} - set(slot.targets))
    if strangers:
        raise ValueError(f"config.surgery: slot {slot.slot} has a rank or scale at {strangers}, no targets of it")
    if not slot.targets:
        raise ValueError(f"config.surgery: slot {slot.slot} targets no module")
    if not 0.0 <= slot.dropout < 1.0:
        raise ValueError(f"config.surgery: slot {slot.slot} has dropout {slot.dropout}; it must lie in [0, 1)")


def _check_columns(router: RouterSpec) -> None:
    """Raise ValueError where the router's slots or groups are not numbered from 0 up without gaps."""
    numbers = [column.slot for column in router.slots]
    if numbers != list(range(len(numbers))):
        raise ValueError(f"config.surgery: expert_router has columns for slots {numbers}; they must run from 0 up")
    groups = [column.group for column in router.slots]
    if groups != sorted(groups) or set(groups) != set(range(groups[-1] + 1)):
        raise ValueError(f"config.surgery: expert_router has groups {groups}; they must run from 0 up, in order")


def _check_slot(router: RouterSpec | None, experts: ExpertsSpec, slot: SlotSpec, home: int) -> None:
    """Raise ValueError where the router is missing, is above layer `home`, or has no column for a routed slot."""
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


def slot_births(slot: SlotSpec, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Birth]:
    """Return a slot's initial tensors in a layer, for the shapes (out × in) of the layer's modules."""
    tensors: dict[str, Birth] = {}
    for target in slot.targets:
        rows, columns = shapes[target]
        low_rank = low_rank_births(slot.at(target).rank, columns, rows)
        tensors |= {f"{slot_name(target, slot.slot)}.{name}": birth for name, birth in low_rank.items()}
    return tensors


def column_births(router: RouterSpec, column: RouterSlotSpec, width: int) -> dict[str, Birth]:
    """Return a column's initial tensors; a mass is zero."""
    mass: dict[str, Birth] = {"mass": Fill((1,))} if router.enters_with(column) else {}
    return {"weight": linear_birth(1, width)} | mass
