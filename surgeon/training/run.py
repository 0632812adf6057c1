"""The types of a run: what it is asked to train, what is settled before it begins, and what is open while it lasts.

There are also the interfaces of objectives, which decide what a run learns from its texts, and of remedies against
forgetting. The modules that carry out a run use both only through the classes here, and targets only through
`targets.target.Target`.
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
    from surgeon.data.kept_answers import Prompts
    from surgeon.data.packing import Mixture, Stream
    from surgeon.data.specs import GenerateSpec, SourceSpec
    from surgeon.manifest.manifest import Manifest
    from surgeon.manifest.trainable import TrainableSet
    from surgeon.training.config.loading import LoadedConfig
    from surgeon.training.config.settings import Settings
    from surgeon.training.losses.cross_entropy import FusedHead
    from surgeon.training.targets.target import Target


@dataclass(frozen=True)
class Case:
    """A request: to train `target` of `out` by the config, and to publish the run as the folder `to`.

    `manifest` is None where there was no surgery; once the tensors are read, a run has one. `device` is the name in the
    call, and in a `Run` the resolved device. `wanted` are the tensors to train.
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
    """A run that can begin: its numbers, notes about them, whether it is sharded (FSDP2), and its remedies.

    Where the config has `epochs` or `bytes`, the numbers are settled again once the texts are counted. `prompts` are
    those by which answers are compared with the answers before the run; None where this is not measured.
    """

    settings: Settings
    notes: Sequence[str]
    sharding: bool
    remedies: Sequence[Remedy]
    prompts: Prompts | None


@dataclass
class TrainingData:
    """The text to train on, and by source the held-out sequences (`validation`).

    `commits` has the commit of each source on the Hub, by its name. `held` has by source a function that returns
    held-out sequences, from their largest number and their length. `documents` are the opened corpora of all sources,
    `notes` lines for the user.
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


# The most tokens of a document that are shown.
SHOWN_TOKENS = 160


@dataclass(frozen=True)
class Sample:
    """One document as the model sees it, in `parts` of (text, whether the loss counts it).

    Long parts are shown without their middle. `label` is None for a text without a label.
    """

    source: str
    parts: tuple[tuple[str, bool], ...]
    label: str | None = None


class Look(NamedTuple):
    """Figures of some documents of a source: their tokens, the share that the loss counts, and the first document.

    `labels` counts all documents of the source by label; it is empty where texts have no labels.
    """

    tokens: int
    counted: float
    sample: Sample
    labels: Mapping[str, int] = {}


class Objective(ABC):
    """A task that a run learns from texts: which models it rejects, what a batch is, how loss and figures are made."""

    # Whether texts are packed into sequences of one length, so that a run counts tokens; else it counts examples.
    packs: ClassVar[bool]
    # The name of the transformers auto class that builds the model; None: the one for decoders.
    auto: ClassVar[str | None] = None

    @abstractmethod
    def check(self, case: Case) -> None:
        """Raise BadInput where the model cannot learn this objective."""

    def trained(self, target: Target, wanted: TrainableSet) -> TrainableSet:
        """Add to a target's tensors, `wanted`, the tensors that train with every target.

        Raises BadInput where the model cannot be built to find them.
        """
        return wanted

    def ready(
        self, prepared: Prepared, folder: Path | None, *, trust_remote_code: bool, listener: Listener
    ) -> contextlib.AbstractContextManager[Prepared]:
        """Return a context in which the model has what it lacks for this objective; it yields the run of that model.

        Args:
            prepared: the run of the model as it is.
            folder: where a model that is made for the run is written; None: next to the run.
            trust_remote_code: run the code that the model brings.
            listener: receives progress.

        Raises:
            BadInput: such a model cannot be made.
        """
        return contextlib.nullcontext(prepared)

    @property
    def unit(self) -> str:
        """The unit in which the size of a step is counted."""
        return "tokens" if self.packs else "examples"

    def step_units(self, settings: Settings) -> int:
        """Return how many tokens, or examples, a step has."""
        return settings.batch * (settings.length if self.packs else 1)

    @abstractmethod
    def stream(
        self, source: SourceSpec, documents: Corpus, numbers: NDArray[np.int64], prepared: Prepared, encoder: Encoder
    ) -> Stream[Any]:
        """Return the stream of a source's sequences to train on.

        Args:
            source: the source.
            documents: its text.
            numbers: the numbers of the documents to train on.
            prepared: the run.
            encoder: the model's tokenizer.
        """

    @abstractmethod
    def held_out(self, stream: Any, documents: Corpus, numbers: Sequence[int], most: int, length: int) -> list[Any]:
        """Return at most `most` held-out sequences of `length` tokens, from the documents `numbers`."""

    def check_data(self, data: TrainingData, where: str) -> None:  # noqa: B027  # most texts are fit for it
        """Check the opened sources, and add notes on them to `data`. Raises BadInput, which begins with `where`."""

    @abstractmethod
    def look(self, stream: Any, numbers: Sequence[int]) -> Look:
        """Return figures and a sample of some documents of a source, by their numbers, as the run would see them."""

    @abstractmethod
    def load(self, run: Run, **options: Any) -> Any:
        """Load the model; `options` are arguments of `load_model`. Raises BadInput where it cannot be loaded."""

    def isolate(self, run: Run, model: Any) -> None:  # noqa: B027  # one text a sequence needs none
        """Make every forward of a model keep the documents in one sequence apart."""

    def check_isolation(self, run: Run, model: Any) -> None:  # noqa: B027  # one text a sequence needs none
        """Measure whether documents in one sequence see each other, and report it.

        `model` is ready to train, on its device; all processes call this. Raises BadInput where documents see each
        other and must not.
        """

    def fused_head(self, run: Run, model: Any) -> FusedHead | None:
        """Return the head that computes the loss without all logits at once; None where the model computes its loss."""
        return None

    @abstractmethod
    def batch(self, run: Run, sequences: Sequence[Any]) -> dict[str, Tensor]:
        """Make a micro-batch of sequences."""

    def shares(self, batches: Sequence[Mapping[str, Tensor]], device: torch.device) -> list[dict[str, float]]:
        """Return the factors by which the scale of the runtime's losses is multiplied in each micro-batch.

        All processes call this.

        Args:
            batches: the micro-batches of this process in one step.
            device: where numbers are summed over all processes.

        Returns:
            for each micro-batch the factors, by the loss's name
        """
        return [{} for _ in batches]

    @abstractmethod
    def judged(self, run: Run, model: Any, held: Sequence[Any]) -> dict[str, float]:
        """Return the `loss` on held-out sequences, in nats, and other figures by name; all processes share the work."""


class Text(NamedTuple):
    """A text that the model writes before a run: its name, what messages call it, its settings and its file.

    Where `without` is given, the run goes on if the model fails to write the text. `without` is then the message that
    says what the run lacks, with `{}` for the reason.
    """

    name: str
    shown: str
    spec: GenerateSpec
    file: Path
    without: str | None = None


class Estimate(NamedTuple):
    """The cost of a preparation before the first step: its wall seconds, and in words what is prepared."""

    seconds: float
    words: str


class Remedy(ABC):
    """A technique that keeps a model near its base while it learns.

    A run calls its methods in this order: `of` (from headers and config), `texts`, `fit`, `join`, `measure`; then in
    each step `step`, `loss` for every micro-batch, and `pull`; `take` for each line of the log; at the end `after`.
    """

    # The log's key of the remedy's unweighted term, and the term's name in shown lines. None: it adds no term.
    logged: ClassVar[tuple[str, str] | None] = None
    # Whether the remedy reads the input of the model's head.
    reads_head: ClassVar[bool] = False

    def __init__(self, case: Case) -> None:
        self.case = case

    @classmethod
    @abstractmethod
    def of(cls, case: Case) -> Self | None:
        """Return the remedy where the case asks for it, else None. Raises BadInput where model or config forbid it."""

    def check_sources(self) -> None:  # noqa: B027  # most need nothing
        """Raise BadInput where the config's sources lack what the remedy needs."""

    def notes(self) -> list[str]:
        """Return what the user should know of the remedy before the run, a line each."""
        return []

    def texts(self) -> list[Text]:
        """Return the texts that the model writes for the remedy before the run's data is opened."""
        return []

    def fit(self, run: Run, model: Any) -> Sequence[str]:
        """Set tensors that no gradient trains to fitted values; return their names in memory. All processes call."""
        return ()

    def join(self, run: Run, model: Any, head: FusedHead | None) -> Any:
        """Prepare the remedy for a loaded model before it is sharded; return a second model to shard too, or None."""
        return None

    def room(self, model: Any) -> tuple[int, str]:
        """Return (the most bytes of the remedy's files in the work folder, their name in messages)."""
        return 0, ""

    def measure(self, run: Run, model: Any, head: FusedHead | None) -> None:  # noqa: B027  # most measure nothing
        """Measure what the remedy needs of the model at birth, on its device, or load what a killed call left."""

    def step(self, batches: Sequence[Mapping[str, Tensor]]) -> None:  # noqa: B027  # most count nothing
        """Begin a step; `batches` are this process's micro-batches. All processes call this."""

    def loss(self, batch: Mapping[str, Tensor]) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the loss of a forward on the step's next micro-batch has its share of the term."""
        return contextlib.nullcontext()

    def pull(self) -> Tensor | None:
        """Add a gradient to the gradients of a whole step, and return the weighted term; None: it adds none."""
        return None

    def take(self) -> float | None:
        """Return the unweighted term, the mean over the steps since the last call; None: there was no term."""
        return None

    def after(self, run: Run) -> dict[str, Any]:
        """Return what the run's manifest entry records of the remedy."""
        return {}

    def rehearse(self, run: Run, model: Any, head: FusedHead | None) -> Estimate | None:
        """Estimate the remedy's cost before the first step, and prepare it for a step; None: it costs nothing."""
        return None
