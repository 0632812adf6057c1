"""Whether an output holds what its training runs left: in its tensors, and beside them."""

from __future__ import annotations

from collections.abc import Mapping

from surgeon.checkpoint.folder import CheckpointFolder, digests_of
from surgeon.checkpoint.peft_folder import ADAPTER_CONFIG
from surgeon.manifest.manifest import AdapterEntry, Manifest
from surgeon.manifest.run_files import ADAPTER_FOLDER, KEPT_FOLDER, adapter_beside, kept_tensors
from surgeon.verify.check import Check, some


def check_trained(manifest: Manifest, out: Mapping[str, str]) -> list[Check]:
    """Nothing for an output that was not trained; else whether it holds what its last training run left."""
    if not manifest.training:
        return []
    trained = manifest.trained
    wrong = [name for name, digest in trained.items() if out.get(name) != digest]
    idle = [name for run in manifest.training for name, tensor in run.tensors.items() if tensor.max_change == 0]
    changes = f"; {len(idle)} did not change in it: {some(idle)}" if idle else ", every one of them changed"
    steps = sum(run.steps for run in manifest.training)
    kept = f"{len(trained)} as {steps:,} steps of training left them{changes}"
    return [Check.of("trained tensors", wrong, "not as training left them", kept)]


def check_beside_training(manifest: Manifest, out: CheckpointFolder) -> list[Check]:
    """What training put beside the weights, where it did: the base's own values, and an adapter.

    A note where it is not there: it stays with the run and its delta; no other command carries it along.
    """
    checks: list[Check] = []
    if manifest.kept:
        found = kept_tensors(out)
        digests = {} if found is None else digests_of(found, found.tensors, lambda _: None)
        wrong = sorted(name for name in {**digests, **manifest.kept} if digests.get(name) != manifest.kept.get(name))
        checks.append(
            Check("kept tensors", True, f"{KEPT_FOLDER}/ is not here, so `revert` cannot give the base back", note=True)
            if found is None
            else Check.of(
                "kept tensors", wrong, "not the base's own", f"{len(digests)} of the base's in {KEPT_FOLDER}/"
            )
        )
    if manifest.adapter is not None:
        checks.append(_adapter(manifest.adapter, out))
    return checks


def _adapter(entry: AdapterEntry, out: CheckpointFolder) -> Check:
    found = adapter_beside(out)
    if found is None:
        return Check("adapter", True, f"{ADAPTER_FOLDER}/ is not here; it is merged into the weights", note=True)
    both = {**entry.tensors, **found.tensors}
    wrong = sorted(name for name in both if entry.tensors.get(name) != found.tensors.get(name))
    wrong += [ADAPTER_CONFIG] if entry.config != found.config else []
    return Check.of("adapter", wrong, "not as training left it", f"{len(found.tensors)} tensors in {ADAPTER_FOLDER}/")
