"""Dissect a checkpoint: which tensor is which part of which layer, checked against the config.

What transformers builds of the config is taken apart and probed (checkpoint_anatomy.py). What a config's settings may
be, by their names, is checked before anything is computed or loaded with them. Only of the usual model types is it
known that a setting of a name is what it is for all of them: there a setting that is not named here is left alone, and
None is what transformers takes for left out. Of other types, whatever transformers cannot build is refused when it is
built.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from surgeon.anatomy.anatomy import Anatomy
from surgeon.anatomy.decoders import USUAL_DECODERS, USUAL_ENCODERS
from surgeon.anatomy.family import LARGEST_SIZE, MOST_LAYERS, OWN_CONFIG, Config, listed_layer_types
from surgeon.anatomy.grafted_config import is_grafted, native_config
from surgeon.checkpoint.damages import ANOTHER
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.header import FLOAT_DTYPES, TensorInfo
from surgeon.checkpoint.own_code import OwnCode
from surgeon.errors import BadInput, printable, said_of


def dissect(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], own: OwnCode | None = None) -> Anatomy:
    """Sort the tensors of a checkpoint into layers and the rest, and check every shape against the config.

    `own` is the code that its model is built of where it brings some: what a model type is called says nothing then.
    Raises BadInput naming the first tensor that is missing, unknown or of the wrong shape or dtype.
    """
    own = own if own is not None and own.builds_models else None
    if not isinstance(config.get("model_type"), str):
        found = (
            f"is {printable(repr(config['model_type']), 60)}, not a name" if "model_type" in config else "is missing"
        )
        raise BadInput(f"config.json: `model_type` {found}; is this a transformers checkpoint?")
    native = native_config(config)
    if own is None and native["model_type"] in (*USUAL_DECODERS, *USUAL_ENCODERS):
        check_sizes(native)
        check_settings(native)
    # Imports torch and transformers.
    from surgeon.anatomy.checkpoint_anatomy import anatomy_of

    return anatomy_of(native, tensors, own, carries_grafts=is_grafted(config))


_DTYPES = tuple(dtype.torch for dtype in FLOAT_DTYPES.values())
_MOST_ROPE_FACTORS = 65_536
# The names that transformers has (its ACT2FN), kept here since that takes seconds to import; a test compares them.
# fmt: off
ACTIVATIONS = frozenset({
    "gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh",
    "gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "prelu", "quick_gelu", "relu",
    "relu2", "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh", "xielu",
})
# fmt: on


# The kinds of rotary embedding that transformers has, and what each cannot be without (its ROPE_INIT_FUNCTIONS, and
# what models name that compute their own); a test compares these too.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("default", "axial", "mrope", "xdrope", "proportional", "su"), ()),
    **dict.fromkeys(("linear", "dynamic", "yarn"), ("factor",)),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_ROPE_NUMBERS = ("factor", "rope_theta", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class _Kind(NamedTuple):
    """What a setting must be, in words, and whether a value is that."""

    words: str
    fits: Callable[[Any], bool]


def _whole(value: Any, least: int = 0) -> bool:
    # `type`, not isinstance: JSON's true is an int to Python.
    return type(value) is int and least <= value <= LARGEST_SIZE


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


_FLAG = _Kind("true or false", lambda value: type(value) is bool)
_NAME = _Kind("a name", lambda value: isinstance(value, str))
_ACTIVATION = _Kind(
    "the name of an activation that transformers has", lambda value: isinstance(value, str) and value in ACTIVATIONS
)
_NAMES = _Kind("a list of names", lambda value: isinstance(value, list) and all(map(_NAME.fits, value)))
_COUNT = _Kind("a whole number from 0 to 2^31", _whole)
_POSITIONS = _Kind("a whole number from 1 to 2^31", lambda value: _whole(value, 1))
_AMOUNT = _Kind("a finite number, at least 0", lambda value: _number(value) and value >= 0)
_POSITIVE = _Kind("a finite number above 0", lambda value: _number(value) and value > 0)
_SHARE = _Kind("a number from 0 to 1", lambda value: _number(value) and 0 <= value <= 1)
_DTYPE = _Kind(f"one of {', '.join(_DTYPES)}", lambda value: isinstance(value, str) and value in _DTYPES)
# -1 stands for none in the first Llamas.
_TOKEN = _Kind("a token's number, or a list of them", lambda value: all(_whole(token, -1) for token in _listed(value)))
_ROPE = _Kind(
    "a mapping of names to names, finite numbers and lists of them",
    lambda value: isinstance(value, dict) and all(_rope_entry(entry, deeper=True) for entry in value.values()),
)

_KINDS: dict[str, _Kind] = {
    **dict.fromkeys(("architectures",), _NAMES),
    **dict.fromkeys(("dtype", "torch_dtype"), _DTYPE),
    **dict.fromkeys(("hidden_act", "hidden_activation", "conv_act"), _ACTIVATION),
    **dict.fromkeys(("attn_implementation",), _NAME),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), _TOKEN),
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings"), _POSITIONS),
    **dict.fromkeys(("sliding_window", "max_window_layers", "type_vocab_size"), _COUNT),
    **dict.fromkeys(
        ("rope_theta", "rope_local_base_freq", "query_pre_attn_scalar", "partial_rotary_factor"), _POSITIVE
    ),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping"), _POSITIVE),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "initializer_range"), _AMOUNT),
    **dict.fromkeys(("attention_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob"), _SHARE),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "pooler_dropout", "classifier_dropout"), _SHARE),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), _ROPE),
    **dict.fromkeys(("tie_word_embeddings", "use_cache", "attention_bias", "mlp_bias", "use_sliding_window"), _FLAG),
    **dict.fromkeys(("is_decoder", "add_cross_attention", "relative_attention", "position_biased_input"), _FLAG),
    **dict.fromkeys(("share_att_key", "talking_head", "use_bidirectional_attention"), _FLAG),
}


# The sizes that fix the shapes of tensors, and those of them that a config.json may leave out.
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
_OTHER_SIZES = ("num_key_value_heads", "head_dim")


def check_sizes(config: Config) -> None:
    """Raise BadInput for a size that is missing, no whole number above 0, or does not divide what it has to."""
    for key in (*_SIZES, *_OTHER_SIZES):
        value = config.get(key)
        if value is None:
            if key in _OTHER_SIZES:
                continue
            raise BadInput(f"config.json: `{key}` is missing; {OWN_CONFIG}")
        if not _whole(value, 1):
            shown = printable(repr(value), 60)
            raise BadInput(f"config.json: `{key}` is {shown}, not a whole number from 1 to 2^31; {OWN_CONFIG}")
    layers, hidden, heads = (config[key] for key in _SIZES[:3])
    if layers > MOST_LAYERS:
        raise BadInput(
            f"config.json: `num_hidden_layers` is {layers}; more than {MOST_LAYERS} is refused; {OWN_CONFIG}"
        )
    if heads % (config.get("num_key_value_heads") or 1):
        raise BadInput(
            f"config.json: `num_key_value_heads` {config['num_key_value_heads']} does not divide `num_attention_heads`"
            f" {heads}; {OWN_CONFIG}"
        )
    if hidden % heads and config.get("head_dim") is None:
        raise BadInput(
            f"config.json: `num_attention_heads` {heads} does not divide `hidden_size` {hidden}; {OWN_CONFIG}"
        )
    listed_layer_types(config, layers)


def check_settings(config: Config) -> None:
    """Raise BadInput for the first setting that is of another kind than transformers takes, naming it and its value."""
    for key, kind in _KINDS.items():
        value = config.get(key)
        if value is not None and not kind.fits(value):
            raise BadInput(f"config.json: `{key}` is {printable(repr(value), 60)}, not {kind.words}; {OWN_CONFIG}")
    for key in ("rope_parameters", "rope_scaling"):
        # Of own code only its own words are known.
        if config.get(key) and "auto_map" not in config:
            _check_rope(key, config[key])
    pad, rows = config.get("pad_token_id"), config.get("vocab_size")
    if type(pad) is int and type(rows) is int and pad >= rows:
        raise BadInput(
            f"config.json: `pad_token_id` is {pad}, the embedding has {rows} rows (`vocab_size`); {OWN_CONFIG}"
        )


def _check_rope(key: str, rope: Config) -> None:
    """Raise BadInput where transformers cannot compute rotary embeddings by `rope`, or by one of those in it."""
    for name, inner in rope.items():
        if isinstance(inner, dict):
            _check_rope(f"{key}.{name}", inner)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise BadInput(
            f"config.json: `{key}` is of the type {printable(repr(kind), 60)}, which transformers does not have;"
            f" {OWN_CONFIG}"
        )
    for name in ROPE_TYPES[kind]:
        if rope.get(name) is None:
            raise BadInput(f"config.json: `{key}` is of the type `{kind}` and has no `{name}`; {OWN_CONFIG}")
    for name in _ROPE_NUMBERS:
        if (value := rope.get(name)) is not None and not (_number(value) and value > 0):
            raise BadInput(
                f"config.json: `{key}.{name}` is {printable(repr(value), 60)}, not {_POSITIVE.words}; {OWN_CONFIG}"
            )


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _rope_entry(value: Any, *, deeper: bool) -> bool:
    """A name, a flag, a number, a list of numbers; or, of a model with several kinds of layers, a mapping of those."""
    if isinstance(value, dict):
        return deeper and all(_rope_entry(entry, deeper=False) for entry in value.values())
    if isinstance(value, list):
        return len(value) <= _MOST_ROPE_FACTORS and all(map(_number, value))
    return value is None or isinstance(value, str | bool) or _number(value)


def dissect_folder(folder: CheckpointFolder, by: Callable[..., Anatomy] = dissect) -> Anatomy:
    """`dissect` of an opened folder, or what `by` knows of it. Raises BadInput as that does.

    Where the folder's own code was left out and tensors fit no class of transformers, the code may be what they are of.
    """
    try:
        with said_of(folder.source.shown):
            return by(folder.config, folder.tensors, folder.own)
    except BadInput as error:
        why = str(error)
        if not folder.model_code or not why.endswith(ANOTHER):
            raise
        raise BadInput(
            f"{why.removesuffix(ANOTHER)}this folder's own code ({folder.model_code}) was left out, as transformers has"
            f" {printable(str(folder.config['model_type']))}, and these tensors may be of that code; read it, then pass"
            " `--trust-remote-code`"
        ) from error
