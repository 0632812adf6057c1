"""Reading `surgery.json`: content that surgeon does not write is refused, and the error names the first fault."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.pieces import Pieces
from surgeon.errors import BadInput, printable
from surgeon.manifest.manifest import FORMAT, MANIFEST_FILE, EntryT, Manifest, NewTensor, StoredTensor, seal_of


def parse(data: object, *, file: str) -> Manifest:
    """Return the checked manifest of JSON data that was read from `file`.

    The seal of every surgery in it must match its content. Raises BadInput that names the first fault.
    """
    manifest = checked(Manifest, data, "manifest", file=file, reads=FORMAT)
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
        for name, made in surgery.new_tensors.items():
            try:
                _check_spans(made, surgery.base.tensors)
            except ValueError as impossible:
                raise BadInput(
                    f"{printable(file)}: {printable(name)} is said to hold {impossible}, which it cannot; was it edited"
                    " by hand?"
                ) from None
    return manifest


def _check_spans(made: NewTensor, base: Mapping[str, StoredTensor]) -> None:
    """Raise ValueError that names the impossible bytes where a new tensor cannot contain the recorded base bytes."""
    pieces = made.pieces
    for span in pieces.spans:
        of, more = base.get(span.tensor), span.count - 1
        read, lies = (begin + span.length for begin in (span.offset + more * span.step, span.at + more * span.every))
        if of is None or of.dtype != made.dtype or read > of.nbytes or lies > made.nbytes:
            raise ValueError(f"bytes of the base's {printable(span.tensor)}")
    over = any(one.at + one.length > other.at for one, other in pairwise(pieces.spans))
    over = over or sum(span.nbytes for span in pieces.spans) > made.nbytes
    if over or bool(pieces.spans) != (made.holds is not None):
        raise ValueError("these bytes of the base's tensors")
    if made.is_copy:
        name = pieces.tensors[0]
        if pieces != Pieces.whole(name, made.nbytes) or base[name].shape != made.shape:
            raise ValueError(f"a copy of the base's {printable(name)}")


def checked(model: type[EntryT], data: object, what: str, *, file: str, reads: int = 1) -> EntryT:
    """Return the JSON data of a file that surgeon writes as a `model`; its format number must be `reads`.

    Raises BadInput for another version of the format, and otherwise names the first fault.
    """
    version = data.get(f"surgeon_{what}") if isinstance(data, dict) else None
    if version not in (reads, None):
        raise BadInput(
            f"{printable(file)}: {what} format {printable(repr(version))}, this surgeon reads {reads}; use the version"
            " that wrote it, or make it again with this one, by the same plan from the same base"
        )
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = printable(".".join(str(step) for step in problem["loc"]) or "the file")
        raise BadInput(f"{printable(file)}: not a surgeon {what}: {where}: {printable(problem['msg'])}") from None


def manifest_of(folder: CheckpointFolder) -> Manifest:
    """Return the manifest of an output of surgeon. Raises BadInput for any other checkpoint."""
    if folder.manifest is None:
        raise BadInput(
            f"{printable(str(folder.path))}: no {MANIFEST_FILE}, so this is not an output of surgeon (or it was"
            " saved again by another tool, which leaves that file out)"
        )
    return parse(folder.manifest, file=str(folder.path / MANIFEST_FILE))


def written_manifest(out: Path) -> Manifest:
    """Return the manifest of an output that surgeon has just written (or found complete)."""
    file = out / MANIFEST_FILE
    return parse(json.loads(file.read_bytes()), file=str(file))
