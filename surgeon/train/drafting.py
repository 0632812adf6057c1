"""Training of MTP layers under a frozen model: they learn to draft what it says itself.

In speculative decoding a drafted token counts where the model says the same, so the model is the teacher. The loss is
KL(p ‖ q_k), the mean over depths k, where q_k is what depth k drafts for a token, and p what the model says of it once
it has read all before it. DeepSeek-V3 (section 2.2) trains on the text's own tokens instead, together with the model.

Shapes: B sequences of T tokens, D the hidden size, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.utils import ModelOutput

from surgeon.common.distributed import summed
from surgeon.data.packing import IGNORED_LABEL, PackedSequence, batch_of
from surgeon.models.mtp import draft_states

# Drafts whose logits are computed at a time.
_DRAFTS = 512
# Of what a draft's states may change where other documents of its sequence change.
_TOLERANCE = 1e-3


class Drafting(nn.Module):
    """A frozen model with its MTP layers, whose forward gives the loss of these.

    `main` stays in eval mode. Embeddings and head of `mtp` (transformers' `MtpModel`) are the main model's.
    """

    def __init__(self, main: Any, mtp: Any) -> None:
        super().__init__()
        self.main, self.mtp, self.config = main, mtp, main.config
        main.requires_grad_(False)

    def train(self, mode: bool = True) -> Drafting:
        """Set the mode of the MTP layers."""
        super().train(mode)
        self.main.eval()
        return self

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor,
        num_items_in_batch: Tensor | int | None = None,
        **_: Any,
    ) -> ModelOutput:
        """The loss of a micro-batch (each B T): a mean over its drafts, or a sum divided by `num_items_in_batch`."""
        found = self.divergences(input_ids, position_ids, labels)
        sums, counts = torch.stack([each[0] for each in found]), [each[1] for each in found]
        if num_items_in_batch is not None:
            return ModelOutput(loss=sums.mean() / num_items_in_batch)
        return ModelOutput(loss=(sums / sums.new_tensor(counts).clamp(min=1)).mean())

    def divergences(self, ids: Tensor, positions: Tensor, labels: Tensor) -> list[tuple[Tensor, int]]:
        """For each depth the sum of KL(p ‖ q) in nats, and over how many drafts: of tokens whose label counts.

        All that a draft is made of is in the token's own document.
        """
        with torch.no_grad():
            said = self.main(input_ids=ids, position_ids=positions, use_cache=False, output_hidden_states=True)
        found = []
        for depth, states in enumerate(draft_states(self.mtp, said.hidden_states[-1], ids, positions)):
            ahead = depth + 2
            within = positions[:, ahead:] - positions[:, :-ahead] == ahead
            counts = within & (labels[:, ahead:] != IGNORED_LABEL)
            drafted, teacher = states[:, : ids.shape[1] - ahead][counts], said.logits[:, ahead - 1 : -1][counts]
            found.append((self._divergence(drafted, teacher), len(drafted)))
        return found

    def _divergence(self, states: Tensor, teacher: Tensor) -> Tensor:
        """The sum over N drafts of KL(p ‖ q): `states` N D, the teacher's logits N V; some logits at a time."""
        # Also where there is none: every process has a gradient.
        total = states.float().sum() * 0
        for part, said in zip(torch.split(states, _DRAFTS), torch.split(teacher, _DRAFTS), strict=True):
            total = total + checkpoint(self._of_some, part, said, use_reentrant=False)
        return total

    def _of_some(self, states: Tensor, teacher: Tensor) -> Tensor:
        drafts = self.mtp._project_to_logits(states).float().log_softmax(dim=-1)
        return F.kl_div(drafts, teacher.float().log_softmax(dim=-1), log_target=True, reduction="sum")

    @torch.no_grad()
    def crosses_documents(self, ids: Tensor) -> bool:
        """Whether drafts change where another document of their sequence does; `ids` (T) are any tokens."""
        half = len(ids) // 2
        positions = torch.cat([torch.arange(half), torch.arange(len(ids) - half)])[None].to(ids.device)
        found = []
        for first in (ids[:half], ids[:half].flip(0)):
            given = torch.cat([first, ids[half:]])[None]
            said = self.main(input_ids=given, position_ids=positions, use_cache=False, output_hidden_states=True)
            drafted = draft_states(self.mtp, said.hidden_states[-1], given, positions)
            found.append([states[:, half:].float() for states in drafted])
        return any(float((a - b).norm()) > _TOLERANCE * float(a.norm()) for a, b in zip(*found, strict=True))


@torch.no_grad()
def drafting_losses(
    model: Drafting,
    validation: Mapping[str, Sequence[PackedSequence]],
    *,
    process: int = 0,
    processes: int = 1,
) -> dict[str, float]:
    """Return each source's loss: KL(p ‖ q) in nats a draft, the mean over depths; arguments as `losses_by_source`."""
    device, training = next(model.parameters()).device, model.training
    model.eval()
    losses = {}
    for name, sequences in validation.items():
        totals = torch.zeros(model.mtp.num_mtp_layers, 2, dtype=torch.float64)
        for one in sequences[process::processes]:
            batch = {key: value.to(device) for key, value in batch_of([one], domains=False).items()}
            found = model.divergences(batch["input_ids"], batch["position_ids"], batch["labels"])
            totals += torch.tensor([[float(total), count] for total, count in found], dtype=torch.float64)
        sums, counts = summed(totals.numpy(), processes, device).T
        losses[name] = float((sums / counts.clip(min=1)).mean())
    model.train(training)
    return losses
