"""`preserve: {loss: fisher}`: a penalty pulls the numbers that train back to their values at birth, each in proportion
to its importance for the base's own text (elastic weight consolidation, Kirkpatrick et al., 2017).

The importance of a number θ_i is F_i = Σ_s (∂ log p(s) / ∂θ_i)² / N, over sequences s with N predicted tokens in all.
In text that the model itself wrote, the gradients of a sequence's tokens are uncorrelated, so F is the diagonal of the
Fisher information per token. The penalty ½ Σ_i F_i (θ_i − θ_i at birth)² is then in nats a token: it is
KL(base ‖ model) to second order, as far as numbers act independently.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from surgeon.common.distributed import Ranks, is_sharded
from surgeon.data.packing import IGNORED_LABEL, Mixture, PackedSequence, batch_of, one_pass
from surgeon.errors import BadInput, printable
from surgeon.training.remedies.original_text import check_original_text
from surgeon.training.run import Case, Estimate, Remedy, Run
from surgeon.training.saved.checkpoints import RunRecord

if TYPE_CHECKING:
    from torch import Tensor, nn

    from surgeon.training.losses.cross_entropy import FusedHead

# A file of the work folder; it is used again only while its digest is the one that the run's record has.
FISHER_FILE = "fisher.safetensors"


class Fisher(Remedy):
    """Elastic weight consolidation, which needs neither a teacher nor another forward in a step."""

    logged = "loss.fisher", "of fisher"

    def __init__(self, case: Case) -> None:
        """Set up the remedy from the config's `preserve`, which must exist."""
        super().__init__(case)
        assert case.loaded.config.preserve is not None
        self.spec = case.loaded.config.preserve
        self.weight = self.spec.weight_of("fisher")
        # The parameters that train, each with its value at birth and its Fisher information; set by `anchor`.
        self._held: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        # The unweighted penalty of every step since the last call of `take`.
        self._found: list[Tensor] = []

    @classmethod
    def of(cls, case: Case) -> Self | None:
        """Return the remedy where `preserve` names fisher, else None. Raises BadInput without original text."""
        spec = case.loaded.config.preserve
        if spec is None or not spec.fisher:
            return None
        check_original_text(case.loaded)
        return cls(case)

    def notes(self) -> list[str]:
        """Report where tensors of an earlier run are pulled to their present values, not to their values at birth."""
        manifest = self.case.manifest
        before = {name for entry in manifest.training for name in entry.tensors} if manifest is not None else set()
        if not before & {*self.case.wanted.names}:
            return []
        return [
            "`preserve`: fisher pulls what trained before back to its values as this run begins, not to those at birth"
        ]

    def room(self, model: Any) -> tuple[int, str]:
        """Return (bytes of the file of the Fisher information, its name in messages)."""
        return 4 * sum(p.numel() for p in model.parameters() if p.requires_grad), "the Fisher information"

    def measure(self, run: Run, model: Any, head: FusedHead | None) -> None:
        """Estimate the Fisher information, or load what an earlier call left; anchor the parameters to their values."""
        from surgeon.training.processes.sharding import gathered
        from surgeon.training.steps.by_document import by_document

        most = self.spec.fisher
        run.say(f"fisher: estimated from at most {most} sequences of original text; weight {self.weight:g}")
        with by_document():
            fisher = fisher_of(model, run, most, head)
        if not any(bool(gathered(each.any())) for each in fisher.values()):
            run.say(
                "fisher: it is 0 everywhere, as nothing that trains takes part in original text, so it keeps nothing;"
                " leave it out"
            )
        self.anchor(model, fisher)

    def anchor(self, model: nn.Module, fisher: Mapping[str, Tensor]) -> None:
        """Copy the present values of the parameters that train; `fisher` has their Fisher information by name."""
        self._held = [
            (parameter, parameter.detach().clone(), fisher[name])
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]

    def pull(self) -> Tensor:
        """Add the penalty's gradient to the parameters' gradients of a whole step; return the weighted penalty.

        All processes call this, and add the same.
        """
        import torch
        from torch.distributed.tensor import DTensor

        total: Any = 0.0
        with torch.no_grad():
            for parameter, birth, fisher in self._held:
                moved = parameter.float() - birth.float()
                slope = fisher * moved
                total = total + 0.5 * (slope * moved).sum()
                pulled = (self.weight * slope).to(parameter.dtype)
                parameter.grad = pulled if parameter.grad is None else parameter.grad.add_(pulled)
            term: Tensor = total.full_tensor() if isinstance(total, DTensor) else total
            self._found.append(term)
            return self.weight * term

    def take(self) -> float:
        """Return the unweighted penalty, the mean over the steps since the last call; 0 where there was no step."""
        found, self._found = self._found, []
        return sum(map(float, found)) / max(1, len(found))

    def rehearse(self, run: Run, model: Any, head: FusedHead | None) -> Estimate:
        """Time the estimate on one sequence; its result stays in memory, as it does in the run."""
        from surgeon.training.footprint import seconds_since

        sequences = original_text(run.data.mixture, self.spec.fisher)
        begun = time.perf_counter()
        fisher = estimated(model, sequences[:1], head, Ranks())
        seconds = seconds_since(begun, run.device) * len(sequences)
        self.anchor(model, fisher)
        return Estimate(seconds, "the Fisher information")


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
    import safetensors.torch

    from surgeon.training.processes.sharding import dealt_out, gathered

    ranks, work = run.ranks, run.work
    record = RunRecord.read(work)
    kept = ranks.leads and record is not None and record.has_kept(work, FISHER_FILE)
    if ranks.leads:
        ranks.send(kept)
    else:
        kept = ranks.receive()
    if kept:
        whole = safetensors.torch.load_file(work / FISHER_FILE)
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        return {name: dealt_out(whole[name].to(like.device), like) for name, like in trained.items()}
    found = estimated(model, original_text(run.data.mixture, sequences), fused, ranks)
    # Sharded values are gathered by all processes.
    whole = {name: tensor.cpu().contiguous() for name, tensor in gathered(found).items()}
    if ranks.leads:
        assert record is not None
        (work / FISHER_FILE).unlink(missing_ok=True)
        safetensors.torch.save_file(whole, work / FISHER_FILE)
        record.keep(work, FISHER_FILE)
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
    import torch

    from surgeon.training.losses.cross_entropy import next_labels
    from surgeon.training.processes.sharding import gathered

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
    from torch.nn import functional as F

    from surgeon.training.losses.cross_entropy import next_labels

    labels = next_labels(batch["labels"]).flatten()
    given = {name: batch[name] for name in ("input_ids", "position_ids")}
    if fused is not None:
        return fused.nats(labels, **given)
    logits = model(**given, use_cache=False).logits.float().flatten(0, 1)
    return F.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")
