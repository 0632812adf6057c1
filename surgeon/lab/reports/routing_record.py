"""The record of what routers and gates choose, as `surgeon routing-report --to` writes it and `report` shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from surgeon.common.json_results import plain_fields

# The number of a layer, and its block.
Site = tuple[int, Literal["attention", "ffn"]]


@dataclass(frozen=True)
class RouterChoices:
    """PMoE's router on one text: mean weight of each slot, and share of tokens that prefer each slot."""

    mean: tuple[float, ...]
    largest: tuple[float, ...]


@dataclass(frozen=True)
class GateChoices:
    """A gate on one text: its mean value (α for an interpolator), and the share of tokens for which it is zero.

    `loudness` is the mean of ‖output‖₁ / width of an adapter; None for an interpolator.
    """

    mean: float
    closed: float
    loudness: float | None


@dataclass(frozen=True)
class ExpertChoices:
    """Routed experts of one layer on one text: for each expert, the share of tokens that take it."""

    tokens: tuple[float, ...]

    @property
    def unused(self) -> int:
        """The number of experts that no token takes."""
        return sum(share == 0 for share in self.tokens)


@dataclass(frozen=True)
class TextChoices:
    """The choices on one text of `tokens` tokens.

    `states[s][k]` is the weight that site s gave control state k, mean over tokens; rows are in the order of
    `RoutingReport.sites`. `gates` are by the layer's number and the module (`3.adapter`, `3.interpolator`), `experts`
    by the layer's number (`3`, or `3.branch`).
    """

    tokens: int
    router: RouterChoices | None
    states: tuple[tuple[float, ...], ...]
    gates: Mapping[str, GateChoices]
    experts: Mapping[str, ExpertChoices]


@dataclass(frozen=True)
class RouterPlace:
    """The place of a router: the number of layers below it, and its number of slots."""

    layer: int
    slots: int


@dataclass(frozen=True)
class RoutingReport:
    """The choices of routers and gates on each text; `sites` lists (layer, block) of the control states."""

    model: str
    router: RouterPlace | None
    sites: tuple[Site, ...]
    texts: Mapping[str, TextChoices]

    def __repr__(self) -> str:
        return f"RoutingReport({self.model!r}, {self.slots} slots, {len(self.sites)} sites, texts {list(self.texts)})"

    @property
    def slots(self) -> int:
        """The number of the router's slots; 0 without a router."""
        return self.router.slots if self.router else 0

    @property
    def gates(self) -> list[str]:
        """The names of all gates."""
        return list(dict.fromkeys(gate for text in self.texts.values() for gate in text.gates))

    @property
    def routed(self) -> bool:
        """Whether layers have routed experts."""
        return any(text.experts for text in self.texts.values())

    def most_used(self, text: TextChoices, most: int) -> str:
        """Return, as text, the control states with most of a text's weight, and their shares of it."""
        sums = [sum(row[state] for row in text.states) for state in range(len(self.sites))]
        total = sum(sums) or 1.0
        order = sorted(range(len(sums)), key=lambda state: -sums[state])[:most]
        return ", ".join(f"{self.sites[s][0]}.{self.sites[s][1]} {sums[s] / total:.0%}" for s in order if sums[s])

    def to_json(self) -> dict[str, Any]:
        """Return plain data: the file's content and `--json`.

        Keys:
            `surgeon_routing`: version of the format
            `model`: the output's name
            `router`: its `layer` and `slots`, or null
            `sites`: each site's layer and block
            `texts`: by name `tokens`, `router` (`mean`, `largest`), `states`, `gates`, `experts` (by layer `tokens`,
                each expert's share of them)
        """
        return {"surgeon_routing": 1, **plain_fields(self)}
