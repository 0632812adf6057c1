"""Where a surgery left the bytes of its base: pieces of the base's tensors in those of its output, as manifests say.

Each surgery is a map; where an earlier base lies in an output of many is their composition (lineage.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from surgeon.checkpoint.header import DTYPE_BITS
from surgeon.checkpoint.pieces import Pieces, Span, indices, side_by_side, turned
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import layer_of, of_graft, renumbered
from surgeon.manifest.manifest import MANIFEST_FILE, Manifest, NewTensor, StoredTensor, Surgery


class ImpossiblePieces(ValueError):
    """A recipe in a manifest cannot make the tensor that it is said to make."""


def pieces_of(made: NewTensor, surgery: Surgery) -> Pieces:
    """The bytes of the base that a new tensor holds at birth, and where in it.

    Raises ImpossiblePieces where the base has no such tensor, or it does not fit.
    """
    return _pieces(made.recipe, made.shape, made.dtype, surgery.base.tensors)


def _pieces(recipe: object, shape: Sequence[int], dtype: str, base: Mapping[str, StoredTensor]) -> Pieces:
    bits = DTYPE_BITS[dtype]
    nbytes = math.prod(shape) * bits // 8
    match recipe:
        case {"per_layer": str(name), "axis": int(axis), "order": [*order]}:
            of = _source(name, dtype, base)
            return _per_layer(name, of.shape, bits, axis, order, shape)
        case {"rows": [*told], "still": bool()}:
            return _rows(told, shape, dtype, base)
        case {"extended": {"copy": str(name)}}:
            of = _source(name, dtype, base)
            if not of.shape or of.shape[1:] != [*shape[1:]] or not 0 < of.shape[0] <= shape[0]:
                raise ImpossiblePieces(f"the rows of the base's {printable(name)} and more")
            return Pieces(nbytes, Pieces.whole(name, math.prod(of.shape) * bits // 8).spans)
        case {"joined": [*parts], "sizes": [*sizes], "axis": axis}:
            return _joined(parts, sizes, axis, shape, dtype, base)
        case {"copy": str(name), "rows": [int(start), int(stop)]}:
            return _rows([[name, start, stop]], shape, dtype, base)
        case {"copy": str(name)}:
            if _source(name, dtype, base).shape != [*shape]:
                raise ImpossiblePieces(f"a copy of the base's {printable(name)}")
            return Pieces.whole(name, nbytes)
    return Pieces(nbytes, ())


def _source(name: str, dtype: str, base: Mapping[str, StoredTensor]) -> StoredTensor:
    if name not in base or base[name].dtype != dtype:
        raise ImpossiblePieces(f"bytes of the base's {printable(name)}")
    return base[name]


def _per_layer(
    name: str, of: Sequence[int], bits: int, axis: int, order: Sequence[object], shape: Sequence[int]
) -> Pieces:
    """The slices of layers; how long one is, the output's shape says."""
    fits = 0 <= axis < len(of) == len(shape) and order and shape[axis] and not shape[axis] % len(order)
    if not fits or [*of[:axis], *of[axis + 1 :]] != [*shape[:axis], *shape[axis + 1 :]]:
        raise ImpossiblePieces(f"a part of the base's {printable(name)} for each layer")
    size = shape[axis] // len(order)
    if of[axis] % size or not all(type(part) is int and 0 <= part < of[axis] // size for part in order):
        raise ImpossiblePieces(f"a part of the base's {printable(name)} for each layer")
    slices = [part * size + nth for part in order if isinstance(part, int) for nth in range(size)]
    return indices(name, of, bits, axis, slices)


def _rows(told: Sequence[object], shape: Sequence[int], dtype: str, base: Mapping[str, StoredTensor]) -> Pieces:
    """Rows of tensors, one piece below the other; together they are as many numbers as the shape has."""
    spans: list[Span] = []
    at = 0
    for piece in told:
        match piece:
            case [str(name), int(start), int(stop)]:
                of = _source(name, dtype, base)
                if not of.shape or not 0 <= start < stop <= of.shape[0] or not math.prod(of.shape):
                    raise ImpossiblePieces(f"rows of the base's {printable(name)}")
                row = math.prod(of.shape[1:]) * DTYPE_BITS[dtype] // 8
                spans.append(Span(name, start * row, (stop - start) * row, at))
                at += spans[-1].length
            case _:
                raise ImpossiblePieces("rows of the base's tensors")
    if not spans or at != math.prod(shape) * DTYPE_BITS[dtype] // 8:
        raise ImpossiblePieces("rows of the base's tensors")
    return Pieces.of(at, spans)


def _joined(
    parts: Sequence[object],
    sizes: Sequence[object],
    axis: object,
    shape: Sequence[int],
    dtype: str,
    base: Mapping[str, StoredTensor],
) -> Pieces:
    whole = "parts that do not make it"
    lengths = [size for size in sizes if type(size) is int and size > 0]
    if type(axis) is not int or not 0 <= axis < len(shape) or not len(parts) == len(sizes) == len(lengths):
        raise ImpossiblePieces(whole)
    if sum(lengths) != shape[axis]:
        raise ImpossiblePieces(whole)
    inner = {
        str(n): _pieces(part, [*shape[:axis], size, *shape[axis + 1 :]], dtype, base)
        for n, (part, size) in enumerate(zip(parts, lengths, strict=True))
    }
    width = math.prod(shape[axis + 1 :]) * DTYPE_BITS[dtype] // 8
    spans = side_by_side([size * width for size in lengths], before=math.prod(shape[:axis]))
    return Pieces.of(math.prod(shape) * DTYPE_BITS[dtype] // 8, spans).through(inner)


def kept_pieces(made: NewTensor, surgery: Surgery) -> Pieces:
    """The bytes of a new tensor that are the base's own and do not train with what is new.

    Of a copy none are: it begins as what it was copied from. What a graft held is as new as it was.
    """
    found = pieces_of(made, surgery)
    begins = "copy" in made.recipe or made.recipe.get("still") is False
    return Pieces(found.nbytes, () if begins else tuple(span for span in found.spans if not of_graft(span.tensor)))


def slices_of(pieces: Pieces, shape: Sequence[int], bits: int) -> tuple[int, tuple[tuple[int, int], ...]]:
    """What a tensor of `shape` holds of others, as an axis and (from, to) of slices along it."""
    for axis in range(len(shape)):
        before, width = math.prod(shape[:axis]), math.prod(shape[axis + 1 :]) * bits // 8
        spans = pieces.spans
        if all(s.count == before and not s.at % width and not s.length % width for s in spans):
            found = sorted((s.at // width, (s.at + s.length) // width) for s in spans)
            return axis, tuple(_merged(found))
    raise AssertionError(pieces)


def _merged(found: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for begin, end in found:
        if merged and merged[-1][1] == begin:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return merged


def check_pieces(surgery: Surgery, file: str) -> None:
    """Raise BadInput where a tensor is said to hold bytes of the base's that cannot be in it."""
    for name, made in surgery.new_tensors.items():
        try:
            pieces_of(made, surgery)
        except ImpossiblePieces as error:
            raise BadInput(
                f"{printable(file)}: {printable(name)} is said to hold {error}, which it cannot; was it edited by hand?"
            ) from None


def layers_of(manifest: Manifest, *, file: str) -> dict[int, int]:
    """For every base layer its number in the output, if it was not taken out.

    BadInput where the manifest contradicts itself.
    """
    layers = {layer.base: index for index, layer in enumerate(manifest.layers) if layer.base is not None}
    named = sum(layer.base is not None for layer in manifest.layers)
    gone = [layer for entry in manifest.dropped.values() for layer in entry.layers]
    if sorted([*layers, *gone]) != list(range(manifest.base.layers)) or named != len(layers):
        raise BadInput(
            f"{printable(file)}: `layers` does not name each of the base's {manifest.base.layers} layers once;"
            " was it edited by hand?"
        )
    return layers


def left_at(manifest: Manifest, names: Iterable[str], *, file: str = MANIFEST_FILE) -> dict[str, Pieces]:
    """Where the base's tensors of these names lie in the output; nowhere, or not whole, what another value replaced.

    One that has a place of its own is there; else it is a part of others. Those of layers that were taken out are left
    out. Raises BadInput where the manifest does not say.
    """
    homes = homes_of(manifest, names, file=file)
    homes = {name: home for name, home in homes.items() if name in manifest.base.tensors}
    known = {name: manifest.base.tensors[name] for name in homes}
    sizes = {name: math.prod(of.shape) * DTYPE_BITS[of.dtype] // 8 for name, of in known.items()}
    found = {
        home: Pieces.whole(name, sizes[name])
        for name, home in _at_home(manifest, homes).items()
        if home not in manifest.new_tensors
    }
    # What the output does not train comes first. What a graft, or a new layer, begins as stands in its own place too.
    for name, made in sorted(manifest.new_tensors.items(), key=lambda item: not item[1].still):
        pieces = pieces_of(made, manifest)
        begins = of_graft(name) or "copy" in made.recipe
        if not begins or any(homes.get(source) == name for source in pieces.tensors):
            found[name] = pieces
    lying = turned(found, sizes)
    return {name: lying[name] for name in homes}


def _at_home(manifest: Surgery, homes: Mapping[str, str]) -> dict[str, str]:
    """Those of the base's tensors that no other tensor has taken in, by rows or beside others."""
    moved = {
        source
        for name, made in manifest.new_tensors.items()
        if ("still" in made.recipe or "joined" in made.recipe) and not of_graft(name)
        for source in pieces_of(made, manifest).tensors
    }
    return {name: home for name, home in homes.items() if name not in moved}


def homes_of(manifest: Manifest, names: Iterable[str], *, file: str = MANIFEST_FILE) -> dict[str, str]:
    """What tensors of the base are called after the surgery: those of kept layers by the layers' new numbers.

    Raises BadInput where the manifest does not say.
    """
    layers = _with_those_beyond(layers_of(manifest, file=file), manifest)
    gone = manifest.dropped_layers
    homes: dict[str, str] = {}
    for name in names:
        of_layer = layer_of(name)
        if of_layer is not None and of_layer[1] in gone:
            continue
        try:
            homes[name] = renumbered(name, layers)
        except KeyError:
            raise BadInput(
                f"{printable(file)}: the base's {printable(name)} is in none of its {len(layers)} layers; was it edited"
                " by hand?"
            ) from None
    return homes


def _with_those_beyond(layers: Mapping[int, int], manifest: Manifest) -> dict[int, int]:
    """Layers of the base above its stack, which predict further tokens, stay above the output's."""
    held = {place[1] for name in manifest.base.tensors if (place := layer_of(name)) is not None}
    grown = len(manifest.layers) - manifest.base.layers
    return dict(layers) | {index: index + grown for index in held if index >= manifest.base.layers}


def kept_as_they_are(manifest: Manifest, *, file: str = MANIFEST_FILE) -> dict[str, str]:
    """The base's tensors that one of the output is, whole and in their shape, with its name. Raises BadInput."""
    homes = homes_of(manifest, manifest.base.tensors, file=file)
    found = _at_home(manifest, homes)
    for name, lying in left_at(manifest, homes.keys() - found.keys(), file=file).items():
        of, holder = manifest.base.tensors[name], next(iter(lying.tensors), "")
        made = manifest.new_tensors.get(holder)
        if made is not None and (made.dtype, made.shape) == (of.dtype, of.shape) and lying.covered:
            found[name] = holder
    return found


def held_by(manifest: Manifest, *, file: str) -> dict[str, StoredTensor]:
    """What every tensor of the output holds, as far as the manifest says: born, kept, trained since."""
    homes = _at_home(manifest, homes_of(manifest, manifest.base.tensors, file=file))
    held = {home: manifest.base.tensors[name] for name, home in homes.items()}
    for name, made in manifest.new_tensors.items():
        held[name] = StoredTensor(dtype=made.dtype, shape=made.shape, sha256=made.sha256)
    for name, sha256 in manifest.trained.items():
        if name not in held:
            raise BadInput(f"{printable(file)}: `training` names {printable(name)}, which the output does not have")
        held[name] = held[name].model_copy(update={"sha256": sha256})
    return held
