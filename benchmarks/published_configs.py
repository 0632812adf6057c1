"""The config.json of model types as their makers published them, sizes made small and layers few.

Keys, spellings, patterns and left-out settings are those of a checkpoint on the Hub; widths, vocabulary and depth alone
are smaller, and ids of special tokens, which must lie in the vocabulary.
"""

from __future__ import annotations

from typing import Any

_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2}
_LLAMA3 = {"high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 64}


def _sizes(layers: int = 4, heads: int = 4, kv_heads: int | None = 2, inner: int = 96) -> dict[str, Any]:
    """The sizes that most of them have under these names."""
    made: dict[str, Any] = {"hidden_size": 64, "intermediate_size": inner, "num_hidden_layers": layers}
    made |= {"num_attention_heads": heads, "vocab_size": 320, "max_position_embeddings": 512}
    return made | ({} if kv_heads is None else {"num_key_value_heads": kv_heads})


_SHORT = {"torch_dtype": "bfloat16", "use_cache": True, "initializer_range": 0.02, "transformers_version": "4.51.0"}

PUBLISHED: dict[str, dict[str, Any]] = {
    # baidu/ERNIE-4.5-0.3B-PT
    "ernie4_5": {
        **{"architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5", "hidden_act": "silu", "head_dim": 16},
        **{"rms_norm_eps": 1e-05, "rope_theta": 500000.0, "rope_scaling": None, "use_bias": False},
        **{"tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": False},
        **(_sizes() | _IDS),
    },
    # CohereLabs/c4ai-command-r7b-12-2024
    "cohere2": {
        **{"architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "hidden_act": "silu", "head_dim": 16},
        **{"attention_bias": False, "attention_dropout": 0.0, "cache_implementation": "hybrid", "layer_norm_eps": 1e-5},
        **{"layer_switch": 4, "logit_scale": 0.25, "order_of_interleaved_layers": "local_attn_first"},
        **{"position_embedding_type": "rope_gptj", "rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0},
        **{"sliding_window": 16, "sliding_window_pattern": 4, "use_embedding_sharing": True},
        **{"use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": True},
        **(_sizes(8) | _IDS | _SHORT),
    },
    # ibm-granite/granite-3.3-2b-instruct
    "granite": {
        **{"architectures": ["GraniteForCausalLM"], "model_type": "granite", "hidden_act": "silu"},
        **{"attention_bias": False, "attention_dropout": 0.0, "attention_multiplier": 0.0625, "mlp_bias": False},
        **{"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22, "rms_norm_eps": 1e-05},
        **{"rope_scaling": None, "rope_theta": 10000000.0, "tie_word_embeddings": True},
        **(_sizes() | _IDS | _SHORT),
    },
    # ibm-ai-platform/Bamba-9B-v2
    "bamba": {
        **{"architectures": ["BambaForCausalLM"], "model_type": "bamba", "hidden_act": "silu"},
        **{"attention_dropout": 0.0, "attn_layer_indices": [2, 5], "attn_rotary_emb": 8, "mamba_chunk_size": 8},
        **{"mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_expand": 2},
        **{"mamba_n_groups": 1, "mamba_n_heads": 8, "mamba_proj_bias": False, "num_logits_to_keep": 1},
        **{"rms_norm_eps": 1e-05, "tie_word_embeddings": False, "mlp_bias": False, "attention_bias": False},
        **(_sizes(6) | _IDS | _SHORT),
    },
    # microsoft/Phi-3.5-MoE-instruct
    "phimoe": {
        **{"architectures": ["PhiMoEForCausalLM"], "model_type": "phimoe", "hidden_act": "silu"},
        "auto_map": {
            "AutoConfig": "configuration_phimoe.PhiMoEConfig",
            "AutoModelForCausalLM": "modeling_phimoe.PhiMoEForCausalLM",
        },
        **{"attention_bias": True, "attention_dropout": 0.0, "hidden_dropout": 0.0, "input_jitter_noise": 0.01},
        **{"lm_head_bias": True, "num_experts_per_tok": 2, "num_local_experts": 4, "rms_norm_eps": 1e-05},
        "rope_scaling": {
            **{"long_factor": [1.0 + n / 8 for n in range(8)], "long_mscale": 1.243163121016122},
            **{"short_factor": [1.0] * 8, "short_mscale": 1.243163121016122, "type": "longrope"},
            "original_max_position_embeddings": 64,
        },
        **{"original_max_position_embeddings": 64, "output_router_logits": False, "rope_theta": 10000.0},
        **{"router_aux_loss_coef": 0.0, "router_jitter_noise": 0.01, "sliding_window": 1024},
        **{"tie_word_embeddings": False},
        **(_sizes() | _ENDS | _SHORT),
    },
    # bigcode/starcoder2-3b
    "starcoder2": {
        **{"architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", "activation_function": "gelu"},
        **{
            "attention_dropout": 0.1,
            "embedding_dropout": 0.1,
            "hidden_act": "gelu_pytorch_tanh",
            "mlp_type": "default",
        },
        **{"layer_norm_epsilon": 1e-05, "norm_epsilon": 1e-05, "norm_type": "layer_norm", "residual_dropout": 0.1},
        **{"rope_theta": 999999.4420358813, "sliding_window": 16, "use_bias": True, "attention_softmax_in_fp32": True},
        **{"scale_attention_softmax_in_fp32": True, "scale_attn_weights": True},
        **(_sizes() | {"bos_token_id": 0, "eos_token_id": 0} | _SHORT),
    },
    # LGAI-EXAONE/EXAONE-4.0-32B
    "exaone4": {
        **{"architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "hidden_act": "silu", "head_dim": 16},
        **{"attention_dropout": 0.0, "rms_norm_eps": 1e-05, "rope_theta": 1000000, "sliding_window": 16},
        **{"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2, "sliding_window_pattern": "LLLG"},
        **{"rope_scaling": {"factor": 16.0, **_LLAMA3, "rope_type": "llama3"}, "tie_word_embeddings": False},
        **(_sizes(8) | _IDS | _SHORT),
    },
    # LiquidAI/LFM2-1.2B
    "lfm2": {
        **{"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "block_auto_adjust_ff_dim": True},
        **{"block_dim": 64, "block_ff_dim": 96, "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0},
        **{"block_multiple_of": 16, "block_norm_eps": 1e-05, "block_out_init_scale": 1.0, "block_use_swiglu": True},
        **{"block_use_xavier_init": True, "conv_L_cache": 3, "conv_bias": False, "conv_dim": 64, "conv_dim_out": 64},
        **{"conv_use_xavier_init": True, "layer_types": ["conv", "conv", "full_attention"] * 2, "norm_eps": 1e-05},
        **{"num_heads": 4, "rope_theta": 1000000.0, "tie_embedding": True, "use_pos_enc": True},
        **({k: v for k, v in _sizes(6).items() if k != "intermediate_size"} | _IDS | _SHORT),
    },
    # allenai/OLMoE-1B-7B-0924
    "olmoe": {
        **{"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "hidden_act": "silu", "clip_qkv": None},
        **{"attention_bias": False, "attention_dropout": 0.0, "norm_topk_prob": False, "num_experts": 8},
        **{"num_experts_per_tok": 2, "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_scaling": None},
        **{"rope_theta": 10000.0, "router_aux_loss_coef": 0.01, "tie_word_embeddings": False},
        **(_sizes(kv_heads=4) | _IDS | _SHORT),
    },
    # swiss-ai/Apertus-8B-2509
    "apertus": {
        **{"architectures": ["ApertusForCausalLM"], "model_type": "apertus", "hidden_act": "xielu"},
        **{"attention_bias": False, "attention_dropout": 0.0, "hidden_dropout": 0.0, "mlp_bias": False},
        **{"post_norm": False, "qk_norm": True, "rms_norm_eps": 1e-05, "rope_theta": 12000000},
        **{"rope_scaling": {"factor": 8.0, **_LLAMA3, "rope_type": "llama3"}, "tie_word_embeddings": False},
        **(_sizes() | _IDS | _SHORT),
    },
    # ai21labs/Jamba-v0.1
    "jamba": {
        **{"architectures": ["JambaForCausalLM"], "model_type": "jamba", "hidden_act": "silu"},
        "auto_map": {
            "AutoConfig": "configuration_jamba.JambaConfig",
            "AutoModelForCausalLM": "modeling_jamba.JambaForCausalLM",
        },
        **{
            "attention_dropout": 0.0,
            "attn_layer_offset": 2,
            "attn_layer_period": 4,
            "calc_logits_for_entire_prompt": 0,
        },
        **{"expert_layer_offset": 1, "expert_layer_period": 2, "mamba_conv_bias": True, "mamba_d_conv": 4},
        **{"mamba_d_state": 16, "mamba_dt_rank": 8, "mamba_expand": 2, "mamba_inner_layernorms": True},
        **{"mamba_proj_bias": False, "n_ctx": 512, "num_experts": 4, "num_experts_per_tok": 2},
        **{
            "num_logits_to_keep": 1,
            "output_router_logits": False,
            "rms_norm_eps": 1e-06,
            "router_aux_loss_coef": 0.001,
        },
        **{"sliding_window": None, "tie_word_embeddings": False, "use_mamba_kernels": False},
        **(_sizes(8) | _IDS | _SHORT),
    },
    # databricks/dbrx-base
    "dbrx": {
        **{"architectures": ["DbrxForCausalLM"], "model_type": "dbrx", "d_model": 64, "emb_pdrop": 0.0},
        "attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "model_type": "", "rope_theta": 500000},
        "ffn_config": {
            **{"ffn_hidden_size": 96, "moe_jitter_eps": 0.01, "moe_loss_weight": 0.05, "moe_num_experts": 4},
            **{"moe_top_k": 2, "model_type": ""},
        },
        **{"max_seq_len": 512, "n_heads": 4, "n_layers": 4, "output_router_logits": False, "resid_pdrop": 0.0},
        **{"router_aux_loss_coef": 0.05, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 320},
        **{"use_cache": True, "initializer_range": 0.02, "transformers_version": "4.40.0"},
    },
    # tencent/Hunyuan-1.8B-Instruct
    "hunyuan_v1_dense": {
        **{"architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense", "hidden_act": "silu"},
        **{
            "add_classification_head": False,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attention_head_dim": 16,
        },
        **{"class_num": 0, "cla_share_factor": 2, "head_dim": 16, "im_end_id": 5, "im_start_id": 4, "mask_init_id": 12},
        **{
            "mlp_bias": False,
            "norm_type": "rms",
            "org_vocab_size": 320,
            "pool_type": "last",
            "position_embedding_xdrope": 0,
        },
        **{"pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": True},
        "rope_scaling": {
            **{"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
            "type": "dynamic",
        },
        **{"sep_token_id": 3, "text_end_id": 7, "text_start_id": 6, "use_cla": False, "use_qk_norm": True},
        **(_sizes() | _IDS | _SHORT),
    },
    # tiiuae/Falcon-H1-0.5B-Base
    "falcon_h1": {
        **{"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "hidden_act": "silu", "head_dim": 16},
        **{"attention_bias": False, "attention_dropout": 0.0, "attention_in_multiplier": 1.0},
        **{"attention_out_multiplier": 0.9375, "attn_layer_indices": None, "embedding_multiplier": 5.656854249492381},
        **{"key_multiplier": 0.39, "lm_head_multiplier": 0.0390625, "mamba_chunk_size": 8, "mamba_conv_bias": True},
        **{"mamba_d_conv": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 16, "mamba_expand": 2},
        **{"mamba_n_groups": 1, "mamba_n_heads": 4, "mamba_norm_before_gate": False, "mamba_proj_bias": False},
        **{"mamba_rms_norm": False, "mamba_use_mlp": True, "mlp_bias": False, "mlp_expansion_factor": 8},
        **{"mlp_multipliers": [0.8838834764831844, 0.5859375], "num_logits_to_keep": 1, "projectors_bias": False},
        **{"rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 100000000000.0, "ssm_in_multiplier": 1.25},
        "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
        **{"ssm_out_multiplier": 0.23570226039551587, "tie_word_embeddings": False},
        **{"time_step_floor": 0.0001, "time_step_limit": [0.0, float("inf")], "time_step_max": 0.1},
        **{"time_step_min": 0.001, "time_step_rank": "auto"},
        **(_sizes() | _IDS | _SHORT),
    },
    # stabilityai/stablelm-2-1_6b
    "stablelm": {
        **{"architectures": ["StableLmForCausalLM"], "model_type": "stablelm", "hidden_act": "silu"},
        **{"hidden_dropout": 0.0, "attention_dropout": 0.0, "layer_norm_eps": 1e-05, "partial_rotary_factor": 0.25},
        **{"qk_layernorm": False, "rope_scaling": None, "rope_theta": 10000, "tie_word_embeddings": False},
        **{"use_parallel_residual": False, "use_qkv_bias": True},
        **(_sizes(kv_heads=4) | {"bos_token_id": 0, "eos_token_id": 0} | _SHORT),
    },
    # arcee-ai/AFM-4.5B
    "arcee": {
        **{"architectures": ["ArceeForCausalLM"], "model_type": "arcee", "hidden_act": "relu2", "head_dim": 16},
        **{"attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "rms_norm_eps": 1e-05},
        "rope_scaling": {
            **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 20.0, "mscale": 1.0, "rope_type": "yarn", "type": "yarn"},
            "original_max_position_embeddings": 64,
        },
        **{"rope_theta": 10000.0, "tie_word_embeddings": False},
        **(_sizes() | _ENDS | _SHORT),
    },
    # ByteDance-Seed/Seed-OSS-36B-Instruct
    "seed_oss": {
        **{"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss", "hidden_act": "silu", "head_dim": 16},
        **{"attention_bias": True, "attention_dropout": 0.1, "attention_out_bias": False, "mlp_bias": False},
        **{"residual_dropout": 0.1, "rms_norm_eps": 1e-06, "rope_scaling": {"rope_type": "default"}},
        **{"rope_theta": 10000000.0, "tie_word_embeddings": False, "pretraining_tp": 1},
        **(_sizes() | _IDS | _SHORT),
    },
    # zai-org/glm-4-9b-chat-hf
    "glm": {
        **{"architectures": ["GlmForCausalLM"], "model_type": "glm", "hidden_act": "silu", "head_dim": 16},
        **{"attention_bias": True, "attention_dropout": 0.0, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07},
        **{"rope_theta": 10000.0, "tie_word_embeddings": False},
        **(_sizes() | {"eos_token_id": [2, 3, 4], "pad_token_id": 2} | _SHORT),
    },
    # HuggingFaceTB/SmolLM3-3B
    "smollm3": {
        **{"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "hidden_act": "silu"},
        **{"attention_bias": False, "attention_dropout": 0.0, "layer_types": ["full_attention"] * 4},
        **{"max_window_layers": 28, "mlp_bias": False, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0]},
        **{"pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0},
        **{"sliding_window": None, "use_sliding_window": False},
        **(_sizes() | _IDS | _SHORT),
    },
    # MiniMaxAI/MiniMax-M2
    "minimax_m2": {
        **{"architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "hidden_act": "silu", "head_dim": 16},
        "auto_map": {
            "AutoConfig": "configuration_minimax_m2.MiniMaxM2Config",
            "AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM",
        },
        **{"attention_dropout": 0.0, "attn_type_list": [1, 1, 1, 1], "layernorm_full_attention_beta": 1.0},
        **{"mlp_intermediate_size": 128, "mtp_transformer_layers": 1, "num_experts_per_tok": 2},
        **{"num_local_experts": 4, "num_mtp_modules": 3, "output_router_logits": False, "qk_norm_type": "per_layer"},
        **{"rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 8, "router_aux_loss_coef": 0.001},
        **{"router_jitter_noise": 0.0, "scoring_func": "sigmoid", "shared_intermediate_size": 0},
        **{"shared_moe_mode": "sigmoid", "sliding_window": None, "tie_word_embeddings": False, "use_mtp": True},
        **{"use_qk_norm": True, "use_routing_bias": True},
        **(_sizes() | _ENDS | _SHORT),
    },
    # Qwen/Qwen1.5-MoE-A2.7B
    "qwen2_moe": {
        **{"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "hidden_act": "silu"},
        **{"attention_dropout": 0.0, "decoder_sparse_step": 1, "max_window_layers": 21, "moe_intermediate_size": 32},
        **{"norm_topk_prob": False, "num_experts": 8, "num_experts_per_tok": 4, "output_router_logits": False},
        **{"rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001},
        **{"shared_expert_intermediate_size": 96, "sliding_window": 256, "tie_word_embeddings": False},
        **{"use_sliding_window": False},
        **(_sizes(kv_heads=4) | {"bos_token_id": 2, "eos_token_id": 2} | _SHORT),
    },
    # Zyphra/Zamba2-1.2B
    "zamba2": {
        **{"architectures": ["Zamba2ForCausalLM"], "model_type": "zamba2", "adapter_rank": 8, "add_bias_linear": False},
        **{"attention_dropout": 0.0, "attention_head_dim": 32, "attention_hidden_size": 128, "chunk_size": 8},
        **{"ffn_hidden_size": 128, "ft_intermediate_size": 128, "gated_linear_unit": True, "hidden_act": "gelu"},
        **{"hybrid_layer_ids": [2, 5], "kv_channels": 16, "mamba_d_conv": 4, "mamba_d_state": 16},
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "mamba", "hybrid", "mamba"],
        **{"mamba_expand": 2, "mamba_headdim": 16, "mamba_ngroups": 1, "n_mamba_heads": 8, "num_logits_to_keep": 1},
        **{"num_mem_blocks": 1, "num_query_groups": 4, "rms_norm_eps": 1e-05, "rope_theta": 10000, "state_size": 16},
        **{"time_step_floor": 0.0001, "time_step_limit": None, "time_step_max": 0.1, "time_step_min": 0.001},
        **{"use_conv_bias": True, "use_long_context": False, "use_mem_rope": True, "use_mamba_kernels": False},
        **{"use_shared_attention_adapter": True, "use_shared_attention_lora": True, "use_shared_block_lora": True},
        **{"use_shared_mlp_lora": True, "use_mem_eff_path": False},
        **(_sizes(7, kv_heads=4, inner=128) | _IDS | _SHORT),
    },
    # nvidia/Nemotron-H-8B-Base-8K
    "nemotron_h": {
        **{"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "attention_bias": False},
        "auto_map": {
            "AutoConfig": "configuration_nemotron_h.NemotronHConfig",
            "AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM",
        },
        **{"attention_dropout": 0.0, "attention_head_dim": 16, "chunk_size": 8, "conv_kernel": 4, "expand": 2},
        **{"hidden_dropout": 0.0, "hybrid_override_pattern": "M-M*-M-", "layer_norm_epsilon": 1e-05},
        **{"mamba_head_dim": 16, "mamba_hidden_act": "silu", "mamba_num_heads": 8, "mamba_proj_bias": False},
        **{"mlp_bias": False, "mlp_hidden_act": "relu2", "n_groups": 2, "num_logits_to_keep": 1},
        **{"rescale_prenorm_residual": True, "residual_in_fp32": False, "rms_norm_eps": 1e-05, "sliding_window": None},
        **{"ssm_state_size": 16, "tie_word_embeddings": False, "time_step_floor": 0.0001},
        **{"time_step_limit": [0.0, float("inf")], "time_step_max": 0.1, "time_step_min": 0.001},
        **{"time_step_rank": 16, "use_bias": False, "use_conv_bias": True, "use_mamba_kernels": False},
        **(_sizes(7) | _IDS | _SHORT),
    },
    # EleutherAI/pythia-1.4b
    "gpt_neox": {
        **{"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "hidden_act": "gelu"},
        **{"layer_norm_eps": 1e-05, "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False},
        **{"use_parallel_residual": True, "torch_dtype": "float16", "use_cache": True, "initializer_range": 0.02},
        **(_sizes(kv_heads=None) | {"bos_token_id": 0, "eos_token_id": 0}),
    },
    # nvidia/Minitron-4B-Base
    "nemotron": {
        **{"architectures": ["NemotronForCausalLM"], "model_type": "nemotron", "hidden_act": "relu2", "head_dim": 16},
        **{"attention_bias": False, "attention_dropout": 0.0, "hidden_dropout": 0.0, "initializer_range": 0.0134},
        **{"kv_channels": 16, "mlp_bias": False, "norm_eps": 1e-05, "partial_rotary_factor": 0.5},
        **{"rope_percent": 0.5, "rope_theta": 10000, "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
        **(_sizes() | _ENDS),
    },
    # google/gemma-4-E2B, its text alone
    "gemma4_text": {
        **{
            "architectures": ["Gemma4ForCausalLM"],
            "model_type": "gemma4_text",
            "hidden_activation": "gelu_pytorch_tanh",
        },
        **{"attention_bias": False, "attention_dropout": 0.0, "attention_k_eq_v": False, "enable_moe_block": False},
        **{"final_logit_softcapping": 30.0, "global_head_dim": 32, "head_dim": 16, "hidden_size_per_layer_input": 8},
        **{"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 0},
        **{"rms_norm_eps": 1e-06, "sliding_window": 16, "tie_word_embeddings": True, "use_double_wide_mlp": False},
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        **{"vocab_size_per_layer_input": 320, "dtype": "bfloat16", "use_cache": True, "initializer_range": 0.02},
        **(_sizes(6, kv_heads=1) | _IDS),
    },
    # deepseek-ai/DeepSeek-V3
    "deepseek_v3": {
        **{"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_act": "silu"},
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
        },
        **{"attention_bias": False, "attention_dropout": 0.0, "ep_size": 1, "first_k_dense_replace": 1},
        **{"kv_lora_rank": 32, "moe_intermediate_size": 32, "moe_layer_freq": 1, "n_group": 2, "n_routed_experts": 8},
        **{"n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 2, "num_nextn_predict_layers": 0},
        **{"q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "rms_norm_eps": 1e-06},
        "rope_scaling": {
            **{"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"},
            "original_max_position_embeddings": 64,
        },
        **{"rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False},
        **{"topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 16},
        **(_sizes(kv_heads=4) | {"bos_token_id": 0, "eos_token_id": 1} | _SHORT),
    },
}
