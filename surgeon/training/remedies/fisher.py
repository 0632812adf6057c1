"""`preserve: {loss: fisher}`: a penalty pulls what trains back to its values at birth (equations: `losses.fisher`)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Self

from surgeon.training.remedies.original_text import check_original_text
from surgeon.training.run import Case, Estimate, Remedy, Run

if TYPE_CHECKING:
    from torch import Tensor

    from surgeon.training.losses.cross_entropy import FusedHead
    from surgeon.training.losses.fisher import Anchored


class Fisher(Remedy):
    """Elastic weight consolidation, which needs neither a teacher nor another forward in a step."""

    logged = "loss.fisher", "of fisher"

    def __init__(self, case: Case) -> None:
        """Set up the remedy from the config's `preserve`, which must exist."""
        super().__init__(case)
        assert case.loaded.config.preserve is not None
        self.spec = case.loaded.config.preserve
        # Set by `measure`.
        self.anchored: Anchored

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
        from surgeon.training.losses.fisher import Anchored, fisher_of
        from surgeon.training.processes.sharding import gathered
        from surgeon.training.steps.by_document import by_document

        weight = self.spec.weight_of("fisher")
        run.say(f"fisher: estimated from at most {self.spec.fisher} sequences of original text; weight {weight:g}")
        with by_document():
            fisher = fisher_of(model, run, self.spec.fisher, head)
        if not any(bool(gathered(each.any())) for each in fisher.values()):
            run.say(
                "fisher: it is 0 everywhere, as nothing that trains takes part in original text, so it keeps nothing;"
                " leave it out"
            )
        self.anchored = Anchored(model, fisher, weight)

    def pull(self) -> Tensor:
        """Add the penalty's gradient to every parameter that trains; return the weighted penalty."""
        return self.anchored.pull()

    def take(self) -> float:
        """Return the unweighted penalty, the mean over the steps since the last call."""
        return self.anchored.take()

    def rehearse(self, run: Run, model: Any, head: FusedHead | None) -> Estimate:
        """Time the estimate on one sequence; its result stays in memory, as it does in the run."""
        from surgeon.common.distributed import Ranks
        from surgeon.training.footprint import seconds_since
        from surgeon.training.losses.fisher import Anchored, estimated, original_text

        sequences = original_text(run.data.mixture, self.spec.fisher)
        begun = time.perf_counter()
        fisher = estimated(model, sequences[:1], head, Ranks())
        seconds = seconds_since(begun, run.device) * len(sequences)
        self.anchored = Anchored(model, fisher, 1.0)
        return Estimate(seconds, "the Fisher information", {"seconds_estimating": seconds})
