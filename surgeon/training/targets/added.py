"""`what: added`: new tensors of all surgeries."""

from surgeon.training.targets.target import OwnTensors


class Added(OwnTensors):
    """The new tensors of all surgeries."""

    what = "added"
