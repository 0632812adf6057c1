"""Where a surgery put the bytes of its base: the output's tensors as pieces of the base's, as manifests record them.

Each surgery is a map; the position of an earlier base in an output of many surgeries is their composition (lineage.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from surgeon.anatomy.anatomy import of_graft, places_of
from surgeon.checkpoint.pieces import Pieces, Span, turned
from surgeon.errors import BadInput, printable
from surgeon.manifest.manifest import MANIFEST_FILE, Manifest, StoredTensor, Surgery

# A rectangular part of a tensor: (from, to) along every axis.
Box = tuple[tuple[int, int], ...]


def boxes_of(pieces: Pieces, shape: Sequence[int], bits: int) -> tuple[Box, ...]:
    """Return the parts of a tensor of `shape` that come from other tensors, as boxes.

    Raises BadInput where a span covers no rectangular part.
    """
    return tuple(sorted(_box(span, shape, bits) for span in pieces.spans))


def _box(span: Span, shape: Sequence[int], bits: int) -> Box:
    """Return the box that a span covers: each run is a slice of one axis, and the runs are rows of earlier axes."""
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
    """Return a range of rows, counted over all axes of `shape`, as a (from, to) along each axis; None if no box."""
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
    """Return the number in the output of every base layer that was not removed.

    Raises BadInput where the manifest contradicts itself.
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
    """Return, by name, where the base's tensors `names` are in the output: as pieces of the output's tensors.

    A tensor that another value replaced is nowhere, or not complete. A tensor that keeps its own place is found there;
    else it is a part of other tensors. Tensors of removed layers are left out. Raises BadInput where the manifest does
    not determine the place.
    """
    homes = homes_of(manifest, names, file=file)
    homes = {name: home for name, home in homes.items() if name in manifest.base.tensors}
    sizes = {name: manifest.base.tensors[name].nbytes for name in homes}
    found = {home: Pieces.whole(name, sizes[name]) for name, home in _at_home(manifest, homes).items()}
    # Tensors that do not train come first. The source of a graft, or of a new layer's copy, is in its own place too.
    for name, each in sorted(manifest.new_tensors.items(), key=lambda item: not item[1].stays):
        begins = of_graft(name) or each.is_copy
        if not begins or any(homes.get(source) == name for source in each.pieces.tensors):
            found[name] = each.pieces
    lying = turned(found, sizes)
    return {name: lying[name] for name in homes}


def _at_home(manifest: Surgery, homes: Mapping[str, str]) -> dict[str, str]:
    """Return, by name in the base, the names in the output of the base tensors that keep their own place unchanged.

    These are the tensors of `homes` that are neither absorbed nor replaced by new tensors.
    """
    taken_in = {
        source
        for name, each in manifest.new_tensors.items()
        if not (each.is_copy or of_graft(name))
        for source in each.spans
    }
    return {name: home for name, home in homes.items() if name not in taken_in and home not in manifest.new_tensors}


def homes_of(manifest: Manifest, names: Iterable[str], *, file: str = MANIFEST_FILE) -> dict[str, str]:
    """Return the names of base tensors after the surgery: tensors of kept layers get the layers' new numbers.

    Tensors that were left behind are not included. Raises BadInput where the manifest does not determine the names.
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
    """Return the layer map extended by the base's layers above its stack (multi-token prediction), which stay above."""
    numbers = {index for _, index, _ in places_of(manifest.base.tensors).values()}
    grown = len(manifest.layers) - manifest.base.layers
    return dict(layers) | {index: index + grown for index in numbers if index >= manifest.base.layers}


def kept_as_they_are(manifest: Manifest) -> dict[str, str]:
    """Map each base tensor that is, whole and in its shape, a tensor of the output to that tensor's name.

    Raises BadInput where the manifest contradicts itself.
    """
    found: dict[str, str] = {}
    for name, lying in left_at(manifest, manifest.base.tensors).items():
        of, holder = manifest.base.tensors[name], next(iter(lying.tensors), "")
        made = manifest.new_tensors.get(holder)
        whole = lying.covered and lying == Pieces.whole(holder, lying.nbytes)
        if whole and (made is None or (made.dtype, made.shape) == (of.dtype, of.shape)):
            found[name] = holder
    return found


def has_other_names(manifest: Manifest) -> bool:
    """Return whether some base tensors are only under other names, since the output is of another class.

    Raises BadInput where the manifest contradicts itself.
    """
    homes = homes_of(manifest, manifest.base.tensors)
    return not recorded_tensors(manifest, file=MANIFEST_FILE).keys() >= {*homes.values()}


def made_of_base(manifest: Manifest) -> dict[str, Pieces]:
    """Return, by name, the base's pieces in each new tensor that consists only of base bytes in another arrangement.

    Copies are left out: they begin as a tensor that keeps its own place.
    """
    made = manifest.new_tensors.items()
    return {name: each.pieces for name, each in made if each.pieces.covered and not each.is_copy}


def recorded_tensors(manifest: Manifest, *, file: str) -> dict[str, StoredTensor]:
    """Return dtype, shape and digest of every output tensor by the manifest: new, kept, or trained since.

    Raises BadInput where training names a tensor that the output does not have.
    """
    homes = homes_of(manifest, manifest.base.tensors, file=file)
    recorded = {home: manifest.base.tensors[name] for name, home in _at_home(manifest, homes).items()}
    for name, new in manifest.new_tensors.items():
        recorded[name] = StoredTensor(dtype=new.dtype, shape=new.shape, sha256=new.sha256)
    for name, sha256 in manifest.trained.items():
        if name not in recorded:
            raise BadInput(f"{printable(file)}: `training` names {printable(name)}, which the output does not have")
        recorded[name] = recorded[name].model_copy(update={"sha256": sha256})
    return recorded
