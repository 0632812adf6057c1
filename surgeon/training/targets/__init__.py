"""Targets, which decide what a run trains: one file each, chosen by the config's `what` or `lora`."""

from __future__ import annotations

from surgeon.training.config.schema import TrainConfig
from surgeon.training.targets.added import Added
from surgeon.training.targets.all import All
from surgeon.training.targets.base import Base
from surgeon.training.targets.head import Head
from surgeon.training.targets.last import Last
from surgeon.training.targets.layers import Layers
from surgeon.training.targets.lora import Lora
from surgeon.training.targets.target import Target

TARGETS: tuple[type[Target], ...] = (Lora, Last, Added, Base, All, Layers, Head)


def target_of(config: TrainConfig) -> type[Target]:
    """Return the class of the target that a config names; the schema ensures that there is one."""
    return next(kind for kind in TARGETS if kind.named_by(config))
