"""A run: what it is asked to train, what is settled before it begins, and what stands open while it lasts.

And a remedy against forgetting, which takes part in it. The modules that carry a run out know remedies by this class
alone, and targets by `targets.target.Target`.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from surgeon.checkpoint.labels import is_classifier
from surgeon.training.places import work_folder

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import TrainerCallback

    from surgeon.anatomy.anatomy import Anatomy
    from surgeon.checkpoint.folder import CheckpointFolder
    from surgeon.common.distributed import Ranks
    from surgeon.common.listener import Listener
    from surgeon.data.encoding import Encoder
    from surgeon.data.examples import ExampleEncoder
    from surgeon.data.specs import GenerateSpec
    from surgeon.manifest.manifest import Manifest
    from surgeon.manifest.trainable import TrainableSet
    from surgeon.training.config.loading import LoadedConfig
    from surgeon.training.config.settings import Settings
    from surgeon.training.losses.cross_entropy import FusedHead
    from surgeon.training.processes.launching import Sharding
    from surgeon.training.targets.target import Target
    from surgeon.training.training_data import TrainingData


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

    @property
    def headless(self) -> bool:
        """Whether texts with labels train an encoder that has no classification head yet (`new_head.headed`)."""
        return self.loaded.config.classifies and not is_classifier(self.out.config)


@dataclass(frozen=True)
class Run(Prepared):
    """A run whose data, trackers and tokenizer are open. `examples` encodes texts with labels; None: they have none."""

    data: TrainingData
    ranks: Ranks
    trackers: Sequence[TrainerCallback]
    listener: Listener
    say: Callable[[str], None]
    encoder: Encoder
    examples: ExampleEncoder | None

    @property
    def pad(self) -> int | None:
        """The id that fills up a batch of examples."""
        return None if self.examples is None else self.examples.pad


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

    # Its name in the record of a work folder.
    key: ClassVar[str]
    # In the log: what it adds to the loss, unweighted, and what a line of the log calls that. None: it adds nothing.
    logged: ClassVar[tuple[str, str] | None] = None

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

    @property
    def reads_head(self) -> bool:
        """Whether it compares what the model's head is given."""
        return False

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

    def step(  # noqa: B027  # most count nothing
        self, batches: Sequence[Mapping[str, Tensor]], *, device: Any, processes: int
    ) -> None:
        """Begin a step of these micro-batches of one process; all processes call."""

    def loss(self, batch: Mapping[str, Tensor]) -> contextlib.AbstractContextManager[None]:
        """Inside, the loss of a forward on the step's next micro-batch holds its share of the term."""
        return contextlib.nullcontext()

    def pull(self) -> Tensor | None:
        """Add a gradient to that of a whole step, and return the term with its weight; None: it adds none."""
        return None

    def take(self, *, device: Any, processes: int) -> float | None:
        """Return the unweighted term in the mean over the steps since it was last taken; None: there was none."""
        return None

    def after(self, run: Run) -> dict[str, Any]:
        """Return what the manifest says of it."""
        return {}

    def rehearse(self, run: Run, model: Any, head: FusedHead | None) -> Estimate | None:
        """Estimate what it takes before the first step, and stand ready for a step; None: it takes nothing."""
        return None
