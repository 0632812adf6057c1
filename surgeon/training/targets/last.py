"""`what: last`, the default: new tensors of the last surgery, or of its operations whose numbers `what` lists."""

from __future__ import annotations

from surgeon.errors import BadInput, printable
from surgeon.manifest.manifest import MANIFEST_FILE
from surgeon.manifest.trainable import TrainableSet, trainable_set
from surgeon.training.config.schema import TrainConfig
from surgeon.training.targets.target import OwnTensors


class Last(OwnTensors):
    """The new tensors of the last surgery, or of some of its operations."""

    @classmethod
    def named_by(cls, config: TrainConfig) -> bool:
        """Return whether `what` is `last`, a list of numbers, or left out without a LoRA."""
        if config.what is None:
            return config.lora is None
        return config.what == "last" or isinstance(config.what, list)

    def names(self) -> TrainableSet:
        """Return these tensors. Raises BadInput; where `what` is left out, its message names what else could train."""
        config = self.loaded.config
        if config.what is not None:
            return super().names()
        if self.manifest is None:
            raise BadInput(
                f"{self.loaded.where()}`what` is not given, and {printable(str(self.out.path))} has no surgery (no"
                f" {MANIFEST_FILE}) whose tensors would train; say `what: all`, `what: {{layers: …}}` or `lora: {{rank:"
                " 16}`" + (", or `what: head` for the classification head alone" if config.classifies else "")
            )
        return trainable_set(self.out, self.manifest, "last", self.anatomy)
