"""Exactly the wanted parameters train: set on the model, and checked before the first step.

They have names on disk, as manifests and plans say them, and names in the loaded model. Most are the same. Of a mixture
of experts a checkpoint may hold one tensor for each expert where the model has one for all: transformers makes the one
of the other when it loads, and the reverse when it saves; here it is asked for both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from surgeon.anatomy.names import Made, as_loaded, made_of
from surgeon.checkpoint.header import TensorInfo
from surgeon.errors import SurgeonError, printable
from surgeon.manifest.trainable import Fixed, TrainableSet


class WrongSet(SurgeonError):
    """Other parameters would train than are to."""


class StoredNames:
    """Maps tensors on disk, called `names` (one may come twice), to those of a loaded `model`, and back."""

    def __init__(self, model: Any, names: Iterable[str]) -> None:
        self.model = model
        held = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        held |= {name for name, _ in model.named_buffers()}
        names = dict.fromkeys(names)
        # Where names are the same, transformers is not asked.
        apart = [name for name in names if name not in held]
        self._made = {name: Made((name,), False) for name in names if name in held}
        self._made |= made_of(model, apart) if apart else {}
        self._sources: dict[str, list[str]] = {}
        for name, made in self._made.items():
            for target in made.names:
                self._sources.setdefault(target, []).append(name)

    def in_memory(self, names: Iterable[str]) -> list[str]:
        """The parameters that these tensors on disk make; buffers do not train.

        Raises WrongSet where one is made of others too.
        """
        wanted = set(names)
        buffers = {name for name, _ in self.model.named_buffers()}
        found = dict.fromkeys(target for name in wanted for target in self._made[name].names if target not in buffers)
        for target in found:
            if others := [name for name in self._sources[target] if name not in wanted]:
                raise WrongSet(
                    f"{printable(target)}: to train, yet it is made of {printable(others[0])} too, which is not;"
                    " nothing was trained"
                )
        return list(found)

    def targets(self, name: str) -> tuple[str, ...]:
        """The parameters, or buffers, that this tensor on disk is a part of."""
        return self._made[name].names

    def sources(self, target: str) -> list[str]:
        """The tensors on disk that make a parameter."""
        return self._sources.get(target, [])

    def alone(self, name: str) -> str | None:
        """The parameter that this tensor on disk makes alone, and as it is; None where it is converted."""
        made = self._made[name]
        if made.converted or len(made.names) != 1 or self._sources[made.names[0]] != [name]:
            return None
        return made.names[0]

    def on_disk(self, tensors: Mapping[str, Tensor], *, also: Iterable[str] = ()) -> dict[str, Tensor]:
        """Tensors by their names in memory as they are stored. Raises WrongSet where transformers stores others.

        Those of `also` that are other names of the same parameters get the same values (tied embeddings stored twice).
        """
        from transformers.core_model_loading import revert_weight_conversion

        plain: dict[str, Tensor] = {}
        same = {id(p): name for name, p in self.model.named_parameters() if name in tensors}
        every = dict(self.model.named_parameters(remove_duplicate=False))
        for name in also:
            if name in self._made and name not in tensors and name in every and id(every[name]) in same:
                plain[name] = tensors[same[id(every[name])]].clone()
        converted: dict[str, Tensor] = {}
        for target, value in tensors.items():
            first = self._sources[target][0]
            if self._made[first].converted:
                converted[target] = value
            else:
                plain[first] = value
        if not converted:
            return plain
        made = revert_weight_conversion(self.model, converted)
        wanted = {name for target in converted for name in self._sources[target]}
        if odd := wanted ^ made.keys():
            raise WrongSet(
                f"{printable(min(odd))}: transformers stores what trained under other names than the checkpoint has;"
                " save the base with this version of transformers once, and operate on that"
            )
        return plain | {name: value.contiguous() for name, value in made.items()}


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
    stored = StoredNames(model, (*base_names, *wanted.names))
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
    stored = StoredNames(model, (*tensors, *wanted.names)) if wanted.fixed else None
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
