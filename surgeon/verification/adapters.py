"""A check of a merged adapter against PEFT: the output's logits are compared with those of base plus adapter."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from surgeon.anatomy.anatomy import Anatomy
from surgeon.anatomy.limits import vocabulary_of
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.common.check import Check
from surgeon.common.installation import lacking
from surgeon.errors import BadInput
from surgeon.manifest.facts import facts_of
from surgeon.manifest.manifest import MANIFEST_FILE, Manifest
from surgeon.plan.plan import recorded_plan

if TYPE_CHECKING:
    from torch import Tensor

    from surgeon.models.compare import LogitComparison

# The share of an adapter's effect (KL in nats) that a merge may lose; the loss by rounding stays below it.
MAY_LOSE = 0.1
_MODE = "base + adapter, by PEFT"


def with_adapters(
    names: Sequence[str], manifest: Manifest, out: CheckpointFolder, anatomy: Anatomy
) -> Callable[[Any], Any]:
    """Return a function that adds to the loaded base the adapters (folders, in order) that a surgery merged.

    Raises BadInput where the surgery did something else, the folders contain other adapters, or PEFT is not installed.
    """
    if importlib.util.find_spec("peft") is None:
        raise BadInput(lacking("`--adapter`", "PEFT", "peft"))
    file = str(out.path / MANIFEST_FILE)
    plan = recorded_plan(manifest.plan, source=f"{file} (plan)").plan
    if len(plan.operations) == 1 and not manifest.training:
        try:
            found = plan.operations[0].with_adapters(facts_of(manifest, plan, file=file).get(0), names, anatomy)
        except BadInput as error:
            raise BadInput(f"{out.source.shown}: {error}") from error
        if found is not None:
            return found
    raise BadInput(
        f"{out.source.shown}: `--adapter` is for outputs of `merge_adapter` alone, without training; leave it out"
    )


def compare_with_peft(
    base: CheckpointFolder,
    out: CheckpointFolder,
    adapted: Callable[[Any], Any],
    ids: Tensor,
    *,
    device: str,
) -> tuple[Check, LogitComparison]:
    """Check that the output computes what base plus adapters compute in float32; return (check, comparison).

    Weights are used as stored, so the difference is the loss by their rounding. The check holds where the values differ
    by rounding only, or the KL divergence is at most `MAY_LOSE` of the base's own KL divergence from base plus
    adapters.
    """
    from surgeon.models.compare import compare_models
    from surgeon.models.load import load_model

    def loaded(folder: CheckpointFolder) -> Any:
        """Load a model in float32, with as many embedding rows as the output has."""
        model = load_model(folder, dtype="float32", device=device)
        # An adapter may have its own embedding rows, for which PEFT needs room.
        model.resize_token_embeddings(vocabulary_of(out.config), mean_resizing=False)
        return model

    whole = adapted(loaded(base))
    found, before = (
        compare_models(whole, loaded(each), ids, device=device, decode_tokens=0)[0] for each in (out, base)
    )
    holds = found.rounded or found.kl <= MAY_LOSE * before.kl
    detail = f"KL to base and adapter {found.kl:.3g} nats, where the base has {before.kl:.3g}"
    if not holds:
        detail += f": more than {MAY_LOSE:.0%} of what the adapter changes is missing"
    return Check("adapter", holds, detail), replace(found, mode=_MODE)
