"""`what: base`: tensors that no surgery added."""

from surgeon.training.targets.target import OwnTensors


class Base(OwnTensors):
    """The base's own tensors."""

    what = "base"
