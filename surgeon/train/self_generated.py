"""Sources with `generate`: the text that a model writes for its own training, before the first step.

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

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.common import devices
from surgeon.common.disk_space import writing
from surgeon.common.distributed import Ranks, waiting
from surgeon.common.listener import Listener
from surgeon.common.schema import BEGIN, TEMPLATE
from surgeon.common.work_folders import WorkFolder
from surgeon.data.documents import Corpus, Repeated
from surgeon.data.recall import recalled, sampled
from surgeon.data.specs import GenerateSpec, SourceSpec
from surgeon.train.config.loading import LoadedConfig
from surgeon.train.training_data import written_source


def memory_folder(target: Path) -> Path:
    """Return the folder of texts that the model writes for training, until the run is published: `.NAME.memory`."""
    return target.with_name(f".{target.name}.memory")


def write_sources(
    out: CheckpointFolder, loaded: LoadedConfig, target: Path, *, device: str, listener: Listener, take_over: bool
) -> None:
    """Have `out` write the texts of sources with `generate` that are not there yet.

    The first of several processes does it, and its error is raised in all.

    Args:
        out: the model.
        loaded: the training config.
        target: where the run will be published.
        device: where the model runs.
        listener: receives progress.
        take_over: take texts that came from elsewhere.

    Raises:
        BadInput: as `recall`.
    """
    generated = list(_generated_sources(loaded))
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


def _generated_sources(loaded: LoadedConfig) -> Iterator[tuple[SourceSpec, GenerateSpec]]:
    """Yield the sources that the model writes, with their settings."""
    for source in loaded.config.sources:
        if source.generate is not None:
            prompts = source.prompts
            if prompts not in (BEGIN, TEMPLATE):
                prompts = str(loaded.resolve(prompts))
            yield source, source.generate.model_copy(update={"prompts": prompts})


def _write(
    sources: list[tuple[SourceSpec, GenerateSpec]],
    out: CheckpointFolder,
    loaded: LoadedConfig,
    target: Path,
    device: str,
    listener: Listener,
    take_over: bool,
) -> None:
    folder = memory_folder(target)
    for source, spec in sources:
        listener.say(f"source {source.name}: the model writes {spec.tokens:,} tokens")
        with writing(folder), WorkFolder(folder, target=target):
            # It is ours, and nothing in it is a link.
            pass
        recalled(
            out,
            spec,
            written_source(folder, source),
            shown=str(out.path),
            seed=loaded.config.seed,
            dtype=loaded.config.dtype,
            device=device,
            listener=listener,
            once=True,
            take_over=take_over,
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
    device: str,
    say: Callable[[str], None],
) -> Imagined:
    """Estimate what `write_sources` would write, from one batch of documents of each source.

    Nothing is written to disk. A text that a run has written already is not imagined.

    Args:
        out: the model.
        loaded: the training config.
        target: where the run would be published.
        device: where the model runs.
        say: takes a line for the user.

    Raises:
        BadInput: as `recall`.
    """
    texts: dict[str, Corpus] = {}
    notes: list[str] = []
    seconds = 0.0
    for source, spec in _generated_sources(loaded):
        if written_source(memory_folder(target), source).is_file():
            continue
        say(f"source {source.name}: the model writes a batch of documents, to see what and how fast")
        sample = sampled(out, spec, seed=loaded.config.seed, dtype=loaded.config.dtype, device=device, say=say)
        count = max(1, round(spec.tokens * len(sample.documents) / sample.tokens))
        takes = sample.seconds * spec.tokens / sample.tokens
        seconds += takes
        texts[source.name] = Repeated(sample.documents, count, shown=f"source {source.name}")
        notes.append(
            f"source {source.name}: not written yet; its {spec.tokens:,} tokens would take about"
            f" {datetime.timedelta(seconds=round(takes))}, by one batch of {sample.written} documents, of which"
            f" {len(sample.documents)} were kept and stand for all"
        )
    return Imagined(texts, seconds, notes)
