"""What `preview`, `apply` and `merge` give back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgeon.blueprint import Blueprint
from surgeon.layout import Shard
from surgeon.manifest import Manifest
from surgeon.plan.loading import LoadedPlan
from surgeon.results.proving import Verification


@dataclass(frozen=True)
class Preview:
    """What a plan would do to a base, from headers and config alone.

    Parameters are counts of numbers; tied embeddings count once. Bytes are of tensor data; `bytes_holes` is
    the part of the output that is zeros and takes no room on disk. `peak_memory` is an estimate in bytes.
    """

    plan: LoadedPlan
    blueprint: Blueprint
    shards: tuple[Shard, ...]
    model_type: str
    parameters_before: int
    parameters_after: int
    parameters_new: int
    parameters_trainable: int
    bytes_to_read: int
    bytes_to_write: int
    bytes_holes: int
    peak_memory: int
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        layers = f"{sum(e.base is not None for e in self.blueprint.layers)} → {len(self.blueprint.layers)} layers"
        return (
            f"Preview({self.model_type}, {layers}, {self.parameters_before:,} → {self.parameters_after:,} parameters,"
            f" {self.parameters_new:,} new, promise {self.blueprint.promise!r})"
        )

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`."""
        blueprint = self.blueprint
        return {
            "model_type": self.model_type,
            "native": blueprint.native,
            "promise": blueprint.promise,
            "operations": [
                {
                    "op": r.op,
                    "matched": r.matched,
                    "promise": r.claim.promise,
                    "reason": r.claim.reason,
                    "trains": r.trains,
                }
                for r in blueprint.operations
            ],
            "layers": [
                {
                    "layer": e.index,
                    "base": e.base,
                    "init": e.init or None,
                    "sources": list(e.sources),
                    "grafts": [graft.text for graft in e.grafts],
                }
                for e in blueprint.layers
            ],
            "parameters": {
                "before": self.parameters_before,
                "after": self.parameters_after,
                "new": self.parameters_new,
                "trainable": self.parameters_trainable,
            },
            "bytes": {"read": self.bytes_to_read, "written": self.bytes_to_write, "holes": self.bytes_holes},
            "peak_memory": self.peak_memory,
            "shards": [{"file": s.file, "bytes": s.nbytes, "new": s.twin is None} for s in self.shards],
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Applied:
    """A finished surgery: where the output lies, its manifest, what the preview said, and seconds by stage.

    `left_behind` are files of the base that were not carried along.
    """

    path: Path
    manifest: Manifest
    preview: Preview
    left_behind: tuple[str, ...]
    seconds: dict[str, float]
    read_back: bool = True

    def __repr__(self) -> str:
        manifest = self.manifest
        told = f"{len(manifest.layers)} layers, {len(manifest.new_tensors)} new tensors, promise {manifest.promise!r}"
        return f"Applied({str(self.path)!r}, {told})"

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`."""
        return {
            "path": str(self.path),
            "left_behind": list(self.left_behind),
            "seconds": self.seconds,
            **self.preview.to_json(),
        }


@dataclass(frozen=True)
class Merged:
    """A finished merge: what was written, and what the merged model does beside the one with branches."""

    applied: Applied
    measured: Verification

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`."""
        return {"applied": self.applied.to_json(), "measured": self.measured.to_json()}
