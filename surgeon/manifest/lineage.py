"""The surgeries of an output: its earlier states, and where their tensors are now.

A surgery is one applied plan. After S surgeries an output has states 0 (the first base) to S (itself); its manifest
records every state's content by digests.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from surgeon.anatomy.dissect import dissect
from surgeon.blueprint.blueprint import weakest
from surgeon.checkpoint.folder import MANIFEST_FILE, CheckpointFolder
from surgeon.checkpoint.header import TensorInfo
from surgeon.checkpoint.pieces import Pieces
from surgeon.checkpoint.trust import MAX_CODE_BYTES
from surgeon.common.formatting import at_revision
from surgeon.errors import BadInput, printable
from surgeon.grafts.bundle import CODE_FILE, bundle
from surgeon.grafts.composition import composition_of
from surgeon.manifest.manifest import Base, Manifest
from surgeon.manifest.moves import homes_of, layers_of, left_at
from surgeon.manifest.reading import manifest_of

CODE_NAME = re.compile(r"[A-Za-z0-9_]{1,100}\.py")


@dataclass(frozen=True)
class Lineage:
    """The surgeries of an output, oldest first; its own last surgery is the last element."""

    surgeries: tuple[Manifest, ...]
    file: str

    @classmethod
    def of(cls, last: Manifest, *, file: str = MANIFEST_FILE) -> Lineage:
        """Return the surgeries of `last`, which was read from `file`. Raises BadInput where two do not fit together."""
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
        """The number of surgeries."""
        return len(self.surgeries)

    def since(self, number: int) -> tuple[Manifest, ...]:
        """Return the surgeries after state `number`, oldest first."""
        return self.surgeries[number:]

    def layers(self, number: int) -> dict[int, int]:
        """Map every layer of state `number` that is still there to its number in the output.

        Raises BadInput where a manifest contradicts itself.
        """
        undone = self.since(number)
        count = undone[0].base.layers if undone else len(self.last.layers)
        layers = {layer: layer for layer in range(count)}
        for nth, manifest in enumerate(undone, number + 1):
            moved = layers_of(manifest, file=self._file_of(nth))
            layers = {layer: moved[place] for layer, place in layers.items() if place in moved}
        return layers

    def places(self, number: int, names: Iterable[str]) -> dict[str, str]:
        """Map tensors of state `number` to their names in the output, except tensors in several places or in none.

        Raises BadInput where a manifest contradicts itself.
        """
        places = {name: name for name in names}
        for nth, manifest in enumerate(self.since(number), number + 1):
            lying = left_at(manifest, places.values(), file=self._file_of(nth))
            found = {name: lying[place].tensors for name, place in places.items() if place in lying}
            places = {name: holders[0] for name, holders in found.items() if len(holders) == 1}
        return places

    def state(self, number: int | None, out: CheckpointFolder) -> State:
        """Return state `number` of the output in the folder `out`, from headers (None: the state before its last
        surgery).

        Raises BadInput where there is no such state, or headers and digests show that the output no longer contains it.
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
        base, found = undone[0].base, self._kept(number)
        for name, lying in found.items():
            self._check_there(name, lying, undone[0], out)
        then = {n: TensorInfo(n, of.dtype, tuple(of.shape), "", 0, found[n].nbytes) for n, of in base.tensors.items()}
        dissect(base.config, then, out.own)
        code = _code(base.config, undone[0], out)
        more = self._more(number, found, out)
        return State(number, self, own, undone, found, base.config, code, then, more)

    def _check_there(self, name: str, lying: Pieces, surgery: Manifest, out: CheckpointFolder) -> None:
        """Raise BadInput where the output has no tensor of the right dtype and size to hold a state's tensor `name`."""
        then = surgery.base.tensors[name]
        for span in lying.spans:
            there = out.tensors.get(span.tensor)
            if there is None:
                raise BadInput(
                    f"{shown_name(name, span.tensor)}: no shard of {printable(str(out.path))} has it;"
                    f" {instead_of(surgery)}"
                )
            whole = len(lying.spans) == 1 and span.nbytes == there.nbytes and len(then.shape) == len(there.shape)
            fits = span.offset + (span.count - 1) * span.step + span.length <= there.nbytes
            if there.dtype != then.dtype or not fits or (whole and list(there.shape) != then.shape):
                raise BadInput(
                    f"{shown_name(name, span.tensor)}: {there.dtype} {list(there.shape)} now, {printable(then.dtype)}"
                    f" {then.shape} then; {instead_of(surgery)}"
                )

    def _more(self, number: int, found: Mapping[str, Pieces], out: CheckpointFolder) -> dict[str, range]:
        """Return, by name, the rows that tensors gained since state `number` because a vocabulary grew."""
        since = self.since(number)
        grown = {
            name for manifest in since for name, made in manifest.new_tensors.items() if made.grown_from is not None
        }
        then = since[0].base.tensors
        lying = {name: each.tensors[0] for name, each in found.items() if len(each.tensors) == 1}
        return {n: range(then[n].shape[0], out.tensors[t].shape[0]) for n, t in lying.items() if t in grown}

    def _file_of(self, number: int) -> str:
        """Return the name in errors of the manifest of surgery `number`, counted from 1."""
        return self.file if number == self.count else f"{self.file} (surgery {number})"

    def _kept(self, number: int) -> dict[str, Pieces]:
        """Return, by name, where the tensors of state `number` are in the output: as pieces of its tensors.

        Raises BadInput where a surgery removed or replaced one.
        """
        undone = self.since(number)
        first = undone[0].base.tensors
        found: dict[str, Pieces] = {}
        for nth, manifest in enumerate(undone, number + 1):
            file = self._file_of(nth)
            if lost := sorted(manifest.dropped_layers):
                operation = _operation(manifest, manifest.dropped_layers[lost[0]])
                more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
                raise BadInput(
                    f"layer {lost[0]}{more}: taken out by surgery {nth} ({operation}), and its weights with it;"
                    f" {instead_of(manifest)}"
                )
            if left := sorted(manifest.without):
                more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
                raise BadInput(
                    f"{printable(left[0])}{more}: left behind by surgery {nth}"
                    f" ({_operation(manifest, manifest.without[left[0]])}), so its earlier value is lost;"
                    f" {instead_of(manifest)}"
                )
            if nth > number + 1:
                self._check_as_then(found, number, manifest, nth)
            names = first if nth == number + 1 else dict.fromkeys(t for each in found.values() for t in each.tensors)
            moved = left_at(manifest, names, file=file)
            found = moved if nth == number + 1 else {name: each.through(moved) for name, each in found.items()}
            torn = next((name for name in first if name not in found or not found[name].covered), None)
            if torn is not None:
                # Its expected name in the output, by its layer's new number.
                home = homes_of(manifest, [torn], file=file).get(torn, torn) if nth == number + 1 else torn
                made = manifest.new_tensors.get(home)
                how = f" ({_operation(manifest, made.operation)})" if made is not None else ""
                raise BadInput(
                    f"{shown_name(torn, home)}: surgery {nth}{how} gave it another value, so its earlier value is lost;"
                    f" {instead_of(manifest)}"
                )
        return found

    def _check_as_then(self, found: Mapping[str, Pieces], number: int, manifest: Manifest, nth: int) -> None:
        """Raise BadInput where surgery `nth` found another value in a place where a whole tensor of state `number` was.

        For a tensor inside a larger one, only a later comparison of bytes can show whether it is unchanged.
        """
        first = self.since(number)[0]
        for name, lying in found.items():
            then, holder = first.base.tensors[name], lying.tensors[0]
            there = manifest.base.tensors.get(holder)
            whole = len(lying.spans) == 1 and there is not None and there.shape == then.shape
            if there is None or (whole and there != then):
                how = "gone" if there is None else "trained or edited"
                raise BadInput(
                    f"{shown_name(name, holder)}: {how} when surgery {nth} began, so what surgery {number + 1} found"
                    f" there is lost; {instead_of(first)}"
                )


@dataclass(frozen=True)
class State:
    """State `number` of an output.

    `manifest` is the state's own manifest (None for state 0), `undone` the manifests of the later surgeries, oldest
    first. `pieces` locates the bytes of the state's tensors in the output, `tensors` gives their dtypes and shapes, and
    `more` the rows that tensors gained since. `code` contains the code files next to the state's weights.
    """

    number: int
    lineage: Lineage
    manifest: Manifest | None
    undone: tuple[Manifest, ...]
    pieces: Mapping[str, Pieces]
    config: dict[str, Any]
    code: Mapping[str, bytes]
    tensors: Mapping[str, TensorInfo]
    more: Mapping[str, range]

    @property
    def base(self) -> Base:
        """The manifest's entry of this state as the base of the next surgery."""
        return self.undone[0].base

    @property
    def digest(self) -> str:
        """One digest of the state: config, tensors, files next to them, and its own surgeries."""
        return self.undone[0].base_digest

    @property
    def promise(self) -> str:
        """The weakest promise among the later surgeries."""
        return weakest(manifest.promise for manifest in self.undone)

    @property
    def trained(self) -> bool:
        """Whether anything was trained since the first surgery after this state."""
        return any(manifest.training for manifest in self.undone)

    @property
    def layers(self) -> tuple[int, ...]:
        """The number in the output of every layer of the state."""
        found = self.lineage.layers(self.number)
        return tuple(found[layer] for layer in sorted(found))


def before_training(manifest: Manifest, model: CheckpointFolder) -> Manifest | None:
    """Return the manifest of `model` if one of the training runs in `manifest` began with this model, else None."""
    if model.manifest is None:
        return None
    found = manifest_of(model)
    done = len(found.training)
    began = manifest.changed(training=manifest.training[:done], files=found.files)
    return found if done < len(manifest.training) and began.data() == found.data() else None


def manifest_before(last: Manifest, number: int) -> Manifest:
    """Return the manifest of surgery `number` (from 0) in the lineage of `last`, as its own output had it."""
    return Manifest(**last.lineage[number].own, lineage=last.lineage[:number])


def _code(config: Mapping[str, Any], next_surgery: Manifest, out: CheckpointFolder) -> dict[str, bytes]:
    """Return the code files of a grafted state: the output's own, or this version's, whichever has the recorded digest.

    Raises BadInput where neither has it.
    """
    found: dict[str, bytes] = {}
    for name, digest in next_surgery.base.files.items():
        if not name.endswith(".py"):
            continue
        if CODE_NAME.fullmatch(name) is None:
            raise BadInput(f"{MANIFEST_FILE}: bad file name {printable(name)} of code; was it edited by hand?")
        shipped = bundle(config) if name == CODE_FILE and composition_of(config) is not None else None
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
    """Return a tensor's name for errors: its current name, and its earlier name where that differs."""
    return printable(place) if name == place else f"{printable(place)} (then {printable(name)})"


def _operation(manifest: Manifest, number: int) -> str:
    """Return the printable name of operation `number` of a manifest."""
    return printable(manifest.operations[number].op) if 0 <= number < len(manifest.operations) else "unknown operation"


def instead_of(manifest: Manifest) -> str:
    """Return advice where a state cannot be restored: use the base of that surgery itself."""
    return f"take the base of that surgery itself ({printable(at_revision(manifest.base.id, manifest.base.revision))})"
