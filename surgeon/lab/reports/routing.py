"""`surgeon routing-report`: record what routers and gates of a grafted checkpoint choose on several texts.

One forward pass over each text records the distribution over slots of PMoE's router (Figures 3 to 5 of the paper), the
control states that each site takes in Mixture-of-Control (Figures 4 to 12), the share of tokens that take each routed
expert of a layer, how open and how loud the gates of adapters are (Neutral Residues, section 3), and the share α of
expanded branches (Control LLM).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from surgeon.anatomy.anatomy import Anatomy
from surgeon.anatomy.dissect import dissect_folder
from surgeon.anatomy.grafted_config import is_grafted
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.strict_json import parse_json_strict
from surgeon.common import devices
from surgeon.common.disk_space import writing
from surgeon.common.files import check_readable, read_given
from surgeon.common.listener import Listener, Quiet
from surgeon.common.names import check_new_name
from surgeon.common.tables import FittedTable
from surgeon.common.work_folders import write_durably
from surgeon.errors import BadInput, printable
from surgeon.lab.reports.routing_record import ExpertChoices, RoutingReport, TextChoices

_MAX_BYTES = 64_000_000
# The most experts of a layer that are named.
_MOST_NAMED = 8


def _check_record_place(to: Path) -> None:
    """Raise BadInput, before any work, where the record cannot be written to `to`.

    A file there may be replaced only if it is an earlier record.
    """
    check_new_name(to)
    shown = printable(str(to))
    if not to.absolute().parent.is_dir():
        raise BadInput(f"--to {shown}: there is no folder {printable(str(to.absolute().parent))}; make it first")
    if os.path.lexists(to):
        try:
            content = read_given(to, what="routing record", most=_MAX_BYTES)
            earlier = parse_json_strict(content, file=str(to), max_bytes=_MAX_BYTES, constants=True)
        except BadInput:
            earlier = None
        if not isinstance(earlier, dict) or "surgeon_routing" not in earlier:
            raise BadInput(f"--to {shown}: exists, and is no routing record; give another file")


def _opened(
    out: Path, texts: Mapping[str, Path | None], to: Path | None, listener: Listener, *, trust_remote_code: bool
) -> tuple[CheckpointFolder, Anatomy]:
    """Check the texts and the record's place, then open the output; return (its folder, its anatomy).

    Raises BadInput for a text, a place or an output that cannot be used, and for an output without grafts.
    """
    if to is not None:
        _check_record_place(to)
    for text in texts.values():
        if text is not None:
            check_readable(text)
    folder = CheckpointFolder.open(out, trust_remote_code=trust_remote_code)
    for note in folder.notes:
        listener.say(note)
    surgery = folder.config.get("surgery") if is_grafted(folder.config) else None
    if not isinstance(surgery, Mapping):
        raise BadInput(f"{printable(str(out))}: no grafts here, so no routers or gates; give an output that has some")
    return folder, dissect_folder(folder)


def routing_report(
    out: str | Path,
    texts: Mapping[str, Path | None] | None = None,
    *,
    to: Path | None = None,
    window: int = 128,
    windows: int = 8,
    device: str = "auto",
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> RoutingReport:
    """Run an output over texts, and record what its routers and gates choose.

    Args:
        out: the output's folder
        texts: by their domains' names; None is the built-in probe, which runs where no texts are given
        to: the JSON file that gets the result
        window: tokens in each sequence
        windows: sequences of each text; 0: all of it
        device: where the model runs
        trust_remote_code: run the output's own code
        listener: gets progress and notes

    Returns:
        the choices, text by text

    Raises:
        BadInput: for a checkpoint without routers and gates, and for texts that cannot be read
    """
    listener, texts = listener or Quiet(), texts or {"probe": None}
    devices.check(device)
    folder, anatomy = _opened(Path(out), texts, to, listener, trust_remote_code=trust_remote_code)

    from surgeon.lab.reports.recording import observer_of
    from surgeon.models.tokens import token_batches

    device = devices.resolve(device)
    observer = observer_of(folder, anatomy, window, device, listener.say)
    choices: dict[str, TextChoices] = {}
    for name, text in texts.items():
        tokens = token_batches(
            folder.path, text=text, window=window, windows=windows, vocabulary=anatomy.sizes.vocabulary
        )
        listener.begin(f"routing on {printable(name)}", len(tokens.ids), "windows")
        choices[name] = observer.run(tokens.ids.to(device), listener.advance)
    report = RoutingReport(Path(out).resolve().name, observer.router, observer.sites, choices)
    if to is not None:
        with writing(to):
            write_durably(to, json.dumps(report.to_json(), ensure_ascii=False, indent=1) + "\n")
    return report


def routing_view(report: RoutingReport) -> RenderableType:
    """Return tables for the terminal: slots, control states and experts that each text uses most, and gates."""
    parts: list[RenderableType] = []
    if report.router is not None:
        parts += [Text(f"router above {report.router.layer} layers: mean weight of each slot"), _slot_rows(report)]
    if report.sites:
        states = _table("text")
        states.add_column("control states, most used first", number=False)
        for name, text in report.texts.items():
            states.add_row(printable(name), report.most_used(text, 8))
        parts += [Text("control states: where each text's weight goes, mean over sites"), states]
    if report.routed:
        parts += [Text("routed experts: share of tokens that take each, most used first"), _expert_rows(report)]
    if report.gates:
        parts += [Text("gates: mean, and for adapters the share of tokens they are closed for"), _gate_rows(report)]
    return Group(*parts)


def _table(first: str, *numbers: str) -> FittedTable:
    """Return a table with the heading `first` for names and `numbers` for columns of numbers."""
    table = FittedTable(first)
    for heading in numbers:
        table.add_column(heading)
    return table


def _slot_rows(report: RoutingReport) -> FittedTable:
    """Return the table of the slots' mean weights, a row for each text."""
    table = _table("text", *(f"slot {slot}" for slot in range(report.slots)))
    for name, text in report.texts.items():
        if text.router is not None:
            table.add_row(printable(name), *(f"{mean:.3f}" for mean in text.router.mean))
    return table


def _expert_rows(report: RoutingReport) -> FittedTable:
    """Return the table of the most taken experts, a row for each layer and a column for each text."""
    table = FittedTable("layer")
    for name in report.texts:
        table.add_column(printable(name), number=False)
    places = dict.fromkeys(place for text in report.texts.values() for place in text.experts)
    for place in places:
        table.add_row(place, *(_most_taken(text.experts.get(place)) for text in report.texts.values()))
    return table


def _most_taken(found: ExpertChoices | None) -> str:
    """Return, as text, the experts that most tokens take, and how many are unused; empty for None."""
    if found is None:
        return ""
    order = sorted(range(len(found.tokens)), key=lambda expert: -found.tokens[expert])[:_MOST_NAMED]
    words = ", ".join(f"{expert} {found.tokens[expert]:.0%}" for expert in order if found.tokens[expert])
    return f"{words} ({found.unused} of {len(found.tokens)} unused)" if found.unused else words


def _gate_rows(report: RoutingReport) -> FittedTable:
    """Return the table of the gates' means, with the share of closed tokens for adapters."""
    table = _table("gate", *map(printable, report.texts))
    for gate in report.gates:
        chosen = [text.gates[gate] for text in report.texts.values()]
        closed = [f" ({one.closed:.0%})" if one.loudness is not None else "" for one in chosen]
        table.add_row(gate, *(f"{one.mean:.4f}{share}" for one, share in zip(chosen, closed, strict=True)))
    return table
