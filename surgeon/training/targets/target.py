"""The interface of targets: which tensors a run trains, how they are set to train, and what is published of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from surgeon.anatomy.anatomy import Anatomy
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.errors import BadInput
from surgeon.manifest.manifest import Manifest
from surgeon.manifest.trainable import TrainableSet, trainable_set
from surgeon.training.config.loading import LoadedConfig
from surgeon.training.config.schema import TrainConfig

if TYPE_CHECKING:
    from torch import Tensor

    from surgeon.training.trainable.trainable_set import TrainedParameters


class Values(NamedTuple):
    """Trained tensors by their names on disk; with an adapter also its tensors by PEFT's names, and its config file."""

    tensors: dict[str, Tensor]
    adapter: Mapping[str, Tensor] | None = None
    adapter_config: bytes | None = None


@dataclass(frozen=True)
class Target(ABC):
    """The tensors of `out` that a config selects to train; `manifest` is None where there was no surgery."""

    loaded: LoadedConfig
    out: CheckpointFolder
    manifest: Manifest | None
    anatomy: Anatomy
    # The name of the transformers auto class that builds the model; None: the one for decoders.
    auto: str | None

    # Whether a training step changes the model's own tensors; otherwise only publishing does.
    changes_in_steps: ClassVar[bool] = True

    @classmethod
    @abstractmethod
    def named_by(cls, config: TrainConfig) -> bool:
        """Return whether a config names this target."""

    @abstractmethod
    def names(self) -> TrainableSet:
        """Return the tensors that train, without tensors that the objective adds.

        Raises BadInput where the output lacks the tensors that the config names.
        """

    def notes(self) -> list[str]:
        """Return what the user should know of this target before the run, a line each."""
        return []

    @abstractmethod
    def attach(self, model: Any, wanted: TrainableSet) -> TrainedParameters:
        """Set exactly `wanted` to train; return its parameters in the loaded model.

        Raises BadInput where a tensor cannot train in this way, and WrongSet where other parameters would train.
        """

    @abstractmethod
    def publish(self, trained: Path, wanted: TrainableSet, called: str) -> Values:
        """Return the tensors that training changed, as they are published.

        Args:
            trained: the checkpoint's file of trained values.
            wanted: the tensors that were to train.
            called: the name of the model in an adapter's config.
        """

    def blank(self) -> Any:
        """Return the model on the meta device, in float32."""
        import torch

        from surgeon.models.load import build_model

        return build_model(self.out, dtype=lambda _: torch.float32, auto=self.auto)


class OwnTensors(Target):
    """Tensors of the model itself, which the training steps change."""

    # The value of the config's `what` that names this target.
    what: ClassVar[str]

    @classmethod
    def named_by(cls, config: TrainConfig) -> bool:
        """Return whether `what` names this target."""
        return config.what == cls.what

    def names(self) -> TrainableSet:
        """Return the tensors that the config's `what` names. Raises BadInput, whose message has the file and line."""
        what = self.loaded.config.what
        assert what is not None and what != "head"
        try:
            return trainable_set(self.out, self.manifest, what, self.anatomy)
        except BadInput as error:
            raise BadInput(f"{self.loaded.where('what')}`what`: {error}") from None

    def attach(self, model: Any, wanted: TrainableSet) -> TrainedParameters:
        """Unfreeze the tensors; where a tensor trains in part, its fixed part gets no gradient."""
        from surgeon.models.load import stored_dtype
        from surgeon.training.trainable.trainable_set import TrainedParameters, hold_fixed, unfreeze

        names = unfreeze(model, wanted, base_names=self.out.tensors)
        for name in names:
            parameter, info = model.get_parameter(name), self.out.tensors.get(name)
            if info is None or stored_dtype(info.dtype) == parameter.dtype:
                # Weights in their stored dtype may be mapped from the file. A cast has made memory of its own, and the
                # copy of a copy would stay in use: what a loading thread frees, the training thread does not get.
                parameter.data = parameter.data.clone()
        return TrainedParameters(tuple(names), hold_fixed(model, wanted, tensors=self.out.tensors))

    def publish(self, trained: Path, wanted: TrainableSet, called: str) -> Values:
        """Return the trained tensors under their names on disk."""
        from safetensors.torch import load_file

        from surgeon.training.trainable.trainable_set import StoredNames

        tensors = load_file(trained)
        if tensors.keys() == set(wanted.names):
            return Values(tensors)
        # The checkpoint stores a tied tensor under two names, and the file has only one of them.
        stored = StoredNames(self.blank(), self.out.tensors)
        return Values(stored.on_disk(tensors, also=wanted.names))
