"""`pmoe_experts`: one LoRA in shallow layers, a slot for each task in deeper ones, weighted by one router (PMoE).

Jung and Kim, section 3.1. Layers up to τ share one LoRA; a router reads the input of the next layer (h_τ), and its
distribution over the slots is used by all deeper layers. Every LoRA's B is zero at birth, so the grown model computes
what the base computes, whatever the router's output. On a model that has experts, the operation adds slots. With
`from_peft` the slot is an adapter that PEFT trained, with its ranks, scales and values.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from surgeon.anatomy.shared import within
from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft
from surgeon.blueprint.grafts import Graft, recipes_of
from surgeon.blueprint.recipes import Recipe
from surgeon.common.formatting import show
from surgeon.errors import BadInput, printable
from surgeon.grafts.composition import ATTENTION
from surgeon.grafts.experts import column_births, slot_births
from surgeon.operations.imported_lora import (
    AdapterFacts,
    ImportedModule,
    check_slot,
    imported_modules,
    rounding,
    slot_entry,
    slot_tensors,
)
from surgeon.operations.operation import Legend, Operation, Paper, Spec, TrainingDefaults
from surgeon.operations.prepare import OpenedBase
from surgeon.operations.sites import check_adapted
from surgeon.runtime.experts_rules import ROUTER, RouterSlotSpec, RouterSpec, SlotSpec

# Names of modules that make queries and values, in attention that is not four matrices, or in its replacement.
_QUERY_VALUE = re.compile(
    r"(to_|w)?[qv](_b)?(_proj)?|kv(_b)?_proj|query|value|w?qkv(_proj)?|query_key_value|att_proj|c_attn|in_proj(_qkvz?)?",
    re.IGNORECASE,
)
# Some classes wrap the linear module in a module with the projection's name.
_INSIDE = ".linear"
_LATENTS = re.compile(r"kv_a_proj(_with_mqa)?")


class RouterLoss(Spec):
    """Cross-entropy of the router against the task of each token (Eq. 7), by `domain_ids`."""

    kind: Literal["task_id"]
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False, description="its share of the loss")] = 1.0


@dataclass(frozen=True)
class _Present:
    """The experts of a model: the router's layer, its number of slots, the last group's number, and the targets."""

    layer: int
    slots: int
    group: int
    targets: tuple[str, ...]


@dataclass(frozen=True)
class _Place:
    """The place of an operation's slots: its number, the router's layer, the first new slot, their group."""

    number: int
    layer: int
    first: int
    group: int


class PMoEExperts(Operation):
    """Add LoRA slots for tasks above a threshold, and one shared LoRA below it; on a model with slots, more slots."""

    papers = (
        Paper(
            "jung2024pmoe",
            "Jung, Min Jae and Kim, JooHee",
            "PMoE: Progressive Mixture of Experts with Asymmetric Transformer for Continual Learning",
            2024,
            "2407.21571",
        ),
    )
    training = TrainingDefaults(
        "PMoE, section 3.2.3: 3e-4, cosine, batches of 128, 1 % replay; the rate is ours, for small runs",
        lr=1e-2,
        original_share=0.01,
    )
    grafts = ("experts", "expert_router")
    legend: ClassVar[Mapping[str, Legend]] = {
        "S": Legend("PMoE slots, by number", 0),
        "L": Legend("shared LoRA (PMoE, below the router)", 5),
        "R": Legend("PMoE's router", 4),
    }

    facts = AdapterFacts
    way_on = "use another graft, or operations that add layers"

    op: Literal["pmoe_experts"]
    threshold: Annotated[
        Annotated[int, Field(ge=0)] | Annotated[float, Field(gt=0, lt=1)] | None,
        Field(
            description="τ: layers below the router, sharing one LoRA, or their share of all (0.75: 24 of 32); default"
            " three quarters, with `from_peft` 0",
        ),
    ] = None
    slots: Annotated[int, Field(ge=1, le=4096, description="slots to add, one for each task")] = 1
    from_peft: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=4096,
            description="a PEFT LoRA adapter that becomes the slot: a folder (a relative path starts at the plan's"
            " folder) or a Hub id, `user/name` or `user/name@revision`; rank, alpha, dropout and targets are its own",
        ),
    ] = None
    rank: Annotated[int, Field(ge=1, le=2**16, description="rank of every LoRA")] = 4
    alpha: Annotated[
        float | None,
        Field(
            gt=0,
            allow_inf_nan=False,
            description="LoRA's α: a product counts α / rank times; default: the rank, so once",
        ),
    ] = None
    dropout: Annotated[float, Field(ge=0, lt=1, description="dropout of a LoRA's input, in training")] = 0.0
    targets: Annotated[
        list[str] | None,
        Field(min_length=1, description="linear modules by their last name; default those of query and value"),
    ] = None
    new_slot_mass: Annotated[
        Literal["exact", "paper"],
        Field(
            description="share of added slots in the router: exact gives them a learned mass that starts at zero, so"
            " that earlier slots keep their weights; paper takes one softmax over all slots, which lowers theirs"
        ),
    ] = "exact"
    router_loss: Annotated[
        Literal["none"] | RouterLoss | None,
        Field(description="default: none; on a model that has experts, unchanged"),
    ] = None
    trains_also: Annotated[
        list[Literal["router", "shared"]],
        Field(description="earlier parts that keep training: the router's columns, the shared LoRA"),
    ] = []  # noqa: RUF012  # pydantic copies it

    @property
    def needs_task_ids(self) -> bool:
        """Return whether the router is trained to predict the task."""
        return isinstance(self.router_loss, RouterLoss)

    def prepare(self, base: OpenedBase) -> AdapterFacts | None:
        """Open the adapter that becomes the slot, and return its facts; None without `from_peft`.

        Raises BadInput where it cannot be opened, or has settings that do not fit a slot.
        """
        if self.from_peft is None:
            return None
        adapter = base.adapter(self.from_peft)
        check_slot(adapter)
        return AdapterFacts.of(adapter.facts)

    @property
    def has_facts(self) -> bool:
        """Return whether an adapter is imported."""
        return self.from_peft is not None

    def edit(self, draft: Draft, facts: AdapterFacts | None) -> OperationRecord:
        """Attach the slots and return what was matched and what is promised."""
        number = draft.number
        present = _present(draft)
        if present is None and self.trains_also:
            raise BadInput("`trains_also` is about experts that a model has; this one has none yet")
        layer = self._router_layer(draft, present)
        first, group = (0, 0) if present is None else (present.slots, present.group + (self.new_slot_mass == "exact"))
        before = draft.parameters()
        place = _Place(number, layer, first, group)
        if self.from_peft is None:
            matched, claim = self._attach(draft, place, present)
        else:
            matched, claim = self._import(draft, self.from_peft, facts, place, present)
        self._settle(draft, number, present)
        share = (draft.parameters() - before) / before
        return OperationRecord(self.op, f"{matched}, {share:+.3%}", claim, trains="new")

    def _attach(self, draft: Draft, place: _Place, present: _Present | None) -> tuple[str, Claim]:
        """Attach new slots, and the shared LoRA the first time; return (matched, claim)."""
        targets = self._targets(draft, place, present)
        for index, here in targets.items():
            check_adapted(draft, index, here)
        self._attach_router(draft, place)
        for index, here in targets.items():
            grafts = draft.layers[index].grafts
            if index >= place.layer:
                slots = [self._slot(place.first + nth, place.group, here) for nth in range(self.slots)]
                grafts.append(self._graft(draft, place.number, index, slots, routed=True))
            else:
                grafts.append(self._graft(draft, place.number, index, [self._slot(0, 0, here)], routed=False))
        last = place.first + self.slots - 1
        shown = f"slot {last}" if self.slots == 1 else f"slots {place.first}-{last}"
        return _matched(place, shown, [self.rank], targets), self._claim(present)

    def _import(
        self, draft: Draft, name: str, facts: AdapterFacts | None, place: _Place, present: _Present | None
    ) -> tuple[str, Claim]:
        """Attach an adapter as one slot; return (matched, claim).

        At a first import, the adapter's part below the router becomes the shared LoRA. Raises BadInput where the
        adapter does not fit the plan or the model.
        """
        if given := sorted(self.model_fields_set & {"rank", "alpha", "targets", "dropout"}):
            raise BadInput(f"`{given[0]}` is the adapter's own; leave it out beside `from_peft`")
        if self.slots != 1:
            raise BadInput(
                f"`slots` is {self.slots}, yet an adapter is one slot; give each adapter an operation of its own"
            )
        if facts is None:
            raise BadInput(
                f"nothing is known of the adapter {printable(name)}: it was not opened, and surgery.json does not"
                " record it"
            )
        adapter = facts.adapter
        modules = imported_modules(draft, name, adapter)
        targets = {index: [module.target for module in here] for index, here in modules.items()}
        for index, adapted in targets.items():
            check_adapted(draft, index, adapted)
        _check_depth(draft, name, modules, place.layer, present)
        self._attach_router(draft, place)
        for index, here in modules.items():
            routed = index >= place.layer
            slot, group = (place.first, place.group) if routed else (0, 0)
            entry = slot_entry(here, slot=slot, group=group, dropout=adapter.dropout)
            tensors = slot_tensors(adapter, name, here, slot=slot, dtype=draft.dtype_of(index))
            graft = Graft("experts", {"routed": routed, "slots": [entry]}, tensors, place.number)
            draft.layers[index].grafts.append(graft)
        lost = rounding(adapter, [draft.dtype_of(index) for index in modules])
        reason = "the imported adapter changes outputs as it was trained to" + (f"; its {lost}" if lost else "")
        ranks = {module.rank for here in modules.values() for module in here}
        words = _matched(place, f"slot {place.first}", ranks, targets, source=f" from {printable(name)}")
        return words, Claim("none", reason)

    def _settle(self, draft: Draft, number: int, present: _Present | None) -> None:
        """Unfreeze what `trains_also` names, and set the router's loss.

        Where the plan gives no loss, an earlier loss stays.
        """
        self._train_on(draft, number)
        if self.router_loss is not None or present is None:
            weight = self.router_loss.weight if isinstance(self.router_loss, RouterLoss) else 0.0
            draft.settings["router_loss"] = {"task_id": weight}

    def _router_layer(self, draft: Draft, present: _Present | None) -> int:
        """Return the number of layers below the router.

        Raises BadInput where the plan's `threshold` does not fit the model.
        """
        count = len(draft.layers)
        if present is not None:
            if self.threshold is not None and self._layers_below(count) != present.layer:
                raise BadInput(
                    f"`threshold` is {self.threshold}, the model's router stands above {present.layer} layers and stays"
                    " there; leave `threshold` out"
                )
            return present.layer
        threshold = self._layers_below(count)
        if threshold >= count:
            raise BadInput(
                f"`threshold` {threshold} leaves no layer for the slots: the model has {count} layers, so at most"
                f" {count - 1}"
            )
        return threshold

    def _layers_below(self, count: int) -> int:
        """Return τ in a model of `count` layers; a share is rounded down."""
        if self.threshold is None:
            return 3 * count // 4 if self.from_peft is None else 0
        return self.threshold if isinstance(self.threshold, int) else int(self.threshold * count)

    def _targets(self, draft: Draft, place: _Place, present: _Present | None) -> dict[int, tuple[str, ...]]:
        """Return, by layer that gets slots, the paths of the adapted modules in it.

        A layer without such modules is left out; on a model that has experts, so are layers below the router. Raises
        BadInput where no layer above the router has a module.
        """
        layers = range(place.layer if present is not None else 0, len(draft.layers))
        linear = {index: draft.linear(index) for index in layers}
        if self.targets is not None:
            self._check_targets([path for paths in linear.values() for path in paths])
        targets = self.targets or (present.targets if present is not None else ())
        found = {
            index: tuple(path for name in targets for path in paths if path == name or path.endswith(f".{name}"))
            if targets
            else _query_and_value(draft, index, paths)
            for index, paths in linear.items()
        }
        found = {index: here for index, here in found.items() if here}
        if not any(index >= place.layer for index in found):
            raise BadInput(
                f"no layer from {place.layer} on has a linear module that a slot could adapt by itself;"
                f" {_offered(linear.values())}"
            )
        return found

    def _check_targets(self, paths: Sequence[str]) -> None:
        """Raise BadInput where `targets` names an unknown module, or one twice."""
        assert self.targets is not None
        names = dict.fromkeys(_last(path) for path in paths)
        unknown = [name for name in self.targets if name not in names and name not in paths]
        if unknown:
            raise BadInput(
                f"`targets` names {printable(repr(unknown[0]))}, no linear module of a layer here that runs on all of"
                f" the layer's tokens and on no others; there are {', '.join(names)}"
            )
        if len(set(self.targets)) != len(self.targets):
            raise BadInput("`targets` names a module twice")

    def _slot(self, slot: int, group: int, targets: tuple[str, ...]) -> dict[str, Any]:
        """Return a slot's entry in `config.surgery`."""
        scale = 1.0 if self.alpha is None else self.alpha / self.rank
        return {
            "slot": slot,
            "rank": self.rank,
            "targets": list(targets),
            "scale": scale,
            "dropout": self.dropout,
            "group": group,
        }

    def _graft(self, draft: Draft, number: int, layer: int, slots: list[dict[str, Any]], *, routed: bool) -> Graft:
        """Return the graft of these slots at one layer, with the recipes of their tensors."""
        shapes = draft.linear(layer)
        dtype = draft.dtype_of(layer)
        tensors: dict[str, Recipe] = {}
        for slot in slots:
            births = slot_births(SlotSpec(**slot | {"targets": tuple(slot["targets"])}), shapes)
            tensors |= recipes_of(births, "", f"operations[{number}].layer[{layer}].", dtype)
        return Graft("experts", {"routed": routed, "slots": slots}, tensors, number)

    def _attach_router(self, draft: Draft, place: _Place) -> None:
        """Add columns for the new slots to the router of layer `place.layer`."""
        width, dtype = draft.anatomy.sizes.hidden, draft.dtype_of(place.layer)
        columns = [RouterSlotSpec(slot, place.group) for slot in range(place.first, place.first + self.slots)]
        earlier = [RouterSlotSpec(column["slot"], column.get("group", 0)) for column in _columns(draft)]
        router = RouterSpec(place.layer, (*earlier, *columns))
        tensors: dict[str, Recipe] = {}
        for column in columns:
            births = column_births(router, column, width)
            tensors |= recipes_of(births, f"{ROUTER}slots.{column.slot}.", f"operations[{place.number}].", dtype)
        entries = [{"slot": column.slot, "group": place.group} for column in columns]
        draft.layers[place.layer].grafts.append(Graft("expert_router", {"slots": entries}, tensors, place.number))

    def _train_on(self, draft: Draft, number: int) -> None:
        """Unfreeze what `trains_also` names of the base's router columns and shared LoRA.

        They become new tensors with their old values. Parts that this plan made are left as they are.
        """
        for home in draft.layers:
            for graft in home.grafts:
                router = graft.kind == "expert_router" and "router" in self.trains_also
                shared = graft.kind == "experts" and not graft.entry["routed"] and "shared" in self.trains_also
                if (router or shared) and graft.operation is None:
                    graft.operation = number
                    for slot in graft.entry["slots"]:
                        slot["frozen"] = False

    def _claim(self, present: _Present | None) -> Claim:
        """Return the claim: exact, except for new columns in an existing router's softmax."""
        if present is None:
            return Claim("exact", "every LoRA's B is zero")
        if self.new_slot_mass == "exact":
            return Claim("exact", "the new slots' B and the mass by which they enter the router are zero")
        return Claim("none", "softmax over more columns takes weight from the earlier slots (`new_slot_mass: paper`)")


def _offered(linear: Iterable[Iterable[str]]) -> str:
    """Return advice for a message: which modules `targets` can name, or why there are none."""
    names = dict.fromkeys(_last(path) for paths in linear for path in paths)
    if names:
        return f"name some by `targets`: {', '.join(names)}"
    return (
        "those that its layers have run on more or fewer rows than there are tokens (several streams side by side,"
        " experts), so a token's slot has no place there; use another operation"
    )


def _last(path: str) -> str:
    """Return the last name in a module's path."""
    return path.rpartition(".")[2]


def _query_and_value(draft: Draft, layer: int, linear: Mapping[str, object]) -> tuple[str, ...]:
    """Return the modules that make queries and values: by role, or by name in other forms of attention."""
    parts = draft.kind_of(layer).parts
    known = {part.suffix.removesuffix(".weight"): {role for role, _ in part.blocks} for part in parts}
    chosen = tuple(path for path, roles in known.items() if roles & {"query", "value"} and path in linear)
    # Where only one of the two has the usual shape, both are found by name.
    if {"query", "value"} <= {role for path in chosen for role in known[path]}:
        return chosen
    block = draft.blocks(layer).get(ATTENTION, "")
    here = [path for path in linear if within(path, block.split())]
    found = tuple(path for path in here if _QUERY_VALUE.fullmatch(_last(path.removesuffix(_INSIDE))))
    if not any(_last(path) == "kv_b_proj" for path in here):
        # Where `kv_b_proj` expands values from cached latents, it runs on other tokens: adapt what makes the latents.
        found += tuple(path for path in here if _LATENTS.fullmatch(_last(path)))
    return found


def _columns(draft: Draft) -> list[dict[str, Any]]:
    """Return the entries of the router's columns so far, also of earlier operations of this plan."""
    routers = [graft for layer in draft.layers for graft in layer.grafts if graft.kind == "expert_router"]
    return [column for router in routers for column in router.entry["slots"]]


def _present(draft: Draft) -> _Present | None:
    """Return the experts of the model, including those of earlier operations of this plan; None where it has none."""
    found = [
        (index, graft.entry["slots"])
        for index, layer in enumerate(draft.layers)
        for graft in layer.grafts
        if graft.kind == "expert_router"
    ]
    if not found:
        return None
    layer = found[0][0]
    columns = [column for _, slots in found for column in slots]
    routed = [
        graft
        for home in draft.layers[layer:]
        for graft in home.grafts
        if graft.kind == "experts" and graft.entry["routed"] and not graft.in_branch
    ]
    targets = tuple(routed[0].entry["slots"][0]["targets"]) if routed else ()
    return _Present(layer, len(columns), max(column.get("group", 0) for column in columns), targets)


def _check_depth(
    draft: Draft, name: str, modules: Mapping[int, Sequence[ImportedModule]], layer: int, present: _Present | None
) -> None:
    """Raise BadInput where layers below `layer`, the router's, cannot hold the adapter, or would hold all of it."""
    shallow = sorted(index for index in modules if index < layer)
    if present is not None and shallow:
        shared = any(g.kind == "experts" and not g.entry["routed"] for home in draft.layers for g in home.grafts)
        why = "share one LoRA already" if shared else "lie below the router, where there are no slots"
        raise BadInput(
            f"{printable(name)}: the adapter also adapts layers {show(shallow)}, which {why}; grow the base with"
            " `threshold: 0` before importing it, or train it on deeper layers alone"
        )
    if len(shallow) == len(modules):
        raise BadInput(
            f"{printable(name)}: the adapter adapts layers {show(shallow)} alone, below `threshold` {layer}, so no"
            " slot comes of it; choose a lower `threshold`"
        )


def _matched(
    place: _Place, slots: str, ranks: Collection[int], targets: Mapping[int, Iterable[str]], *, source: str = ""
) -> str:
    """Return words for the manifest: slots, layers, their `source`, ranks, and the adapted modules, by layer."""
    deep, low = ([index for index in sorted(targets) if (index >= place.layer) is above] for above in (True, False))
    shared = f"a shared LoRA in layers {show(low)}, " if low else ""
    rank = "-".join(map(str, dict.fromkeys((min(ranks), max(ranks)))))
    names = ", ".join(dict.fromkeys(_last(path) for here in targets.values() for path in here))
    return f"{shared}{slots} in layers {show(deep)}{source}, rank {rank} at {names}, router above {place.layer} layers"
