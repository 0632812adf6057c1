"""The checks of a training run before anything is loaded, which settle its numbers and the tensors that it trains.

They need only headers, the manifest and the config. The first ones run without torch, so that mistakes are reported
at once.
"""

from __future__ import annotations

import filecmp
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from surgeon.anatomy.dissect import dissect_folder
from surgeon.anatomy.limits import context_of
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.header import QUANTISED_DTYPES
from surgeon.checkpoint.staging import check_destination
from surgeon.common import devices
from surgeon.data.answers import encode_prompts
from surgeon.data.kept_answers import SHIPPED_PROMPTS, Prompts, read_prompts
from surgeon.data.sources import check_source, is_chat
from surgeon.errors import BadInput, Mistakes, bad_input, printable
from surgeon.manifest.checkpoint import Checkpoint
from surgeon.manifest.manifest import Manifest
from surgeon.models.templates import no_template, template_of
from surgeon.training.backends import missing_for_attention, missing_for_tracker
from surgeon.training.config.loading import LoadedConfig
from surgeon.training.config.settings import settle
from surgeon.training.objectives import objective_of
from surgeon.training.processes.launching import check_launcher
from surgeon.training.remedies import REMEDIES
from surgeon.training.run import Case, Prepared, Remedy
from surgeon.training.targets import target_of

_T = TypeVar("_T")


def prepare(
    out: CheckpointFolder, manifest: Manifest | None, loaded: LoadedConfig, to: Path, *, device: str, processes: int
) -> Prepared:
    """Check a run of `out` by the config, and return it with its numbers settled.

    Args:
        out: the output to train.
        manifest: its manifest; None where there was no surgery.
        loaded: the training config.
        to: where the run will be published.
        device: `auto`, or a device.
        processes: how many processes take part.

    Raises:
        BadInput: everything that is wrong, a line each.
    """
    if device.startswith("cuda:"):
        raise BadInput(f"--device {printable(device)}: training takes auto, cpu or cuda; CUDA_VISIBLE_DEVICES chooses")
    wrong: list[str] = []
    _tried(lambda: devices.check(device), wrong)
    _tried(lambda: check_destination(to, out.path), wrong)
    if processes > 1 and loaded.config.minutes is not None:
        wrong.append(f"{loaded.where('minutes')}`minutes` are measured in one process; under torchrun give `steps`")
    _tried(check_launcher, wrong)
    _tried(lambda: _check_template(out, loaded), wrong)
    wrong += _not_installed(loaded)
    prompts = _tried(lambda: _prompts(loaded), wrong)
    for number, source in enumerate(loaded.config.sources):
        wrong += [f"{loaded.where('sources', number, key)}{why}" for key, why in check_source(source, loaded)]
    if wrong:
        # Analysing the model needs torch, whose import takes ten times as long as all checks before.
        raise bad_input(wrong)
    loaded, about_dtype = _in_fast_dtype(out, loaded, device)
    case = _tried(lambda: _case(out, manifest, loaded, to, device), wrong)
    if case is None:
        raise bad_input(wrong)
    _tried(lambda: case.objective.check(case), wrong)
    _tried(lambda: _check_trainable(case), wrong)
    if prompts is not None:
        _tried(functools.partial(encode_prompts, prompts.prompts, Checkpoint(str(out.path), out)), wrong)
    sharding = processes > 1 and loaded.config.sharding == "fsdp"
    if sharding and case.wanted.fixed:
        wrong.append(
            f"{printable(min(case.wanted.fixed))}: a part of it trains, which is not done with sharded weights; leave"
            " `sharding` out, or name operations in `what` that add tensors of their own"
        )
    context = context_of(out.config)
    settled = _tried(lambda: settle(loaded, case.wanted.operations, context=context, processes=processes), wrong)
    remedies = _remedies(case, wrong)
    if wrong or settled is None:
        raise bad_input(wrong)
    settings, about_settings = settled
    notes = [
        *about_dtype,
        *trained_too(loaded),
        *case.target.notes(),
        *_about_base(case),
        *(note for each in remedies for note in each.notes()),
        *(() if loaded.config.counts_text else about_settings),
    ]
    return Prepared(
        **vars(case),
        settings=settings,
        notes=notes,
        sharding=sharding,
        remedies=remedies,
        prompts=prompts,
    )


def _in_fast_dtype(out: CheckpointFolder, loaded: LoadedConfig, device: str) -> tuple[LoadedConfig, list[str]]:
    """Return the config with the dtype that `auto` means, and a note where this is not the checkpoint's.

    It is the checkpoint's, but float32 for bfloat16 weights on a CPU that does not multiply in bfloat16.
    """
    stored = {info.dtype for info in out.tensors.values()}
    if loaded.config.dtype != "auto" or "BF16" not in stored or devices.fast_dtype(device) == "auto":
        return loaded, []
    note = "`dtype: auto` is float32 here: this CPU has no products of bfloat16, which would take several times as long"
    return replace(loaded, config=loaded.config.model_copy(update={"dtype": "float32"})), [note]


def check_training(out: Checkpoint, config: LoadedConfig) -> None:
    """Raise BadInput where `train` would reject what the config trains, or its remedies, whatever the texts are."""
    case = _case(out.folder, out.manifest, config, out.path, "cpu")
    _check_trainable(case)
    for kind in REMEDIES:
        kind.of(case)


def _case(out: CheckpointFolder, manifest: Manifest | None, loaded: LoadedConfig, to: Path, device: str) -> Case:
    """Return the case of a run. Raises BadInput where the model is not understood or the target does not fit it."""
    anatomy, objective = dissect_folder(out), objective_of(loaded.config)
    target = target_of(loaded.config)(loaded, out, manifest, anatomy, objective.auto)
    wanted = objective.trained(target, target.names())
    return Case(
        out,
        manifest,
        loaded,
        to,
        device,
        anatomy,
        objective,
        target,
        wanted,
    )


def _remedies(case: Case, wrong: list[str]) -> list[Remedy]:
    """Return the remedies that a case asks for; problems with them are added to `wrong`, each once."""
    found: list[Remedy] = []
    for kind in REMEDIES:
        lines: list[str] = []
        if (remedy := _tried(functools.partial(kind.of, case), lines)) is not None:
            _tried(remedy.check_sources, lines)
            found.append(remedy)
        wrong += [line for line in lines if line not in wrong]
    return found


def _prompts(loaded: LoadedConfig) -> Prompts | None:
    """Return the prompts that the config names. Raises BadInput where they cannot be read."""
    given = loaded.config.answers
    return None if given is None else read_prompts(given if given in SHIPPED_PROMPTS else loaded.resolve(given))


def _about_base(case: Case) -> list[str]:
    """Warn where tensors of the base will change and their old values are not kept."""
    if not case.wanted.of_base or case.loaded.config.keep_base:
        return []
    return [
        f"{len(case.wanted.of_base)} tensors of the base will change, and RUN alone cannot give them back;"
        " `keep_base: true` keeps them"
    ]


def trained_too(loaded: LoadedConfig) -> Iterator[str]:
    """Yield a warning for each source whose held-out text also trains, found by its path or its content."""
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
    """Return whether both are files of equal content, or the same folder."""
    if one.is_file() and other.is_file():
        return filecmp.cmp(one, other, shallow=False)
    return one.is_dir() and other.is_dir() and one.samefile(other)


def _check_template(out: CheckpointFolder, loaded: LoadedConfig) -> None:
    """Raise BadInput for chats without any chat template, and for a template other than the checkpoint's own."""
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
    """Return a line for each package that the config needs and that is not installed."""
    found: dict[tuple[str | int, ...], str] = {("attention",): missing_for_attention(loaded.config.attention)}
    found |= {("report_to", number): missing_for_tracker(name) for number, name in enumerate(loaded.config.report_to)}
    return [f"{loaded.where(*place)}{sentence}" for place, sentence in found.items() if sentence]


def _tried(check: Callable[[], _T], wrong: list[str]) -> _T | None:
    """Return what the check returns; where it raises BadInput, add its lines to `wrong` and return None."""
    try:
        return check()
    except Mistakes as error:
        wrong += error.lines
    except BadInput as error:
        wrong.append(str(error))
    return None


def _check_trainable(case: Case) -> None:
    """Raise BadInput where a tensor to train is quantised, or is float16 and would train in float16."""
    infos = [case.out.tensors[name] for name in case.wanted.names]
    packed = next((info for info in infos if info.dtype in QUANTISED_DTYPES), None)
    if packed is not None:
        raise BadInput(
            f"{printable(packed.name)}: stored in {packed.dtype}, whose few values cannot train; operate on the"
            " full-precision weights, train, and quantise the result"
        )
    narrow = next((info for info in infos if info.dtype == "F16"), None)
    if narrow is not None and case.loaded.config.dtype == "auto":
        raise BadInput(
            f"{printable(narrow.name)}: is float16, whose gradients under- and overflow; say `dtype: bfloat16` or"
            " `dtype: float32` (the run is saved as float16 again)"
        )
