"""Sources with `generate`: the text that a model writes for its own training, before the first step.

A domain gate is fitted on such a text too, where no original source is one: what the base writes is of the kinds that
it knows, of which a user may have shown one. It is no source: nothing trains on it, and no loss is measured.

Of several processes the first writes it while the others wait. A dry run has a batch of documents written, in memory,
and takes them for all.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import accelerate
import transformers

from surgeon.anatomy.limits import context_of
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.common import devices
from surgeon.common.disk_space import writing
from surgeon.common.distributed import Ranks, waiting
from surgeon.common.listener import Listener
from surgeon.common.schema import BEGIN, TEMPLATE
from surgeon.common.work_folders import WorkFolder, work_folder
from surgeon.data.documents import Corpus, Repeated
from surgeon.data.recall import recalled, sampled
from surgeon.data.recalled_text import NearlyNothing
from surgeon.data.sources import is_chat
from surgeon.data.specs import GenerateSpec
from surgeon.errors import printable
from surgeon.models.templates import template_of
from surgeon.training.config.loading import LoadedConfig
from surgeon.training.config.schema import originals_of
from surgeon.training.training_data import written_source

# The text for a gate; no source can have this name.
_FOR_GATE = "gate.recalled.jsonl"
# Its longest document in tokens: many short ones say more of what the model knows than few long ones.
_GATE_LENGTH = 256


def memory_folder(target: Path) -> Path:
    """Return the folder of texts that the model writes for training, until the run is published: `.NAME.memory`."""
    return work_folder(target, "memory")


def gate_text(target: Path) -> Path:
    """Return the file of what the model wrote for its domain gate; it is not there where nothing was asked for."""
    return memory_folder(target) / _FOR_GATE


def write_sources(
    out: CheckpointFolder,
    loaded: LoadedConfig,
    target: Path,
    *,
    gate: bool,
    device: str,
    listener: Listener,
    take_over: bool,
) -> None:
    """Have `out` write the texts of sources with `generate` that are not there yet, and the one for its gate.

    The first of several processes does it, and its error is raised in all.

    Args:
        out: the model.
        loaded: the training config.
        target: where the run will be published.
        gate: whether a domain gate will be fitted.
        device: where the model runs.
        listener: receives progress.
        take_over: take texts that came from elsewhere.

    Raises:
        BadInput: as `recall`.
    """
    generated = _wanted(out, loaded, target, gate=gate)
    ranks = Ranks.of_environment()
    if not generated:
        return
    if ranks.size == 1:
        _write(generated, out, loaded, target, device, listener, take_over)
        return
    join(devices.resolve(device))
    with waiting(ranks) as ranks:
        if not ranks.leads:
            ranks.receive()
            return
        with ranks.leading():
            _write(generated, out, loaded, target, device, listener, take_over)


def join(device: str) -> None:
    """Let the processes that torchrun started send to each other, as the trainer will have them do it; once is enough.

    `device` is "cpu" or "cuda".
    """
    seconds = transformers.TrainingArguments.ddp_timeout
    accelerate.PartialState(cpu=device == "cpu", timeout=datetime.timedelta(seconds=seconds))


@dataclass(frozen=True)
class _Text:
    """A text that the model writes: what it is called, by which settings, to which file.

    Where it is not `needed`, a model that can write none of it goes without.
    """

    name: str
    shown: str
    spec: GenerateSpec
    file: Path
    needed: bool = True


def _wanted(out: CheckpointFolder, loaded: LoadedConfig, target: Path, *, gate: bool) -> list[_Text]:
    """Return the texts of the sources that the model writes, and the one for its `gate`, where there is one to fit."""
    found = list(_generated_sources(loaded, memory_folder(target)))
    tokens = loaded.config.recall_for_gate
    if gate and tokens and not any(source.generate for source in originals_of(loaded.config)):
        length = min(_GATE_LENGTH, context_of(out.config) or _GATE_LENGTH)
        spec = GenerateSpec(tokens=max(tokens, length), length=length, prompts=gate_prompts(out, loaded))
        found.append(_Text("(recalled)", "for the domain gate", spec, gate_text(target), needed=False))
    return found


def gate_prompts(out: CheckpointFolder, loaded: LoadedConfig) -> str:
    """How documents for the gate begin: as chats where a source is one and the model has a template of its own."""
    chats = any(is_chat(source, loaded) for source in loaded.config.sources)
    return TEMPLATE if chats and template_of(out) else BEGIN


def _generated_sources(loaded: LoadedConfig, folder: Path) -> Iterator[_Text]:
    """Yield the sources that the model writes, with their settings."""
    for source in loaded.config.sources:
        if source.generate is not None:
            prompts = source.prompts
            if prompts not in (BEGIN, TEMPLATE):
                prompts = str(loaded.resolve(prompts))
            spec = source.generate.model_copy(update={"prompts": prompts})
            yield _Text(source.name, f"source {source.name}", spec, written_source(folder, source))


def _write(
    texts: list[_Text],
    out: CheckpointFolder,
    loaded: LoadedConfig,
    target: Path,
    device: str,
    listener: Listener,
    take_over: bool,
) -> None:
    folder = memory_folder(target)
    for text in texts:
        listener.say(f"{text.shown}: the model writes {text.spec.tokens:,} tokens")
        with writing(folder), WorkFolder(folder, target=target):
            # It is ours, and nothing in it is a link.
            pass
        try:
            recalled(
                out,
                text.spec,
                text.file,
                shown=str(out.path),
                seed=loaded.config.seed,
                dtype=loaded.config.dtype,
                device=device,
                listener=listener,
                once=True,
                take_over=take_over,
            )
        except NearlyNothing as error:
            if text.needed:
                raise
            listener.say(_without(error))


def _without(error: NearlyNothing) -> str:
    """Say that the gate is fitted without text of the model's own, and what that costs."""
    return (
        f"  the domain gate is fitted without what the model writes ({printable(str(error))}): kinds of text that no"
        " source has keep the base less often"
    )


@dataclass(frozen=True)
class Imagined:
    """Texts that are not written yet: by source as many documents as it will have, of those that were written to see.

    `seconds` is how long all of it takes, by the time of these; `notes` say so for each source.
    """

    texts: dict[str, Corpus]
    seconds: float
    notes: list[str]


def imagined_sources(
    out: CheckpointFolder,
    loaded: LoadedConfig,
    target: Path,
    *,
    gate: bool,
    device: str,
    say: Callable[[str], None],
) -> Imagined:
    """Estimate what `write_sources` would write, from one batch of documents of each source.

    Nothing is written to disk. A text that a run has written already is not imagined.

    Args:
        out: the model.
        loaded: the training config.
        target: where the run would be published.
        gate: whether a domain gate would be fitted.
        device: where the model runs.
        say: takes a line for the user.

    Raises:
        BadInput: as `recall`.
    """
    texts: dict[str, Corpus] = {}
    notes: list[str] = []
    seconds = 0.0
    for text in _wanted(out, loaded, target, gate=gate):
        if text.file.is_file():
            continue
        say(f"{text.shown}: the model writes a batch of documents, to see what and how fast")
        spec = text.spec
        try:
            sample = sampled(out, spec, seed=loaded.config.seed, dtype=loaded.config.dtype, device=device, say=say)
        except NearlyNothing as error:
            if text.needed:
                raise
            notes.append(_without(error).strip())
            continue
        count = max(1, round(spec.tokens * len(sample.documents) / sample.tokens))
        takes = sample.seconds * spec.tokens / sample.tokens
        seconds += takes
        texts[text.name] = Repeated(sample.documents, count, shown=text.shown)
        notes.append(
            f"{text.shown}: not written yet; its {spec.tokens:,} tokens would take about"
            f" {datetime.timedelta(seconds=round(takes))}, by one batch of {sample.written} documents, of which"
            f" {len(sample.documents)} were kept and stand for all"
        )
    return Imagined(texts, seconds, notes)
