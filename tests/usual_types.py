"""The usual types as tests/usual.py derives them: their fields, and the values of these that are tried."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from surgeon.families.usual_table import Pattern, Period, When

# All different, and so are the products of them. Seven layers are enough for each pattern to show.
DECODER: dict[str, tuple[str, Any]] = {
    "layers": ("num_hidden_layers", 7),
    "hidden": ("hidden_size", 66),
    "intermediate": ("intermediate_size", 94),
    "heads": ("num_attention_heads", 6),
    "kv_heads": ("num_key_value_heads", 2),
    "head_dim": ("head_dim", 10),
    "vocabulary": ("vocab_size", 130),
}

FULL, SLIDING = "full_attention", "sliding_attention"

Samples = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Usual:
    """A usual type: what its configs may say, and what is tried.

    `settings` change a layer, `outside` what stands outside them, `free` neither; `ropes` are ways to set rotary
    embeddings. `sizes` are the fields that hold sizes, by the names that these have in shapes, each with the value by
    which shapes are read; `composed` are sums and products of them. `kv_heads` are the numbers of key and value heads
    for each way in which heads share them.
    """

    head: str
    base: str
    settings: Sequence[When]
    free: Samples
    ropes: Sequence[Mapping[str, Any]]
    pattern: Pattern | None = None
    outside: Sequence[When] = ({"tie_word_embeddings": False}, {"tie_word_embeddings": True})
    sizes: Mapping[str, tuple[str, Any]] = field(default_factory=lambda: DECODER)
    composed: tuple[str, ...] = ("2*intermediate", "query+2*kv")
    kv_heads: tuple[int, ...] = (6, 2, 1)

    @property
    def encoder(self) -> bool:
        return "kv_heads" not in self.sizes

    @property
    def distinct(self) -> dict[str, Any]:
        return dict(self.sizes.values())


_THETA = {"rope_theta": 10000.0}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
# As they were written by transformers before and since its version 5.
ROPES: tuple[Mapping[str, Any], ...] = (
    {},
    {"rope_theta": 1000000.0},
    {"rope_theta": 1000000, "rope_scaling": None},
    {"rope_theta": 500000.0, "rope_scaling": {**_LLAMA3, "rope_type": "llama3"}},
    {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_theta": 10000.0, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    {"rope_theta": 10000.0, "rope_scaling": {**_YARN, "type": "yarn"}},
    {"rope_theta": 10000.0, "rope_scaling": {**_YARN, "rope_type": "yarn"}},
    {"rope_parameters": {**_THETA, "rope_type": "default"}},
    {"rope_parameters": {**_THETA, **_LLAMA3, "rope_type": "llama3"}},
    {"rope_parameters": {**_THETA, "rope_type": "linear", "factor": 2.0}},
    {"rope_parameters": {**_THETA, "rope_type": "dynamic", "factor": 2.0}},
    {"rope_parameters": {**_THETA, **_YARN, "rope_type": "yarn"}},
)
_BY_TYPE = {SLIDING: {**_THETA, "rope_type": "default"}, FULL: {**_THETA, "rope_type": "default"}}
_BY_TYPE_LINEAR = {**_BY_TYPE, FULL: {**_THETA, "rope_type": "linear", "factor": 8.0}}
GEMMA3_ROPES: tuple[Mapping[str, Any], ...] = (
    {},
    {"rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": None},
    {"rope_theta": 1000000.0, "rope_local_base_freq": 10000.0},
    {"rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    {"rope_parameters": _BY_TYPE},
    {"rope_parameters": _BY_TYPE_LINEAR},
)
PHI3_ROPES: tuple[Mapping[str, Any], ...] = (
    {},
    {"rope_theta": 10000.0, "rope_scaling": None},
    {"rope_theta": 250000},
    {"rope_parameters": {**_THETA, "partial_rotary_factor": 1.0, "rope_type": "default"}},
)

_ACTIVATION_NAMES = ("silu", "gelu", "gelu_pytorch_tanh")
FREE: Samples = {
    "dtype": ("bfloat16", "float16", "float32"),
    "torch_dtype": ("bfloat16", "float16", "float32"),
    "use_cache": (True, False),
    "initializer_range": (0.02, 0.01),
    "rms_norm_eps": (1e-6, 1e-5),
    "max_position_embeddings": (2048, 131072),
    "bos_token_id": (1, None),
    "eos_token_id": (2, [2, 3], None),
    "pad_token_id": (None, 0, -1),
    "attention_dropout": (0.0, 0.1),
    "hidden_act": _ACTIVATION_NAMES,
}
_BIAS: Samples = {"attention_bias": (False, True)}
_WINDOW: Samples = {"sliding_window": (None, 4096)}
_QWEN: Samples = {
    **_WINDOW,
    "use_sliding_window": (False, True),
    "max_window_layers": (28, 1),
    "use_mrope": (False,),
}
_GEMMA: Samples = {
    "hidden_activation": (None, *_ACTIVATION_NAMES),
    "use_bidirectional_attention": (None, False),
}
_GEMMA2: Samples = {
    **_GEMMA,
    "hidden_act": (*_ACTIVATION_NAMES, None),
    "hidden_activation": _ACTIVATION_NAMES,
    "query_pre_attn_scalar": (256, 144),
    "sliding_window": (4096, 512),
    "sliding_window_size": (4096,),
    "cache_implementation": ("hybrid",),
    "final_logit_softcapping": (30.0, None),
    "attn_logit_softcapping": (50.0, None),
}
_NEEDS = {SLIDING: "sliding_window"}
_QWEN_PATTERN = Pattern(
    listed=(
        Period(when={"use_sliding_window": False}, types=(FULL,)),
        Period(when={"use_sliding_window": True}, types=(FULL, SLIDING)),
    ),
    unlisted=(Period(when={"use_sliding_window": False}, types=(FULL,)),),
    needs=_NEEDS,
)


def _gemmas(when: When, types: Sequence[str]) -> Pattern:
    return Pattern(
        listed=(Period(when={}, types=(FULL, SLIDING)),),
        unlisted=(Period(when=when, types=tuple(types)),),
        needs=_NEEDS,
    )


ENCODER: dict[str, tuple[str, Any]] = {
    **{name: held for name, held in DECODER.items() if name not in ("kv_heads", "head_dim")},
    "hidden": ("hidden_size", 72),
    "positions": ("max_position_embeddings", 140),
    "types": ("type_vocab_size", 3),
    "labels": ("id2label", {str(number): f"label {number}" for number in range(5)}),
}
ENCODER_FREE: Samples = {
    "dtype": ("bfloat16", "float16", "float32"),
    "torch_dtype": ("bfloat16", "float16", "float32"),
    "initializer_range": (0.02, 0.01),
    "layer_norm_eps": (1e-7, 1e-5),
    "bos_token_id": (1, None),
    "eos_token_id": (2, None),
    "pad_token_id": (0, 1),
    "hidden_dropout_prob": (0.1, 0.0),
    "attention_probs_dropout_prob": (0.1, 0.0),
    "hidden_act": ("gelu", "gelu_new", "relu"),
    "gradient_checkpointing": (False,),
}
_DEBERTA_FREE: Samples = {
    **ENCODER_FREE,
    "pooler_dropout": (0.0, 0, 0.1),
    "pooler_hidden_act": ("gelu",),
    "pooler_hidden_size": (72,),
    "legacy": (True,),
}


def _heads(name: str, *more: When) -> list[When]:
    """What stands outside layers with each of the heads, where a config has one of these settings `more`."""
    heads = [[f"{name}{head}"] for head in ("ForMaskedLM", "ForSequenceClassification", "Model")]
    return [{"architectures": [*head], "tie_word_embeddings": True, **each} for head in heads for each in more or ({},)]


# As published models have them, in lists or as a text, and in v3 with keys that serve both.
_PLAIN: When = {"relative_attention": False, "pos_att_type": None}
_RELATIVE: list[When] = [
    {"relative_attention": True, "pos_att_type": said}
    for said in (["c2p", "p2c"], ["p2c", "c2p"], "c2p|p2c", "p2c|c2p")
]
_POSITIONS = [{"position_biased_input": biased} for biased in (False, True)]


def combinations(samples: Samples) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*samples.values()):
        yield dict(zip(samples, values, strict=True))


USUAL: dict[str, Usual] = {
    "llama": Usual(
        "LlamaForCausalLM",
        "LlamaModel",
        [*combinations({**_BIAS, "mlp_bias": (False, True)})],
        {**FREE, "pretraining_tp": (1, 2)},
        ROPES,
    ),
    "mistral": Usual("MistralForCausalLM", "MistralModel", [{}], {**FREE, **_WINDOW}, ROPES),
    "qwen2": Usual("Qwen2ForCausalLM", "Qwen2Model", [{}], {**FREE, **_QWEN}, ROPES, _QWEN_PATTERN),
    "qwen3": Usual("Qwen3ForCausalLM", "Qwen3Model", [*combinations(_BIAS)], {**FREE, **_QWEN}, ROPES, _QWEN_PATTERN),
    "gemma": Usual("GemmaForCausalLM", "GemmaModel", [*combinations(_BIAS)], {**FREE, **_GEMMA}, ROPES),
    "gemma2": Usual(
        "Gemma2ForCausalLM",
        "Gemma2Model",
        [*combinations(_BIAS)],
        {**FREE, **_GEMMA2},
        ROPES,
        _gemmas({}, [SLIDING, FULL]),
    ),
    "gemma3_text": Usual(
        "Gemma3ForCausalLM",
        "Gemma3TextModel",
        [*combinations(_BIAS)],
        {
            **FREE,
            **_GEMMA2,
            "use_bidirectional_attention": (False,),
            "sliding_window_pattern": (6,),
            "_sliding_window_pattern": (6,),
        },
        GEMMA3_ROPES,
        _gemmas({"sliding_window_pattern": 6, "_sliding_window_pattern": 6}, [*[SLIDING] * 5, FULL]),
    ),
    "olmo2": Usual("Olmo2ForCausalLM", "Olmo2Model", [*combinations(_BIAS)], FREE, ROPES),
    "phi3": Usual(
        "Phi3ForCausalLM",
        "Phi3Model",
        [{}],
        {
            **FREE,
            **_WINDOW,
            "attention_bias": (False,),
            "embd_pdrop": (0.0, 0.1),
            "resid_pdrop": (0.0, 0.1),
            "original_max_position_embeddings": (4096,),
        },
        PHI3_ROPES,
    ),
    "roberta": Usual(
        "RobertaForMaskedLM",
        "RobertaModel",
        [{}],
        {
            **ENCODER_FREE,
            "use_cache": (True, False),
            "classifier_dropout": (None, 0.1),
            "is_decoder": (False,),
            "add_cross_attention": (False,),
            "position_embedding_type": ("absolute",),
        },
        (),
        outside=_heads("Roberta"),
        sizes=ENCODER,
        composed=(),
        kv_heads=(),
    ),
    "deberta": Usual(
        "DebertaForMaskedLM",
        "DebertaModel",
        [_PLAIN, *_RELATIVE],
        _DEBERTA_FREE,
        (),
        outside=_heads(
            "Deberta",
            *({**_PLAIN, **each} for each in _POSITIONS),
            *({"relative_attention": True, "max_relative_positions": -1, **each} for each in _POSITIONS),
            *({"relative_attention": True, **each} for each in _POSITIONS),
        ),
        sizes={**ENCODER, "relative": ("max_relative_positions", 19)},
        composed=("3*hidden", "2*positions", "2*relative"),
        kv_heads=(),
    ),
    "deberta-v2": Usual(
        "DebertaV2ForMaskedLM",
        "DebertaV2Model",
        [_PLAIN, {**_RELATIVE[0], "share_att_key": None}, *({**each, "share_att_key": True} for each in _RELATIVE)],
        _DEBERTA_FREE,
        (),
        outside=_heads(
            "DebertaV2",
            *({**_PLAIN, **each} for each in _POSITIONS),
            *({"relative_attention": True, "norm_rel_ebd": norm, **_POSITIONS[0]} for norm in ("layer_norm", "none")),
        ),
        sizes={
            **ENCODER,
            "relative": ("max_relative_positions", 19),
            "buckets": ("position_buckets", 17),
        },
        composed=("2*relative", "2*buckets"),
        kv_heads=(),
    ),
}
