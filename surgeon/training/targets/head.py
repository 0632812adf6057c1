"""`what: head`: the classification head alone, which texts with labels train beside every other target too."""

from __future__ import annotations

from surgeon.manifest.trainable import TrainableSet
from surgeon.training.targets.target import OwnTensors


class Head(OwnTensors):
    """Nothing but the head, which `objectives.labels` adds to every target."""

    what = "head"

    def names(self) -> TrainableSet:
        """Return the empty set."""
        return TrainableSet((), ())
