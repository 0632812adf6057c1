"""`preserve: {loss: fisher}`: a penalty pulls the numbers that train back to their values at birth, each in proportion
to its importance for the base's own text (elastic weight consolidation, Kirkpatrick et al., 2017). A step runs no
teacher.

The importance of a number θ_i is F_i = Σ_s (∂ log p(s) / ∂θ_i)² / N, over sequences s with N predicted tokens in all.
In text that the model itself wrote, the gradients of a sequence's tokens are uncorrelated, so F is the diagonal of the
Fisher information per token. The penalty ½ Σ_i F_i (θ_i − θ_i at birth)² is then in nats a token: it is
KL(base ‖ model) to second order, as far as numbers act independently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from surgeon.common.distributed import Ranks, is_sharded
from surgeon.data.packing import IGNORED_LABEL, Mixture, PackedSequence, batch_of, one_pass
from surgeon.errors import BadInput, printable
from surgeon.training.losses.cross_entropy import FusedHead, next_labels
from surgeon.training.processes.sharding import dealt_out, gathered
from surgeon.training.run import Run
from surgeon.training.saved.checkpoints import RunRecord

# A file of the work folder; it is used again only while its digest is the one that the run's record has under the key.
FISHER_FILE, _KEY = "fisher.safetensors", "fisher"


class Anchored:
    """The parameters that train, each with its value at birth and its Fisher information.

    `weight` is the factor of the penalty in the loss.
    """

    def __init__(self, model: nn.Module, fisher: Mapping[str, Tensor], weight: float) -> None:
        """Copy the present values of the parameters that train; `fisher` has their Fisher information by name."""
        self.weight = weight
        self._held = [
            (parameter, parameter.detach().clone(), fisher[name])
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]
        # The unweighted penalty of every step since the last call of `take`.
        self.found: list[Tensor] = []

    @torch.no_grad()
    def pull(self) -> Tensor:
        """Add the penalty's gradient to the parameters' gradients of a whole step; return the weighted penalty.

        All processes call this, and add the same.
        """
        total: Any = 0.0
        for parameter, birth, fisher in self._held:
            moved = parameter.float() - birth.float()
            slope = fisher * moved
            total = total + 0.5 * (slope * moved).sum()
            pulled = (self.weight * slope).to(parameter.dtype)
            parameter.grad = pulled if parameter.grad is None else parameter.grad.add_(pulled)
        term: Tensor = total.full_tensor() if isinstance(total, DTensor) else total
        self.found.append(term)
        return self.weight * term

    def take(self) -> float:
        """Return the unweighted penalty, the mean over the steps since the last call; 0 where there was no step."""
        found, self.found = self.found, []
        return sum(map(float, found)) / max(1, len(found))


def fisher_of(model: Any, run: Run, sequences: int, fused: FusedHead | None) -> dict[str, Tensor]:
    """Estimate the Fisher information of what trains, or load what an earlier call left in the work folder.

    All processes call this, before anything trains; the first one writes. The run's mixture keeps its state.

    Args:
        model: the model at birth, on its device, or sharded.
        run: the run, from whose original text the Fisher information is estimated.
        sequences: about how many sequences of that text are used at most; every source gives equally many.
        fused: the head that computes the loss without all logits; None: the model's own computes it.

    Raises:
        BadInput: no token of the text counts, or a gradient is not finite.
    """
    ranks, work = run.ranks, run.work
    kept: dict[str, Tensor] | None = None
    record = RunRecord.read(work)
    if ranks.leads and record is not None and record.has_kept(_KEY, work, FISHER_FILE):
        kept = safetensors.torch.load_file(work / FISHER_FILE)
    if ranks.leads:
        ranks.send(kept is not None)
    if kept is not None or (not ranks.leads and ranks.receive()):
        return {name: _given_out(kept, name, p) for name, p in model.named_parameters() if p.requires_grad}
    found = estimated(model, original_text(run.data.mixture, sequences), fused, ranks)
    # Sharded values are gathered by all processes.
    whole = {name: tensor.cpu().contiguous() for name, tensor in gathered(found).items()}
    if ranks.leads:
        assert record is not None
        (work / FISHER_FILE).unlink(missing_ok=True)
        safetensors.torch.save_file(whole, work / FISHER_FILE)
        record.keep(_KEY, work, FISHER_FILE)
    return found


def original_text(mixture: Mixture[PackedSequence], count: int) -> list[PackedSequence]:
    """Return about `count` sequences of the original sources, equally many of each and none twice.

    A short source may give fewer. The mixture keeps its state.
    """
    before = mixture.state()
    streams = [stream for stream in mixture.streams if stream.packer.domain == 0]
    found = [sequence for stream in streams for sequence in one_pass(stream, -(-count // len(streams)))]
    mixture.restore(before)
    return found


def estimated(
    model: Any, sequences: Sequence[PackedSequence], fused: FusedHead | None, ranks: Ranks
) -> dict[str, Tensor]:
    """Return F of every parameter that trains, in float32, by name, estimated from `sequences`.

    The other arguments and the errors are those of `fisher_of`.
    """
    batches = [batch_of([sequence], domains=False) for sequence in sequences]
    tokens = sum(int((next_labels(batch["labels"]) != IGNORED_LABEL).sum()) for batch in batches)
    if not tokens:
        raise BadInput("`preserve`: no token of the original text counts, so nothing gives a Fisher; give other text")
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = {name: torch.zeros_like(parameter, dtype=torch.float32) for name, parameter in trained.items()}
    sharded, training = is_sharded(model), model.training
    # With sharded weights all processes compute the gradient of the same sequence, each its shard.
    own = batches if sharded else batches[ranks.rank :: ranks.size]
    model.eval()
    for batch in own:
        nats = _nats(model, fused, {name: tensor.to(model.device) for name, tensor in batch.items()})
        nats.backward()  # type: ignore[no-untyped-call]
        for name, parameter in trained.items():
            if parameter.grad is not None:
                found[name] += parameter.grad.detach().float().square()
                parameter.grad = None
    model.train(training)
    for name, total in found.items():
        if ranks.size > 1 and not sharded:
            torch.distributed.all_reduce(total)
        total.div_(tokens)
        if not bool(gathered(total.isfinite().all())):
            raise BadInput(
                f"{printable(name)}: its gradients on the original text are no finite numbers, so it has no Fisher;"
                " look at that text, or say `dtype: float32`"
            )
    return found


def _nats(model: Any, fused: FusedHead | None, batch: Mapping[str, Tensor]) -> Tensor:
    """Return Σ −log p over a batch's tokens that count, without the losses that the model's layers add in training."""
    labels = next_labels(batch["labels"]).flatten()
    given = {name: batch[name] for name in ("input_ids", "position_ids")}
    if fused is not None:
        return fused.nats(labels, **given)
    logits = model(**given, use_cache=False).logits.float().flatten(0, 1)
    return F.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")


def _given_out(kept: Mapping[str, Tensor] | None, name: str, parameter: nn.Parameter) -> Tensor:
    """Return on every process the first process's tensor `kept[name]`, or this process's shard of it."""
    whole = torch.empty(parameter.shape) if kept is None else kept[name]
    whole = whole.to(parameter.device)
    if not isinstance(parameter, DTensor) and torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.broadcast(whole, 0)
    return dealt_out(whole, parameter)
