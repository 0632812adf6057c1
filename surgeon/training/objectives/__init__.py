"""Objectives, which decide what a run learns from its texts: one file each, chosen by the kind of the sources."""

from __future__ import annotations

from surgeon.training.config.schema import TrainConfig
from surgeon.training.objectives.labels import Labels
from surgeon.training.objectives.next_tokens import NextTokens
from surgeon.training.run import Objective


def objective_of(config: TrainConfig) -> Objective:
    """Return the objective for the kind of a config's sources."""
    return Labels() if config.classifies else NextTokens()
