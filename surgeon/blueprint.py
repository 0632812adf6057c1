"""The blueprint: for every tensor of the output one recipe, made from headers alone.

Operations edit a `Draft`, in plan order; `Draft.finish` numbers the layers and gives the frozen `Blueprint`
that preview shows, `execute` walks and `verify` checks against. No weight is read here.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import Anatomy
from surgeon.families.family import MOST_LAYERS
from surgeon.recipes import Copy, Coupling, Recipe

Promise = Literal["exact", "none"]

# Top-level config lists that hold one entry a layer; they grow with the model (`layer_types`, `no_rope_layers`).
_PER_LAYER_KEY = re.compile(r"(^|_)layers?(_|$)")


@dataclass(frozen=True, slots=True)
class Claim:
    """What an operation promises about the base's function.

    `exact`: every logit is bit-identical at birth, in the checkpoint's dtype and with the same attention
    implementation. `none`: the function changes. `reason` says why, in one sentence.
    """

    promise: Promise
    reason: str


@dataclass(slots=True)
class LayerDraft:
    """A layer while operations are at work: its tensors by suffix, and where it comes from.

    `base` is the base layer it is (None for a new one), `operation` the operation that made it, `sources`
    what it was made from, in words of the model as that operation found it.
    """

    tensors: dict[str, Recipe]
    base: int | None
    layer_type: str | None
    per_layer: dict[str, Any] = field(default_factory=dict)
    operation: int | None = None
    sources: tuple[int, ...] = ()
    init: str = ""


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of the output, as preview and manifest show it. `sources` are its sources' numbers in the output."""

    index: int
    base: int | None
    operation: int | None
    init: str
    sources: tuple[int, ...]
    layer_type: str | None


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor of the output. `new` tensors are what training may change; `operation` made them."""

    name: str
    recipe: Recipe
    new: bool
    operation: int | None


@dataclass(frozen=True, slots=True)
class OperationRecord:
    """What one operation of the plan did: its name, what its selector matched, its claim, what it lets train."""

    op: str
    matched: str
    claim: Claim
    trains: Literal["new", "all"]


@dataclass(frozen=True)
class Blueprint:
    """The output, tensor by tensor, in the order of the model.

    `couplings` maps the names of transport maps to how they are made, in an order in which each comes after
    those it needs. `native` says that the output is the base's own class with more layers.
    """

    seed: int
    outputs: tuple[Output, ...]
    couplings: dict[str, Coupling]
    layers: tuple[Layer, ...]
    operations: tuple[OperationRecord, ...]
    config: dict[str, Any]
    native: bool = True

    @property
    def promise(self) -> Promise:
        """The weakest promise of all operations: what the output as a whole promises."""
        return "exact" if all(record.claim.promise == "exact" for record in self.operations) else "none"

    @property
    def layer_of_base(self) -> tuple[int, ...]:
        """For every base layer, its number in the output."""
        kept = [layer for layer in self.layers if layer.base is not None]
        return tuple(layer.index for layer in sorted(kept, key=lambda layer: layer.base or 0))


class Draft:
    """The model while operations edit it, one after the other."""

    def __init__(self, anatomy: Anatomy, config: Mapping[str, Any], *, seed: int) -> None:
        self.anatomy = anatomy
        self.seed = seed
        self.config: dict[str, Any] = copy.deepcopy(dict(config))
        self.couplings: dict[str, Coupling] = {}
        self.records: list[OperationRecord] = []
        types: Sequence[str | None] = anatomy.layer_types or [None] * anatomy.sizes.layers
        lists = self._per_layer_lists()
        self.layers = [
            LayerDraft(
                tensors={suffix: Copy(info.name, info.dtype, info.shape) for suffix, info in tensors.items()},
                base=index,
                layer_type=types[index],
                per_layer={key: values[index] for key, values in lists.items()},
            )
            for index, tensors in enumerate(anatomy.layers)
        ]

    def add_coupling(self, coupling: Coupling) -> None:
        """Keep a transport map for recipes to share; its name must be new, what it needs must be there."""
        assert coupling.name not in self.couplings, coupling.name
        self.couplings[coupling.name] = coupling

    def insert(self, inserted: Mapping[int, list[LayerDraft]]) -> None:
        """Put new layers into the gaps after the given layers (numbers of the stack as it stands)."""
        count = len(self.layers) + sum(len(layers) for layers in inserted.values())
        if count > MOST_LAYERS:
            raise BadInput(f"the model would grow to {count} layers; more than {MOST_LAYERS} is refused")
        stack: list[LayerDraft] = []
        for index, layer in enumerate(self.layers):
            stack.append(layer)
            stack.extend(inserted.get(index, ()))
        # Sources are numbers of the stack before this edit (and, in older layers, of one still older): renumber.
        moved = {id(layer): new for new, layer in enumerate(stack)}
        renumbered = [moved[id(layer)] for layer in self.layers]
        for layer in stack:
            layer.sources = tuple(renumbered[source] for source in layer.sources)
        self.layers = stack

    def finish(self) -> Blueprint:
        """Number the layers, name the tensors and extend the config."""
        outputs: list[Output] = []
        outer = [Output(info.name, Copy(info.name, info.dtype, info.shape), False, None) for info in self._outer()]
        for index, layer in enumerate(self.layers):
            for suffix, recipe in layer.tensors.items():
                name = self.anatomy.layer_name(index, suffix)
                outputs.append(Output(name, recipe, layer.base is None, layer.operation))
        return Blueprint(
            seed=self.seed,
            outputs=(*outer, *outputs),
            couplings=dict(self.couplings),
            layers=tuple(
                Layer(index, layer.base, layer.operation, layer.init, layer.sources, layer.layer_type)
                for index, layer in enumerate(self.layers)
            ),
            operations=tuple(self.records),
            config=self._finished_config(),
        )

    def _outer(self) -> list[Any]:
        return list(self.anatomy.outer.values())

    def _per_layer_lists(self) -> dict[str, list[Any]]:
        count = self.anatomy.sizes.layers
        return {
            key: value
            for key, value in self.config.items()
            if isinstance(value, list) and len(value) == count and _PER_LAYER_KEY.search(key) and key != "layer_types"
        }

    def _finished_config(self) -> dict[str, Any]:
        # Edited as a plain dict: writing it anew through a config class would drop what older versions read.
        config = copy.deepcopy(self.config)
        config["num_hidden_layers"] = len(self.layers)
        if self.anatomy.layer_types is not None:
            config["layer_types"] = [layer.layer_type for layer in self.layers]
        for key in self._per_layer_lists():
            config[key] = [layer.per_layer[key] for layer in self.layers]
        for key in ("mlp_only_layers", "full_attention_layers"):
            if config.get(key):
                raise BadInput(
                    f"config.json: `{printable(key)}` names layers by number in a way surgeon cannot renumber yet"
                )
        return config
