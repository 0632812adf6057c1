"""The state of a forward (`Flow`), and the interface of a graft, which each kind of graft implements (`Graft`).

Shapes: B batch, T tokens of this forward, D hidden size, S slots.
"""

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
    """The state of one forward of a model, or of one of its layers (then called a frame).

    Modules read it from `here`, as native code does not pass it on. `valid` (B T, bool; None: no loss is asked for):
    the tokens that count in losses. `domains` (B T): the domain of each token. `off`: all grafts are switched off. A
    caller may pass a flow to a model, to read its values afterwards.
    """

    valid: Tensor | None = None
    domains: Tensor | None = None
    off: bool = False
    # Losses, by the output's field. In a frame: tensors of shape (1,). In a model's flow: pairs (weight, vector).
    losses: dict[str, list[Any]] = field(default_factory=dict)
    # The router's weights of the slots, B T S; set from the router's layer on.
    routing: Tensor | None = None
    # The state of control states, a `Mixing`.
    mixing: Any = None
    # The state of the domain gate, a `Gating`; where the gate is open (B T, bool), set from its layer on; the names of
    # the grafts that it switches in this layer.
    gating: Any = None
    on: Tensor | None = None
    gated: frozenset[str] = frozenset()
    # The given position ids, counted from 0; whether a row holds several sequences, as in continuous batching.
    positions: Tensor | None = None
    packed: bool = False
    # Whether the choices of control states are recorded.
    records_choices: bool = False
    # In a layer's frame, the shape of the layer's input: B T D.
    shape: Any = None

    def measure(self, name: str, loss: Tensor) -> None:
        """Add a layer's loss, one number, to those of the output's field `name`."""
        self.losses.setdefault(name, []).append(loss.reshape(1))

    def where_open(self, graft: str, grown: Tensor, native: Tensor) -> Tensor:
        """Return `grown` where `graft` acts, else `native`: both are B T · or one row for each token.

        `grown` is `native` after the graft. A graft that the gate does not switch acts on every token.
        """
        return only_where(self.on, grown, native) if graft in self.gated else grown

    def skips(self, graft: Graft) -> bool:
        """Return whether `graft` need not run beside a block, because the gate switches it off for every token."""
        switched = graft.remembers_nothing and graft.name in self.gated
        return switched and self.gating is not None and self.gating.shut


Frame = Flow


def gated_beside(graft: Graft, block: Any, x: Tensor, output: Tensor, frame: Flow | None) -> Tensor:
    """Return a block's output with the addition of `graft`; without it for tokens where the gate switches it off."""
    if frame is None:
        return graft.beside(block, x, output, frame)
    if frame.skips(graft):
        return output
    return frame.where_open(graft.name, graft.beside(block, x, output, frame), output)


def only_where(on: Tensor | None, grown: Tensor, native: Tensor) -> Tensor:
    """Return `grown` where `on` (B T, bool) is true, else `native`, bit for bit: B T · or one row for each token, both.

    Raises RuntimeError where `on` is None, as the gate has not decided, unless both are one tensor object.
    """
    if grown is native:
        return native
    if on is None:
        raise RuntimeError("a layer with gated parts was called outside its model, which brings the gate's decision")
    return torch.where(on.reshape(*native.shape[:-1], 1).to(native.device), grown, native)


def cache_in(given: Mapping[str, Any] | Iterable[Any]) -> Any:
    """Return the KV cache among a forward's arguments or outputs; None: there is none.

    It is found by its type, as transformers has renamed the argument (`past_key_values` is `cache` from 5.24 on).
    """
    values = given.values() if isinstance(given, Mapping) else given
    return next((each for each in values if isinstance(each, Cache)), None)


class Here(threading.local):
    """The state of this thread: the running model's flow and layer's frame, and the models with grafts switched off.

    `rest` is what the layer returned after its hidden states.
    """

    flow: Flow | None = None
    frame: Flow | None = None
    rest: Any = None
    off: tuple[nn.Module, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as an empty state: vLLM sends the code of a config's class, and `here` with it, to other processes."""
        return type(self), ()


here = Here()


class Graft:
    """The interface of a graft: what one kind of addition does in a model. Its rules define `name`."""

    name: ClassVar[str]
    # Classes of modules with which the graft replaces native ones, and which quantisers must leave.
    replaces: ClassVar[tuple[type[nn.Module], ...]] = ()
    # Whether what the graft adds to a block depends only on the block's input, and keeps nothing for later tokens.
    remembers_nothing: ClassVar[bool] = False

    def blocks(self, surgery: Surgery, index: int) -> tuple[str, ...]:
        """Return to which blocks of layer `index`, `self_attn` or `mlp`, the graft adds something."""
        return ()

    def attach(self, layer: Any, config: Any, index: int, surgery: Surgery) -> bool:
        """Put the graft's modules into layer `index` of trunk or tail; return whether the graft acts in that layer.

        The weights of the graft's losses, by the output's fields, are added to the layer's `loss_weights`.
        """
        return False

    def before(self, layer: Any, hidden_states: Tensor, frame: Flow) -> None:
        """Prepare the graft before the layer runs on `hidden_states`, B T D."""

    def beside(self, block: Any, x: Tensor, output: Tensor, frame: Flow | None) -> Tensor:
        """Return a block's output with the graft's addition, B T D; `x` is the block's input, `output` its output."""
        return output

    def after(self, layer: Any, hidden_states: Tensor, output: Tensor, frame: Flow, run: Any) -> Tensor:
        """Return the layer's output as the graft changes it; `run(module)` runs another layer on the same arguments."""
        return output

    def complete(self, model: Any, surgery: Surgery) -> None:
        """Put the modules that all layers share into the base model, after every layer has its own."""

    def open(self, model: Any, flow: Flow, inputs: Tensor, attention_mask: Any, cache: Any) -> None:
        """Begin a forward of the base model; all its layers get `flow`."""

    def close(self, model: Any, flow: Flow, cache: Any) -> None:
        """End a forward of the base model; `cache` is the one that it returns."""

    def counted(self, surgery: Surgery) -> Mapping[str, tuple[type[nn.Module], int]]:
        """Return the modules whose tensors a checkpoint must hold: by description, the class and the needed number."""
        return {}
