"""Control states (Mixture-of-Control): what `config.surgery` says of them.

    "control_states": [{"layer": 0, "sites": ["attention", "ffn"]}],
    "mixture": {"rank": 256, "top_k": 1, "alpha": 0.95, …}

The first says which blocks carry a control state, the second how all of them, one bank of the model, mix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .rules import GraftRules, Surgery, built, by_layer, refuse_engine

# Stands beside `layers.` in names.
BANK = "control_bank."
# Blocks that can carry a control state, in a layer's order.
SITES = ("attention", "ffn")


@dataclass(frozen=True)
class StatesSpec:
    """Which blocks of a layer carry a control state."""

    layer: int
    sites: tuple[str, ...]


@dataclass(frozen=True)
class MixtureSpec:
    """How control states mix (Mixture-of-Control, Eq. 9 and 10, section 4.2 and appendix B)."""

    rank: int
    top_k: int = 1
    alpha: float = 0.95
    gate: str = "linear"
    shared: str = "all"
    projection: int = 256
    temperature: float = 0.3
    train_routing: str = "batch_mean"
    inference_routing: str = "prefix_mean"
    balance_weight: float = 0.01
    straight_through: bool = True
    frozen: bool = False

    @property
    def by_sequence(self) -> bool:
        """Whether at inference a choice depends on other tokens of a sequence."""
        return self.top_k > 0 and self.inference_routing != "token"

    @property
    def what(self) -> str:
        """What it does with sequences, and what could be done instead, for those that are told why it cannot."""
        return (
            "control states choose by a mean over a sequence (config.surgery: mixture inference_routing is"
            f" `{self.inference_routing}`; set it to `token`, and measure what that changes)"
        )

    def refuse_engine(self, config: Any) -> None:
        """ValueError where choices depend on a sequence, and an engine brought its own attention."""
        if self.by_sequence:
            refuse_engine(config, self.what, "or serve this output with transformers' own attention")

    def gates(self, kinds: Sequence[str]) -> dict[str, list[int]]:
        """The gates by name, and the sites that each chooses among; `kinds` are the blocks of all sites in order."""
        every = list(range(len(kinds)))
        if not self.top_k:
            return {}
        return {self.gate_of(site, kinds): self.choice_of(site, kinds) for site in every}

    def gate_of(self, site: int, kinds: Sequence[str]) -> str:
        """The name of the gate that serves a site."""
        return {"all": "all", "by_kind": kinds[site], "none": f"site_{site}"}[self.shared]

    def choice_of(self, site: int, kinds: Sequence[str]) -> list[int]:
        """The sites that a site's gate chooses among."""
        return [n for n, kind in enumerate(kinds) if self.shared != "by_kind" or kind == kinds[site]]


@dataclass(frozen=True)
class States:
    """The control states of a model: `sites` numbers them, (layer, block) in the model's order."""

    sites: tuple[tuple[int, str], ...]
    mixture: MixtureSpec
    specs: tuple[StatesSpec, ...] = ()

    @property
    def blocks(self) -> list[str]:
        """The blocks of all sites, in order."""
        return [kind for _, kind in self.sites]

    def sites_of(self, layer: int) -> dict[str, int]:
        """The numbers of a layer's control states, by block."""
        return {kind: number for number, (home, kind) in enumerate(self.sites) if home == layer}


class StatesRules(GraftRules):
    """Control states and their bank."""

    name = "states"
    keys = ("control_states", "mixture")
    losses: ClassVar[Mapping[str, str]] = {"balance_loss": "mean over control states"}

    def read(self, raw: Mapping[str, Any]) -> States:
        """The sites in the model's order, and how they mix."""
        specs = [
            built(StatesSpec, dict(entry) | {"sites": tuple(entry.get("sites", ()))}, "control_states")
            for entry in raw.get("control_states", ())
        ]
        if not specs or raw.get("mixture") is None:
            raise ValueError("config.surgery: control_states and mixture go together; one of them is missing")
        layers = by_layer(specs, "control_states")
        sites = tuple((layer, kind) for layer in sorted(layers) for kind in SITES if kind in layers[layer].sites)
        return States(sites, built(MixtureSpec, raw["mixture"], "mixture"), tuple(specs))

    def trains(self, surgery: Surgery) -> list[str]:
        """The bank, where it is not frozen."""
        found: States = surgery.of[self.name]
        return [] if found.mixture.frozen else [BANK]

    def measures(self, surgery: Surgery) -> bool:
        """Whether choices are to be balanced."""
        mixture: MixtureSpec = surgery.of[self.name].mixture
        return mixture.balance_weight > 0 and mixture.top_k > 0

    def crosses(self, surgery: Surgery) -> int:
        """The first site's layer: the bank is all sites'."""
        found: States = surgery.of[self.name]
        return min(layer for layer, _ in found.sites)
