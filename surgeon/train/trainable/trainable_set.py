"""Exactly the wanted parameters train: set on the model, and checked before the first step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from surgeon.errors import printable
from surgeon.manifest.trainable import Fixed, TrainableSet
from surgeon.train.trainable.stored import StoredNames, WrongSet


@dataclass(frozen=True)
class TrainedParameters:
    """Parameters of a loaded model that a run publishes.

    `names` train, in the model's order; of some of them a part is `fixed`. `fitted` got their values before the first
    step.
    """

    names: tuple[str, ...]
    fixed: Mapping[str, Fixed] = field(default_factory=dict)
    fitted: tuple[str, ...] = ()

    @property
    def published(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.names, *self.fitted)


def unfreeze(model: nn.Module, wanted: TrainableSet, *, base_names: Collection[str]) -> list[str]:
    """Let exactly the parameters of `wanted` train, and return their names in the model, in its order.

    `wanted` are tensors on disk, `base_names` all that the checkpoint has. Raises WrongSet where the model has no such
    parameter, the checkpoint no such tensor, or a parameter is made of tensors that are not to train too.
    """
    absent = [name for name in wanted.names if name not in base_names and not _is_tied(model, name)]
    if absent:
        raise WrongSet(f"{printable(absent[0])}: to train, yet the checkpoint has no tensor of this name")
    stored = StoredNames(model, dict.fromkeys((*base_names, *wanted.names)))
    in_memory = stored.in_memory(wanted.names)
    names = {name for name, _ in model.named_parameters()}
    missing = [name for name in in_memory if name not in names and not _is_tied(model, name)]
    if missing:
        raise WrongSet(f"{printable(missing[0])}: to train, yet the loaded model has no parameter of this name")
    chosen = set(in_memory)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)
    check_set(model, in_memory)
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def hold_fixed(model: nn.Module, wanted: TrainableSet, *, base_names: Collection[str]) -> dict[str, Fixed]:
    """Keep the gradient from what is fixed of parameters that train in part; what that is, by names in the model.

    Their gradient is zero from the beginning, so AdamW's moments are, and without weight decay an update of exactly
    zero leaves them as they are. Raises WrongSet where such a parameter is made of several tensors.
    """
    stored = StoredNames(model, dict.fromkeys((*base_names, *wanted.names))) if wanted.fixed else None
    held: dict[str, Fixed] = {}
    parameters = dict(model.named_parameters())
    for name in wanted.names:
        if stored is None or (fixed := wanted.fixed.get(name)) is None:
            continue
        targets = stored.in_memory([name])
        if len(targets) != 1:
            raise WrongSet(f"{printable(name)}: a part of it trains, yet it makes several parameters; nothing trained")
        # Of tied embeddings one name is the parameter's, the other only leads to it.
        if targets[0] in parameters and targets[0] not in held:
            held[targets[0]] = fixed
            parameters[targets[0]].register_hook(_without(fixed))  # type: ignore[no-untyped-call]
    return held


def _without(fixed: Fixed) -> Callable[[Tensor], Tensor]:
    """A hook that takes the gradient of what is fixed away, before it is added up, clipped or sent anywhere."""

    def hook(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        for begin, end in fixed.spans:
            gradient.narrow(fixed.axis, begin, end - begin).zero_()
        return gradient

    return hook


def check_set(model: nn.Module, wanted: Iterable[str], *, optimizer: Any = None) -> None:
    """Raise WrongSet unless the parameters that train, and those of an optimizer, are exactly those of `wanted`."""
    names = {name for name, _ in model.named_parameters()}
    expected = {name for name in wanted if name in names}
    training = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for odd, how in ((training - expected, "trains, and must not"), (expected - training, "is frozen, and must train")):
        if odd:
            more = f" (and {len(odd) - 1} more)" if len(odd) > 1 else ""
            raise WrongSet(f"{printable(min(odd))}{more}: {how}; nothing was trained")
    if not training:
        raise WrongSet("nothing trains: the model has none of the parameters that were asked for")
    if optimizer is not None:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        meant = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        if held != meant:
            raise WrongSet(
                f"the optimizer holds {len(held)} parameters, {len(meant)} are to train; nothing was trained"
            )


def _is_tied(model: nn.Module, name: str) -> bool:
    """Whether the tensor is another name of a parameter (a tied output embedding)."""
    return name in dict(model.named_parameters(remove_duplicate=False))
