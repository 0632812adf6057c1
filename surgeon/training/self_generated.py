"""Texts that a model writes for its own training, before the first step.

The first of several processes writes them while the others wait. In a dry run the model writes only one batch of
documents, in memory, which stands for the whole text.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import accelerate
import transformers

from surgeon.common import devices
from surgeon.common.disk_space import writing
from surgeon.common.distributed import Ranks, waiting
from surgeon.common.listener import Listener
from surgeon.common.work_folders import WorkFolder
from surgeon.data.documents import Corpus, Repeated
from surgeon.data.recall import recalled, sampled
from surgeon.data.recalled_text import NearlyNothing
from surgeon.errors import printable
from surgeon.training.places import memory_folder
from surgeon.training.run import Prepared, Text


def write_texts(prepared: Prepared, listener: Listener, *, take_over: bool) -> None:
    """Have the model write those texts of the run's remedies that do not exist yet.

    The first of several processes writes, and its error is raised in all.

    Args:
        prepared: the run.
        listener: receives progress.
        take_over: accept existing texts that came from elsewhere.

    Raises:
        BadInput: as `recall`.
    """
    if texts := _texts(prepared):
        by_the_first(prepared.device, lambda: _write(texts, prepared, listener, take_over))


def _texts(prepared: Prepared) -> list[Text]:
    """Return the texts that the run's remedies ask the model to write."""
    return [text for remedy in prepared.remedies for text in remedy.texts()]


def by_the_first(device: str, work: Callable[[], object]) -> None:
    """Do `work` in the first of torchrun's processes while the others wait; its error is raised in all of them.

    The processes communicate by the same backend as later in the trainer. `device` is the name in the call.
    """
    ranks = Ranks.of_environment()
    if ranks.size == 1:
        work()
        return
    seconds = transformers.TrainingArguments.ddp_timeout
    cpu = devices.resolve(device) == "cpu"
    accelerate.PartialState(cpu=cpu, timeout=datetime.timedelta(seconds=seconds))
    with waiting(ranks) as together:
        if together.leads:
            with together.leading():
                work()
        else:
            together.receive()


def _write(texts: Sequence[Text], prepared: Prepared, listener: Listener, take_over: bool) -> None:
    """Have the model write each text to its file.

    A text of which nearly nothing comes is reported where the run can go on without it; else NearlyNothing is raised.
    """
    config, folder = prepared.loaded.config, memory_folder(prepared.to)
    for text in texts:
        listener.say(f"{text.shown}: the model writes {text.spec.tokens:,} tokens")
        with writing(folder), WorkFolder(folder, target=prepared.to):
            # This makes the folder, or checks that it belongs to this user and has no links.
            pass
        try:
            recalled(
                prepared.out,
                text.spec,
                text.file,
                shown=str(prepared.out.path),
                seed=config.seed,
                dtype=config.dtype,
                device=prepared.device,
                listener=listener,
                once=True,
                take_over=take_over,
            )
        except NearlyNothing as error:
            if text.without is None:
                raise
            listener.say(text.without.format(printable(str(error))))


@dataclass(frozen=True)
class Imagined:
    """Stand-ins for texts that are not written yet: by source a corpus that repeats a few sampled documents.

    A corpus has about as many documents as the text will have. `seconds` estimates the time to write all texts, from
    the time of the samples; `notes` report it for each text.
    """

    texts: dict[str, Corpus]
    seconds: float
    notes: list[str]


def imagined_texts(prepared: Prepared, say: Callable[[str], None]) -> Imagined:
    """Estimate what `write_texts` would write, from one batch of documents of each text.

    Nothing is written to disk. A text that a run has written already is left out. `say` receives lines for the user.
    Raises BadInput as `recall`.
    """
    config = prepared.loaded.config
    texts: dict[str, Corpus] = {}
    notes: list[str] = []
    seconds = 0.0
    for text in _texts(prepared):
        if text.file.is_file():
            continue
        say(f"{text.shown}: the model writes a batch of documents, to see what and how fast")
        spec = text.spec
        try:
            sample = sampled(prepared.out, spec, seed=config.seed, dtype=config.dtype, device=prepared.device, say=say)
        except NearlyNothing as error:
            if text.without is None:
                raise
            notes.append(text.without.format(printable(str(error))).strip())
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
