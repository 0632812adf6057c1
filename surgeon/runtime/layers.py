"""Mixins that put grafts into native layers and blocks.

A mixin is the first base of a class with grafts, before the native class: `class UpcycledLlamaDecoderLayer(
UpcycledLayer, LlamaDecoderLayer)`. A model is built natively; then its layers and blocks change their `__class__`.

Shapes: B batch, T tokens of this forward, D hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .graft import Flow, gated_beside, here, only_where
from .rules import Surgery

# Attributes by which modules know their layer's number.
LAYER_NUMBERS = ("layer_idx", "layer_index", "layer_id", "layer_number", "block_idx")


@contextmanager
def in_flow(flow: Flow | None) -> Iterator[None]:
    """Set the flow of this thread inside the context; the decoder and the layers read it."""
    previous, here.flow = here.flow, flow
    try:
        yield
    finally:
        here.flow = previous


def one_tensor(made: Any) -> tuple[Tensor, Any]:
    """Return (output tensor, rest) of what a module returned; the rest is None where that was only a tensor."""
    return (made[0], made[1:]) if isinstance(made, tuple | list) else (made, None)


def with_rest(output: Tensor, rest: Any) -> Any:
    """Return an output with its rest, in the form that the module returned; `one_tensor` splits it."""
    return output if rest is None else type(rest)([output, *rest])


class Seat(nn.Module):
    """A module that holds the modules of grafts for a block to which the native model gives another name."""


# A site adds the output of grafts in `__call__` and leaves `forward` native: vLLM reads the source of a class's
# `forward` to find where attention is computed and which projections it may fuse.
class Site(nn.Module):
    """A mixin before a native block that adds the output of grafts to the block's output.

    The block's first argument, named `reads`, is its input; its output comes first in what it returns. The modules of
    grafts lie in the block itself, or in its `seat` where the native model gives the block another name.
    """

    grafts: tuple[Any, ...]
    seat: Any = None
    reads: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the native output as grafts change it; a block of experts may return one row for each token."""
        if here.frame is not None and here.frame.off:
            return super().__call__(*args, **kwargs)
        output, rest = one_tensor(super().__call__(*args, **kwargs))
        x = args[0] if args else kwargs[self.reads]
        grown = output.reshape(x.shape)
        block = self if self.seat is None else self.seat
        for graft in self.grafts:
            grown = gated_beside(graft, block, x, grown, here.frame)
        return with_rest(grown.reshape(output.shape), rest)


class UpcycledLayer(nn.Module):
    """A mixin before a native layer that adds grafts to it; `grafts` are the grafts that act in this layer.

    `forward` is a pure function of tensors, so that gradient checkpointing may run it again. `__call__` moves what
    layers share (routing, the gate's decision, losses) between `forward` and this thread's flow, as native code does
    not pass these on. `sites` are the blocks that can carry grafts: path, native class, the name by which grafts know
    the block, and the class with grafts.
    """

    # Empty in a layer that transformers builds itself: for MTP it takes the class of the model's last layer.
    grafts: tuple[Any, ...] = ()
    sites: ClassVar[tuple[tuple[str, Any, str, Any], ...]] = ()
    activation_field: ClassVar[str]
    # Whether the layer computes the routing that it and deeper layers read.
    routes = False
    # Whether the layer holds the domain gate; the names of its grafts that the gate switches; whether the gate switches
    # the whole layer.
    decides = False
    gated: frozenset[str] = frozenset()
    layer_gated = False
    # Whether a surgery inserted the layer, so that the base does not have it.
    inserted = False

    def compose(self, config: Any, index: int, surgery: Surgery) -> None:
        """Add the modules of all grafts that act in this layer; `index` is its number in trunk or tail."""
        # A block to which a graft adds something gets the class with grafts.
        for name, native, role, kind in self.sites:
            found: Any = dict(self.named_modules()).get(name)
            beside = tuple(graft for graft in surgery.rules if role in graft.blocks(surgery, index))
            if type(found) is native and beside:
                found.__class__ = kind
                found.grafts = beside
                found.reads = next(iter(inspect.signature(found.forward).parameters))
                if name != role:
                    setattr(self, role, Seat())
                    # Set past nn.Module, which would register the seat as a submodule of the block.
                    vars(found)["seat"] = getattr(self, role)
        self.loss_weights: dict[str, float] = {}
        self.grafts = tuple(graft for graft in surgery.rules if graft.attach(self, config, index, surgery))
        self.inserted = index in surgery.inserted

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer; store its routing, decision and losses in this thread's flow; return the native form."""
        flow = here.flow if here.flow is not None and (self.grafts or here.flow.off) else None
        # Tensors that carry gradient are passed by position, as reentrant checkpointing needs.
        routing, on = (None, None) if flow is None else (flow.routing, flow.on)
        output = super().__call__(hidden_states, routing, *args, flow=flow, on=on, **kwargs)
        if flow is not None and isinstance(output, tuple):
            output, *made = output
            if self.routes:
                flow.routing = made.pop(0)
            if self.decides:
                flow.on = made.pop(0)
            for (name, weight), loss in zip(self.loss_weights.items(), made, strict=False):
                if loss is not None:
                    flow.losses.setdefault(name, []).append((weight, loss))
        rest, here.rest = here.rest, None
        return with_rest(output, rest)

    def forward(
        self, hidden_states: Tensor, routing: Any, *args: Any, flow: Flow | None, on: Any, **kwargs: Any
    ) -> Any:
        """Return the layer's output, B T D; where there is a flow, then what `__call__` stores in the flow.

        These are the routing, the gate's decision and a vector of losses for each entry of `loss_weights`. The tuple is
        flat, because nested tensors get no gradient from reentrant checkpointing. With grafts `off` the output equals
        the base's.
        """
        frame = Flow(routing=routing, on=on, gated=self.gated, shape=hidden_states.shape)
        if flow is not None:
            frame.valid, frame.domains, frame.off = flow.valid, flow.domains, flow.off
            frame.mixing, frame.gating = flow.mixing, flow.gating
        grafts = () if frame.off else self.grafts
        for graft in grafts:
            graft.before(self, hidden_states, frame)
        previous, here.frame = here.frame, frame
        try:
            output, here.rest = one_tensor(super().forward(hidden_states, *args, **kwargs))
            run = partial(_run, hidden_states, args, kwargs)
            for graft in grafts:
                output = frame.where_open(graft.name, graft.after(self, hidden_states, output, frame, run), output)
        finally:
            here.frame = previous
        if frame.off and self.inserted:
            # An inserted layer has still run, so that its keys and values fill its place in a cache.
            return hidden_states
        if self.layer_gated and not frame.off:
            output = only_where(frame.on, output, hidden_states)
        if flow is None or frame.off:
            return output
        made: list[Any] = [output]
        if self.routes:
            made.append(frame.routing)
        if self.decides:
            made.append(frame.on)
        if frame.valid is not None:
            made += [torch.cat(frame.losses[name]) if name in frame.losses else None for name in self.loss_weights]
        return tuple(made) if len(made) > 1 else output


def _run(hidden_states: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], layer: nn.Module) -> Tensor:
    """Run another layer on the arguments of this one."""
    output: Tensor = layer(hidden_states, *args, **kwargs)
    return output
