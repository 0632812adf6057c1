"""The rules of a graft that planner and model share: its entries in `config.surgery`, tensor names, and what trains.

Rules that only the planner needs are in `surgeon.grafts`.

Two terms: the trunk is the model's main stack of layers; the tail is the layers after it in config.json. Each layer
of the tail is the expanded twin of one trunk layer; in the model it lies inside that layer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

from .spread import for_each_layer

# The prefix of the names of an expanded twin's tensors, below its layer.
BRANCH = "expanded."

# A dataclass made from an entry.
Spec = TypeVar("Spec", bound=Any)


class GraftRules:
    """The rules of one kind of graft: its keys in `config.surgery`, and how to read their values."""

    name: ClassVar[str]
    keys: ClassVar[tuple[str, ...]]
    # Names of grafts' tensors, which a native model might mistake for its own; `*` is any text. All of surgeon's grafts
    # are listed here, because conversions registered in transformers apply to every model of a type in the process.
    tensors: ClassVar[tuple[str, ...]] = (
        "*mlp.adapter.*",
        "*mlp.routed.*",
        "*.slots.*.lora_*",
        "*expert_router.*",
        "*interpolator.*",
        "*control_bank.*",
        "*domain_gate.*",
    )
    # The fields that the graft adds to a model's output in training, each with its meaning.
    losses: ClassVar[Mapping[str, str]] = {}

    def read(self, raw: Mapping[str, Any]) -> Any:
        """Return the graft's specs from its keys in `config.surgery`."""
        raise NotImplementedError

    def branches(self, found: Any) -> list[tuple[int, int]]:
        """Return the tail layers that the graft makes, each with the trunk layer whose twin it is."""
        return []

    def trains(self, surgery: Surgery) -> list[str]:
        """Return the name prefixes of the graft's trainable parameters, below the base model.

        For a layer of the tail a prefix has the number of the tail (`layers.8.`).
        """
        raise NotImplementedError

    def measures(self, surgery: Surgery) -> bool:
        """Return whether the graft has a loss that applies in training to every batch."""
        return False

    def needs_domains(self, surgery: Surgery) -> bool:
        """Return whether the graft needs `domain_ids` in training, for a loss or (a gate) for its decision."""
        return False

    def crosses(self, surgery: Surgery) -> int | None:
        """Return the first layer from which the graft shares something with others in a forward; None: it does not."""
        return None


@dataclass(frozen=True)
class Surgery:
    """All grafts of a model: their `rules`, and in `of` the specs that each has read, by the graft's name."""

    trunk_layers: int
    rules: tuple[Any, ...] = ()
    of: Mapping[str, Any] = field(default_factory=dict)
    # For each layer of the tail, the trunk layer whose twin it is.
    homes: Mapping[int, int] = field(default_factory=dict)
    # The whole layers that the last surgery inserted, and those that earlier surgeries inserted.
    new_layers: tuple[int, ...] = ()
    older_layers: tuple[int, ...] = ()

    @property
    def inserted(self) -> tuple[int, ...]:
        """Return the trunk layers that the base does not have."""
        return (*self.older_layers, *self.new_layers)

    @property
    def layers(self) -> int:
        """Return the number of layers in trunk and tail."""
        return self.trunk_layers + len(self.homes)

    def placed(self, owner: str) -> str:
        """Return a name prefix as it is in the model: `layers.3.expanded.` for `layers.8.`, a layer of the tail.

        Other prefixes are returned unchanged.
        """
        stack, layer, rest = (*owner.split(".", 2), "", "")[:3]
        home = self.homes.get(int(layer)) if layer.isdecimal() else None
        return owner if home is None else f"{stack}.{home}.expanded.{rest}"

    def trains(self) -> list[str]:
        """Return the name prefixes of all trainable parameters, below the base model."""
        owners = (self.placed(owner) for rules in self.rules for owner in rules.trains(self))
        return [*owners, *(f"layers.{layer}." for layer in self.new_layers)]

    def measures(self) -> bool:
        """Return whether any graft has a loss that applies in training to every batch."""
        return any(rules.measures(self) for rules in self.rules)

    def needs_domains(self) -> bool:
        """Return whether any graft with losses needs `domain_ids`."""
        return any(rules.needs_domains(self) for rules in self.rules if rules.losses)


def read_surgery(config: Any) -> Surgery:
    """Return the grafts that `config.surgery` describes (None: no graft), read by the rules in `config.grafts`.

    Raises ValueError for a key of a graft whose code is absent, and where twins and tail layers do not match.
    """
    if config.surgery is None:
        return Surgery(config.num_hidden_layers)
    raw = for_each_layer(config.surgery)
    known = {"trunk_layers", "new_layers", "older_layers", *(key for rules in config.grafts for key in rules.keys)}
    # An unknown key with an empty value is accepted: it may belong to a graft that this model does not have.
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
    """Return the name of the attention with which an engine replaced transformers' own; None: it is transformers' own.

    Engines also replace a model's linear modules, and keep keys and values in their own caches; vLLM and SGLang give a
    model all requests as one row. Kernels from the Hub (named by a repository) and names that begin with `paged|` count
    as transformers' own, because transformers calls them in the same way.
    """
    name = getattr(config, "_attn_implementation", None)
    if name is None:
        return None
    plain = str(name).removeprefix("paged|")
    own = plain in ("eager", "sdpa", "flex_attention") or plain.startswith("flash_attention_") or "/" in plain
    return None if own else str(name)


def refuse_engine(config: Any, what: str, instead: str) -> None:
    """Raise ValueError where an engine replaced the attention, as a graft could then compute wrong values silently.

    In the message, `what` is the reason and `instead` the advice.
    """
    engine = engine_of(config)
    if engine is not None:
        raise ValueError(
            f"{what}, but the attention is `{engine}`, none of transformers' own: an engine that brings one may show a"
            f" model all requests as one row, and keep nothing in transformers' cache; {instead}"
        )


def engine_ranks(config: Any) -> int:
    """Return the number of processes over which vLLM or SGLang splits matrices; 1 elsewhere.

    Raises ValueError where the engine's release lacks the module that knows this number.
    """
    modules = {"vllm": "vllm.distributed.parallel_state", "sglang": "sglang.srt.distributed.parallel_state"}
    # The engine is recognised by the attention's name; a name with `/` is a kernel from the Hub.
    engine = str(getattr(config, "_attn_implementation", None))
    asked = next((module for name, module in modules.items() if engine.startswith(name) and "/" not in engine), None)
    if asked is None:
        return 1
    if asked not in sys.modules:
        raise ValueError(f"`{asked}`, which says how `{engine}` splits a model, is missing; use a release that has it")
    # Read from `sys.modules`, not imported: transformers would ask every user of this file to install it.
    ranks: int = sys.modules[asked].get_tp_group().world_size
    return ranks


def known_keys(entry: Iterable[str], keys: Iterable[str], name: str) -> None:
    """Raise ValueError where an entry has a key that is not in `keys`; `name` is the entry's name in the message."""
    unknown = sorted(set(entry) - set(keys))
    if unknown:
        raise ValueError(f"config.surgery: {name} has unknown keys {unknown}; known are {', '.join(keys)}")


def built(kind: type[Spec], entry: Mapping[str, Any], name: str) -> Spec:
    """Return an instance of the dataclass `kind` made from an entry; raise ValueError for a key that is no field."""
    known_keys(entry, [each.name for each in fields(kind)], name)
    made: Spec = kind(**entry)
    return made


def by_layer(specs: Sequence[Spec], name: str) -> dict[int, Spec]:
    """Return specs by their `layer`; raise ValueError where two specs have the same layer."""
    found: dict[int, Spec] = {spec.layer: spec for spec in specs}
    if len(found) != len(specs):
        raise ValueError(f"config.surgery: two {name} entries name the same layer")
    return found
