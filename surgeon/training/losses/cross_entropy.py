"""The loss of a language model without all of its logits in memory, which a large vocabulary makes large.

The head and the loss are computed together, some tokens at a time, as in liger-kernel. The logits of a chunk give its
loss and at once its part of the gradient, and are then freed. A model keeps its own forward, which includes auxiliary
losses: during a training step only its head is replaced by the identity, and its loss function by the one here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from surgeon.data.packing import IGNORED_LABEL
from surgeon.errors import BadInput, SurgeonError

CrossEntropy = Literal["torch", "chunked"]

# Bytes of one chunk's float32 logits: enough rows to keep a GPU busy, still 256 rows at a vocabulary of 128k tokens.
CHUNK_BYTES = 2**27

# `auto`: where all logits are at most this large, chunks would save nothing that matters.
_WHOLE_BYTES = 2**26

_FLOAT32 = 4

# Largest relative difference from the model's own loss: some models compute soft caps in bfloat16, not in float32.
_TOLERANCE = 1e-2

_PROBED = 64


# A loss of some rows, from the number of the first row and the rows' float32 logits: its sum over the rows, and a
# function that returns its gradient with respect to the logits, and may overwrite them.
RowsLoss = Callable[[int, Tensor], tuple[Tensor, Callable[[], Tensor]]]


class ChunkedLoss(torch.autograd.Function):
    """The sum over rows of a loss of the logits cap(h Wᵀ), with rows h (N D) and head W (V D); a float32 number.

    cap(x) is c · tanh(x / c), or x without a cap. Logits are computed in the dtype of h, as the head does; all that
    follows is float32. ∂/∂logits is computed together with the loss, so no logits are kept. Only h and W get a
    gradient.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, loss: RowsLoss, cap: float | None, rows: int) -> Tensor:
        """Compute the loss and the gradients, `rows` rows at a time."""
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # In float32, because bfloat16 would round this sum at each chunk.
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for begin in range(0, len(hidden), rows):
            part = hidden[begin : begin + rows]
            logits, slope = capped_logits(part, weight, cap)
            found, gradient_of = loss(begin, logits)
            total += found
            if of_hidden is None and of_weight is None:
                continue
            gradient = gradient_of()
            if slope is not None:
                gradient.mul_(slope)
            gradient = gradient.to(hidden.dtype)
            if of_hidden is not None:
                torch.mm(gradient, weight, out=of_hidden[begin : begin + rows])
            if of_weight is not None:
                of_weight += gradient.T @ part
        ctx.save_for_backward(of_hidden, of_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        """Return the gradients of h and W, times the upstream gradient; None where no gradient is needed."""
        of_hidden, of_weight = ctx.saved_tensors
        scale = upstream[0]
        return (
            None if of_hidden is None else of_hidden * scale.to(of_hidden.dtype),
            None if of_weight is None else (of_weight * scale).to(ctx.weight_dtype),
            None,
            None,
            None,
        )


def next_labels(labels: Tensor) -> Tensor:
    """Return at each place the label of the next place, B T; the last place has IGNORED_LABEL."""
    return F.pad(labels, (0, 1), value=IGNORED_LABEL)[..., 1:]


def capped_logits(hidden: Tensor, weight: Tensor, cap: float | None) -> tuple[Tensor, Tensor | None]:
    """Return (cap(h Wᵀ) in float32, the derivative of cap there); without a cap, (h Wᵀ, None)."""
    logits = (hidden @ weight.T).float()
    if cap is None:
        return logits, None
    logits = logits.div_(cap).tanh_()
    slope = 1 - logits.square()
    return logits.mul_(cap), slope


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, cap: float | None = None, rows: int | None = None
) -> Tensor:
    """Sum the cross-entropy in nats, float32, without all logits in memory.

    Args:
        hidden: N D, the head's input.
        weight: V D, the head.
        labels: N, int64; rows with the label −100 do not count and are not computed.
        cap: a final logit soft cap.
        rows: rows of logits in memory at most (default: 128 MiB of them in float32).
    """
    counted = labels != IGNORED_LABEL
    rows = rows or max(1, CHUNK_BYTES // (_FLOAT32 * len(weight)))
    wanted = labels[counted]

    def loss(begin: int, logits: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """Return (Σ −log softmax at the labels, a function that returns its gradient)."""
        at = wanted[begin : begin + rows, None]
        normaliser = logits.logsumexp(-1, keepdim=True)
        found = (normaliser - logits.gather(1, at)).sum()

        def gradient() -> Tensor:
            """Return softmax − one-hot, which overwrites the logits."""
            softmax = logits.sub_(normaliser).exp_()
            return softmax.scatter_add_(1, at, softmax.new_full((1, 1), -1.0).expand_as(at))

        return found, gradient

    total: Tensor = ChunkedLoss.apply(hidden[counted], weight, loss, cap, rows)  # type: ignore[no-untyped-call]
    return total


def whole_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, *, cap: float | None = None) -> Tensor:
    """Sum the cross-entropy with all logits at once, by torch; arguments are as in `chunked_cross_entropy`."""
    logits = (hidden @ weight.T).float()
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    return F.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")


def choose(setting: CrossEntropy | Literal["auto"], *, tokens: int, vocabulary: int) -> CrossEntropy:
    """Return the implementation that the config's `cross_entropy` selects for a micro-batch of `tokens` tokens."""
    if setting == "auto":
        return "chunked" if _FLOAT32 * tokens * vocabulary > _WHOLE_BYTES else "torch"
    return setting


_SUMS: dict[CrossEntropy, Callable[..., Tensor]] = {
    "torch": whole_cross_entropy,
    "chunked": chunked_cross_entropy,
}


class FusedHead:
    """The head and the loss of a causal language model, computed together inside `armed()`.

    `beside`, where set, receives the head's input (B T D) and returns a term that is added to the loss. `left_out`,
    where set, marks the sequences (B, bool) whose labels have no part in the sum; the mean is still over all labels.
    """

    beside: Callable[[Tensor], Tensor] | None = None
    left_out: Tensor | None = None

    def __init__(self, model: Any, kind: CrossEntropy) -> None:
        """Take a transformers causal language model. Raises BadInput where its head is not linear without bias."""
        self.model = model
        self.head = model.get_output_embeddings()
        self.cap: float | None = getattr(model.config, "final_logit_softcapping", None)
        self.sum = _SUMS[kind]
        if not isinstance(self.head, torch.nn.Linear) or self.head.bias is not None:
            raise BadInput(
                f"`cross_entropy: {kind}` needs a linear head without bias, which this model has not; use torch"
            )

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """Make a forward with labels return this loss, and the head's input in place of logits, within the context."""
        config, plain = self.model.config, self.model.loss_function
        self.head.forward = lambda hidden: hidden
        self.model.loss_function = self._loss
        if self.cap is not None:
            config.final_logit_softcapping = None
        try:
            yield
        finally:
            del self.head.forward
            self.model.loss_function = plain
            if self.cap is not None:
                config.final_logit_softcapping = self.cap

    def nats(self, labels: Tensor, **given: Tensor) -> Tensor:
        """Return Σ −log p of `labels` in a forward on `given`, without the model's other losses.

        `labels` has the label of the next token at each place. The sum is computed inside the model's forward, because
        sharded weights are gathered only there.
        """
        with self.armed():
            self.head.forward = lambda hidden: self.sum(
                hidden.reshape(-1, hidden.shape[-1]), self.head.weight, labels, cap=self.cap
            )
            found: Tensor = self.model(**given, use_cache=False).logits
        return found

    def _loss(
        self,
        logits: Tensor,
        labels: Tensor,
        *_: Any,
        num_items_in_batch: Tensor | int | None = None,
        shift_labels: Tensor | None = None,
        **__: Any,
    ) -> Tensor:
        """Compute the loss in the place of transformers' ForCausalLMLoss; `logits` are the hidden states (B T D)."""
        if shift_labels is None:
            shift_labels = next_labels(labels)
        wanted = shift_labels.reshape(-1).to(logits.device)
        count = (wanted != IGNORED_LABEL).sum() if num_items_in_batch is None else num_items_in_batch
        if self.left_out is not None:
            # The model may run all sequences as one row.
            tokens = self.left_out.to(wanted.device).repeat_interleave(len(wanted) // len(self.left_out))
            wanted = wanted.masked_fill(tokens, IGNORED_LABEL)
        total = self.sum(logits.reshape(-1, logits.shape[-1]), self.head.weight, wanted, cap=self.cap)
        loss = total / (count.to(total.device) if isinstance(count, Tensor) else count)
        return loss if self.beside is None else loss + self.beside(logits)

    @torch.no_grad()
    def check(self, ids: Tensor) -> None:
        """Compare this loss on `ids` (1 T) with the model's own. Raises SurgeonError where they differ."""
        training = self.model.training
        self.model.eval()
        ids = ids[:, :_PROBED].to(self.head.weight.device)
        expected = float(self.model(input_ids=ids, labels=ids, use_cache=False).loss)
        with self.armed():
            found = float(self.model(input_ids=ids, labels=ids, use_cache=False).loss)
        self.model.train(training)
        if not abs(found - expected) <= _TOLERANCE * max(1.0, abs(expected)):
            raise SurgeonError(
                f"the fused cross-entropy gives {found:.6f} where the model gives {expected:.6f}, so this model does"
                " more to its logits than is known; say `cross_entropy: torch`"
            )
