"""What a base was found to be: what the questions about it are asked of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surgeon.anatomy.derived import Derived
from surgeon.anatomy.family import Packed, Part
from surgeon.anatomy.names import Names
from surgeon.anatomy.skeleton import Skeleton


@dataclass(frozen=True)
class Seen:
    """A base's config.json, what was found of its type, and its tensors' names; by kind of layers, parts and packs."""

    config: Mapping[str, Any]
    derived: Derived
    names: Names
    packed: tuple[Mapping[str, Packed], ...]
    parts: tuple[tuple[Part, ...], ...]

    @property
    def skeleton(self) -> Skeleton:
        """The model as transformers builds it."""
        return self.derived.skeleton

    @property
    def firsts(self) -> list[tuple[int, Mapping[str, tuple[str, ...]]]]:
        """Of each kind of layers the lowest layer, and its names in memory by suffix on disk."""
        lowest = (self.derived.kind_of.index(kind) for kind in range(len(self.parts)))
        return [(index, self.names.layers[index]) for index in lowest]

    def places(self, kind: int) -> dict[str, str]:
        """The names in memory of the tensors of a kind of layers that are there as they are on disk, by suffix."""
        first, names = self.firsts[kind]
        return {
            part.suffix: names[part.suffix][0]
            for part in self.parts[kind]
            if len(names[part.suffix]) == 1 and f"{self.names.stem}{first}.{part.suffix}" not in self.names.converted
        }
