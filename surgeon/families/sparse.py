"""Dense decoders as mixtures of experts: which class of transformers holds a model, and which tensor goes where.

A class holds a base where it computes the same with the base's own tensors. That is not looked up: both are built, the
names and shapes of all tensors must fit, and a tiny twin of the base must give the same logits in the other class.
What each class calls its experts on disk, and the settings by which it would compute something else, stand here.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from surgeon.common.library import LOAD_FAILURES, first_line, quiet_transformers
from surgeon.errors import BadInput, printable
from surgeon.families.names import as_loaded, made_of
from surgeon.families.skeleton import Skeleton, build
from surgeon.families.twin import one_thread, shrunk, twin_of

if TYPE_CHECKING:
    from torch import Tensor

Form = Literal["shared", "copies"]

_QUERY, _KEY, _VALUE, _JOINT = (f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "qkv_proj"))
_GATE, _UP, _BOTH, _DOWN = (f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "gate_up_proj", "down_proj"))
# Half of a matrix has another kernel for its activation where its width is no multiple of this.
_ALIGNED = 32
# Products of many experts at once (torch's grouped_mm) take rows of a multiple of 16 bytes: so many numbers of 16 bits.
_GROUPED = 8
# Of the twin's largest logit: what rounding makes of one function.
_ROUNDING = 1e-4
# What every class means the same by. Of classes' own defaults none is trusted.
_COMMON = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps", "use_cache"),
    *("tie_word_embeddings", "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id"),
)
_AS_WRITTEN = ("dtype", "torch_dtype", "transformers_version", "original_max_position_embeddings")
_ROPE = ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor")


@dataclass(frozen=True)
class Mixture:
    """What a mixture is to be: `experts` copies of the base's MLP, each cut into `segments`, `top_k` of them a token.

    So there are experts · segments experts, of which top_k · segments are chosen. `balance` is the coefficient of the
    loss that spreads tokens over experts; 0 is none.
    """

    form: Form
    experts: int
    top_k: int
    segments: int = 1
    balance: float = 0.0

    @property
    def count(self) -> int:
        """How many experts a layer has."""
        return self.experts * self.segments

    @property
    def chosen(self) -> int:
        """How many of them a token takes."""
        return self.top_k * self.segments


@dataclass(frozen=True)
class Dense:
    """A base: its config.json, the same with transformers' defaults (`full`), and the shapes in a layer, by suffix."""

    config: Mapping[str, Any]
    full: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, config: Mapping[str, Any], skeleton: Skeleton, shapes: Mapping[str, tuple[int, ...]]) -> Dense:
        """A base by what transformers builds of it. Raises BadInput where its layers are not what is understood."""
        dense = cls(config, skeleton.text.to_dict(), shapes)
        dense.check()
        return dense

    def check(self) -> None:
        """Raise BadInput for a layer that has no gated MLP of three matrices, or has experts already."""
        check_no_experts(self.shapes)
        gated = {_GATE, _UP} <= self.shapes.keys() or _BOTH in self.shapes
        if not gated or _DOWN not in self.shapes:
            raise BadInput(
                "its layers have no MLP of gate_proj, up_proj and down_proj (or gate_up_proj), and experts of the"
                " classes known here have just these; use another base"
            )
        biased = next((s for s in self.shapes if s.startswith("mlp.") and s.endswith(".bias")), None)
        if biased is not None:
            raise BadInput(f"{printable(biased)}: an MLP with biases, which experts have not; use another base")

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
        whole = {"gate": _GATE, "up": _UP, "down": _DOWN, "query": _QUERY, "key": _KEY, "value": _VALUE}[role]
        if whole in self.shapes:
            return Take(whole, 0, self.shapes[whole][0])
        inside = {
            "gate": (_BOTH, 0, self.width),
            "up": (_BOTH, self.width, 2 * self.width),
            "query": (_JOINT, 0, heads),
            "key": (_JOINT, heads, heads + kv_heads),
            "value": (_JOINT, heads + kv_heads, heads + 2 * kv_heads),
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


Role = Literal["kept", "inner", "down", "router", "bias"]


@dataclass(frozen=True)
class Made:
    """A tensor of a layer of the mixture. `takes` are rows of the base's layer, one piece below the other.

    `kept`: what the base computes with; `inner`: gate and up of experts; `down`: their output, which of the segment
    `number` takes columns, `segments` of equal width; `router`: a row an expert; `bias`: a number an expert, zero.
    `expert` is the number of the one expert that it belongs to; None: it holds all of them.
    """

    suffix: str
    shape: tuple[int, ...]
    role: Role
    takes: tuple[Take, ...] = ()
    expert: int | None = None


@dataclass(frozen=True)
class Target:
    """A class of transformers that mixes experts, as its checkpoints name them.

    `settings` are the fields of its config.json that are not every class's, of a base and a mixture; it raises BadInput
    where no setting computes what the base does. `expert` and `shared` hold a place for the number and for the three
    `words` of gate, up and down; of a class with `fused` ones `words` are those of gate and up in one, and of down.
    `balanced` says that it has a loss that spreads tokens, `engines` what else runs it.
    """

    model_type: str
    architecture: str
    form: Form
    engines: str
    router: str
    expert: str
    words: tuple[str, ...]
    settings: Callable[[Dense, Mixture], dict[str, Any]]
    shared: str = ""
    bias: str = ""
    fused: bool = False
    balanced: bool = True

    def config(self, dense: Dense, mixture: Mixture) -> dict[str, Any]:
        """The config.json of the mixture. Raises BadInput where the class cannot compute what the base does."""
        full, written = dense.full, dense.config
        made: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.model_type}
        made |= {key: written.get(key, full.get(key)) for key in _COMMON}
        made["hidden_act"] = made["hidden_act"] or full.get("hidden_activation")
        if made["rms_norm_eps"] is None:
            raise BadInput("it has RMS norms; the base's norms are others (no `rms_norm_eps` in its config.json)")
        heads, kv_heads = dense.heads
        made |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dense.head_dim}
        made |= {key: written[key] for key in _AS_WRITTEN if key in written}
        made |= _rope(dense)
        made["attention_bias"] = any(s.endswith(("q_proj.bias", "qkv_proj.bias")) for s in dense.shapes)
        # Engines differ in which of the two they read.
        made |= {"num_experts": mixture.count, "num_local_experts": mixture.count}
        made["num_experts_per_tok"] = mixture.chosen
        made |= self.settings(dense, mixture)
        if self.balanced:
            made |= {"output_router_logits": mixture.balance > 0, "router_aux_loss_coef": mixture.balance}
        return made

    def exact(self, dense: Dense) -> bool:
        """Whether the base's own MLP is computed as in the base, to the bit."""
        return self.form == "shared" and (self.fused == dense.fused or dense.width % _ALIGNED == 0)

    def layer(self, dense: Dense, mixture: Mixture) -> list[Made]:
        """The tensors of a layer that are not the base's under their own names."""
        made: list[Made] = []
        if _JOINT in dense.shapes:
            for role, suffix in (("query", _QUERY), ("key", _KEY), ("value", _VALUE)):
                made.append(_kept(suffix, dense.hidden, dense.source(role)))
        gate, up, down = (dense.source(role) for role in ("gate", "up", "down"))
        if self.shared and self.fused:
            inner, outer = (self.shared.format(word) for word in self.words)
            made += [_kept(inner, dense.hidden, gate, up), _kept(outer, dense.width, down)]
        elif self.shared:
            for word, take in zip(self.words, (gate, up, down), strict=True):
                columns = dense.width if take is down else dense.hidden
                made.append(_kept(self.shared.format(word), columns, take))
        made.append(Made(self.router, (mixture.count, dense.hidden), "router"))
        if self.bias:
            made.append(Made(self.bias, (mixture.count,), "bias"))
        return [*made, *(self._stacked(dense, mixture) if self.fused else self._experts(dense, mixture))]

    def dropped(self, dense: Dense) -> set[str]:
        """Suffixes of the base's layer that the mixture has not under their own names."""
        return {suffix for suffix in dense.shapes if suffix.startswith("mlp.") or suffix == _JOINT}

    def _experts(self, dense: Dense, mixture: Mixture) -> list[Made]:
        made: list[Made] = []
        width = dense.width // mixture.segments
        for expert in range(mixture.count):
            segment = expert % mixture.segments
            for word, role in zip(self.words, ("gate", "up", "down"), strict=True):
                suffix, take = self.expert.format(expert, word), dense.source(role)
                if role == "down":
                    made.append(Made(suffix, (dense.hidden, width), "down", (take,), expert))
                else:
                    takes = (take.part(segment, mixture.segments),)
                    made.append(Made(suffix, (width, dense.hidden), "inner", takes, expert))
        return made

    def _stacked(self, dense: Dense, mixture: Mixture) -> list[Made]:
        inner, outer = (self.expert.format(word) for word in self.words)
        width = dense.width // mixture.segments
        gate, up, down = (dense.source(role) for role in ("gate", "up", "down"))
        takes = tuple(
            take.part(expert % mixture.segments, mixture.segments)
            for expert in range(mixture.count)
            for take in (gate, up)
        )
        return [
            Made(inner, (mixture.count, 2 * width, dense.hidden), "inner", takes),
            Made(outer, (mixture.count, dense.hidden, width), "down", (down,) * mixture.count),
        ]


def _kept(suffix: str, columns: int, *takes: Take) -> Made:
    rows = sum(take.stop - take.start for take in takes)
    return Made(suffix, (rows, columns), "kept", takes)


def _rope(dense: Dense) -> dict[str, Any]:
    """The base's fields of rotary embeddings in its own words, with none left to a class's default."""
    made = {key: dense.config[key] for key in _ROPE if key in dense.config}
    full = dense.full.get("rope_parameters") or {}
    if "rope_parameters" not in made and "rope_theta" in full:
        made.setdefault("rope_theta", full["rope_theta"])
    share = full.get("partial_rotary_factor", dense.full.get("partial_rotary_factor"))
    made["partial_rotary_factor"] = 1.0 if share is None else share
    if isinstance(made.get("rope_parameters"), Mapping):
        made["rope_parameters"] = {**made["rope_parameters"], "partial_rotary_factor": made["partial_rotary_factor"]}
    return made


def _without_window(dense: Dense) -> None:
    if dense.window is not None:
        raise BadInput(f"it has no attention window, and the base one of {dense.window} tokens; use another `target`")


def _sigmoid(dense: Dense, mixture: Mixture) -> dict[str, Any]:
    """Of the classes whose routers are sigmoids with a bias that chooses, as DeepSeek-V3's."""
    return {
        "moe_intermediate_size": dense.width // mixture.segments,
        "n_routed_experts": mixture.count,
        "n_shared_experts": mixture.segments,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        # Of one expert the weight would be 1 whatever its router says, which then never learns.
        "norm_topk_prob": mixture.chosen > 1,
        "routed_scaling_factor": 1.0,
    }


def _glm4_moe(dense: Dense, mixture: Mixture) -> dict[str, Any]:
    _without_window(dense)
    normed = "self_attn.q_norm.weight" in dense.shapes
    return _sigmoid(dense, mixture) | {"use_qk_norm": normed, "num_nextn_predict_layers": 0}


def _dots1(dense: Dense, mixture: Mixture) -> dict[str, Any]:
    layers, types = dense.full["num_hidden_layers"], dense.full.get("layer_types")
    try:
        window = dense.window
    except BadInput:
        window, own = dense.full["sliding_window"], types
    else:
        own = ["full_attention" if window is None else "sliding_attention"] * layers
    return _sigmoid(dense, mixture) | {"sliding_window": window, "max_window_layers": layers, "layer_types": own}


def _mixtral(dense: Dense, mixture: Mixture) -> dict[str, Any]:
    width = dense.width // mixture.segments
    return {"intermediate_size": width, "sliding_window": dense.window, "router_jitter_noise": 0.0}


def _qwen3_moe(dense: Dense, mixture: Mixture) -> dict[str, Any]:
    window = dense.window
    return {
        "moe_intermediate_size": dense.width // mixture.segments,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": window is not None,
        "sliding_window": window,
    }


def _granite(dense: Dense, mixture: Mixture) -> dict[str, Any]:
    _without_window(dense)
    full = dense.full
    made = {
        "embedding_multiplier": full.get("embedding_multiplier", 1.0),
        "residual_multiplier": full.get("residual_multiplier", 1.0),
        "logits_scaling": full.get("logits_scaling", 1.0),
        "attention_multiplier": full.get("attention_multiplier", dense.head_dim**-0.5),
        "intermediate_size": dense.width // mixture.segments,
    }
    return made | ({"shared_intermediate_size": dense.width} if mixture.form == "shared" else {})


def _flex_olmo(dense: Dense, mixture: Mixture) -> dict[str, Any]:
    _without_window(dense)
    return {"intermediate_size": dense.width // mixture.segments, "norm_topk_prob": True}


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_LINEAR = ("input_linear", "output_linear")
_EXPERT = "mlp.experts.{}.{}.weight"
_SHARED = "mlp.shared_experts.{}.weight"
_BIAS = "mlp.gate.e_score_correction_bias"
_STACKED = "block_sparse_moe.{}.weight"
_STACKED_ROUTER = "block_sparse_moe.router.layer.weight"

# In the order in which they are tried.
TARGETS: tuple[Target, ...] = (
    Target(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        "shared",
        "llama.cpp, vLLM",
        "mlp.gate.weight",
        _EXPERT,
        _PROJECTIONS,
        _glm4_moe,
        shared=_SHARED,
        bias=_BIAS,
        balanced=False,
    ),
    Target(
        "dots1",
        "Dots1ForCausalLM",
        "shared",
        "llama.cpp, vLLM",
        "mlp.gate.weight",
        _EXPERT,
        _PROJECTIONS,
        _dots1,
        shared=_SHARED,
        bias=_BIAS,
        balanced=False,
    ),
    Target(
        "granitemoeshared",
        "GraniteMoeSharedForCausalLM",
        "shared",
        "vLLM",
        _STACKED_ROUTER,
        _STACKED,
        _LINEAR,
        _granite,
        shared="shared_mlp.{}.weight",
        fused=True,
    ),
    Target(
        "mixtral",
        "MixtralForCausalLM",
        "copies",
        "llama.cpp, vLLM",
        "block_sparse_moe.gate.weight",
        "block_sparse_moe.experts.{}.{}.weight",
        ("w1", "w3", "w2"),
        _mixtral,
    ),
    Target(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        "copies",
        "llama.cpp, vLLM",
        "mlp.gate.weight",
        _EXPERT,
        _PROJECTIONS,
        _qwen3_moe,
    ),
    Target(
        "granitemoe",
        "GraniteMoeForCausalLM",
        "copies",
        "llama.cpp, vLLM",
        _STACKED_ROUTER,
        _STACKED,
        _LINEAR,
        _granite,
        fused=True,
    ),
    Target(
        "flex_olmo",
        "FlexOlmoForCausalLM",
        "copies",
        "vLLM",
        "mlp.gate.weight",
        _EXPERT,
        _PROJECTIONS,
        _flex_olmo,
    ),
)


class NoTarget(BadInput):
    """No class of transformers that is known here holds a base; any that a plan may ask for by name was tried."""


def dense_of(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], mixture: Mixture) -> Dense:
    """A base whose layers have tensors of these shapes, by suffix. Raises BadInput where its MLP makes no experts."""
    dense = _dense(json.dumps(config, sort_keys=True), json.dumps(shapes, sort_keys=True))
    if dense.width % mixture.segments:
        raise BadInput(
            f"`fine_grained: {mixture.segments}` does not divide the {dense.width} neurons of its MLP; give a divisor"
        )
    return dense


def target_for(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], mixture: Mixture, named: str | None = None
) -> tuple[Target, Dense]:
    """The class that holds a base as such a mixture, and the base; `named` is the one that a plan chooses.

    `shapes` are of one layer, by suffix. Raises NoTarget where none of them does, with the reason of each.
    """
    told = json.dumps(config, sort_keys=True), json.dumps(shapes, sort_keys=True)
    dense = dense_of(config, shapes, mixture)
    asked = [target for target in TARGETS if target.form == mixture.form and named in (None, target.model_type)]

    def why_not(target: Target) -> str:
        uneven = f"it multiplies experts of a multiple of {_GROUPED} neurons, and the base has {dense.width}"
        return _why_not(*told, target.model_type, mixture.segments) or (uneven if dense.width % _GROUPED else "")

    # Of each reason the classes that it rules out.
    reasons: dict[str, list[str]] = {}
    for target in asked:
        wrong = why_not(target)
        if not wrong:
            _check_segments(dense, mixture)
            return target, dense
        reasons.setdefault(wrong, []).append(target.model_type)
    if not asked:
        held = ", ".join(target.model_type for target in TARGETS if target.form == mixture.form)
        raise BadInput(f"`target: {printable(str(named))}` has no `form: {mixture.form}`; use one of {held}")
    others = (t for t in TARGETS if t not in asked and not why_not(t))
    other = next(others, None)
    why = "; ".join(f"{', '.join(which)}: {reason}" for reason, which in reasons.items())
    raise NoTarget(
        f"no class of transformers known here computes what this {printable(str(config.get('model_type')))} does with"
        f" experts in the place of its MLP ({why}); "
        + (
            "use `form: shared` without `target`, which brings modules of its own"
            if other is None
            else f"use `form: {other.form}` ({other.model_type})"
        )
    )


def _check_segments(dense: Dense, mixture: Mixture) -> None:
    """Raise BadInput for experts that are cut into pieces that transformers cannot multiply."""
    width = dense.width // mixture.segments
    if width % _GROUPED:
        fitting = [n for n in range(2, mixture.segments) if dense.width % (n * _GROUPED) == 0]
        raise BadInput(
            f"`fine_grained: {mixture.segments}` makes experts of {width} neurons, and transformers multiplies those of"
            f" a multiple of {_GROUPED}; give {max(fitting, default=1)}"
        )


@functools.lru_cache(maxsize=16)
def _dense(config: str, shapes: str) -> Dense:
    told = json.loads(config)
    return Dense.of(told, build(told), {suffix: tuple(shape) for suffix, shape in json.loads(shapes).items()})


@functools.lru_cache(maxsize=64)
def _why_not(config: str, shapes: str, model_type: str, segments: int) -> str:
    """Why a class does not hold a base, in a few words; empty where it does."""
    target = next(target for target in TARGETS if target.model_type == model_type)
    told = json.loads(config)
    # Few experts show it as many do.
    mixture = Mixture(target.form, experts=4, top_k=2, segments=segments)
    try:
        dense = _dense(config, shapes)
        skeleton, other = build(told), build(target.config(dense, mixture))
        return _misfit(target, dense, mixture, skeleton, other) or _unlike(target, told)
    except BadInput as error:
        return printable(str(error).removeprefix("config.json: "), 160)
    except LOAD_FAILURES as error:
        return printable(first_line(error), 160)


def _misfit(target: Target, dense: Dense, mixture: Mixture, skeleton: Skeleton, other: Skeleton) -> str:
    """The first tensor of the class that nothing of the base's becomes, or the other way round; empty where all fit."""
    stem = f"{skeleton.stack}.0."
    planned = {name: tuple(v.shape) for name, v in _outer(skeleton).items()}
    planned |= {f"{stem}{s}": shape for s, shape in dense.shapes.items() if s not in target.dropped(dense)}
    planned |= {f"{stem}{made.suffix}": made.shape for made in target.layer(dense, mixture)}
    wanted = {name: tuple(v.shape) for name, v in other.model.state_dict(keep_vars=True).items()}
    inside = f"{other.stack}.0."
    wanted = {n: shape for n, shape in wanted.items() if n.startswith(inside) or not n.startswith(f"{other.stack}.")}
    found = made_of(other.model, planned)
    numbers = dict.fromkeys((name for made in found.values() for name in made.names), 0)
    for name, made in found.items():
        target_name = made.names[0]
        if target_name not in wanted:
            return f"it has no {printable(name.removeprefix(stem))}"
        if not made.converted and wanted[target_name] != planned[name]:
            return f"its {printable(name.removeprefix(stem))} is {list(wanted[target_name])}, the base's another"
        numbers[target_name] += math.prod(planned[name])
    tied = set(other.model.all_tied_weights_keys)
    odd = next((name for name, held in numbers.items() if held != math.prod(wanted[name])), None)
    if odd is not None:
        return f"its {printable(odd.removeprefix(inside))} is {list(wanted[odd])}, the base's of another size"
    lacking = next((name for name in wanted if name not in numbers and name not in tied), None)
    return "" if lacking is None else f"the base has nothing for its {printable(lacking.removeprefix(inside))}"


def _outer(skeleton: Skeleton) -> dict[str, Any]:
    """Tensors outside the layers."""
    held: Mapping[str, Any] = skeleton.model.state_dict(keep_vars=True)
    return {name: value for name, value in held.items() if not name.startswith(f"{skeleton.stack}.")}


def _unlike(target: Target, config: Mapping[str, Any]) -> str:
    """How a tiny twin of the base computes something else as this class; empty where it gives the same logits."""
    import torch

    mixture = Mixture(target.form, experts=4, top_k=2)
    with one_thread(), quiet_transformers(), torch.no_grad():
        twin = twin_of(config)
        small = shrunk(config)
        held: dict[str, Tensor] = {name: value.detach() for name, value in twin.model.state_dict().items()}
        stem = f"{twin.stack}."
        shapes = {n.removeprefix(f"{stem}0."): tuple(v.shape) for n, v in held.items() if n.startswith(f"{stem}0.")}
        dense = Dense.of(small, twin, shapes)
        tensors = {name: value for name, value in held.items() if not name.startswith(stem)}
        draws = torch.Generator().manual_seed(0)
        for index in range(len(twin.layers)):
            own = {s: held[f"{stem}{index}.{s}"] for s in shapes}
            tensors |= {f"{stem}{index}.{s}": v for s, v in own.items() if s not in target.dropped(dense)}
            for made in target.layer(dense, mixture):
                if made.role != "bias":
                    tensors[f"{stem}{index}.{made.suffix}"] = _of_twin(made, own, target.form, draws)
        with torch.random.fork_rng(devices=[]):
            other = build(target.config(dense, mixture), buffers=True)
        names = [name for name, _ in other.model.named_parameters()]
        loaded = as_loaded(other.model, {name: value.contiguous() for name, value in tensors.items()}, names)
        for name, value in loaded.items():
            owner, _, key = name.rpartition(".")
            other.model.get_submodule(owner)._parameters[key] = torch.nn.Parameter(value, requires_grad=False)
        other.model.tie_weights()
        ids = torch.randint(int(twin.text.vocab_size), (2, 40), generator=draws)
        one, two = (model.model.eval()(input_ids=ids, use_cache=False).logits for model in (twin, other))
        apart = float((one - two).abs().max())
    largest = float(one.abs().max())
    if math.isfinite(apart) and apart <= _ROUNDING * largest:
        return ""
    return f"a tiny twin gives logits that differ by {apart:.2g}, the largest being {largest:.2g}"


def _of_twin(made: Made, own: Mapping[str, Tensor], form: Form, draws: Any) -> Tensor:
    """A tensor of a twin's layer, whose experts' outputs are zero beside a shared one."""
    import torch

    if made.role == "router":
        return torch.randn(made.shape, generator=draws)
    if made.role == "down" and form == "shared":
        return torch.zeros(made.shape)
    return torch.cat([own[take.suffix][take.start : take.stop] for take in made.takes]).reshape(made.shape)
