"""A dense base as experts are made of it: its MLP and attention, by the names in its layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from surgeon.errors import BadInput, printable
from surgeon.families.skeleton import Skeleton

Form = Literal["shared", "copies"]
# What a plan can do instead.
BESIDE = "use `form: shared` without `target`, which brings modules of its own"

QUERY, KEY, VALUE, JOINT = (f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "qkv_proj"))
_GATE, _UP, _BOTH, _DOWN = (f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "gate_up_proj", "down_proj"))


@dataclass(frozen=True)
class Mixture:
    """What a mixture is to be: `experts` copies of the base's MLP, each cut into `segments`, `top_k` of them a token.

    So there are experts · segments experts, of which top_k · segments are chosen. `balance` is the coefficient of the
    loss that spreads tokens over experts; 0 is none. `plain` are the layers that keep their MLP.
    """

    form: Form
    experts: int
    top_k: int
    segments: int = 1
    balance: float = 0.0
    plain: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """How many experts a layer has."""
        return self.experts * self.segments

    @property
    def chosen(self) -> int:
        """How many of them a token takes."""
        return self.top_k * self.segments


class NoTarget(BadInput):
    """No class of transformers that is known here holds a base; any that a plan may ask for by name was tried."""


def check_divides(mixture: Mixture, width: int) -> None:
    """Raise BadInput where an FFN of so many neurons cannot be cut into the mixture's segments."""
    if width % mixture.segments:
        raise BadInput(
            f"`fine_grained: {mixture.segments}` does not divide the {width} neurons of its MLP; give a divisor"
        )


@dataclass(frozen=True)
class Dense:
    """A base: its config.json, the same with transformers' defaults (`full`), and the shapes in a layer, by suffix."""

    config: Mapping[str, Any]
    full: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, config: Mapping[str, Any], skeleton: Skeleton, shapes: Mapping[str, tuple[int, ...]]) -> Dense:
        """A base by what transformers builds of it. Raises NoTarget where its layers are not what classes have."""
        dense = cls(config, skeleton.text.to_dict(), shapes)
        dense.check()
        return dense

    def check(self) -> None:
        """Raise NoTarget for a layer that has no gated MLP of three matrices, BadInput for one that has experts."""
        check_no_experts(self.shapes)
        gated = {_GATE, _UP} <= self.shapes.keys() or _BOTH in self.shapes
        if not gated or _DOWN not in self.shapes:
            raise NoTarget(
                "its layers have no MLP of gate_proj, up_proj and down_proj (or gate_up_proj), and experts of the"
                f" classes known here have just these; {BESIDE}"
            )
        biased = next((s for s in self.shapes if s.startswith("mlp.") and s.endswith(".bias")), None)
        if biased is not None:
            raise NoTarget(
                f"{printable(biased)}: an MLP with biases, which experts of the classes known here have not; {BESIDE}"
            )

    @property
    def width(self) -> int:
        """How many neurons the MLP has."""
        return self.shapes[_DOWN][1]

    @property
    def hidden(self) -> int:
        """The width of the residual stream."""
        return self.shapes[_DOWN][0]

    @property
    def fused(self) -> bool:
        """Whether gate and up are one matrix."""
        return _BOTH in self.shapes

    @property
    def head_dim(self) -> int:
        """The size of an attention head."""
        return int(self.full.get("head_dim") or self.full["hidden_size"] // self.full["num_attention_heads"])

    @property
    def heads(self) -> tuple[int, int]:
        """How many heads queries have, and keys and values."""
        heads = int(self.full["num_attention_heads"])
        return heads, int(self.full.get("num_key_value_heads") or heads)

    @property
    def window(self) -> int | None:
        """The attention window of all layers; None where there is none, or none that shortens anything.

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
        """Where the rows of a matrix of attention or MLP stand in the base's layer."""
        heads, kv_heads = (count * self.head_dim for count in self.heads)
        whole = {"gate": _GATE, "up": _UP, "down": _DOWN, "query": QUERY, "key": KEY, "value": VALUE}[role]
        if whole in self.shapes:
            return Take(whole, 0, self.shapes[whole][0])
        inside = {
            "gate": (_BOTH, 0, self.width),
            "up": (_BOTH, self.width, 2 * self.width),
            "query": (JOINT, 0, heads),
            "key": (JOINT, heads, heads + kv_heads),
            "value": (JOINT, heads + kv_heads, heads + 2 * kv_heads),
        }
        return Take(*inside[role])


def check_no_experts(suffixes: Iterable[str]) -> None:
    """Raise BadInput where a layer's tensors, by suffix, have experts among them."""
    experts = next((suffix for suffix in suffixes if "expert" in suffix or "moe." in suffix), None)
    if experts is not None:
        raise BadInput(f"{printable(experts)}: the base is a mixture of experts already; use its dense original")


@dataclass(frozen=True)
class Take:
    """Rows `start:stop` of a tensor of the base's layer."""

    suffix: str
    start: int
    stop: int

    def part(self, number: int, of: int) -> Take:
        """Part `number` of these rows, cut into `of` equal ones."""
        size = (self.stop - self.start) // of
        return Take(self.suffix, self.start + number * size, self.start + (number + 1) * size)
