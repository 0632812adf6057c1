"""An examined base: the data from which questions about it are answered."""

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
    """An examined base: its config.json, the findings about its type, and its tensors' names.

    `packed` and `parts` hold the quantised tensors and the parts of each kind of layers.
    """

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
        """For each kind of layers, its lowest layer, and that layer's names in memory by suffix on disk."""
        return [(index, self.names.layers[index]) for index in self.derived.firsts]

    def places(self, kind: int) -> dict[str, str]:
        """Return names in memory, by suffix, of a kind's tensors that are the same in memory as on disk."""
        first, names = self.firsts[kind]
        return {
            part.suffix: names[part.suffix][0]
            for part in self.parts[kind]
            if len(names[part.suffix]) == 1 and f"{self.names.stem}{first}.{part.suffix}" not in self.names.converted
        }
