"""`what: {layers: …}`: all tensors of some layers, which are numbered as in the model to train."""

from __future__ import annotations

from surgeon.manifest.trainable import LayersSpec
from surgeon.training.config.schema import TrainConfig
from surgeon.training.targets.target import OwnTensors


class Layers(OwnTensors):
    """All tensors of some layers."""

    @classmethod
    def named_by(cls, config: TrainConfig) -> bool:
        """Return whether `what` selects layers."""
        return isinstance(config.what, LayersSpec)
