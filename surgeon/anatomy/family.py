"""The types that describe a layer and a model: sizes, the parts of a layer, and what its tensors are called.

A layer is described as a list of `Part`s. Each part names the module it belongs to by its *role*,
so that code above this room (transport flow, zero-initialisation) needs no tensor names.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Role = Literal[
    "pre_attention_norm",
    "query",
    "key",
    "value",
    "query_norm",
    "key_norm",
    "output",
    "post_attention_norm",
    "pre_mlp_norm",
    "gate",
    "up",
    "down",
    "post_mlp_norm",
    "position_key",
    "position_query",
    "talking_heads",
    # Of a mixture of experts: what has a row, or a number, for each; and what scales a shared expert's output.
    "router",
    "shared_gate",
]
# `other`: what is neither a matrix nor a bias nor a norm (a state space's decay, say).
Kind = Literal["weight", "bias", "norm", "other"]
Config = Mapping[str, Any]

# Far above any model so far; stops a hostile config that asks for a billion layers.
MOST_LAYERS = 10_000
LARGEST_SIZE = 2**31
# What to do about a setting that is no setting of any model.
OWN_CONFIG = "use the model's own config.json"


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers of a config that fix every tensor's shape."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @property
    def query_width(self) -> int:
        """Rows of the query projection: heads times head size."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Rows of the key and of the value projection."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Expert:
    """That a tensor belongs to a mixture of experts: to expert `number`, or (None) to all, along its first axis.

    `transposed`: an expert's matrices are stored inputs by outputs. `interleaved`: rows of gate and up alternate.
    """

    number: int | None
    transposed: bool = False
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a layer.

    `blocks` are the modules it holds from the top row down, as (role, rows): one for most tensors, several
    where an architecture fuses projections (Phi-3's `qkv_proj`), none where roles are not known. `identity` is the
    value with which a norm scales by one. With `expert` the blocks
    are those of one expert's matrix, as outputs by inputs, gate before up.
    """

    suffix: str
    shape: tuple[int, ...]
    kind: Kind
    blocks: tuple[tuple[Role, int], ...]
    identity: float | None = None
    expert: Expert | None = None

    @property
    def role(self) -> Role:
        """The only module this tensor belongs to (a bug where there are several)."""
        assert len(self.blocks) == 1, self.suffix
        return self.blocks[0][0]


class Slot(NamedTuple):
    """Where a tensor holds the units of a space: along `axis`, from `start` on, `each` numbers of every unit."""

    suffix: str
    axis: int
    start: int
    each: int


class Space(NamedTuple):
    """A space by its name in the layer, how many units it has, and where they lie."""

    name: str
    units: int
    slots: tuple[Slot, ...]


def inner_width(part: Part) -> int:
    """How many neurons the projection reads by which an FFN, or one of its experts, writes."""
    return part.shape[-2 if part.expert is not None and part.expert.transposed else -1]


def hidden_axis(part: Part) -> int:
    """Along which axis a tensor of an FFN, or of experts, has a number for each dimension of the stream."""
    stacked = int(part.expert is not None and part.expert.number is None)
    if part.kind != "weight":
        return stacked
    turned = part.expert is not None and part.expert.transposed
    return stacked + int((part.blocks[0][0] == "down") == turned)


@dataclass(frozen=True)
class Family:
    """What a checkpoint's layers are called: a tensor is `{stem}{number}.{suffix}`.

    An `encoder` reads a sequence in both directions and has no cache; its heads are copied as they are.
    """

    model_type: str
    stem: str = "model.layers."
    encoder: bool = False


class Axis(NamedTuple):
    """How one axis of a tensor grows: along which, what is new there (None: copies of what there is), and the parts
    that each grow for themselves, in proportion.
    """

    axis: int
    new: float | None
    shares: tuple[int, ...] = (1,)


Axes = tuple[Axis, ...]


@dataclass(frozen=True)
class Packed:
    """A quantised tensor of a layer: the suffix of its `scales`, and its suffix and shape in full precision.

    `block` is rows by columns of numbers that share a scale; None: MXFP4. `module` is what holds it in memory.
    """

    scales: str
    suffix: str
    shape: tuple[int, ...]
    block: tuple[int, int] | None
    module: str

    @property
    def replaced(self) -> str:
        """The module in whose place transformers puts one of its own where it multiplies numbers as they are stored.

        For MXFP4 that is the whole block that holds the experts (`mlp`), for FP8 the linear module, or the experts.
        """
        return self.module.rpartition(".")[0] if self.block is None else self.module


def with_fields(config: Mapping[str, Any], path: Sequence[str], fields: Mapping[str, int]) -> dict[str, Any]:
    """The config with these fields in its part at `path`; a dot in a field's name leads into a part of that."""
    made = copy.deepcopy(dict(config))
    part = made
    for key in path if fields else ():
        part = part.setdefault(key, {})
    for name, value in fields.items():
        *inside, key = name.split(".")
        place = part
        for step in inside:
            place = place.setdefault(step, {})
        place[key] = value
    return made
