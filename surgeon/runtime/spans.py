"""Blocks that native code does not keep in one module: grafts act where such a block ends.

In BERT one module holds the FFN's first matrix; another one holds the second matrix, adds the residual and
normalises. OPT's layers call the two matrices themselves. So two modules of a block change their classes. The start,
the module that reads the block's input, keeps this input. The end, the module whose output is added to the residual
stream, adds the output of grafts to its own, before any norm of the sum.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from .graft import Graft, gated_beside, here
from .layers import Seat, UpcycledLayer, one_tensor, with_rest
from .rules import Surgery


class SpanStart(nn.Module):
    """A mixin before the native module at a block's start: it keeps the block's input for the block's end."""

    # Quantisers leave modules with this mark: a quantised matrix in its place would lose the grafts.
    spanning = True
    # The block's usual name, under which the end finds the kept input; the name of this module's input argument.
    role: str
    reads: str

    def open(self, role: str) -> None:
        """Make this module the start of the block `role`."""
        self.role = role
        self.reads = next(iter(inspect.signature(super().forward).parameters))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Keep the input in the layer's frame; return the native output."""
        frame = here.frame
        if frame is not None:
            vars(frame)[self.role] = args[0] if args else kwargs[self.reads]
        return super().forward(*args, **kwargs)


class SpanEnd(nn.Module):
    """A mixin before the native module at a block's end, whose output is added to the residual stream."""

    spanning = True
    grafts: tuple[Graft, ...]
    role: str
    seat: nn.Module

    def carry(self, role: str, seat: nn.Module, grafts: tuple[Graft, ...]) -> None:
        """Make this module the end of the block `role`, with `grafts` whose modules lie in `seat`."""
        self.role = role
        # Set past nn.Module, which would register the seat as a submodule here.
        self.__dict__["seat"] = seat
        self.grafts = grafts

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the native output as grafts change it; raise RuntimeError outside the layer's forward."""
        output, rest = one_tensor(super().forward(*args, **kwargs))
        frame, shape = here.frame, output.shape
        if frame is None:
            raise RuntimeError("a block with grafts was called outside its layer, which brings what they need")
        x: Tensor = vars(frame)[self.role]
        if x.ndim == 2:
            # One row for each token (OPT).
            x = x.view(frame.shape)
        if frame.mixing is not None:
            _cover(frame.mixing, x)
        output = output.reshape(x.shape)
        for graft in () if frame.off else self.grafts:
            output = gated_beside(graft, self.seat, x, output, frame)
        return with_rest(output.reshape(shape), rest)


def _cover(mixing: Any, x: Tensor) -> None:
    """Count as padding the positions that a model appends to its inputs to fill a window or block."""
    missing = x.shape[1] - mixing.valid.shape[1]
    if missing > 0:
        mixing.valid = F.pad(mixing.valid, (0, missing))


class SpannedLayer(UpcycledLayer):
    """A mixin before a native layer with blocks that are not one module: it lets grafts act at their ends."""

    # For each block: path, native class and new class of its start; the same of its end; its usual name.
    spans: ClassVar[
        tuple[tuple[str, type[nn.Module], type[nn.Module], str, type[nn.Module], type[nn.Module], str], ...]
    ]

    def compose(self, config: Any, index: int, surgery: Surgery) -> None:
        """Add grafts to the layer; raise ValueError where `chunk_size_feed_forward` would cut the input of the FFN."""
        self.open_spans(index, surgery)
        super().compose(config, index, surgery)
        if "mlp" in self.carrying and getattr(config, "chunk_size_feed_forward", None):
            raise ValueError("config.chunk_size_feed_forward cuts what grafts look at as a whole; set it to 0")

    def open_spans(self, index: int, surgery: Surgery) -> None:
        """Change the classes of the start and the end of each block to which a graft adds something."""
        held = dict(self.named_modules())
        self.carrying: set[str] = set()
        for reads, reader, start, writes, writer, end, role in self.spans:
            first: Any = held.get(reads)
            last: Any = held.get(writes)
            beside = tuple(graft for graft in surgery.rules if role in graft.blocks(surgery, index))
            fits = (type(first), type(last)) == (reader, writer)
            if not fits or not beside:
                continue
            first.__class__, last.__class__ = start, end
            if role not in self._modules:
                setattr(self, role, Seat())
            first.open(role)
            last.carry(role, getattr(self, role), beside)
            self.carrying.add(role)
