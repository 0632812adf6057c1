"""Which transport map aligns which rows and columns, by name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MapRef:
    """A transport map by the name of its coupling (None: the identity), perhaps as ½ (T + I).

    Of a map between units of so many rows, `spread`, it is T ⊗ I: whole units onto whole units.
    """

    coupling: str | None = None
    half_identity: bool = False
    spread: int = 1

    def __str__(self) -> str:
        if self.coupling is None:
            return "identity"
        if self.spread > 1:
            return f"{self.coupling} by {self.spread}"
        return f"½({self.coupling} + identity)" if self.half_identity else self.coupling


IDENTITY = MapRef()


@dataclass(frozen=True, slots=True)
class Block:
    """Rows `start:stop` of a tensor, aligned by `t_in` from the right and `t_out` from the left.

    `own`: the map `t_out` was solved for these very rows, after `t_in`; else for more than these.
    """

    start: int
    stop: int
    t_in: MapRef
    t_out: MapRef
    own: bool = True
