"""What crosses a forward, and what a graft does in one: a small class a graft (`class AdapterGraft(Graft, …)`)."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from .rules import Surgery


@dataclass
class Flow:
    """One forward of a model, or of one of its layers: the frame that its modules see, as native code passes them none.

    `valid` (B T, bool; None: no loss is asked for) are the tokens that count in losses, `domains` (B T) their domains;
    all grafts are `off` where a caller said so. A caller may pass a model one, to look at afterwards.
    """

    valid: Tensor | None = None
    domains: Tensor | None = None
    off: bool = False
    # What was measured, by the output's field: numbers in a frame, else vectors of them, each after its weight.
    losses: dict[str, list[Any]] = field(default_factory=dict)
    # From a router's layer on: the weights of slots, B T slots.
    routing: Tensor | None = None
    # Control states at work.
    mixing: Any = None
    # The gate at work, and from its layer on where it is open: B T, bool. Grafts named in `gated` go by it.
    gating: Any = None
    on: Tensor | None = None
    gated: frozenset[str] = frozenset()
    # The position ids that were given; whether a row holds several sequences, as in continuous batching.
    positions: Tensor | None = None
    packed: bool = False
    # Whether what is chosen is recorded.
    records_choices: bool = False
    # Of a layer's frame the shape of what goes in: B T D.
    shape: Any = None

    def measure(self, name: str, loss: Tensor) -> None:
        """Keep a loss, one number, of a layer for the output's field `name`."""
        self.losses.setdefault(name, []).append(loss.reshape(1))

    def where_open(self, graft: str, grown: Tensor, native: Tensor) -> Tensor:
        """`grown`, what a graft made of `native` (B T · or one row a token, both); gated off, `native`."""
        return only_where(self.on, grown, native) if graft in self.gated else grown

    def skips(self, graft: Graft) -> bool:
        """Whether nothing of what `graft` makes beside a block would be seen: it is gated off for every token."""
        switched = graft.remembers_nothing and graft.name in self.gated
        return switched and self.gating is not None and self.gating.shut


Frame = Flow


def gated_beside(graft: Graft, block: Any, x: Tensor, output: Tensor, frame: Flow | None) -> Tensor:
    """What a block puts out together with a graft that may be gated."""
    if frame is None:
        return graft.beside(block, x, output, frame)
    if frame.skips(graft):
        return output
    return frame.where_open(graft.name, graft.beside(block, x, output, frame), output)


def only_where(on: Tensor | None, grown: Tensor, native: Tensor) -> Tensor:
    """`grown` where `on` (B T, bool), else `native`, to the bit: B T · or one row a token, both."""
    if grown is native:
        return native
    if on is None:
        raise RuntimeError("a layer with gated parts was called outside its model, which brings the gate's decision")
    return torch.where(on.reshape(*native.shape[:-1], 1).to(native.device), grown, native)


def cache_in(given: Mapping[str, Any] | Iterable[Any]) -> Any:
    """Return the cache among a forward's arguments or what it returns; None: there is none.

    It is found by what it is: transformers has renamed the argument (`past_key_values` is `cache` from 5.24 on).
    """
    values = given.values() if isinstance(given, Mapping) else given
    return next((each for each in values if isinstance(each, Cache)), None)


class Here(threading.local):
    """What this thread runs: a model's flow, a layer's frame, what came with its states; models switched off."""

    flow: Flow | None = None
    frame: Flow | None = None
    rest: Any = None
    off: tuple[nn.Module, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Sent to another process, as vLLM sends a config with the code of its class, it begins anew there."""
        return type(self), ()


here = Here()


class Graft:
    """What a graft does in a model. `name` is its rules'."""

    name: ClassVar[str]
    # Classes of modules that it puts in the places of native ones, which quantisers must leave.
    replaces: ClassVar[tuple[type[nn.Module], ...]] = ()
    # Whether what it makes beside a block is made of the block's input alone, and leaves nothing for later tokens.
    remembers_nothing: ClassVar[bool] = False

    def blocks(self, surgery: Surgery, index: int) -> tuple[str, ...]:
        """Which blocks of layer `index`, `self_attn` and `mlp`, it stands beside."""
        return ()

    def attach(self, layer: Any, config: Any, index: int, surgery: Surgery) -> bool:
        """Put its modules into layer `index` of trunk or tail; whether it has any part in that layer.

        What its losses weigh there, by the output's fields, it adds to the layer's `loss_weights`.
        """
        return False

    def before(self, layer: Any, hidden_states: Tensor, frame: Flow) -> None:
        """The layer is about to run on `hidden_states`, B T D."""

    def beside(self, block: Any, x: Tensor, output: Tensor, frame: Flow | None) -> Tensor:
        """What a block puts out together with the graft, B T D; `x` is what the block read, `output` what it made."""
        return output

    def after(self, layer: Any, hidden_states: Tensor, output: Tensor, frame: Flow, run: Any) -> Tensor:
        """What the layer puts out together with the graft; `run(module)` runs another layer as this one was run."""
        return output

    def complete(self, model: Any, surgery: Surgery) -> None:
        """Put what all layers share into the base model."""

    def open(self, model: Any, flow: Flow, inputs: Tensor, attention_mask: Any, cache: Any) -> None:
        """A forward of the base model begins; `flow` goes to all its layers."""

    def close(self, model: Any, flow: Flow, cache: Any) -> None:
        """A forward of the base model is over; `cache` is the one that it returns."""

    def counted(self, surgery: Surgery) -> Mapping[str, tuple[type[nn.Module], int]]:
        """Its modules whose tensors a checkpoint must hold: what they are, their class, how many there must be."""
        return {}
