"""What a layer's own modules see while the layer runs: native code passes nothing of ours to its MLP or projections.

A frame is set by the layer's forward and put back after it, in this thread alone. It is built from the layer's
arguments, so that gradient checkpointing, which runs the layer again, sees the same.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Frame:
    """One layer's forward.

    `valid` (B T, bool; None: nothing is measured) are the tokens that count in losses, `domains` (B T) their domains,
    `losses` what was measured, by the output's field. `routing` (B T slots) is what a router below or here decided;
    `mixing` what the model shares among its layers.
    """

    valid: Tensor | None = None
    domains: Tensor | None = None
    routing: Tensor | None = None
    mixing: Any = None
    losses: dict[str, list[Tensor]] = field(default_factory=dict)

    def measure(self, name: str, loss: Tensor) -> None:
        """Keep a loss, one number, for the output's field `name`."""
        self.losses.setdefault(name, []).append(loss.reshape(1))

    def measured(self, name: str, like: Tensor) -> Tensor:
        """The losses kept for a field as one vector, empty where there are none."""
        found = self.losses.get(name)
        return like.new_zeros(0, dtype=torch.float32) if found is None else torch.cat(found)


class _Active(threading.local):
    frame: Frame | None = None


_active = _Active()


def current_frame() -> Frame | None:
    """The frame of the layer that runs in this thread, if one does."""
    return _active.frame


def enter_frame(frame: Frame | None) -> Frame | None:
    """Let modules of this thread see `frame`; returns what they saw before, to be put back afterwards."""
    previous = _active.frame
    _active.frame = frame
    return previous
