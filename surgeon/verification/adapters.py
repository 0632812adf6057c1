"""A merged adapter against PEFT: the output's logits beside those of the base with the adapter, as PEFT runs them."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgeon.anatomy.anatomy import Anatomy
from surgeon.anatomy.limits import vocabulary_of
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.peft_folder import AdapterFolder
from surgeon.common.installation import lacking
from surgeon.errors import BadInput, printable
from surgeon.manifest.facts import facts_of
from surgeon.manifest.manifest import MANIFEST_FILE, Manifest
from surgeon.operations.adapter_changes import name_for_peft
from surgeon.operations.adapter_places import Model
from surgeon.operations.merge_adapter import MergeAdapter, MergeFacts
from surgeon.plan.plan import recorded_plan
from surgeon.verification.check import Check

if TYPE_CHECKING:
    from torch import Tensor

    from surgeon.models.compare import LogitComparison

# The share of what an adapter changes, as KL in nats, that a merge may leave out: what rounding costs stays below it.
MAY_LOSE = 0.1
_MODE = "base + adapter, by PEFT"


def opened_adapters(names: Sequence[str], manifest: Manifest, out: CheckpointFolder) -> list[AdapterFolder]:
    """The adapters that a surgery merged, in its order, from folders.

    Raises BadInput where the surgery did something else, the folders hold other adapters, or PEFT is not there.
    """
    if importlib.util.find_spec("peft") is None:
        raise BadInput(lacking("`--adapter`", "PEFT", "peft"))
    shown = out.source.shown
    file = str(out.path / MANIFEST_FILE)
    plan = recorded_plan(manifest.plan, source=f"{file} (plan)").plan
    operation = plan.operations[0] if len(plan.operations) == 1 else None
    if not isinstance(operation, MergeAdapter) or manifest.training:
        raise BadInput(f"{shown}: `--adapter` is for outputs of `merge_adapter` alone, without training; leave it out")
    if any(each.weight != 1 for each in operation.listed):
        raise BadInput(f"{shown}: merged with weights, which PEFT has no such thing for; leave `--adapter` out")
    facts = facts_of(manifest, plan, file=file)[0]
    assert isinstance(facts, MergeFacts)
    if len(names) != len(facts.adapters):
        raise BadInput(
            f"{shown}: {len(facts.adapters)} adapters were merged, and {len(names)} are given; give `--adapter` for"
            " each, in the plan's order"
        )
    found = [AdapterFolder.open(Path(name), id=Path(name).resolve().name) for name in names]
    for name, folder, known in zip(names, found, facts.adapters, strict=True):
        if folder.facts.tensors != known.facts.adapter.tensors:
            raise BadInput(
                f"{printable(name)}: not the adapter that was merged ({printable(known.facts.id)}); give that"
            )
    return found


def compare_with_peft(
    base: CheckpointFolder,
    out: CheckpointFolder,
    adapters: Sequence[str],
    ids: Tensor,
    *,
    anatomy: Anatomy,
    device: str,
) -> tuple[Check, LogitComparison]:
    """Whether the output computes what base and adapters do, in float32, and how their logits compare.

    PEFT gets what was merged by the names of the base, whose `anatomy` is given.
    Weights are the stored ones, so what differs is what their rounding left out. The measure is the base itself: how
    far it is from base and adapters.
    """
    from surgeon.models.compare import compare_models
    from surgeon.models.load import load_model

    def loaded(folder: CheckpointFolder) -> Any:
        model = load_model(folder, dtype="float32", device=device)
        # An adapter may have brought its own rows, for which PEFT wants room.
        model.resize_token_embeddings(vocabulary_of(out.config), mean_resizing=False)
        return model

    adapted = _adapted(loaded(base), adapters, Model.of(anatomy))
    found, before = (
        compare_models(adapted, loaded(each), ids, device=device, decode_tokens=0)[0] for each in (out, base)
    )
    holds = found.rounded or found.kl <= MAY_LOSE * before.kl
    detail = f"KL to base and adapter {found.kl:.3g} nats, where the base has {before.kl:.3g}"
    if not holds:
        detail += f": more than {MAY_LOSE:.0%} of what the adapter changes is missing"
    return Check("adapter", holds, detail), replace(found, mode=_MODE)


def _adapted(model: Any, adapters: Sequence[str], known: Model) -> Any:
    """The model with its adapters, all but the last one merged by PEFT."""
    from surgeon.models.load import with_adapter

    for number, name in enumerate(adapters, start=1):
        model = with_adapter(model, Path(name), lambda tensor: name_for_peft(tensor, known))
        model = model if number == len(adapters) else model.merge_and_unload()
    return model
