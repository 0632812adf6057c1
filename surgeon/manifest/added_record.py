"""A record put beside the weights of an output, which its manifest then vouches for."""

from __future__ import annotations

import hashlib
from pathlib import Path

from surgeon.checkpoint.folder import RECORD_FILE
from surgeon.common.work_folders import write_durably
from surgeon.manifest.manifest import MANIFEST_FILE
from surgeon.manifest.reading import written_manifest


def add_record(run: Path, text: str) -> None:
    """Write `continual.json` into an output of surgeon and its digest into surgery.json, so that checks know it."""
    write_durably(run / RECORD_FILE, text)
    manifest = written_manifest(run)
    files = manifest.files | {RECORD_FILE: hashlib.sha256(text.encode()).hexdigest()}
    write_durably(run / MANIFEST_FILE, manifest.changed(files=files).to_bytes().decode())
