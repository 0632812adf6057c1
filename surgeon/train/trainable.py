"""The parameters that train: set on the model, and checked before the first step."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

from surgeon.errors import SurgeonError, printable
from surgeon.manifest.trainable import TrainableSet


class WrongSet(SurgeonError):
    """What would train is not what was asked for."""

    exit_code = 3


def unfreeze(model: nn.Module, wanted: TrainableSet, *, base_names: Collection[str]) -> list[str]:
    """Let exactly the wanted parameters train; returns their names in the model's order.

    Raises WrongSet where the model has no such parameter, or lacks one under another name than the checkpoint's.
    `base_names` are the checkpoint's tensors, for telling a parameter that is none of them.
    """
    names = {name for name, _ in model.named_parameters()}
    missing = [name for name in wanted.names if name not in names and not _is_tied(model, name)]
    if missing:
        raise WrongSet(f"{printable(missing[0])}: to train, yet the loaded model has no parameter of this name")
    chosen = set(wanted.names)
    for name, parameter in model.named_parameters():
        if name in chosen and name not in base_names:
            raise WrongSet(f"{printable(name)}: to train, yet the checkpoint has no tensor of this name")
        parameter.requires_grad_(name in chosen)
    check_set(model, wanted.names)
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def check_set(model: nn.Module, wanted: Iterable[str], *, optimizer: Any = None) -> None:
    """Raise WrongSet unless the parameters that train, and those an optimizer holds, are exactly the wanted ones."""
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
