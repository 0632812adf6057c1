"""What a graft does in a model. One small class a graft, together with its rules (`class AdapterGraft(Graft, …)`).

A layer asks the grafts of its config, in their order: first which blocks must be able to carry something, then to put
their modules in. In a forward those that did so run `before` it, `beside` its blocks and `after` it.

While a layer runs its own modules see its frame: native code passes nothing of ours to its MLP or projections. The
layer's forward sets the frame and puts back the one before, in this thread alone. A frame is built from the layer's
arguments, so that gradient checkpointing, which runs the layer again, sees the same.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .losses import Flow
from .rules import Surgery


@dataclass
class Frame:
    """One layer's forward.

    `valid` (B T, bool; None: nothing is measured) are the tokens that count in losses, `domains` (B T) their domains,
    `losses` what was measured, by the output's field. `routing` (B T slots) is what a router below or here decided;
    `mixing` and `gating` what the model shares among its layers. Grafts named in `gated` take part where `on` (B T,
    bool), and none does where all are `off`.
    """

    valid: Tensor | None = None
    domains: Tensor | None = None
    routing: Tensor | None = None
    mixing: Any = None
    gating: Any = None
    on: Tensor | None = None
    gated: frozenset[str] = frozenset()
    off: bool = False
    losses: dict[str, list[Tensor]] = field(default_factory=dict)

    def measure(self, name: str, loss: Tensor) -> None:
        """Keep a loss, one number, for the output's field `name`."""
        self.losses.setdefault(name, []).append(loss.reshape(1))

    def kept(self, graft: str, grown: Tensor, native: Tensor) -> Tensor:
        """`grown`, what a graft made of `native` (B T · or one row a token, both); where it is gated off, `native`."""
        return only_where(self.on, grown, native) if graft in self.gated else grown

    def skips(self, graft: Graft) -> bool:
        """Whether nothing of what `graft` makes beside a block would be seen: it is gated off for every token."""
        return graft.remembers_nothing and graft.name in self.gated and self.gating is not None and self.gating.shut

    def measured(self, name: str, like: Tensor) -> Tensor:
        """The losses kept for a field as one vector, empty where there are none."""
        found = self.losses.get(name)
        return like.new_zeros(0, dtype=torch.float32) if found is None else torch.cat(found)


def only_where(on: Tensor | None, grown: Tensor, native: Tensor) -> Tensor:
    """`grown` where `on` (B T, bool), else `native`, to the bit: B T · or one row a token, both."""
    if grown is native:
        return native
    if on is None:
        raise RuntimeError("a layer with gated parts was called outside its model, which brings the gate's decision")
    return torch.where(on.reshape(*native.shape[:-1], 1).to(native.device), grown, native)


class _Active(threading.local):
    frame: Frame | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Sent to another process, as vLLM sends a config with the code of its class, it begins anew there."""
        return type(self), ()


_active = _Active()


def current_frame() -> Frame | None:
    """The frame of the layer that runs in this thread, if one does."""
    return _active.frame


def enter_frame(frame: Frame | None) -> Frame | None:
    """Let modules of this thread see `frame`; returns what they saw before, to be put back afterwards."""
    previous = _active.frame
    _active.frame = frame
    return previous


class Graft:
    """The hooks of a graft; each does nothing here. `name` is its rules'.

    `replaces` are classes of modules that it puts in the places of native ones, which quantisers must leave.
    """

    name: ClassVar[str]
    replaces: ClassVar[tuple[type[nn.Module], ...]] = ()
    # Whether what it makes beside a block is made of the block's input alone, and leaves nothing for later tokens.
    remembers_nothing: ClassVar[bool] = False

    def blocks(self, surgery: Surgery, index: int) -> tuple[str, ...]:
        """Which blocks of layer `index`, `self_attn` and `mlp`, it stands beside."""
        return ()

    def attach(self, layer: Any, config: Any, index: int, surgery: Surgery) -> bool:
        """Put its modules into layer `index` of trunk or tail; whether it has any part in that layer."""
        return False

    def before(self, layer: Any, hidden_states: Tensor, frame: Frame) -> None:
        """The layer is about to run on `hidden_states`, B T D."""

    def beside(self, block: Any, x: Tensor, output: Tensor, frame: Frame | None) -> Tensor:
        """What a block puts out together with the graft, B T D; `x` is what the block read, `output` what it made."""
        return output

    def after(self, layer: Any, hidden_states: Tensor, output: Tensor, frame: Frame, run: Any) -> Tensor:
        """What the layer puts out together with the graft; `run(module)` runs another layer as this one was run."""
        return output

    def weights(self, surgery: Surgery, index: int) -> Mapping[str, float]:
        """The weights of its losses in a layer, by the output's field."""
        return {}

    def complete(self, model: Any, surgery: Surgery) -> None:
        """Put what all layers share into the base model."""

    def open(self, model: Any, flow: Flow, inputs: Tensor, attention_mask: Any, cache: Any) -> None:
        """A forward of the base model begins; `flow` goes to all its layers."""

    def close(self, model: Any, flow: Flow, cache: Any) -> None:
        """A forward of the base model is over; `cache` is the one that it returns."""

    def counted(self, surgery: Surgery) -> Mapping[str, tuple[type[nn.Module], int]]:
        """Its modules whose tensors a checkpoint must hold: what they are, their class, how many there must be."""
        return {}
