"""`surgeon revert`: an earlier state of an output, byte for byte or not at all."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from surgeon.apply.apply import check_way, written
from surgeon.apply.job import Job
from surgeon.apply.readback import ReadBack
from surgeon.blueprint.shards import lay_out
from surgeon.checkpoint.card_metadata import NOTHING_KNOWN, Metadata, metadata_of
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.peft_folder import AdapterFolder
from surgeon.common.distributed import Ranks
from surgeon.common.formatting import listed, size
from surgeon.common.listener import Listener, Quiet
from surgeon.common.timing import Stopwatch
from surgeon.errors import BadInput, printable
from surgeon.manifest.lineage import Earlier, _instead, _shown, find_state
from surgeon.manifest.manifest import MANIFEST_FILE, Manifest, manifest_of


@dataclass(frozen=True)
class Reverted:
    """An earlier state that was written: state `to` of an output of `surgeries` surgeries.

    `undone` are the operations of the surgeries taken back, oldest first; `base` says what the state was called when
    the first of them began. `manifest` is the state's own, None for the first base. `tensors` it has, `dropped` are
    those of the output that it has not.
    """

    path: Path
    to: int
    surgeries: int
    base: str
    undone: tuple[tuple[str, ...], ...]
    manifest: Manifest | None
    tensors: int
    dropped: int
    nbytes: int
    left_behind: tuple[str, ...]
    seconds: dict[str, float]

    def __repr__(self) -> str:
        return f"Reverted({str(self.path)!r}, {self.to} of {self.surgeries} surgeries left, {self.tensors} tensors)"

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`."""
        return {
            "path": str(self.path),
            "to": self.to,
            "surgeries": self.surgeries,
            "base": self.base,
            "undone": [list(operations) for operations in self.undone],
            "tensors": self.tensors,
            "dropped": self.dropped,
            "bytes": self.nbytes,
            "left_behind": list(self.left_behind),
            "seconds": self.seconds,
        }


def revert(
    out: str | Path,
    dest: str | Path,
    *,
    to: int | None = None,
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Reverted:
    """Write what `out` was after `to` of its surgeries into the new folder `dest` (None: before the last one; 0: base).

    A surgery is one applied plan. Every tensor of that state comes back byte for byte under its name of then, with its
    config.json, manifest and code; new tensors of the surgeries that stay have the values the next surgery found, so
    what was trained in between is kept. Raises BadInput, and `dest` stays absent, where a tensor is no longer what it
    was (trained, edited, merged away) or the manifest is too old or was edited.
    """
    listener = listener or Quiet()
    target = Path(dest)
    folder = CheckpointFolder.open(Path(out), trust_remote_code=trust_remote_code)
    state = find_state(folder, manifest_of(folder), to)
    blueprint = state.blueprint(folder)
    job = Job(
        purpose=Return(state, source=str(Path(out) / MANIFEST_FILE), metadata=metadata_of(folder)),
        blueprint=blueprint,
        base=folder,
        shards=lay_out(blueprint, folder.tensors),
    )
    check_way(job, Path(out), target)
    for note in folder.notes:
        listener.say(note)
    stopwatch = Stopwatch()
    written(job, target, listener, stopwatch, Ranks())
    return Reverted(
        path=target,
        to=state.number,
        surgeries=state.surgeries,
        base=state.undone[0].base.id,
        undone=tuple(tuple(entry.op for entry in manifest.operations) for manifest in state.undone),
        manifest=state.manifest,
        tensors=len(blueprint.outputs),
        dropped=len(folder.tensors) - len(blueprint.outputs),
        nbytes=job.bytes_to_write,
        left_behind=tuple(folder.left_behind),
        seconds=stopwatch.seconds,
    )


@dataclass(frozen=True)
class Return:
    """The purpose of a job that writes an earlier state."""

    state: Earlier
    source: str
    metadata: Metadata = NOTHING_KNOWN
    adapters: Mapping[str, AdapterFolder] = field(default_factory=dict)

    def identity(self) -> dict[str, Any]:
        """Which state, and what it must hold."""
        kept = self.state.manifest
        return {
            "revert": self.state.number,
            "digests": dict(self.state.digests),
            "manifest": hashlib.sha256(kept.to_bytes()).hexdigest() if kept else None,
            "metadata": dataclasses.asdict(self.metadata),
        }

    def code(self, name: str, config: Mapping[str, Any]) -> bytes:
        """As the surgeries that stay put it there."""
        return self.state.code[name]

    def settle(self, job: Job, proof: ReadBack) -> None:
        """BadInput where a tensor is not what the first surgery that is undone found."""
        state = self.state
        changed = [name for name, place in state.places.items() if proof.base_digests[place] != state.digests[name]]
        if changed:
            more = f" (and {len(changed) - 1} more tensors)" if len(changed) > 1 else ""
            raise BadInput(
                f"{_shown(changed[0], state.places[changed[0]])}{more}: trained or edited since surgery"
                f" {state.number + 1}, so what stood there then is not in {printable(job.base.source.shown)};"
                f" {_instead(state.undone[0])}"
            )

    def manifest(self, job: Job, proof: ReadBack) -> Manifest | None:
        """That state's own."""
        return self.state.manifest


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
        lines.append(Text(f"not carried along: {listed(reverted.left_behind)}", style="dim"))
    return Group(*lines)
