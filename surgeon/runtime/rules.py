"""What planner and model agree on about a graft: its entries in `config.surgery`, its tensors' names, what trains."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, TypeVar

from .present import INSERTED, TWINS
from .spread import for_each_layer

# What the names of an expanded twin's tensors begin with, below its layer.
BRANCH = "expanded."
_LAYER_NUMBERS = ("layer", "branch")
# Of what stands beside an FFN whose own activation no field of the config names.
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2")

# A dataclass that holds an entry.
Spec = TypeVar("Spec", bound=Any)


class Kind:
    """One key of `config.surgery`, whose value is a list with one entry for each layer (or several).

    `in_twin`: what becomes of a layer's entry when the layer gets an expanded twin: a copy of it stands in the twin
    too, it stands for both, or no twin can be made. A `branching` kind is what makes twins: its entries name a
    `branch`, a layer of the tail. Of a `whole` kind there is one entry for the model instead of a list.
    """

    key: ClassVar[str]
    mark: ClassVar[str] = "+"
    in_twin: ClassVar[Literal["copied", "shared", "refused"]] = "shared"
    branching: ClassVar[bool] = False
    whole: ClassVar[bool] = False
    # What an entry can say, one for each layer, where its rules do not check that themselves.
    fields: ClassVar[tuple[str, ...]] = ()

    def text(self, entry: Mapping[str, Any], where: str = "") -> str:
        """What preview and manifest call it: `adapter of 512, relu gate`; `where` is " in the branch" in a twin."""
        raise NotImplementedError

    def sign(self, entry: Mapping[str, Any]) -> str:
        """One or two characters for it in pictures of the layers: its kind's `mark`, where nothing else is said."""
        return self.mark

    def claims(self, suffix: str) -> bool:
        """Whether a tensor of a layer, by what follows `layers.{i}.` (in a twin: its prefix too), is of this kind."""
        raise NotImplementedError

    def owns(self, entry: Mapping[str, Any], suffix: str) -> bool:
        """Whether such a tensor belongs to this entry."""
        return self.claims(suffix)

    def kept(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """A base's entry without layer numbers and marked frozen, as no new surgery made it."""
        return without_numbers(entry) | {"frozen": True}

    def thawed(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of an entry that trains."""
        return {key: copy.deepcopy(value) for key, value in entry.items() if key != "frozen"}


def without_numbers(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of an entry without the numbers of its layers."""
    return {key: copy.deepcopy(value) for key, value in entry.items() if key not in _LAYER_NUMBERS}


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
    # Only planners ask for what follows: for each key that says something of layers its kind; the fields that it adds
    # to a model's output, in training, and what they are; where its modules are; whether an encoder can carry it;
    # beside which blocks it may stand; and what of `present` it alone brings.
    kinds: ClassVar[tuple[Kind, ...]]
    losses: ClassVar[Mapping[str, str]] = {}
    part: ClassVar[str]
    module: ClassVar[str]
    on_encoders: ClassVar[bool] = False
    roles: ClassVar[tuple[str, ...]] = ("self_attn", "mlp")
    brings: ClassVar[tuple[str, ...]] = ()

    @property
    def settings(self) -> tuple[str, ...]:
        """Its keys that are of no layer."""
        return tuple(key for key in self.keys if key not in [kind.key for kind in self.kinds])

    def present(self, raw: Mapping[str, Any]) -> bool:
        """Whether a `config.surgery` says anything of it."""
        return any(raw.get(key) for key in self.keys)

    def read(self, raw: Mapping[str, Any]) -> Any:
        """What `config.surgery` says of it."""
        raise NotImplementedError

    if TWINS:

        def branches(self, found: Any) -> list[tuple[int, int]]:
            """The tail layers that it makes, each with the trunk layer beside which it stands."""
            return []

    def check(self, surgery: Surgery, config: Any) -> None:
        """Check what `read` found, by itself and against the rest of the config. Raises ValueError."""

    def trains(self, surgery: Surgery) -> list[str]:
        """What the names of its parameters that train begin with, below the base model; a layer of the tail as such."""
        raise NotImplementedError

    def measures(self, surgery: Surgery) -> bool:
        """Whether a loss of its own applies in training, whatever the batch."""
        return False

    def needs_domains(self, surgery: Surgery) -> bool:
        """Whether it has a loss that needs `domain_ids`, or (a gate) something else that does."""
        return False

    def classifies(self, surgery: Surgery) -> bool:
        """Whether a loss of its own has its gates tell domains apart."""
        return False

    def crosses(self, surgery: Surgery) -> int | None:
        """The first layer from which, in every forward, something of it crosses to others; None: nothing does."""
        return None

    def uses(self, raw: Mapping[str, Any]) -> tuple[tuple[str, str, str], ...] | None:
        """What its `Graft` gets as a mapping: (key, module, class made without arguments) each; None: it gets none."""
        return None


@dataclass(frozen=True)
class Surgery:
    """All grafts of a model, those of `rules`, and `of` what each of them read, by its name."""

    trunk_layers: int
    rules: tuple[Any, ...] = ()
    of: Mapping[str, Any] = field(default_factory=dict)
    if TWINS:
        # Beside which layer of the trunk each of the tail stands.
        homes: Mapping[int, int] = field(default_factory=dict)
    if INSERTED:
        # What the last surgery inserted whole, and those before it.
        new_layers: tuple[int, ...] = ()
        older_layers: tuple[int, ...] = ()

    if INSERTED:

        @property
        def inserted(self) -> tuple[int, ...]:
            """Trunk layers that the base does not have."""
            return (*self.older_layers, *self.new_layers)

    if TWINS:

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
        owners = (owner for rules in self.rules for owner in rules.trains(self))
        if TWINS:
            owners = (self.placed(owner) for owner in owners)
        if INSERTED:
            return [*owners, *(f"layers.{layer}." for layer in self.new_layers)]
        return list(owners)


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
    if TWINS or INSERTED:
        more: dict[str, Any] = {}
    if TWINS:
        branches = [pair for rules in present for pair in rules.branches(of[rules.name])]
        more["homes"], tail = dict(branches), list(range(trunk, config.num_hidden_layers))
        if sorted(branch for branch, _ in branches) != tail:
            raise ValueError(
                f"config.surgery: branches {sorted(more['homes'])} must be the tail layers {tail}, each once"
                f" (num_hidden_layers {config.num_hidden_layers} = trunk_layers {trunk} + one for each control block)"
            )
    if INSERTED:
        more |= {key: tuple(raw.get(key, ())) for key in ("new_layers", "older_layers")}
    if TWINS or INSERTED:
        return Surgery(trunk, present, of, **more)
    return Surgery(trunk, present, of)


def check_surgery(config: Any) -> Surgery:
    """What `read_surgery` reads, all of it checked: outputs ship without, as no plan makes another. Raises ValueError.

    Beside `surgery` and `grafts`, those that can be there, the config has the text decoder's `layer_types`, or None,
    and says whether it is an `encoder`'s.
    """
    raw = for_each_layer(config.surgery)
    for kind in (kind for rules in config.grafts for kind in rules.kinds if kind.fields):
        entries = raw.get(kind.key) or ()
        for entry in entries:
            known_keys(entry, kind.fields, kind.key)
        by_layer([SimpleNamespace(**entry) for entry in entries], kind.key)
    surgery = read_surgery(config)
    check_layers(surgery.new_layers, surgery.trunk_layers, "new_layers")
    check_layers(surgery.older_layers, surgery.trunk_layers, "older_layers")
    for rules in surgery.rules:
        rules.check(surgery, config)
    types = config.layer_types
    for branch, home in surgery.homes.items() if types else ():
        if types[branch : branch + 1] != types[home : home + 1]:
            raise ValueError(
                f"config.layer_types: layer {branch} is the branch of layer {home} and must "
                f"have its type, `{types[home]}`, not {types[branch : branch + 1]}"
            )
    return surgery


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


def one_of(name: str, value: str, allowed: Iterable[str]) -> None:
    """ValueError where `value` is none of `allowed`."""
    if value not in allowed:
        raise ValueError(f"config.surgery: {name} is `{value}`; it must be one of {', '.join(allowed)}")


def fraction(name: str, value: float) -> None:
    """ValueError where `value` is not from 0 to 1."""
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"config.surgery: {name} is {value}; it must lie between 0 and 1")


def loss_weight(name: str, value: float) -> None:
    """ValueError where `value` is no weight of a loss."""
    if not 0.0 <= value < float("inf"):
        raise ValueError(f"config.surgery: {name} is {value}; it must be a finite number, at least 0")


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


def check_layers(named: Iterable[int], bound: int, name: str) -> None:
    """ValueError where a layer is none of the `bound` first."""
    outside = [layer for layer in named if not 0 <= layer < bound]
    if outside:
        raise ValueError(f"config.surgery: {name} names layers {outside}; there are {bound}")
