"""Which output tensor goes into which shard.

Base tensors keep the shard and the order they had, so that a shard is one pass over its twin; new tensors
live in shards of their own, so that a surgery's delta is a set of files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from surgeon.blueprint.draft import Blueprint, Output
from surgeon.blueprint.recipes import Constant, Copy, numel
from surgeon.checkpoint.header import DTYPE_BITS, TensorInfo

MAX_NEW_SHARD_BYTES = 2_000_000_000


@dataclass(frozen=True)
class Shard:
    """One file of the output and its tensors in the order of the file. `twin` is the base shard it mirrors."""

    file: str
    outputs: tuple[Output, ...]
    twin: str | None

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        return sum(nbytes(output) for output in self.outputs)


def nbytes(output: Output) -> int:
    """Bytes one output tensor takes."""
    return numel(output.recipe) * DTYPE_BITS[output.recipe.dtype] // 8


def is_hole(output: Output) -> bool:
    """Whether the tensor is all zeros, which a file stores as a hole: no bytes written, none on disk."""
    return isinstance(output.recipe, Constant) and output.recipe.value == 0


def lay_out(
    blueprint: Blueprint, base: Mapping[str, TensorInfo], *, max_new_shard_bytes: int = MAX_NEW_SHARD_BYTES
) -> tuple[Shard, ...]:
    """Shards of the output: the base's first, then the new ones, cut between layers at `max_new_shard_bytes`."""
    mirrored: dict[str, list[Output]] = {}
    for output in blueprint.outputs:
        if not output.new:
            assert isinstance(output.recipe, Copy), output.name
            mirrored.setdefault(base[output.recipe.source].file, []).append(output)
    groups: list[tuple[str | None, list[Output]]] = [
        (file, sorted(outputs, key=lambda output: _offset(output, base))) for file, outputs in sorted(mirrored.items())
    ]
    groups.extend((None, outputs) for outputs in _new_shards(blueprint, max_new_shard_bytes))
    total = len(groups)
    return tuple(
        Shard(_shard_name(number, total), tuple(outputs), twin) for number, (twin, outputs) in enumerate(groups, 1)
    )


def _offset(output: Output, base: Mapping[str, TensorInfo]) -> int:
    assert isinstance(output.recipe, Copy)
    return base[output.recipe.source].begin


def _shard_name(number: int, total: int) -> str:
    return "model.safetensors" if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"


def group_by_layer(outputs: Sequence[Output]) -> list[list[Output]]:
    """Outputs of the same layer together, in the order in which layers first occur."""
    layers: dict[str, list[Output]] = {}
    for output in outputs:
        before, _, after = output.name.partition("layers.")
        layers.setdefault(before + after.partition(".")[0], []).append(output)
    return list(layers.values())


def _new_shards(blueprint: Blueprint, limit: int) -> list[list[Output]]:
    shards: list[list[Output]] = []
    room = 0
    for outputs in group_by_layer([output for output in blueprint.outputs if output.new]):
        size = sum(nbytes(output) for output in outputs)
        if not shards or size > room:
            shards.append([])
            room = limit
        shards[-1].extend(outputs)
        room -= size
    return shards
