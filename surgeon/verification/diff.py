"""`surgeon diff`: how every tensor of one checkpoint differs in another.

Where the manifest of one names the other as its base, layers and the base's digests come from the manifest, and only
the output is read. Else both are read, and layers are matched in order by the bytes that they share.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from surgeon.anatomy.anatomy import layer_of, renumbered
from surgeon.checkpoint.folder import CheckpointFolder, digest_of_pieces, digests_of
from surgeon.checkpoint.header import TensorInfo
from surgeon.checkpoint.pieces import Pieces
from surgeon.common.formatting import listed, size, span
from surgeon.common.json_results import plain_fields, same_json
from surgeon.common.listener import Listener, Quiet
from surgeon.common.tables import FittedTable
from surgeon.errors import printable
from surgeon.manifest.manifest import MANIFEST_FILE, Manifest
from surgeon.manifest.moves import layers_of
from surgeon.manifest.reading import manifest_of, parse


@dataclass(frozen=True)
class Difference:
    """The difference from checkpoint `a` to checkpoint `b`.

    `changed` and `moved` map names in `a` to names in `b`: other bytes (perhaps in another layer), and the same bytes
    in another layer. `extended` are tensors that begin with the same bytes and have more rows. `config` contains the
    keys of config.json that differ, with both values (None: absent). `sizes` gives the bytes of every tensor of each.
    `not_read` is the checkpoint whose tensors are described by the other's manifest; None: both were read.
    """

    a: Path
    b: Path
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: dict[str, str]
    moved: dict[str, str]
    extended: dict[str, str]
    same: tuple[str, ...]
    config: dict[str, tuple[Any, Any]]
    sizes: tuple[dict[str, int], dict[str, int]]
    not_read: Path | None

    def __repr__(self) -> str:
        kinds = ("same", "moved", "extended", "changed", "removed", "added")
        counts = ", ".join(f"{len(getattr(self, kind))} {kind}" for kind in kinds)
        return f"Difference({str(self.a)!r}, {str(self.b)!r}, {counts}, {len(self.config)} keys of config.json)"

    @property
    def identical(self) -> bool:
        """Whether every tensor and the config are the same."""
        return not (self.added or self.removed or self.changed or self.moved or self.extended or self.config)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`.

        Keys:
            `identical`: the verdict (exit 1 where it is false)
            `a`, `b`: the folders
            `not_read`: the folder whose content was taken from the other's manifest instead of its bytes; null:
                both were read
            `added`, `removed`, `same`: names of tensors
            `changed`, `moved`, `extended`: names of tensors in `a` and in `b`
            `config`: for each key of config.json that differs, `a` and `b`
        """
        return plain_fields(self, without=("changed", "moved", "extended", "config", "sizes")) | {
            "identical": self.identical,
            "changed": [{"a": a, "b": b} for a, b in self.changed.items()],
            "moved": [{"a": a, "b": b} for a, b in self.moved.items()],
            "extended": [{"a": a, "b": b} for a, b in self.extended.items()],
            "config": {key: {"a": a, "b": b} for key, (a, b) in self.config.items()},
        }


def diff(a: str | Path, b: str | Path, *, exact: bool = False, listener: Listener | None = None) -> Difference:
    """Compare the checkpoints `a` and `b` tensor by tensor: added, removed, changed, moved, the same.

    Where the manifest of one names the other as its base, the base is not read: names, config.json and lineage must
    match, and the digests in the manifest are trusted. `exact` reads both. No code of either is run. Raises BadInput
    where one cannot be opened or read.
    """
    listener = listener or Quiet()
    # Trust is harmless here, because code next to the weights is neither run nor copied.
    opened = [CheckpointFolder.open(Path(folder), trust_remote_code=True) for folder in (a, b)]
    return compare(*opened, exact=exact, listener=listener)


def compare(a: CheckpointFolder, b: CheckpointFolder, *, exact: bool, listener: Listener) -> Difference:
    """Return the difference from `a` to `b`; with `exact` both are read, even where a manifest describes one of them.

    Raises BadInput where a shard or a manifest is damaged.
    """
    layers: dict[int, int] | None = None
    described: tuple[CheckpointFolder, Manifest] | None = None
    if (manifest := _manifest_on(a, b)) is not None:
        layers, described = layers_of(manifest, file=str(b.path / MANIFEST_FILE)), (a, manifest)
    elif (manifest := _manifest_on(b, a)) is not None:
        inverse = layers_of(manifest, file=str(a.path / MANIFEST_FILE))
        layers, described = {there: here for here, there in inverse.items()}, (b, manifest)
    if exact:
        described = None
    read = [folder for folder in (a, b) if described is None or folder is not described[0]]
    listener.begin("reading", sum(info.nbytes for folder in read for info in folder.tensors.values()))
    digests = [
        described[1].base.digests
        if described and described[0] is folder
        else digests_of(folder, folder.tensors, listener.advance)
        for folder in (a, b)
    ]
    values = [
        {name: (info.dtype, info.shape, by_name[name]) for name, info in folder.tensors.items()}
        for folder, by_name in zip((a, b), digests, strict=True)
    ]
    if layers is None:
        layers = _matched(*values)
    return _sorted_out(a, b, *values, layers=layers, not_read=described[0].path if described else None)


def _manifest_on(base: CheckpointFolder, out: CheckpointFolder) -> Manifest | None:
    """Return the manifest of `out` where its base is `base`, judged by everything but weights; else None."""
    if out.manifest is None:
        return None
    manifest = parse(out.manifest, file=str(out.path / MANIFEST_FILE))
    earlier = manifest.lineage[-1].sha256 if manifest.lineage else None
    same = (
        base.tensors.keys() == manifest.base.tensors.keys()
        and same_json(manifest.base.config, base.config)
        and earlier == (manifest_of(base).sha256 if base.manifest is not None else None)
    )
    return manifest if same else None


# A tensor's value: dtype, shape, digest of its bytes.
_Value = tuple[str, tuple[int, ...], str]


def _sorted_out(
    a: CheckpointFolder,
    b: CheckpointFolder,
    before: Mapping[str, _Value],
    after: Mapping[str, _Value],
    *,
    layers: Mapping[int, int],
    not_read: Path | None,
) -> Difference:
    """Sort the tensors of both checkpoints into the kinds of a Difference.

    `before` and `after` are the values of the tensors of `a` and `b` by name, `layers` maps layers of `a` to layers of
    `b`.
    """
    removed: list[str] = []
    kinds: dict[str, dict[str, str]] = {"same": {}, "moved": {}, "changed": {}, "extended": {}}
    for name, value in before.items():
        place = layer_of(name)
        there = None if place is not None and place[1] not in layers else renumbered(name, layers)
        if there is None or there not in after:
            removed.append(name)
        elif after[there] != value:
            begins = not_read != b.path and _begins(b, there, value)
            kinds["extended" if begins else "changed"][name] = there
        else:
            kinds["same" if there == name else "moved"][name] = there
    found = {there for kind in kinds.values() for there in kind.values()}
    return Difference(
        a=a.path,
        b=b.path,
        added=tuple(name for name in after if name not in found),
        removed=tuple(removed),
        changed=kinds["changed"],
        extended=kinds["extended"],
        moved=kinds["moved"],
        same=tuple(kinds["same"]),
        config=_config(a.config, b.config),
        sizes=(_sizes(a.tensors), _sizes(b.tensors)),
        not_read=not_read,
    )


def _begins(b: CheckpointFolder, name: str, value: _Value) -> bool:
    """Return whether a tensor of `b` begins with rows of this value, and has more rows."""
    dtype, shape, digest = value
    there = b.tensors[name]
    rows = there.first(shape) if there.dtype == dtype else None
    if rows is None or rows == there:
        return False
    return digest_of_pieces(b, Pieces.whole(name, rows.nbytes)) == digest


def _sizes(tensors: Mapping[str, TensorInfo]) -> dict[str, int]:
    """Return the size in bytes of every tensor by name."""
    return {name: info.nbytes for name, info in tensors.items()}


def _config(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the keys that differ, each with both values; None where a key is absent."""
    return {
        key: (a.get(key), b.get(key))
        for key in sorted({*a, *b})
        if (key in a) != (key in b) or a.get(key) != b.get(key)
    }


def _matched(a: Mapping[str, _Value], b: Mapping[str, _Value]) -> dict[int, int]:
    """Match the layers of `a` to layers of `b`, in order, so that they share as many tensors as possible.

    A layer without such a match is matched to the layer with the same number, where that is free. Returns a map from
    numbers in `a` to numbers in `b`.
    """
    here, there = _by_layer(a), _by_layer(b)
    numbers, others = sorted(here), sorted(there)
    best = [[0] * (len(others) + 1) for _ in range(len(numbers) + 1)]
    score = {}
    for row, i in enumerate(numbers, 1):
        for column, j in enumerate(others, 1):
            # Prefer the same number among equal matches; layers that share nothing do not match.
            score[i, j] = 2 * len(here[i] & there[j]) + (i == j)
            best[row][column] = max(
                best[row - 1][column - 1] + score[i, j], best[row - 1][column], best[row][column - 1]
            )
    layers: dict[int, int] = {}
    row, column = len(numbers), len(others)
    while row and column:
        i, j = numbers[row - 1], others[column - 1]
        if score[i, j] and best[row][column] == best[row - 1][column - 1] + score[i, j]:
            layers[i] = j
            row, column = row - 1, column - 1
        elif best[row][column] == best[row - 1][column]:
            row -= 1
        else:
            column -= 1
    free = set(others) - set(layers.values())
    return layers | {i: i for i in numbers if i not in layers and i in free}


def _by_layer(values: Mapping[str, _Value]) -> dict[int, set[tuple[str, _Value]]]:
    """Return, by layer number, the set of (name within the layer, value) of the layer's tensors."""
    layers: dict[int, set[tuple[str, _Value]]] = {}
    for name, value in values.items():
        place = layer_of(name)
        if place is not None:
            layers.setdefault(place[1], set()).add((place[2], value))
    return layers


def difference_view(difference: Difference) -> RenderableType:
    """Return a table of the differences by kind and layers; the names are only in `--json`."""
    table = FittedTable(headings=False)
    before, after = difference.sizes
    kinds: tuple[tuple[str, str, Mapping[str, str], dict[str, int]], ...] = (
        ("same", "dim", {name: name for name in difference.same}, before),
        ("moved", "cyan", difference.moved, before),
        ("extended", "green", difference.extended, before),
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
    if difference.not_read is not None:
        how = (
            f"{printable(str(difference.not_read))} was not read: what it held is taken from the other's"
            f" {MANIFEST_FILE} (--exact reads both)"
        )
    verdict = Text("the same", style="bold green") if difference.identical else Text("they differ", style="bold yellow")
    return Group(table, Text(), Text.assemble(verdict, (f"; {how}", "dim")))


def _where(names: Mapping[str, str]) -> Text:
    """Return a text of the layers (and their new numbers), then the names outside the layers."""
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
        span(run[0][0], run[-1][0]) + ("" if run[0][0] == run[0][1] else f" → {span(run[0][1], run[-1][1])}")
        for run in runs
    ]
    parts = [f"layer{'' if len(layers) == 1 else 's'} {', '.join(shown)}"] if shown else []
    return Text("; ".join([*parts, *([listed(outside)] if outside else [])]), overflow="fold")


def _value(value: Any) -> str:
    """Return a config value as text for the table."""
    return printable(json.dumps(value, ensure_ascii=False), 60)
