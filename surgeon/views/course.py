"""What the command line shows of a continual run."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from surgeon.errors import printable
from surgeon.results import Continued


def continued_view(continued: Continued) -> RenderableType:
    """Performance on every task after every task, and what the paper makes of it."""
    names = (*continued.tasks, *continued.general)
    table = Table(box=None, pad_edge=False)
    table.add_column("accuracy (loss) after")
    for name in names:
        table.add_column(name, justify="right")
    for column in ("OP", "BWT", "ΔR"):
        table.add_column(column, justify="right", style="bold")
    for number, row in enumerate(continued.rows):
        cells = [f"{row[name].accuracy:.1%} ({row[name].loss:.3f})" if name in row else "" for name in names]
        judged = ("", "", "")
        if number:
            delta = continued.delta[number - 1]
            judged = (
                f"{continued.overall[number - 1]:.1%}",
                f"{100 * continued.backward[number - 1]:+.1f}",
                "" if delta is None else f"{100 * delta:+.1f}",
            )
        table.add_row(continued.tasks[number - 1] if number else Text("(the base)", style="dim"), *cells, *judged)
    notes = [Text("token accuracy on held-out labels; BWT and ΔR in points", style="dim")]
    if not continued.general:
        notes.append(Text("no `general:` sources, so ΔR was not measured", style="dim"))
    done = Text(f"{printable(str(continued.path))} is complete", style="bold green")
    kept = [] if continued.kept is None else [Text(f"earlier tasks' models: {printable(str(continued.kept))}")]
    return Group(table, *notes, Text(), done, *kept)
