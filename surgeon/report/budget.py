"""How many parameters an output has, from the base and from its surgeries, and the memory to train them."""

from __future__ import annotations

from dataclasses import dataclass

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.families.anatomy import layer_of, owner_of
from surgeon.manifest.manifest import Manifest
from surgeon.report.history import History
from surgeon.runtime.states_rules import BANK

BF16_BYTES = 2


# AdamW keeps two moments of every trained parameter, in float32.
ADAMW_BYTES = 8


@dataclass(frozen=True)
class Budget:
    """Counts of parameters; tied embeddings count once. `base` + `earlier` + `new` is the whole output.

    `earlier` come from surgeries before the last. Bytes of weights and gradients are in bf16, AdamW's two
    moments in float32.
    """

    base: int
    earlier: int
    new: int
    trainable: int
    stored_bytes: int

    @property
    def total(self) -> int:
        """All parameters of the output."""
        return self.base + self.earlier + self.new

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in bf16."""
        return BF16_BYTES * self.total

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients in bf16."""
        return BF16_BYTES * self.trainable

    @property
    def optimiser_bytes(self) -> int:
        """Bytes of AdamW's moments."""
        return ADAMW_BYTES * self.trainable

    @property
    def full_optimiser_bytes(self) -> int:
        """Bytes of AdamW's moments if everything trained."""
        return ADAMW_BYTES * self.total


def parameter_budget(folder: CheckpointFolder, manifest: Manifest, history: History) -> Budget:
    """Count the output's parameters from its headers, manifest and lineage."""
    counts = {"base": 0, "earlier": 0, "new": 0}
    for name, info in folder.tensors.items():
        counts[_origin(name, manifest, history)] += info.numel
    total = sum(counts.values())
    everything = any(entry.trains == "all" for entry in manifest.operations)
    return Budget(
        **counts,
        trainable=total if everything else counts["new"],
        stored_bytes=sum(info.nbytes for info in folder.tensors.values()),
    )


def _origin(name: str, manifest: Manifest, history: History) -> str:
    if name in manifest.new_tensors:
        return "new"
    place = layer_of(name)
    if place is None:
        return "earlier" if BANK in name else "base"
    _, index, suffix = place
    grafted = owner_of(suffix) is not None or history.layers[index].base is None
    return "earlier" if grafted else "base"
