"""What a run trains, by any name: which tensors they are, how they are set to train, and what is published of them."""

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
    """Trained tensors by their names on disk; of an adapter its own tensors by PEFT's names, and its config."""

    tensors: dict[str, Tensor]
    adapter: Mapping[str, Tensor] | None = None
    adapter_config: bytes | None = None


@dataclass(frozen=True)
class Target(ABC):
    """Tensors of `out` that a config has trained; `manifest` is None where there was no surgery."""

    loaded: LoadedConfig
    out: CheckpointFolder
    manifest: Manifest | None
    anatomy: Anatomy
    # transformers' class of the model; None: a decoder's.
    auto: str | None

    # Whether a step changes the model's own tensors; else only publishing does.
    changes_in_steps: ClassVar[bool] = True

    @classmethod
    @abstractmethod
    def named_by(cls, config: TrainConfig) -> bool:
        """Whether a config names this target."""

    @abstractmethod
    def names(self) -> TrainableSet:
        """Return the tensors that train, but for those that the objective adds. Raises BadInput."""

    def notes(self) -> list[str]:
        """Return what the user should know of it before the run."""
        return []

    @abstractmethod
    def attach(self, model: Any, wanted: TrainableSet) -> TrainedParameters:
        """Let exactly `wanted` train, and return what that is in the loaded model. Raises BadInput, WrongSet."""

    @abstractmethod
    def publish(self, trained: Path, wanted: TrainableSet, called: str) -> Values:
        """Return the tensors that training changed.

        Args:
            trained: the checkpoint's file of trained values.
            wanted: what was to train.
            called: what an adapter's config calls the model.
        """

    def blank(self) -> Any:
        """Return the model on the meta device, in float32."""
        import torch

        from surgeon.models.load import build_model

        return build_model(self.out, dtype=lambda _: torch.float32, auto=self.auto)


class OwnTensors(Target):
    """Tensors of the model itself, which the steps change."""

    # The config's word for it.
    what: ClassVar[str]

    @classmethod
    def named_by(cls, config: TrainConfig) -> bool:
        """Whether `what` is its word."""
        return config.what == cls.what

    def names(self) -> TrainableSet:
        """Return the tensors that the config's `what` names; a BadInput of it begins with the file and line."""
        what = self.loaded.config.what
        assert what is not None and what != "head"
        try:
            return trainable_set(self.out, self.manifest, what, self.anatomy)
        except BadInput as error:
            raise BadInput(f"{self.loaded.where('what')}`what`: {error}") from None

    def attach(self, model: Any, wanted: TrainableSet) -> TrainedParameters:
        """Unfreeze them; of what trains in part the rest gets no gradient."""
        from surgeon.training.trainable.trainable_set import TrainedParameters, hold_fixed, unfreeze

        names = unfreeze(model, wanted, base_names=self.out.tensors)
        for name in names:
            # Loaded weights may be mapped from the file.
            parameter = model.get_parameter(name)
            parameter.data = parameter.data.clone()
        return TrainedParameters(tuple(names), hold_fixed(model, wanted, tensors=self.out.tensors))

    def publish(self, trained: Path, wanted: TrainableSet, called: str) -> Values:
        """Return the trained tensors under their names on disk."""
        from safetensors.torch import load_file

        from surgeon.training.trainable.trainable_set import StoredNames

        tensors = load_file(trained)
        if tensors.keys() == set(wanted.names):
            return Values(tensors)
        # Of a tied tensor that the checkpoint holds twice, one was trained.
        stored = StoredNames(self.blank(), self.out.tensors)
        return Values(stored.on_disk(tensors, also=wanted.names))
