"""A tiny twin of a model: its config with few, narrow heads, few experts and a small vocabulary, but all its layers.

The effect of a surgery on a twin with random weights is its effect on the model: they differ only in sizes. Sizes are
recognised by the usual names of config fields. Head sizes stay, because rotary settings fit only them.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from surgeon.anatomy.own_classes import code_of
from surgeon.anatomy.skeleton import Skeleton, build
from surgeon.checkpoint.weights import QUANTISATION
from surgeon.common.library import LOAD_FAILURES, config_of
from surgeon.errors import BadInput, printable
from surgeon.grafts.composition import PREFIX

if TYPE_CHECKING:
    from torch import Generator, Tensor, nn

WIDTHS = re.compile(
    r"hidden_size|d_model|n_embd|n_embed|embed_dim|emb_dim|embedding_(size|dim)|word_embed_proj_dim|lru_width"
    r"|(out|text|mm|llm|encoder|moe|projector)_hidden_size|adapter_in(_dim|put_size)|projection_dim|output_dim|hidden_dim|dim_model|text_(embed_)?dim"
)
_INNER = re.compile(
    r".*intermediate_size.*|n_inner|.*ffn_dim|.*ffn_hidden_size|share_expert_dim|dff|d_ff|dim_ff|feed_forward_size"
    r"|mlp_dim|d_inner"
)
_HEADS = re.compile(
    r".*num_attention_heads.*|n_heads?|num_heads|attention_heads|(de|en)coder_attention_heads"
    r"|.*num_sliding_attention_heads|index_n_heads|linear_num_heads|.*num_(key_value|kv|key|value)_heads"
    r"|num_query_groups|num_global_key_value_heads|n_head_kv|num_attention_groups"
)
_EXPERTS = re.compile(r"num_(local_)?experts|n_routed_experts|moe_num_experts|zero_expert_num|moe_num_routed_experts")
_CHOSEN = re.compile(r"num_experts_per_tok(en)?|moe_(topk|k|top_k)|top_k_experts|num_selected_experts")
_RANKS = re.compile(r".*(lora|adapter|norm)_rank|hidden_size_per_layer_input")
_WORDS = re.compile(r".*vocab_size(_per_layer_input)?")
_POSITIONS = re.compile(
    r".*max_position_embeddings|n_positions|max_seq_len|n_ctx|model_max_length|context_length|max_sequence_length"
)
_WINDOWS = re.compile(
    r"sliding_window(_size)?|window_size|local_attention|attention_window_size|attention_chunk_size"
    r"|local_attention_window_len|index_topk"
)

WORDS = 256
_INNER_SIZE = 64
# Small enough to build a twin of 61 layers with 768 experts. It must differ from the number of a twin's experts, or its
# matrices would be taken for routers.
_INNER_OF_MANY = 16
_GROUPS = ("n_group", "num_expert_group", "topk_group")
_HEADS_LEFT = 2
_WINDOW = 8
# The most parameters of a twin: two thirds of a gigabyte in float32, the memory limit of probing.
_MOST_NUMBERS = 5 * 2**25


def shrunk(config: Mapping[str, Any], *, heads_left: int = _HEADS_LEFT, all_experts: bool = False) -> dict[str, Any]:
    """Return a config.json with small sizes and `heads_left` heads; every part of it (text, vision, …) is shrunk too.

    With `all_experts` the number of experts, of their groups and of those chosen per token stay, and experts are
    narrower.
    """
    config = _with_left_out(config)
    old_heads = _first(config, "num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads")
    old_width = _first(config, "hidden_size", "n_embd", "d_model", "embed_dim", "dim_model")
    stated = type(config.get("head_dim")) is int or "qk_nope_head_dim" in config
    head = old_width // old_heads if old_heads and old_width % old_heads == 0 and not stated else 0
    heads = min(old_heads or heads_left, 1 if head > 128 and heads_left == _HEADS_LEFT else heads_left)
    width = min(old_width or _INNER_SIZE, max(_INNER_SIZE, heads * head))
    words = min(_first(config, "vocab_size") or WORDS, WORDS)

    def of(key: str, value: int) -> int:
        """Return the small value of an integer field, whose meaning its name `key` shows."""
        if _HEADS.fullmatch(key):
            fewer = heads if old_heads and value >= old_heads else 2 if key.startswith("linear_num_value") else 1
            return min(value, fewer)
        for pattern, most in (
            (WIDTHS, width),
            (_INNER, _INNER_OF_MANY if all_experts else _INNER_SIZE),
            (_EXPERTS, value if all_experts else 8),
            (_CHOSEN, value if all_experts else 2),
            (_RANKS, 32),
            (_WORDS, WORDS),
            (_POSITIONS, 4096),
        ):
            if pattern.fullmatch(key):
                return min(value, most)
        if _WINDOWS.fullmatch(key):
            return min(value, max(_WINDOW, config.get("index_kpool") or 0))
        if all_experts and key in _GROUPS:
            return value
        if key in ("n_group", "num_expert_group"):
            return min(value, 2)
        if key in ("topk_group", "n_groups", "mamba_n_groups", "mamba_ngroups"):
            return 1
        return words - 1 if key.endswith("token_id") and value >= words else value

    made: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and key.endswith("config"):
            made[key] = shrunk(value, heads_left=heads_left, all_experts=all_experts)
        elif type(value) is int and value > 0:
            made[key] = of(key, value)
        elif isinstance(value, list) and value and all(type(each) is int and each > 0 for each in value):
            sizes = _HEADS.fullmatch(key) or _INNER.fullmatch(key) or key.endswith("token_id")
            made[key] = [of(key, each) for each in value] if sizes else list(value)
        else:
            made[key] = copy.deepcopy(value)
    _fit_towers(config, made)
    _fit_state_space(made, width)
    _fit_joined(made, old_width, width)
    _fit_boxes(made, width)
    if head and width // heads != head:
        _fit_rotary(made, head, width // heads)
    return made


def _with_left_out(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config with its class's defaults for numbers of heads and special tokens that it leaves out.

    Those defaults are made for other sizes, so they must be shrunk too.
    """
    from transformers import CONFIG_MAPPING

    model_type = str(config.get("model_type")).removeprefix(PREFIX)
    if code_of(config) is not None or model_type not in CONFIG_MAPPING:
        return config
    try:
        full = config_of(
            {key: value for key, value in config.items() if key != QUANTISATION}, CONFIG_MAPPING[model_type]
        )
    except LOAD_FAILURES:  # which building the model then says
        return config
    sizes = {
        key: value
        for key, value in full.to_dict().items()
        if key not in config and type(value) is int and (_HEADS.fullmatch(key) or key.endswith("token_id"))
    }
    return {**config, **sizes}


def _fit_rotary(made: dict[str, Any], old: int, new: int) -> None:
    """Resample factors of rotary embeddings, one per pair of a head's dimensions (LongRoPE), for another head size."""
    for key in ("rope_parameters", "rope_scaling"):
        for name in ("short_factor", "long_factor"):
            factors = made[key].get(name) if isinstance(made.get(key), dict) else None
            if isinstance(factors, list) and factors:
                count = max(1, len(factors) * new // old)
                made[key][name] = [factors[n * len(factors) // count] for n in range(count)]


def _fit_boxes(made: dict[str, Any], width: int) -> None:
    """Set the sizes of embeddings of a word's box, corners and extents, which add up to the width (LayoutLMv3)."""
    if type(made.get("coordinate_size")) is int and type(made.get("shape_size")) is int:
        made["shape_size"] = width // 8
        made["coordinate_size"] = (width - 2 * made["shape_size"]) // 4


def _fit_towers(config: Mapping[str, Any], made: dict[str, Any]) -> None:
    """Set the text's smaller width in the parts (towers) that repeat the text's width."""
    before, after = (each.get("text_config") for each in (config, made))
    if not isinstance(before, Mapping) or not isinstance(after, dict):
        return
    for key, part in made.items():
        for name in ("text_hidden_size", "adapter_out_dim") if isinstance(part, dict) else ():
            if name in part and config[key][name] == before.get("hidden_size"):
                part[name] = after["hidden_size"]


def _first(config: Mapping[str, Any], *keys: str) -> int:
    """Return the first of these config fields that is an integer; 0 where none is."""
    return next((config[key] for key in keys if type(config.get(key)) is int), 0)


def _fit_joined(made: dict[str, Any], old: int, new: int) -> None:
    """Keep the ratio of attention width to stream width where attention reads stream and embeddings (Zamba)."""
    before = made.get("attention_hidden_size")
    if type(before) is int and old and before % old == 0:
        made["attention_hidden_size"] = before // old * new
        heads = made.get("num_attention_heads")
        if type(made.get("attention_head_dim")) is int and type(heads) is int:
            made["attention_head_dim"] = made["attention_hidden_size"] // heads


def _fit_state_space(made: dict[str, Any], width: int) -> None:
    """Set as many Mamba heads as the inner width has room for."""
    for count, size, expand in (
        ("mamba_n_heads", "mamba_d_head", "mamba_expand"),
        ("num_heads", "head_dim", "expand"),
        ("n_mamba_heads", "mamba_headdim", "mamba_expand"),
    ):
        if all(type(made.get(key)) in (int, float) for key in (count, size, expand)):
            made[size] = min(made[size], int(made[expand] * width))
            made[count] = max(1, int(made[expand] * width) // made[size])
    if type(made.get("mamba_d_ssm")) is int and type(made.get("mamba_d_head")) is int:
        made["mamba_n_heads"], made["mamba_d_ssm"] = _HEADS_LEFT, _HEADS_LEFT * made["mamba_d_head"]


def twin_of(config: Mapping[str, Any], *, seed: int = 0, heads: int = _HEADS_LEFT) -> Skeleton:
    """Build the twin of a config.json on the CPU, in float32; its parameters and stored buffers are random.

    No value is trivial (all zeros or ones). The same config and seed give the same weights. Raises BadInput where
    transformers cannot build it.
    """
    return twin_of_small(shrunk(config, heads_left=heads), seed=seed)


def twin_of_small(config: Mapping[str, Any], *, seed: int = 0) -> Skeleton:
    """Build the model of a config.json with small sizes, filled as a twin is. Raises BadInput as `twin_of` does."""
    import torch

    with torch.random.fork_rng(devices=[]), _empty_is_nan():
        torch.manual_seed(seed)
        twin = build(config, buffers=True)
    size = sum(value.numel() for value in twin.model.parameters())
    if size > _MOST_NUMBERS:
        raise BadInput(
            f"config.json: the smallest twin of this {printable(str(config.get('model_type')))} that surgeon can make"
            f" has {size:,} parameters, more than {_MOST_NUMBERS:,}, so nothing can be proven of it;"
            " operate on a smaller model of this type"
        )
    fill(twin.model, seed)
    fill_buffers(twin.model, seed)
    twin.model.tie_weights()
    return twin


def fill(model: Any, seed: int) -> None:
    """Give every parameter random values of a scale that neither vanishes nor explodes over many layers."""
    import torch
    from torch import nn

    draws = torch.Generator().manual_seed(seed)
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, held in module._parameters.items():
            if held is None:
                continue
            if id(held) not in made:
                noise = torch.randn(held.shape, generator=draws)
                # Norms, biases and scales are around 0.5; matrices keep the scale of their input.
                value = 0.5 + 0.1 * noise if held.ndim < 2 or held.numel() == 1 else noise * held.shape[-1] ** -0.5
                made[id(held)] = nn.Parameter(value, requires_grad=held.requires_grad)
            module._parameters[key] = made[id(held)]


def fill_buffers(model: nn.Module, seed: int) -> None:
    """Give every buffer that checkpoints store random values; buffers that code computes keep the computed values."""
    import torch

    draws = torch.Generator().manual_seed(seed)
    made: dict[int, Tensor] = {}
    for owner, key, held in _stored_buffers(model):
        if id(held) not in made:
            made[id(held)] = _drawn(held, draws)
        owner._buffers[key] = made[id(held)]


def stored_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's floating-point buffers that checkpoints store, by their names in it."""
    names = {part: f"{name}." if name else "" for name, part in module.named_modules()}
    return {f"{names[owner]}{key}": held for owner, key, held in _stored_buffers(module)}


def _stored_buffers(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield (module, name, value) of each floating-point buffer in a module that checkpoints store."""
    # Whole numbers and truth values are indices, tables and masks: any others would be out of range. Complex ones are
    # fixed transforms (FNet's).
    for part in module.modules():
        for key, held in part._buffers.items():
            if held is not None and key not in part._non_persistent_buffers_set and held.is_floating_point():
                yield part, key, held


def _drawn(held: Tensor, draws: Generator) -> Tensor:
    """Return random values like those that a trained checkpoint may hold where a new model holds `held`."""
    import torch

    noise = torch.randn(held.shape, generator=draws)
    if held.isnan().any():
        # Memory that only a checkpoint or `_init_weights` fills: positive values like those of scale parameters.
        value = 0.5 + 0.1 * noise
    elif not held.any():
        # A shift, a router's correction, a running mean. Not negative, as a running square could not be.
        value = 0.1 * noise.abs()
    elif held.isinf().all():
        # Bounds to clip at: now within reach, the lower one still below the upper.
        value = held.sign() * (3.0 + noise.abs())
    elif torch.equal(held, held.bool().to(held.dtype)) and not held.all():
        return held.clone()  # A mask of zeros and ones, which is right with these values alone.
    else:
        # Scales, variances, decays, tables: nearer to zero by 5 to 25 %, so that what must be positive, or below one,
        # stays so; zeros and infinities among others stay, as masks need.
        value = held * (0.75 + 0.2 * torch.rand(held.shape, generator=draws))
    return value.to(held.dtype)


@contextlib.contextmanager
def _empty_is_nan() -> Iterator[None]:
    """Have torch fill uninitialised memory with NaN, so that what a model leaves uninitialised is visible.

    The content of such memory is then also the same in every run.
    """
    import torch

    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled
