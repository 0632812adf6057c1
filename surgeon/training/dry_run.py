"""`surgeon train --dry-run`: the data and the cost of a run, estimated from a few micro-batches; nothing is written."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from surgeon.common.json_results import plain_fields
from surgeon.data.packing import Stream, generator
from surgeon.errors import BadInput
from surgeon.training.footprint import fitting, peak_memory, seconds_since
from surgeon.training.loading import batches_of, loaded_model, trained_numbers
from surgeon.training.losses.cross_entropy import FusedHead
from surgeon.training.run import Estimate, Run, Sample
from surgeon.training.self_generated import Imagined
from surgeon.training.steps.by_document import by_document
from surgeon.training.steps.optimizer import make_optimizer
from surgeon.training.steps.trainer import whole_loss

# How many documents of a source are counted, how many micro-batches are timed, and in how many seconds at the most.
_COUNTED = 200
_TIMED = 2
_MOST_SECONDS = 60.0


@dataclass(frozen=True)
class SourceTokens:
    """One source: its documents, their mean tokens, the share of tokens that the loss counts, and how much a run reads.

    The means are over at most 200 documents. `passes` is how often the run reads the whole source. With labels the loss
    counts the label and no token (`counted` is 0).
    """

    name: str
    share: float
    documents: int
    tokens_a_document: float
    counted: float
    run_tokens: int
    passes: float
    # With labels: how many documents to train on have each label, without labels that no document has.
    labels: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Rehearsal:
    """The result of a dry run: what the run would train, on what, and an estimate of its cost.

    `seconds_a_step` is measured on micro-batches, or on one sequence where they would take more than a minute, and on a
    step of AdamW. `seconds` is the estimate for all steps, without evaluations and checkpoints. `before` has what is
    done before the first step, such as texts that the model writes, each with its wall seconds. `peak_memory` is
    measured, in bytes.
    """

    settings: dict[str, Any]
    device: str
    parameters: int
    trained: int
    tensors: int
    sources: tuple[SourceTokens, ...]
    samples: tuple[Sample, ...]
    seconds_a_step: float
    seconds: float
    tokens: int
    peak_memory: int
    notes: tuple[str, ...]
    before: tuple[Estimate, ...]

    def __repr__(self) -> str:
        return (
            f"Rehearsal({self.trained:,} of {self.parameters:,} numbers, {self.tokens:,} tokens, about"
            f" {self.seconds:.0f} s, {self.peak_memory:,} bytes)"
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`.

        Keys:
            `settings`, `device`, `notes`: as of `train`
            `parameters`: how many numbers the model has
            `trained`, `tensors`: how many numbers train, and in how many tensors
            `sources`: each with `name`, `share`, `documents`, `tokens_a_document`, `counted` (share of tokens in the
                loss; 0 for labels), `run_tokens`, `passes`, `labels` (texts by label)
            `samples`: each with `source`, `label` (null: none) and `parts`: `text`, and `counted` if the loss counts it
            `seconds_a_step`: measured on micro-batches and a step of AdamW
            `seconds`, `tokens`: of the whole run
            `before`: what is done before the first step, each with `seconds` and `words`: writing texts (`generate`),
                recording predictions (`teacher: {cached: …}`), estimating (`loss: fisher`)
            `peak_memory`: in bytes, measured, with AdamW's state
        """
        return plain_fields(self, without=("samples", "before")) | {
            "before": [estimate._asdict() for estimate in self.before],
            "samples": [
                plain_fields(one) | {"parts": [{"text": text, "counted": counted} for text, counted in one.parts]}
                for one in self.samples
            ],
        }


def measured(run: Run, imagined: Imagined) -> Rehearsal:
    """Count the data and take samples, then time micro-batches; `imagined` are texts that the model has yet to write.

    Raises BadInput as a run does, and where a micro-batch does not fit into memory.
    """
    settings, listener = run.settings, run.listener
    mixture = run.data.mixture
    streams = list(zip(mixture.streams, mixture.shares, strict=True))
    listener.begin("counting tokens", len(streams), "sources")
    sources: list[SourceTokens] = []
    samples: list[Sample] = []
    for stream, share in streams:
        numbers = _some(stream)
        look = run.objective.look(stream, numbers)
        mean, count = look.tokens / len(numbers), len(stream.numbers)
        tokens = share * settings.steps * settings.batch * (settings.length if run.objective.packs else mean)
        passes = tokens / (mean * count) if mean else 0.0
        sources.append(SourceTokens(stream.name, share, count, mean, look.counted, round(tokens), passes, look.labels))
        samples += [look.sample] if share else []
        listener.advance(1)
    total = sum(source.run_tokens for source in sources)
    if run.objective.packs:
        total = settings.steps * run.objective.step_units(settings)
    try:
        model, training = loaded_model(run)
        model.to(run.device).train()
        run.objective.check_isolation(run, model)
        fused = run.objective.fused_head(run, model)
        for remedy in run.remedies:
            remedy.join(run, model, fused)
        run = fitting(run, model, fused)
        settings = run.settings
        with by_document():
            estimates = [remedy.rehearse(run, model, fused) for remedy in run.remedies]
            seconds = _seconds_a_micro_batch(run, model, fused) * settings.accumulation
            seconds += _seconds_of_an_update(run, model)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise BadInput(
            f"{run.loaded.source}: a micro-batch of {settings.micro_batch} sequences of {settings.length} tokens does"
            " not fit into memory; use a smaller `micro_batch` or `length`, or `checkpointing: true`"
        ) from error
    before = [Estimate(imagined.seconds, "the text that the model writes")] if imagined.seconds else []
    before += [estimate for estimate in estimates if estimate is not None]
    return Rehearsal(
        settings=settings.to_json(),
        device=run.device,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trained=trained_numbers(model, training.fixed),
        tensors=len(training.names),
        sources=tuple(sources),
        samples=tuple(samples),
        seconds_a_step=seconds,
        seconds=seconds * settings.steps,
        tokens=total,
        peak_memory=peak_memory(run.device),
        notes=(*run.out.notes, *run.notes, *imagined.notes, *run.data.notes),
        before=tuple(before),
    )


def _some(stream: Stream[Any]) -> list[int]:
    """Return the numbers of at most 200 documents of a source, drawn at random; every call returns the same ones."""
    drawn = generator(0, f"dry run of {stream.name}", 0).permutation(stream.numbers)[:_COUNTED]
    return [int(number) for number in drawn]


def _seconds_a_micro_batch(run: Run, model: Any, fused: FusedHead | None) -> float:
    """Return the wall seconds of a micro-batch's forward and backward.

    One sequence is timed first, as a warm-up. The result is the mean of two micro-batches, or the sequence's seconds
    times the sequences of a micro-batch where the two would take more than a minute.
    """
    settings, say = run.settings, run.listener.say
    one = replace(run, settings=replace(settings, micro_batch=1))
    each = _seconds_of(one, next(batches_of(one)), model, fused)
    whole = each * settings.micro_batch
    kind = f"sequence of {settings.length:,} tokens" if run.objective.packs else "text"
    say(
        f"one {kind}: {each:.2g} s on {run.device}, so a step of {settings.batch:,} takes about"
        f" {each * settings.batch:,.2g} s"
    )
    if _TIMED * whole > _MOST_SECONDS:
        return whole
    say(f"timing {_TIMED} micro-batches of {settings.micro_batch}")
    batches = batches_of(run)
    return sum(_seconds_of(run, next(batches), model, fused) for _ in range(_TIMED)) / _TIMED


def _seconds_of(run: Run, batch: Mapping[str, torch.Tensor], model: Any, fused: FusedHead | None) -> float:
    """Return the wall seconds of the forward and backward of one micro-batch."""
    given = {name: tensor.to(run.device) for name, tensor in batch.items()}
    for remedy in run.remedies:
        remedy.step([given])
    begun = time.perf_counter()
    with whole_loss(run, model, given, fused):
        model(**given).loss.backward()
    return seconds_since(begun, run.device)


def _seconds_of_an_update(run: Run, model: Any) -> float:
    """Return the wall seconds of a step of AdamW on the present gradients, after one step that creates its state."""
    optimizer, seconds = make_optimizer(model, run.settings, decayed=set()), 0.0
    for _ in range(2):
        begun = time.perf_counter()
        optimizer.step()
        seconds = seconds_since(begun, run.device)
    return seconds
