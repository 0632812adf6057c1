"""References by name to the transport maps that align rows and columns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MapRef:
    """A transport map by the name of its coupling (None: the identity), optionally as ½ (T + I).

    With `spread` > 1, T maps units of `spread` rows each, and the map used is T ⊗ I: whole units onto whole units.
    """

    coupling: str | None = None
    half_identity: bool = False
    spread: int = 1

    def __str__(self) -> str:
        """Return the map's name for messages and for `how`."""
        if self.coupling is None:
            return "identity"
        if self.spread > 1:
            return f"{self.coupling} by {self.spread}"
        return f"½({self.coupling} + identity)" if self.half_identity else self.coupling


IDENTITY = MapRef()


@dataclass(frozen=True, slots=True)
class Block:
    """Rows `start:stop` of a tensor, aligned by `t_in` from the right and `t_out` from the left.

    `own`: `t_out` was solved for exactly these rows, after `t_in`; otherwise for more rows than these.
    """

    start: int
    stop: int
    t_in: MapRef
    t_out: MapRef
    own: bool = True
