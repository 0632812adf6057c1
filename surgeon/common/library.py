"""Calls into transformers: without output, with one-line errors, and with configs that only describe the model."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from surgeon.errors import printable

# What libraries may raise when they read untrusted files: any exception, since tokenizers' own errors are plain
# `Exception`s. Only library calls are wrapped in such a handler.
LOAD_FAILURES = (Exception,)

# Implementations that are part of transformers itself. Others need further packages, or kernels from the Hub.
_IMPLEMENTATIONS = frozenset({"eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm"})
_IMPLEMENTATION_FIELDS = ("attn_implementation", "experts_implementation")


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress transformers' progress bars and logging in the block; the earlier settings are restored.

    The caller must check what transformers would warn about (missing keys, mismatched shapes) and raise instead.
    """
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def passed_over(model: Any) -> Callable[[str], bool]:
    """Return a predicate on tensor names: whether transformers ignores the tensor on loading, as it does with old
    buffers.
    """
    patterns = list(model._keys_to_ignore_on_load_unexpected or ())
    # These two patterns are as in transformers' `_adjust_missing_and_unexpected_keys`; nearly every model has them.
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.append(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.append(r"(^|\.)position_ids$")
    compiled = [re.compile(pattern) for pattern in patterns]
    return lambda name: any(pattern.search(name) for pattern in compiled)


def why_nan(model: Any) -> str:
    """Return an error text for a model that computes NaN; it names a tensor that contains NaN, where there is one."""
    holds = next((name for name, each in model.named_parameters() if bool(each.isnan().any())), None)
    if holds is None:
        return "it computes NaN or infinity, which no tensor holds; is config.json its own?"
    return f"it computes NaN, which {printable(holds)} holds; get it again"


def first_line(error: BaseException) -> str:
    """Return the first line of a library's exception, fit for a terminal."""
    if "trust_remote_code" in str(error):
        return "it has code of its own, which runs only with --trust-remote-code"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("Class validation error"):
        # The finding of a config's own check comes after the check's name.
        lines = [lines[1].removeprefix("ValueError: ")]
    told = lines[:1] or [type(error).__name__]
    if isinstance(error, KeyError) and " " not in told[0]:
        told = [f"it has no {told[0]}"]
    # The finding of a field's check comes after the field's name.
    told += lines[1:2] if told[0].endswith(":") else []
    return printable(" ".join(told), limit=300)


def described(config: Mapping[str, Any], kind: type[Any] | None = None) -> dict[str, Any]:
    """Return the fields of a config.json that describe a model, without fields that control how transformers loads it.

    Left out are fields that begin with `_` (transformers' own notes), and implementations that are not part of
    transformers; for a known config class `kind`, also fields that would hide one of its methods or class attributes.
    """
    kept = {
        key: value
        for key, value in config.items()
        if not key.startswith("_") and not (kind is not None and _hides(kind, key, value))
    }
    for key in _IMPLEMENTATION_FIELDS:
        if not isinstance(kept.get(key), str) or kept[key] not in _IMPLEMENTATIONS:
            kept.pop(key, None)
    kept.pop("name_or_path", None)
    if not kept.get("auto_map"):
        kept.pop("auto_map", None)
    return kept


def has_type(model_type: Any) -> bool:
    """Return whether transformers itself has a model type. Only names are read, so torch is not imported."""
    from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES

    return isinstance(model_type, str) and model_type in CONFIG_MAPPING_NAMES


def has_class(name: Any) -> bool:
    """Return whether transformers itself has a class of this name; the suffix `Fast` of old tokenizers is ignored."""
    return isinstance(name, str) and name.removesuffix("Fast") in _names_of_classes()


@cache
def _names_of_classes() -> frozenset[str]:
    """Return all names that transformers exports; this takes a tenth of a second, so it is cached."""
    import transformers

    return frozenset(dir(transformers))


# Where transformers lists its default classes for a model type.
_BY_TYPE = {
    "AutoTokenizer": ("tokenization_auto", "TOKENIZER_MAPPING_NAMES"),
    "AutoProcessor": ("processing_auto", "PROCESSOR_MAPPING_NAMES"),
    "AutoImageProcessor": ("image_processing_auto", "IMAGE_PROCESSOR_MAPPING_NAMES"),
    "AutoFeatureExtractor": ("feature_extraction_auto", "FEATURE_EXTRACTOR_MAPPING_NAMES"),
    "AutoVideoProcessor": ("video_processing_auto", "VIDEO_PROCESSOR_MAPPING_NAMES"),
}


def has_own(auto: str, model_type: Any) -> bool:
    """Return whether transformers itself has a class of an auto class (a tokenizer, a processor) for a model type."""
    if auto not in _BY_TYPE or not isinstance(model_type, str):
        return False
    module, names = _BY_TYPE[auto]
    return bool(getattr(importlib.import_module(f"transformers.models.auto.{module}"), names).get(model_type))


def config_of(config: Mapping[str, Any], kind: type[Any]) -> Any:
    """Return a config.json as an object of a config class; infinities are decoded as transformers does for a file."""
    return kind.from_dict(kind._decode_special_floats(described(config, kind)))


def _hides(kind: type[Any], key: str, value: Any) -> bool:
    """Return whether a field of this name would hide a definition of a config class; `model_type` is exempt.

    A read-only property counts as hidden unless the class itself reads an old field of that name, as Nemotron-H does
    with `hybrid_override_pattern`.
    """
    # Before transformers 5.1, config classes were not dataclasses.
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    if key == "model_type" or key in {field.name for field in fields}:
        return False
    defined = getattr(kind, key, None)
    if not isinstance(defined, property):
        return hasattr(kind, key)
    return defined.fset is None and not _reads(kind, key, value)


def _reads(kind: type[Any], key: str, value: Any) -> bool:
    """Return whether a config class accepts a field with the name of a read-only property."""
    try:
        kind.from_dict({key: value})
    except AttributeError:
        return False
    except Exception:  # Reading the whole config will report what is wrong with the value.
        return True
    return True
