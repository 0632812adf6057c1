"""The table of a transport report (OpT-DeUS, Table 8)."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from surgeon.entropies import MODULES, TransportReport
from surgeon.errors import printable


def transport_view(report: TransportReport) -> RenderableType:
    """A row a module: entropies, what they are at most, and how well the worst of its maps was solved."""
    table = Table(box=None, pad_edge=False)
    after = any(found.trained is not None for found in report.maps)
    columns = ["module", "entropy (nats)", *(["after training"] if after else []), "at most", "iterations", "L1 error"]
    for column in columns:
        table.add_column(column, justify="left" if column == "module" else "right")
    for module in MODULES:
        maps = [found for found in report.maps if found.module == module]
        trained = report.mean(module, trained=True)
        table.add_row(
            module,
            f"{report.mean(module):.2f}",
            *([f"{trained:.2f}"] if trained is not None else []),
            f"{maps[0].uniform:.2f}",
            str(max(found.iterations for found in maps)),
            f"{max(max(found.row_error, found.column_error) for found in maps):.1e}",
        )
    layers = len({found.layer for found in report.maps})
    lines: list[RenderableType] = [
        Text(f"mean over {layers} inserted layer{'s' * (layers != 1)} and the base layers below and above"),
        table,
    ]
    if open_ones := [found.name for found in report.maps if not found.converged]:
        lines.append(Text(f"not converged: {', '.join(open_ones[:6])}", style="yellow"))
    lines += [Text(f"drawn: {printable(str(path))}", style="dim") for path in report.pictures]
    return Group(*lines)
