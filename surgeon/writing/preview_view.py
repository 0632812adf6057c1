"""A preview in the terminal: the new stack next to the old, what each operation promises, and what it costs."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from surgeon.blueprint.blueprint import Blueprint, Layer
from surgeon.common.formatting import count, size, span
from surgeon.common.promises import PROMISE_STYLES
from surgeon.common.tables import FittedTable
from surgeon.errors import printable
from surgeon.manifest.card import layer_runs
from surgeon.writing.preview import Preview


def preview_view(preview: Preview, base: str, *, notes: bool = True) -> RenderableType:
    """Return the new layer list next to the old, what each operation promises, and what it costs."""
    blueprint = preview.blueprint
    return Group(
        Text.assemble((printable(base), "bold"), f" ({printable(preview.model_type)})"),
        *(Text(f"note: {printable(note)}", style="yellow") for note in preview.notes_on_it if notes),
        Text(),
        _stack(blueprint),
        Text(),
        _operations(blueprint),
        *_proof(preview),
        Text(),
        *_measured(preview),
        _budget(preview),
    )


def _stack(blueprint: Blueprint) -> FittedTable:
    """Return old and new layers side by side, from the top of the stack down; runs of kept layers take one row."""
    table = FittedTable(names=4)
    table.add_column("base", style="cyan")
    table.add_column("")
    table.add_column("output")
    table.add_column("", number=False)
    gone = sorted(layer for dropped in blueprint.dropped.values() for layer in dropped)
    above = len(blueprint.layer_of_base)
    for run in reversed(layer_runs(blueprint.layers)):
        first, last = run[0], run[-1]
        if last.base is not None:
            _add_gone(table, [layer for layer in gone if last.base < layer < above])
            above = first.base if first.base is not None else above
        if first.base is not None and last.base is not None:
            table.add_row(span(first.base, last.base), "──▶", span(first.index, last.index), _kept(first))
        else:
            made = Text(span(first.index, last.index), style="green")
            table.add_row("", Text("✚", style="bold green"), made, _made(run))
    _add_gone(table, [layer for layer in gone if layer < above])
    return table


def _add_gone(table: FittedTable, layers: list[int]) -> None:
    """Add a row for layers of the base that were taken out between two runs; none where `layers` is empty."""
    if layers:
        table.add_row(
            span(layers[0], layers[-1]), Text("✕", style="bold yellow"), "", Text("taken out", style="yellow")
        )


def _kept(layer: Layer) -> Text:
    """Return the words for a kept layer: what an operation changed in it, or `kept`; then its grafts."""
    return _with_grafts(Text(layer.init, style="yellow") if layer.init else Text("kept", style="dim"), layer)


def _with_grafts(text: Text, layer: Layer) -> Text:
    """Append a layer's grafts, and who made each, to `text`; return `text`."""
    for graft in layer.grafts:
        text.append(f" + {graft.text}", style="green")
        origin = "the base's" if graft.operation is None else f"operation {graft.operation}"
        text.append(f" ({origin})", style="dim")
    return text


def _made(run: list[Layer]) -> Text:
    """Return the words for a run of new layers: init, source layers, operation, grafts."""
    first, last = run[0], run[-1]
    text = Text(f"new: {first.init}", style="green")
    if first.sources and len(run) == 1:
        text.append(f" of {' and '.join(str(s) for s in first.sources)}")
    elif first.sources and last.sources:
        text.append(f" of {span(first.sources[0], last.sources[-1])}")
    if first.operation is not None:
        text.append(f"  (operation {first.operation})", style="dim")
    return _with_grafts(text, first)


def _operations(blueprint: Blueprint) -> FittedTable:
    """Return a table with one row for each operation."""
    table = FittedTable("operation", "matched", "promise", "why", "trains")
    for number, record in enumerate(blueprint.operations):
        claim = record.claim
        table.add_row(
            f"{number} {record.op}", record.matched, PROMISE_STYLES[claim.promise], claim.reason, record.trains
        )
    return table


def _proof(preview: Preview) -> list[RenderableType]:
    """Return the lines on how an exact promise is known; none where the plan promises less."""
    if not preview.proof.text:
        return []
    return [Text.assemble(PROMISE_STYLES["exact"], f": {preview.proof.text}")]


def _measured(preview: Preview) -> list[RenderableType]:
    """Return a table of a vocabulary's effect on texts: tokens per word, and documents tokenised as before.

    Returns nothing where no text was measured.
    """
    if not preview.measured:
        return []
    table = FittedTable("use", "text")
    for heading in ("tokens a word", "now", "documents", "as before"):
        table.add_column(heading)
    for text in preview.measured:
        before, after = text.fertility
        counts = (f"{text.documents:,}", f"{text.unchanged:,}")
        table.add_row(text.use, printable(text.text), f"{before:.3f}", f"{after:.3f}", *counts)
    return [table, Text()]


def _links(nbytes: int) -> str:
    """Return words for the bytes that are hard-linked."""
    if not nbytes:
        return "nothing: every shard of the base changes, as tensors in it are renumbered, widened or left out"
    return f"{size(nbytes)}, hard links to the base's files: one file under two names, which becomes read-only"


def _budget(preview: Preview) -> FittedTable:
    """Return a table of parameters, bytes, memory, and how the output loads."""
    table = FittedTable(headings=False)
    grown = preview.parameters_after / preview.parameters_before
    table.add_row("parameters", f"{count(preview.parameters_before)} → {count(preview.parameters_after)}, ×{grown:.3g}")
    table.add_row("new", count(preview.parameters_new))
    table.add_row("trainable", count(preview.parameters_trainable))
    holes = f" and {size(preview.bytes_holes)} of zeros as holes" if preview.bytes_holes else ""
    table.add_row("reads", size(preview.bytes_to_read))
    linked = preview.bytes_unchanged if preview.link else 0
    table.add_row("writes", f"{size(preview.bytes_to_write - linked)}{holes}, {len(preview.shards)} shards")
    if preview.link:
        table.add_row("links", _links(linked))
    elif preview.bytes_unchanged:
        unchanged = f"{size(preview.bytes_unchanged)} of it are shards of the base, unchanged"
        table.add_row("", f"{unchanged}: cloned where the file system can, hard-linked with --link, else copied")
    table.add_row("peak memory", f"about {size(preview.peak_memory)}")
    native = "native: loads without custom code"
    if not preview.blueprint.native:
        native = "loads with trust_remote_code=True"
    table.add_row("output", native)
    return table
