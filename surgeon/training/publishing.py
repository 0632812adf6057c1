"""Publishing a run: the output's shards, in which trained values replace the tensors that trained.

Everything passes through `execute` as bytes, so a run is staged, read back and published like a surgery. On the way it
is checked that every tensor which did not train has the digest in the manifest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors.torch import save_file
from torch import Tensor

from surgeon._version import __version__
from surgeon.blueprint.blueprint import Output
from surgeon.blueprint.recipes import Copy
from surgeon.blueprint.shards import Shard
from surgeon.checkpoint.card_metadata import metadata_of
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.header import TensorInfo
from surgeon.checkpoint.piece_bytes import places_of
from surgeon.checkpoint.pieces import Pieces
from surgeon.checkpoint.source import LocalSource, Source
from surgeon.common.json_results import plain_fields
from surgeon.common.work_folders import sync
from surgeon.data.kept_answers import KeptAnswers
from surgeon.errors import BadInput, PromiseBroken, printable
from surgeon.manifest.lineage import CODE_NAME
from surgeon.manifest.manifest import AdapterEntry, Manifest, StoredTensor, Tool, TrainedTensor, TrainingEntry
from surgeon.manifest.run_files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FOLDER,
    ADAPTER_WEIGHTS_FILE,
    KEPT_FOLDER,
    kept_name,
    kept_tensors,
)
from surgeon.manifest.trainable import Fixed
from surgeon.models.load import stored_dtype
from surgeon.training.saved.checkpoints import file_digest
from surgeon.training.targets.target import Values
from surgeon.writing.job import (
    Job,
    beside_weights,
    copied,
    in_order,
    manifest_and_card,
    mirrored_in,
    model_files,
    places_in,
)
from surgeon.writing.readback import ReadBack

FINAL_FILE = "final.safetensors"
ADAPTER_FILE = "adapter.safetensors"
# The name of the work folder among the sources of the job; the first source, "", is the output that was trained.
_TRAINED = "trained"
# The name, among these sources, of a base whose values the output no longer has.
_BEFORE = "before"


class Change(NamedTuple):
    """How training changed a tensor: max |Δ|, and ‖Δ‖ / ‖before‖ (None where it was zero before)."""

    max_change: float
    relative_change: float | None

    @classmethod
    def between(cls, before: Tensor, after: Tensor) -> Self:
        """Return the change from `before` to `after`, computed in float64."""
        delta, norm = after.double() - before.double(), float(before.double().norm())
        return cls(float(delta.abs().max()), float(delta.norm()) / norm if norm else None)


@dataclass(frozen=True)
class Trained:
    """A finished training run of `out`, published at `path`.

    `changes` has every tensor that trained; `unchanged` lists those among them that did not change. `losses` maps
    sources to their held-out losses in nats per token, before training and after `published_step`. With a
    classification head the losses are in nats per example, and `scores` maps sources to their other figures after
    `published_step`. `answers` says how much of its answers before the run the model keeps, where that was measured.
    `log` has the trainer's entries. `seconds` and `tokens_per_second` count the steps since
    `resumed_at`, without evaluations and checkpoints. Peak memory is in bytes, on the GPU where there is one.
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
    published_step: int
    log: list[dict[str, Any]]
    resumed_at: int
    seconds: float
    tokens_per_second: float | None
    peak_memory: int
    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    answers: KeptAnswers | None = None

    def __repr__(self) -> str:
        losses = ", ".join(f"{name} {before:.4g} → {after:.4g}" for name, (before, after) in self.losses.items())
        amount = f"{self.parameters:,} parameters in {len(self.changes)} tensors, {self.tokens:,} tokens"
        return f"Trained({str(self.path)!r}, {amount}, loss {losses or 'not measured'})"

    @property
    def unchanged(self) -> tuple[str, ...]:
        """The names of the tensors that trained and did not change."""
        return tuple(name for name, change in self.changes.items() if change.max_change == 0)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`.

        Keys:
            `out`, `path`: the folders of the trained output and of the run
            `operations`: the operations whose tensors train
            `settings`: every number of the run
            `losses`: by source, held out, `before` and `after`
            `scores`: with labels: by source `accuracy`, `f1` and `matthews` (where they exist), after `published_step`
            `answers`: with `answers`, how near answers are to those before: `prompts`, `silent`, and `kl`, `prefix`,
                `same`, `right`, `right_of_base`, each with `value`, `low`, `high`; else null
            `published_step`: the step that RUN and `after` come from: the last, or with `keep_best` the best
            `tensors`: by name `max_change` and `relative_change` (null: the tensor was zero before)
            `unchanged`: the names of tensors that trained and did not change
            `parameters`: how many numbers trained
            `tokens`: of the whole run
            `peak_memory`: in bytes, of the GPU where there is one
            `log`: the trainer's entries: `step`, `loss`, `grad_norm`, `learning_rate`, `eval_SOURCE_loss`; with
                `preserve` also `loss.preserve` and `loss.fisher`, its terms' unweighted means since the last entry
            `seconds`, `tokens_per_second`, `resumed_at`: of the steps after `resumed_at`, without evaluations and
                checkpoints
        """
        return plain_fields(self, without=("manifest", "changes", "answers")) | {
            "answers": None if self.answers is None else self.answers.to_json(),
            "losses": {name: {"before": before, "after": after} for name, (before, after) in self.losses.items()},
            "tensors": {name: change._asdict() for name, change in self.changes.items()},
            "unchanged": list(self.unchanged),
        }


def write_final(out: CheckpointFolder, values: Values, work: Path, fixed: Mapping[str, Fixed]) -> dict[str, Change]:
    """Write trained values in the output's dtypes to FINAL_FILE in `work`; return how each differs from before.

    A fixed part of a tensor did not train; it is written as it is in the output. An adapter is written to ADAPTER_FILE.

    Args:
        out: the output that was trained.
        values: the trained values of its tensors, and an adapter.
        work: the folder to write to.
        fixed: by tensor, the part that did not train.

    Raises:
        PromiseBroken: a fixed part changed in training.
        BadInput: a trained value is not finite.
    """
    changes: dict[str, Change] = {}
    tensors: dict[str, Tensor] = {}
    for name, value in values.tensors.items():
        info = out.tensors[name]
        dtype = stored_dtype(info.dtype)
        stored = torch.frombuffer(out.read(name), dtype=dtype).reshape(info.shape)
        tensors[name] = _with_fixed(name, value, stored, fixed[name]) if name in fixed else value.to(dtype)
        if not bool(torch.isfinite(tensors[name]).all()):
            raise BadInput(
                f"{printable(name)}: holds NaN or infinity after the last step, and nothing is published of it; lower"
                " `optimizer.lr` or look at the data"
            )
        changes[name] = Change.between(stored, tensors[name])
    for file, content in ((FINAL_FILE, tensors), (ADAPTER_FILE, values.adapter)):
        (work / file).unlink(missing_ok=True)
        if content is not None:
            save_file(dict(content), work / file, metadata={"format": "pt"})
            sync(work / file)
    return changes


def _with_fixed(name: str, value: Tensor, stored: Tensor, fixed: Fixed) -> Tensor:
    """Return the trained value in the stored dtype, with the stored values in its fixed part.

    Raises PromiseBroken where the fixed part changed in training.
    """
    made = value.to(stored.dtype)
    for part in fixed.slices:
        if not torch.equal(value[part], stored[part].to(value.dtype)):
            shown = ", ".join(f"{axis.start} to {axis.stop}" for axis in part)
            raise PromiseBroken(
                f"{printable(name)}: [{shown}] of it changed in training, which was to stay; nothing was published"
            )
        # A run in a narrower dtype had these values rounded.
        made[part] = stored[part]
    return made


class Before(NamedTuple):
    """A checkpoint with tensors as they were before all training, by the names of the output's tensors."""

    source: Source
    tensors: Mapping[str, TensorInfo]


def _kept_shards(
    out: CheckpointFolder, manifest: Manifest, of_base: Collection[str], lost: Mapping[str, TensorInfo]
) -> tuple[list[Shard], dict[str, Pieces]]:
    """Lay out the base's tensors as they were before all training, in shards cut like the output's.

    These are the tensors `of_base`, and all that earlier runs kept. Return the shards, and where each tensor is read:
    in the kept files of earlier runs, else in the output. A tensor that an earlier run changed and did not keep is left
    out, unless `lost` has it.
    """
    before = kept_tensors(out) if manifest.kept else None
    held = {} if before is None else before.tensors
    gone = manifest.changed_of_base.keys() - held.keys()
    infos = {name: held.get(name, out.tensors[name]) for name in {*of_base, *held} - gone}
    found = {name: lost[name] for name in gone if name in lost}
    shards: list[Shard] = []
    for file, ordered in in_order(out).items():
        if names := [info.name for info in ordered if info.name in infos or info.name in found]:
            outputs = tuple(Output(kept_name(n), Copy.of((infos | found)[n]), None) for n in names)
            shards.append(Shard(f"{KEPT_FOLDER}/{file}", outputs, None))
    places = places_of({kept_name(name): info for name, info in infos.items()})
    return shards, places | places_of({kept_name(name): info for name, info in found.items()}, _BEFORE)


def publishing_job(
    out: CheckpointFolder,
    manifest: Manifest,
    work: Path,
    *,
    digests: Mapping[str, str],
    changes: Mapping[str, Change],
    entry: dict[str, Any],
    added: Mapping[str, bytes],
    adapter: bytes | None = None,
    of_base: Collection[str] = (),
    keep: bool | Before = False,
    measured: Callable[[Path], Mapping[str, Any]] = lambda _staged: {},
) -> Job:
    """Return the job that writes the run: every tensor in its shard of the output, trained ones read from FINAL_FILE.

    Args:
        out: the output that was trained.
        manifest: its manifest.
        work: the work folder, to which `write_final` wrote the trained values.
        digests: the digest of every tensor of `out`.
        changes: how each trained tensor differs from before.
        entry: the manifest's entry of the run, without its tensors.
        added: small files that `out` does not have.
        adapter: the config file of an adapter, whose tensors are in ADAPTER_FILE.
        of_base: the base's own tensors that trained.
        keep: store their old values next to the weights; a `Before` has old values that the output no longer has.
        measured: measures the staged run, and returns what the entry says of it.
    """
    made = LocalSource(work)
    trained = {info.name: info for info in made.headers([FINAL_FILE])[FINAL_FILE].tensors}
    shards = tuple(
        Shard(file, tuple(copied(info.name, info) for info in infos), file) for file, infos in in_order(out).items()
    )
    # Further files of weights: the base's tensors from before training, and an adapter.
    lost = keep.tensors if isinstance(keep, Before) else {}
    beside, places = _kept_shards(out, manifest, of_base, lost) if keep or manifest.kept else ([], {})
    kept = [name for name in out.tensors if kept_name(name) in places]
    of_adapter: dict[str, TensorInfo] = {}
    if adapter is not None:
        of_adapter = {info.name: info for info in made.headers([ADAPTER_FILE])[ADAPTER_FILE].tensors}
        outputs = tuple(copied(name, info) for name, info in of_adapter.items())
        beside.append(Shard(ADAPTER_WEIGHTS_FILE, outputs, None))
        places |= places_of(of_adapter, _TRAINED)
        added = {**added, ADAPTER_CONFIG_FILE: adapter}

    def finish(proof: ReadBack) -> Mapping[str, bytes]:
        """Return the manifest and the card. Raises PromiseBroken where a tensor that did not train changed."""
        _check_untrained(proof, digests, {*places, *changes})
        before: dict[str, dict[str, Any]] = {name: {"before": digests[name]} for name in of_base}
        tensors = {
            name: TrainedTensor(sha256=proof.digests[name], **change._asdict(), **before.get(name, {}))
            for name, change in changes.items()
        }
        more: dict[str, Any] = {"kept": kept} if kept else {}
        if adapter is not None:
            stored = {name: StoredTensor.of(of_adapter[name], proof.digests[name]) for name in sorted(of_adapter)}
            more["adapter"] = AdapterEntry(config=hashlib.sha256(adapter).hexdigest(), tensors=stored)
        more |= measured(proof.folder)
        run = TrainingEntry(tool=Tool(name="surgeon", version=__version__), tensors=tensors, **entry, **more)
        files = {name: digest for name, digest in proof.files.items() if not name.startswith(f"{ADAPTER_FOLDER}/")}
        after = manifest.changed(training=[*manifest.training, run], files=beside_weights(files))
        return manifest_and_card(after, out.config, shards, metadata_of(out))

    return Job(
        shards=(*shards, *beside),
        sources={"": out.source, _TRAINED: made, **({_BEFORE: keep.source} if isinstance(keep, Before) else {})},
        places=places_in(out.tensors, shards) | places_of(trained, _TRAINED) | places,
        mirrored=mirrored_in(out, shards),
        files=model_files(out.config, shards, _code_of(out, manifest)) | dict(added),
        carried=out,
        finish=finish,
        # Trained values are identified by their digest, because each call writes their file again.
        identity={
            "train": file_digest(work / FINAL_FILE),
            "adapter": None if adapter is None else file_digest(work / ADAPTER_FILE),
            "kept": kept,
            "entry": entry,
            "held": dict(digests),
            "out": out.identity(),
        },
    )


def _code_of(out: CheckpointFolder, manifest: Manifest) -> dict[str, bytes]:
    """Return the files of code that a surgery added, and no other code that the user trusts."""
    ours = [name for name in manifest.code if CODE_NAME.fullmatch(name) and name not in out.side_files]
    return {name: content for name in ours if (content := out.read_code(name)) is not None}


def _check_untrained(proof: ReadBack, digests: Mapping[str, str], changed: Collection[str]) -> None:
    """Raise PromiseBroken where a tensor outside `changed` was read back with another digest than before."""
    for name, digest in proof.digests.items():
        if name not in changed and digest != digests.get(name):
            raise PromiseBroken(
                f"{printable(name)}: did not train, yet is not what surgery.json says; nothing was published"
            )
