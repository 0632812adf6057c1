"""Which parameters train: told by the manifest, set on the model, and checked before the first step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.errors import BadInput, SurgeonError, printable
from surgeon.families.anatomy import renumbered
from surgeon.manifest import MANIFEST_FILE, Manifest, layers_of, parse

What = Literal["last", "all"] | Sequence[int]


class WrongSet(SurgeonError):
    """What would train is not what was asked for."""

    exit_code = 3


@dataclass(frozen=True)
class TrainableSet:
    """Names of tensors that train, in the order of the checkpoint, and the operations that made them, in order."""

    names: tuple[str, ...]
    operations: tuple[str, ...]


def trainable_set(out: CheckpointFolder, manifest: Manifest, what: What) -> TrainableSet:
    """The tensors of `out` that `what` lets train: of the last surgery, of all, or of operations of the last one.

    An operation that trains everything (SOLAR) adds every tensor. Raises BadInput where there is no such operation,
    where a tensor is missing, where an ancestor's manifest was not kept, and where nothing is left to train.
    """
    shown = printable(str(out.path / MANIFEST_FILE))
    chosen: dict[str, None] = {}
    operations: list[str] = []
    everything = False
    surgeries = [manifest] if what != "all" else [*_ancestors(manifest, shown), manifest]
    for nth, surgery in enumerate(surgeries):
        numbers = list(range(len(surgery.operations)))
        if not isinstance(what, str):
            unknown = [number for number in what if number not in numbers]
            if unknown:
                raise BadInput(
                    f"{shown}: there is no operation {unknown[0]} in the last surgery; it has"
                    f" {', '.join(f'{n} ({printable(surgery.operations[n].op)})' for n in numbers)}"
                )
            numbers = sorted(set(what))
        for number in numbers:
            operations.append(surgery.operations[number].op)
            everything = everything or surgery.operations[number].trains == "all"
        later = [layers_of(each, file=str(out.path / MANIFEST_FILE)) for each in surgeries[nth + 1 :]]
        for name, tensor in surgery.new_tensors.items():
            now = _name_now(name, later)
            # A later merge may have folded an earlier surgery's branches away.
            if tensor.operation in numbers and (not later or now in out.tensors):
                chosen[now] = None
    if everything:
        chosen = dict.fromkeys(out.tensors)
    missing = [name for name in chosen if name not in out.tensors]
    if missing:
        raise BadInput(f"{shown}: names the new tensor {printable(missing[0])}, which no shard has; download it again")
    if not chosen:
        raise BadInput(f"{shown}: nothing to train: what was asked for has no new tensor")
    return TrainableSet(tuple(name for name in out.tensors if name in chosen), tuple(operations))


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


def _ancestors(manifest: Manifest, shown: str) -> list[Manifest]:
    found: list[Manifest] = []
    for number, ancestor in enumerate(manifest.lineage, 1):
        if ancestor.manifest is None:
            raise BadInput(
                f"{shown}: does not hold the manifest of surgery {number}, since an older surgeon"
                f" ({printable(ancestor.tool)}) wrote it; train `what: last`, or apply the plans again with this one"
            )
        found.append(parse(ancestor.manifest | {"lineage": []}, file=f"{shown} (surgery {number})"))
    return found


def _name_now(name: str, later: list[dict[int, int]]) -> str:
    for layers in later:
        try:
            name = renumbered(name, layers)
        except KeyError:
            raise BadInput(
                f"{MANIFEST_FILE}: {printable(name)} is in a layer that a later surgery did not find; was it edited"
                " by hand?"
            ) from None
    return name
