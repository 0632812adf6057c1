"""References by name to the transport maps that align rows and columns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MapRef:
    """A transport map by the name of its coupling (None: the identity), optionally as ½ (T + I)."""

    coupling: str | None = None
    half_identity: bool = False

    def __str__(self) -> str:
        """Return the map's name for messages and for `how`."""
        if self.coupling is None:
            return "identity"
        return f"½({self.coupling} + identity)" if self.half_identity else self.coupling


IDENTITY = MapRef()


@dataclass(frozen=True, slots=True)
class Block:
    """Rows `start:stop` of a tensor, aligned by `t_in` from the right and `t_out` from the left.

    For rows of a matrix `t_out` was solved for exactly these, after `t_in`.
    """

    start: int
    stop: int
    t_in: MapRef
    t_out: MapRef
