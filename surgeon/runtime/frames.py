"""What a layer's own modules see while the layer runs: native code passes nothing of ours to its MLP or projections.

A frame is set by the layer's forward and put back after it, in this thread alone. It is built from the layer's
arguments, so that gradient checkpointing, which runs the layer again, sees the same.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from .states import Mixing


class AdapterRecord(NamedTuple):
    """What one adapter did, for local losses: ‖output‖₁ / D and the gate before its sigmoid; B T."""

    l1: Tensor
    gate_logit: Tensor | None


@dataclass
class Frame:
    """One layer's forward.

    `records` is where adapters leave what local losses need (None: not asked for); `routing` (B T slots) is the
    experts' distribution; `mixing` holds the control states and takes their balance losses.
    """

    records: list[AdapterRecord] | None = None
    routing: Tensor | None = None
    mixing: Mixing | None = None
    balance: list[Tensor] = field(default_factory=list)


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
