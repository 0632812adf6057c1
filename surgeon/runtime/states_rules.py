"""Control states (Mixture-of-Control) in `config.surgery`:

    "control_states": [{"layer": 0, "sites": ["attention", "ffn"]}],
    "mixture": {"rank": 256, "top_k": 1, "alpha": 0.95, …}

The first key lists the blocks with a control state. The second one has the settings of the model's one bank, which
holds all control states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .rules import GraftRules, Surgery, built, by_layer, refuse_engine

# The prefix of the bank's tensors, next to `layers.`.
BANK = "control_bank."
# The blocks that can carry a control state, in their order in a layer.
SITES = ("attention", "ffn")


@dataclass(frozen=True)
class StatesSpec:
    """The blocks of one layer with a control state."""

    layer: int
    sites: tuple[str, ...]


@dataclass(frozen=True)
class MixtureSpec:
    """The settings by which control states mix (Mixture-of-Control, Eq. 9 and 10, section 4.2 and appendix B).

    `top_k` is K in Eq. 10; `temperature` is τ and `projection` the rows of P in the cosine gate (appendix B.2).
    """

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
        """Return whether at inference a token's choice depends on other tokens of its sequence."""
        return self.top_k > 0 and self.inference_routing != "token"

    @property
    def what(self) -> str:
        """Return the reason, for error messages, why documents must be known, and the setting that avoids it."""
        return (
            "control states choose by a mean over a sequence (config.surgery: mixture inference_routing is"
            f" `{self.inference_routing}`; set it to `token`, and measure what that changes)"
        )

    def refuse_engine(self, config: Any) -> None:
        """Raise ValueError where choices depend on a sequence and an engine replaced transformers' attention."""
        if self.by_sequence:
            refuse_engine(config, self.what, "or serve this output with transformers' own attention")

    def gates(self, kinds: Sequence[str]) -> dict[str, list[int]]:
        """Return the gates by name, each with the sites among which it chooses; `kinds` are the blocks of all sites."""
        every = list(range(len(kinds)))
        if not self.top_k:
            return {}
        return {self.gate_of(site, kinds): self.choice_of(site, kinds) for site in every}

    def gate_of(self, site: int, kinds: Sequence[str]) -> str:
        """Return the name of a site's gate; by `shared`, one gate serves all sites, one kind of block, or one site."""
        return {"all": "all", "by_kind": kinds[site], "none": f"site_{site}"}[self.shared]

    def choice_of(self, site: int, kinds: Sequence[str]) -> list[int]:
        """Return the sites among which a site's gate chooses."""
        return [n for n, kind in enumerate(kinds) if self.shared != "by_kind" or kind == kinds[site]]


@dataclass(frozen=True)
class States:
    """The control states of a model; a state's number is the index of its (layer, block) in `sites`."""

    sites: tuple[tuple[int, str], ...]
    mixture: MixtureSpec
    specs: tuple[StatesSpec, ...] = ()

    @property
    def blocks(self) -> list[str]:
        """Return the blocks of all sites, in order."""
        return [kind for _, kind in self.sites]

    def sites_of(self, layer: int) -> dict[str, int]:
        """Return the numbers of a layer's control states, by block."""
        return {kind: number for number, (home, kind) in enumerate(self.sites) if home == layer}


class StatesRules(GraftRules):
    """The rules of control states and their bank."""

    name = "states"
    keys = ("control_states", "mixture")
    losses: ClassVar[Mapping[str, str]] = {"balance_loss": "mean over control states"}

    def read(self, raw: Mapping[str, Any]) -> States:
        """Return the sites in the model's order, and the settings by which they mix.

        Raises ValueError where one of the keys `control_states` and `mixture` is missing.
        """
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
        """Return the name prefix of the bank, unless it is frozen."""
        found: States = surgery.of[self.name]
        return [] if found.mixture.frozen else [BANK]

    def measures(self, surgery: Surgery) -> bool:
        """Return whether the loss that balances choices applies."""
        mixture: MixtureSpec = surgery.of[self.name].mixture
        return mixture.balance_weight > 0 and mixture.top_k > 0

    def crosses(self, surgery: Surgery) -> int:
        """Return the layer of the first site: from there on layers share the bank."""
        found: States = surgery.of[self.name]
        return min(layer for layer, _ in found.sites)
