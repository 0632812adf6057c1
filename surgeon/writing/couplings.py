"""The transport maps of a blueprint: solved at their first use, shared by recipes, freed after their last use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from surgeon.blueprint.recipes import Bench, Coupling, MapRef, Recipe, WholeHeads
from surgeon.errors import BadInput
from surgeon.transport.heads import AttentionWeights, head_maps
from surgeon.transport.maps import HalfIdentity, TransportMap, TransportSettings
from surgeon.transport.solving import match_rows, solve


class Maps:
    """The maps of `couplings`, whose rows `bench` computes. `reports` describe the solved maps, by name."""

    def __init__(self, couplings: Mapping[str, Coupling], bench: Bench) -> None:
        """Begin with no map solved."""
        self.reports: dict[str, dict[str, Any]] = {}
        self._couplings = couplings
        self._bench = bench
        self._maps: dict[str, TransportMap] = {}
        # The lower layer's rows after T_in, kept because both the cost and the fusion need them.
        self._aligned: dict[str, Tensor] = {}

    @property
    def solved(self) -> tuple[str, ...]:
        """Return the names of the maps in memory."""
        return tuple(self._maps)

    def get(self, ref: MapRef) -> TransportMap:
        """Return a map; solve it first where it is not yet solved."""
        assert ref.coupling is not None
        if ref.coupling not in self._maps:
            coupling = self._couplings[ref.coupling]
            if coupling.whole_heads is None:
                self._solve(coupling)
            else:
                self._solve_heads(coupling.whole_heads)
        found = self._maps[ref.coupling]
        return HalfIdentity(found) if ref.half_identity else found

    def aligned(self, coupling: str) -> Tensor:
        """Return the rows of the lower layer, after T_in, of a solved map."""
        return self._aligned[coupling]

    def forget(self, names: Iterable[str]) -> None:
        """Free maps; a map that is needed again is solved again."""
        for name in names:
            self._maps.pop(name, None)
            self._aligned.pop(name, None)

    def needed_by(self, recipe: Recipe) -> frozenset[str]:
        """Return the couplings that a recipe needs, including those that other couplings need."""
        found: set[str] = set()
        waiting = list(recipe.maps)
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting.extend(self._couplings[name].needs)
        return frozenset(found)

    def _solve(self, coupling: Coupling) -> None:
        """Solve one coupling's map and keep it; with `groups`, match experts instead.

        Raises BadInput where it has no solution.
        """
        lower, upper = self._rows(coupling)
        compared = self._compared(coupling, lower, upper)
        if coupling.groups is not None:
            self._match(coupling, compared, lower, coupling.groups)
            return
        try:
            with self._bench.stage(f"solve {coupling.name.rpartition('.')[2]}"):
                solved = solve(*compared, TransportSettings(**dict(coupling.settings)))
        except ValueError as error:
            raise BadInput(f"transport map {coupling.name}: {error}") from error
        self._keep(coupling.name, solved, lower)

    def _match(self, coupling: Coupling, compared: tuple[Tensor, Tensor], lower: Tensor, groups: int) -> None:
        """Match the experts of two routers and keep the assignment; `compared` are both routers' rows."""
        try:
            with self._bench.stage("match experts"):
                found = match_rows(*compared, groups=groups)
        except ValueError as error:
            raise BadInput(f"experts {coupling.name}: {error}") from error
        self._keep(coupling.name, found, lower)
        # For each expert of the upper layer, its partner in the lower layer.
        self.reports[coupling.name]["partners"] = [found.source_of(number) for number in range(found.m)]

    def _solve_heads(self, whole: WholeHeads) -> None:
        """Solve the maps of query, key and value together, because all three use the same assignment of heads.

        Raises BadInput where they have no solution.
        """
        couplings = [self._couplings[name] for name in whole.names]
        (query, key, value) = [self._rows(coupling) for coupling in couplings]
        outputs = [self._bench.working(recipe) for recipe in whole.output]
        first, second = (AttentionWeights(query[i], key[i], value[i], outputs[i]) for i in (0, 1))
        try:
            with self._bench.stage("solve heads"):
                found = head_maps(
                    first,
                    second,
                    TransportSettings(**dict(couplings[0].settings)),
                    n_heads=whole.heads,
                    n_kv_heads=whole.kv_heads,
                    head_dim=whole.head_dim,
                )
        except ValueError as error:
            raise BadInput(f"transport maps {', '.join(whole.names)}: {error}") from error
        self._keep(whole.query, found.query, query[0])
        self._keep(whole.key, found.key, key[0])
        self._keep(whole.value, found.key, value[0])

    def _rows(self, coupling: Coupling) -> tuple[Tensor, Tensor]:
        """Return (lower, upper): a coupling's rows of the lower layer after T_in, and of the upper layer."""
        rows = slice(coupling.start, coupling.stop)
        lower = self._bench.align_columns(self._bench.working(coupling.first)[rows], coupling.t_in)
        return lower, self._bench.working(coupling.second)[rows]

    def _compared(self, coupling: Coupling, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
        """Return (first, second): the rows from which a coupling's cost is computed.

        These are the lower rows before T_in with `cost_first`, else `lower` (after T_in) and `upper` as they are.
        """
        if coupling.cost_first:
            return self._bench.working(coupling.first)[coupling.start : coupling.stop], upper
        return lower, upper

    def _keep(self, name: str, solved: TransportMap, lower: Tensor) -> None:
        """Keep a solved map, its report, and the lower layer's rows `lower` that were aligned for it."""
        self._maps[name] = solved
        self._aligned[name] = lower
        self.reports[name] = solved.solution.to_report()
