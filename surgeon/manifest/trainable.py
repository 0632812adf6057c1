"""Which tensors of an output may train, told by its manifest. Reads no weights and imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.errors import BadInput, printable
from surgeon.manifest.lineage import Lineage
from surgeon.manifest.manifest import MANIFEST_FILE, Manifest

What = Literal["last", "all"] | Sequence[int]


@dataclass(frozen=True)
class TrainableSet:
    """Names of tensors that train, in the order of the checkpoint, and the operations that made them, in order."""

    names: tuple[str, ...]
    operations: tuple[str, ...]


def trainable_set(out: CheckpointFolder, manifest: Manifest, what: What) -> TrainableSet:
    """The tensors of `out` that `what` lets train: of the last surgery, of all, or of operations of the last one.

    An operation that trains everything (SOLAR) adds every tensor. Raises BadInput where there is no such operation,
    where a tensor is missing, where an ancestor's manifest was edited or not kept, and where nothing is left to train.
    """
    shown = printable(str(out.path / MANIFEST_FILE))
    chosen: dict[str, None] = {}
    operations: list[str] = []
    everything = False
    lineage = Lineage.of(manifest, file=str(out.path / MANIFEST_FILE)) if what == "all" else None
    surgeries = (manifest,) if lineage is None else lineage.since(0)
    for nth, surgery in enumerate(surgeries, 1):
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
        made = [name for name, tensor in surgery.new_tensors.items() if tensor.operation in numbers]
        now = made if lineage is None else lineage.places(nth, made).values()
        # A later merge may have folded an earlier surgery's branches away.
        chosen |= dict.fromkeys(name for name in now if surgery is manifest or name in out.tensors)
    if everything:
        chosen = dict.fromkeys(out.tensors)
    missing = [name for name in chosen if name not in out.tensors]
    if missing:
        raise BadInput(f"{shown}: names the new tensor {printable(missing[0])}, which no shard has; download it again")
    if not chosen:
        raise BadInput(f"{shown}: nothing to train: what was asked for has no new tensor")
    return TrainableSet(tuple(name for name in out.tensors if name in chosen), tuple(operations))
