"""What `config.surgery` says: which grafts stand where. Plain data, checked when it is read.

    {"trunk_layers": 8,
     "control": [{"layer": 3, "branch": 8,
                  "interpolator": {"kind": "lerp", "alpha": 0.5, "inference_alpha": null, "learnable": false},
                  "divergence": {"kind": "mse", "weight": 1.0}}],
     "adapters": [{"layer": 0, "size": 64, "gate": "relu", "init": "low_variance"}],
     "local_loss": {"l1": 0.01, "cross_entropy": 0.0},
     "experts": [{"layer": 0, "routed": false, "slots": [{"slot": 0, "rank": 4, "targets": ["self_attn.q_proj"]}]},
                 {"layer": 6, "routed": true, "slots": [{"slot": 0, …}, {"slot": 1, …}]}],
     "expert_router": [{"layer": 6, "slots": [{"slot": 0}, {"slot": 1}]}],
     "router_loss": {"task_id": 0.0},
     "control_states": [{"layer": 0, "sites": ["attention", "ffn"]}],
     "mixture": {"rank": 256, "top_k": 1, "alpha": 0.95, …},
     "new_layers": []}

Layers 0 … trunk_layers - 1 are the trunk; every `branch` is a layer of the tail, which exists so that caches
and masks are allocated for it, and stands at run time at `layers[layer].expanded`. The `layer` of an adapter or of
experts may be of the trunk or of the tail. Several entries of `experts` and `expert_router` may name one layer: each
surgery that added slots has its own. `new_layers` are trunk layers that a surgery inserted whole. A graft marked
`frozen` belongs to an earlier surgery and does not train.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .specs import (
    AdapterSpec,
    ControlSpec,
    DivergenceSpec,
    ExpertsSpec,
    InterpolatorSpec,
    LocalLossSpec,
    MixtureSpec,
    RouterLossSpec,
    RouterSlotSpec,
    RouterSpec,
    SlotSpec,
    StatesSpec,
)

KEYS = (
    "trunk_layers",
    "control",
    "adapters",
    "local_loss",
    "experts",
    "expert_router",
    "router_loss",
    "control_states",
    "mixture",
    "new_layers",
)


@dataclass(frozen=True)
class Surgery:
    """All grafts of a model, by the layer they belong to.

    `sites` numbers the control states: (layer, "attention" or "ffn"), in the model's order.
    """

    trunk_layers: int
    controls: Mapping[int, ControlSpec] = field(default_factory=dict)
    adapters: Mapping[int, AdapterSpec] = field(default_factory=dict)
    local_loss: LocalLossSpec = field(default_factory=LocalLossSpec)
    experts: Mapping[int, ExpertsSpec] = field(default_factory=dict)
    router: RouterSpec | None = None
    router_loss: RouterLossSpec = field(default_factory=RouterLossSpec)
    sites: tuple[tuple[int, str], ...] = ()
    mixture: MixtureSpec | None = None
    new_layers: tuple[int, ...] = ()

    @property
    def diverges(self) -> bool:
        """Whether a divergence loss is to be computed in training."""
        return any(c.divergence.kind != "none" and c.divergence.weight > 0 for c in self.controls.values())

    @property
    def needs_domains(self) -> bool:
        """Whether a loss is asked for that needs `domain_ids` in training."""
        local = bool(self.adapters) and (self.local_loss.l1 > 0 or self.local_loss.cross_entropy > 0)
        return local or self.router_loss.task_id > 0

    @property
    def balances(self) -> bool:
        """Whether a load-balancing loss is to be computed in training."""
        return self.mixture is not None and self.mixture.balance_weight > 0 and self.mixture.top_k > 0

    @property
    def routes(self) -> bool:
        """Whether something crosses layers in every forward: a router's distribution, a bank of control states."""
        return self.router is not None or self.mixture is not None

    def sites_of(self, layer: int) -> dict[str, int]:
        """The numbers of a layer's control states, by kind."""
        return {kind: number for number, (home, kind) in enumerate(self.sites) if home == layer}


def read_surgery(config: Any) -> Surgery:
    """The grafts described by `config.surgery` (None: no graft), checked against the rest of the config.

    Raises ValueError naming the entry that does not fit: a branch that is not a tail layer or is used twice,
    an attention type that differs from the twin's, a slot without a column of the router, a key that this version
    does not know.
    """
    layers: int = config.num_hidden_layers
    raw = config.surgery
    if raw is None:
        return Surgery(trunk_layers=layers)
    _known(raw, KEYS, "surgery")
    states = [_tupled(StatesSpec, entry, "control_states", "sites") for entry in raw.get("control_states", ())]
    surgery = Surgery(
        trunk_layers=raw["trunk_layers"],
        controls=_by_layer([_control(entry) for entry in raw.get("control", ())], "control"),
        adapters=_by_layer([_build(AdapterSpec, entry, "adapter") for entry in raw.get("adapters", ())], "adapter"),
        local_loss=_build(LocalLossSpec, raw.get("local_loss") or {}, "local_loss"),
        experts=_joined([_experts(entry) for entry in raw.get("experts", ())]),
        router=_router([_columns(entry) for entry in raw.get("expert_router", ())]),
        router_loss=_build(RouterLossSpec, raw.get("router_loss") or {}, "router_loss"),
        sites=_sites(_by_layer(states, "control_states").values()),
        mixture=None if raw.get("mixture") is None else _build(MixtureSpec, raw["mixture"], "mixture"),
        new_layers=tuple(raw.get("new_layers", ())),
    )
    _check_layers(surgery, layers, getattr(config, "layer_types", None))
    _check_losses(surgery)
    _check_slots(surgery)
    _check_mixture(surgery)
    return surgery


def _check_layers(surgery: Surgery, layers: int, layer_types: list[str] | None) -> None:
    tail = range(surgery.trunk_layers, layers)
    branches = sorted(control.branch for control in surgery.controls.values())
    if branches != list(tail):
        raise ValueError(
            f"config.surgery: branches {branches} must be the tail layers {list(tail)}, each once "
            f"(num_hidden_layers {layers} = trunk_layers {surgery.trunk_layers} + one for each control block)"
        )
    for named, what, bound in (
        (surgery.controls, "control", surgery.trunk_layers),
        (surgery.adapters, "adapter", layers),
        (surgery.experts, "experts", layers),
        ([] if surgery.router is None else [surgery.router.layer], "expert_router", surgery.trunk_layers),
        ([layer for layer, _ in surgery.sites], "control_states", surgery.trunk_layers),
        (surgery.new_layers, "new_layers", surgery.trunk_layers),
    ):
        outside = [layer for layer in named if not 0 <= layer < bound]
        if outside:
            raise ValueError(f"config.surgery: {what} names layers {outside}; there are {bound}")
    for control in surgery.controls.values():
        if layer_types is not None and layer_types[control.branch] != layer_types[control.layer]:
            raise ValueError(
                f"config.layer_types: layer {control.branch} is the branch of layer {control.layer} and must "
                f"have its type, `{layer_types[control.layer]}`, not `{layer_types[control.branch]}`"
            )


def _check_losses(surgery: Surgery) -> None:
    for control in surgery.controls.values():
        if control.interpolator.kind == "proj" and control.divergence.kind == "none":
            raise ValueError(
                f"config.surgery: layer {control.layer} projects for a divergence that is `none`; "
                "its matrix would never train: use `lerp`"
            )
    ungated = [adapter.layer for adapter in surgery.adapters.values() if adapter.gate != "sigmoid"]
    if surgery.local_loss.cross_entropy > 0 and ungated:
        raise ValueError(
            "config.surgery: local_loss cross_entropy classifies domains by a sigmoid gate; adapters of "
            f"layers {ungated} have none"
        )
    if surgery.router_loss.task_id > 0 and surgery.router is None:
        raise ValueError("config.surgery: router_loss task_id needs an expert_router, and there is none")


def _check_slots(surgery: Surgery) -> None:
    if surgery.router is not None:
        numbers = [column.slot for column in surgery.router.slots]
        if numbers != list(range(len(numbers))):
            raise ValueError(f"config.surgery: expert_router has columns for slots {numbers}; they must run from 0 up")
        groups = [column.group for column in surgery.router.slots]
        if groups != sorted(groups) or set(groups) != set(range(groups[-1] + 1)):
            raise ValueError(f"config.surgery: expert_router has groups {groups}; they must run from 0 up, in order")
    homes = {control.branch: control.layer for control in surgery.controls.values()}
    for experts in surgery.experts.values():
        for slot in experts.slots:
            _check_slot(surgery, experts, slot, homes.get(experts.layer, experts.layer))


def _check_slot(surgery: Surgery, experts: ExpertsSpec, slot: SlotSpec, home: int) -> None:
    if not experts.routed:
        return
    if surgery.router is None or home < surgery.router.layer:
        raise ValueError(
            f"config.surgery: experts of layer {experts.layer} are routed, and no expert_router lies below"
        )
    column = next((column for column in surgery.router.slots if column.slot == slot.slot), None)
    if column is None or column.group != slot.group:
        raise ValueError(
            f"config.surgery: slot {slot.slot} of layer {experts.layer}, group {slot.group}, has no such column in "
            "expert_router"
        )


def _check_mixture(surgery: Surgery) -> None:
    if (surgery.mixture is None) != (not surgery.sites):
        raise ValueError("config.surgery: control_states and mixture go together; one of them is missing")
    if surgery.mixture is None:
        return
    kinds = [kind for _, kind in surgery.sites]
    least = min(kinds.count(kind) for kind in set(kinds)) if surgery.mixture.shared == "by_kind" else len(kinds)
    if surgery.mixture.top_k > least:
        raise ValueError(f"config.surgery: mixture top_k is {surgery.mixture.top_k}; a gate chooses among {least}")


def _control(entry: Mapping[str, Any]) -> ControlSpec:
    parts = dict(entry)
    interpolator = _build(InterpolatorSpec, parts.pop("interpolator", {}), "interpolator")
    divergence = _build(DivergenceSpec, parts.pop("divergence", {}), "divergence")
    built: ControlSpec = _build(
        ControlSpec, parts | {"interpolator": interpolator, "divergence": divergence}, "control"
    )
    return built


def _experts(entry: Mapping[str, Any]) -> ExpertsSpec:
    slots = tuple(_tupled(SlotSpec, slot, "slot", "targets") for slot in entry.get("slots", ()))
    built: ExpertsSpec = _build(ExpertsSpec, dict(entry) | {"slots": slots}, "experts")
    return built


def _columns(entry: Mapping[str, Any]) -> RouterSpec:
    slots = tuple(_build(RouterSlotSpec, slot, "expert_router slot") for slot in entry.get("slots", ()))
    built: RouterSpec = _build(RouterSpec, dict(entry) | {"slots": slots}, "expert_router")
    return built


def _joined(entries: list[ExpertsSpec]) -> dict[int, ExpertsSpec]:
    """Entries of one layer as one, slots in order."""
    joined: dict[int, ExpertsSpec] = {}
    for entry in entries:
        earlier = joined.get(entry.layer)
        if earlier is not None and earlier.routed != entry.routed:
            raise ValueError(f"config.surgery: experts of layer {entry.layer} are both routed and not")
        slots = entry.slots if earlier is None else earlier.slots + entry.slots
        numbers = [slot.slot for slot in slots]
        if numbers != sorted(set(numbers)):
            raise ValueError(f"config.surgery: experts of layer {entry.layer} have slots {numbers}, not in order")
        joined[entry.layer] = ExpertsSpec(entry.layer, entry.routed, slots)
    return joined


def _router(entries: list[RouterSpec]) -> RouterSpec | None:
    if not entries:
        return None
    layers = {entry.layer for entry in entries}
    if len(layers) > 1:
        raise ValueError(f"config.surgery: expert_router stands at layers {sorted(layers)}; a model has one")
    return RouterSpec(entries[0].layer, tuple(slot for entry in entries for slot in entry.slots))


def _sites(entries: Iterable[StatesSpec]) -> tuple[tuple[int, str], ...]:
    return tuple(
        (entry.layer, kind)
        for entry in sorted(entries, key=lambda entry: entry.layer)
        for kind in ("attention", "ffn")
        if kind in entry.sites
    )


def _tupled(kind: Any, entry: Mapping[str, Any], name: str, listed: str) -> Any:
    return _build(kind, dict(entry) | {listed: tuple(entry.get(listed, ()))}, name)


def _build(kind: Any, entry: Mapping[str, Any], name: str) -> Any:
    _known(entry, tuple(kind.__dataclass_fields__), name)
    return kind(**entry)


def _known(entry: Mapping[str, Any], keys: tuple[str, ...], name: str) -> None:
    unknown = sorted(set(entry) - set(keys))
    if unknown:
        raise ValueError(f"config.surgery: {name} has unknown keys {unknown}; known are {', '.join(keys)}")


def _by_layer(specs: list[Any], name: str) -> dict[int, Any]:
    named = {spec.layer: spec for spec in specs}
    if len(named) != len(specs):
        raise ValueError(f"config.surgery: two {name} entries name the same layer")
    return named
