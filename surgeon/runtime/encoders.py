"""Encoders of any model type with control states: as decoders, but that controls end where a block does.

A block of an encoder need not be a module of its own: in BERT the FFN's first matrix stands in one, its second in
another that adds the residual and normalises. So two modules of a block change class: the one that reads first keeps
what the block reads, and the one whose output is added to the stream adds the control of it: before the sum, and
before a norm of the sum.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from .graft import Graft, current_frame
from .layers import Seat, UpcycledLayer, beside_block, one_tensor, with_rest
from .rules import Surgery


class SpanStart(nn.Module):
    """Mixed in before the native module that reads first: keeps what the block reads for its end."""

    # The block's usual name, by which its end finds it; and what the module calls its input.
    role: str
    reads: str

    def open(self, role: str) -> None:
        """Stand at the beginning of a block."""
        self.role = role
        self.reads = next(iter(inspect.signature(super().forward).parameters))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The native output."""
        frame = current_frame()
        if frame is not None:
            vars(frame)[self.role] = args[0] if args else kwargs[self.reads]
        return super().forward(*args, **kwargs)


class SpanEnd(nn.Module):
    """Mixed in before the native module whose output is added to the stream."""

    grafts: tuple[Graft, ...]
    role: str
    seat: nn.Module

    def carry(self, role: str, seat: nn.Module, grafts: tuple[Graft, ...]) -> None:
        """Take grafts that stand at `seat`, and stand at the end of a block."""
        self.role = role
        # Past nn.Module, which would take the seat for a part of this one.
        self.__dict__["seat"] = seat
        self.grafts = grafts

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The native output with what grafts make of it."""
        output, rest = one_tensor(super().forward(*args, **kwargs))
        frame, shape = current_frame(), output.shape
        if frame is None:
            raise RuntimeError("a block with a control state was called outside its layer, which brings the bank")
        x: Tensor = vars(frame)[self.role]
        if frame.mixing is not None:
            _cover(frame.mixing, x)
        output = beside_block(self.seat, self.grafts, x, output.reshape(x.shape))
        return with_rest(output.reshape(shape), rest)


def _cover(mixing: Any, x: Tensor) -> None:
    """Count as padding the positions that a model adds behind its inputs, up to a whole window or block."""
    missing = x.shape[1] - mixing.valid.shape[1]
    if missing > 0:
        mixing.valid = F.pad(mixing.valid, (0, missing))


class UpcycledEncoderLayer(UpcycledLayer):
    """A native layer whose blocks may end in a control state."""

    # Of each block: its beginning and its end, each as path, native class and class with grafts, and its usual name.
    spans: ClassVar[
        tuple[tuple[str, type[nn.Module], type[nn.Module], str, type[nn.Module], type[nn.Module], str], ...]
    ]
    sites = ()

    def compose(self, config: Any, index: int, surgery: Surgery) -> None:
        """Let grafts in."""
        super().compose(config, index, surgery)
        if "mlp" in self.carrying and getattr(config, "chunk_size_feed_forward", None):
            raise ValueError("config.chunk_size_feed_forward cuts what control states look at as a whole; set it to 0")

    def open_blocks(self, index: int, surgery: Surgery) -> None:
        """Make the blocks beside which grafts stand able to carry them."""
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

    def carries(self, role: str) -> bool:
        """Whether a block can carry grafts, by its usual name."""
        return role in self.carrying
