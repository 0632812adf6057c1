"""Models beside each other on held-out text, as one table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from surgeon.errors import printable
from surgeon.results import Evaluation, SourceScores

if TYPE_CHECKING:
    from surgeon.evaluation.scores import Ratio


def evaluation_view(evaluation: Evaluation) -> RenderableType:
    """One row a source and model: scores with their intervals, and how far from the first model's."""
    compared = len(evaluation.models) > 1
    table = Table(box=None, pad_edge=False)
    table.add_column("source")
    table.add_column("model", overflow="fold")
    for column in ("loss", "perplexity", "bits/byte", "right"):
        table.add_column(column, justify="right")
    if compared:
        table.add_column(f"Δ to {printable(evaluation.models[0].model, 40)}", justify="right", overflow="fold")
    for number, first in enumerate(evaluation.models[0].sources):
        if number and compared:
            table.add_row()
        for row in evaluation.models:
            found = row.sources[number]
            cells = [
                Text(found.source if found is first else "", style="bold"),
                Text(printable(row.model)),
                _cell(found.loss, ".4f"),
                _cell(found.perplexity, ".4g"),
                _cell(found.bits_per_byte, ".4f"),
                Text(f"{found.accuracy.value:.1%}"),
            ]
            table.add_row(*cells, *([_difference(found)] if compared else []))
    sizes = ", ".join(
        f"{found.source} {found.documents:,} documents, {found.tokens:,} tokens"
        for found in evaluation.models[0].sources
    )
    told = f"{sizes}; windows of at most {evaluation.length:,} tokens; [ ] 95 % confidence, over documents"
    return Group(table, Text(), Text(told, style="dim"))


def _cell(found: Ratio, form: str) -> Text:
    text = Text(f"{found.value:{form}}")
    if found.interval is not None:
        text.append(f" [{found.interval[0]:{form}}, {found.interval[1]:{form}}]", style="dim")
    return text


def _difference(found: SourceScores) -> Text:
    """In nats a token, or in bits per byte where tokens are other ones; coloured where the interval leaves out 0."""
    shown, unit = found.loss_difference, ""
    if shown is None:
        shown, unit = found.bits_difference, " bits/byte"
    if shown is None:
        return Text()
    if shown.value == 0 and shown.interval in (None, (0, 0)):
        return Text(f"0, exactly{unit}", style="dim")
    style = ""
    if shown.interval is not None and shown.interval[1] < 0:
        style = "green"
    elif shown.interval is not None and shown.interval[0] > 0:
        style = "yellow"
    text = Text(f"{shown.value:+.4f}", style=style)
    if shown.interval is not None:
        text.append(f" [{shown.interval[0]:+.4f}, {shown.interval[1]:+.4f}]", style="dim")
    return text.append(unit)
