"""The types that describe a family: sizes, parts of a layer, and the family itself.

A layer is described as a list of `Part`s. Each part names the module it belongs to by its *role*,
so that code above this room (transport flow, zero-initialisation) needs no tensor names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from surgeon.errors import BadInput, printable

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

# Top-level config lists that hold one entry a layer; they grow with the model (`layer_types`, `no_rope_layers`).
_PER_LAYER_KEY = re.compile(r"(^|_)layers?(_|$)")

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
    value with which a norm scales by one, where the family's `norm_offset` does not say it. With `expert` the blocks
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


# From a config and its sizes: the parts of a layer; and the shapes of the base model's tensors outside layers, by name.
LayerParts = Callable[[Config, Sizes], tuple[Part, ...]]
OuterParts = Callable[[Config, Sizes], dict[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Family:
    """One architecture: how to read its config, and the parts of its layer.

    `defaults` are the values transformers assumes where a config.json leaves a field out. `norm_offset` is
    the number that the architecture adds to a stored norm weight before it multiplies (1 in Gemma, else 0).
    `layer_types` gives the attention type of every layer, or None where the family has no such list.

    A layer's tensor is called `{prefix}{stem}{number}.{suffix}`, without `prefix` where the base model was saved alone;
    `outer_parts` are the base model's tensors outside layers, by what follows the prefix, and their shapes. An
    `encoder` reads a sequence in both directions and has no cache; its heads are copied as they are. With
    `embeddings_scaled` its code multiplies embeddings by the root of the hidden size. `lists_known`: transformers'
    config class keeps no list with an entry for each layer that neither config.json nor `layer_types` has; where that
    is not known, the class is asked, which takes a second.
    """

    model_type: str
    layer_parts: LayerParts
    defaults: Mapping[str, Any] = field(default_factory=dict)
    norm_offset: float = 0.0
    tied_by_default: bool = False
    layer_types: Callable[[Config, int], list[str] | None] = lambda config, layers: None
    encoder: bool = False
    embeddings_scaled: bool = False
    lists_known: bool = False
    prefix: str = "model."
    stem: str = "layers."
    outer_parts: OuterParts = lambda config, sizes: {
        "embed_tokens.weight": (sizes.vocabulary, sizes.hidden),
        "norm.weight": (sizes.hidden,),
    }

    def tied(self, config: Config) -> bool:
        """Whether the output embedding is the input embedding."""
        return bool(config.get("tie_word_embeddings", self.tied_by_default))

    def sizes(self, config: Config) -> Sizes:
        """Read and check the sizes. Raises BadInput, which names the field that is missing or out of range."""

        def read(key: str, default: int | None = None) -> int:
            value = self._of(config, key)
            value = default if value is None else value
            if value is None:
                raise BadInput(f"config.json: `{key}` is missing; {OWN_CONFIG}")
            if type(value) is not int or not 0 < value <= LARGEST_SIZE:
                shown = printable(repr(value), 60)
                raise BadInput(f"config.json: `{key}` is {shown}, not a whole number from 1 to 2^31; {OWN_CONFIG}")
            return value

        layers, hidden, heads = read("num_hidden_layers"), read("hidden_size"), read("num_attention_heads")
        if layers > MOST_LAYERS:
            raise BadInput(
                f"config.json: `num_hidden_layers` is {layers}; more than {MOST_LAYERS} is refused; {OWN_CONFIG}"
            )
        kv_heads = read("num_key_value_heads", heads)
        if heads % kv_heads:
            raise BadInput(
                f"config.json: `num_key_value_heads` {kv_heads} does not divide `num_attention_heads` {heads};"
                f" {OWN_CONFIG}"
            )
        if hidden % heads and (self.encoder or self._of(config, "head_dim") is None):
            raise BadInput(
                f"config.json: `num_attention_heads` {heads} does not divide `hidden_size` {hidden}; {OWN_CONFIG}"
            )
        return Sizes(
            layers=layers,
            hidden=hidden,
            intermediate=read("intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=read("head_dim", hidden // heads or None),
            vocabulary=read("vocab_size"),
        )

    def _of(self, config: Config, key: str) -> Any:
        value = config.get(key)
        return self.defaults.get(key) if value is None else value

    def silence(self, parts: tuple[Part, ...]) -> dict[str, float]:
        """The values to store, by suffix, so that a layer adds exactly zero to the residual stream.

        Without post-norms: every weight and bias that writes to the stream is zero (LLaMA PRO; OpT-DeUS,
        Algorithm 1 line 11). With post-norms the *effective scale* of those norms is zero instead and the
        projections keep their values: as exact, and the first optimiser step does not explode, as it would
        through the normalisation of a vector of zeros.
        """
        post_norms = {
            part.suffix: 0.0 - self.norm_offset  # not -0.0, whose bytes are not zeros
            for part in parts
            if part.kind == "norm" and part.role in ("post_attention_norm", "post_mlp_norm")
        }
        if post_norms:
            return post_norms
        return {
            part.suffix: 0.0
            for part in parts
            if part.kind in ("weight", "bias") and part.blocks[0][0] in ("output", "down")
        }


def whole(config: Config, key: str, default: int) -> int:
    """A whole number of the config, negative ones included. Raises BadInput for anything else."""
    value = config.get(key, default)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > LARGEST_SIZE:
        raise BadInput(f"config.json: `{key}` is {printable(repr(value), 60)}, not a whole number; {OWN_CONFIG}")
    return value


def projection(name: str, role: Role, rows: int, columns: int, *, bias: bool = False) -> tuple[Part, ...]:
    """A linear module's weight (rows out, columns in) and, where it has one, its bias."""
    return fused_projection(name, ((role, rows),), columns, bias=bias)


def fused_projection(
    name: str, blocks: tuple[tuple[Role, int], ...], columns: int, *, bias: bool = False
) -> tuple[Part, ...]:
    """Several linear modules stored as one tensor, stacked by rows."""
    rows = sum(count for _, count in blocks)
    weight = Part(f"{name}.weight", (rows, columns), "weight", blocks)
    return (weight, Part(f"{name}.bias", (rows,), "bias", blocks)) if bias else (weight,)


def norm(name: str, role: Role, width: int) -> Part:
    """A norm's scale vector."""
    return Part(f"{name}.weight", (width,), "norm", ((role, width),))


def layer_norm(name: str, role: Role, width: int) -> tuple[Part, ...]:
    """A norm's scale and shift."""
    return (norm(name, role, width), Part(f"{name}.bias", (width,), "bias", ((role, width),)))


def attention(sizes: Sizes, *, qkv_bias: bool = False, output_bias: bool = False) -> tuple[Part, ...]:
    """Separate query, key, value and output projections under `self_attn`."""
    return (
        *projection("self_attn.q_proj", "query", sizes.query_width, sizes.hidden, bias=qkv_bias),
        *projection("self_attn.k_proj", "key", sizes.kv_width, sizes.hidden, bias=qkv_bias),
        *projection("self_attn.v_proj", "value", sizes.kv_width, sizes.hidden, bias=qkv_bias),
        *projection("self_attn.o_proj", "output", sizes.hidden, sizes.query_width, bias=output_bias),
    )


def gated_mlp(sizes: Sizes, *, bias: bool = False) -> tuple[Part, ...]:
    """Gate, up and down projections under `mlp`."""
    return (
        *projection("mlp.gate_proj", "gate", sizes.intermediate, sizes.hidden, bias=bias),
        *projection("mlp.up_proj", "up", sizes.intermediate, sizes.hidden, bias=bias),
        *projection("mlp.down_proj", "down", sizes.hidden, sizes.intermediate, bias=bias),
    )


def flag(config: Config, key: str) -> bool:
    """A boolean of the config; False where it is missing."""
    return bool(config.get(key, False))


def per_layer_lists(config: Config, layers: int) -> dict[str, list[Any]]:
    """The config's lists that hold one entry for each of `layers` layers, by key."""
    return {
        key: value
        for key, value in config.items()
        if isinstance(value, list) and len(value) == layers and _PER_LAYER_KEY.search(key)
    }


def listed_layer_types(config: Config, layers: int) -> list[str] | None:
    """The config's own `layer_types`; None where it has none. Raises BadInput where it is not one name a layer."""
    types = config.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != layers or not all(isinstance(t, str) for t in types):
        shown = f"has {len(types)} entries" if isinstance(types, list) else f"is {printable(repr(types), 60)}"
        raise BadInput(
            f"config.json: `layer_types` {shown}; it must list one name for each of the {layers} layers; {OWN_CONFIG}"
        )
    return list(types)
