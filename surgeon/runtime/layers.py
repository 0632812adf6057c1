"""Layers and their blocks with grafts, mixed in before native ones; built as native ones, they change their class.

A layer's `forward` is a pure function of tensors, so gradient checkpointing may run it again; `__call__` carries what
crosses layers (a router's distribution, the auxiliary losses) in and out of the forward's `Flow`. Native code passes
nothing of ours to its layers, so the flow reaches them through this thread. What carries gradient goes in by position
and comes out as a result; a frame shows it to the layer's own modules.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from .graft import Frame, Graft, current_frame, enter_frame, only_where
from .losses import Flow
from .rules import Surgery


class _Forward(threading.local):
    flow: Flow | None = None
    # What the layer that runs returned with its hidden states.
    rest: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        """As `_Active`."""
        return type(self), ()


_forward = _Forward()


def current_flow() -> Flow | None:
    """The flow of the forward that this thread runs, if it has one."""
    return _forward.flow


@contextmanager
def in_flow(flow: Flow | None) -> Iterator[None]:
    """Let the decoder and the layers that this thread runs find `flow`."""
    previous = _forward.flow
    _forward.flow = flow
    try:
        yield
    finally:
        _forward.flow = previous


Rest = tuple[Any, ...] | list[Any] | None


def one_tensor(made: Any) -> tuple[Tensor, Rest]:
    """A module's output, and what came with it; None where it came alone."""
    return (made[0], made[1:]) if isinstance(made, tuple | list) else (made, None)


def with_rest(output: Tensor, rest: Rest) -> Any:
    """The output in the form in which it came."""
    if rest is None:
        return output
    return [output, *rest] if isinstance(rest, list) else (output, *rest)


def beside_block(block: Any, grafts: tuple[Graft, ...], x: Tensor, output: Tensor) -> Tensor:
    """What `grafts` that stand at `block` make of its output for x, as far as they take part; B T D both."""
    frame = current_frame()
    if frame is not None and frame.off:
        return output
    for graft in grafts:
        if frame is not None and frame.skips(graft):
            continue
        grown = graft.beside(block, x, output, frame)
        output = grown if frame is None else frame.kept(graft.name, grown, output)
    return output


class Seat(nn.Module):
    """Where grafts of a block stand that the model calls by another name."""


# A site adds what stands beside its block in `__call__` and leaves `forward` native: vLLM reads the source of a class's
# `forward` to find where attention is computed and which projections it may fuse.
class Site(nn.Module):
    """Mixed in before a native block of any form: what it reads comes first, what it writes first in what it returns.

    Grafts stand at the block's usual name, `self_attn` or `mlp`: at the block itself or, where the model calls it
    otherwise, at a `Seat` beside it.
    """

    grafts: tuple[Graft, ...]
    seat: nn.Module
    # What the block calls its input.
    reads: str

    def carry(self, seat: nn.Module, grafts: tuple[Graft, ...]) -> None:
        """Take grafts that stand at `seat`."""
        # Past nn.Module, which would take the seat for a part of the block.
        self.__dict__["seat"] = seat
        self.reads = next(iter(inspect.signature(self.forward).parameters))
        self.grafts = grafts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The native output with what grafts make of it; experts may give it as one row a token."""
        output, rest = one_tensor(super().__call__(*args, **kwargs))
        x = args[0] if args else kwargs[self.reads]
        shape = output.shape
        output = beside_block(self.seat, self.grafts, x, output.reshape(x.shape))
        return with_rest(output.reshape(shape), rest)


class GraftedLayer(nn.Module):
    """A native layer, built already, into which grafts put their modules; `grafts` are those that have a part in it."""

    # None where transformers builds another layer of this class: for MTP it takes the class of the model's last one.
    grafts: tuple[Graft, ...] = ()
    # Of each block that can carry grafts: its name, its native class, its usual name, and its class with grafts.
    sites: ClassVar[tuple[tuple[str, type[nn.Module], str, type[Site]], ...]]
    # The config field that names the backbone's activation.
    activation_field: ClassVar[str]

    def compose(self, config: Any, index: int, surgery: Surgery) -> None:
        """Let grafts in; `index` is the layer's, of trunk or tail."""
        self.open_blocks(index, surgery)
        asked = {role for graft in surgery.rules for role in graft.blocks(surgery, index)}
        if lacking := sorted(role for role in asked if not self.carries(role)):
            raise ValueError(f"config.surgery: layer {index} has no `{lacking[0]}` beside which a graft could stand")
        self.grafts = tuple(graft for graft in surgery.rules if graft.attach(self, config, index, surgery))

    def open_blocks(self, index: int, surgery: Surgery) -> None:
        """Make the blocks beside which grafts stand able to carry them."""
        for name, native, role, kind in self.sites:
            beside = tuple(graft for graft in surgery.rules if role in graft.blocks(surgery, index))
            found = self._modules.get(name)
            if type(found) is not native or not beside:
                continue
            found.__class__ = kind
            block: Any = found
            seat = block if name == role else Seat()
            setattr(self, role, seat)
            vars(seat)["activation_field"] = self.activation_field
            block.carry(seat, beside)

    def carries(self, role: str) -> bool:
        """Whether a block can carry grafts, by its usual name."""
        return any(kept == role and isinstance(self._modules.get(name), kind) for name, _, kept, kind in self.sites)


class UpcycledLayer(GraftedLayer):
    """A trunk layer, with what the surgery put into it and beside it."""

    # Whether the layer makes the routing, and the gate's decision, that it and those above it read.
    routes = False
    decides = False
    # Names of the grafts here that take part only where the gate is open; whether the whole layer does so.
    gated: frozenset[str] = frozenset()
    layer_gated = False
    # Whether a surgery inserted the layer whole.
    inserted = False

    def compose(self, config: Any, index: int, surgery: Surgery) -> None:
        """Let grafts in."""
        super().compose(config, index, surgery)
        self.inserted = index in surgery.inserted
        self.loss_weights: dict[str, float] = {}
        for graft in surgery.rules:
            self.loss_weights |= graft.weights(surgery, index)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer in this thread's flow, which takes the losses; what it returns is of the native form."""
        hidden_states, args = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())
        flow = current_flow()
        if flow is None or not (self.grafts or flow.off):
            output = super().__call__(hidden_states, None, *args, **kwargs)
        elif flow.off:
            output = super().__call__(hidden_states, None, *args, off=True, **kwargs)
        else:
            output = self._call_in(flow, hidden_states, *args, **kwargs)
        rest, _forward.rest = _forward.rest, None
        return with_rest(output, rest)

    def _call_in(self, flow: Flow, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the layer with what `flow` brings, and leave there what is for the layers above, and the losses."""
        output: Tensor
        output, *made = super().__call__(
            hidden_states,
            flow.routing,
            *args,
            valid_tokens=flow.valid,
            token_domains=flow.domains,
            mixing=flow.mixing,
            gating=flow.gating,
            on=flow.on,
            in_flow=True,
            **kwargs,
        )
        if self.routes:
            flow.routing = made.pop(0)
        if self.decides:
            flow.on = made.pop(0)
        if made:
            flow.add(dict(zip(self.loss_weights, made, strict=True)), self.loss_weights)
        return output

    def forward(
        self,
        hidden_states: Tensor,
        routing: Tensor | None = None,
        *args: Any,
        valid_tokens: Tensor | None = None,
        token_domains: Tensor | None = None,
        mixing: Any = None,
        gating: Any = None,
        on: Tensor | None = None,
        off: bool = False,
        in_flow: bool = False,
        **kwargs: Any,
    ) -> Any:
        """The layer's output, B T D; in a flow also routing (B T slots) and gate (B T), where made here, and losses.

        Losses are vectors, one for each of `loss_weights`, or none without `valid_tokens` (B T). The result is flat:
        what is nested gets no gradient from reentrant checkpointing. With grafts `off` the output is the base's.
        """
        frame = Frame(valid_tokens, token_domains, routing, mixing, gating, on, self.gated, off)
        grafts = () if off else self.grafts
        for graft in grafts:
            graft.before(self, hidden_states, frame)
        previous = enter_frame(frame)
        try:
            output, _forward.rest = one_tensor(super().forward(hidden_states, *args, **kwargs))
            run = partial(_run, hidden_states, args, kwargs)
            for graft in grafts:
                output = frame.kept(graft.name, graft.after(self, hidden_states, output, frame, run), output)
        finally:
            enter_frame(previous)
        if off:
            # An inserted layer was run all the same: its keys and values fill its place in a cache.
            return hidden_states if self.inserted else output
        if self.layer_gated:
            output = only_where(frame.on, output, hidden_states)
        if not in_flow:
            return output
        made: list[Any] = [output]
        if self.routes:
            made.append(frame.routing)
        if self.decides:
            made.append(frame.on)
        if valid_tokens is None:
            return tuple(made)
        return (*made, *(frame.measured(name, valid_tokens) for name in self.loss_weights))


def _run(hidden_states: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], layer: nn.Module) -> Tensor:
    output: Tensor = layer(hidden_states, *args, **kwargs)
    return output
