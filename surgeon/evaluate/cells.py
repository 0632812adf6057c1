"""A cell of a table of evaluations: a figure with its interval."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from surgeon.data.scoring import Ratio


def ratio_cell(found: Ratio, form: str) -> Text:
    """`3.1416 [3.1, 3.2]`, each number by the format `form`; the interval, where there is one, dim."""
    text = Text(f"{found.value:{form}}")
    if found.interval is not None:
        text.append(f" [{found.interval[0]:{form}}, {found.interval[1]:{form}}]", style="dim")
    return text
