"""What planner and model agree on about a graft: its entries in `config.surgery`, its tensors' names, what trains.

What only planners ask of a graft stands in `surgeon.grafts`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

from .spread import for_each_layer

# What the names of an expanded twin's tensors begin with, below its layer.
BRANCH = "expanded."

# A dataclass that holds an entry.
Spec = TypeVar("Spec", bound=Any)


class GraftRules:
    """One graft: its keys in `config.surgery`, and how what stands there is read."""

    name: ClassVar[str]
    keys: ClassVar[tuple[str, ...]]
    # Names of grafts' tensors, which a native model might take for some of its own; `*` is any text. Here are all that
    # surgeon brings: what transformers is told of a model type counts for every model of that type in a process.
    tensors: ClassVar[tuple[str, ...]] = (
        "*mlp.adapter.*",
        "*mlp.routed.*",
        "*.slots.*.lora_*",
        "*expert_router.*",
        "*interpolator.*",
        "*control_bank.*",
        "*domain_gate.*",
    )
    # The fields that it adds to a model's output, in training, and what they are.
    losses: ClassVar[Mapping[str, str]] = {}

    def read(self, raw: Mapping[str, Any]) -> Any:
        """What `config.surgery` says of it."""
        raise NotImplementedError

    def branches(self, found: Any) -> list[tuple[int, int]]:
        """The tail layers that it makes, each with the trunk layer beside which it stands."""
        return []

    def trains(self, surgery: Surgery) -> list[str]:
        """What the names of its parameters that train begin with, below the base model; a layer of the tail as such."""
        raise NotImplementedError

    def measures(self, surgery: Surgery) -> bool:
        """Whether a loss of its own applies in training, whatever the batch."""
        return False

    def needs_domains(self, surgery: Surgery) -> bool:
        """Whether it has a loss that needs `domain_ids`, or (a gate) something else that does."""
        return False

    def crosses(self, surgery: Surgery) -> int | None:
        """The first layer from which, in every forward, something of it crosses to others; None: nothing does."""
        return None


@dataclass(frozen=True)
class Surgery:
    """All grafts of a model, those of `rules`, and `of` what each of them read, by its name."""

    trunk_layers: int
    rules: tuple[Any, ...] = ()
    of: Mapping[str, Any] = field(default_factory=dict)
    # Beside which layer of the trunk each of the tail stands.
    homes: Mapping[int, int] = field(default_factory=dict)
    # What the last surgery inserted whole, and those before it.
    new_layers: tuple[int, ...] = ()
    older_layers: tuple[int, ...] = ()

    @property
    def inserted(self) -> tuple[int, ...]:
        """Trunk layers that the base does not have."""
        return (*self.older_layers, *self.new_layers)

    @property
    def layers(self) -> int:
        """How many layers trunk and tail have."""
        return self.trunk_layers + len(self.homes)

    def placed(self, owner: str) -> str:
        """What names of a layer of the tail begin with: `layers.3.expanded.` where it was `layers.8.`."""
        stack, layer, rest = (*owner.split(".", 2), "", "")[:3]
        home = self.homes.get(int(layer)) if layer.isdecimal() else None
        return owner if home is None else f"{stack}.{home}.expanded.{rest}"

    def trains(self) -> list[str]:
        """What the names of parameters that train begin with, below the base model."""
        owners = (self.placed(owner) for rules in self.rules for owner in rules.trains(self))
        return [*owners, *(f"layers.{layer}." for layer in self.new_layers)]

    def measures(self) -> bool:
        """Whether a loss of a graft applies in training, whatever the batch."""
        return any(rules.measures(self) for rules in self.rules)

    def needs_domains(self) -> bool:
        """Whether a loss of a graft needs `domain_ids`."""
        return any(rules.needs_domains(self) for rules in self.rules if rules.losses)


def read_surgery(config: Any) -> Surgery:
    """The grafts that `config.surgery` describes (None: no graft), of those whose code is here: `config.grafts`."""
    if config.surgery is None:
        return Surgery(config.num_hidden_layers)
    raw = for_each_layer(config.surgery)
    known = {"trunk_layers", "new_layers", "older_layers", *(key for rules in config.grafts for key in rules.keys)}
    # A key that says nothing may be of a graft that is not there.
    if unknown := sorted(key for key, value in raw.items() if value and key not in known):
        raise ValueError(f"config.surgery: unknown keys {unknown}, grafts without code; known are {sorted(known)}")
    present = tuple(rules for rules in config.grafts if any(raw.get(key) for key in rules.keys))
    trunk, of = raw["trunk_layers"], {rules.name: rules.read(raw) for rules in present}
    branches = [pair for rules in present for pair in rules.branches(of[rules.name])]
    homes, tail = dict(branches), list(range(trunk, config.num_hidden_layers))
    if sorted(branch for branch, _ in branches) != tail:
        raise ValueError(
            f"config.surgery: branches {sorted(homes)} must be the tail layers {tail}, each once"
            f" (num_hidden_layers {config.num_hidden_layers} = trunk_layers {trunk} + one for each control block)"
        )
    inserted = {key: tuple(raw.get(key, ())) for key in ("new_layers", "older_layers")}
    return Surgery(trunk, present, of, homes, **inserted)


def engine_of(config: Any) -> str | None:
    """The attention that an engine put in the place of transformers' own, by its name; None where none did.

    Engines put their own linear modules in the places of a model's too, and keep keys and values in caches of theirs;
    vLLM and SGLang show a model all requests as one row. Kernels from the Hub, by a repository's name, and what begins
    with `paged|` are called by transformers as its own is.
    """
    name = getattr(config, "_attn_implementation", None)
    if name is None:
        return None
    plain = str(name).removeprefix("paged|")
    own = plain in ("eager", "sdpa", "flex_attention") or plain.startswith("flash_attention_") or "/" in plain
    return None if own else str(name)


def refuse_engine(config: Any, what: str, instead: str) -> None:
    """ValueError where an engine brought its own attention, under which `what` could be wrong without a word."""
    engine = engine_of(config)
    if engine is not None:
        raise ValueError(
            f"{what}, but the attention is `{engine}`, none of transformers' own: an engine that brings one may show a"
            f" model all requests as one row, and keep nothing in transformers' cache; {instead}"
        )


def engine_ranks(config: Any) -> int:
    """Over how many processes vLLM or SGLang splits matrices; 1 elsewhere."""
    modules = {"vllm": "vllm.distributed.parallel_state", "sglang": "sglang.srt.distributed.parallel_state"}
    # As the attention is called, in which kernels from the Hub have a repository's name.
    engine = str(getattr(config, "_attn_implementation", None))
    asked = next((module for name, module in modules.items() if engine.startswith(name) and "/" not in engine), None)
    if asked is None:
        return 1
    if asked not in sys.modules:
        raise ValueError(f"`{asked}`, which says how `{engine}` splits a model, is missing; use a release that has it")
    # Not imported: every reader of this file would need it.
    ranks: int = sys.modules[asked].get_tp_group().world_size
    return ranks


def known_keys(entry: Iterable[str], keys: Iterable[str], name: str) -> None:
    """ValueError where an entry has a key that is none of `keys`."""
    unknown = sorted(set(entry) - set(keys))
    if unknown:
        raise ValueError(f"config.surgery: {name} has unknown keys {unknown}; known are {', '.join(keys)}")


def built(kind: type[Spec], entry: Mapping[str, Any], name: str) -> Spec:
    """The dataclass `kind` made of an entry; ValueError for a key that is no field of it."""
    known_keys(entry, [each.name for each in fields(kind)], name)
    made: Spec = kind(**entry)
    return made


def by_layer(specs: Sequence[Spec], name: str) -> dict[int, Spec]:
    """Specs by their `layer`; ValueError where two name the same."""
    found: dict[int, Spec] = {spec.layer: spec for spec in specs}
    if len(found) != len(specs):
        raise ValueError(f"config.surgery: two {name} entries name the same layer")
    return found
