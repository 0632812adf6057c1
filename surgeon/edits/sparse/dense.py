"""A dense base from which experts are made: its MLP and attention, by the names in its layers."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from surgeon.errors import BadInput, printable

Form = Literal["shared", "copies"]
# The alternative that error messages offer.
BESIDE = "use `form: shared` without `target`, which brings modules of its own"

QUERY, KEY, VALUE, JOINT = (f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "qkv_proj"))
STEM = "model.layers."
# Names of an FFN's gate, up and down below a layer. Where gate and up have the same name, they are halves of one
# matrix; an FFN without a gate has an empty name.
_FFNS = (
    ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    ("mlp.gate_up_proj", "mlp.gate_up_proj", "mlp.down_proj"),
    ("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"),
    ("feed_forward.w1", "feed_forward.w3", "feed_forward.w2"),
    ("shared_mlp.input_linear", "shared_mlp.input_linear", "shared_mlp.output_linear"),
    ("", "mixer.up_proj", "mixer.down_proj"),
)


@dataclass(frozen=True)
class Mixture:
    """The wanted mixture: `experts` copies of the base's MLP, each cut into `segments`; a token goes to `top_k` copies.

    So a layer has experts · segments experts, of which top_k · segments are chosen. `balance` is the coefficient of the
    loss that spreads tokens over experts; 0 means no such loss. `plain` are the layers that keep their MLP.
    """

    form: Form
    experts: int
    top_k: int
    segments: int = 1
    balance: float = 0.0
    plain: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """Return how many experts a layer has."""
        return self.experts * self.segments

    @property
    def chosen(self) -> int:
        """Return to how many of a layer's experts a token goes."""
        return self.top_k * self.segments


class NoTarget(BadInput):
    """The error where no class known here holds a base; the named class, or every class, was tried."""


def check_divides(mixture: Mixture, width: int) -> None:
    """Raise BadInput where an FFN of `width` neurons cannot be cut into the mixture's segments."""
    if width % mixture.segments:
        raise BadInput(
            f"`fine_grained: {mixture.segments}` does not divide the {width} neurons of its MLP; give a divisor"
        )


@dataclass(frozen=True, eq=False)
class Dense:
    """A base: its config.json, the same with transformers' defaults (`full`), and the shapes in each layer, by suffix.

    The names of layers begin with `stem`.
    """

    config: Mapping[str, Any]
    full: Mapping[str, Any]
    layers: Sequence[Mapping[str, tuple[int, ...]]]
    stem: str

    def __post_init__(self) -> None:
        """Raise NoTarget where no class can hold the FFNs (none of plain matrices, biases, or several widths).

        Raises BadInput where all FFNs have experts.
        """
        mixed = next((index for index, shapes in enumerate(self.layers) if _experts_in(shapes)), None)
        if mixed is not None and self.holders:
            raise NoTarget(
                f"layer {mixed} has experts already, and those of the classes known here are all alike; {BESIDE}"
            )
        if mixed is not None:
            experts = printable(_experts_in(self.layers[mixed]))
            raise BadInput(f"{experts}: the base is a mixture of experts already; use its dense original")
        if not self.holders:
            raise NoTarget(
                "its layers have no MLP of gate_proj, up_proj and down_proj (or gate_up_proj), and experts of the"
                f" classes known here have just these; {BESIDE}"
            )
        ffns = tuple({name.partition(".")[0] for name in self.ffn if name})
        biased = next((s for s in self.shapes if s.startswith(ffns) and s.endswith(".bias")), None)
        if biased is not None:
            raise NoTarget(
                f"{printable(biased)}: an MLP with biases, which experts of the classes known here have not; {BESIDE}"
            )
        odd = next((i for i in self.holders if any(self.layers[i][s] != self.shapes[s] for s in self.matrices)), None)
        if odd is not None:
            raise NoTarget(
                f"the MLP of layer {odd} is of another width than that of layer {self.holders[0]}, and experts of the"
                f" classes known here have one; {BESIDE}"
            )

    @functools.cached_property
    def ffn(self) -> tuple[str, str, str]:
        """Return (gate, up, down): the modules' names below a layer.

        Gate is empty without a gate, and equals up where fused.
        """
        return next(names for names in _FFNS if any(_has(shapes, names) for shapes in self.layers))

    @functools.cached_property
    def holders(self) -> tuple[int, ...]:
        """Return the layers that have the FFN; none where no layer has a known one."""
        held = ([i for i, shapes in enumerate(self.layers) if _has(shapes, names)] for names in _FFNS)
        return tuple(next((found for found in held if found), ()))

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes in the first layer that has the FFN."""
        return self.layers[self.holders[0]]

    @property
    def matrices(self) -> tuple[str, ...]:
        """Return the suffixes of the FFN's matrices, each once."""
        return tuple(dict.fromkeys(f"{name}.weight" for name in self.ffn if name))

    @property
    def roles(self) -> tuple[str, ...]:
        """Return the roles of the FFN's matrices: gate (if it has one), up and down."""
        # Without a gate, its name is empty, and the slice begins at 1 (True).
        return ("gate", "up", "down")[not self.ffn[0] :]

    @functools.cached_property
    def kinds(self) -> dict[int, Mapping[str, tuple[int, ...]]]:
        """Return the shapes in the first layer of each kind, by the layer's number."""
        found: dict[int, Mapping[str, tuple[int, ...]]] = {}
        for index, shapes in enumerate(self.layers):
            if all(shapes != other for other in found.values()):
                found[index] = shapes
        return found

    @property
    def width(self) -> int:
        """Return how many neurons the MLP has."""
        return self.shapes[self.matrices[-1]][1]

    @property
    def hidden(self) -> int:
        """Return the width of the residual stream."""
        return self.shapes[self.matrices[-1]][0]

    @property
    def fused(self) -> bool:
        """Return whether gate and up are one matrix."""
        return self.ffn[0] == self.ffn[1]

    @property
    def head_dim(self) -> int:
        """Return the size of an attention head."""
        return int(self.full.get("head_dim") or self.full["hidden_size"] // self.full["num_attention_heads"])

    @property
    def heads(self) -> tuple[int, int]:
        """Return (query heads, key-value heads)."""
        heads = int(self.full["num_attention_heads"])
        return heads, int(self.full.get("num_key_value_heads") or heads)

    @property
    def window(self) -> int | None:
        """Return the attention window of all layers; None where there is none, or it covers every position.

        Raises BadInput where layers differ in it.
        """
        window, types = self.full.get("sliding_window"), self.full.get("layer_types") or []
        if window is None or self.full.get("use_sliding_window") is False:
            return None
        if types and set(types) == {"full_attention"}:
            return None
        if window >= self.full["max_position_embeddings"]:
            return None
        if len(set(types)) > 1:
            raise BadInput("some of its layers have an attention window and some have none; use another base")
        return int(window)

    def source(self, role: str) -> Take:
        """Return the rows of the base's layer that hold the matrix of this role, of attention or MLP."""
        gate, up, down = (f"{name}.weight" for name in self.ffn)
        whole = {"gate": gate, "up": up, "down": down, "query": QUERY, "key": KEY, "value": VALUE}[role]
        if self.fused and role in ("gate", "up"):
            begin = 0 if role == "gate" else self.width
            return Take(whole, begin, begin + self.width)
        if whole in self.shapes:
            return Take(whole, 0, self.shapes[whole][0])
        heads, kv_heads = (count * self.head_dim for count in self.heads)
        begin = {"query": 0, "key": heads, "value": heads + kv_heads}[role]
        return Take(JOINT, begin, begin + (heads if role == "query" else kv_heads))


def _has(shapes: Mapping[str, tuple[int, ...]], names: tuple[str, str, str]) -> bool:
    """Return whether a layer has all matrices of an FFN with these names."""
    return all(f"{name}.weight" in shapes for name in names if name)


def _experts_in(suffixes: Iterable[str]) -> str:
    """Return the first suffix of an expert's tensor; empty where there is none."""
    return next((suffix for suffix in suffixes if "expert" in suffix or "moe." in suffix), "")


@dataclass(frozen=True)
class Take:
    """Rows `start:stop` of a tensor of the base's layer."""

    suffix: str
    start: int
    stop: int

    def part(self, number: int, of: int) -> Take:
        """Return part `number` of these rows, cut into `of` equal parts."""
        size = (self.stop - self.start) // of
        return Take(self.suffix, self.start + number * size, self.start + (number + 1) * size)
