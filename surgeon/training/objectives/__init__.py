"""What a run learns of its texts: one file each, chosen by the kind of the config's sources."""

from __future__ import annotations

from surgeon.training.config.schema import TrainConfig
from surgeon.training.objectives.labels import Labels
from surgeon.training.objectives.next_tokens import NextTokens
from surgeon.training.run import Objective


def objective_of(config: TrainConfig) -> Objective:
    """Return the objective that a config's sources name."""
    return Labels() if config.classifies else NextTokens()
