"""A budget of minutes, made into steps of a batch of sequences by a speed that was measured on this machine."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from surgeon.training.config.schema import MOST_STEPS, TrainConfig

# The fewest and the most tokens of a step, and the steps that a run should have before its steps grow. Below 512 tokens
# gradients of text are mostly noise; 64 sequences of 2048 tokens are what most papers of operations used.
_FEWEST, _MOST, _STEPS = 512, 2**17, 200
# The sequences of a step that a sequence's length leaves room for, the shortest length and the longest.
_SEQUENCES, _SHORTEST, _LONGEST = 8, 128, 2048
# A step of so many times the tokens of the measured one may be much faster by token, above all on a GPU.
_NEAR = 4


class Budget(NamedTuple):
    """What `minutes` of a config were made into; a continued run has the same numbers, whatever the speed is then."""

    minutes: float
    steps: int
    batch: int
    length: int

    def is_near(self, batch: int, length: int) -> bool:
        """Return whether a measured step of `batch` × `length` tokens is so near to this one that its speed holds."""
        return self.batch * self.length <= _NEAR * batch * length

    @property
    def shown(self) -> str:
        """The budget in words."""
        return f"minutes {self.minutes:g}: {self.steps:,} steps of {self.batch:,} × {self.length:,} tokens"

    def settled(self, config: TrainConfig) -> TrainConfig:
        """Return the config with these numbers in the place of keys that it leaves out."""
        return config.model_copy(update={"steps": self.steps, "batch": self.batch, "length": self.length})


def trial_of(config: TrainConfig, budget: Budget | None) -> TrainConfig:
    """Return the config of a run by which the speed is measured: its own, of more steps than any warm-up has.

    It has the batch and the length of `budget`; without one, the smallest that a budget has.
    """
    shape = {"batch": config.batch, "length": config.length}
    if not config.classifies:
        shape = {"batch": config.batch or _FEWEST // _SHORTEST, "length": config.length or _SHORTEST}
    if budget is not None:
        shape = {"batch": budget.batch, "length": budget.length}
    return config.model_copy(update={"minutes": None, "steps": MOST_STEPS, **shape})


def budget_of(config: TrainConfig, *, seconds: float, batch: int, length: int, context: object, packs: bool) -> Budget:
    """Return the steps, and where the config leaves them out batch and length, that take `minutes` of the config.

    A step has tokens for 200 steps in these minutes, a power of two from 512 to 131,072. A sequence has an eighth of
    them, from 128 to 2,048 tokens. Texts that are not packed keep the batch and the length of the measured step.

    Args:
        config: a config with `minutes`.
        seconds: the measured wall seconds of a step of `batch` × `length` tokens.
        batch: sequences of the measured step.
        length: tokens of each.
        context: the positions that the model's config names (None: no limit).
        packs: whether sequences are packed, so that all have the same length.
    """
    assert config.minutes is not None
    whole = 60 * config.minutes
    if packs:
        a_token = seconds / (batch * length)
        a_step = _power_of_two(whole / a_token / _STEPS, _FEWEST, _MOST)
        longest = context if isinstance(context, int) else sys.maxsize
        sequences = config.batch or _SEQUENCES
        length = config.length or min(_power_of_two(a_step / sequences, _SHORTEST, _LONGEST), longest)
        batch = config.batch or max(1, a_step // length)
        seconds = a_token * batch * length
    return Budget(config.minutes, max(1, int(whole / seconds)), batch, length)


def recorded_budget(decided: dict[str, Any], minutes: float) -> Budget | None:
    """Return the budget that a run's record has for the same `minutes`; None where it has none."""
    return Budget(**{key: decided[key] for key in Budget._fields}) if decided.get("minutes") == minutes else None


def _power_of_two(value: float, least: int, most: int) -> int:
    """Return the largest power of two that is at most `value`, within `least` and `most`, which are powers of two."""
    return max(least, min(most, 2 ** (int(value).bit_length() - 1) if value >= 1 else 1))
