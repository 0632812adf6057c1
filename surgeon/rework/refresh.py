"""`surgeon refresh`: replace, in place, the shipped code of an output that an earlier surgeon wrote."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgeon.anatomy.dissect import dissect_folder
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.common.json_results import plain_fields
from surgeon.common.listener import Listener, Quiet
from surgeon.common.work_folders import write_durably
from surgeon.errors import BadInput, PromiseBroken, printable
from surgeon.grafts.bundle import CODE_FILE, bundle
from surgeon.grafts.composition import composition_of
from surgeon.manifest.manifest import MANIFEST_FILE
from surgeon.manifest.reading import manifest_of
from surgeon.verification.own_manifest import check_own_manifest
from surgeon.writing.job import copied


@dataclass(frozen=True)
class Refreshed:
    """An output that now has this version's code: the code file's digests `before` and `now`."""

    path: Path
    before: str
    now: str
    checks: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Refreshed({str(self.path)!r}, {self.before[:12]} -> {self.now[:12]})"

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`.

        Keys:
            `path`: OUT
            `before`, `now`: sha256 of its code before and now
            `checks`: the checks of the rest
        """
        return plain_fields(self)


def refresh(out: str | Path, *, listener: Listener | None = None) -> Refreshed:
    """Write the code that this version ships into `out`, which an earlier version wrote; nothing else in it changes.

    The old code is read, not run. Weights and config.json stay unchanged: their digests are compared with
    `surgery.json`, and the new code must require exactly these tensors. The code is replaced first, then its digest in
    `surgery.json`, so that the same command completes an interrupted run.

    Raises:
        BadInput: `out` has no grafts, its code was edited, or it contains other code.
        PromiseBroken: Something else contradicts `surgery.json`; `out` is unchanged.
    """
    listener = listener or Quiet()
    # Code files are only read as text; digests decide below which of them is surgeon's.
    folder = CheckpointFolder.open(Path(out), trust_remote_code=True)
    manifest = manifest_of(folder)
    native = composition_of(folder.config)
    if native is None or folder.config.get("auto_map") != native.auto_map or CODE_FILE not in manifest.code:
        raise BadInput(f"{folder.source.shown}: ships no code of surgeon's, so there is nothing to refresh")
    code, old = bundle(folder.config), folder.read_code(CODE_FILE)
    now, before = hashlib.sha256(code).hexdigest(), hashlib.sha256(old or b"").hexdigest()
    if old is not None and before not in (manifest.code[CODE_FILE], now):
        raise BadInput(
            f"{printable(str(folder.path / CODE_FILE))}: was edited since the surgery; move it out of the folder, then"
            " `surgeon refresh` writes this version's"
        )
    changed = manifest.changed(files={**manifest.files, CODE_FILE: now})
    listener.begin("reading", sum(info.nbytes for info in folder.tensors.values()))
    try:
        write_durably(folder.path / CODE_FILE, code)
        fresh = CheckpointFolder.open(folder.path)
        checks = check_own_manifest(changed, fresh, dissect_folder(fresh), advance=listener.advance)
        if broken := next((check for check in checks if not check.holds), None):
            raise PromiseBroken(f"{folder.source.shown}: {broken.name}: {broken.detail}")
        _check_fits(fresh)
    except BaseException:
        if old is not None:
            write_durably(folder.path / CODE_FILE, old)
        raise
    write_durably(folder.path / MANIFEST_FILE, changed.to_bytes())
    return Refreshed(folder.path, before, now, tuple(f"{check.name}: {check.detail}" for check in checks))


def _check_fits(folder: CheckpointFolder) -> None:
    """Raise BadInput where the shipped code requires other tensors than the folder has."""
    from surgeon.writing.preflight import check_skeleton

    check_skeleton(folder.config, [copied(name, info) for name, info in folder.tensors.items()])


def refreshed_view(found: Refreshed) -> str:
    """Return lines on what was written."""
    done = "already this version's" if found.before == found.now else "replaced, nothing else"
    name = printable(str(found.path))
    return "\n".join([f"{name}: {CODE_FILE} {done}", *found.checks, f"its function: `surgeon verify BASE {name}`"])
