"""What two checkpoints differ in, tensor by tensor: by digests, and by which layer of one is which of the other.

Where one's manifest says that the other is its base, layers and the base's digests are told from it and only the
output is read. Else both are read, and layers are matched in order by the bytes they share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from surgeon.checkpoint.folder import CheckpointFolder, digests_of
from surgeon.checkpoint.header import TensorInfo
from surgeon.families.anatomy import layer_of, renumbered
from surgeon.manifest import MANIFEST_FILE, Manifest, digest_of, layers_of, parse
from surgeon.results import Difference

Begin = Callable[[str, int], None]
Advance = Callable[[int], None]


def compare(a: CheckpointFolder, b: CheckpointFolder, *, exact: bool, begin: Begin, advance: Advance) -> Difference:
    """What became of `a` in `b`. With `exact` both are read, whatever a manifest tells. Raises BadInput."""
    layers: dict[int, int] | None = None
    told: tuple[CheckpointFolder, Manifest] | None = None
    if (manifest := _manifest_on(a, b)) is not None:
        layers, told = layers_of(manifest, file=str(b.path / MANIFEST_FILE)), (a, manifest)
    elif (manifest := _manifest_on(b, a)) is not None:
        inverse = layers_of(manifest, file=str(a.path / MANIFEST_FILE))
        layers, told = {there: here for here, there in inverse.items()}, (b, manifest)
    if exact:
        told = None
    read = [folder for folder in (a, b) if told is None or folder is not told[0]]
    begin("reading", sum(info.nbytes for folder in read for info in folder.tensors.values()))
    held = [
        told[1].base.tensors if told and told[0] is folder else digests_of(folder, folder.tensors, advance)
        for folder in (a, b)
    ]
    values = [_values(folder, digests) for folder, digests in zip((a, b), held, strict=True)]
    if layers is None:
        layers = _matched(*values)
    return _sorted_out(a, b, *values, layers=layers, told=told[0].path if told else None)


def _manifest_on(base: CheckpointFolder, out: CheckpointFolder) -> Manifest | None:
    """The manifest of `out` where its base is, by everything but weights, `base`."""
    if out.manifest is None:
        return None
    manifest = parse(out.manifest, file=str(out.path / MANIFEST_FILE))
    earlier = manifest.lineage[-1].sha256 if manifest.lineage else None
    same = (
        base.tensors.keys() == manifest.base.tensors.keys()
        and manifest.base.config in (None, base.config)
        and earlier == (digest_of(base.manifest) if base.manifest is not None else None)
    )
    return manifest if same else None


# A tensor's value: dtype, shape, digest of its bytes.
_Value = tuple[str, tuple[int, ...], str]


def _values(folder: CheckpointFolder, digests: Mapping[str, str]) -> dict[str, _Value]:
    return {name: (info.dtype, info.shape, digests[name]) for name, info in folder.tensors.items()}


def _sorted_out(
    a: CheckpointFolder,
    b: CheckpointFolder,
    before: Mapping[str, _Value],
    after: Mapping[str, _Value],
    *,
    layers: Mapping[int, int],
    told: Path | None,
) -> Difference:
    removed: list[str] = []
    kinds: dict[str, dict[str, str]] = {"same": {}, "moved": {}, "changed": {}}
    for name, value in before.items():
        place = layer_of(name)
        there = None if place is not None and place[1] not in layers else renumbered(name, layers)
        if there is None or there not in after:
            removed.append(name)
        elif after[there] != value:
            kinds["changed"][name] = there
        else:
            kinds["same" if there == name else "moved"][name] = there
    found = {there for kind in kinds.values() for there in kind.values()}
    return Difference(
        a=a.path,
        b=b.path,
        added=tuple(name for name in after if name not in found),
        removed=tuple(removed),
        changed=kinds["changed"],
        moved=kinds["moved"],
        same=tuple(kinds["same"]),
        config=_config(a.config, b.config),
        sizes=(_sizes(a.tensors), _sizes(b.tensors)),
        told=told,
    )


def _sizes(tensors: Mapping[str, TensorInfo]) -> dict[str, int]:
    return {name: info.nbytes for name, info in tensors.items()}


def _config(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys that differ, each with both values; None where a key is absent."""
    return {
        key: (a.get(key), b.get(key))
        for key in sorted({*a, *b})
        if (key in a) != (key in b) or a.get(key) != b.get(key)
    }


def _matched(a: Mapping[str, _Value], b: Mapping[str, _Value]) -> dict[int, int]:
    """Which layer of `b` each layer of `a` is: in order, sharing as many tensors as can be; else the same number."""
    here, there = _by_layer(a), _by_layer(b)
    numbers, others = sorted(here), sorted(there)
    best = [[0] * (len(others) + 1) for _ in range(len(numbers) + 1)]
    score = {}
    for row, i in enumerate(numbers, 1):
        for column, j in enumerate(others, 1):
            # Of equals the same number; a layer that shares nothing is no match.
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
    layers: dict[int, set[tuple[str, _Value]]] = {}
    for name, value in values.items():
        place = layer_of(name)
        if place is not None:
            layers.setdefault(place[1], set()).add((place[2], value))
    return layers
