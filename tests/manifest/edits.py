"""Edits of a `surgery.json`: by a careless hand, and by one that seals it anew."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from surgeon.manifest.manifest import seal_of


def resealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """The same data with the seals that whoever edits it can compute as well as surgeon."""
    lineage: list[dict[str, Any]] = []
    for surgery in manifest["lineage"]:
        lineage.append({**surgery, "sha256": seal_of({**surgery, "lineage": lineage})})
    sealed = {**manifest, "lineage": lineage}
    return {**sealed, "sha256": seal_of(sealed)}


def edited(out: Path, change: Callable[[dict[str, Any]], object], *, seal: bool) -> Path:
    """Edit the manifest of an output; with `seal` so that it has the seals of what it now says."""
    file = out / "surgery.json"
    manifest = json.loads(file.read_text())
    change(manifest)
    file.write_text(json.dumps(resealed(manifest) if seal else manifest))
    return out
