"""A run: what it is asked to train, what is settled before it begins, and what stands open while it lasts.

And its objective, which is what it learns of its texts, and remedies against forgetting, which take part in it. The
modules that carry a run out know these by the classes here alone, and targets by `targets.target.Target`.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from surgeon.training.places import work_folder

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import TrainerCallback

    from surgeon.anatomy.anatomy import Anatomy
    from surgeon.checkpoint.folder import CheckpointFolder
    from surgeon.common.distributed import Ranks
    from surgeon.common.listener import Listener
    from surgeon.data.documents import Corpus
    from surgeon.data.encoding import Encoder
    from surgeon.data.packing import Mixture, Stream
    from surgeon.data.specs import GenerateSpec, SourceSpec
    from surgeon.manifest.manifest import Manifest
    from surgeon.manifest.trainable import TrainableSet
    from surgeon.training.config.loading import LoadedConfig
    from surgeon.training.config.settings import Settings
    from surgeon.training.losses.cross_entropy import FusedHead
    from surgeon.training.processes.launching import Sharding
    from surgeon.training.targets.target import Target


@dataclass(frozen=True)
class Case:
    """What is asked for: to train `target` of `out` by the config, and to publish the run as the folder `to`.

    `manifest` is None where there was no surgery, until the tensors are read. `device` is as the call names it, in a
    run as it was resolved. `wanted` are the tensors of the target.
    """

    out: CheckpointFolder
    manifest: Manifest | None
    loaded: LoadedConfig
    to: Path
    device: str
    anatomy: Anatomy
    objective: Objective
    target: Target
    wanted: TrainableSet

    @property
    def work(self) -> Path:
        """The folder of checkpoints until the run is published."""
        return work_folder(self.to)


@dataclass(frozen=True)
class Prepared(Case):
    """A run that can begin: its numbers, notes about them, how to shard it, and its remedies.

    `settled_for` gives the numbers, and notes, once the steps of the config's `epochs` or `bytes` are counted; None
    where the config says how many.
    """

    settings: Settings
    notes: Sequence[str]
    sharding: Sharding | None
    remedies: Sequence[Remedy]
    settled_for: Callable[..., tuple[Settings, list[str]]] | None


@dataclass
class TrainingData:
    """The text to train on, and by source the held-out sequences. `commits` are of sources on the Hub, by name.

    `held` has, by source, what returns so many held-out sequences of such a length.
    """

    mixture: Mixture[Any]
    validation: dict[str, list[Any]]
    documents: list[Corpus]
    held: dict[str, Callable[[int, int], list[Any]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    commits: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Run(Prepared):
    """A run whose data and trackers are open."""

    data: TrainingData
    ranks: Ranks
    trackers: Sequence[TrainerCallback]
    listener: Listener
    say: Callable[[str], None]


# Tokens of a document that are shown, at most.
SHOWN_TOKENS = 160


@dataclass(frozen=True)
class Sample:
    """One document as the model sees it: its parts, and whether the loss counts them; a long one has no middle."""

    source: str
    parts: tuple[tuple[str, bool], ...]
    label: str | None = None


class Look(NamedTuple):
    """Some documents of a source: their tokens, the share of these that the loss counts, and the first one.

    `labels` says how many of all the source's documents have each label; empty where texts have none.
    """

    tokens: int
    counted: float
    sample: Sample
    labels: Mapping[str, int] = {}


class Objective(ABC):
    """What a run learns of its texts: what it refuses, what a batch is, how its loss is computed, how it is judged."""

    # Whether texts are packed into sequences of one length, so that a run counts tokens; else it counts examples.
    packs: ClassVar[bool]
    # transformers' class of the model; None: a decoder's.
    auto: ClassVar[str | None] = None

    @abstractmethod
    def check(self, case: Case) -> None:
        """Raise BadInput where the model does not do what is to be learned."""

    def trained(self, target: Target, wanted: TrainableSet) -> TrainableSet:
        """Return the tensors of a target, `wanted`, with those that train beside every target. Raises BadInput."""
        return wanted

    def ready(
        self, prepared: Prepared, folder: Path | None, *, trust_remote_code: bool, listener: Listener
    ) -> contextlib.AbstractContextManager[Prepared]:
        """Give the model what it lacks for this objective, while inside.

        Args:
            prepared: the run of the model as it is.
            folder: where a model that is made for the run is written; None: beside the run.
            trust_remote_code: run the code that the model brings.
            listener: receives progress.

        Raises:
            BadInput: it cannot be made.
        """
        return contextlib.nullcontext(prepared)

    @property
    def unit(self) -> str:
        """Return what a run's steps are counted in."""
        return "tokens" if self.packs else "examples"

    def step_units(self, settings: Settings) -> int:
        """Return how many tokens, or examples, a step has."""
        return settings.batch * (settings.length if self.packs else 1)

    @abstractmethod
    def stream(
        self, source: SourceSpec, documents: Corpus, numbers: NDArray[np.int64], prepared: Prepared, encoder: Encoder
    ) -> Stream[Any]:
        """Return what a source gives to train on.

        Args:
            source: the source.
            documents: its text.
            numbers: which documents of it train.
            prepared: the run.
            encoder: the model's tokenizer.
        """

    @abstractmethod
    def held_out(self, stream: Any, documents: Corpus, numbers: Sequence[int], most: int, length: int) -> list[Any]:
        """Return at most `most` sequences of `length` tokens of a source's documents that are held out."""

    def check_data(self, data: TrainingData, where: str) -> None:  # noqa: B027  # most texts are fit for it
        """Add what there is to say of the opened sources. Raises BadInput, which names the config `where`."""

    @abstractmethod
    def look(self, stream: Any, numbers: Sequence[int]) -> Look:
        """Show some documents of a source, by their numbers, as the run would see them."""

    @abstractmethod
    def load(self, run: Run, **options: Any) -> Any:
        """Load the model, with these options of `load_model`. Raises BadInput where it cannot be loaded."""

    def isolate(self, run: Run, model: Any) -> None:  # noqa: B027  # one text a sequence needs none
        """Have a model keep apart what stands in one sequence."""

    def check_isolation(self, run: Run, model: Any) -> None:  # noqa: B027  # one text a sequence needs none
        """Measure whether documents in one sequence see each other, and report it.

        `model` is as it will train, on its device; all processes call. Raises BadInput where they do and must not.
        """

    def fused_head(self, run: Run, model: Any) -> FusedHead | None:
        """Return what computes the loss without all logits at once; None where the model itself does."""
        return None

    @abstractmethod
    def batch(self, run: Run, sequences: Sequence[Any]) -> dict[str, Tensor]:
        """Make a micro-batch of sequences."""

    def shares(self, batches: Sequence[Mapping[str, Tensor]], device: torch.device) -> list[dict[str, float]]:
        """Return by what the runtime's scale of a loss is to be multiplied in each micro-batch of a process's step.

        All processes call.

        Args:
            batches: the micro-batches.
            device: where numbers of all processes are summed.

        Returns:
            for each micro-batch the factors, by the loss's name
        """
        return [{} for _ in batches]

    @abstractmethod
    def judged(self, run: Run, model: Any, held: Sequence[Any]) -> dict[str, float]:
        """Return the `loss` on held-out sequences, in nats, and other figures; all processes share the work."""


class Text(NamedTuple):
    """A text that the model writes before a run: what it is called, by which settings, to which file.

    Where it is not `needed`, a model that can write none of it goes without; `without` says what that costs, of `{}`.
    """

    name: str
    shown: str
    spec: GenerateSpec
    file: Path
    without: str | None = None


class Estimate(NamedTuple):
    """What a remedy takes before the first step: wall seconds, what for, and its figures in a dry run's result."""

    seconds: float
    words: str
    figures: Mapping[str, float]


class Remedy(ABC):
    """Something that keeps a model near its base while it learns.

    It is asked in this order: `of` (where headers and config settle what it needs), `texts`, `fit`, `join`, `measure`,
    then in each step `step`, `loss` for every micro-batch, and `pull`; `take` for each line of the log; `after`.
    """

    # In the log: what it adds to the loss, unweighted, and what a line of the log calls that. None: it adds nothing.
    logged: ClassVar[tuple[str, str] | None] = None
    # Whether it compares what the model's head is given.
    reads_head: ClassVar[bool] = False

    def __init__(self, case: Case) -> None:
        self.case = case

    @classmethod
    @abstractmethod
    def of(cls, case: Case) -> Self | None:
        """Return the remedy where the case asks for it. Raises BadInput where model or config cannot have it."""

    def check_sources(self) -> None:  # noqa: B027  # most need nothing
        """Raise BadInput where the config's texts are not what it needs."""

    def notes(self) -> list[str]:
        """Return what the user should know before the run."""
        return []

    def texts(self) -> list[Text]:
        """Return the texts that the model writes for it before the run's data is opened."""
        return []

    def fit(self, run: Run, model: Any) -> Sequence[str]:
        """Give tensors their values that get none by a gradient; return their names in memory. All processes call."""
        return ()

    def join(self, run: Run, model: Any, head: FusedHead | None) -> Any:
        """Take part in a loaded model, before it is sharded; return a second model that is to be sharded too."""
        return None

    def room(self, model: Any) -> tuple[int, str]:
        """Return the bytes that its files take in the work folder at most, and what they are."""
        return 0, ""

    def measure(self, run: Run, model: Any, head: FusedHead | None) -> None:  # noqa: B027  # most measure nothing
        """Measure what it needs of the model at birth, on its device; what a killed call left is taken again."""

    def step(self, batches: Sequence[Mapping[str, Tensor]]) -> None:  # noqa: B027  # most count nothing
        """Begin a step of these micro-batches of one process; all processes call."""

    def loss(self, batch: Mapping[str, Tensor]) -> contextlib.AbstractContextManager[None]:
        """Inside, the loss of a forward on the step's next micro-batch holds its share of the term."""
        return contextlib.nullcontext()

    def pull(self) -> Tensor | None:
        """Add a gradient to that of a whole step, and return the term with its weight; None: it adds none."""
        return None

    def take(self) -> float | None:
        """Return the unweighted term in the mean over the steps since it was last taken; None: there was none."""
        return None

    def after(self, run: Run) -> dict[str, Any]:
        """Return what the manifest says of it."""
        return {}

    def rehearse(self, run: Run, model: Any, head: FusedHead | None) -> Estimate | None:
        """Estimate what it takes before the first step, and stand ready for a step; None: it takes nothing."""
        return None
