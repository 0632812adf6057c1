"""The surgeries that an output went through: its earlier states, and where their tensors stand now.

A surgery is one applied plan. After S of them an output has states 0 (the first base) to S (itself); its manifest
holds what every state held, by digests.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from surgeon.checkpoint.folder import MANIFEST_FILE, MAX_CODE_BYTES, CheckpointFolder
from surgeon.common.formatting import at_revision
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import dissect, is_grafted
from surgeon.manifest.manifest import Manifest, digest_of, layers_of, parse, places_of
from surgeon.runtime.bundle import CODE_FILE, bundle
from surgeon.runtime.known import native_of

CODE_NAME = re.compile(r"[A-Za-z0-9_]{1,100}\.py")


@dataclass(frozen=True)
class Lineage:
    """An output's surgeries, oldest first, the output's own last; each earlier one is what its digest says.

    Older versions of surgeon did not keep every manifest: `first` is the number, from 1, of the oldest that is here.
    """

    surgeries: tuple[Manifest, ...]
    first: int
    file: str

    @classmethod
    def of(cls, last: Manifest, *, file: str = MANIFEST_FILE) -> Lineage:
        """The surgeries before `last`, which was read from `file`, as far as their manifests were kept.

        Raises BadInput where one of them was edited, or where two do not fit together.
        """
        # As the ancestors' files had it: the data as it was read, no default filled in.
        entries = [entry.model_dump(exclude_unset=True) for entry in last.lineage]
        surgeries = [last]
        for number in range(len(entries), 0, -1):
            entry = last.lineage[number - 1]
            if entry.manifest is None:
                break
            data = entry.manifest | {"lineage": entries[: number - 1]}
            surgeries.insert(0, _ancestor(data, entry.sha256, file=f"{file} (surgery {number})"))
        first = len(entries) + 2 - len(surgeries)
        for number, (earlier, later) in enumerate(pairwise(surgeries), first):
            if len(earlier.layers) != later.base.layers:
                raise BadInput(
                    f"{printable(file)}: surgery {number} made {len(earlier.layers)} layers, surgery {number + 1} found"
                    f" {later.base.layers}; was it edited by hand?"
                )
        return cls(tuple(surgeries), first, file)

    @property
    def last(self) -> Manifest:
        """The output's own manifest."""
        return self.surgeries[-1]

    @property
    def count(self) -> int:
        """How many surgeries there were, those included whose manifests were not kept."""
        return len(self.last.lineage) + 1

    def since(self, number: int) -> tuple[Manifest, ...]:
        """The surgeries after state `number`, oldest first. Raises BadInput where one of them was not kept."""
        if number + 1 < self.first:
            raise self.too_old(f"the manifest of surgery {self.first - 1}")
        return self.surgeries[number + 1 - self.first :]

    def layers(self, number: int) -> dict[int, int]:
        """For every layer of state `number`, its number in the output. Raises as `since`."""
        undone = self.since(number)
        count = undone[0].base.layers if undone else len(self.last.layers)
        layers = {layer: layer for layer in range(count)}
        for nth, manifest in enumerate(undone, number + 1):
            moved = layers_of(manifest, file=self._file_of(nth))
            layers = {layer: moved[place] for layer, place in layers.items()}
        return layers

    def places(self, number: int, names: Iterable[str]) -> dict[str, str]:
        """How tensors of state `number` are called in the output, by layer numbers. Raises as `since`."""
        places = {name: name for name in names}
        for nth, manifest in enumerate(self.since(number), number + 1):
            moved = places_of(manifest, places.values(), file=self._file_of(nth))
            places = {name: moved[place] for name, place in places.items()}
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
        own = self.since(number - 1)[0] if number else None
        undone = self.since(number)
        config = undone[0].base.config
        if config is None:
            raise self.too_old(f"the config.json that surgery {number + 1} found", undone[0])
        places = self._kept(number)
        for name, place in places.items():
            if place not in out.tensors:
                raise BadInput(
                    f"{shown_name(name, place)}: no shard of {printable(str(out.path))} has it; {instead_of(undone[0])}"
                )
        dissect(config, {name: dataclasses.replace(out.tensors[place], name=name) for name, place in places.items()})
        return State(number, self, own, undone, places, config, _code(config, own, out))

    def too_old(self, what: str, manifest: Manifest | None = None) -> BadInput:
        """The error for `what` an older surgeon did not keep in `manifest` (None: the output's own)."""
        manifest = manifest or self.last
        return BadInput(
            f"{printable(self.file)}: does not hold {what}, since an older surgeon"
            f" ({printable(manifest.tool.version)}) wrote it; {instead_of(manifest)}, or apply the plan again with this"
            " one"
        )

    def _file_of(self, number: int) -> str:
        return self.file if number == self.count else f"{self.file} (surgery {number})"

    def _kept(self, number: int) -> dict[str, str]:
        """Where the tensors of state `number` stand in the output; BadInput where a surgery found or left another."""
        undone = self.since(number)
        found = undone[0].base.tensors
        places = {name: name for name in found}
        for nth, manifest in enumerate(undone, number + 1):
            moved = places_of(manifest, places.values(), file=self._file_of(nth))
            for name, place in places.items():
                digest = manifest.base.tensors.get(place)
                if digest != found[name]:
                    how = "gone" if digest is None else "trained or edited"
                    raise BadInput(
                        f"{shown_name(name, place)}: {how} when surgery {nth} began, so what surgery {number + 1} found"
                        f" there is lost; {instead_of(undone[0])}"
                    )
                places[name] = moved[place]
                made = manifest.new_tensors.get(places[name])
                # One that only trains on begins as what it was; whether it still is, its bytes will show.
                if made is not None and made.recipe != {"copy": place}:
                    raise BadInput(
                        f"{shown_name(name, places[name])}: surgery {nth} ({_operation(manifest, made.operation)}) gave"
                        f" it another value, so what stood there is lost; {instead_of(manifest)}"
                    )
        return places


@dataclass(frozen=True)
class State:
    """State `number` of an output.

    `manifest` is that state's own (None for state 0), `undone` those of the surgeries after it, oldest first. `places`
    maps that state's tensors to their names in the output. `code` are the files of code that lie beside its weights.
    """

    number: int
    lineage: Lineage
    manifest: Manifest | None
    undone: tuple[Manifest, ...]
    places: Mapping[str, str]
    config: dict[str, Any]
    code: Mapping[str, bytes]

    @property
    def digests(self) -> Mapping[str, str]:
        """What the state's tensors held."""
        return self.undone[0].base.tensors

    @property
    def promise(self) -> str:
        """What the surgeries since promise: exact where all of them do."""
        return "exact" if all(manifest.promise == "exact" for manifest in self.undone) else "none"

    @property
    def trained(self) -> bool:
        """Whether anything was trained since the first surgery after this state."""
        return any(manifest.training for manifest in self.undone)

    @property
    def layers(self) -> tuple[int, ...]:
        """For every layer of the state, its number in the output."""
        found = self.lineage.layers(self.number)
        return tuple(found[layer] for layer in sorted(found))


def _ancestor(data: dict[str, Any], sha256: str, *, file: str) -> Manifest:
    if digest_of(data) != sha256:
        raise BadInput(
            f"{printable(file)}: not what its sha256 says, so it was edited since surgeon wrote it; use the file as it"
            " was"
        )
    return parse(data, file=file)


def _code(config: Mapping[str, Any], kept: Manifest | None, out: CheckpointFolder) -> dict[str, bytes]:
    """Files of code beside a grafted state's weights; this version's, or the output's own where those were kept."""
    if not is_grafted(config):
        return {}
    known = kept.code if kept else {}
    found: dict[str, bytes] = {}
    for name in known or (CODE_FILE,):
        if CODE_NAME.fullmatch(name) is None:
            raise BadInput(f"{MANIFEST_FILE}: code of the name {printable(name)}; was it edited by hand?")
        shipped = bundle(config) if name == CODE_FILE and native_of(config) is not None else None
        content = _same(known.get(name), out.read_code(name), shipped)
        if content is None or len(content) > MAX_CODE_BYTES:
            tool = kept.tool.version if kept else "(unknown)"
            raise BadInput(
                f"{printable(name)}: neither beside the weights nor in this version is the file that surgeon"
                f" {printable(tool)} put there; use that version"
            )
        found[name] = content
    return found


def _same(digest: str | None, *candidates: bytes | None) -> bytes | None:
    """The first content with this digest; of no known digest, the last candidate."""
    if digest is None:
        return candidates[-1]
    return next((c for c in candidates if c is not None and hashlib.sha256(c).hexdigest() == digest), None)


def shown_name(name: str, place: str) -> str:
    """A tensor as errors call it: where it stands, and its name of then where that was another."""
    return printable(place) if name == place else f"{printable(place)} (then {printable(name)})"


def _operation(manifest: Manifest, number: int) -> str:
    return printable(manifest.operations[number].op) if 0 <= number < len(manifest.operations) else "unknown operation"


def instead_of(manifest: Manifest) -> str:
    """What to do where a state cannot come back: the base of that surgery has it."""
    return f"take the base of that surgery itself ({printable(at_revision(manifest.base.id, manifest.base.revision))})"


What = Literal["last", "all"] | Sequence[int]


@dataclass(frozen=True)
class TrainableSet:
    """Names of tensors that train, in the order of the checkpoint, and the operations that made them, in order."""

    names: tuple[str, ...]
    operations: tuple[str, ...]


def trainable_set(out: CheckpointFolder, manifest: Manifest, what: What) -> TrainableSet:
    """The tensors of `out` that `what` lets train: of the last surgery, of all, or of operations of the last one.

    An operation that trains everything (SOLAR) adds every tensor. Raises BadInput where there is no such operation,
    where a tensor is missing, where an ancestor's manifest was edited or not kept, and where nothing is left to train.
    """
    shown = printable(str(out.path / MANIFEST_FILE))
    chosen: dict[str, None] = {}
    operations: list[str] = []
    everything = False
    lineage = Lineage.of(manifest, file=str(out.path / MANIFEST_FILE)) if what == "all" else None
    surgeries = (manifest,) if lineage is None else lineage.since(0)
    for nth, surgery in enumerate(surgeries, 1):
        numbers = list(range(len(surgery.operations)))
        if not isinstance(what, str):
            unknown = [number for number in what if number not in numbers]
            if unknown:
                raise BadInput(
                    f"{shown}: there is no operation {unknown[0]} in the last surgery; it has"
                    f" {', '.join(f'{n} ({printable(surgery.operations[n].op)})' for n in numbers)}"
                )
            numbers = sorted(set(what))
        for number in numbers:
            operations.append(surgery.operations[number].op)
            everything = everything or surgery.operations[number].trains == "all"
        made = [name for name, tensor in surgery.new_tensors.items() if tensor.operation in numbers]
        now = made if lineage is None else lineage.places(nth, made).values()
        # A later merge may have folded an earlier surgery's branches away.
        chosen |= dict.fromkeys(name for name in now if surgery is manifest or name in out.tensors)
    if everything:
        chosen = dict.fromkeys(out.tensors)
    missing = [name for name in chosen if name not in out.tensors]
    if missing:
        raise BadInput(f"{shown}: names the new tensor {printable(missing[0])}, which no shard has; download it again")
    if not chosen:
        raise BadInput(f"{shown}: nothing to train: what was asked for has no new tensor")
    return TrainableSet(tuple(name for name in out.tensors if name in chosen), tuple(operations))
