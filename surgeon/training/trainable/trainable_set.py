"""Functions that set exactly the wanted parameters of a model to train, and check them before the first step.

Manifests and plans use a tensor's name on disk; a loaded model may use another name. Most names are the same. For a
mixture of experts a checkpoint may store one tensor per expert where the model has one parameter for all experts:
transformers converts between them when it loads and when it saves. This module asks transformers for both conversions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
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
    """The parameters that would train are not exactly the wanted ones."""


class StoredNames:
    """A map from tensors on disk, `names` (duplicates allowed), to parameters and buffers of a `model`, and back."""

    def __init__(self, model: Any, names: Iterable[str]) -> None:
        """Map `names` to the model's parameters and buffers, by transformers' conversions where names differ."""
        self.model = model
        held = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        held |= {name for name, _ in model.named_buffers()}
        names = dict.fromkeys(names)
        # Only names that differ need transformers' conversion.
        apart = [name for name in names if name not in held]
        self._made = {name: Made((name,), False) for name in names if name in held}
        self._made |= made_of(model, apart) if apart else {}
        self._sources: dict[str, list[str]] = {}
        for name, made in self._made.items():
            for target in made.names:
                self._sources.setdefault(target, []).append(name)

    def in_memory(self, names: Iterable[str]) -> list[str]:
        """Return the parameters that are made from these tensors on disk; buffers are left out, as they do not train.

        Raises WrongSet where a parameter is also made from a tensor that is not among `names`.
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
        """Return the parameters or buffers that are made from this tensor on disk, alone or with others."""
        return self._made[name].names

    def sources(self, target: str) -> list[str]:
        """Return the tensors on disk from which a parameter is made; empty for a parameter that the map lacks."""
        return self._sources.get(target, [])

    def alone(self, name: str) -> str | None:
        """Return the parameter that is this tensor on disk; None where it is converted or combined with others."""
        made = self._made[name]
        if made.converted or len(made.names) != 1 or self._sources[made.names[0]] != [name]:
            return None
        return made.names[0]

    def on_disk(self, tensors: Mapping[str, Tensor], *, also: Iterable[str] = ()) -> dict[str, Tensor]:
        """Convert tensors, given by their names in memory, to tensors by their names on disk.

        A name in `also` that is another name of the same parameter gets the same value (tied embeddings stored twice).
        Raises WrongSet where transformers would store other names than the checkpoint has.
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
    """The parameters of a loaded model that a run publishes.

    `names` train, in the model's order. `fixed` has, by name, how many numbers of a parameter do not train. `fitted`
    got their values before the first step.
    """

    names: tuple[str, ...]
    fixed: Mapping[str, int] = field(default_factory=dict)
    fitted: tuple[str, ...] = ()

    @property
    def published(self) -> tuple[str, ...]:
        """The names of all published parameters: the ones that train, then the fitted ones."""
        return (*self.names, *self.fitted)


def unfreeze(model: nn.Module, wanted: TrainableSet, *, base_names: Collection[str]) -> list[str]:
    """Set exactly the parameters of `wanted` to train; return their names in the model, in the model's order.

    `wanted` names tensors on disk; `base_names` are all tensors of the checkpoint. Raises WrongSet where the model has
    no such parameter, the checkpoint has no such tensor, or a parameter is also made from tensors that must not train.
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
    """Zero the gradient of the fixed parts of parameters; return how many numbers are fixed, by the parameter's name.

    Their gradient is zero from the first step on, so AdamW's moments are zero too. Without weight decay the update is
    then exactly zero, and the fixed numbers do not change. `tensors` are all tensors of the checkpoint. In a parameter
    that transformers converts, or makes from several tensors, the fixed part is what the fixed parts on disk become.
    """
    held: dict[str, int] = {}
    if not wanted.fixed:
        return held
    stored = StoredNames(model, (*tensors, *wanted.names))
    parameters = dict(model.named_parameters())
    for name in wanted.names:
        for target in stored.targets(name) if name in wanted.fixed else ():
            # Tied embeddings have two names, of which `named_parameters` has one.
            if target not in parameters or target in held:
                continue
            if stored.alone(name) == target:
                fixed = wanted.fixed[name]
                held[target] = fixed.size
                hook = partial(_without, fixed=fixed)
            else:
                sources = {each: tensors[each].shape for each in stored.sources(target)}
                still = ~_made_of_parts(model, target, sources, wanted.fixed).to(parameters[target].device)
                held[target] = int(still.sum())
                hook = partial(Tensor.masked_fill, mask=still, value=0.0)
            # The gradient is changed before it is accumulated, clipped or reduced.
            parameters[target].register_hook(hook)  # type: ignore[no-untyped-call]
    return held


def _made_of_parts(
    model: nn.Module, target: str, shapes: Mapping[str, tuple[int, ...]], fixed: Mapping[str, Fixed]
) -> Tensor:
    """Return a mask of a parameter that transformers makes from these tensors on disk: true where it trains."""
    parts = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    for name, part in parts.items():
        for held in fixed[name].slices if name in fixed else ():
            part[held] = 0
    made: Tensor = as_loaded(model, parts, [target])[target]
    return made.bool()


def _without(gradient: Tensor, fixed: Fixed) -> Tensor:
    """Return a copy of the gradient with zeros in the fixed parts."""
    gradient = gradient.clone()
    for part in fixed.slices:
        gradient[part] = 0
    return gradient


def check_set(model: nn.Module, wanted: Iterable[str], *, optimizer: Any = None) -> None:
    """Raise WrongSet unless exactly the parameters `wanted` train, and an optimizer, if given, has exactly these."""
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
    """Return whether a parameter has this name, also as its second name (a tied output embedding)."""
    return name in dict(model.named_parameters(remove_duplicate=False))
