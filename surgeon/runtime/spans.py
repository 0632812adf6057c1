"""Blocks that are no modules of their own, in encoders and in decoders: grafts stand where such a block ends.

In BERT the FFN's first matrix stands in one module, its second in another that adds the residual and normalises.
OPT's layers call two matrices by themselves. So two modules of a block change class. The one that reads first keeps
what the block reads; the one whose output is added to the stream adds what grafts make of it, before a norm of the
sum.
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
    """Mixed in before the native module that reads first: keeps what the block reads for its end."""

    # Where it is a matrix, one of a quantiser's in its place would lose what stands at the block.
    spanning = True
    # The block's usual name, by which its end finds it; and what the module calls its input.
    role: str
    reads: str

    def open(self, role: str) -> None:
        """Stand at the beginning of a block."""
        self.role = role
        self.reads = next(iter(inspect.signature(super().forward).parameters))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The native output."""
        frame = here.frame
        if frame is not None:
            vars(frame)[self.role] = args[0] if args else kwargs[self.reads]
        return super().forward(*args, **kwargs)


class SpanEnd(nn.Module):
    """Mixed in before the native module whose output is added to the stream."""

    spanning = True
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
        frame, shape = here.frame, output.shape
        if frame is None:
            raise RuntimeError("a block with grafts was called outside its layer, which brings what they need")
        x: Tensor = vars(frame)[self.role]
        if x.ndim == 2:
            # One row a token (OPT).
            x = x.view(frame.shape)
        if frame.mixing is not None:
            _cover(frame.mixing, x)
        output = output.reshape(x.shape)
        for graft in () if frame.off else self.grafts:
            output = gated_beside(graft, self.seat, x, output, frame)
        return with_rest(output.reshape(shape), rest)


def _cover(mixing: Any, x: Tensor) -> None:
    """Count as padding the positions that a model adds behind its inputs, up to a whole window or block."""
    missing = x.shape[1] - mixing.valid.shape[1]
    if missing > 0:
        mixing.valid = F.pad(mixing.valid, (0, missing))


class SpannedLayer(UpcycledLayer):
    """Mixed in before a native layer some of whose blocks are no modules: grafts may stand at their ends."""

    # Of each block: its beginning and its end, each as path, native class and class with grafts, and its usual name.
    spans: ClassVar[
        tuple[tuple[str, type[nn.Module], type[nn.Module], str, type[nn.Module], type[nn.Module], str], ...]
    ]

    def compose(self, config: Any, index: int, surgery: Surgery) -> None:
        """Let grafts in."""
        self.open_spans(index, surgery)
        super().compose(config, index, surgery)
        if "mlp" in self.carrying and getattr(config, "chunk_size_feed_forward", None):
            raise ValueError("config.chunk_size_feed_forward cuts what grafts look at as a whole; set it to 0")

    def open_spans(self, index: int, surgery: Surgery) -> None:
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
