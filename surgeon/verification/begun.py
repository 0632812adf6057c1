"""Verification of a trained output against the model that one of its trainings began with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from surgeon.checkpoint.folder import CONFIG_FILE, MANIFEST_FILE, CheckpointFolder, digests_of
from surgeon.common.check import Check
from surgeon.common.json_results import same_json
from surgeon.manifest.manifest import Manifest, StoredTensor
from surgeon.manifest.moves import recorded_tensors
from surgeon.verification.claims import check_beside, digests_beside
from surgeon.verification.static import check_beside_training


def check_begun(
    began: Manifest,
    manifest: Manifest,
    base: CheckpointFolder,
    out: CheckpointFolder,
    *,
    advance: Callable[[int], None],
) -> list[Check]:
    """Check a trained output against the model `base`, which has the manifest `began`.

    Both must be as their manifests record them, and equal but for what was trained since. `advance` receives the
    count of bytes read (base and output together).
    """
    before, now = digests_of(base, base.tensors, advance), digests_of(out, out.tensors, advance)
    trained = {name for run in manifest.training[len(began.training) :] for name in run.tensors}
    moved = [name for name, digest in now.items() if name not in trained and before.get(name) != digest]
    found = digests_beside(out, manifest.files)
    files = [name for name, digest in manifest.files.items() if found.get(name) != digest]
    files += [] if same_json(base.config, out.config) else [CONFIG_FILE]
    kept = f"{len(now) - len(trained)} byte-identical; {len(trained)} trained"
    return [
        Check.of(
            "base",
            _edited(began, base, before),
            f"not as its {MANIFEST_FILE} says; differing",
            f"the model that training began with, by {len(before)} digests of tensors",
        ),
        Check.of("files", sorted(files), "not as training left them", f"{len(found)} beside the weights, by digest"),
        check_beside(out),
        Check.of("tensors since then", moved, "not byte-identical to the base's", kept),
        Check.of("as left", _edited(manifest, out, now), "not as training left them", f"all {len(now)} tensors"),
        *check_beside_training(manifest, out),
    ]


def _edited(manifest: Manifest, folder: CheckpointFolder, digests: Mapping[str, str]) -> list[str]:
    """Return the tensors of a folder that differ from its manifest, given the digests of those that are there."""
    left = recorded_tensors(manifest, file=str(folder.path / MANIFEST_FILE))
    now = {name: StoredTensor.of(folder.tensors[name], digest) for name, digest in digests.items()}
    return [name for name in {**left, **now} if left.get(name) != now.get(name)]
