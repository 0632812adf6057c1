"""What a teacher says, kept short: at each token its k likeliest next tokens, and one bucket for all the others.

Shapes: N tokens, V vocabulary, k kept of it.

Let S be the teacher's k likeliest tokens, p its distribution and q the model's, p_R and q_R the sums of both over the
tokens outside of S. The divergence of the coarsened distributions,

    KL_k(p ‖ q) = Σ_{i ∈ S} p_i log(p_i / q_i) + p_R log(p_R / q_R),

is a KL, so it is 0 where they agree and never negative. KL(p ‖ q) exceeds it by p_R times the KL of p and q within the
others (chain rule), so it is a lower bound that rises with k to KL(p ‖ q) itself, at k = V; the reverse likewise.

It is the plain KL beside p̃, which has the teacher's numbers in S, and outside of it p_R dealt out in the model's own
proportions: p̃_i = p_R q_i / q_R. So are its gradients with respect to the logits, p̃ taken as given: q − p̃, of the
reverse q (log q − log p̃ − KL).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TopK:
    """The likeliest next tokens of N tokens: `ids` (N k), int32, their `log_probs` (N k), and `rest` (N), log p_R.

    Float32, as computed; `rest` is −∞ where k is the whole vocabulary.
    """

    ids: Tensor
    log_probs: Tensor
    rest: Tensor

    @classmethod
    def of(cls, log_p: Tensor, k: int) -> TopK:
        """Take them from log-probabilities, N V, which are used up."""
        found = log_p.topk(k, dim=-1)
        # Summed over the others, as 1 − Σ p_i would be rounding alone where the teacher is sure.
        rest = log_p.scatter_(1, found.indices, -torch.inf).logsumexp(-1)
        return cls(found.indices.to(torch.int32), found.values, rest)

    @classmethod
    def joined(cls, parts: Sequence[TopK]) -> TopK:
        """The tokens of all parts, one after the other."""
        every = [(part.ids, part.log_probs, part.rest) for part in parts]
        return cls(*(torch.cat(each) for each in zip(*every, strict=True)))

    def __len__(self) -> int:
        return len(self.rest)

    def __getitem__(self, tokens: slice) -> TopK:
        return TopK(self.ids[tokens], self.log_probs[tokens], self.rest[tokens])

    def to(self, device: torch.device) -> TopK:
        """The same on a device."""
        return TopK(self.ids.to(device), self.log_probs.to(device), self.rest.to(device))

    def dealt_out(self, log_q: Tensor) -> Tensor:
        """log p̃, N V: the teacher's, and outside of what is kept in the proportions of the model's `log_q`, N V."""
        ids = self.ids.long()
        others = log_q.scatter(1, ids, -torch.inf).logsumexp(-1)
        # Where there are no others this is no number, and is overwritten everywhere.
        return (log_q + (self.rest - others)[:, None]).scatter_(1, ids, self.log_probs)
