"""`preserve` with a teacher: the base within the model, or its recorded predictions (`losses.preserving`)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from surgeon.common.distributed import Ranks, summed
from surgeon.common.formatting import size
from surgeon.common.listener import Quiet
from surgeon.errors import BadInput, printable
from surgeon.manifest.lineage import Lineage
from surgeon.manifest.within import Within, base_within
from surgeon.training.config.schema import PreserveSpec, originals_of
from surgeon.training.remedies.gate import gate_of
from surgeon.training.remedies.original_text import check_original_text
from surgeon.training.run import Case, Estimate, Remedy, Run

if TYPE_CHECKING:
    from torch import Tensor

    from surgeon.training.losses.cached_teacher import CachedTeacher
    from surgeon.training.losses.cross_entropy import FusedHead
    from surgeon.training.losses.preserving import Preserving


class Kl(Remedy):
    """The term of `preserve` with the base `within` the model as the teacher."""

    logged = "loss.preserve", "from the base"
    reads_head = True

    def __init__(self, case: Case, spec: PreserveSpec, within: Within) -> None:
        """Set up the term that `spec` configures, with the teacher at `within`."""
        super().__init__(case)
        self.spec, self.within = spec, within
        # Set by `join`.
        self.preserving: Preserving
        self.cached: CachedTeacher | None = None
        self._rehearsing = False
        # For each micro-batch of the step that did not run yet: how many tokens count in the whole step, and whether
        # one counts in this micro-batch in some process.
        self._shares: list[tuple[int, bool, Mapping[str, Tensor]]] = []
        # Steps in which some token counted, since the term was last taken.
        self._steps = 0

    @classmethod
    def of(cls, case: Case) -> Self | None:
        """Return the remedy where `preserve` names kl, else None.

        Raises BadInput where no source is text to teach on, the base is lost, or it has fewer tokens than
        are to be kept of its predictions.
        """
        loaded, spec = case.loaded, case.loaded.config.preserve
        if spec is None or not spec.taught:
            return None
        check_original_text(loaded)
        try:
            within = _within(case, spec)
        except BadInput as error:
            raise BadInput(f"{loaded.where('preserve')}`preserve`: {error}, or leave `preserve` out") from error
        vocabulary = within.rows or case.anatomy.sizes.vocabulary
        if (spec.cached or 0) > vocabulary:
            raise BadInput(
                f"{loaded.where('preserve', 'teacher', 'cached')}`preserve.teacher.cached` is {spec.cached}, and the"
                f" base has {vocabulary} tokens; use {vocabulary} at most"
            )
        return cls(case, spec, within)

    def notes(self) -> list[str]:
        """Warn where the base teaches nothing; report which model teaches where the first base is lost."""
        found = []
        if self.spec.on == "original":
            if not sum(source.share for source in originals_of(self.case.loaded.config)):
                found.append(
                    "`preserve` teaches nothing here: the share of original text is 0, so the run draws none of it;"
                    " give a source of it a share, or say `on: all`"
                )
            elif self._all_gated():
                found.append(
                    "`preserve` teaches nothing here: on original text the domain gate is closed and the model is the"
                    " base, so the term is 0 and costs its forwards; leave it out"
                )
        if self.within.last and self.spec.last is None:
            found.append(f"`preserve`: the first base is not in the model any more, so {self.within.shown} teaches")
        return found

    def _all_gated(self) -> bool:
        """Return whether all that trains is behind the domain gate: tensors of earlier operations, no embeddings."""
        manifest, wanted = self.case.manifest, self.case.wanted
        gate = gate_of(manifest)
        if manifest is None or gate is None or wanted.fixed:
            return False
        new = manifest.new_tensors
        return all(name in new and new[name].operation < gate for name in wanted.names)

    def join(self, run: Run, model: Any, head: FusedHead | None) -> Any:
        """Find the base in the model. Where the base's own tensors train, load a frozen copy to teach, and return it.

        No copy is needed where predictions are recorded before the first step.
        """
        from surgeon.models.load import load_model
        from surgeon.training.losses.cached_teacher import CachedTeacher
        from surgeon.training.losses.cross_entropy import FusedHead
        from surgeon.training.losses.preserving import Preserving

        assert head is not None
        spec, config, settings = self.spec, run.loaded.config, run.settings
        how, copy = f"{self.within.shown} within", None
        if spec.cached is not None:
            how = f"what {self.within.shown} said before the first step"
            sequences = settings.steps * settings.batch
            self.cached = CachedTeacher(run.work, spec.cached, spec.on, run.data.mixture, sequences, settings.length)
        elif self.within.apart:
            how = f"a frozen copy of {self.within.shown}"
            copy = load_model(run.out, dtype=config.dtype, attention=config.attention).requires_grad_(False)
            copy.config.use_cache = False
            run.objective.isolate(run, copy)
            copy = copy if run.sharding else copy.to(run.device)
        teacher = None if copy is None else FusedHead(copy, "torch")
        self.preserving = Preserving(model, spec, self.within, head, copy=teacher)
        run.say(f"{how} teaches: kl on {spec.on} text, weight {self.preserving.weight:g}")
        if alone := [stream.name for stream in run.data.mixture.streams if stream.packer.alone]:
            run.say(
                f"on {', '.join(alone)} it teaches alone: cross-entropy does not count what a model wrote (`counted`)"
            )
        return copy

    def room(self, model: Any) -> tuple[int, str]:
        """Return (bytes of the base's recorded predictions, 0 where none are recorded; their name in messages)."""
        return (0 if self.cached is None else self.cached.needed_bytes()), "what the base says"

    def measure(self, run: Run, model: Any, head: FusedHead | None) -> None:
        """Record the base's predictions where the config asks for it, before any of its tensors changes."""
        from surgeon.training.steps.by_document import by_document

        if self.cached is None:
            return
        run.say(f"{self.cached.summary}, in {printable(str(run.work))} while the run lasts")
        with by_document():
            self.cached.record(
                self.preserving,
                micro_batch=run.settings.micro_batch,
                device=model.device,
                ranks=run.ranks,
                listener=run.listener if run.ranks.leads else Quiet(),
            )

    def step(self, batches: Sequence[Mapping[str, Tensor]]) -> None:
        """Count the step's tokens on which the base teaches, over all micro-batches and processes.

        In a rehearsal with recorded predictions, compute the predictions for the first micro-batch.
        """
        if self._rehearsing and self.cached is not None:
            # This replaces the lookup that training makes.
            found = self.preserving.top(batches[0], self.cached.k)
            self.preserving.said = lambda *_: found
        own = np.array([int(self.preserving.counted(batch).sum()) for batch in batches])
        counts = summed(own, Ranks.of_environment().size, self.preserving.model.device).tolist()
        total = sum(counts)
        self._shares = [(total, here > 0, batch) for here, batch in zip(counts, batches, strict=True)]
        # Adds 1 where some token counts.
        self._steps += total > 0

    def loss(self, batch: Mapping[str, Tensor]) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the loss of a forward on the step's next micro-batch has its share of the term."""
        # The step's own batches, which are on the host.
        total, anywhere, given = self._shares.pop(0)
        return self.preserving.teaching(given, total, anywhere=anywhere)

    def take(self) -> float | None:
        """Return the unweighted term, the mean over the steps since the last call; None where no token counted."""
        import torch

        found = self.preserving.take().to(self.preserving.model.device)
        if Ranks.of_environment().size > 1:
            torch.distributed.all_reduce(found)
        steps, self._steps = self._steps, 0
        return float(found) / steps if steps else None

    def rehearse(self, run: Run, model: Any, head: FusedHead | None) -> Estimate | None:
        """Time the recording of predictions on one micro-batch, after a warm-up; None where none are recorded."""
        from surgeon.data.packing import batch_of
        from surgeon.training.footprint import seconds_since

        cached, preserving, count = self.cached, self.preserving, run.settings.micro_batch
        self._rehearsing = True
        if cached is None:
            return None
        stream = next(s for s in run.data.mixture.streams if cached.on == "all" or s.packer.domain == 0)
        seconds = 0.0
        for _ in range(2):
            begun = time.perf_counter()
            batch = batch_of([stream.next() for _ in range(count)])
            preserving.top({name: tensor.to(run.device) for name, tensor in batch.items()}, cached.k)
            seconds = seconds_since(begun, run.device)
        seconds *= cached.most_sequences / count
        return Estimate(seconds, f"what the base says, kept on disk: {size(cached.most_bytes)}")


def _within(case: Case, spec: PreserveSpec) -> Within:
    """Return where in the model the teacher is: the first base, or the base of the last surgery.

    The base of the last surgery teaches where the config says so or the first base is lost. Raises BadInput where the
    model does not contain the teacher.
    """
    out, manifest, wanted = case.out, case.manifest, case.wanted
    steps_change = case.target.changes_in_steps
    if manifest is None:
        apart = steps_change and bool(wanted.of_base)
        return Within(case.anatomy.sizes.layers, (), None, newborn=True, apart=apart)
    # In tensors that train in part the base's rows are fixed.
    changing = frozenset({*wanted.names} - {*wanted.fixed}) if steps_change else frozenset()
    if not spec.last:
        try:
            return base_within(out, manifest, training=changing & wanted.of_base)
        except BadInput as error:
            if spec.last is False:
                raise BadInput(
                    f"{error}; or say `teacher: {{surgery: last}}`, the model as it stood when the last surgery began"
                ) from error
            if Lineage.of(manifest).count == 1 and manifest.operations:
                raise
    if not manifest.operations:
        # Only training, no surgery, made this model from its base.
        shown = "the model as it stands, which no surgery made,"
        return Within(len(manifest.layers), (), None, newborn=True, apart=bool(changing), last=True, shown=shown)
    return base_within(out, manifest, training=changing, last=True)
