"""`what: head`: only the classification head, which texts with labels train in addition to every other target."""

from __future__ import annotations

from surgeon.manifest.trainable import TrainableSet
from surgeon.training.targets.target import OwnTensors


class Head(OwnTensors):
    """The classification head only, which `objectives.labels` adds to every target."""

    what = "head"

    def names(self) -> TrainableSet:
        """Return the empty set, to which the objective adds the head."""
        return TrainableSet((), ())
