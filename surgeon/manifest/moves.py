"""Where a surgery left the bytes of its base: pieces of the base's tensors in those of its output, as manifests say.

Each surgery is a map; where an earlier base lies in an output of many is their composition (lineage.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from surgeon.anatomy.anatomy import of_graft, places_of
from surgeon.checkpoint.pieces import Pieces, Span, turned
from surgeon.errors import BadInput, printable
from surgeon.manifest.manifest import MANIFEST_FILE, Manifest, StoredTensor, Surgery

# Of a part of a tensor, (from, to) along every axis.
Box = tuple[tuple[int, int], ...]


def boxes_of(pieces: Pieces, shape: Sequence[int], bits: int) -> tuple[Box, ...]:
    """What a tensor of `shape` holds of others, as parts of it. Raises BadInput where something is no such part."""
    return tuple(sorted(_box(span, shape, bits) for span in pieces.spans))


def _box(span: Span, shape: Sequence[int], bits: int) -> Box:
    """The part of a tensor that a span covers: some of one axis in each run, whose runs are rows of those before it."""
    for axis in range(len(shape)):
        width = max(1, math.prod(shape[axis + 1 :]) * bits // 8)
        (row, first), count = divmod(span.at // width, shape[axis]), span.length // width
        whole = not span.at % width and not span.length % width and first + count <= shape[axis]
        if whole and (span.count == 1 or span.every == width * shape[axis]):
            above = _rows(row, span.count, shape[:axis])
            if above is not None:
                return (*above, (first, first + count), *((0, size) for size in shape[axis + 1 :]))
    raise BadInput(
        f"{MANIFEST_FILE}: a tensor of shape {[*shape]} is said to keep bytes that are no slices of it; was it edited"
        " by hand?"
    )


def _rows(first: int, count: int, shape: Sequence[int]) -> Box | None:
    """Rows of axes of `shape`, counted through, as (from, to) along each; None where they are no such part."""
    if not shape:
        return () if (first, count) == (0, 1) else None
    *before, size = shape
    row, begin = divmod(first, size)
    if begin == 0 and count % size == 0:
        above, own = _rows(row, count // size, before), (0, size)
    else:
        above, own = (_rows(row, 1, before) if begin + count <= size else None), (begin, begin + count)
    return None if above is None else (*above, own)


def layers_of(manifest: Manifest, *, file: str) -> dict[int, int]:
    """For every base layer its number in the output, if it was not taken out.

    BadInput where the manifest contradicts itself.
    """
    layers = {layer.base: index for index, layer in enumerate(manifest.layers) if layer.base is not None}
    named = sum(layer.base is not None for layer in manifest.layers)
    gone = [layer for layers in manifest.dropped.values() for layer in layers]
    if sorted([*layers, *gone]) != list(range(manifest.base.layers)) or named != len(layers):
        raise BadInput(
            f"{printable(file)}: `layers` does not name each of the base's {manifest.base.layers} layers once;"
            " was it edited by hand?"
        )
    return layers


def left_at(manifest: Manifest, names: Iterable[str], *, file: str = MANIFEST_FILE) -> dict[str, Pieces]:
    """Return where the base's tensors of these names lie in the output.

    What another value replaced lies nowhere, or not whole. A tensor that has a place of its own is there; else it is a
    part of others. Those of layers that were taken out are left out. Raises BadInput where the manifest does not say.
    """
    homes = homes_of(manifest, names, file=file)
    homes = {name: home for name, home in homes.items() if name in manifest.base.tensors}
    sizes = {name: manifest.base.tensors[name].nbytes for name in homes}
    found = {home: Pieces.whole(name, sizes[name]) for name, home in _at_home(manifest, homes).items()}
    # What the output does not train comes first. What a graft, or a new layer, begins as is in its own place too.
    for name, each in sorted(manifest.new_tensors.items(), key=lambda item: not item[1].stays):
        begins = of_graft(name) or each.is_copy
        if not begins or any(homes.get(source) == name for source in each.pieces.tensors):
            found[name] = each.pieces
    lying = turned(found, sizes)
    return {name: lying[name] for name in homes}


def _at_home(manifest: Surgery, homes: Mapping[str, str]) -> dict[str, str]:
    """Those of the base's tensors that are in the output as they are, at home: no other took one in, or its place."""
    taken_in = {
        source
        for name, each in manifest.new_tensors.items()
        if not (each.is_copy or of_graft(name))
        for source in each.spans
    }
    return {name: home for name, home in homes.items() if name not in taken_in and home not in manifest.new_tensors}


def homes_of(manifest: Manifest, names: Iterable[str], *, file: str = MANIFEST_FILE) -> dict[str, str]:
    """What tensors of the base are called after the surgery: those of kept layers by the layers' new numbers.

    Those that were left behind are not among them. Raises BadInput where the manifest does not say.
    """
    layers = _with_those_beyond(layers_of(manifest, file=file), manifest)
    gone, without = manifest.dropped_layers, manifest.without
    homes: dict[str, str] = {}
    names = [*names]
    places = places_of(names)
    for name in names:
        of_layer = places.get(name)
        if name in without or (of_layer is not None and of_layer[1] in gone):
            continue
        if of_layer is None:
            homes[name] = name
            continue
        stem, index, suffix = of_layer
        if index not in layers:
            raise BadInput(
                f"{printable(file)}: the base's {printable(name)} is in none of its {len(layers)} layers; was it edited"
                " by hand?"
            )
        homes[name] = f"{stem}{layers[index]}.{suffix}"
    return homes


def _with_those_beyond(layers: Mapping[int, int], manifest: Manifest) -> dict[int, int]:
    """Layers of the base above its stack, which predict further tokens, stay above the output's."""
    numbers = {index for _, index, _ in places_of(manifest.base.tensors).values()}
    grown = len(manifest.layers) - manifest.base.layers
    return dict(layers) | {index: index + grown for index in numbers if index >= manifest.base.layers}


def kept_as_they_are(manifest: Manifest) -> dict[str, str]:
    """The base's tensors that one of the output is, whole and in their shape, with its name. Raises BadInput."""
    found: dict[str, str] = {}
    for name, lying in left_at(manifest, manifest.base.tensors).items():
        of, holder = manifest.base.tensors[name], next(iter(lying.tensors), "")
        made = manifest.new_tensors.get(holder)
        whole = lying.covered and lying == Pieces.whole(holder, lying.nbytes)
        if whole and (made is None or (made.dtype, made.shape) == (of.dtype, of.shape)):
            found[name] = holder
    return found


def has_other_names(manifest: Manifest) -> bool:
    """Whether something of the base's lies under other names only: the output is of another class. Raises BadInput."""
    homes = homes_of(manifest, manifest.base.tensors)
    return not recorded_tensors(manifest, file=MANIFEST_FILE).keys() >= {*homes.values()}


def made_of_base(manifest: Manifest) -> dict[str, Pieces]:
    """The new tensors that are bytes of the base and no others, put together in another way, with these bytes.

    Without copies: they begin as a tensor that keeps its own place.
    """
    made = manifest.new_tensors.items()
    return {name: each.pieces for name, each in made if each.pieces.covered and not each.is_copy}


def recorded_tensors(manifest: Manifest, *, file: str) -> dict[str, StoredTensor]:
    """Return dtype, shape and digest of every tensor of the output as the manifest says: born, kept, trained since."""
    homes = homes_of(manifest, manifest.base.tensors, file=file)
    recorded = {home: manifest.base.tensors[name] for name, home in _at_home(manifest, homes).items()}
    for name, new in manifest.new_tensors.items():
        recorded[name] = StoredTensor(dtype=new.dtype, shape=new.shape, sha256=new.sha256)
    for name, sha256 in manifest.trained.items():
        if name not in recorded:
            raise BadInput(f"{printable(file)}: `training` names {printable(name)}, which the output does not have")
        recorded[name] = recorded[name].model_copy(update={"sha256": sha256})
    return recorded
