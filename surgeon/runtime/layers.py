"""Layers and their blocks with grafts, mixed in before native ones; built as native ones, they change their class."""

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
    """Let the decoder and the layers that this thread runs find `flow`."""
    previous, here.flow = here.flow, flow
    try:
        yield
    finally:
        here.flow = previous


def one_tensor(made: Any) -> tuple[Tensor, Any]:
    """A module's output, and what came with it; None where it came alone."""
    return (made[0], made[1:]) if isinstance(made, tuple | list) else (made, None)


def with_rest(output: Tensor, rest: Any) -> Any:
    """The output in the form in which it came."""
    return output if rest is None else type(rest)([output, *rest])


class Seat(nn.Module):
    """Where grafts of a block stand that the model calls by another name."""


# A site adds what stands beside its block in `__call__` and leaves `forward` native: vLLM reads the source of a class's
# `forward` to find where attention is computed and which projections it may fuse.
class Site(nn.Module):
    """Mixed in before a native block: what it `reads` comes first, what it writes first in what it returns.

    Grafts stand in the block itself, or at its `seat` where it has another name than they know it by.
    """

    grafts: tuple[Any, ...]
    seat: Any = None
    reads: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The native output with what grafts make of it; experts may give it as one row a token."""
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
    """A native layer into which grafts put their modules; `grafts` are those that have a part in it.

    `forward` is a pure function of tensors, so that gradient checkpointing may run it again; `__call__` carries what
    crosses layers in and out of this thread's flow, as native code passes nothing of ours. `sites` are blocks that can
    carry grafts: path, native class, the name by which grafts know them, and class with grafts.
    """

    # None where transformers builds another layer of this class: for MTP it takes the class of the model's last one.
    grafts: tuple[Any, ...] = ()
    sites: ClassVar[tuple[tuple[str, Any, str, Any], ...]] = ()
    activation_field: ClassVar[str]
    # Whether the layer makes the routing that it and those above it read.
    routes = False
    # Whether it makes the gate's decision; the grafts here that take part only where that is open, by their names;
    # whether the whole layer does so.
    decides = False
    gated: frozenset[str] = frozenset()
    layer_gated = False
    # Whether the base does not have it.
    inserted = False

    def compose(self, config: Any, index: int, surgery: Surgery) -> None:
        """Let grafts in; `index` is the layer's, of trunk or tail."""
        # Blocks beside which grafts stand become able to carry them.
        for name, native, role, kind in self.sites:
            found: Any = dict(self.named_modules()).get(name)
            beside = tuple(graft for graft in surgery.rules if role in graft.blocks(surgery, index))
            if type(found) is native and beside:
                found.__class__ = kind
                found.grafts = beside
                found.reads = next(iter(inspect.signature(found.forward).parameters))
                if name != role:
                    setattr(self, role, Seat())
                    # Past nn.Module, which would take the seat for a part of the block.
                    vars(found)["seat"] = getattr(self, role)
        self.loss_weights: dict[str, float] = {}
        self.grafts = tuple(graft for graft in surgery.rules if graft.attach(self, config, index, surgery))
        self.inserted = index in surgery.inserted

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer in this thread's flow, which takes what it leaves; what it returns is of the native form."""
        flow = here.flow if here.flow is not None and (self.grafts or here.flow.off) else None
        # What carries gradient goes in by position, for reentrant checkpointing.
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
        """The layer's output, B T D, then what it leaves in the flow: losses as vectors, one for each weight.

        It is flat: what is nested gets no gradient from reentrant checkpointing. With grafts `off` it is the base's.
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
            # An inserted layer was run all the same: its keys and values fill its place in a cache.
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
    output: Tensor = layer(hidden_states, *args, **kwargs)
    return output
