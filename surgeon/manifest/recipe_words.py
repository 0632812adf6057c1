"""The words of a recipe in surgery.json, read back: which bytes of the base a new tensor holds, and where in it.

`Recipe.describe` writes them; this is their one reader, and all else goes by the pieces that it gives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from surgeon.checkpoint.header import DTYPE_BITS
from surgeon.checkpoint.pieces import Pieces, Span, indices, stacked
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import of_graft
from surgeon.manifest.manifest import NewTensor, StoredTensor, Surgery


class ImpossiblePieces(ValueError):
    """A recipe in a manifest cannot make the tensor that it is said to make."""


@dataclass(frozen=True)
class BaseBytes:
    """The bytes of the base in a new tensor at birth.

    `pieces` are the bytes that the base has there, without those that are repeated from a tensor which lies whole in
    it or elsewhere; of these, `kept` do not train with what is new. `is_copy`: it begins as one tensor that keeps a
    place of its own. `grown_from` is the number of the base's rows in a tensor that has more below them, as where a
    vocabulary grew.
    """

    pieces: Pieces
    kept: Pieces
    is_copy: bool = False
    grown_from: int | None = None

    @property
    def stays(self) -> bool:
        """Whether all of it stays as it is where new tensors train: the base computes with what it holds."""
        return bool(self.kept.spans) and self.kept.covered


def base_bytes_of(made: NewTensor, surgery: Surgery) -> BaseBytes:
    """Return the bytes of its base in a new tensor of a surgery.

    Raises ImpossiblePieces where the base has no such tensor, or it does not fit.
    """
    # A head that is untied later in the plan has the rows that stayed; a plan trims once.
    trimmed = next(iter(surgery.trimmed.values()), None)
    kept = () if trimmed is None else trimmed.tokens
    return _Reader(surgery.base.tensors, made.dtype, kept).read(made.recipe, made.shape)


def check_words(surgery: Surgery, file: str) -> None:
    """Raise BadInput where a tensor is said to hold bytes of the base's that cannot be in it."""
    for name, made in surgery.new_tensors.items():
        try:
            base_bytes_of(made, surgery)
        except ImpossiblePieces as error:
            raise BadInput(
                f"{printable(file)}: {printable(name)} is said to hold {error}, which it cannot; was it edited by hand?"
            ) from None


@dataclass(frozen=True)
class _Reader:
    """Reads recipes of tensors of one `dtype`, made on a base of these `tensors`; `kept` are the ids that stayed."""

    tensors: Mapping[str, StoredTensor]
    dtype: str
    kept: Sequence[int] = ()

    def read(self, recipe: object, shape: Sequence[int]) -> BaseBytes:
        """Return the bytes of the base in a tensor of `shape` that `recipe` makes. Raises ImpossiblePieces."""
        none = Pieces(self._nbytes(shape), ())
        match recipe:
            case {"per_layer": str(name), "axis": int(axis), "order": [*order]}:
                return _kept(self._per_layer(name, axis, order, shape))
            case {"rows": [*rows], "still": bool(still)}:
                pieces = self._rows(rows, shape)
                return _kept(pieces) if still else BaseBytes(pieces, none)
            case {"extended": {"copy": str(name)}}:
                of = self._source(name).shape
                if not of or of[1:] != [*shape[1:]] or not 0 < of[0] <= shape[0]:
                    raise ImpossiblePieces(f"the rows of the base's {printable(name)} and more")
                pieces = Pieces(none.nbytes, Pieces.whole(name, self._nbytes(of)).spans)
                return BaseBytes(pieces, _own(pieces), grown_from=of[0])
            case {"kept": {"copy": str(name)}, "rows": int(rows)}:
                of = self._source(name).shape
                if not of or [rows, *of[1:]] != [*shape] or rows != len(self.kept) or self.kept[-1] >= of[0]:
                    raise ImpossiblePieces(f"rows of the base's {printable(name)} for the tokens that stay")
                return _kept(indices(name, of, DTYPE_BITS[self.dtype], 0, self.kept))
            case {"joined": [*parts], "sizes": [*sizes], "axis": axis}:
                return _kept(self._joined(parts, sizes, axis, shape))
            case {"copy": str(name), "rows": [int(start), int(stop)]}:
                return _kept(self._rows([[name, start, stop]], shape))
            case {"copy": str(name), "columns": [int(start), int(stop)]}:
                return _kept(self._slices(name, 1, start, stop, shape, axes=2))
            case {"copy": str(name), "axis": int(axis), "slices": [int(start), int(stop)]}:
                return _kept(self._slices(name, axis, start, stop, shape))
            case {"copy": str(name)}:
                if self._source(name).shape != [*shape]:
                    raise ImpossiblePieces(f"a copy of the base's {printable(name)}")
                return BaseBytes(Pieces.whole(name, none.nbytes), none, is_copy=True)
        return BaseBytes(none, none)

    def _nbytes(self, shape: Sequence[int]) -> int:
        return math.prod(shape) * DTYPE_BITS[self.dtype] // 8

    def _source(self, name: str) -> StoredTensor:
        if name not in self.tensors or self.tensors[name].dtype != self.dtype:
            raise ImpossiblePieces(f"bytes of the base's {printable(name)}")
        return self.tensors[name]

    def _per_layer(self, name: str, axis: int, order: Sequence[object], shape: Sequence[int]) -> Pieces:
        """The slices of layers; how long one is, the output's shape says."""
        of = self._source(name).shape
        parts = [part for part in order if type(part) is int and part >= 0]
        fits = 0 <= axis < len(of) == len(shape) and len(parts) == len(order) > 0
        if not fits or not shape[axis] or shape[axis] % len(parts):
            raise ImpossiblePieces(f"a part of the base's {printable(name)} for each layer")
        size = shape[axis] // len(parts)
        beside = [*of[:axis], *of[axis + 1 :]] == [*shape[:axis], *shape[axis + 1 :]]
        if not beside or of[axis] % size or max(parts) >= of[axis] // size:
            raise ImpossiblePieces(f"a part of the base's {printable(name)} for each layer")
        by_part = [*of[:axis], of[axis] // size, size, *of[axis + 1 :]]
        return indices(name, by_part, DTYPE_BITS[self.dtype], axis, parts)

    def _rows(self, rows: Sequence[object], shape: Sequence[int]) -> Pieces:
        """Rows of tensors, one piece below the other; together they are as many numbers as the shape has."""
        spans: list[Span] = []
        at = 0
        for piece in rows:
            match piece:
                case [str(name), int(start), int(stop)]:
                    of = self._source(name).shape
                    if not of or not 0 <= start < stop <= of[0] or not math.prod(of):
                        raise ImpossiblePieces(f"rows of the base's {printable(name)}")
                    row = self._nbytes(of[1:])
                    spans.append(Span(name, start * row, (stop - start) * row, at))
                    at += spans[-1].length
                case _:
                    raise ImpossiblePieces("rows of the base's tensors")
        if not spans or at != self._nbytes(shape):
            raise ImpossiblePieces("rows of the base's tensors")
        return Pieces.of(at, spans)

    def _slices(
        self, name: str, axis: int, start: int, stop: int, shape: Sequence[int], axes: int | None = None
    ) -> Pieces:
        """Slices along an axis of a tensor of so many axes (None: any number)."""
        of = self._source(name).shape
        fits = 0 <= axis < len(of) == (axes or len(of)) and 0 <= start < stop <= of[axis]
        if not fits or [*of[:axis], stop - start, *of[axis + 1 :]] != [*shape]:
            raise ImpossiblePieces(f"columns of the base's {printable(name)}")
        return indices(name, of, DTYPE_BITS[self.dtype], axis, range(start, stop))

    def _joined(self, parts: Sequence[object], sizes: Sequence[object], axis: object, shape: Sequence[int]) -> Pieces:
        """Tensors side by side, each as many slices along the axis as its size says."""
        lengths = [size for size in sizes if type(size) is int and size > 0]
        if (
            type(axis) is not int
            or not 0 <= axis < len(shape)
            or not len(parts) == len(sizes) == len(lengths)
            or sum(lengths) != shape[axis]
        ):
            raise ImpossiblePieces("parts that do not make it")
        inner = [
            self.read(part, [*shape[:axis], size, *shape[axis + 1 :]]).pieces
            for part, size in zip(parts, lengths, strict=True)
        ]
        return stacked(inner, before=math.prod(shape[:axis]))


def _kept(pieces: Pieces) -> BaseBytes:
    """Pieces of the base's that stay as they are."""
    return BaseBytes(pieces, _own(pieces))


def _own(pieces: Pieces) -> Pieces:
    """Return the pieces without those of a graft of the base, which is as new as it was."""
    return Pieces(pieces.nbytes, tuple(span for span in pieces.spans if not of_graft(span.tensor)))
