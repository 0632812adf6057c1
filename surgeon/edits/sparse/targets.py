"""The known mixture classes, and the settings with which each computes what its base does."""

from __future__ import annotations

from typing import Any

from surgeon.edits.sparse.dense import Dense, Mixture
from surgeon.edits.sparse.target import HIDDEN, Target
from surgeon.errors import BadInput


def _without_window(dense: Dense) -> None:
    """Raise BadInput where the base has an attention window, for classes that have none."""
    if dense.window is not None:
        raise BadInput(f"it has no attention window, and the base one of {dense.window} tokens; use another `target`")


def _glm4_moe(dense: Dense, mixture: Mixture) -> dict[str, Any]:
    """Return the fields of GLM-4 MoE, whose routers are sigmoids with a bias for the choice, as in DeepSeek-V3.

    Raises BadInput for a base with an attention window.
    """
    _without_window(dense)
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
        "use_qk_norm": "self_attn.q_norm.weight" in dense.shapes,
        "num_nextn_predict_layers": 0,
    }


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


def _qwen3_5_moe(dense: Dense, mixture: Mixture) -> dict[str, Any]:
    """Return the fields of Qwen3.5 MoE, whose shared expert is idle."""
    return {
        "moe_intermediate_size": dense.width // mixture.segments,
        "shared_expert_intermediate_size": _IDLE,
        "num_experts": mixture.count,
        "num_experts_per_tok": mixture.chosen,
    }


_LINEAR = ("input_linear", "output_linear")
_STACKED = "block_sparse_moe.{}.weight"
_STACKED_ROUTER = "block_sparse_moe.router.layer.weight"
_QWEN_IDLE = (
    ("mlp.shared_expert.gate_proj.weight", (_IDLE, HIDDEN)),
    ("mlp.shared_expert.up_proj.weight", (_IDLE, HIDDEN)),
    ("mlp.shared_expert.down_proj.weight", (HIDDEN, _IDLE)),
    ("mlp.shared_expert_gate.weight", (1, HIDDEN)),
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
        shared="mlp.shared_experts.{}.weight",
        bias="mlp.gate.e_score_correction_bias",
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
    # It extends the dense type of its maker and keeps that type's layers.
    Target(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        "copies",
        _qwen3_5_moe,
        extends="qwen3_5_text",
        idle=_QWEN_IDLE,
    ),
)
