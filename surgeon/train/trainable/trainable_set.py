"""Exactly the wanted parameters train: set on the model, and checked before the first step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from surgeon.checkpoint.header import TensorInfo
from surgeon.errors import printable
from surgeon.families.names import as_loaded
from surgeon.manifest.trainable import Fixed, TrainableSet
from surgeon.train.trainable.stored import StoredNames, WrongSet


@dataclass(frozen=True)
class TrainedParameters:
    """Parameters of a loaded model that a run publishes.

    `names` train, in the model's order; of some of them so many numbers are `fixed`. `fitted` got their values before
    the first step.
    """

    names: tuple[str, ...]
    fixed: Mapping[str, int] = field(default_factory=dict)
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


def hold_fixed(model: nn.Module, wanted: TrainableSet, *, tensors: Mapping[str, TensorInfo]) -> dict[str, int]:
    """Keep the gradient from what is fixed of parameters that train in part; how many numbers, by names in the model.

    Their gradient is zero from the beginning, so AdamW's moments are, and without weight decay an update of exactly
    zero leaves them as they are. `tensors` are all of the checkpoint's: of what transformers makes of several, or
    converts, is fixed what it makes of their fixed parts.
    """
    stored = StoredNames(model, dict.fromkeys((*tensors, *wanted.names))) if wanted.fixed else None
    held: dict[str, int] = {}
    parameters = dict(model.named_parameters())
    for name in wanted.names:
        if stored is None or name not in wanted.fixed:
            continue
        for target in stored.targets(name):
            # Of tied embeddings one name is the parameter's, the other only leads to it.
            if target not in parameters or target in held:
                continue
            if stored.alone(name) == target:
                fixed = wanted.fixed[name]
                held[target] = fixed.size
                parameters[target].register_hook(_without(fixed))  # type: ignore[no-untyped-call]
            else:
                sources = {each: tensors[each].shape for each in stored.sources(target)}
                still = ~_made_of_parts(model, target, sources, wanted.fixed).to(parameters[target].device)
                held[target] = int(still.sum())
                hook = partial(Tensor.masked_fill, mask=still, value=0.0)
                parameters[target].register_hook(hook)  # type: ignore[no-untyped-call]
    return held


def _made_of_parts(
    model: nn.Module, target: str, shapes: Mapping[str, tuple[int, ...]], fixed: Mapping[str, Fixed]
) -> Tensor:
    """What trains of a parameter that transformers makes of these tensors on disk: true there, of its shape."""
    parts = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    for name, part in parts.items():
        for held in fixed[name].slices if name in fixed else ():
            part[held] = 0
    made: Tensor = as_loaded(model, parts, [target])[target]
    return made.bool()


def _without(fixed: Fixed) -> Callable[[Tensor], Tensor]:
    """A hook that takes the gradient of what is fixed away, before it is added up, clipped or sent anywhere."""

    def hook(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        for part in fixed.slices:
            gradient[part] = 0
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
