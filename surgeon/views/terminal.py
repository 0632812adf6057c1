"""What the command line shows: rich renderables made from the API's results. Prints nothing itself."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from surgeon.blueprint import Blueprint, Layer
from surgeon.errors import printable
from surgeon.families.anatomy import layer_of
from surgeon.manifest import MANIFEST_FILE
from surgeon.plan.selectors import show
from surgeon.results import (
    Applied,
    AppliedDelta,
    Difference,
    Exported,
    Inspection,
    MadeDelta,
    Merged,
    Preview,
    Pushed,
    Reverted,
    Trained,
    Verification,
)

_PROMISES = {
    "exact": Text("exact", style="bold green"),
    "none": Text("not preserving", style="bold yellow"),
}


def preview_view(preview: Preview, base: str) -> RenderableType:
    """The new layer list beside the old, what each operation promises, and what it costs."""
    blueprint = preview.blueprint
    return Group(
        Text.assemble((printable(base), "bold"), f" ({printable(preview.model_type)})"),
        *(Text(f"note: {printable(note)}", style="yellow") for note in preview.notes),
        Text(),
        _stack(blueprint),
        Text(),
        _operations(blueprint),
        Text(),
        _budget(preview),
    )


def applied_view(applied: Applied) -> RenderableType:
    """A finished surgery in a few lines."""
    manifest = applied.manifest
    kept = sum(not output.new for output in applied.preview.blueprint.outputs)
    proof = "read back and byte-identical" if applied.read_back else "not read back (surgeon verify does it)"
    lines: list[RenderableType] = [
        Text.assemble(
            ("done ", "bold green"),
            printable(str(applied.path)),
            f": {len(manifest.layers)} layers, {len(manifest.new_tensors)} new tensors, promise ",
            _PROMISES[manifest.promise],
        ),
        Text(
            f"{kept} base tensors in their places, {proof}",
            style="dim",
        ),
    ]
    if applied.left_behind:
        lines.append(Text(f"not carried along: {_listed(applied.left_behind)}", style="dim"))
    return Group(*lines)


def merged_view(merged: Merged) -> RenderableType:
    """What was written, and what merging cost."""
    return Group(applied_view(merged.applied), verification_view(merged.measured))


def reverted_view(reverted: Reverted) -> RenderableType:
    """What was taken out, and what stands there now."""
    undone = "; ".join(", ".join(map(printable, operations)) for operations in reverted.undone)
    state = f"the base {printable(reverted.base)}" if reverted.to == 0 else f"{reverted.to} of its surgeries"
    lines: list[RenderableType] = [
        Text.assemble(
            ("done ", "bold green"), f"{printable(str(reverted.path))}: {state}, without {undone}", overflow="fold"
        ),
        Text(
            f"{reverted.tensors} tensors ({size(reverted.nbytes)}), each what its digest in {MANIFEST_FILE} says;"
            f" {reverted.dropped} dropped",
            style="dim",
        ),
    ]
    if reverted.left_behind:
        lines.append(Text(f"not carried along: {_listed(reverted.left_behind)}", style="dim"))
    return Group(*lines)


def delta_view(made: MadeDelta) -> RenderableType:
    """How much of the output the delta is, and the base it goes onto."""
    base = printable(made.base + (f"@{made.revision}" if made.revision else ""))
    return Group(
        Text.assemble(
            ("done ", "bold green"),
            f"{printable(str(made.path))}: {made.tensors} of {made.whole} tensors, {size(made.nbytes)} of"
            f" {size(made.whole_nbytes)}",
            overflow="fold",
        ),
        Text(f"goes onto the base of the last surgery, {base}", style="dim", overflow="fold"),
        Text(f"put it back: surgeon apply --delta {printable(str(made.path))} BASE OUT"),
    )


def applied_delta_view(applied: AppliedDelta) -> RenderableType:
    """What was put together."""
    return Text.assemble(
        ("done ", "bold green"),
        f"{printable(str(applied.path))}: {applied.whole} tensors ({size(applied.nbytes)}), {applied.tensors} from the"
        f" delta and the rest from {printable(applied.base)}, each what its digest says",
        overflow="fold",
    )


def pushed_view(pushed: Pushed) -> RenderableType:
    """What went up (or would), how much of it is new, and the commit to pin."""
    table = Table(box=None, show_header=False, pad_edge=False)
    styles = {"new": "green", "changed": "yellow", "there": "dim"}
    for file in pushed.files:
        table.add_row(Text(file.state, style=styles[file.state]), size(file.nbytes), printable(file.name))
    for name in pushed.stale:
        table.add_row(Text("taken out", style="red"), "", printable(name))
    lines: list[RenderableType] = [table, Text()]
    if pushed.left_behind:
        lines.append(Text(f"stays here: {_listed(pushed.left_behind)}", style="dim"))
    if pushed.verification is not None:
        lines.append(verdict(pushed.verification))
    else:
        held = sum(check.holds for check in pushed.checks)
        told = (
            f"{held} of {len(pushed.checks)} checks against its own {MANIFEST_FILE} hold (--base compares logits too)"
        )
        lines.append(Text(told, style="green" if held == len(pushed.checks) else "bold red"))
    sent = sum(file.nbytes for file in pushed.sent)
    whole = sum(file.nbytes for file in pushed.files)
    amount = f"{len(pushed.sent)} of {len(pushed.files)} files, {size(sent)} of {size(whole)}"
    where = f"{pushed.repo_id}@{printable(pushed.revision)}" if pushed.revision else pushed.repo_id
    if pushed.dry_run:
        lines.append(Text(f"dry run: {amount} would go to {where}; nothing was sent"))
    elif pushed.url is None:
        lines.append(Text.assemble(("done ", "bold green"), f"{where} holds all of it already, commit {pushed.commit}"))
    else:
        lines.append(Text.assemble(("done ", "bold green"), f"{amount}, to {where}"))
        lines.append(Text(f"look at it: {printable(pushed.pull_request or pushed.url)}"))
        if pushed.delta:
            lines.append(Text(f"put it back: surgeon apply --delta {pushed.repo_id}@{pushed.commit} BASE OUT"))
        else:
            lines.append(Text(f'load it: from_pretrained("{pushed.repo_id}", revision="{pushed.commit}")'))
    return Group(*lines)


def exported_view(exported: Exported) -> RenderableType:
    """Which slot was written, and the base to load it on."""
    revision = f"@{exported.revision}" if exported.revision else ""
    return Group(
        Text.assemble(
            ("done ", "bold green"),
            f"{printable(str(exported.path))}: slot {exported.slot} as a PEFT adapter for"
            f" {printable(exported.base + revision)}",
            overflow="fold",
        ),
        Text(
            f"{exported.modules} modules in layers {show(list(exported.layers))}, {size(exported.nbytes)}", style="dim"
        ),
    )


def difference_view(difference: Difference) -> RenderableType:
    """What differs, by kind and layers; the names are in `--json`."""
    table = Table(box=None, show_header=False, pad_edge=False)
    before, after = difference.sizes
    kinds: tuple[tuple[str, str, Mapping[str, str], dict[str, int]], ...] = (
        ("same", "dim", {name: name for name in difference.same}, before),
        ("moved", "cyan", difference.moved, before),
        ("changed", "yellow", difference.changed, before),
        ("removed", "red", {name: name for name in difference.removed}, before),
        ("added", "green", {name: name for name in difference.added}, after),
    )
    for kind, style, names, sizes in kinds:
        if names:
            tensors = f"{len(names)} tensor{'' if len(names) == 1 else 's'}"
            table.add_row(Text(kind, style=style), tensors, size(sum(sizes[name] for name in names)), _where(names))
    for key, (a, b) in difference.config.items():
        table.add_row(Text("config", style="yellow"), printable(key), "", f"{_value(a)} → {_value(b)}")
    how = "both were read"
    if difference.told is not None:
        how = (
            f"{printable(str(difference.told))} was not read: what it held is told from the other's {MANIFEST_FILE}"
            " (--exact reads both)"
        )
    verdict = Text("the same", style="bold green") if difference.identical else Text("they differ", style="bold yellow")
    return Group(table, Text(), Text.assemble(verdict, (f"; {how}", "dim")))


def trained_view(trained: Trained) -> RenderableType:
    """What was learned and forgotten, what changed by how much, and what it took."""
    losses = Table(box=None, pad_edge=False)
    for column in ("source", "before", "after", "change"):
        losses.add_column(column, justify="left" if column == "source" else "right")
    for name, (before, after) in trained.losses.items():
        style = "green" if after < before else "yellow"
        losses.add_row(name, f"{before:.4f}", f"{after:.4f}", Text(f"{after - before:+.4f}", style=style))
    groups: dict[str, list[tuple[float, float | None]]] = {}
    for name, change in trained.changes.items():
        place = layer_of(name)
        groups.setdefault(printable(name) if place is None else f"layer {place[1]}", []).append(change)
    tensors = Table(box=None, pad_edge=False)
    for column in ("tensors", "count", "max |Δ|", "‖Δ‖ / ‖before‖"):
        tensors.add_column(column, justify="left" if column == "tensors" else "right")
    for where, changes in groups.items():
        relative = [value for _, value in changes if value is not None]
        tensors.add_row(
            where,
            str(len(changes)),
            f"{max(largest for largest, _ in changes):.3g}",
            f"{min(relative):.3g} … {max(relative):.3g}" if relative else "from zero",
        )
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_row("trained", f"{count(trained.parameters)} in {len(trained.changes)} tensors")
    speed = f", {trained.tokens_per_second:,.0f} a second" if trained.tokens_per_second else ""
    facts.add_row("tokens", f"{trained.tokens:,}{speed}")
    facts.add_row("peak memory", size(trained.peak_memory))
    parts: list[RenderableType] = [losses, Text(), tensors, Text(), facts]
    if trained.unchanged:
        parts.append(Text(f"did not change: {_listed(trained.unchanged)}", style="bold yellow"))
    done = Text(f"{printable(str(trained.path))} is complete; every other tensor is as it was, byte for byte")
    return Group(*parts, Text(), Text.assemble(done, style="bold green"))


def verification_view(verification: Verification) -> RenderableType:
    """Checks and comparisons, and the verdict in one line."""
    checks = Table(box=None, show_header=False, pad_edge=False)
    for check in verification.checks:
        mark = Text("holds", style="green") if check.holds else Text("FAILS", style="bold red")
        checks.add_row(mark, check.name, Text(check.detail, overflow="fold"))
    parts: list[RenderableType] = [checks]
    if verification.comparisons:
        parts += [Text(), Text(f"logits on {printable(verification.tokens)}"), _comparisons(verification)]
    difference = verification.first_difference
    if difference is not None:
        parts.append(Text(f"first difference ({difference.mode}): {printable(difference.where)}"))
    return Group(*parts, Text(), verdict(verification))


def verdict(verification: Verification) -> Text:
    """One line: exact, not preserving as promised, or broken."""
    if not verification.holds:
        return Text("a promise does not hold", style="bold red")
    if verification.trained:
        told = "logits not compared" if verification.identical is None else "logits are the trained model's"
        return Text(f"trained: every other tensor is the base's, byte for byte ({told})", style="bold green")
    if verification.promise == "none":
        found = {True: "identical all the same", False: "logits differ", None: "logits not compared"}
        return Text(f"not preserving, as promised ({found[verification.identical]})", style="bold yellow")
    if verification.identical is None:
        return Text("every static promise holds (logits not compared)", style="bold green")
    return Text("exact: every promise holds, every logit is bit-identical", style="bold green")


def inspection_view(inspection: Inspection) -> RenderableType:
    """What a checkpoint is and what was done to it."""
    anatomy, folder = inspection.anatomy, inspection.folder
    sizes = anatomy.sizes
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_row("family", anatomy.family.model_type)
    facts.add_row("layers", f"{sizes.layers}, width {sizes.hidden}, MLP {sizes.intermediate}")
    facts.add_row("heads", f"{sizes.heads} ({sizes.kv_heads} key-value), of {sizes.head_dim}")
    facts.add_row("vocabulary", f"{sizes.vocabulary}{', tied embeddings' if anatomy.tied else ''}")
    facts.add_row("parameters", count(inspection.parameters))
    facts.add_row("shards", f"{len(folder.shards)}, {', '.join(sorted({i.dtype for i in folder.tensors.values()}))}")
    manifest = inspection.manifest
    if manifest is None:
        facts.add_row("surgery", "none (no surgery.json)")
        return facts
    facts.add_row(
        "base", printable(manifest.base.id + (f"@{manifest.base.revision}" if manifest.base.revision else ""))
    )
    facts.add_row("promise", _PROMISES[manifest.promise])
    facts.add_row("written by", f"surgeon {printable(manifest.tool.version)}")
    for number, entry in enumerate(manifest.operations):
        facts.add_row(f"operation {number}", f"{printable(entry.op)}: {printable(entry.matched)}")
    for ancestor in manifest.lineage:
        facts.add_row("earlier", f"{printable(', '.join(ancestor.operations))} on {printable(ancestor.base)}")
    new_layers = [index for index, layer in enumerate(manifest.layers) if layer.base is None]
    if new_layers:
        facts.add_row("new layers", show(new_layers))
    grafts: dict[str, list[int]] = {}
    for index, layer in enumerate(manifest.layers):
        for graft in layer.grafts:
            grafts.setdefault(graft.text, []).append(index)
    for text, layers in grafts.items():
        facts.add_row("grafts", f"{printable(text)}: {'layer' if len(layers) == 1 else 'layers'} {show(layers)}")
    for run in manifest.training:
        told = ", ".join(
            f"{printable(name)} {before:.4f} → {after:.4f}" for name, (before, after) in run.losses.items()
        )
        told = f"; held-out loss {told}" if told else ""
        facts.add_row("trained", f"{len(run.tensors)} tensors, {run.steps:,} steps{told}")
    facts.add_row(
        "new tensors",
        f"{len(manifest.new_tensors)}, in {_listed(sorted({t.shard for t in manifest.new_tensors.values()}))}",
    )
    return facts


def count(number: int) -> str:
    """A count of parameters: 1,235,814,400 (1.24B)."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if number >= size:
            return f"{number:,} ({number / size:.3g}{unit})"
    return f"{number:,}"


def size(number: int) -> str:
    """A number of bytes in decimal units."""
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number} B"


def _stack(blueprint: Blueprint) -> Table:
    """Old and new layers side by side, from the top of the stack down; runs of kept layers take one row."""
    table = Table(box=None, pad_edge=False)
    table.add_column("base", justify="right", style="cyan")
    table.add_column("")
    table.add_column("output", justify="right")
    table.add_column("")
    for run in reversed(list(_runs(blueprint.layers))):
        first, last = run[0], run[-1]
        if first.base is not None and last.base is not None:
            table.add_row(_span(first.base, last.base), "──▶", _span(first.index, last.index), _kept(first))
        else:
            table.add_row(
                "",
                Text("✚", style="bold green"),
                Text(_span(first.index, last.index), style="green"),
                _made(run),
            )
    return table


def _runs(layers: Iterable[Layer]) -> Iterable[list[Layer]]:
    run: list[Layer] = []
    for layer in layers:
        if run and not _joins(run[-1], layer):
            yield run
            run = []
        run.append(layer)
    if run:
        yield run


def _joins(below: Layer, above: Layer) -> bool:
    if below.grafts != above.grafts:
        return False
    if below.base is not None and above.base is not None:
        return above.base == below.base + 1 and above.init == below.init
    return below.base is above.base is None and below.operation == above.operation and below.init == above.init


def _kept(layer: Layer) -> Text:
    return _with_grafts(Text(layer.init, style="yellow") if layer.init else Text("kept", style="dim"), layer)


def _with_grafts(text: Text, layer: Layer) -> Text:
    for graft in layer.grafts:
        text.append(f" + {graft.text}", style="green")
        told = "the base's" if graft.operation is None else f"operation {graft.operation}"
        text.append(f" ({told})", style="dim")
    return text


def _made(run: list[Layer]) -> Text:
    first, last = run[0], run[-1]
    text = Text(f"new: {first.init}", style="green")
    if first.sources and len(run) == 1:
        text.append(f" of {' and '.join(str(s) for s in first.sources)}")
    elif first.sources and last.sources:
        text.append(f" of {_span(first.sources[0], last.sources[-1])}")
    if first.operation is not None:
        text.append(f"  (operation {first.operation})", style="dim")
    return _with_grafts(text, first)


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _operations(blueprint: Blueprint) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("operation", "matched", "promise", "why", "trains"):
        table.add_column(column, overflow="fold")
    for number, record in enumerate(blueprint.operations):
        claim = record.claim
        table.add_row(f"{number} {record.op}", record.matched, _PROMISES[claim.promise], claim.reason, record.trains)
    return table


def _budget(preview: Preview) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    grown = preview.parameters_after / preview.parameters_before
    table.add_row("parameters", f"{count(preview.parameters_before)} → {count(preview.parameters_after)}, ×{grown:.3g}")
    table.add_row("new", count(preview.parameters_new))
    table.add_row("trainable", count(preview.parameters_trainable))
    holes = f" and {size(preview.bytes_holes)} of zeros as holes" if preview.bytes_holes else ""
    table.add_row("reads", size(preview.bytes_to_read))
    table.add_row("writes", f"{size(preview.bytes_to_write)}{holes}, {len(preview.shards)} shards")
    table.add_row("peak memory", f"about {size(preview.peak_memory)}")
    native = "native: loads without custom code" if preview.blueprint.native else "loads with trust_remote_code=True"
    table.add_row("output", native)
    return table


def _where(names: Mapping[str, str]) -> Text:
    """Layers (and what they became), then names outside the layers."""
    layers: dict[tuple[int, int], None] = {}
    outside: list[str] = []
    for name, there in names.items():
        here, then = layer_of(name), layer_of(there)
        if here is None or then is None:
            outside.append(name)
        else:
            layers[here[1], then[1]] = None
    runs: list[list[tuple[int, int]]] = []
    for here_now, there_now in sorted(layers):
        if runs and runs[-1][-1] == (here_now - 1, there_now - 1):
            runs[-1].append((here_now, there_now))
        else:
            runs.append([(here_now, there_now)])
    shown = [
        _span(run[0][0], run[-1][0]) + ("" if run[0][0] == run[0][1] else f" → {_span(run[0][1], run[-1][1])}")
        for run in runs
    ]
    parts = [f"layer{'' if len(layers) == 1 else 's'} {', '.join(shown)}"] if shown else []
    return Text("; ".join([*parts, *([_listed(outside)] if outside else [])]), overflow="fold")


def _value(value: Any) -> str:
    return printable(json.dumps(value, ensure_ascii=False), 60)


def _comparisons(verification: Verification) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in (
        "mode",
        "dtype",
        "tokens",
        "identical",
        "max |Δ|",
        "KL (nats)",
        "top-1",
        "base loss",
        "output loss",
    ):
        table.add_column(column, justify="left" if column in ("mode", "dtype") else "right")
    for c in verification.comparisons:
        table.add_row(
            c.mode,
            c.dtype,
            f"{c.tokens:,}",
            Text("yes", style="green") if c.identical else Text("no", style="yellow"),
            f"{c.max_abs_difference:.3g}",
            *_next_token(c.next_token),
        )
    return table


def _next_token(figures: tuple[float, float, float, float] | None) -> tuple[str, ...]:
    """KL, top-1 agreement and both losses as cells; empty ones for an encoder, which foretells no next token."""
    if figures is None:
        return ("",) * 4
    kl, agreement, base_loss, out_loss = figures
    return (f"{kl:.3g}", f"{agreement:.2%}", f"{base_loss:.6f}", f"{out_loss:.6f}")


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    shown = ", ".join(printable(name) for name in names[:6])
    return shown if len(names) <= 6 else f"{shown} and {len(names) - 6} more"
