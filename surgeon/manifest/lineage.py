"""The surgeries that an output went through: its earlier states, and where their tensors stand now.

A surgery is one applied plan. After S of them an output has states 0 (the first base) to S (itself); its manifest
holds what every state held, by digests.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from surgeon.blueprint.draft import weakest
from surgeon.blueprint.recipes import Copy, PerLayer
from surgeon.checkpoint.folder import MANIFEST_FILE, CheckpointFolder
from surgeon.checkpoint.header import DTYPE_BITS, TensorInfo
from surgeon.checkpoint.trust import MAX_CODE_BYTES
from surgeon.common.formatting import at_revision
from surgeon.errors import BadInput, printable
from surgeon.families.dissect import dissect
from surgeon.manifest.manifest import Base, Manifest, Piece, StoredTensor, Surgery, layers_of, pieces_of, places_of
from surgeon.runtime.bundle import CODE_FILE, bundle
from surgeon.runtime.known import native_of

CODE_NAME = re.compile(r"[A-Za-z0-9_]{1,100}\.py")


@dataclass(frozen=True)
class Lineage:
    """An output's surgeries, oldest first, the output's own last."""

    surgeries: tuple[Manifest, ...]
    file: str

    @classmethod
    def of(cls, last: Manifest, *, file: str = MANIFEST_FILE) -> Lineage:
        """The surgeries of `last`, which was read from `file`. Raises BadInput where two do not fit together."""
        surgeries = [manifest_before(last, number) for number in range(len(last.lineage))] + [last]
        for number, (earlier, later) in enumerate(pairwise(surgeries), 1):
            if len(earlier.layers) != later.base.layers:
                raise BadInput(
                    f"{printable(file)}: surgery {number} made {len(earlier.layers)} layers, surgery {number + 1} found"
                    f" {later.base.layers}; was it edited by hand?"
                )
        return cls(tuple(surgeries), file)

    @property
    def last(self) -> Manifest:
        """The output's own manifest."""
        return self.surgeries[-1]

    @property
    def count(self) -> int:
        """How many surgeries there were."""
        return len(self.surgeries)

    def since(self, number: int) -> tuple[Manifest, ...]:
        """The surgeries after state `number`, oldest first."""
        return self.surgeries[number:]

    def layers(self, number: int) -> dict[int, int]:
        """For every layer of state `number` that was not taken out since, its number in the output. Raises BadInput."""
        undone = self.since(number)
        count = undone[0].base.layers if undone else len(self.last.layers)
        layers = {layer: layer for layer in range(count)}
        for nth, manifest in enumerate(undone, number + 1):
            moved = layers_of(manifest, file=self._file_of(nth))
            layers = {layer: moved[place] for layer, place in layers.items() if place in moved}
        return layers

    def places(self, number: int, names: Iterable[str]) -> dict[str, str]:
        """How tensors of state `number` are called in the output, but for those in pieces, or in layers taken out.

        Raises BadInput.
        """
        places = {name: name for name in names}
        for nth, manifest in enumerate(self.since(number), number + 1):
            moved = places_of(manifest, places.values(), file=self._file_of(nth))
            places = {name: moved[place] for name, place in places.items() if place in moved}
        return places

    def state(self, number: int | None, out: CheckpointFolder) -> State:
        """State `number` of the output in the folder `out` (None: the one before its last surgery), from headers.

        Raises BadInput where there is no such state, or the output no longer holds it as far as headers and digests
        show.
        """
        if number is None:
            number = self.count - 1
        if not 0 <= number < self.count:
            has = "1 surgery" if self.count == 1 else f"{self.count} surgeries"
            raise BadInput(
                f"{printable(str(out.path))} has {has}; --to {number}: N must be"
                f" {'0' if self.count == 1 else f'between 0 and {self.count - 1}'}"
            )
        own = self.surgeries[number - 1] if number else None
        undone = self.since(number)
        config = undone[0].base.config
        kept = self._kept(number)
        places, extended, axes, cuts = kept.places, kept.extended, kept.axes, kept.cuts
        layers = self.layers(number)
        order = tuple(layers[layer] for layer in sorted(layers))
        held: dict[str, TensorInfo] = {}
        more: dict[str, int] = {}
        parts: dict[str, PerLayer] = {}
        for name, place in places.items():
            if place not in out.tensors:
                raise BadInput(
                    f"{shown_name(name, place)}: no shard of {printable(str(out.path))} has it; {instead_of(undone[0])}"
                )
            there, then = out.tensors[place], undone[0].base.tensors[name]
            # Of one that got more rows since, the first are what it was.
            rows = there.first(tuple(then.shape)) if name in extended else there
            if name in cuts:
                parts[name] = cuts[name].of(there)
            elif name in axes and (taken := _taken_out(there, axes[name], len(self.last.layers), order)) is not None:
                parts[name] = taken
            shape = None if rows is None else parts[name].shape if name in parts else rows.shape
            if rows is None or shape is None or (rows.dtype, list(shape)) != (then.dtype, then.shape):
                raise BadInput(
                    f"{shown_name(name, place)}: {there.dtype} {list(there.shape)} now, {printable(then.dtype)}"
                    f" {then.shape} then; {instead_of(undone[0])}"
                )
            held[name] = rows
            if rows != there:
                more[name] = there.shape[0] - rows.shape[0]
        joined = {name: self._pieces(name, pieces, undone[0], out) for name, pieces in kept.joined.items()}
        for name, lying in joined.items():
            held[name] = dataclasses.replace(lying[0], shape=tuple(undone[0].base.tensors[name].shape))
        held = {name: held[name] for name in undone[0].base.tensors}
        shapes = {name: parts[name].shape if name in parts else info.shape for name, info in held.items()}
        dissect(config, {n: dataclasses.replace(info, name=n, shape=shapes[n]) for n, info in held.items()}, out.own)
        code = _code(config, undone[0], out)
        return State(number, self, own, undone, places, config, code, held, more, parts, joined)

    def _pieces(
        self, name: str, pieces: tuple[Piece, ...], surgery: Manifest, out: CheckpointFolder
    ) -> tuple[TensorInfo, ...]:
        """Where a tensor that stands in pieces lies, by begin and end. Raises BadInput where it does not."""
        then = surgery.base.tensors[name]
        found: list[TensorInfo] = []
        for piece in pieces:
            there = out.tensors.get(piece.place)
            if there is None or there.dtype != then.dtype or piece.end > there.numel:
                raise BadInput(
                    f"{shown_name(name, piece.place)}: not in {printable(str(out.path))} as it was;"
                    f" {instead_of(surgery)}"
                )
            width = DTYPE_BITS[there.dtype] // 8
            begin, end = there.begin + piece.begin * width, there.begin + piece.end * width
            found.append(dataclasses.replace(there, shape=(piece.end - piece.begin,), begin=begin, end=end))
        return tuple(found)

    def _file_of(self, number: int) -> str:
        return self.file if number == self.count else f"{self.file} (surgery {number})"

    def _kept(self, number: int) -> _Kept:
        """Where the tensors of state `number` stand in the output. Raises BadInput where a surgery left others."""
        extended: set[str] = set()
        undone = self.since(number)
        found: dict[str, StoredTensor] = dict(undone[0].base.tensors)
        places = {name: name for name in found}
        axes: dict[str, int] = {}
        joined: dict[str, tuple[Piece, ...]] = {}
        cuts: dict[str, Cut] = {}
        for nth, manifest in enumerate(undone, number + 1):
            moved = places_of(manifest, places.values(), file=self._file_of(nth))
            if lost := sorted(manifest.dropped_layers):
                operation = _operation(manifest, manifest.dropped_layers[lost[0]])
                more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
                raise BadInput(
                    f"layer {lost[0]}{more}: taken out by surgery {nth} ({operation}), and its weights with it;"
                    f" {instead_of(manifest)}"
                )
            wider = cuts_of(manifest)
            in_pieces = pieces_of(manifest)
            joined = {name: self._moved_on(name, pieces, manifest, nth) for name, pieces in joined.items()}
            for name, place in list(places.items()):
                there = manifest.base.tensors.get(place)
                if there is None or (there != found[name] and name not in extended and name not in cuts):
                    how = "gone" if there is None else "trained or edited"
                    raise BadInput(
                        f"{shown_name(name, place)}: {how} when surgery {nth} began, so what surgery {number + 1} found"
                        f" there is lost; {instead_of(undone[0])}"
                    )
                if (cut := wider.get(place)) is not None:
                    # Its bytes will show whether it still is what it was.
                    before = cuts.get(name)
                    if name in extended or name in axes or (before is not None and before.axis != cut.axis):
                        raise BadInput(
                            f"{shown_name(name, cut.within)}: widened in more than one way since, so that it is not"
                            f" found in it; {instead_of(manifest)}"
                        )
                    cuts[name] = cut if before is None else before.inside(cut)
                    places[name] = cut.within
                    continue
                if place not in moved:
                    if name in cuts:
                        raise BadInput(
                            f"{shown_name(name, place)}: cut into pieces once it was a part of a wider tensor, so that"
                            f" it is not found; {instead_of(manifest)}"
                        )
                    joined[name] = in_pieces[place]
                    del places[name]
                    continue
                places[name] = moved[place]
                made = manifest.new_tensors.get(places[name])
                if made is not None and made.extends == place and name not in axes:
                    # Whether the first rows still are what it was, its bytes will show.
                    extended.add(name)
                    continue
                # One that only trains on begins as what it was; whether it still is, its bytes will show.
                if made is None or made.recipe == {"copy": place} or [piece[0] for piece in made.rows] == [place]:
                    continue
                # As the next surgery must find it.
                found[name] = StoredTensor(dtype=made.dtype, shape=made.shape, sha256=made.sha256)
                axis: int = made.recipe.get("axis", -1)
                if made.per_layer == place and axes.get(name, axis) == axis and name not in extended:
                    axes[name] = axis
                else:
                    raise BadInput(
                        f"{shown_name(name, places[name])}: surgery {nth} ({_operation(manifest, made.operation)}) gave"
                        f" it another value, so what stood there is lost; {instead_of(manifest)}"
                    )
        return _Kept(places, extended, axes, joined, cuts)

    def _moved_on(self, name: str, pieces: tuple[Piece, ...], manifest: Manifest, nth: int) -> tuple[Piece, ...]:
        """Pieces by the names that surgery `nth` gave what they stand in. Raises BadInput."""
        moved = places_of(manifest, [piece.place for piece in pieces], file=self._file_of(nth))
        lost = next((piece.place for piece in pieces if piece.place not in moved), None)
        if lost is not None:
            raise BadInput(
                f"{shown_name(name, lost)}: surgery {nth} moved what holds it, so what stood there is lost;"
                f" {instead_of(self.surgeries[nth - 1])}"
            )
        return tuple(dataclasses.replace(piece, place=moved[piece.place]) for piece in pieces)


@dataclass(frozen=True)
class _Kept:
    """Where the tensors of a state stand in the output.

    Those in `extended` have more rows there; `axes` has the axis along which a surgery added parts for its new layers.
    Those in `joined` stand in pieces of others, and have no place of their own; those in `cuts` are a part of
    a wider one.
    """

    places: dict[str, str]
    extended: set[str]
    axes: dict[str, int]
    joined: dict[str, tuple[Piece, ...]]
    cuts: dict[str, Cut]


@dataclass(frozen=True)
class State:
    """State `number` of an output.

    `manifest` is that state's own (None for state 0), `undone` those of the surgeries after it, oldest first. `places`
    maps that state's tensors to their names in the output, `held` to what holds them there: all of a tensor, or its
    first rows where it got `more` since; of those in `parts`, which got parts for new layers since, only these parts
    are the state's. Those in `joined` have no place: they are pieces of other tensors. `code` are the files of code
    that lie beside its weights.
    """

    number: int
    lineage: Lineage
    manifest: Manifest | None
    undone: tuple[Manifest, ...]
    places: Mapping[str, str]
    config: dict[str, Any]
    code: Mapping[str, bytes]
    held: Mapping[str, TensorInfo]
    more: Mapping[str, int]
    parts: Mapping[str, PerLayer]
    joined: Mapping[str, tuple[TensorInfo, ...]] = dataclasses.field(default_factory=dict)

    @property
    def base(self) -> Base:
        """The state as the next surgery found it."""
        return self.undone[0].base

    @property
    def digest(self) -> str:
        """One digest of all of it: config, tensors, files beside them, and its own surgeries."""
        return self.undone[0].base_digest

    @property
    def promise(self) -> str:
        """What the surgeries since promise: the weakest of all their promises."""
        return weakest(manifest.promise for manifest in self.undone)

    @property
    def trained(self) -> bool:
        """Whether anything was trained since the first surgery after this state."""
        return any(manifest.training for manifest in self.undone)

    @property
    def layers(self) -> tuple[int, ...]:
        """For every layer of the state, its number in the output."""
        found = self.lineage.layers(self.number)
        return tuple(found[layer] for layer in sorted(found))


@dataclass(frozen=True)
class Cut:
    """Where a tensor lies in a wider one: `at` these indices of the tensor `within`, along `axis`."""

    within: str
    axis: int
    at: tuple[int, ...]

    def inside(self, wider: Cut) -> Cut:
        """Where it lies once what holds it became a part of a still wider one."""
        return Cut(wider.within, wider.axis, tuple(wider.at[index] for index in self.at))

    def of(self, tensor: TensorInfo) -> PerLayer:
        """What takes it out of the wider one, byte for byte. Raises BadInput where that is too narrow."""
        size = tensor.shape[self.axis] if self.axis < len(tensor.shape) else 0
        if not self.at or max(self.at) >= size:
            raise BadInput(f"{printable(self.within)}: too narrow to hold what it was made of; was it edited?")
        return PerLayer(Copy(tensor.name, tensor.dtype, tensor.shape), self.axis, size, self.at)


def cuts_of(manifest: Surgery) -> dict[str, Cut]:
    """Of each tensor of the base that a surgery made a part of a wider one, where it lies."""
    return {
        source: Cut(name, made.axis, at)
        for name, made in manifest.new_tensors.items()
        for source, at in made.places_of_parts().items()
    }


def _taken_out(tensor: TensorInfo, axis: int, layers: int, order: tuple[int, ...]) -> PerLayer | None:
    """The parts of the layers `order` of a tensor of the output; None where it has no part for each of its layers."""
    if not 0 <= axis < len(tensor.shape) or tensor.shape[axis] % layers:
        return None
    return PerLayer(Copy(tensor.name, tensor.dtype, tensor.shape), axis, layers, order)


def manifest_before(last: Manifest, number: int) -> Manifest:
    """The manifest of surgery `number` (from 0) in the lineage of `last`, as its output had it."""
    return Manifest(**last.lineage[number].own, lineage=last.lineage[:number])


def _code(config: Mapping[str, Any], next_surgery: Manifest, out: CheckpointFolder) -> dict[str, bytes]:
    """Files of code beside a grafted state's weights; this version's, or the output's own where those were found."""
    found: dict[str, bytes] = {}
    for name, digest in next_surgery.base.files.items():
        if not name.endswith(".py"):
            continue
        if CODE_NAME.fullmatch(name) is None:
            raise BadInput(f"{MANIFEST_FILE}: code of the name {printable(name)}; was it edited by hand?")
        shipped = bundle(config) if name == CODE_FILE and native_of(config) is not None else None
        candidates = (out.read_code(name), shipped)
        content = next((c for c in candidates if c is not None and hashlib.sha256(c).hexdigest() == digest), None)
        if content is None or len(content) > MAX_CODE_BYTES:
            raise BadInput(
                f"{printable(name)}: neither beside the weights nor in this version is the file that was there when"
                f" surgeon {printable(next_surgery.tool.version)} operated; use that version"
            )
        found[name] = content
    return found


def shown_name(name: str, place: str) -> str:
    """A tensor as errors call it: where it stands, and its name of then where that was another."""
    return printable(place) if name == place else f"{printable(place)} (then {printable(name)})"


def _operation(manifest: Manifest, number: int) -> str:
    return printable(manifest.operations[number].op) if 0 <= number < len(manifest.operations) else "unknown operation"


def instead_of(manifest: Manifest) -> str:
    """What to do where a state cannot come back: the base of that surgery has it."""
    return f"take the base of that surgery itself ({printable(at_revision(manifest.base.id, manifest.base.revision))})"
