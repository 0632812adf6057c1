"""Control states for planners: the checks of their entries, and the initial values of their bank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from surgeon.grafts.checks import check_layers, fraction, loss_weight, one_of
from surgeon.grafts.kinds import Kind, KnownGraft, linear_birth, low_rank_births, without_numbers
from surgeon.runtime.births import Birth
from surgeon.runtime.rules import Surgery
from surgeon.runtime.states_rules import SITES, MixtureSpec, States, StatesRules

MIXTURE_GATES = ("linear", "cosine")
GATE_SHARING = ("all", "by_kind", "none")
TRAIN_ROUTINGS = ("batch_mean", "batch_mode", "token")
# Decoders use the mean over a prefix, encoders the mean over the whole sequence.
INFERENCE_ROUTINGS = ("prefix_mean", "sequence_mean", "token")


class _BankKind(Kind):
    """A kind whose tensors belong to the bank, none of them to a layer."""

    mark = "M"

    def claims(self, suffix: str) -> bool:
        """Return False: no tensor of a layer belongs to this kind."""
        return False


class StatesKind(_BankKind):
    """The blocks of a layer that carry a control state."""

    key = "control_states"
    in_twin = "refused"

    def text(self, entry: Mapping[str, Any], where: str = "") -> str:
        """Return a text like `control states at attention and ffn`."""
        return "control states at " + " and ".join(entry["sites"])

    def kept(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entry without layer numbers; whether states are trained is a setting of the bank's entry."""
        return without_numbers(entry)


class MixtureKind(_BankKind):
    """The bank of all control states: one entry for the model."""

    key = "mixture"
    whole = True

    def text(self, entry: Mapping[str, Any], where: str = "") -> str:
        """Return a text like `bank of control states of rank 64`."""
        return f"bank of control states of rank {entry['rank']}"


class KnownStates(KnownGraft, StatesRules):
    """Control states and their bank, as planners use them."""

    kinds = (StatesKind(), MixtureKind())
    part = "surgeon.runtime.states"
    module = "StatesGraft"
    on_encoders = True

    def check(self, surgery: Surgery, config: Any) -> None:
        """Check that entries are consistent, a gate has enough states to choose from, and the model allows the routing.

        Raises ValueError.
        """
        found: States = surgery.of[self.name]
        mixture = found.mixture
        _check_mixture(mixture)
        for spec in found.specs:
            for site in spec.sites:
                one_of("control state's site", site, SITES)
            if not spec.sites or len(set(spec.sites)) != len(spec.sites):
                raise ValueError(f"config.surgery: control states of layer {spec.layer} name the sites {spec.sites}")
        check_layers([layer for layer, _ in found.sites], surgery.trunk_layers, "control_states")
        least = fewest_to_choose(mixture, found.blocks)
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


def _check_mixture(spec: MixtureSpec) -> None:
    """Raise ValueError for settings that no mixture can have."""
    if spec.rank < 1 or spec.top_k < 0 or spec.projection < 1:
        raise ValueError(
            f"config.surgery: mixture has rank {spec.rank}, top_k {spec.top_k}, projection {spec.projection};"
            " they must be at least 1, 0 and 1"
        )
    fraction("mixture alpha", spec.alpha)
    one_of("mixture gate", spec.gate, MIXTURE_GATES)
    one_of("mixture shared", spec.shared, GATE_SHARING)
    one_of("mixture train_routing", spec.train_routing, TRAIN_ROUTINGS)
    one_of("mixture inference_routing", spec.inference_routing, INFERENCE_ROUTINGS)
    loss_weight("mixture balance_weight", spec.balance_weight)
    if not 0.0 < spec.temperature < float("inf"):
        raise ValueError(f"config.surgery: mixture temperature is {spec.temperature}; it must be positive")


def fewest_to_choose(spec: MixtureSpec, kinds: Sequence[str]) -> int:
    """Return the number of control states of the gate that chooses from the fewest."""
    return min((len(spec.choice_of(site, kinds)) for site in range(len(kinds))), default=0)


def bank_births(spec: MixtureSpec, kinds: Sequence[str], width: int) -> dict[str, Birth]:
    """Return the bank's initial tensors."""
    tensors: dict[str, Birth] = {}
    for site in range(len(kinds)):
        low_rank = low_rank_births(spec.rank, width, width)
        tensors |= {f"states.{site}.{name}": birth for name, birth in low_rank.items()}
    for gate, choice in spec.gates(kinds).items():
        made = _gate_births(spec, len(choice), width)
        tensors |= {f"gates.{gate}.{name}": birth for name, birth in made.items()}
    return tensors


def _gate_births(spec: MixtureSpec, count: int, width: int) -> dict[str, Birth]:
    """Return the initial tensors of a gate that chooses among `count` control states."""
    if spec.gate == "linear":
        return {"weight": linear_birth(count, width)}
    return {"projection": linear_birth(spec.projection, width), "weight": linear_birth(count, spec.projection)}
