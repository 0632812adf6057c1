"""`what: draft_head`: a head that drafts for a base without MTP layers, drawn by a seed, in a folder of its own.

It trains as MTP layers do (`drafting.py`), and RUN holds it alone: no tensor of the base. EAGLE-3 (section 3) trains on
the text's next tokens, unrolled by as many steps as are drafted, and without EAGLE's regression of hidden states. Here
it is unrolled likewise; the loss is KL(model ‖ draft), and keys of an unrolled step are those of the same step at all
places, where in decoding the places before have keys of the first step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from surgeon.apply.job import Job, copied
from surgeon.apply.linked_shards import bytes_to_move
from surgeon.apply.readback import ReadBack
from surgeon.apply.write import execute
from surgeon.blueprint.shards import Shard
from surgeon.checkpoint.folder import CONFIG_FILE
from surgeon.checkpoint.piece_bytes import places_of
from surgeon.checkpoint.source import LocalSource
from surgeon.checkpoint.staging import check_space
from surgeon.checkpoint.weights import SINGLE_FILE
from surgeon.common.listener import Stopwatch
from surgeon.errors import BadInput, printable
from surgeon.manifest.draft_folder import DRAFT_FILE, DraftRecord, base_of
from surgeon.manifest.manifest import StoredTensor
from surgeon.models.draft_shape import EMBEDDINGS, DraftShape
from surgeon.models.load import stored_dtype
from surgeon.train.publishing import FINAL_FILE, Change, Trained

if TYPE_CHECKING:
    from surgeon.train.opening import Run

# What `Drafting` calls the module.
_PREFIX = "mtp."


def new_draft_head(run: Run, model: Any) -> Any:
    """Return a head of a loaded model, as it is before training."""
    from surgeon.models.draft_head import DraftHead

    head = DraftHead(DraftShape.of(run.out, run.anatomy), model)
    head.initialise(run.loaded.config.seed)
    return head


def publish_draft(
    trained: Trained,
    run: Run,
    file: Path,
    target: Path,
    *,
    digests: Mapping[str, str],
    entry: Mapping[str, Any],
) -> Trained:
    """Write the head to `target`, and add what changed to `trained`: its tensors, counted from zero.

    Args:
        trained: the run.
        run: as it was opened.
        file: the checkpoint's file of trained values.
        target: the new folder.
        digests: those of all tensors of the base.
        entry: what the record says of the run.

    Raises:
        BadInput: a trained value is not finite.
    """
    shape = DraftShape.of(run.out, run.anatomy)
    dtype = stored_dtype(run.out.tensors[EMBEDDINGS].dtype)
    tensors = {name.removeprefix(_PREFIX): value.to(dtype) for name, value in load_file(file).items()}
    assert tensors.keys() == shape.tensors.keys()
    for name, value in tensors.items():
        if not bool(torch.isfinite(value).all()):
            raise BadInput(
                f"{printable(name)}: holds NaN or infinity after the last step, and nothing is published of it; lower"
                " `optimizer.lr` or look at the data"
            )
    (run.work / FINAL_FILE).unlink(missing_ok=True)
    save_file({name: tensors[name].contiguous() for name in shape.tensors}, run.work / FINAL_FILE)
    job = _job(run, shape, str(dtype).removeprefix("torch."), digests, entry)
    check_space(target, bytes_to_move(job, target), fingerprint=job.fingerprint)
    execute(job, target, run.listener, Stopwatch())
    changes = {name: Change(float(value.abs().max()), None) for name, value in tensors.items()}
    return replace(trained, changes=changes)


def _job(run: Run, shape: DraftShape, dtype: str, digests: Mapping[str, str], entry: Mapping[str, Any]) -> Job:
    made = LocalSource(run.work)
    infos = {info.name: info for info in made.headers([FINAL_FILE])[FINAL_FILE].tensors}
    base = base_of(run.out, run.manifest, digests)

    def finish(proof: ReadBack) -> Mapping[str, bytes]:
        stored = {name: StoredTensor.of(infos[name], proof.digests[name]) for name in shape.tensors}
        return {DRAFT_FILE: DraftRecord.made(base, stored, entry).to_bytes()}

    return Job(
        shards=(Shard(SINGLE_FILE, tuple(copied(name, info) for name, info in infos.items()), None),),
        sources={"": made},
        places=places_of(infos),
        files={CONFIG_FILE: shape.config(base.id, run.out.config.get("architectures"), dtype)},
        finish=finish,
        identity={
            "draft": hashlib.sha256((run.work / FINAL_FILE).read_bytes()).hexdigest(),
            "entry": dict(entry),
            "base": base.model_dump(),
        },
    )
