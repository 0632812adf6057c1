"""A derivation that knows answers from elsewhere, and has the base's own made where it is asked for another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from surgeon.families.anatomy import Derivation, Stream
from surgeon.families.family import Part, Space


class Deferred(Derivation):
    """What the kinds of derivations share that know some answers: the base's `own` is made when it is needed.

    Making it takes torch and transformers. Proofs are always its own.
    """

    def __init__(self, make: Callable[[], Derivation]) -> None:
        self._make = make
        self._made: Derivation | None = None

    @property
    def own(self) -> Derivation:
        """The base's own derivation."""
        if self._made is None:
            self._made = self._make()
        return self._made

    @property
    def is_new(self) -> bool:
        """Whether the base's own derivation was needed."""
        return self._made is not None

    def own_activation(self, layer: int) -> str:
        """As `Derivation` says."""
        return self.own.own_activation(layer)

    def spaces(self, layer: int) -> tuple[Space, ...]:
        """As `Derivation` says."""
        return self.own.spaces(layer)

    def prove(
        self,
        grown: Mapping[str, Any],
        order: Sequence[int],
        kept: Sequence[bool],
        silenced: Sequence[Mapping[str, float]],
        silent: Mapping[int, Mapping[str, float]],
    ) -> None:
        """As `Derivation` says."""
        self.own.prove(grown, order, kept, silenced, silent)

    def inner_fields(self, *, by: int = 0, multiple_of: int = 1) -> dict[str, int]:
        """As `Derivation` says."""
        return self.own.inner_fields(by=by, multiple_of=multiple_of)

    def expert_layouts(self) -> tuple[dict[str, list[list[tuple[str, int]]]], ...]:
        """As `Derivation` says."""
        return self.own.expert_layouts()

    def growths(self, fields: Mapping[str, int]) -> tuple[dict[str, tuple[int, int, int]], ...]:
        """As `Derivation` says."""
        return self.own.growths(fields)

    def shared_parts(self) -> dict[str, Part]:
        """As `Derivation` says."""
        return self.own.shared_parts()

    def adapted_ffns(self) -> dict[int, dict[str, tuple[tuple[str, str], ...]]]:
        """As `Derivation` says."""
        return self.own.adapted_ffns()

    def shared_growths(self, fields: Mapping[str, int]) -> dict[str, tuple[int, int, int]]:
        """As `Derivation` says."""
        return self.own.shared_growths(fields)

    def stream(self, times: int) -> Stream:
        """As `Derivation` says."""
        return self.own.stream(times)

    def shared_places(self, order: Sequence[int]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """As `Derivation` says."""
        return self.own.shared_places(order)

    def parameters(self) -> dict[str, tuple[str, str]]:
        """As `Derivation` says."""
        return self.own.parameters()

    def check_runs(self, grown: Mapping[str, Any]) -> None:
        """As `Derivation` says."""
        self.own.check_runs(grown)

    def prove_grafts(self, trunk: Mapping[str, Any], grafted: Mapping[str, Any]) -> None:
        """As `Derivation` says."""
        self.own.prove_grafts(trunk, grafted)
