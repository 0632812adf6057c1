"""The published run: the output's shards, with trained values in the place of what trained.

Everything passes through `execute` as bytes, so a run is staged, read back and published like a surgery; that every
tensor which did not train is what the manifest says is checked on the way.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from surgeon._version import __version__
from surgeon.apply.job import (
    Job,
    beside_weights,
    copied,
    in_order,
    manifest_and_card,
    model_files,
    origins_in,
    twins_in,
)
from surgeon.apply.readback import Origin, ReadBack
from surgeon.blueprint.draft import Output
from surgeon.blueprint.recipes import Copy
from surgeon.blueprint.shards import Shard
from surgeon.checkpoint.card_metadata import metadata_of
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.header import TensorInfo
from surgeon.checkpoint.source import LocalSource
from surgeon.common.json_results import plain_fields
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
from surgeon.manifest.trainable import Fixed, TrainableSet
from surgeon.models.load import build_model, stored_dtype
from surgeon.train.config.schema import LoraSpec
from surgeon.train.trainable.stored import StoredNames

FINAL_FILE = "final.safetensors"
ADAPTER_FILE = "adapter.safetensors"


class Change(NamedTuple):
    """What training made of a tensor: max |Δ|, and ‖Δ‖ / ‖before‖ (None where it was zero before)."""

    max_change: float
    relative_change: float | None


@dataclass(frozen=True)
class Trained:
    """A finished training run of `out`, published at `path`.

    `changes` are of every tensor that trained; `unchanged` are those that are what they were. `losses` maps sources to
    their held-out losses in nats a token, before and after, which is after `published_step`; of a classification head
    they are nats an example, and `scores` maps sources to their other figures then (`Judged`). `log` are the trainer's
    entries. `seconds` and `tokens_per_second` are of the steps since `resumed_at`, without evaluations and
    checkpoints; peak memory is in bytes, of the GPU where there is one.
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


@dataclass(frozen=True)
class Final:
    """What training made, in FINAL_FILE; of a LoRA also the adapter, in ADAPTER_FILE, and its config.

    `changes` says how each tensor differs from what it was.
    """

    changes: dict[str, Change]
    adapter: bytes | None = None


def write_final(
    out: CheckpointFolder,
    trained: Path,
    work: Path,
    *,
    wanted: TrainableSet,
    lora: LoraSpec | None = None,
    base: str = "",
    auto: str | None = None,
) -> Final:
    """Write the trained values in the output's dtypes to `work`'s FINAL_FILE; how each differs from the output's.

    What is fixed of a tensor did not train: it is written as the output has it. A LoRA is merged, and written beside
    it; `base` is what its config calls the model, `auto` is transformers' class of the model. Raises
    PromiseBroken where what is fixed is another in what was trained.
    """
    adapter = None
    if lora is not None:
        tensors, adapter = _with_lora(out, trained, work, lora, base, auto)
    else:
        tensors = load_file(trained)
        # Of a tied tensor that the checkpoint holds twice, one was trained.
        if tensors.keys() != set(wanted.names):
            stored = StoredNames(build_model(out, dtype=lambda _: torch.float32, auto=auto), out.tensors)
            tensors = stored.on_disk(tensors, also=wanted.names)
    changes: dict[str, Change] = {}
    for name, value in tensors.items():
        info = out.tensors[name]
        dtype = stored_dtype(info.dtype)
        stored_value = torch.frombuffer(out.read(name), dtype=dtype).reshape(info.shape)
        before = stored_value.double()
        if held := wanted.fixed.get(name):
            value = _with_fixed(name, value, stored_value, held)
        tensors[name] = value.to(dtype)
        delta = tensors[name].double() - before
        if not bool(torch.isfinite(tensors[name]).all()):
            raise BadInput(
                f"{printable(name)}: holds NaN or infinity after the last step, and nothing is published of it; lower"
                " `optimizer.lr` or look at the data"
            )
        norm = float(before.norm())
        changes[name] = Change(float(delta.abs().max()), float(delta.norm()) / norm if norm else None)
    (work / FINAL_FILE).unlink(missing_ok=True)
    save_file(tensors, work / FINAL_FILE, metadata={"format": "pt"})
    return Final(changes, adapter)


def _with_lora(
    out: CheckpointFolder, trained: Path, work: Path, spec: LoraSpec, base: str, auto: str | None
) -> tuple[dict[str, Tensor], bytes]:
    """The weights with the LoRA merged, and its config; its own tensors go to ADAPTER_FILE."""
    from surgeon.train.trainable.lora import adapter_config, merged, write_adapter

    found = merged(out, trained, spec, build_model(out, dtype=lambda _: torch.float32, auto=auto))
    write_adapter(found.adapter, work / ADAPTER_FILE)
    config = adapter_config(spec, found.adapter, base, transposed=found.transposed, whole=found.whole)
    return found.tensors, config


def _with_fixed(name: str, value: Tensor, stored: Tensor, fixed: Fixed) -> Tensor:
    """The trained value in the stored dtype with what is fixed as it is stored. Raises PromiseBroken."""
    made = value.to(stored.dtype)
    for begin, end in fixed.spans:
        kept, after = (each.narrow(fixed.axis, begin, end - begin) for each in (stored, value))
        if not torch.equal(after, kept.to(value.dtype)):
            raise PromiseBroken(
                f"{printable(name)}: {begin} to {end} along axis {fixed.axis} changed in training, which were to"
                " stay; nothing was published"
            )
        # A run in a narrower dtype held them rounded.
        made.narrow(fixed.axis, begin, end - begin).copy_(kept)
    return made


def _kept_shards(
    out: CheckpointFolder, manifest: Manifest, of_base: Collection[str]
) -> tuple[tuple[Shard, ...], dict[str, Origin]]:
    """Shards of what `of_base` held before all training, as those of the output are cut, and where that lies now.

    What an earlier run kept is taken from there; what an earlier run changed and did not keep is gone.
    """
    before = kept_tensors(out) if manifest.kept else None
    held = {} if before is None else before.tensors
    gone = manifest.changed_of_base.keys() - held.keys()
    infos = {name: held.get(name, out.tensors[name]) for name in {*of_base, *held} - gone}
    shards: list[Shard] = []
    for file, ordered in in_order(out).items():
        if names := [info.name for info in ordered if info.name in infos]:
            outputs = tuple(Output(kept_name(n), Copy.of(infos[n]), None) for n in names)
            shards.append(Shard(f"{KEPT_FOLDER}/{file}", outputs, None))
    return tuple(shards), {kept_name(name): Origin.of(out.source, info) for name, info in infos.items()}


def publishing_job(
    out: CheckpointFolder,
    manifest: Manifest,
    work: Path,
    *,
    held: Mapping[str, str],
    final: Final,
    entry: dict[str, Any],
    added: Mapping[str, bytes],
    of_base: Collection[str] = (),
    keep: bool = False,
) -> Job:
    """The job that writes the run: every tensor in its shard of the output, trained ones from `work`'s FINAL_FILE.

    `held` is what each tensor of the output holds, by digests; `entry` is what the manifest says of the run but for
    its tensors, `added` are small files that the output has not. `of_base` trained and held something of the base's,
    which goes beside the weights with `keep`.
    """
    changes = final.changes
    made = LocalSource(work)
    trained = {info.name: Origin.of(made, info) for info in made.headers([FINAL_FILE])[FINAL_FILE].tensors}
    shards = tuple(
        Shard(file, tuple(copied(info.name, info) for info in infos), file) for file, infos in in_order(out).items()
    )
    beside, beside_origins = _kept_shards(out, manifest, of_base) if keep or manifest.kept else ((), {})
    kept = [name for name in out.tensors if kept_name(name) in beside_origins]
    if final.adapter is not None:
        ordered = made.headers([ADAPTER_FILE])[ADAPTER_FILE].tensors
        outputs = tuple(copied(info.name, info) for info in ordered)
        beside = (*beside, Shard(ADAPTER_WEIGHTS_FILE, outputs, None))
        beside_origins |= {info.name: Origin.of(made, info) for info in ordered}
        added = {**added, ADAPTER_CONFIG_FILE: final.adapter}
    # What surgery put there, and no other file of code that the user trusts.
    ours = [name for name in manifest.code if CODE_NAME.fullmatch(name) and name not in out.side_files]
    code = {name: content for name in ours if (content := out.read_code(name)) is not None}

    def finish(proof: ReadBack) -> Mapping[str, bytes]:
        """PromiseBroken where a tensor that did not train is not what it was."""
        for name, digest in proof.digests.items():
            if name not in beside_origins and name not in changes and digest != held.get(name):
                raise PromiseBroken(
                    f"{printable(name)}: did not train, yet is not what surgery.json says; nothing was published"
                )
        tensors = {
            name: TrainedTensor(
                sha256=proof.digests[name],
                max_change=change.max_change,
                relative_change=change.relative_change,
                **({"before": held[name]} if name in of_base else {}),
            )
            for name, change in changes.items()
        }
        more: dict[str, Any] = {"kept": kept} if kept else {}
        if final.adapter is not None:
            adapter = {
                info.name: StoredTensor.of(info, proof.digests[info.name]) for info in sorted(ordered, key=_named)
            }
            more["adapter"] = AdapterEntry(config=hashlib.sha256(final.adapter).hexdigest(), tensors=adapter)
        run = TrainingEntry(tool=Tool(name="surgeon", version=__version__), tensors=tensors, **entry, **more)
        files = {name: digest for name, digest in proof.files.items() if not name.startswith(f"{ADAPTER_FOLDER}/")}
        after = manifest.changed(training=[*manifest.training, run], files=beside_weights(files))
        return manifest_and_card(after, out.config, shards, metadata_of(out))

    return Job(
        shards=(*shards, *beside),
        origins=origins_in(out, shards) | trained | beside_origins,
        twins=twins_in(out, shards),
        files=model_files(out.config, shards, code) | dict(added),
        carried=out,
        finish=finish,
        # Trained values are known by their digest: their file is another one after each call.
        identity={
            "train": _digest(work / FINAL_FILE),
            "adapter": None if final.adapter is None else _digest(work / ADAPTER_FILE),
            "kept": kept,
            "entry": entry,
            "held": dict(held),
            "out": out.identity(),
        },
    )


def _named(info: TensorInfo) -> str:
    return info.name


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()
