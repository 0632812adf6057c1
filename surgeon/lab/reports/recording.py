"""A loaded model that records what its routers and gates choose on each text."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from surgeon.anatomy.anatomy import Anatomy
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.errors import BadInput, printable
from surgeon.lab.reports.routing_record import (
    ExpertChoices,
    GateChoices,
    RouterChoices,
    RouterPlace,
    Site,
    TextChoices,
)
from surgeon.models.load import load_model, running
from surgeon.models.outputs import auto_class, check_window, load_encoder

_BATCH = 4


def observer_of(
    folder: CheckpointFolder, anatomy: Anatomy, window: int, device: str, say: Callable[[str], None]
) -> Observer:
    """Load the checkpoint's model for observation. Raises BadInput where it has no routers or gates."""
    if anatomy.family.encoder:
        auto = auto_class(folder.config)
        model = load_encoder(folder, device=device, auto=auto)
        check_window(model, window)
    else:
        model = load_model(folder, device=device, say=say)
    observer = Observer(model, encoder=anatomy.family.encoder)
    if not observer.chooses:
        raise BadInput(
            f"{printable(str(folder.path))}: its grafts have neither router nor gate whose choices are recorded;"
            " give another output"
        )
    return observer


def _decoder(model: Any, stack: str) -> Any:
    """Return the text decoder inside an upcycled model; the attribute `stack` contains its layers."""
    return next(module for module in model.modules() if hasattr(module, "surgery") and hasattr(module, stack))


class Observer:
    """A loaded model that records the choices of its routers and gates."""

    def __init__(self, model: Any, *, encoder: bool) -> None:
        """Find the routers and gates of the model, and add hooks that record what the gates do."""
        self.model = model
        # Take Flow from the code that was loaded with the checkpoint, which may differ from the installed code.
        self._flow = sys.modules[type(model).__module__].Flow
        stack = getattr(model, "stack", "layers")
        trunk = model.base_model if encoder else _decoder(model, stack)
        surgery = trunk.surgery
        # An encoder has no cache and no logits to leave out, and its layers have no gates.
        self._asked = {} if encoder else {"use_cache": False, "logits_to_keep": 1}
        router = surgery.of["experts"].router if "experts" in surgery.of else None
        self.router = None if router is None else RouterPlace(router.layer, len(router.slots))
        self.bank: Any = getattr(trunk, "control_bank", None)
        routed = self.bank is not None and self.bank.spec.top_k > 0
        self.sites: tuple[Site, ...] = tuple(surgery.of["states"].sites) if routed else ()
        self._gates: dict[str, list[Tensor]] = {}
        self._loudness: dict[str, list[Tensor]] = {}
        # For each layer with routed experts: how many tokens took each expert.
        self._experts: dict[str, Tensor] = {}
        for layer, module in enumerate(() if encoder else getattr(trunk, stack)):
            self._observe(str(layer), module)
            if "expanded" in module._modules:
                self._observe(f"{layer}.branch", module.expanded)

    @property
    def chooses(self) -> bool:
        """Whether the model has routers or gates."""
        return bool(self.router or self.sites or self._gates or self._experts)

    def run(self, ids: Tensor, advance: Callable[[int], None]) -> TextChoices:
        """Run the windows of one text, of shape (windows, window), and return the choices; `advance` counts windows."""
        for heard in (self._gates, self._loudness):
            for parts in heard.values():
                parts.clear()
        for taken in self._experts.values():
            taken.zero_()
        routing: list[Tensor] = []
        states = torch.zeros(len(self.sites), len(self.sites), dtype=torch.float64)
        for batch in torch.split(ids, _BATCH):
            flow = self._flow()
            # Code without anything to record has no such field; setting it has no effect there.
            flow.records_choices = True
            with torch.inference_mode(), running(self.model):
                self.model(batch, **self._asked, surgery_flow=flow)
            if self.router:
                routing.append(flow.routing.flatten(0, 1).double().cpu())
            if self.sites:
                self._add(states, flow.mixing.choices)
            advance(len(batch))
        return TextChoices(
            tokens=ids.numel(),
            router=_router_choices(torch.cat(routing)) if routing else None,
            states=tuple(tuple(row) for row in (states / ids.numel()).tolist()),
            gates={name: self._gate(name) for name in self._gates},
            experts={
                place: ExpertChoices(tuple((taken / ids.numel()).tolist())) for place, taken in self._experts.items()
            },
        )

    def _add(self, states: Tensor, choices: list[tuple[int, Tensor, Tensor]]) -> None:
        """Add the weights that each site gave the control states to `states` (sites × states)."""
        for site, chosen, weights in choices:
            row = torch.zeros(len(self.sites), dtype=torch.float64)
            numbers = torch.tensor(self.bank.choice_of(site))[chosen.flatten().cpu()]
            states[site] += row.index_add(0, numbers, weights.flatten().double().cpu())

    def _observe(self, place: str, layer: nn.Module) -> None:
        """Add hooks to a layer's gated adapter, routed experts and interpolator, where it has them."""
        adapter = getattr(getattr(layer, "mlp", None), "adapter", None)
        if adapter is not None and adapter.gate is not None:
            adapter.register_forward_hook(self._record_adapter(f"{place}.adapter"))
        routed = getattr(getattr(layer, "mlp", None), "routed", None)
        if routed is not None:
            routed.register_forward_hook(self._record_experts(place, len(routed.router)))
        interpolator = getattr(layer, "interpolator", None)
        if interpolator is not None:
            interpolator.register_forward_hook(self._record_share(f"{place}.interpolator"))

    def _record_adapter(self, name: str) -> Callable[..., None]:
        """Return a hook that records an adapter's gate values and mean absolute outputs."""
        gates, loudness = self._gates.setdefault(name, []), self._loudness.setdefault(name, [])

        def record(module: Any, _inputs: Any, result: tuple[Tensor, Tensor]) -> None:
            """Append the gate's value and the output's mean absolute value of every token."""
            output, score = result
            gates.append(module.opening(score).flatten().cpu())
            loudness.append(output.abs().float().mean(dim=-1).flatten().cpu())

        return record

    def _record_experts(self, place: str, count: int) -> Callable[..., None]:
        """Return a hook that counts each expert's tokens; `count`: experts of the layer."""
        taken = self._experts.setdefault(place, torch.zeros(count, dtype=torch.float64))

        def record(_module: Any, _inputs: Any, result: tuple[Tensor, ...]) -> None:
            """Add the choices of one forward to the counts."""
            _, _, chosen, _ = result
            taken.add_(torch.bincount(chosen.flatten().cpu(), minlength=count))

        return record

    def _record_share(self, name: str) -> Callable[..., None]:
        """Return a hook that records an interpolator's share α of every token."""
        gates = self._gates.setdefault(name, [])

        def record(_module: Any, inputs: tuple[Tensor, ...], result: tuple[Tensor, float | Tensor]) -> None:
            """Append α of every token; a constant α is repeated."""
            share = torch.as_tensor(result[1], dtype=torch.float32).cpu()
            gates.append(share.expand(*inputs[0].shape[:2], 1).flatten() if share.dim() < 2 else share.flatten())

        return record

    def _gate(self, name: str) -> GateChoices:
        """Return the means over all recorded tokens of a gate."""
        values = torch.cat(self._gates[name]).double()
        loudness = self._loudness.get(name)
        return GateChoices(
            mean=float(values.mean()),
            closed=float((values == 0).double().mean()),
            loudness=float(torch.cat(loudness).double().mean()) if loudness else None,
        )


def _router_choices(weights: Tensor) -> RouterChoices:
    """Summarise the router's `weights` (tokens × slots)."""
    largest = torch.bincount(weights.argmax(dim=-1), minlength=weights.shape[-1]).double() / len(weights)
    return RouterChoices(mean=tuple(weights.mean(dim=0).tolist()), largest=tuple(largest.tolist()))
