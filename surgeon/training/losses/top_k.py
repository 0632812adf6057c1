"""A teacher's predictions in short: at each token its k likeliest next tokens, and one bucket for all the others.

Shapes: N tokens, V vocabulary, k kept of it.

Let S be the teacher's k likeliest tokens, p the teacher's distribution and q the model's, p_R and q_R their sums over
the tokens outside S. The divergence of the coarsened distributions,

    KL_k(p ‖ q) = Σ_{i ∈ S} p_i log(p_i / q_i) + p_R log(p_R / q_R),

is a KL, so it is never negative, and 0 where they agree. KL(p ‖ q) exceeds it by p_R times the KL of p and q among the
tokens outside S (chain rule). So it is a lower bound, which rises with k and is KL(p ‖ q) itself at k = V.

It equals the plain KL between p̃ and q. p̃ has the teacher's probabilities in S, and distributes p_R outside S in the
model's own proportions: p̃_i = p_R q_i / q_R. The gradients with respect to the logits are equal too, with p̃ as a
constant: q − p̃.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TopK:
    """The likeliest next tokens at N tokens: `ids` (N k), int32, their `log_probs` (N k), and `rest` (N), log p_R.

    Both are float32, as computed; `rest` is −∞ where k is the whole vocabulary.
    """

    ids: Tensor
    log_probs: Tensor
    rest: Tensor

    @classmethod
    def of(cls, log_p: Tensor, k: int) -> TopK:
        """Return the k likeliest tokens by log-probabilities, N V, which are overwritten."""
        found = log_p.topk(k, dim=-1)
        # Summed over the other tokens, because 1 − Σ p_i would be only rounding error where the teacher is sure.
        rest = log_p.scatter_(1, found.indices, -torch.inf).logsumexp(-1)
        return cls(found.indices.to(torch.int32), found.values, rest)

    @classmethod
    def joined(cls, parts: Sequence[TopK]) -> TopK:
        """Return the tokens of all parts, one part after another."""
        every = [(part.ids, part.log_probs, part.rest) for part in parts]
        return cls(*(torch.cat(each) for each in zip(*every, strict=True)))

    def __len__(self) -> int:
        return len(self.rest)

    def __getitem__(self, tokens: slice) -> TopK:
        return TopK(self.ids[tokens], self.log_probs[tokens], self.rest[tokens])

    def to(self, device: torch.device) -> TopK:
        """Return the same values on a device."""
        return TopK(self.ids.to(device), self.log_probs.to(device), self.rest.to(device))

    def dealt_out(self, log_q: Tensor) -> Tensor:
        """Return log p̃, N V, by the model's log-probabilities `log_q`, N V.

        The kept tokens have the teacher's values; p_R is distributed over the other tokens in proportion to q.
        """
        ids = self.ids.long()
        others = log_q.scatter(1, ids, -torch.inf).logsumexp(-1)
        # Where there are no other tokens this is NaN, and every entry is overwritten.
        return (log_q + (self.rest - others)[:, None]).scatter_(1, ids, self.log_probs)
