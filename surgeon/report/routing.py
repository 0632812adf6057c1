"""`surgeon routing-report`: what routers and gates of a grafted checkpoint choose, by layer and site, on several texts.

One forward pass over each text records: PMoE's router (its distribution over slots, Figures 3 to 5 of the paper),
Mixture-of-Control's routing (which control states each site takes, Figures 4 to 12), gates of adapters (how open, how
loud: Neutral Residues, section 3) and the share α of expanded branches (Control LLM).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.names import check_new_name
from surgeon.checkpoint.strict_json import parse_json_strict
from surgeon.common import devices
from surgeon.common.files import read_given
from surgeon.common.listener import Listener, Quiet
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import Anatomy, is_grafted
from surgeon.families.dissect import dissect
from surgeon.models.encoders import auto_class, check_window, load_encoder
from surgeon.models.load import load_model, running
from surgeon.models.tokenizer import Tokenizer, open_tokenizer
from surgeon.models.tokens import token_batches
from surgeon.report.files import write_text

# How many tokens of each text are kept one by one, to colour them by slot (PMoE, Figure 5).
_EXAMPLES = 256
_BATCH = 4
_MAX_BYTES = 64_000_000

Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Index = Annotated[int, Field(ge=0)]
Site = tuple[Index, Literal["attention", "ffn"]]


class _Entry:
    """A record's part; its annotations are what a file of it must hold, and nothing more."""

    __pydantic_config__ = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


@dataclass(frozen=True)
class RouterChoices(_Entry):
    """PMoE's router on one text: mean weight of each slot, share of tokens it is the largest for, and some tokens.

    `examples` are (token, its slot of largest weight).
    """

    mean: tuple[Share, ...]
    largest: tuple[Share, ...]
    examples: tuple[tuple[str, Index], ...]


@dataclass(frozen=True)
class GateChoices(_Entry):
    """A gate on one text: its mean value (α of an interpolator), and the share of tokens for which it is zero.

    `loudness` is the mean of what an adapter adds, ‖·‖₁ over the width; None for an interpolator.
    """

    mean: Number
    closed: Share
    loudness: Number | None


@dataclass(frozen=True)
class TextChoices(_Entry):
    """The choices on one text of `tokens` tokens.

    `states[s][k]` is the weight that site s gave control state k, mean over tokens; rows are in the order of
    `RoutingReport.sites`. `gates` are by the layer's number and the module (`3.adapter`, `3.interpolator`).
    """

    tokens: Index
    router: RouterChoices | None
    states: tuple[tuple[Share, ...], ...]
    gates: dict[str, GateChoices]


@dataclass(frozen=True)
class RouterPlace(_Entry):
    """A router: the number of layers below it, and its slots."""

    layer: Index
    slots: Annotated[int, Field(ge=1, le=10_000)]


@dataclass(frozen=True)
class RoutingReport(_Entry):
    """The choices of routers and gates, text by text; `sites` are (layer, block) of the control states.

    `surgeon_routing` is the version of the format in which it is written.
    """

    surgeon_routing: Literal[1]
    model: str
    router: RouterPlace | None
    sites: tuple[Site, ...]
    texts: dict[str, TextChoices]

    def __repr__(self) -> str:
        return f"RoutingReport({self.model!r}, {self.slots} slots, {len(self.sites)} sites, texts {list(self.texts)})"

    @property
    def slots(self) -> int:
        """How many slots the router weighs; 0 without one."""
        return self.router.slots if self.router else 0

    @property
    def gates(self) -> list[str]:
        """The names of all gates."""
        return list(dict.fromkeys(gate for text in self.texts.values() for gate in text.gates))

    def most_used(self, text: TextChoices, most: int) -> str:
        """The control states that get most of a text's weight, with their shares of it, as words."""
        sums = [sum(row[state] for row in text.states) for state in range(len(self.sites))]
        total = sum(sums) or 1.0
        order = sorted(range(len(sums)), key=lambda state: -sums[state])[:most]
        return ", ".join(f"{self.sites[s][0]}.{self.sites[s][1]} {sums[s] / total:.0%}" for s in order if sums[s])

    def to_json(self) -> dict[str, Any]:
        """As plain data: the file's content and `--json`."""
        plain: dict[str, Any] = TypeAdapter(RoutingReport).dump_python(self, mode="json")
        return plain


def read_routing(file: Path) -> RoutingReport:
    """The report in `file`. Raises BadInput, which names the first thing that is missing or wrong."""
    shown = printable(str(file))
    content = read_given(file, what="routing record", most=_MAX_BYTES)
    try:
        read = TypeAdapter(RoutingReport).validate_python(
            parse_json_strict(content, file=str(file), max_bytes=_MAX_BYTES, constants=True)
        )
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = printable(".".join(str(step) for step in problem["loc"]) or "the file")
        raise BadInput(
            f"{shown}: not a routing report ({where}: {printable(problem['msg'])}); `surgeon routing-report --to FILE`"
            " writes one"
        ) from None
    for name, text in read.texts.items():
        if text.states and {len(text.states), *map(len, text.states)} != {len(read.sites)}:
            raise BadInput(f"{shown}: states of {printable(name)} are not {len(read.sites)} × {len(read.sites)}")
        router = text.router
        if router and (
            {len(router.mean), len(router.largest)} != {read.slots} or any(s >= read.slots for _, s in router.examples)
        ):
            raise BadInput(f"{shown}: the router of {printable(name)} has other slots than the {read.slots} named")
    return read


def _check_record_place(to: Path) -> None:
    """Raise BadInput, before any work, where the record would replace anything but an earlier record."""
    check_new_name(to)
    shown = printable(str(to))
    if not to.absolute().parent.is_dir():
        raise BadInput(f"--to {shown}: there is no folder {printable(str(to.absolute().parent))}; make it first")
    if os.path.lexists(to):
        try:
            read_routing(to)
        except BadInput as error:
            raise BadInput(f"--to {shown}: exists, and is no routing record; give another file") from error


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
    listener, device = listener or Quiet(), devices.resolve(device)
    if to is not None:
        _check_record_place(to)
    folder = CheckpointFolder.open(Path(out), trust_remote_code=trust_remote_code)
    for note in folder.notes:
        listener.say(note)
    surgery = folder.config.get("surgery") if is_grafted(folder.config) else None
    if not isinstance(surgery, Mapping):
        raise BadInput(f"{printable(str(out))}: no grafts here, so no routers or gates; give an output that has some")
    anatomy = dissect(folder.config, folder.tensors)
    observer = _observer(folder, anatomy, window, device, listener.say)
    # None: there is no tokenizer, and tokens are shown by number.
    tokenizer, _ = open_tokenizer(folder.path) if observer.router else (None, "")
    choices: dict[str, TextChoices] = {}
    for name, text in texts.items():
        listener.say(f"routing on {printable(name)}")
        tokens = token_batches(
            folder.path, text=text, window=window, windows=windows, vocabulary=anatomy.sizes.vocabulary
        )
        choices[name] = observer.run(tokens.ids.to(device), tokenizer)
    report = RoutingReport(1, Path(out).resolve().name, observer.router, observer.sites, choices)
    if to is not None:
        write_text(json.dumps(report.to_json(), ensure_ascii=False, indent=1) + "\n", to)
    return report


def _observer(
    folder: CheckpointFolder, anatomy: Anatomy, window: int, device: str, say: Callable[[str], None]
) -> _Observer:
    """The checkpoint's model, loaded to be observed. Raises BadInput where nothing in it chooses."""
    if anatomy.family.encoder:
        auto = auto_class(folder.config)
        model = load_encoder(folder, device=device, auto=auto)
        check_window(model.config, window)
    else:
        model = load_model(folder, device=device, say=say)
    observer = _Observer(model, encoder=anatomy.family.encoder)
    if not observer.chooses:
        raise BadInput(
            f"{printable(str(folder.path))}: its grafts have neither router nor gate, so there is nothing to record;"
            " give another output"
        )
    return observer


def _decoder(model: Any, stack: str) -> Any:
    """The text decoder of an upcycled model, whose layers are called `stack`: it may be one of several parts."""
    return next(module for module in model.modules() if hasattr(module, "surgery") and hasattr(module, stack))


class _Observer:
    """A loaded model that records the choices of its routers and gates."""

    def __init__(self, model: Any, *, encoder: bool) -> None:
        self.model = model
        # From the code that was loaded with the checkpoint, which need not be the installed one.
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
        for layer, module in enumerate(() if encoder else getattr(trunk, stack)):
            self._observe(str(layer), module)
            if layer in surgery.homes.values():
                self._observe(f"{layer}.branch", module.expanded)

    @property
    def chooses(self) -> bool:
        """Whether the model has routers or gates."""
        return bool(self.router or self.sites or self._gates)

    def run(self, ids: Tensor, tokenizer: Tokenizer | None) -> TextChoices:
        """Run one text's windows (windows, window) and return the choices."""
        for heard in (self._gates, self._loudness):
            for parts in heard.values():
                parts.clear()
        routing: list[Tensor] = []
        states = torch.zeros(len(self.sites), len(self.sites), dtype=torch.float64)
        for batch in torch.split(ids, _BATCH):
            flow = self._flow(records_choices=True)
            with torch.inference_mode(), running(self.model):
                self.model(batch, **self._asked, surgery_flow=flow)
            if self.router:
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


def _router_choices(weights: Tensor, ids: list[int], tokenizer: Tokenizer | None) -> RouterChoices:
    largest = weights.argmax(dim=-1)
    shares = torch.bincount(largest, minlength=weights.shape[-1]).double() / len(largest)
    shown = ids[:_EXAMPLES]
    words = [str(token) for token in shown] if tokenizer is None else [tokenizer.decode([token]) for token in shown]
    return RouterChoices(
        mean=tuple(weights.mean(dim=0).tolist()),
        largest=tuple(shares.tolist()),
        examples=tuple(zip(words, largest.tolist(), strict=False)),
    )


def routing_view(report: RoutingReport) -> RenderableType:
    """Slots by text; the control states each text uses most; gates by text."""
    parts: list[RenderableType] = []
    if report.router is not None:
        parts += [Text(f"router above {report.router.layer} layers: mean weight of each slot"), _slot_rows(report)]
    if report.sites:
        states = _table("text")
        states.add_column("control states, most used first")
        for name, text in report.texts.items():
            states.add_row(printable(name), report.most_used(text, 8))
        parts += [Text("control states: where each text's weight goes, mean over sites"), states]
    if report.gates:
        parts += [Text("gates: mean, and for adapters the share of tokens they are closed for"), _gate_rows(report)]
    return Group(*parts)


def _table(first: str, *numbers: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table


def _slot_rows(report: RoutingReport) -> Table:
    table = _table("text", *(f"slot {slot}" for slot in range(report.slots)))
    for name, text in report.texts.items():
        if text.router is not None:
            table.add_row(printable(name), *(f"{mean:.3f}" for mean in text.router.mean))
    return table


def _gate_rows(report: RoutingReport) -> Table:
    table = _table("gate", *map(printable, report.texts))
    for gate in report.gates:
        chosen = [text.gates[gate] for text in report.texts.values()]
        closed = [f" ({one.closed:.0%})" if one.loudness is not None else "" for one in chosen]
        table.add_row(gate, *(f"{one.mean:.4f}{share}" for one, share in zip(chosen, closed, strict=True)))
    return table
