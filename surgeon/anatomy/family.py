"""The types that describe a layer and a model: sizes, the parts of a layer, and the names of its tensors.

A layer is described as a list of `Part`s. Each part names the module it belongs to by its *role*, so that code above
this room (transport flow, zero-initialisation) needs no tensor names.
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
    # In a mixture of experts: the router, with a row or a number per expert; and the gate that scales a shared expert's
    # output.
    "router",
    "shared_gate",
]
# `other`: neither a matrix nor a bias nor a norm (a state space's decay, say).
Kind = Literal["weight", "bias", "norm", "other"]
Config = Mapping[str, Any]

# Far above any model so far; stops a hostile config that asks for a billion layers.
MOST_LAYERS = 10_000
LARGEST_SIZE = 2**31
# The advice for a setting that no model has.
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
        """The number of rows of the query projection: heads times head size."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """The number of rows of the key projection, and of the value projection."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Expert:
    """The place of a tensor in a mixture of experts: expert `number`, or (None) all experts, along its first axis.

    `transposed`: an expert's matrices are stored inputs by outputs. `interleaved`: rows of gate and up alternate.
    """

    number: int | None
    transposed: bool = False
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a layer.

    `blocks` are the modules it holds from the top row down, as (role, rows): one for most tensors, several where an
    architecture fuses projections (Phi-3's `qkv_proj`), none where roles are not known. `identity` is the value with
    which a norm scales by one. With `expert` the blocks describe one expert's matrix, as outputs by inputs, gate before
    up.
    """

    suffix: str
    shape: tuple[int, ...]
    kind: Kind
    blocks: tuple[tuple[Role, int], ...]
    identity: float | None = None
    expert: Expert | None = None

    @property
    def role(self) -> Role:
        """The role of this tensor's only module (an assertion fails where there are several)."""
        assert len(self.blocks) == 1, self.suffix
        return self.blocks[0][0]


class Slot(NamedTuple):
    """The place of a space's units in a tensor: along `axis`, from `start` on, `each` numbers per unit."""

    suffix: str
    axis: int
    start: int
    each: int


class Space(NamedTuple):
    """A space by its name in the layer, with its number of units, and the slots that hold them."""

    name: str
    units: int
    slots: tuple[Slot, ...]


def inner_width(part: Part) -> int:
    """Return the number of neurons that the down projection of an FFN, or of one of its experts, reads."""
    return part.shape[-2 if part.expert is not None and part.expert.transposed else -1]


def hidden_axis(part: Part) -> int:
    """Return the axis along which a tensor of an FFN, or of experts, has one entry per dimension of the stream."""
    stacked = int(part.expert is not None and part.expert.number is None)
    if part.kind != "weight":
        return stacked
    turned = part.expert is not None and part.expert.transposed
    return stacked + int((part.blocks[0][0] == "down") == turned)


@dataclass(frozen=True)
class Family:
    """The naming of a checkpoint's layers: a tensor is `{stem}{number}.{suffix}`.

    An `encoder` reads a sequence in both directions and has no cache; its heads are copied unchanged.
    """

    model_type: str
    stem: str = "model.layers."
    encoder: bool = False


class Axis(NamedTuple):
    """The growth of one axis of a tensor.

    `new` is the value of new entries (None: copies of existing ones). `shares` are the parts of the axis that each grow
    separately, in proportion.
    """

    axis: int
    new: float | None
    shares: tuple[int, ...] = (1,)


Axes = tuple[Axis, ...]


@dataclass(frozen=True)
class Packed:
    """A quantised tensor of a layer: the suffix of its `scales`, and its suffix and shape in full precision.

    `block` is the rows and columns of numbers that share a scale; None: MXFP4. `module` is the module that holds the
    tensor in memory.
    """

    scales: str
    suffix: str
    shape: tuple[int, ...]
    block: tuple[int, int] | None
    module: str

    @property
    def replaced(self) -> str:
        """The module that transformers replaces by one of its own to compute with the quantised numbers as stored.

        For MXFP4 that is the whole block that holds the experts (`mlp`); for FP8 the linear module, or the experts.
        """
        return self.module.rpartition(".")[0] if self.block is None else self.module


def with_fields(config: Mapping[str, Any], path: Sequence[str], fields: Mapping[str, int]) -> dict[str, Any]:
    """Return the config with these fields set in its part at `path`; a dot in a field's name leads into a subpart."""
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
