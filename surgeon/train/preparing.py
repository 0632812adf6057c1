"""What is settled before a training run loads anything: its numbers, what it trains, that its texts are there.

All of it comes from headers, the manifest and the config, without torch, so that a mistake is reported at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.header import QUANTISED_DTYPES
from surgeon.checkpoint.staging import check_destination
from surgeon.common import devices
from surgeon.data.sources import check_there
from surgeon.data.specs import ORIGINAL
from surgeon.errors import BadInput, Mistakes, bad_input, printable
from surgeon.families.anatomy import Anatomy
from surgeon.families.dissect import dissect
from surgeon.manifest.lineage import TrainableSet, trainable_set
from surgeon.manifest.manifest import Manifest
from surgeon.manifest.within import Within, base_within
from surgeon.models.templates import TEMPLATES, no_template, template_of
from surgeon.train.config import LoadedConfig, Settings, settle
from surgeon.train.launching import Sharding, sharding_asked

_T = TypeVar("_T")


@dataclass(frozen=True)
class Prepared:
    """A run that can begin: its numbers, notes about them, what trains, the model's parts, and how to shard it.

    `within` is the base that teaches; None where none does.
    """

    settings: Settings
    notes: list[str]
    wanted: TrainableSet
    anatomy: Anatomy
    sharding: Sharding | None
    within: Within | None = None


def prepare(
    out: CheckpointFolder, manifest: Manifest, loaded: LoadedConfig, target: Path, *, device: str, processes: int
) -> Prepared:
    """Settle a run of `out` by the config. Raises BadInput with all that is wrong, a line each."""
    if device.startswith("cuda:"):
        raise BadInput(f"--device {printable(device)}: training takes auto, cpu or cuda; CUDA_VISIBLE_DEVICES chooses")
    devices.check(device)
    wrong: list[str] = []
    sharding = _tried(lambda: sharding_asked(loaded.config), wrong)
    wanted = _tried(lambda: trainable_set(out, manifest, loaded.config.what), wrong)
    anatomy = dissect(out.config, out.tensors, out.own)
    settled, within = None, None
    if wanted is not None:
        operations = wanted.operations
        _tried(lambda: _check_trainable(out, anatomy, wanted, loaded.config.dtype), wrong)
        _tried(lambda: _check_fixed(wanted, sharding if processes > 1 else None), wrong)
        context = out.config.get("max_position_embeddings")
        settled = _tried(lambda: settle(loaded, operations, context=context, processes=processes), wrong)
        within = _tried(lambda: _teacher(out, manifest, loaded, wanted), wrong)
    _tried(lambda: check_destination(target, out.path), wrong)
    _tried(lambda: _check_template(out, loaded), wrong)
    for number, source in enumerate(loaded.config.sources):
        wrong += [f"{loaded.where('sources', number, key)}{why}" for key, why in check_there(source, loaded)]
    if wrong or wanted is None or settled is None:
        raise bad_input(wrong)
    return Prepared(*settled, wanted, anatomy, sharding, within)


def _teacher(out: CheckpointFolder, manifest: Manifest, loaded: LoadedConfig, wanted: TrainableSet) -> Within | None:
    """The base that `preserve` asks for; BadInput where it has nothing to teach on, or is not in the model."""
    config, asked = loaded.config, loaded.config.preserve
    if asked is None:
        return None
    if asked.on == "original" and not any(source.share and source.role == ORIGINAL for source in config.sources):
        raise BadInput(
            f"{loaded.where('preserve')}`preserve` teaches on original text, and no source has the role `original`; add"
            " one (`surgeon recall` has the base write it), or say `on: all`"
        )
    try:
        within = base_within(out, manifest, training=set(wanted.names) - wanted.fixed.keys())
    except BadInput as error:
        raise BadInput(f"{loaded.where('preserve')}`preserve`: {error}") from error
    if within.rows is not None and asked.loss == "reverse_kl":
        raise BadInput(
            f"{loaded.where('preserve', 'loss')}`preserve.loss` is reverse_kl, which is infinite where the vocabulary"
            " grew: the base gives new tokens no probability; use kl"
        )
    return within


def _check_fixed(wanted: TrainableSet, sharding: Sharding | None) -> None:
    """BadInput where tensors that train in part would be sharded."""
    if sharding is not None and wanted.fixed:
        raise BadInput(
            f"{printable(min(wanted.fixed))}: a part of it trains, which is not done with sharded weights; leave"
            " `sharding` out, or name operations in `what` that add tensors of their own"
        )


def _check_template(out: CheckpointFolder, loaded: LoadedConfig) -> None:
    """BadInput for chats that nothing says how to write, and for a template beside the checkpoint's own."""
    named, own = loaded.config.chat_template, template_of(out)
    if named is not None and own not in (None, TEMPLATES[named]):
        raise BadInput(
            f"{loaded.where('chat_template')}`chat_template` is for a base without one, and"
            f" {printable(str(out.path))} has its own; leave it out"
        )
    chats = [number for number, source in enumerate(loaded.config.sources) if source.kind == "chat"]
    if chats and named is None and own is None:
        raise BadInput(f"{loaded.where('sources', chats[0], 'kind')}{no_template(out.path)}")


def _tried(check: Callable[[], _T], wrong: list[str]) -> _T | None:
    """What the check returns; what is wrong instead goes to the list."""
    try:
        return check()
    except Mistakes as error:
        wrong += error.lines
    except BadInput as error:
        wrong.append(str(error))
    return None


def _check_trainable(out: CheckpointFolder, anatomy: Anatomy, wanted: TrainableSet, dtype: str) -> None:
    """BadInput for an encoder, and for float16 that would be trained as it is."""
    if anatomy.family.encoder:
        raise BadInput(
            f"{printable(str(out.path))}: an encoder ({anatomy.family.model_type}); `surgeon train` trains causal"
            " language models; train it on your task with transformers' Trainer after `model.freeze_base()`"
        )
    packed = next((info for name in wanted.names if (info := out.tensors[name]).dtype in QUANTISED_DTYPES), None)
    if packed is not None:
        raise BadInput(
            f"{printable(packed.name)}: stored in {packed.dtype}, whose few values cannot train; operate on the"
            " full-precision weights, train, and quantise the result"
        )
    narrow = [name for name in wanted.names if out.tensors[name].dtype == "F16"]
    if narrow and dtype == "auto":
        raise BadInput(
            f"{printable(narrow[0])}: is float16, whose gradients under- and overflow; say `dtype: bfloat16` or"
            " `dtype: float32` (the run is saved as float16 again)"
        )
