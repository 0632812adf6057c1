"""Control states (Mixture-of-Control): what `config.surgery` says of them, and what they are born with.

    "control_states": [{"layer": 0, "sites": ["attention", "ffn"]}],
    "mixture": {"rank": 256, "top_k": 1, "alpha": 0.95, …}

The first says which blocks carry a control state, the second how all of them, one bank of the model, mix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .births import Birth, linear_birth, low_rank_births
from .rules import (
    GraftRules,
    Kind,
    Surgery,
    built,
    by_layer,
    check_layers,
    fraction,
    loss_weight,
    one_of,
    refuse_engine,
    without_numbers,
)

# Stands beside `layers.` in names.
BANK = "control_bank."
# Blocks that can carry a control state, in a layer's order.
SITES = ("attention", "ffn")
MIXTURE_GATES = ("linear", "cosine")
GATE_SHARING = ("all", "by_kind", "none")
TRAIN_ROUTINGS = ("batch_mean", "batch_mode", "token")
# A mean over a prefix is for decoders, over the whole sequence for encoders.
INFERENCE_ROUTINGS = ("prefix_mean", "sequence_mean", "token")


@dataclass(frozen=True)
class StatesSpec:
    """Which blocks of a layer carry a control state."""

    layer: int
    sites: tuple[str, ...]

    def check(self) -> None:
        """ValueError for blocks that carry none."""
        for site in self.sites:
            one_of("control state's site", site, SITES)
        if not self.sites or len(set(self.sites)) != len(self.sites):
            raise ValueError(f"config.surgery: control states of layer {self.layer} name the sites {self.sites}")


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

    def check(self) -> None:
        """ValueError for what no mixture is."""
        if self.rank < 1 or self.top_k < 0 or self.projection < 1:
            raise ValueError(
                f"config.surgery: mixture has rank {self.rank}, top_k {self.top_k}, projection {self.projection};"
                " they must be at least 1, 0 and 1"
            )
        fraction("mixture alpha", self.alpha)
        one_of("mixture gate", self.gate, MIXTURE_GATES)
        one_of("mixture shared", self.shared, GATE_SHARING)
        one_of("mixture train_routing", self.train_routing, TRAIN_ROUTINGS)
        one_of("mixture inference_routing", self.inference_routing, INFERENCE_ROUTINGS)
        loss_weight("mixture balance_weight", self.balance_weight)
        if not 0.0 < self.temperature < float("inf"):
            raise ValueError(f"config.surgery: mixture temperature is {self.temperature}; it must be positive")

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

    def gate_births(self, count: int, width: int) -> dict[str, Birth]:
        """The tensors at birth of a gate that chooses among `count` control states."""
        if self.gate == "linear":
            return {"weight": linear_birth(count, width)}
        return {"projection": linear_birth(self.projection, width), "weight": linear_birth(count, self.projection)}

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

    def fewest(self, kinds: Sequence[str]) -> int:
        """Among how many control states the gate with the smallest choice chooses."""
        return min((len(self.choice_of(site, kinds)) for site in range(len(kinds))), default=0)

    def births(self, kinds: Sequence[str], width: int) -> dict[str, Birth]:
        """The bank's tensors at birth."""
        tensors: dict[str, Birth] = {}
        for site in range(len(kinds)):
            low_rank = low_rank_births(self.rank, width, width)
            tensors |= {f"states.{site}.{name}": birth for name, birth in low_rank.items()}
        for gate, choice in self.gates(kinds).items():
            made = self.gate_births(len(choice), width)
            tensors |= {f"gates.{gate}.{name}": birth for name, birth in made.items()}
        return tensors


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


class _BankKind(Kind):
    """Tensors are the bank's, none a layer's."""

    mark = "M"

    def claims(self, suffix: str) -> bool:
        """None of a layer's tensors."""
        return False


class StatesKind(_BankKind):
    """Which blocks of a layer carry a control state."""

    key = "control_states"
    in_twin = "refused"

    def text(self, entry: Mapping[str, Any], where: str = "") -> str:
        """`control states at attention and ffn`."""
        return "control states at " + " and ".join(entry["sites"])

    def kept(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Whether they train is said of the bank."""
        return without_numbers(entry)


class MixtureKind(_BankKind):
    """The bank of all control states: one entry for the model."""

    key = "mixture"
    whole = True

    def text(self, entry: Mapping[str, Any], where: str = "") -> str:
        """`bank of control states of rank 64`."""
        return f"bank of control states of rank {entry['rank']}"


class StatesRules(GraftRules):
    """Control states and their bank."""

    name = "states"
    keys = ("control_states", "mixture")
    kinds = (StatesKind(), MixtureKind())
    losses: ClassVar[Mapping[str, str]] = {"balance_loss": "mean over control states"}
    part = "surgeon.runtime.states"
    module = "StatesGraft"
    brings = ("MIXES",)
    on_encoders = True

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

    def check(self, surgery: Surgery, config: Any) -> None:
        """Entries hold together, a gate has enough to choose among, and this kind of model can have the routing."""
        found: States = surgery.of[self.name]
        mixture = found.mixture
        mixture.check()
        for spec in found.specs:
            spec.check()
        check_layers([layer for layer, _ in found.sites], surgery.trunk_layers, "control_states")
        least = mixture.fewest(found.blocks)
        if mixture.top_k > least:
            raise ValueError(f"config.surgery: mixture top_k is {mixture.top_k}; a gate chooses among {least}")
        if config.encoder is False and mixture.inference_routing == "sequence_mean":
            raise ValueError(
                "config.surgery: mixture inference_routing is `sequence_mean`, by which a decoder's token would see "
                "later ones; it must be `prefix_mean` or `token`"
            )
        if config.encoder and mixture.inference_routing == "prefix_mean":
            raise ValueError(
                "config.surgery: mixture inference_routing is `prefix_mean`, but an encoder reads whole sequences; "
                "it must be `sequence_mean` or `token`"
            )

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
