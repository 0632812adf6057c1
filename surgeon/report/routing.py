"""`surgeon routing-report`: what routers and gates of a grafted checkpoint choose, by layer and site, on several texts.

One forward pass over each text records: PMoE's router (its distribution over slots, Figures 3 to 5 of the paper),
Mixture-of-Control's routing (which control states each site takes, Figures 4 to 12), gates of adapters (how open, how
loud: Neutral Residues, section 3) and the share α of expanded branches (Control LLM).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.common import devices
from surgeon.common.listener import Listener, Quiet
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import dissect, is_grafted
from surgeon.models.encoders import auto_class, check_window, load_encoder
from surgeon.models.load import load_model
from surgeon.models.tokens import find_tokenizer, token_batches
from surgeon.report.routing_record import GateChoices, RouterChoices, RoutingReport, TextChoices


def routing_report(
    out: str | Path,
    texts: Mapping[str, Path | None],
    *,
    to: Path | None = None,
    window: int = 128,
    windows: int = 8,
    device: str = "auto",
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> RoutingReport:
    """Run `out` over texts, by their domains' names (None: the built-in probe); record what routers and gates choose.

    `windows` of `window` tokens are taken of each text, 0 for all of it. `to` gets the result as JSON. Raises BadInput
    for a checkpoint without routers and gates, and for texts that cannot be read.
    """

    report = record_choices(
        out,
        texts,
        window=window,
        windows=windows,
        device=devices.resolve(device),
        trust_remote_code=trust_remote_code,
        progress=(listener or Quiet()).say,
    )
    if to is not None:
        try:
            to.write_text(json.dumps(report.to_json(), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise BadInput(f"{printable(str(to))}: cannot be written ({error.strerror})") from None
    return report


# How many tokens of each text are kept one by one, to colour them by slot (PMoE, Figure 5).
_EXAMPLES = 256


_BATCH = 4


def record_choices(
    out: str | Path,
    texts: Mapping[str, Path | None],
    *,
    window: int = 128,
    windows: int = 8,
    device: str = "cpu",
    trust_remote_code: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> RoutingReport:
    """Run the checkpoint `out` over each text, by its domain's name (None: the built-in probe), and record the choices.

    `windows` of `window` tokens are taken of each text, 0 for all of it. Raises BadInput for a checkpoint without
    grafts that choose, and for texts that cannot be read.
    """
    folder = CheckpointFolder.open(Path(out), trust_remote_code=trust_remote_code)
    shown = printable(str(out))
    surgery = folder.config.get("surgery") if is_grafted(folder.config) else None
    if not isinstance(surgery, Mapping):
        raise BadInput(f"{shown}: no grafts here, so no routers or gates; give an output that has some")
    anatomy = dissect(folder.config, folder.tensors)
    vocabulary = anatomy.sizes.vocabulary
    trusted = trust_remote_code or folder.code == "shipped"
    if anatomy.family.encoder:
        auto = auto_class(folder.config)
        model = load_encoder(Path(out), device=device, trust_remote_code=trusted, auto=auto)
        check_window(model.config, window)
    else:
        model = load_model(Path(out), device=device, trust_remote_code=trusted)
    observer = _Observer(model, encoder=anatomy.family.encoder)
    if not observer.chooses:
        raise BadInput(
            f"{shown}: its grafts have neither router nor gate, so there is nothing to record; give another output"
        )
    # None: there is no tokenizer, and tokens are shown by number.
    tokenizer, _ = find_tokenizer(Path(out)) if observer.slots else (None, "")
    report = RoutingReport(
        model=Path(out).resolve().name,
        slots=observer.slots,
        router_layer=observer.router_layer,
        sites=observer.sites,
    )
    for name, text in texts.items():
        progress(f"routing on {printable(name)}")
        tokens = token_batches(Path(out), text=text, window=window, windows=windows, vocabulary=vocabulary)
        report.texts[name] = observer.run(tokens.ids.to(device), tokenizer)
    return report


class _Observer:
    """A loaded model that records the choices of its routers and gates."""

    def __init__(self, model: Any, *, encoder: bool) -> None:
        self.model = model
        # From the code that was loaded with the checkpoint, which need not be the installed one.
        self._flow = sys.modules[type(model).__module__].Flow
        trunk = model.base_model
        surgery = trunk.surgery
        # An encoder has no cache and no logits to leave out, and its layers have no gates.
        self._asked = {} if encoder else {"use_cache": False, "logits_to_keep": 1}
        router = surgery.of["experts"].router if "experts" in surgery.of else None
        self.slots = 0 if router is None else len(router.slots)
        self.router_layer = None if router is None else router.layer
        self.bank: Any = getattr(trunk, "control_bank", None)
        routed = self.bank is not None and self.bank.spec.top_k > 0
        self.sites: tuple[tuple[int, str], ...] = tuple(surgery.of["states"].sites) if routed else ()
        self._gates: dict[str, list[Tensor]] = {}
        self._loudness: dict[str, list[Tensor]] = {}
        for layer, module in enumerate(() if encoder else trunk.layers):
            self._observe(str(layer), module)
            if layer in surgery.homes.values():
                self._observe(f"{layer}.branch", module.expanded)

    @property
    def chooses(self) -> bool:
        """Whether the model has routers or gates."""
        return bool(self.slots or self.sites or self._gates)

    def run(self, ids: Tensor, tokenizer: Any) -> TextChoices:
        """Run one text's windows (windows, window) and return the choices."""
        for heard in (self._gates, self._loudness):
            for parts in heard.values():
                parts.clear()
        routing: list[Tensor] = []
        states = torch.zeros(len(self.sites), len(self.sites), dtype=torch.float64)
        for batch in torch.split(ids, _BATCH):
            flow = self._flow(records_choices=True)
            with torch.inference_mode():
                self.model(batch, **self._asked, surgery_flow=flow)
            if self.slots:
                routing.append(flow.routing.flatten(0, 1).double().cpu())
            if self.sites:
                self._add(states, flow.mixing.choices)
        return TextChoices(
            tokens=ids.numel(),
            router=_router_choices(torch.cat(routing), ids.flatten().tolist(), tokenizer) if routing else None,
            states=tuple(tuple(row) for row in (states / ids.numel()).tolist()),
            gates={name: self._gate(name) for name in self._gates},
        )

    def _add(self, states: Tensor, choices: list[tuple[int, Tensor, Tensor]]) -> None:
        for site, chosen, weights in choices:
            row = torch.zeros(len(self.sites), dtype=torch.float64)
            numbers = torch.tensor(self.bank.choice_of(site))[chosen.flatten().cpu()]
            states[site] += row.index_add(0, numbers, weights.flatten().double().cpu())

    def _observe(self, place: str, layer: nn.Module) -> None:
        adapter = getattr(getattr(layer, "mlp", None), "adapter", None)
        if adapter is not None and adapter.gate is not None:
            adapter.register_forward_hook(self._record_adapter(f"{place}.adapter"))
        interpolator = getattr(layer, "interpolator", None)
        if interpolator is not None:
            interpolator.register_forward_hook(self._record_share(f"{place}.interpolator"))

    def _record_adapter(self, name: str) -> Callable[..., None]:
        gates, loudness = self._gates.setdefault(name, []), self._loudness.setdefault(name, [])

        def record(module: Any, _inputs: Any, result: tuple[Tensor, Tensor]) -> None:
            output, score = result
            gates.append(module.opening(score).flatten().cpu())
            loudness.append(output.abs().float().mean(dim=-1).flatten().cpu())

        return record

    def _record_share(self, name: str) -> Callable[..., None]:
        gates = self._gates.setdefault(name, [])

        def record(_module: Any, inputs: tuple[Tensor, ...], result: tuple[Tensor, float | Tensor]) -> None:
            share = torch.as_tensor(result[1], dtype=torch.float32).cpu()
            gates.append(share.expand(*inputs[0].shape[:2], 1).flatten() if share.dim() < 2 else share.flatten())

        return record

    def _gate(self, name: str) -> GateChoices:
        values = torch.cat(self._gates[name]).double()
        loudness = self._loudness.get(name)
        return GateChoices(
            mean=float(values.mean()),
            closed=float((values == 0).double().mean()),
            loudness=float(torch.cat(loudness).double().mean()) if loudness else None,
        )


def _router_choices(weights: Tensor, ids: list[int], tokenizer: Any) -> RouterChoices:
    largest = weights.argmax(dim=-1)
    shares = torch.bincount(largest, minlength=weights.shape[-1]).double() / len(largest)
    shown = ids[:_EXAMPLES]
    words = [str(token) for token in shown] if tokenizer is None else [tokenizer.decode([token]) for token in shown]
    return RouterChoices(
        mean=tuple(weights.mean(dim=0).tolist()),
        largest=tuple(shares.tolist()),
        examples=tuple(zip(words, largest.tolist(), strict=False)),
    )


_SHOWN = 8


def routing_view(report: RoutingReport) -> RenderableType:
    """Slots by text; the control states each text uses most; gates by text."""
    parts: list[RenderableType] = []
    if report.router_layer is not None:
        parts += [Text(f"router above {report.router_layer} layers: mean weight of each slot"), _slot_rows(report)]
    if report.sites:
        parts += [Text("control states: where each text's weight goes, mean over sites"), _state_rows(report)]
    gates = dict.fromkeys(gate for text in report.texts.values() for gate in text.gates)
    if gates:
        parts += [
            Text("gates: mean, and for adapters the share of tokens they are closed for"),
            _gate_rows(report, gates),
        ]
    return Group(*parts)


def _slot_rows(report: RoutingReport) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("text")
    for slot in range(report.slots):
        table.add_column(f"slot {slot}", justify="right")
    for name, text in report.texts.items():
        if text.router is not None:
            table.add_row(printable(name), *(f"{mean:.3f}" for mean in text.router.mean))
    return table


def _state_rows(report: RoutingReport) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("text")
    table.add_column("control states, most used first")
    for name, text in report.texts.items():
        sums = [sum(row[state] for row in text.states) for state in range(len(report.sites))]
        total = sum(sums) or 1.0
        order = sorted(range(len(sums)), key=lambda state: -sums[state])[:_SHOWN]
        used = [f"{report.sites[s][0]}.{report.sites[s][1]} {sums[s] / total:.0%}" for s in order if sums[s]]
        table.add_row(printable(name), ", ".join(used))
    return table


def _gate_rows(report: RoutingReport, gates: dict[str, None]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("gate")
    for name in report.texts:
        table.add_column(printable(name), justify="right")
    for gate in gates:
        cells = []
        for text in report.texts.values():
            chosen = text.gates[gate]
            cells.append(f"{chosen.mean:.4f}" + (f" ({chosen.closed:.0%})" if chosen.loudness is not None else ""))
        table.add_row(gate, *cells)
    return table
