"""Decoder layers and their blocks with grafts, mixed in before a family's native ones.

A layer's `forward` is a pure function of tensors, so gradient checkpointing may run it again; `__call__`
carries what crosses layers (a router's distribution, the auxiliary losses) in and out of the forward's `Flow`. What
carries gradient goes in by position and comes out as a result; a frame shows it to the layer's own modules.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from .graft import Frame, Graft, current_frame, enter_frame, only_where
from .losses import Flow
from .rules import Surgery


def beside_block(block: Any, grafts: tuple[Graft, ...], x: Tensor, output: Tensor) -> Tensor:
    """What `grafts` that stand at `block` make of its output for x, as far as they take part; B T D both."""
    frame = current_frame()
    if frame is not None and frame.off:
        return output
    for graft in grafts:
        grown = graft.beside(block, x, output, frame)
        output = grown if frame is None else frame.kept(graft.name, grown, output)
    return output


# A site adds what stands beside its block in `__call__` and leaves `forward` native: vLLM reads the source of a class's
# `forward` to find where attention is computed and which projections it may fuse.
class Site(nn.Module):
    """Mixed in before a native block: `grafts` stand beside it."""

    grafts: tuple[Graft, ...]

    def beside(self, hidden_states: Tensor, output: Tensor) -> Tensor:
        """What grafts make of the block's output for `hidden_states`, B T D both."""
        return beside_block(self, self.grafts, hidden_states, output)


# No `nn.Module` in its own bases: where transformers finds such a class of that name in a model's file, it takes the
# attention for hand-written and ignores `set_attn_implementation`.
class GraftedLayer(nn.Module):
    """A native layer into which grafts put their modules; `grafts` are those that have a part in it."""

    grafts: tuple[Graft, ...]
    # The class of a native layer that stands inside another.
    branch_class: ClassVar[type[BranchLayer]]

    def _weigh(self, surgery: Surgery, layer_idx: int) -> None:
        """Keep what is asked for of losses."""


class BranchLayer(GraftedLayer):
    """A native layer inside a trunk layer, at its own index of cache and masks.

    The trunk layer around it is checkpointed as a whole; a second checkpoint inside would only compute twice.
    """

    @property
    def gradient_checkpointing(self) -> bool:
        """Always off; what a model-wide switch sets is ignored here."""
        return False

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, value: bool) -> None:
        return


class UpcycledLayer(GraftedLayer):
    """A trunk layer: native, with what the surgery put into it and beside it."""

    # Whether the layer makes the routing, and the gate's decision, that it and those above it read.
    routes = False
    decides = False
    # Names of the grafts here that take part only where the gate is open; whether the whole layer does so.
    gated: frozenset[str] = frozenset()
    layer_gated = False

    def _weigh(self, surgery: Surgery, layer_idx: int) -> None:
        # Whether a surgery inserted the layer whole.
        self.inserted = layer_idx in surgery.inserted
        self.loss_weights: dict[str, float] = {}
        for graft in surgery.rules:
            self.loss_weights |= graft.weights(surgery, layer_idx)

    def __call__(self, hidden_states: Tensor, *args: Any, surgery_flow: Flow | None = None, **kwargs: Any) -> Any:
        """Run the layer; `surgery_flow` brings what crosses layers and takes the losses."""
        if surgery_flow is None or not (self.grafts or surgery_flow.off):
            return super().__call__(hidden_states, *args, **kwargs)
        if surgery_flow.off:
            return super().__call__(hidden_states, None, *args, off=True, **kwargs)
        output, *told = super().__call__(
            hidden_states,
            surgery_flow.routing,
            *args,
            valid_tokens=surgery_flow.valid,
            token_domains=surgery_flow.domains,
            mixing=surgery_flow.mixing,
            gating=surgery_flow.gating,
            on=surgery_flow.on,
            in_flow=True,
            **kwargs,
        )
        if self.routes:
            surgery_flow.routing = told.pop(0)
        if self.decides:
            surgery_flow.on = told.pop(0)
        if told:
            surgery_flow.add(dict(zip(self.loss_weights, told, strict=True)), self.loss_weights)
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
            output = super().forward(hidden_states, *args, **kwargs)
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
        made = [output]
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
