"""Terminal tables that fit the terminal's width without cutting numbers or breaking words.

Where columns fit side by side, rich draws them so, and prose in them is folded at words. In a narrower terminal, where
rich would fold numbers and break words, each row is a small block: the first cell, then the other cells with their
headings.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

# Prose in a column narrower than this is hard to read. The gap between columns is two spaces.
_NARROWEST = 20
_GAP = 2
_INDENT = 2


@dataclass(frozen=True)
class _Column:
    """A column of a table: its heading, whether it contains numbers, and its style."""

    heading: str
    number: bool
    style: str


class FittedTable:
    """Rows under headings, or without headings (`headings=False`: names and values; the last cell of a row is prose).

    The first `names` columns identify a row. A column of numbers is right-aligned, and never folded. A column that is
    empty in every row is left out.
    """

    def __init__(self, *columns: str, headings: bool = True, names: int = 1) -> None:
        self._columns = [_Column(heading, False, "") for heading in columns]
        self._headings = headings
        self._names = names
        self._rows: list[list[Text]] = []

    def add_column(self, heading: str, *, number: bool = True, style: str = "") -> None:
        """Add a column on the right; by default a column of numbers."""
        self._columns.append(_Column(heading, number, style))

    def add_row(self, *cells: str | Text) -> None:
        """Add a row; without cells, an empty line."""
        self._rows.append([cell if isinstance(cell, Text) else Text(cell) for cell in cells])
        while len(self._columns) < len(cells):
            self._columns.append(_Column("", False, ""))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Return the least width, by the longest word, and the width of all columns side by side."""
        shown = self._shown()
        words = max((self._least(number) for number in shown), default=0)
        whole = self._width([self._natural(number) for number in shown])
        return Measurement(min(words, options.max_width), min(whole, options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table side by side where that fits the width, else stacked."""
        shown = self._shown()
        if not shown:
            return
        least = [self._least(number) for number in shown]
        if self._width(least) <= options.max_width:
            yield self._side_by_side(self._rows, shown, least, options.max_width)
        elif self._headings:
            for cells in self._rows:
                yield self._stacked(cells, shown)
        else:
            yield from self._named(shown, options.max_width)

    def _shown(self) -> list[int]:
        """Return the columns that have content in some row."""
        return [
            number
            for number in range(len(self._columns))
            if any(number < len(cells) and cells[number].plain for cells in self._rows)
        ]

    def _width(self, widths: Sequence[int]) -> int:
        """Return the width of columns of these widths side by side, with the gaps."""
        return sum(widths) + _GAP * (len(widths) - 1)

    def _cells(self, number: int) -> list[str]:
        """Return the texts in a column, the heading first where the table has headings."""
        heading = [self._columns[number].heading] if self._headings else []
        return heading + [cells[number].plain for cells in self._rows if number < len(cells)]

    def _natural(self, number: int) -> int:
        """Return the width of a column's longest line."""
        return max((cell_len(line) for cell in self._cells(number) for line in cell.splitlines()), default=0)

    def _least(self, number: int) -> int:
        """Return a column's least width: the full width for numbers and names, the longest word's for prose."""
        natural = self._natural(number)
        if self._columns[number].number:
            return natural
        return min(natural, max(_NARROWEST, _longest_word(self._cells(number))))

    def _named(self, shown: Sequence[int], room: int) -> Iterator[RenderableType]:
        """Yield names next to values; a value with a word that does not fit there (a digest) goes below its name."""
        *names, last = shown
        widths = [self._natural(number) for number in names]
        left = room - self._width(widths) - _GAP
        for fits, rows in itertools.groupby(self._rows, lambda cells: _longest_word([cells[last].plain]) <= left):
            if fits and left >= _NARROWEST:
                yield self._side_by_side(list(rows), shown, [*widths, left], room)
                continue
            for cells in rows:
                head = Text("  ").join(cells[number] for number in names if cells[number].plain)
                yield Group(head, _indented(cells[last]))

    def _side_by_side(
        self, rows: Sequence[Sequence[Text]], shown: Sequence[int], least: Sequence[int], room: int
    ) -> Table:
        """Return a table of the rows with the columns `shown`, at most `room` characters wide.

        The widest columns are shrunk, but none below its width in `least`.
        """
        widths = [self._natural(number) for number in shown]
        while self._width(widths) > room:
            # Shrink the widest column that is above its least width.
            widest = max((n for n in range(len(widths)) if widths[n] > least[n]), key=lambda n: widths[n])
            widths[widest] -= 1
        table = Table(box=None, pad_edge=False, show_header=self._headings)
        for number, width in zip(shown, widths, strict=True):
            column = self._columns[number]
            table.add_column(
                Text(column.heading),
                justify="right" if column.number else "left",
                style=column.style,
                width=width,
                overflow="fold",
            )
        for cells in rows:
            table.add_row(*(cells[number] if number < len(cells) else "" for number in shown))
        return table

    def _stacked(self, cells: Sequence[Text], shown: Sequence[int]) -> RenderableType:
        """Return one row as a block: the cells that identify it, then the other cells with their headings, indented."""
        there = [number for number in shown if number < len(cells) and cells[number].plain]
        name = Text("  ").join(cells[number] for number in there if number < self._names)
        rest = [number for number in there if number >= self._names]
        lines = [Text.assemble((self._columns[number].heading, "dim"), " ", cells[number]) for number in rest]
        return Group(name, *map(_indented, lines))


def _indented(content: RenderableType) -> Padding:
    """Return the content indented."""
    return Padding(content, (0, 0, 0, _INDENT))


def _longest_word(texts: Sequence[str]) -> int:
    """Return the width of the longest word in the texts."""
    return max((cell_len(word) for text in texts for word in text.split()), default=0)
