"""What `train`, `continual` and `evaluate` give back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgeon.manifest import Manifest
from surgeon.tasks.metrics import Measurement, backward_transfer, general_ability_delta, overall_performance

if TYPE_CHECKING:
    from surgeon.evaluation.scores import Ratio


@dataclass(frozen=True)
class Trained:
    """A finished training run of `out`, published at `path`.

    `changes` maps every tensor that trained to max |Δ| and ‖Δ‖ / ‖before‖ (None: it was zero before); `unchanged` are
    those that are what they were. `losses` maps sources to their held-out losses in nats a token, before and after.
    `log` are the trainer's entries. `seconds` and `tokens_per_second` are of the steps since `resumed_at`; peak memory
    is in bytes, of the GPU where there is one.
    """

    out: Path
    path: Path
    manifest: Manifest
    operations: tuple[str, ...]
    settings: dict[str, Any]
    parameters: int
    changes: dict[str, tuple[float, float | None]]
    losses: dict[str, list[float]]
    tokens: int
    log: list[dict[str, Any]]
    resumed_at: int
    seconds: float
    tokens_per_second: float | None
    peak_memory: int

    def __repr__(self) -> str:
        losses = ", ".join(f"{name} {before:.4g} → {after:.4g}" for name, (before, after) in self.losses.items())
        told = f"{self.parameters:,} parameters in {len(self.changes)} tensors, {self.tokens:,} tokens"
        return f"Trained({str(self.path)!r}, {told}, loss {losses or 'not measured'})"

    @property
    def unchanged(self) -> tuple[str, ...]:
        """Tensors that trained and did not change."""
        return tuple(name for name, (largest, _) in self.changes.items() if largest == 0)

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`."""
        return {
            "out": str(self.out),
            "path": str(self.path),
            "operations": list(self.operations),
            "settings": self.settings,
            "parameters": self.parameters,
            "losses": {name: {"before": before, "after": after} for name, (before, after) in self.losses.items()},
            "tensors": {
                name: {"max_change": largest, "relative_change": relative}
                for name, (largest, relative) in self.changes.items()
            },
            "unchanged": list(self.unchanged),
            "tokens": self.tokens,
            "tokens_per_second": self.tokens_per_second,
            "seconds": self.seconds,
            "resumed_at": self.resumed_at,
            "peak_memory": self.peak_memory,
            "log": self.log,
        }


@dataclass(frozen=True)
class Continued:
    """What a continual run made of a base, task by task.

    `rows[0]` is what was measured of the base, on every task and general source, `rows[t]` after the t-th task, on the
    tasks so far and the general sources. Performance is token accuracy on held-out labels, where the paper has
    benchmark scores. `trainings` are the tasks' (settings, steps, tokens, losses), `kept` is the folder of the earlier
    tasks' runs where they were kept, `config` the tasks file.
    """

    path: Path
    base: str
    tasks: tuple[str, ...]
    general: tuple[str, ...]
    rows: tuple[Measurement, ...]
    trainings: tuple[dict[str, Any], ...]
    config: dict[str, Any]
    fingerprint: str
    resumed_after: int = 0
    kept: Path | None = None

    def __repr__(self) -> str:
        delta = "" if self.delta[-1] is None else f", ΔR {self.delta[-1]:+.4f}"
        told = f"OP {self.overall[-1]:.4f}, BWT {self.backward[-1]:+.4f}{delta}"
        return f"Continued({str(self.path)!r}, {len(self.tasks)} tasks, {told})"

    @property
    def matrix(self) -> list[list[float]]:
        """R[t][i]: performance on task i after training on task t, i ≤ t, from 0."""
        return [[row[name].accuracy for name in self.tasks[: number + 1]] for number, row in enumerate(self.rows[1:])]

    @property
    def overall(self) -> list[float]:
        """OP after each task."""
        return [overall_performance(self.matrix, t) for t in range(len(self.tasks))]

    @property
    def backward(self) -> list[float]:
        """BWT after each task."""
        return [backward_transfer(self.matrix, t) for t in range(len(self.tasks))]

    @property
    def delta(self) -> list[float | None]:
        """ΔR after each task; None where there are no general sources."""
        before, *after = ([row[name].accuracy for name in self.general] for row in self.rows)
        return [general_ability_delta(before, row) for row in after]

    def record(self) -> dict[str, Any]:
        """As plain data: what `continual.json` of the run holds."""
        return {
            "surgeon_continual": 1,
            "base": self.base,
            "tasks": list(self.tasks),
            "general": list(self.general),
            "performance": "token accuracy on held-out labels",
            "base_accuracy": {name: found.accuracy for name, found in self.rows[0].items()},
            "matrix": self.matrix,
            "overall_performance": self.overall,
            "backward_transfer": self.backward,
            "general_ability_delta": self.delta,
            "measured": [
                {
                    name: found.to_json() | {"accuracy": found.accuracy, "loss": found.loss}
                    for name, found in row.items()
                }
                for row in self.rows
            ],
            "trainings": list(self.trainings),
            "config": self.config,
            "fingerprint": self.fingerprint,
        }

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`."""
        return {
            "path": str(self.path),
            "kept": None if self.kept is None else str(self.kept),
            "resumed_after": self.resumed_after,
            **self.record(),
        }


@dataclass(frozen=True)
class SourceScores:
    """One model on one source. Losses are in nats a token, bits per byte of UTF-8, accuracy is greedy decoding's.

    Each has its 95 % confidence interval, over documents. The differences are to the first model, paired by document
    (None: this is the first; of losses also where the tokens are other ones).
    """

    source: str
    documents: int
    tokens: int
    nbytes: int
    loss: Ratio
    perplexity: Ratio
    bits_per_byte: Ratio
    accuracy: Ratio
    loss_difference: Ratio | None
    bits_difference: Ratio | None


@dataclass(frozen=True)
class ModelScores:
    """One model on all sources; `same_tokens` says whether its tokens are the first model's."""

    model: str
    same_tokens: bool
    sources: tuple[SourceScores, ...]


@dataclass(frozen=True)
class Evaluation:
    """Models beside each other on the same held-out text, the first one the one to compare with.

    `length` is the most tokens a window has; `notes` tell what the numbers do not.
    """

    models: tuple[ModelScores, ...]
    length: int
    dtype: str
    device: str
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        shown = "; ".join(
            f"{row.model}: " + ", ".join(f"{found.source} {found.loss.value:.4f}" for found in row.sources[:4])
            for row in self.models[:4]
        )
        return f"Evaluation({len(self.models)} models, {shown})"

    def of(self, model: str, source: str) -> SourceScores:
        """One cell; KeyError where there is none."""
        for row in self.models:
            for found in row.sources:
                if (row.model, found.source) == (model, source):
                    return found
        raise KeyError(f"{model}, {source}")

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`; a number that is none or infinite is its name."""
        ratios = ("loss", "perplexity", "bits_per_byte", "accuracy", "loss_difference", "bits_difference")
        return {
            "length": self.length,
            "dtype": self.dtype,
            "device": self.device,
            "confidence": 0.95,
            "models": [
                {
                    "model": row.model,
                    "same_tokens": row.same_tokens,
                    "sources": {
                        found.source: {
                            "documents": found.documents,
                            "tokens": found.tokens,
                            "bytes": found.nbytes,
                            **{name: _ratio(getattr(found, name)) for name in ratios},
                        }
                        for found in row.sources
                    },
                }
                for row in self.models
            ],
            "notes": list(self.notes),
        }


def _ratio(found: Ratio | None) -> dict[str, Any] | None:
    if found is None:
        return None
    low, high = found.interval or (None, None)
    return {"value": _number(found.value), "low": _number(low), "high": _number(high)}


def _number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
