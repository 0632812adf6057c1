"""What is settled before a training run loads anything: its numbers, what it trains, that its texts are there.

All of it comes from headers, the manifest and the config, without torch, so that a mistake is reported at once.
"""

from __future__ import annotations

import dataclasses
import filecmp
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from surgeon.anatomy.anatomy import Anatomy
from surgeon.anatomy.dissect import dissect_folder
from surgeon.anatomy.grafted_config import native_config
from surgeon.anatomy.heads import head_of
from surgeon.anatomy.limits import context_of
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.header import QUANTISED_DTYPES
from surgeon.checkpoint.labels import is_classifier, label_names
from surgeon.checkpoint.staging import check_destination
from surgeon.common import devices
from surgeon.common.schema import ORIGINAL
from surgeon.data.sources import check_source, is_chat
from surgeon.errors import BadInput, Mistakes, bad_input, printable
from surgeon.manifest.lineage import Lineage
from surgeon.manifest.manifest import MANIFEST_FILE, Manifest
from surgeon.manifest.trainable import TrainableSet, trainable_set
from surgeon.manifest.within import Within, base_within
from surgeon.models.templates import no_template, template_of
from surgeon.training.backends import missing_for_attention, missing_for_tracker
from surgeon.training.config.loading import LoadedConfig
from surgeon.training.config.schema import originals_of
from surgeon.training.config.settings import Settings, settle
from surgeon.training.processes.launching import Sharding, requested_sharding
from surgeon.training.trainable.lora_targets import lora_set

_T = TypeVar("_T")


@dataclass(frozen=True)
class Prepared:
    """A run that can begin: its numbers, notes about them, what trains, the model's parts, and how to shard it.

    `within` is the base that teaches; None where none does. `settled_for` gives the numbers, and notes, once the steps
    of the config's `epochs` or `bytes` are counted; None where the config says how many. `headless`: texts with labels
    train an encoder that has no classification head, so `wanted` is without it (`new_head.headed`).
    """

    settings: Settings
    notes: list[str]
    wanted: TrainableSet
    anatomy: Anatomy
    sharding: Sharding | None
    within: Within | None = None
    settled_for: Callable[..., tuple[Settings, list[str]]] | None = None
    headless: bool = False


def prepare(
    out: CheckpointFolder, manifest: Manifest | None, loaded: LoadedConfig, target: Path, *, device: str, processes: int
) -> Prepared:
    """Settle a run of `out` by the config.

    Args:
        out: the output to train.
        manifest: its manifest; None where there was no surgery.
        loaded: the training config.
        target: where the run will be published.
        device: `auto`, or a device.
        processes: how many take part.

    Raises:
        BadInput: everything that is wrong, a line each.
    """
    if device.startswith("cuda:"):
        raise BadInput(f"--device {printable(device)}: training takes auto, cpu or cuda; CUDA_VISIBLE_DEVICES chooses")
    wrong: list[str] = []
    _tried(lambda: devices.check(device), wrong)
    _tried(lambda: check_destination(target, out.path), wrong)
    sharding = _tried(lambda: requested_sharding(loaded.config), wrong)
    _tried(lambda: _check_template(out, loaded), wrong)
    wrong += _not_installed(loaded)
    for number, source in enumerate(loaded.config.sources):
        wrong += [f"{loaded.where('sources', number, key)}{why}" for key, why in check_source(source, loaded)]
    if wrong:
        # To take the model apart needs torch, which takes ten times as long to be imported.
        raise bad_input(wrong)
    anatomy = dissect_folder(out)
    wanted = _tried(lambda: _wanted(out, manifest, loaded, anatomy), wrong)
    settled_for, settled, within, notes = None, None, None, []
    if wanted is not None:
        operations = wanted.operations
        _tried(lambda: _check_task(out, anatomy, loaded), wrong)
        _tried(lambda: _check_trainable(out, wanted, loaded.config.dtype), wrong)
        _tried(lambda: _check_fixed(wanted, sharding if processes > 1 else None), wrong)
        context = context_of(out.config)
        settled_for = functools.partial(settle, loaded, operations, context=context, processes=processes)
        settled = _tried(settled_for, wrong)
        if wanted.fitted:
            _tried(lambda: _check_fitted(loaded), wrong)
        within = _tried(lambda: _teacher(out, manifest, loaded, wanted, anatomy), wrong)
        notes = [*trained_too(loaded), *_about_what(manifest, loaded, wanted)]
        if within is not None and within.last and loaded.config.preserve and loaded.config.preserve.last is None:
            notes.append(f"`preserve`: the first base is not in the model any more, so {within.shown} teaches")
    if wrong or wanted is None or settled is None or settled_for is None:
        raise bad_input(wrong)
    settings, about_settings = settled
    headless = loaded.config.classifies and not is_classifier(out.config)
    if not loaded.config.counts_text:
        return Prepared(settings, [*notes, *about_settings], wanted, anatomy, sharding, within, headless=headless)
    return Prepared(settings, notes, wanted, anatomy, sharding, within, settled_for, headless)


def check_base_trains(out: CheckpointFolder, manifest: Manifest | None, loaded: LoadedConfig) -> None:
    """Raise BadInput where `prepare` would refuse what the config has train, or its teacher, whatever the texts."""
    anatomy = dissect_folder(out)
    wanted = _wanted(out, manifest, loaded, anatomy)
    _check_trainable(out, wanted, loaded.config.dtype)
    _teacher(out, manifest, loaded, wanted, anatomy)


def _wanted(out: CheckpointFolder, manifest: Manifest | None, loaded: LoadedConfig, anatomy: Anatomy) -> TrainableSet:
    """Return the tensors that the config lets train."""
    config = loaded.config
    if config.lora is not None:
        return with_head(lora_set(out, manifest, loaded, anatomy), out, manifest, loaded, anatomy)
    if config.what is None and manifest is None:
        raise BadInput(
            f"{loaded.where()}`what` is not given, and {printable(str(out.path))} has no surgery (no {MANIFEST_FILE})"
            " whose tensors would train; say `what: all`, `what: {layers: …}` or `lora: {rank: 16}`"
            + (", or `what: head` for the classification head alone" if config.classifies else "")
        )
    if config.what == "head":
        return with_head(TrainableSet((), ()), out, manifest, loaded, anatomy)
    try:
        found = trainable_set(out, manifest, "last" if config.what is None else config.what, anatomy)
    except BadInput as error:
        raise error if config.what is None else BadInput(f"{loaded.where('what')}`what`: {error}") from None
    return with_head(found, out, manifest, loaded, anatomy)


def with_head(
    wanted: TrainableSet, out: CheckpointFolder, manifest: Manifest | None, loaded: LoadedConfig, anatomy: Anatomy
) -> TrainableSet:
    """Add the classification head of `out`, where texts with labels train it and it has one.

    A part of another head (for masked words) that the model does not run is left out.

    Args:
        wanted: what trains without it.
        out: the output to train.
        manifest: its manifest; None where there was no surgery.
        loaded: the training config.
        anatomy: the output's parts.

    Raises:
        BadInput: transformers cannot build the model.
    """
    if not (loaded.config.classifies and anatomy.family.encoder and is_classifier(out.config)):
        return wanted
    head = head_of(native_config(out.config), out.tensors)
    idle = head.idle(anatomy.outer)
    more = head.births.keys() & out.tensors.keys()
    names = tuple(name for name in out.tensors if name in more or (name in wanted.names and name not in idle))
    of_base = {*trainable_set(out, manifest, "base", anatomy).names} & more
    title = f"{wanted.shown} and the classification head" if wanted.names else "the classification head"
    return dataclasses.replace(
        wanted,
        names=names,
        of_base=frozenset((wanted.of_base - idle) | of_base),
        title=wanted.title if more <= {*wanted.names} else title,
        beside=tuple(name for name in names if name in more) if loaded.config.lora is not None else (),
    )


def prepared_with_head(prepared: Prepared, out: CheckpointFolder, manifest: Manifest, loaded: LoadedConfig) -> Prepared:
    """Settle the run again for `out`, which now has a new classification head; what trained then trains with it.

    Args:
        prepared: the run without the head.
        out: the encoder with the head.
        manifest: its manifest.
        loaded: the training config.

    Raises:
        BadInput: as `prepare`.
    """
    anatomy = dissect_folder(out)
    wanted = with_head(prepared.wanted, out, manifest, loaded, anatomy)
    return dataclasses.replace(prepared, wanted=wanted, anatomy=anatomy, headless=False)


def _about_what(manifest: Manifest | None, loaded: LoadedConfig, wanted: TrainableSet) -> list[str]:
    """Return notes on what trains."""
    config = loaded.config
    notes = []
    if config.what == "all" and manifest is not None and manifest.operations:
        notes.append("`what: all` is every tensor, the base's own too; `added` are those that surgeries added")
    if wanted.of_base and not config.keep_base:
        notes.append(
            f"{len(wanted.of_base)} tensors of the base will change, and RUN alone cannot give them back;"
            " `keep_base: true` keeps them"
        )
    gate = None if manifest is None else _gate(manifest)
    if gate is not None and wanted.of_base:
        notes.append(
            "the base's own tensors train, so the model on original text is no longer the base,"
            " and the domain gate comes to read other states than it was fitted on"
        )
    preserve = config.preserve
    if preserve is not None and preserve.fisher and manifest is not None:
        before = {name for entry in manifest.training for name in entry.tensors}
        if before & {*wanted.names}:
            notes.append(
                "`preserve`: fisher pulls what trained before back to its values as this run begins, not to those at"
                " birth"
            )
    on_original = preserve is not None and preserve.taught is not None and preserve.on == "original"
    if on_original and not sum(source.share for source in originals_of(config)):
        notes.append(
            "`preserve` teaches nothing here: the share of original text is 0, so the run draws none of it; give a"
            " source of it a share, or say `on: all`"
        )
    elif on_original and _all_gated(manifest, wanted):
        notes.append(
            "`preserve` teaches nothing here: on original text the domain gate is closed and the model is the base, so"
            " the term is 0 and costs its forwards; leave it out"
        )
    return notes


def _all_gated(manifest: Manifest | None, wanted: TrainableSet) -> bool:
    """Whether a domain gate switches all that trains: everything before it in the plan but new tokens."""
    if manifest is None or (gate := _gate(manifest)) is None or wanted.fixed:
        return False
    new = manifest.new_tensors
    return all(name in new and new[name].operation < gate for name in wanted.names)


def _gate(manifest: Manifest) -> int | None:
    """The number of the operation of the last surgery that is fitted."""
    return next((number for number, operation in enumerate(manifest.operations) if operation.trains == "fitted"), None)


def _teacher(
    out: CheckpointFolder, manifest: Manifest | None, loaded: LoadedConfig, wanted: TrainableSet, anatomy: Anatomy
) -> Within | None:
    """The base that `preserve` asks for; BadInput where it has nothing to teach on, or is not in the model."""
    config, asked = loaded.config, loaded.config.preserve
    if asked is None:
        return None
    if (asked.on == "original" or asked.fisher) and not originals_of(config):
        needs, or_all = ("is estimated", "") if asked.fisher else ("teaches", ", or say `on: all`")
        raise BadInput(
            f"{loaded.where('preserve')}`preserve` {needs} on original text, and no source has the role `original`; add"
            f" one (`surgeon recall` has the base write it){or_all}"
        )
    if asked.taught is None:
        return None
    try:
        if manifest is None:
            apart = config.lora is None and bool(wanted.of_base)
            within = Within(anatomy.sizes.layers, (), None, newborn=True, apart=apart)
        else:
            within = _within(out, manifest, loaded, wanted)
    except BadInput as error:
        raise BadInput(f"{loaded.where('preserve')}`preserve`: {error}, or leave `preserve` out") from error
    if within.rows is not None and asked.taught == "reverse_kl":
        raise BadInput(
            f"{loaded.where('preserve', 'loss')}`preserve.loss` is reverse_kl, which is infinite where the vocabulary"
            " grew: the base gives new tokens no probability; use kl"
        )
    vocabulary = within.rows or anatomy.sizes.vocabulary
    if (asked.cached or 0) > vocabulary:
        raise BadInput(
            f"{loaded.where('preserve', 'teacher', 'cached')}`preserve.teacher.cached` is {asked.cached}, and the base"
            f" has {vocabulary} tokens; use {vocabulary} at most"
        )
    return within


def _within(out: CheckpointFolder, manifest: Manifest, loaded: LoadedConfig, wanted: TrainableSet) -> Within:
    """Return the first base; or the base of the last surgery, where the config says so or the first one is lost."""
    config, asked = loaded.config, loaded.config.preserve
    assert asked is not None
    # Under a LoRA nothing is changed before it is merged; of what trains in part the base's rows are fixed.
    changing = frozenset() if config.lora is not None else frozenset({*wanted.names} - {*wanted.fixed})
    if not asked.last:
        try:
            return base_within(out, manifest, training=changing & wanted.of_base)
        except BadInput as error:
            if asked.last is False:
                raise BadInput(
                    f"{error}; or say `teacher: {{surgery: last}}`, the model as it stood when the last surgery began"
                ) from error
            if Lineage.of(manifest).count == 1 and manifest.operations:
                raise
    if not manifest.operations:
        # Training alone made it of its base.
        shown = "the model as it stands, which no surgery made,"
        return Within(len(manifest.layers), (), None, newborn=True, apart=bool(changing), last=True, shown=shown)
    return base_within(out, manifest, training=changing, last=True)


def _check_fitted(loaded: LoadedConfig) -> None:
    """BadInput where the config has no text of a domain, or holds none of it out."""
    wrong = []
    sources = loaded.config.sources
    for role, original in (("original", True), ("new", False)):
        held = [number for number, source in enumerate(sources) if (source.role == ORIGINAL) is original]
        if not held:
            wrong.append(
                f"{loaded.where('sources')}the plan's domain gate is fitted on text of both domains, and no source has"
                f" the role `{role}`; add one (`share: 0` fits the gate without training on it)"
            )
        elif not any(sources[number].validation for number in held):
            wrong.append(
                f"{loaded.where('sources', held[0], 'validation')}source {sources[held[0]].name}: `validation` is 0,"
                " and the domain gate's threshold is chosen on held-out text; hold some out"
            )
    if wrong:
        raise bad_input(wrong)


def trained_too(loaded: LoadedConfig) -> Iterator[str]:
    """Say of which sources the held-out text is one that trains, by its path or by its content."""
    for source in loaded.config.sources:
        apart = isinstance(source.validation, str)
        aside = loaded.resolve(str(source.validation) if apart else source.path)
        for other in loaded.config.sources if source.validation and source.path else ():
            text = loaded.resolve(other.path)
            if other.share and other.path and (apart or other is not source) and _are_same(aside, text):
                yield (
                    f"source {source.name}: its held-out text is one that source {other.name} trains on"
                    f" ({printable(str(text))}), so losses on it say nothing of new text; hold other text out"
                    " (`validation`)"
                )


def _are_same(one: Path, other: Path) -> bool:
    if one.is_file() and other.is_file():
        return filecmp.cmp(one, other, shallow=False)
    return one.is_dir() and other.is_dir() and one.samefile(other)


def _check_fixed(wanted: TrainableSet, sharding: Sharding | None) -> None:
    """BadInput where tensors that train in part would be sharded."""
    if sharding is not None and wanted.fixed:
        raise BadInput(
            f"{printable(min(wanted.fixed))}: a part of it trains, which is not done with sharded weights; leave"
            " `sharding` out, or name operations in `what` that add tensors of their own"
        )


def _check_template(out: CheckpointFolder, loaded: LoadedConfig) -> None:
    """BadInput for chats that nothing says how to write, and for a template beside the checkpoint's own."""
    named, own = loaded.template, template_of(out)
    if named is not None and own not in (None, named):
        raise BadInput(
            f"{loaded.where('chat_template')}`chat_template` is for a base without one, and"
            f" {printable(str(out.path))} has its own; leave it out"
        )
    chats = [number for number, source in enumerate(loaded.config.sources) if is_chat(source, loaded)]
    if chats and named is None and own is None:
        raise BadInput(f"{loaded.where('sources', chats[0], 'kind')}{no_template(out.path)}")


def _not_installed(loaded: LoadedConfig) -> list[str]:
    """A line for each package that the config asks for and that is not there."""
    found: dict[tuple[str | int, ...], str] = {("attention",): missing_for_attention(loaded.config.attention)}
    found |= {("report_to", number): missing_for_tracker(name) for number, name in enumerate(loaded.config.report_to)}
    return [f"{loaded.where(*place)}{sentence}" for place, sentence in found.items() if sentence]


def _tried(check: Callable[[], _T], wrong: list[str]) -> _T | None:
    """Return what the check returns; a problem that it raises goes to the list instead."""
    try:
        return check()
    except Mistakes as error:
        wrong += error.lines
    except BadInput as error:
        wrong.append(str(error))
    return None


def _check_task(out: CheckpointFolder, anatomy: Anatomy, loaded: LoadedConfig) -> None:
    """BadInput where the model does not do what the config's sources ask for: next tokens, or labels of texts."""
    shown, model_type = printable(str(out.path)), anatomy.family.model_type
    if not loaded.config.classifies:
        if anatomy.family.encoder:
            raise BadInput(
                f"{shown}: an encoder ({model_type}), which predicts no next token; train it on labelled texts (`kind:"
                " labels`), or on your task with transformers' Trainer after `model.freeze_base()`"
            )
        return
    where = loaded.where("sources", 0, "kind")
    if not anatomy.family.encoder:
        raise BadInput(
            f"{where}`kind: labels` trains the classification head of an encoder, and {shown} is a decoder"
            f" ({model_type}); have it write the labels: `kind: chat` with the label as the assistant's answer"
        )
    if not is_classifier(out.config):
        # `new_head.headed` makes one.
        return
    labels, asked = label_names(out.config), loaded.config.labels
    if len(labels) < 2:
        raise BadInput(
            f"{shown}: config.json: `id2label` names {len(labels)} labels, and a text is to get one of two at least;"
            " take a base without the head, and training makes one for your labels"
        )
    if asked is not None and asked not in (list(labels), len(labels)):
        raise BadInput(
            f"{loaded.where('labels')}`labels` is for an encoder without a classification head, and {shown} has one for"
            f" {printable(', '.join(labels), 300)}; leave it out, or take a base without the head"
        )


def _check_trainable(out: CheckpointFolder, wanted: TrainableSet, dtype: str) -> None:
    """BadInput for what is quantised, and for float16 that would be trained as it is."""
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
