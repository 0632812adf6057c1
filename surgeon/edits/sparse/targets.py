"""The known mixture classes, and the settings with which each computes what its base does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from surgeon.edits.sparse.dense import Dense, Mixture
from surgeon.edits.sparse.target import HIDDEN, NEURONS, Target
from surgeon.errors import BadInput


def _without_window(dense: Dense) -> None:
    """Raise BadInput where the base has an attention window, for classes that have none."""
    if dense.window is not None:
        raise BadInput(f"it has no attention window, and the base one of {dense.window} tokens; use another `target`")


def _sigmoid(dense: Dense, mixture: Mixture) -> dict[str, Any]:
    """Return the fields of classes whose routers are sigmoids with a bias for the choice, as in DeepSeek-V3."""
    return {
        "moe_intermediate_size": dense.width // mixture.segments,
        "n_routed_experts": mixture.count,
        "n_shared_experts": mixture.segments,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": len(mixture.plain),
        # With one expert the weight would be 1 whatever its router's scores, and the router would never learn.
        "norm_topk_prob": mixture.chosen > 1,
        "routed_scaling_factor": 1.0,
    }


def _glm4_moe(dense: Dense, mixture: Mixture) -> dict[str, Any]:
    """Return the fields of GLM-4 MoE. Raises BadInput for a base with an attention window."""
    _without_window(dense)
    normed = "self_attn.q_norm.weight" in dense.shapes
    return _sigmoid(dense, mixture) | {"use_qk_norm": normed, "num_nextn_predict_layers": 0}


def _dots1(dense: Dense, mixture: Mixture) -> dict[str, Any]:
    """Return the fields of dots1; each layer keeps the attention window that it has in the base, or none."""
    layers, types = dense.full["num_hidden_layers"], dense.full.get("layer_types")
    try:
        window = dense.window
    except BadInput:
        window, own = dense.full["sliding_window"], types
    else:
        own = ["full_attention" if window is None else "sliding_attention"] * layers
    return _sigmoid(dense, mixture) | {"sliding_window": window, "max_window_layers": layers, "layer_types": own}


def _mixtral(dense: Dense, mixture: Mixture) -> dict[str, Any]:
    """Return the fields of Mixtral, without noise in the router."""
    width = dense.width // mixture.segments
    return {"intermediate_size": width, "sliding_window": dense.window, "router_jitter_noise": 0.0}


def _qwen3_moe(dense: Dense, mixture: Mixture) -> dict[str, Any]:
    """Return the fields of Qwen3 MoE; layers in `plain` keep their MLP."""
    window = dense.window
    return {
        "moe_intermediate_size": dense.width // mixture.segments,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(mixture.plain),
        "use_sliding_window": window is not None,
        "sliding_window": window,
    }


def _granite(dense: Dense, mixture: Mixture) -> dict[str, Any]:
    """Return the fields of Granite MoE, with the base's multipliers.

    Raises BadInput for a base with an attention window.
    """
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
    """Return the fields of FlexOlmo. Raises BadInput for a base with an attention window."""
    _without_window(dense)
    return {"intermediate_size": dense.width // mixture.segments, "norm_topk_prob": True}


# Neurons of a shared expert that computes nothing, but that a class has in every layer.
_IDLE = 8


def _qwen2_moe(dense: Dense, mixture: Mixture) -> dict[str, Any]:
    """Return the fields of Qwen2 MoE, whose shared expert is idle."""
    biased = any(suffix.endswith("q_proj.bias") for suffix in dense.shapes)
    return _qwen3_moe(dense, mixture) | {"shared_expert_intermediate_size": _IDLE, "qkv_bias": biased}


def _ernie4_5_moe(dense: Dense, mixture: Mixture) -> dict[str, Any]:
    """Return the fields of Ernie 4.5 MoE. Raises BadInput for a base with an attention window."""
    _without_window(dense)
    return {
        "moe_intermediate_size": dense.width // mixture.segments,
        "moe_num_experts": mixture.count,
        "moe_k": mixture.chosen,
        "moe_num_shared_experts": 0,
        "moe_layer_start_index": 0,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "use_bias": bool(dense.full.get("use_bias")),
    }


def _cohere2_moe(dense: Dense, mixture: Mixture) -> dict[str, Any]:
    """Return the fields of Cohere2 MoE. Raises BadInput for a base without its norms or types of layers."""
    full = dense.full
    if full.get("layer_norm_eps") is None or not full.get("layer_types"):
        raise BadInput("it has layers with and without a window and norms with a mean; use another `target`")
    return {
        "intermediate_size": dense.width // mixture.segments,
        "layer_norm_eps": full["layer_norm_eps"],
        "layer_types": full["layer_types"],
        "sliding_window": full.get("sliding_window"),
        "logit_scale": full.get("logit_scale", 1.0),
        "mlp_layer_types": ["sparse"] * full["num_hidden_layers"],
        "num_shared_experts": 0,
        "expert_selection_fn": "softmax",
        "norm_topk_prob": True,
    }


def _hunyuan(dense: Dense, mixture: Mixture) -> dict[str, Any]:
    """Return the fields of HunYuan MoE. Raises BadInput for a shared expert next to cut experts."""
    if mixture.form == "shared" and mixture.segments > 1:
        raise BadInput("its experts are as wide as its shared one; use no `fine_grained`")
    width = dense.width // mixture.segments
    return {"intermediate_size": width, "num_experts": mixture.count, "moe_topk": mixture.chosen}


def _lfm2_moe(dense: Dense, mixture: Mixture) -> dict[str, Any]:
    """Return the fields of LFM2 MoE; the dense class rounds `intermediate_size`, this class uses it unrounded."""
    return {
        "intermediate_size": dense.width,
        "moe_intermediate_size": dense.width // mixture.segments,
        "num_dense_layers": len(mixture.plain),
        "num_experts": mixture.count,
        "num_experts_per_tok": mixture.chosen,
        "use_expert_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


def _nemotron_h(dense: Dense, mixture: Mixture) -> dict[str, Any]:
    """Return the fields of Nemotron-H, with the types of layers in the form that the base's config has."""
    sparse = set(dense.holders) - set(mixture.plain)
    types = ["moe" if index in sparse else kind for index, kind in enumerate(dense.full["layers_block_type"])]
    letters = {"linear_attention": "M", "moe": "E", "full_attention": "*", "mlp": "-"}
    written = {"layers_block_type": types, "hybrid_override_pattern": "".join(letters[kind] for kind in types)}
    kept = {key: value for key, value in written.items() if key in dense.config}
    normed = {"norm_topk_prob": True} if mixture.form == "copies" else {}
    return (
        _sigmoid(dense, mixture)
        | normed
        | {
            **(kept or {"layers_block_type": types}),
            "num_experts_per_tok": mixture.chosen,
            "moe_shared_expert_intermediate_size": dense.width if mixture.form == "shared" else _IDLE,
            "moe_latent_size": None,
        }
    )


def _granitemoehybrid(dense: Dense, mixture: Mixture) -> dict[str, Any]:
    """Return the fields of Granite MoE hybrid; for copies, the shared MLP is idle."""
    return {
        "intermediate_size": dense.width // mixture.segments,
        "shared_intermediate_size": dense.width if mixture.form == "shared" else _IDLE,
        "num_local_experts": mixture.count,
        "num_experts_per_tok": mixture.chosen,
    }


def _qwen3_5_moe(dense: Dense, mixture: Mixture) -> dict[str, Any]:
    """Return the fields of Qwen3.5 MoE, whose shared expert is idle."""
    return {
        "moe_intermediate_size": dense.width // mixture.segments,
        "shared_expert_intermediate_size": _IDLE,
        "num_experts": mixture.count,
        "num_experts_per_tok": mixture.chosen,
    }


_LINEAR = ("input_linear", "output_linear")
_SHARED = "mlp.shared_experts.{}.weight"
_BIAS = "mlp.gate.e_score_correction_bias"
_STACKED = "block_sparse_moe.{}.weight"
_STACKED_ROUTER = "block_sparse_moe.router.layer.weight"
_QWEN_IDLE = (
    ("mlp.shared_expert.gate_proj.weight", (_IDLE, HIDDEN)),
    ("mlp.shared_expert.up_proj.weight", (_IDLE, HIDDEN)),
    ("mlp.shared_expert.down_proj.weight", (HIDDEN, _IDLE)),
    ("mlp.shared_expert_gate.weight", (1, HIDDEN)),
)

# Classes of single makers that hold both forms: here the `shared` one; the idle tensors belong to `copies`.
_HUNYUAN = Target(
    "hunyuan_v1_moe",
    "HunYuanMoEV1ForCausalLM",
    "shared",
    _hunyuan,
    router="mlp.gate.wg.weight",
    extends="hunyuan_v1_dense",
    shared="mlp.shared_mlp.{}.weight",
    balanced=False,
    normed=True,
)
_HUNYUAN_IDLE = (
    ("mlp.shared_mlp.gate_proj.weight", (NEURONS, HIDDEN)),
    ("mlp.shared_mlp.up_proj.weight", (NEURONS, HIDDEN)),
    ("mlp.shared_mlp.down_proj.weight", (HIDDEN, NEURONS)),
)
_NEMOTRON = Target(
    "nemotron_h",
    "NemotronHForCausalLM",
    "shared",
    _nemotron_h,
    router="mixer.gate.weight",
    expert="mixer.experts.{}.{}.weight",
    words=("up_proj", "down_proj"),
    extends="nemotron_h",
    shared="mixer.shared_experts.{}.weight",
    bias="mixer.gate.e_score_correction_bias",
    balanced=False,
    plain="any",
)
_NEMOTRON_IDLE = (
    ("mixer.shared_experts.up_proj.weight", (_IDLE, HIDDEN)),
    ("mixer.shared_experts.down_proj.weight", (HIDDEN, _IDLE)),
)
_GRANITE_HYBRID = Target(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    "shared",
    _granitemoehybrid,
    router=_STACKED_ROUTER,
    expert=_STACKED,
    words=_LINEAR,
    extends="granitemoehybrid",
    shared="shared_mlp.{}.weight",
    fused=True,
)
_GRANITE_HYBRID_IDLE = (
    ("shared_mlp.input_linear.weight", (2 * _IDLE, HIDDEN)),
    ("shared_mlp.output_linear.weight", (HIDDEN, _IDLE)),
)

_BOTH = "llama.cpp, vLLM"
# In the order in which they are tried.
TARGETS: tuple[Target, ...] = (
    Target(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        "shared",
        _glm4_moe,
        # vLLM reads no tied head for this class, and computes noise.
        engines="llama.cpp, vLLM untied",
        shared=_SHARED,
        bias=_BIAS,
        balanced=False,
        plain="lowest",
    ),
    Target(
        "dots1",
        "Dots1ForCausalLM",
        "shared",
        _dots1,
        shared=_SHARED,
        bias=_BIAS,
        balanced=False,
        plain="lowest",
    ),
    Target(
        "granitemoeshared",
        "GraniteMoeSharedForCausalLM",
        "shared",
        _granite,
        engines=_BOTH,
        router=_STACKED_ROUTER,
        expert=_STACKED,
        words=_LINEAR,
        shared="shared_mlp.{}.weight",
        fused=True,
    ),
    Target(
        "mixtral",
        "MixtralForCausalLM",
        "copies",
        _mixtral,
        engines=_BOTH,
        router="block_sparse_moe.gate.weight",
        expert="block_sparse_moe.experts.{}.{}.weight",
        words=("w1", "w3", "w2"),
    ),
    Target(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        "copies",
        _qwen3_moe,
        engines=_BOTH,
        plain="any",
    ),
    Target(
        "granitemoe",
        "GraniteMoeForCausalLM",
        "copies",
        _granite,
        engines=_BOTH,
        router=_STACKED_ROUTER,
        expert=_STACKED,
        words=_LINEAR,
        fused=True,
    ),
    Target(
        "flex_olmo",
        "FlexOlmoForCausalLM",
        "copies",
        _flex_olmo,
        engines="vLLM",
    ),
    Target(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        "copies",
        _qwen2_moe,
        plain="any",
        idle=_QWEN_IDLE,
    ),
    Target(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        "copies",
        _ernie4_5_moe,
        bias="mlp.moe_statics.e_score_correction_bias",
        row=True,
    ),
    Target(
        "cohere2_moe",
        "Cohere2MoeForCausalLM",
        "copies",
        _cohere2_moe,
    ),
    # Each of these extends the dense type of one maker and keeps that type's layers.
    _HUNYUAN,
    replace(_HUNYUAN, form="copies", shared="", idle=_HUNYUAN_IDLE),
    Target(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        "copies",
        _lfm2_moe,
        router="feed_forward.gate.weight",
        expert="feed_forward.experts.{}.{}.weight",
        words=("w1", "w3", "w2"),
        extends="lfm2",
        bias="feed_forward.expert_bias",
        balanced=False,
        normed=True,
        plain="lowest",
    ),
    _NEMOTRON,
    replace(_NEMOTRON, form="copies", shared="", normed=True, idle=_NEMOTRON_IDLE),
    _GRANITE_HYBRID,
    replace(_GRANITE_HYBRID, form="copies", shared="", idle=_GRANITE_HYBRID_IDLE),
    Target(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        "copies",
        _qwen3_5_moe,
        extends="qwen3_5_text",
        idle=_QWEN_IDLE,
    ),
)
