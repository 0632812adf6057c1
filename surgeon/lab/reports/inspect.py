"""`surgeon inspect`: show what a checkpoint is, and which surgeries and trainings it went through."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from surgeon.anatomy.anatomy import Anatomy, without_a_place
from surgeon.anatomy.anatomy_cache import keep, recalled
from surgeon.anatomy.dissect import dissect_folder
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.trust import ForeignCode
from surgeon.common.formatting import at_revision, count, listed, show
from surgeon.common.promises import promise_of
from surgeon.common.tables import FittedTable
from surgeon.errors import printable
from surgeon.manifest.manifest import Manifest, TrainingEntry
from surgeon.manifest.reading import manifest_of
from surgeon.manifest.run_files import ADAPTER_FOLDER, KEPT_FOLDER
from surgeon.models.gguf_file import base_headers


@dataclass(frozen=True)
class Inspection:
    """The result of `inspect`: a checkpoint's sizes and family and, for an output of surgeon, its manifest.

    `anatomy` is None where the folder brings foreign code that is not trusted: analysing its layers would run that
    code.
    """

    path: Path
    folder: CheckpointFolder
    anatomy: Anatomy | None
    manifest: Manifest | None
    parameters: int

    @property
    def model_type(self) -> str:
        """The model type that config.json names."""
        return self.anatomy.family.model_type if self.anatomy else str(self.folder.config.get("model_type", "unknown"))

    def __repr__(self) -> str:
        done = [] if self.manifest is None else [o.op for o in self.manifest.operations]
        surgery = "no surgery" if self.manifest is None else ", ".join(done) or "trained"
        layers = f"{self.anatomy.sizes.layers} layers" if self.anatomy else "code of its own"
        return f"Inspection({str(self.path)!r}, {self.model_type}, {layers}, {self.parameters:,} parameters, {surgery})"

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`.

        Keys:
            `path`, `model_type`, `layers`, `parameters`, `tied_embeddings`, `shards`, `notes`: the checkpoint; `layers`
                and `tied_embeddings` are null where it brings code that is not trusted
            `foreign_code`: the first sign of code that is not surgeon's, then every script of the folder; else empty
            `surgery`: the content of surgery.json, or null
        """
        return {
            "path": str(self.path),
            "model_type": self.model_type,
            "layers": self.anatomy.sizes.layers if self.anatomy else None,
            "parameters": self.parameters,
            "tied_embeddings": self.anatomy.tied if self.anatomy else None,
            "foreign_code": [self.folder.foreign, *self.folder.scripts] if self.folder.code == "foreign" else [],
            "shards": list(self.folder.shards),
            "notes": list(self.folder.notes),
            "surgery": self.manifest.model_dump() if self.manifest else None,
        }


def inspect(checkpoint: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> Inspection:
    """Return a checkpoint's family and sizes, its surgeries, its new tensors, and any code that it brings.

    `checkpoint` is a folder, or `user/name[@revision]` on the Hub, from which only headers and small files are read.
    Foreign code that the model needs is named; none of it runs without `trust_remote_code`. Raises BadInput for a
    broken checkpoint.
    """
    try:
        opened = base_headers(checkpoint, revision=revision, trust_remote_code=trust_remote_code)
    except ForeignCode:
        # Opening a folder runs no foreign code; analysing its layers would.
        opened = base_headers(checkpoint, revision=revision, trust_remote_code=True)
    a_look = opened.code == "foreign" and not trust_remote_code
    manifest = manifest_of(opened) if opened.manifest is not None else None
    anatomy = None
    if not a_look:
        anatomy = dissect_folder(opened, recalled)
        keep(anatomy, opened.config, opened.tensors, opened.own)
    return Inspection(
        path=Path(checkpoint),
        folder=opened,
        anatomy=anatomy,
        manifest=manifest,
        parameters=sum(info.numel for info in opened.tensors.values()),
    )


def inspection_view(inspection: Inspection) -> RenderableType:
    """Return a table for the terminal: family and sizes, then base, operations, grafts and training."""
    anatomy, folder = inspection.anatomy, inspection.folder
    facts = FittedTable(headings=False)
    facts.add_row("family", printable(inspection.model_type))
    if folder.code == "foreign":
        facts.add_row(
            "foreign code", Text(f"{folder.foreign}; read it before you pass --trust-remote-code", style="red")
        )
        for script in folder.scripts:
            facts.add_row("foreign file", Text(printable(script), style="red"))
    if anatomy is not None:
        _add_sizes(facts, anatomy)
    facts.add_row("parameters", count(inspection.parameters))
    for note in [*folder.notes, *([without_a_place(anatomy.idle)] if anatomy and anatomy.idle else [])]:
        facts.add_row("note", Text(note, style="yellow"))
    facts.add_row("shards", f"{len(folder.shards)}, {', '.join(sorted({i.dtype for i in folder.tensors.values()}))}")
    manifest = inspection.manifest
    if manifest is None:
        facts.add_row("surgery", "none (no surgery.json)")
        return facts
    _add_operations(facts, manifest)
    _add_layers(facts, manifest)
    _add_training(facts, manifest)
    if manifest.new_tensors:
        shards = sorted({folder.tensors[name].file for name in manifest.new_tensors if name in folder.tensors})
        facts.add_row("new tensors", f"{len(manifest.new_tensors)}, in {listed(shards)}")
    return facts


def _add_operations(facts: FittedTable, manifest: Manifest) -> None:
    """Add rows about the base, the operations on it, and the version of surgeon."""
    facts.add_row("base", printable(at_revision(manifest.base.id, manifest.base.revision)))
    facts.add_row("base's digest", manifest.base_digest)
    facts.add_row("promise", promise_of(manifest.promise, trained=bool(manifest.training)))
    facts.add_row("written by", f"surgeon {printable(manifest.tool.version)}")
    if not manifest.operations:
        facts.add_row("surgery", "none: the base was trained as it is")
    for number, entry in enumerate(manifest.operations):
        facts.add_row(f"operation {number}", f"{printable(entry.op)}: {printable(entry.matched)}")
    for measured in manifest.measured:
        before, after = measured.fertility
        kept = f"{measured.unchanged:,} of {measured.documents:,} documents tokenise as before"
        fertility = f"{before:.3f} → {after:.3f} tokens a word"
        facts.add_row(f"text {printable(measured.use)}", f"{printable(measured.text)}: {fertility}, {kept}")
    for ancestor in manifest.lineage:
        done = ", ".join(entry.op for entry in ancestor.operations) or "training"
        facts.add_row("earlier", f"{printable(done)} on {printable(ancestor.base.id)}")


def _add_layers(facts: FittedTable, manifest: Manifest) -> None:
    """Add rows that show which layers are new, and which layers have grafts."""
    new_layers = [index for index, layer in enumerate(manifest.layers) if layer.base is None]
    if new_layers:
        facts.add_row("new layers", show(new_layers))
    grafts: dict[str, list[int]] = {}
    for index, layer in enumerate(manifest.layers):
        for graft in layer.grafts:
            grafts.setdefault(graft.text, []).append(index)
    for text, layers in grafts.items():
        facts.add_row("grafts", f"{printable(text)}: {'layer' if len(layers) == 1 else 'layers'} {show(layers)}")


def _add_training(facts: FittedTable, manifest: Manifest) -> None:
    """Add rows about the training runs, the changed base tensors, and a merged adapter."""
    for run in manifest.training:
        losses = ", ".join(
            f"{printable(name)} {before:.4f} → {after:.4f}" for name, (before, after) in run.losses.items()
        )
        losses = f"; held-out loss {losses}" if losses else ""
        facts.add_row("trained", f"{len(run.tensors)} tensors, {printable(run.blend) or _steps(run)}{losses}")
        if run.answers is not None:
            facts.add_row("answers", run.answers.text)
    if changed := len(manifest.changed_of_base):
        kept = f"; {len(manifest.kept)} kept in {KEPT_FOLDER}/, for `surgeon revert`" if manifest.kept else ""
        facts.add_row("base tensors", f"{changed} changed by training{kept}")
    if manifest.adapter is not None:
        facts.add_row(
            "adapter", f"{len(manifest.adapter.tensors)} tensors in {ADAPTER_FOLDER}/, merged into the weights"
        )


def _add_sizes(facts: FittedTable, anatomy: Anatomy) -> None:
    """Add rows about layers, attention heads and vocabulary."""
    sizes = anatomy.sizes
    facts.add_row("layers", f"{sizes.layers}, width {sizes.hidden}, MLP {sizes.intermediate}")
    facts.add_row("heads", f"{sizes.heads} ({sizes.kv_heads} key-value), of {sizes.head_dim}")
    facts.add_row("vocabulary", f"{sizes.vocabulary}{', tied embeddings' if anatomy.tied else ''}")


def _steps(run: TrainingEntry) -> str:
    """Return a run's steps as text, with the published step where it was not the last."""
    best = "" if run.published_step is None else f", of which step {run.published_step:,} was the best"
    return f"{run.steps:,} steps{best}"
