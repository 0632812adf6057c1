"""The assignment of output tensors to shards.

Base tensors keep their shard and order, so that a shard is one pass over its base shard; new tensors go into separate
shards, so that a surgery's delta is a set of files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from surgeon.blueprint.blueprint import Output
from surgeon.checkpoint.header import ALIGNMENT, Header, TensorInfo, build_header
from surgeon.checkpoint.pieces import Pieces, Span
from surgeon.checkpoint.weights import SINGLE_FILE

MAX_NEW_SHARD_BYTES = 2_000_000_000


@dataclass(frozen=True)
class Shard:
    """One file of the output and its tensors in the order of the file.

    `mirrored` is the name of the base shard with the same tensors; None for a shard of new tensors.
    """

    file: str
    outputs: tuple[Output, ...]
    mirrored: str | None

    @property
    def nbytes(self) -> int:
        """Return the bytes of tensor data."""
        return sum(output.nbytes for output in self.outputs)


def header_of(shard: Shard, mirrored: Header | None) -> tuple[bytes, list[tuple[int, int]]]:
    """Return the bytes before the data of a shard's file, and each tensor's (begin, end) in the file.

    The data has the same alignment as in the file it mirrors (`mirrored` is that header), because arithmetic on
    mapped weights depends on it. Shards of saved checkpoints begin at multiples of eight; where one does not, the shard
    cannot equal that file (`is_unchanged`).
    """
    entries = [(output.name, output.recipe.dtype, output.recipe.shape) for output in shard.outputs]
    begins = 0 if mirrored is None else mirrored.data_begin
    return build_header(entries, metadata={"format": "pt"}, phase=begins % ALIGNMENT // 8 * 8)


def is_unchanged(shard: Shard, data: Pieces, place: str, mirrored: Header) -> bool:
    """Return whether a shard's file equals the base's file at `place` byte for byte, header included.

    `data` lists the files that the shard's data is made of; `mirrored` is the header of the file at `place`.
    """
    named = [(info.name, info.dtype, info.shape) for info in mirrored.tensors]
    same = named == [(output.name, output.recipe.dtype, output.recipe.shape) for output in shard.outputs]
    return same and data.spans == (Span(place, mirrored.data_begin, shard.nbytes),) and mirrored.data_begin % 8 == 0


def lay_out(
    outputs: Sequence[Output], base: Mapping[str, TensorInfo], *, max_new_shard_bytes: int = MAX_NEW_SHARD_BYTES
) -> tuple[Shard, ...]:
    """Return the shards of `outputs`: the base's first, then new ones, cut between layers at `max_new_shard_bytes`."""
    mirrored: dict[str, list[Output]] = {}
    for output in outputs:
        if not output.new:
            mirrored.setdefault(_source(output, base).file, []).append(output)
    groups: list[tuple[str | None, list[Output]]] = [
        (file, sorted(kept, key=lambda output: _source(output, base).begin)) for file, kept in sorted(mirrored.items())
    ]
    groups.extend((None, made) for made in _new_shards(outputs, max_new_shard_bytes))
    total = len(groups)
    return tuple(
        Shard(SINGLE_FILE if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors", tuple(held), mirrored)
        for number, (mirrored, held) in enumerate(groups, 1)
    )


def _source(output: Output, base: Mapping[str, TensorInfo]) -> TensorInfo:
    """Return the base tensor whose bytes an output moves; the first one where there are several."""
    return base[output.pieces.spans[0].tensor]


def group_by_layer(outputs: Sequence[Output]) -> list[list[Output]]:
    """Group outputs of the same layer, in the order in which layers first occur."""
    layers: dict[str, list[Output]] = {}
    for output in outputs:
        before, _, after = output.name.partition("layers.")
        layers.setdefault(before + after.partition(".")[0], []).append(output)
    return list(layers.values())


def _new_shards(outputs: Sequence[Output], limit: int) -> list[list[Output]]:
    """Distribute the new tensors over shards of at most `limit` bytes; a layer stays whole, even where it is larger."""
    shards: list[list[Output]] = []
    room = 0
    for layer in group_by_layer([output for output in outputs if output.new]):
        size = sum(output.nbytes for output in layer)
        if not shards or size > room:
            shards.append([])
            room = limit
        shards[-1].extend(layer)
        room -= size
    return shards
