"""The published run: the output's shards, with trained values in the place of what trained.

Everything passes through `execute` as bytes, so a run is staged, read back and published like a surgery; that every
tensor which did not train is what the manifest says is checked on the way.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from surgeon._version import __version__
from surgeon.apply.job import (
    Job,
    begins_in,
    beside_weights,
    copied,
    in_order,
    manifest_and_card,
    model_files,
    origins_in,
)
from surgeon.apply.readback import Origin, ReadBack
from surgeon.blueprint.shards import Shard
from surgeon.checkpoint.card_metadata import metadata_of
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.source import LocalSource
from surgeon.common.plain import plain_fields
from surgeon.errors import PromiseBroken, printable
from surgeon.manifest.lineage import CODE_NAME, Fixed
from surgeon.manifest.manifest import Manifest, Tool, TrainedTensor, TrainingEntry
from surgeon.models.load import build_model, stored_dtype
from surgeon.train.stored import StoredNames

FINAL_FILE = "final.safetensors"


class Change(NamedTuple):
    """What training made of a tensor: max |Δ|, and ‖Δ‖ / ‖before‖ (None where it was zero before)."""

    max_change: float
    relative_change: float | None


@dataclass(frozen=True)
class Trained:
    """A finished training run of `out`, published at `path`.

    `changes` are of every tensor that trained; `unchanged` are those that are what they were. `losses` maps sources to
    their held-out losses in nats a token, before and after. `log` are the trainer's entries. `seconds` and
    `tokens_per_second` are of the steps since `resumed_at`; peak memory is in bytes, of the GPU where there is one.
    """

    out: Path
    path: Path
    manifest: Manifest
    operations: tuple[str, ...]
    settings: dict[str, Any]
    parameters: int
    changes: dict[str, Change]
    losses: dict[str, list[float]]
    tokens: int
    log: list[dict[str, Any]]
    resumed_at: int
    seconds: float
    tokens_per_second: float | None
    peak_memory: int

    def __repr__(self) -> str:
        losses = ", ".join(f"{name} {before:.4g} → {after:.4g}" for name, (before, after) in self.losses.items())
        amount = f"{self.parameters:,} parameters in {len(self.changes)} tensors, {self.tokens:,} tokens"
        return f"Trained({str(self.path)!r}, {amount}, loss {losses or 'not measured'})"

    @property
    def unchanged(self) -> tuple[str, ...]:
        """Tensors that trained and did not change."""
        return tuple(name for name, change in self.changes.items() if change.max_change == 0)

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`."""
        return plain_fields(self, without=("manifest", "changes")) | {
            "losses": {name: {"before": before, "after": after} for name, (before, after) in self.losses.items()},
            "tensors": {name: change._asdict() for name, change in self.changes.items()},
            "unchanged": list(self.unchanged),
        }


def write_final(
    out: CheckpointFolder, trained: Path, work: Path, *, fixed: Mapping[str, Fixed] | None = None
) -> dict[str, Change]:
    """Write the trained values in the output's dtypes to `work`'s FINAL_FILE; how each differs from the output's.

    What is `fixed` of a tensor did not train: it is written as the output has it. Raises PromiseBroken where it is
    another in what was trained.
    """
    tensors = load_file(trained)
    if tensors.keys() - out.tensors.keys():
        tensors = StoredNames(build_model(out, dtype=lambda _: torch.float32), out.tensors).on_disk(tensors)
    changes: dict[str, Change] = {}
    for name, value in tensors.items():
        info = out.tensors[name]
        dtype = stored_dtype(info.dtype)
        before = torch.frombuffer(out.read(name), dtype=dtype).reshape(info.shape).double()
        if held := (fixed or {}).get(name):
            stored = torch.frombuffer(out.read(name), dtype=dtype).reshape(info.shape)
            made = value.to(dtype)
            for begin, end in held.spans:
                kept, after = (each.narrow(held.axis, begin, end - begin) for each in (stored, value))
                if not torch.equal(after, kept.to(value.dtype)):
                    raise PromiseBroken(
                        f"{printable(name)}: {begin} to {end} along axis {held.axis} changed in training, which were to"
                        " stay; nothing was published"
                    )
                # A run in a narrower dtype held them rounded.
                made.narrow(held.axis, begin, end - begin).copy_(kept)
            value = made
        tensors[name] = value.to(dtype)
        delta = tensors[name].double() - before
        norm = float(before.norm())
        changes[name] = Change(float(delta.abs().max()), float(delta.norm()) / norm if norm else None)
    (work / FINAL_FILE).unlink(missing_ok=True)
    save_file(tensors, work / FINAL_FILE, metadata={"format": "pt"})
    return changes


def publishing_job(
    out: CheckpointFolder,
    manifest: Manifest,
    work: Path,
    *,
    held: Mapping[str, str],
    changes: Mapping[str, Change],
    entry: dict[str, Any],
    added: Mapping[str, bytes],
) -> Job:
    """The job that writes the run: every tensor in its shard of the output, trained ones from `work`'s FINAL_FILE.

    `held` is what each tensor of the output holds, by digests; `entry` is what the manifest says of the run but for
    its tensors, `added` are small files that the output has not.
    """
    final = LocalSource(work)
    trained = {info.name: Origin(final, info) for info in final.headers([FINAL_FILE])[FINAL_FILE].tensors}
    shards = tuple(
        Shard(file, tuple(copied(info.name, info) for info in infos), file) for file, infos in in_order(out).items()
    )
    # What surgery put there, and no other file of code that the user trusts.
    ours = [name for name in manifest.code if CODE_NAME.fullmatch(name) and name not in out.side_files]
    code = {name: content for name in ours if (content := out.read_code(name)) is not None}

    def finish(proof: ReadBack) -> Mapping[str, bytes]:
        """PromiseBroken where a tensor that did not train is not what it was."""
        for name, digest in proof.digests.items():
            if name not in changes and digest != held.get(name):
                raise PromiseBroken(
                    f"{printable(name)}: did not train, yet is not what surgery.json says; nothing was published"
                )
        tensors = {
            name: TrainedTensor(
                sha256=proof.digests[name], max_change=change.max_change, relative_change=change.relative_change
            )
            for name, change in changes.items()
        }
        run = TrainingEntry(tool=Tool(name="surgeon", version=__version__), tensors=tensors, **entry)
        after = manifest.changed(training=[*manifest.training, run], files=beside_weights(proof.files))
        return manifest_and_card(after, out.config, shards, metadata_of(out))

    return Job(
        shards=shards,
        origins=origins_in(out, shards) | trained,
        begins=begins_in(out, shards),
        files=model_files(out.config, shards, code) | dict(added),
        carried=out,
        finish=finish,
        # Trained values are known by their digest: their file is another one after each call.
        identity={"train": _digest(work / FINAL_FILE), "entry": entry, "held": dict(held), "out": out.identity()},
    )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()
