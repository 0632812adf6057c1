"""Reading `surgery.json`: what is not as surgeon writes it is refused, with the first thing that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.errors import BadInput, printable
from surgeon.manifest.manifest import FORMAT, MANIFEST_FILE, EntryT, Manifest, seal_of
from surgeon.manifest.recipe_words import check_words


def parse(data: object, *, file: str) -> Manifest:
    """Check a manifest read as JSON data; BadInput names the first thing that is not as it must be.

    Every surgery in it must have the seal that its content asks for.
    """
    manifest = checked(Manifest, data, "manifest", file=file)
    assert isinstance(data, dict)
    lineage: list[dict[str, Any]] = data["lineage"]
    for number, entry in enumerate([*lineage, data], 1):
        if seal_of({**entry, "lineage": lineage[: number - 1]}) != entry["sha256"]:
            which = f" (surgery {number})" if number <= len(lineage) else ""
            raise BadInput(
                f"{printable(file)}{which}: not what its sha256 says, so it was edited since surgeon wrote it; use the"
                " file as it was"
            )
    for surgery in (*manifest.lineage, manifest):
        check_words(surgery, file)
    return manifest


def checked(model: type[EntryT], data: object, what: str, *, file: str) -> EntryT:
    """The JSON data of a file that surgeon writes (`what`: its format's key is surgeon_WHAT), as `model` has it.

    Raises BadInput for another version of the format, and names the first thing that is not as it must be.
    """
    version = data.get(f"surgeon_{what}") if isinstance(data, dict) else None
    if version not in (FORMAT, None):
        raise BadInput(
            f"{printable(file)}: {what} format {printable(repr(version))}, this surgeon reads {FORMAT}; use the version"
            " that wrote it, or a newer one"
        )
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = printable(".".join(str(step) for step in problem["loc"]) or "the file")
        raise BadInput(f"{printable(file)}: not a surgeon {what}: {where}: {printable(problem['msg'])}") from None


def manifest_of(folder: CheckpointFolder) -> Manifest:
    """The manifest of an output of surgeon; BadInput for any other checkpoint."""
    if folder.manifest is None:
        raise BadInput(
            f"{printable(str(folder.path))}: no {MANIFEST_FILE}, so this is not an output of surgeon (or it was"
            " saved again by another tool, which leaves that file out)"
        )
    return parse(folder.manifest, file=str(folder.path / MANIFEST_FILE))


def written_manifest(out: Path) -> Manifest:
    """The manifest of an output that surgeon has just written (or found complete)."""
    file = out / MANIFEST_FILE
    return parse(json.loads(file.read_bytes()), file=str(file))
