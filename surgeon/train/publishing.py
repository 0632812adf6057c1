"""The published run: the output's shards, with trained values in the place of what trained.

Everything passes through `execute` as bytes, so a run is staged, read back and published like a surgery; that every
tensor which did not train is what the manifest says is checked on the way.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from surgeon._version import __version__
from surgeon.apply.job import Job
from surgeon.apply.readback import ReadBack
from surgeon.blueprint.draft import Blueprint, Output
from surgeon.blueprint.recipes import Copy
from surgeon.blueprint.shards import Shard
from surgeon.checkpoint.card_metadata import Metadata, metadata_of
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.header import Header
from surgeon.checkpoint.peft_folder import AdapterFolder
from surgeon.checkpoint.source import LocalSource, Source
from surgeon.errors import PromiseBroken, printable
from surgeon.manifest.manifest import Manifest, Tool, TrainedTensor, TrainingEntry

FINAL_FILE = "final.safetensors"


_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Change:
    """What training made of a tensor: max |Δ|, and ‖Δ‖ / ‖before‖ (None where it was zero before)."""

    max_change: float
    relative_change: float | None


def write_final(out: CheckpointFolder, trained: Path, work: Path) -> dict[str, Change]:
    """Write the trained values in the output's dtypes to `work`'s FINAL_FILE; how each differs from the output's."""
    tensors = load_file(trained)
    changes: dict[str, Change] = {}
    for name, value in tensors.items():
        info = out.tensors[name]
        dtype = _DTYPES[info.dtype]
        before = torch.frombuffer(out.read(name), dtype=dtype).reshape(info.shape).double()
        tensors[name] = value.to(dtype)
        delta = tensors[name].double() - before
        norm = float(before.norm())
        changes[name] = Change(float(delta.abs().max()), float(delta.norm()) / norm if norm else None)
    save_file(tensors, work / FINAL_FILE, metadata={"format": "pt"})
    return changes


def overlaid(out: CheckpointFolder, work: Path) -> CheckpointFolder:
    """The output as a folder whose trained tensors are read from `work`'s FINAL_FILE."""
    final = LocalSource(work)
    header = final.headers([FINAL_FILE])[FINAL_FILE]
    return dataclasses.replace(
        out,
        tensors=out.tensors | {info.name: info for info in header.tensors},
        headers=out.headers | {FINAL_FILE: header},
        source=_Overlay(out.source, final),
    )


@dataclass(frozen=True)
class _Overlay:
    """The output's files, and one more shard from elsewhere."""

    out: Source
    final: LocalSource

    @property
    def shown(self) -> str:
        """What errors call it."""
        return self.out.shown

    def listing(self) -> dict[str, int]:
        """The output's."""
        return self.out.listing()

    def small(self, name: str, *, max_bytes: int) -> bytes:
        """The output's."""
        return self.out.small(name, max_bytes=max_bytes)

    def check_small(self, name: str) -> None:
        """As the output's."""
        self.out.check_small(name)

    def headers(self, files: list[str]) -> dict[str, Header]:
        """Of the output's shards."""
        return self.out.headers(files)

    def open_shard(self, file: str) -> int:
        """A read-only descriptor."""
        return (self.final if file == FINAL_FILE else self.out).open_shard(file)

    def identity(self) -> list[dict[str, Any]]:
        """Of all shards; the trained values are told apart by their digest instead."""
        return self.out.identity()

    def check_unchanged(self) -> None:
        """Of all shards."""
        self.out.check_unchanged()
        self.final.check_unchanged()


@dataclass(frozen=True)
class TrainedOutput:
    """The purpose of a job that publishes a run. `held` is what each tensor of the output holds, by digests."""

    source: str
    before: Manifest
    held: dict[str, str]
    changes: dict[str, Change]
    final_digest: str
    entry: dict[str, Any]
    code_of: CheckpointFolder
    metadata: Metadata
    # Nothing is imported.
    adapters: Mapping[str, AdapterFolder] = field(default_factory=dict)

    def identity(self) -> dict[str, Any]:
        """What was trained to what values."""
        return {"train": self.final_digest, "entry": self.entry, "held": self.held}

    def code(self, name: str, config: Mapping[str, Any]) -> bytes:
        """As it lies beside the output's weights."""
        content = self.code_of.read_code(name)
        assert content is not None, name
        return content

    def settle(self, job: Job, proof: ReadBack) -> None:
        """PromiseBroken where a tensor that did not train is not what it was."""
        changed = [
            name
            for name, digest in proof.base_digests.items()
            if name not in self.changes and digest != self.held.get(name)
        ]
        if changed:
            raise PromiseBroken(
                f"{printable(changed[0])}: did not train, yet is not what surgery.json says; nothing was published"
            )

    def manifest(self, job: Job, proof: ReadBack) -> Manifest:
        """The output's, with this run at the end of `training`."""
        tensors = {
            name: TrainedTensor(
                sha256=proof.base_digests[name],
                max_change=change.max_change,
                relative_change=change.relative_change,
            )
            for name, change in self.changes.items()
        }
        run = TrainingEntry(tool=Tool(name="surgeon", version=__version__), tensors=tensors, **self.entry)
        return self.before.model_copy(update={"training": [*self.before.training, run]})


def publishing_job(
    out: CheckpointFolder,
    manifest: Manifest,
    work: Path,
    *,
    source: str,
    held: dict[str, str],
    changes: dict[str, Change],
    entry: dict[str, Any],
) -> Job:
    """The job that writes the run: every tensor in its shard of the output, trained ones from `work`'s FINAL_FILE."""
    base = overlaid(out, work)
    outputs = {
        name: Output(name, Copy(name, info.dtype, info.shape), name in changes, None)
        for name, info in base.tensors.items()
    }
    scripts = tuple(name for name in out.source.listing() if name.endswith(".py")) if out.code != "none" else ()
    blueprint = Blueprint(
        seed=0,
        outputs=tuple(outputs.values()),
        couplings={},
        layers=(),
        operations=(),
        config=out.config,
        code_files=scripts,
    )
    purpose = TrainedOutput(
        source=source,
        before=manifest,
        held=held,
        changes=changes,
        final_digest=_digest(work / FINAL_FILE),
        entry=entry,
        code_of=out,
        metadata=metadata_of(out),
    )
    return Job(purpose=purpose, blueprint=blueprint, base=base, shards=_shards(out, outputs))


def _shards(out: CheckpointFolder, outputs: dict[str, Output]) -> tuple[Shard, ...]:
    """The output's own shards, tensors in the order of their bytes."""
    held: dict[str, list[Output]] = {file: [] for file in out.shards}
    for info in sorted(out.tensors.values(), key=lambda info: info.begin):
        held[info.file].append(outputs[info.name])
    return tuple(Shard(file, tuple(tensors), file) for file, tensors in held.items())


def unchanged(changes: dict[str, Change]) -> Sequence[str]:
    """Names of tensors that trained and are what they were."""
    return [name for name, change in changes.items() if change.max_change == 0]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()
