"""A check that an output contains the base's bytes where its plan puts them: every span equals its source's bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from surgeon.blueprint.blueprint import Blueprint, Output
from surgeon.checkpoint.folder import CheckpointFolder, holds_pieces
from surgeon.checkpoint.header import TensorInfo
from surgeon.checkpoint.pieces import Pieces
from surgeon.common.check import Check, some
from surgeon.manifest.manifest import Manifest
from surgeon.manifest.trainable import trainable_set


@dataclass(frozen=True)
class Original:
    """The base: its folder and the digests of its tensors."""

    folder: CheckpointFolder
    digests: Mapping[str, str]


def check_base_bytes(
    blueprint: Blueprint, manifest: Manifest, base: Original, out: CheckpointFolder, digests: Mapping[str, str]
) -> Check:
    """Check that every byte of the base that the output is to keep is there, except in tensors that were to train.

    In tensors that trained in part, the bytes that do not train with the new tensors are checked. `digests` are the
    output's.
    """
    trained, before = manifest.trained, manifest.changed_of_base
    stray = [o.name for o in blueprint.outputs if o.name in trained and (not o.new or o.kept.covered)]
    if unasked := [name for name in stray if name not in before]:
        # Runs of versions whose records had no `before` field yet.
        may = set(trainable_set(out, manifest, "added").names) if manifest.operations else set()
        if forbidden := [name for name in unasked if name not in may]:
            return Check("base tensors", False, f"trained, though no surgery lets them train: {some(forbidden)}")
    copied = {o.name: of for o in blueprint.outputs if (of := copy_of(o, base.folder.tensors)) is not None}
    if wrong := [name for name, of in copied.items() if name in before and before[name] != base.digests[of]]:
        return Check("base tensors", False, f"said to have begun training as others than the base's: {some(wrong)}")
    copies = [name for name in copied if name not in trained]
    parts = {name: pieces for name, pieces in _expected(blueprint, manifest).items() if name not in copied}
    wrong = [name for name in copies if digests[name] != base.digests[copied[name]]]
    wrong += [name for name, pieces in parts.items() if not holds_pieces(out, name, pieces, base.folder)]
    kept = sum(not output.new for output in blueprint.outputs if output.name not in trained)
    found = f"{kept} byte-identical in their places"
    if more := len(copies) - kept:
        found += f", and {'1 copy' if more == 1 else f'{more} copies'} of them"
    if parts:
        found += f"; {len(parts)} tensors hold {sum(len(pieces.spans) for pieces in parts.values())} parts of them"
    found += f"; {changed_by_training(len(stray))}" if stray else ""
    return Check.of("base tensors", wrong, "not byte-identical to their originals", found)


def _expected(blueprint: Blueprint, manifest: Manifest) -> dict[str, Pieces]:
    """Return, by output tensor, the base's bytes that it must still have; tensors without such bytes are left out."""
    trains_all = any(record.trains == "all" for record in blueprint.operations)
    free = manifest.trained.keys() if trains_all else manifest.changed_of_base.keys()
    expected = {
        o.name: o.kept if o.name in manifest.trained else o.pieces for o in blueprint.outputs if o.name not in free
    }
    return {name: pieces for name, pieces in expected.items() if pieces.spans}


def copy_of(output: Output, base: Mapping[str, TensorInfo]) -> str | None:
    """Return the base tensor of which an output is a whole copy, or None."""
    pieces = output.pieces
    return next((name for name in pieces.tensors if pieces.is_all_of(base[name])), None)


def changed_by_training(number: int) -> str:
    """Return in words how many of the base's tensors training changed."""
    return f"{number} base tensor{'s' * (number != 1)} changed by training"
