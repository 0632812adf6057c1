"""A text's scores: sums per unit, means with confidence intervals, and differences to another model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from surgeon.common.json_results import plain
from surgeon.data.packing import PackedSequence

# Confidence level of all intervals.
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Ratio:
    """A mean over tokens (or bytes) and its 95 % confidence interval; None where there is only one unit."""

    value: float
    interval: tuple[float, float] | None

    def map(self, function: Callable[[float], float]) -> Ratio:
        """Return the ratio with an increasing function applied to the value and to both ends of the interval."""
        ends = None if self.interval is None else (function(self.interval[0]), function(self.interval[1]))
        return Ratio(function(self.value), ends)

    def to_json(self) -> dict[str, Any]:
        """Return `value`, and `low` and `high`, the ends of the interval; NaN and infinity are written as strings."""
        low, high = self.interval or (None, None)
        return {"value": plain(self.value), "low": plain(low), "high": plain(high)}


def ratio(sums: NDArray[Any], counts: NDArray[Any]) -> Ratio:
    """Return Σ sums / Σ counts over units, with the interval of the ratio estimator (Cochran, Sampling Techniques 6.3).

    With R the ratio and rᵢ = sumᵢ − R · countᵢ, se² = n / (n − 1) · Σ rᵢ² / (Σ counts)², and the interval is R ± t · se
    with Student's t of n − 1 degrees of freedom. This is the first-order approximation of a bootstrap over units. It is
    preferred because it needs no random draws, costs nothing, and for few units its interval is less often too narrow.
    """
    value = _mean(sums, counts)
    return Ratio(value, _interval(value, _influence(sums, counts)))


def difference(sums: NDArray[Any], counts: NDArray[Any], others: NDArray[Any], other_counts: NDArray[Any]) -> Ratio:
    """Return the ratio of `sums` to `counts` minus the other ratio, paired on the same units.

    Effects that make a unit hard for both models cancel: the interval uses the differences of the units' influences.
    """
    value = _mean(sums, counts) - _mean(others, other_counts)
    return Ratio(value, _interval(value, _influence(sums, counts) - _influence(others, other_counts)))


@dataclass(frozen=True)
class Windows:
    """A text as sequences of tokens, longest first, and for each token its unit: the document's number.

    `nbytes` (documents,) are the UTF-8 bytes of a document's counted tokens; `cut` counts documents longer than a
    window. For packed sequences (`pack`) each sequence is a unit, and bytes are not counted.
    """

    sequences: list[PackedSequence]
    units: list[NDArray[np.int64]]
    nbytes: NDArray[np.int64]
    cut: int

    @classmethod
    def of(
        cls, pieces: Sequence[tuple[PackedSequence, NDArray[np.int64]]], nbytes: NDArray[np.int64], cut: int = 0
    ) -> Self:
        """Return the windows of a text from sequences in any order, each with its tokens' units."""
        ordered = sorted(pieces, key=lambda piece: -len(piece[0].ids))
        return cls([sequence for sequence, _ in ordered], [units for _, units in ordered], nbytes, cut)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def documents(self) -> int:
        """The number of units (documents, or packed sequences)."""
        return len(self.nbytes)

    def same_tokens(self, other: Windows) -> bool:
        """Return whether both have the same tokens of the same documents."""
        return self.sequences == other.sequences


@dataclass(frozen=True)
class Scores:
    """Sums per unit of one source: `nats` of the counted tokens, their number, and how many were guessed right.

    A token is guessed right where its logit is the largest (greedy decoding's choice). All have shape (units,).
    """

    nats: NDArray[np.float64]
    tokens: NDArray[np.int64]
    right: NDArray[np.int64]

    @property
    def loss(self) -> float:
        """Mean cross-entropy in nats per token."""
        return float(self.nats.sum() / self.tokens.sum())

    @property
    def loss_ratio(self) -> Ratio:
        """Mean cross-entropy in nats per token, with its interval."""
        return ratio(self.nats, self.tokens)

    @property
    def perplexity(self) -> Ratio:
        """exp of the mean loss (infinite where a float would overflow)."""
        return self.loss_ratio.map(exp)

    @property
    def accuracy(self) -> Ratio:
        """Share of the counted tokens that were guessed right."""
        return ratio(self.right, self.tokens)

    @property
    def bits(self) -> NDArray[np.float64]:
        """Cross-entropy of each unit in bits."""
        return np.asarray(self.nats / math.log(2))

    def bits_per_byte(self, windows: Windows) -> Ratio:
        """Return the mean cross-entropy in bits per byte of text; `windows` are the scored windows."""
        return ratio(self.bits, windows.nbytes)

    def loss_difference(self, first: Scores) -> Ratio:
        """Return this model's loss minus the loss of `first`, on the same tokens, paired by unit."""
        return difference(self.nats, self.tokens, first.nats, first.tokens)

    def bits_difference(self, windows: Windows, first: Scores, first_windows: Windows) -> Ratio:
        """Return this model's bits per byte minus those of `first`, on the same documents; the tokens may differ."""
        return difference(self.bits, windows.nbytes, first.bits, first_windows.nbytes)


@dataclass(frozen=True)
class Judged:
    """Each example's loss in nats, the predicted label (the largest logit's) and the expected label, each (examples,).

    `labels` is the number of labels in the model.
    """

    nats: NDArray[np.float64]
    given: NDArray[np.int64]
    expected: NDArray[np.int64]
    labels: int

    @property
    def right(self) -> NDArray[np.bool_]:
        """Which examples were predicted right."""
        return np.asarray(self.given == self.expected)

    @property
    def loss(self) -> Ratio:
        """Mean cross-entropy in nats per example."""
        return ratio(self.nats, np.ones(len(self.nats)))

    @property
    def accuracy(self) -> Ratio:
        """Share of the examples that were predicted right."""
        return ratio(self.right, np.ones(len(self.nats)))

    @property
    def f1(self) -> float | None:
        """F1 of the second of two labels, 2 TP / (2 TP + FP + FN), as in GLUE; None for more labels, or where it is
        0/0.

        Wang et al. 2018, section 3.2 (MRPC, QQP).
        """
        if self.labels != 2:
            return None
        right = int(((self.given == 1) & (self.expected == 1)).sum())
        named = int((self.given == 1).sum() + (self.expected == 1).sum())
        return 2 * right / named if named else None

    @property
    def matthews(self) -> float | None:
        """Matthews' correlation coefficient (Gorodkin's R_K for more than two labels); None if only one label occurs.

        (c s − Σ p_k t_k) / √((s² − Σ p_k²)(s² − Σ t_k²)), with s examples, c of them right, p_k predictions and t_k
        expectations of label k (Gorodkin 2004).
        """
        count = len(self.given)
        given, expected = (
            np.bincount(each, minlength=self.labels).astype(float) for each in (self.given, self.expected)
        )
        right = float(self.right.sum())
        spread = math.sqrt((count**2 - (given**2).sum()) * (count**2 - (expected**2).sum()))
        return float(right * count - (given * expected).sum()) / spread if spread else None

    def accuracy_difference(self, first: Judged) -> Ratio:
        """Return this accuracy minus the accuracy of `first`, on the same examples, paired."""
        ones = np.ones(len(self.nats))
        return difference(self.right, ones, first.right, ones)

    def figures(self) -> dict[str, float]:
        """Return loss, accuracy, F1 and Matthews' correlation by name, without those that are not defined."""
        found = {"loss": self.loss.value, "accuracy": self.accuracy.value, "f1": self.f1, "matthews": self.matthews}
        return {name: value for name, value in found.items() if value is not None}


def _mean(sums: NDArray[Any], counts: NDArray[Any]) -> float:
    """Return Σ sums / Σ counts; NaN where nothing was counted."""
    return float(sums.sum()) / total if (total := float(counts.sum())) else math.nan


def _influence(sums: NDArray[Any], counts: NDArray[Any]) -> NDArray[np.float64]:
    """Return each unit's influence on the ratio: (sumᵢ − R · countᵢ) / Σ counts."""
    # Losses may be infinite or NaN; then the intervals are NaN, without a warning.
    with np.errstate(invalid="ignore"):
        found: NDArray[np.float64] = (sums - _mean(sums, counts) * counts) / max(counts.sum(), 1)
    return found


def _interval(value: float, influence: NDArray[np.float64]) -> tuple[float, float] | None:
    """Return the confidence interval of `value` from the units' influences; None for fewer than two units."""
    units = len(influence)
    if units < 2:
        return None
    from scipy.special import stdtrit

    error = math.sqrt(units / (units - 1) * float((influence**2).sum()))
    reach = float(stdtrit(units - 1, (1 + CONFIDENCE) / 2)) * error
    return float(value - reach), float(value + reach)


def exp(value: float) -> float:
    """Return e to the power of `value`; infinity where a float would overflow."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
