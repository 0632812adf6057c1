"""A model as transformers builds it from a config: its class, and the stack of its text decoder's layers.

Nothing of the checkpoint's folder runs: classes are those of the installed transformers. On the meta device a model of
any size takes no memory for weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surgeon.checkpoint.weights import QUANTISATION
from surgeon.common.library import LOAD_FAILURES, config_of, first_line, quiet_transformers
from surgeon.errors import BadInput, printable
from surgeon.families.family import LARGEST_SIZE, OWN_CONFIG

if TYPE_CHECKING:
    from torch import nn

CAUSAL = "AutoModelForCausalLM"
IMAGE_TEXT = "AutoModelForImageTextToText"

# Towers beside the text decoder, which surgery leaves alone; a decoder's own encoder is one too.
_TOWER = re.compile(r"(^|[._])(vision|visual|vit|image|audio|speech|encoder|qformer|perceiver|mtp)")
# Counts of modules: a config that asks for a billion of them would be built one by one.
_COUNT = re.compile(r"(^|_)(num|n|max)_.*(layers?|blocks?|experts?)$|^(depth|n_layer|layers)$")
_MOST_EXPERTS = 4096
_MOST_BUILT = 1000


@dataclass(frozen=True)
class Skeleton:
    """A built model: `text` is its text decoder's config object, which stands at `path` in config.json.

    `stack` is the name of the list of decoder layers in `model`, `count_key` the field that says how many there are.
    """

    model: Any
    text: Any
    path: tuple[str, ...]
    stack: str
    count_key: str | None

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder's layers."""
        return list(self.model.get_submodule(self.stack))


def is_known(config: Mapping[str, Any]) -> bool:
    """Whether the installed transformers has a text decoder of this config's model type."""
    return auto_of(config) is not None


def auto_of(config: Mapping[str, Any]) -> str | None:
    """The auto class that finds the model of a config: causal or image-text; None where there is neither."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    model_type = config.get("model_type")
    named = {
        auto: (names[model_type],) if isinstance(names[model_type], str) else tuple(names[model_type])
        for auto, names in (
            (CAUSAL, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
            (IMAGE_TEXT, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
        )
        if model_type in names
    }
    architectures = config.get("architectures") or ()
    stated = next((auto for auto, classes in named.items() if set(classes) & set(map(str, architectures))), None)
    return stated or next(iter(named), None)


def reads_images(config: Mapping[str, Any]) -> bool:
    """Whether the head of a config's model, as transformers has it, reads images beside text."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    named = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.get("model_type"), ())
    classes = {named} if isinstance(named, str) else set(named)
    stated = {*map(str, config.get("architectures") or ())}
    return bool(classes & stated) or (bool(classes) and auto_of(config) == IMAGE_TEXT)


def build(config: Mapping[str, Any], *, buffers: bool = False) -> Skeleton:
    """The model of a config.json on the meta device, in float32 and eval mode; with `buffers`, these are real.

    Raises BadInput where the installed transformers has no decoder of this type, cannot build it, or no stack of
    decoder layers is found in it.
    """
    import transformers
    from accelerate import init_empty_weights
    from transformers import CONFIG_MAPPING
    from transformers.initialization import no_init_weights

    auto = auto_of(config)
    shown = printable(str(config.get("model_type")))
    if auto is None:
        raise BadInput(
            f"config.json: transformers {transformers.__version__} has no text decoder of model_type {shown!r};"
            " update it, or get a model that it knows"
        )
    _check_counts(config)
    kind = CONFIG_MAPPING[str(config["model_type"])]
    # In full precision: what is quantised changes where numbers are stored, not what is computed.
    config = {key: value for key, value in config.items() if key != QUANTISATION}
    try:
        with quiet_transformers(), no_init_weights(), init_empty_weights(include_buffers=not buffers):
            settings = config_of(config, kind)
            model = getattr(transformers, auto)._model_mapping[kind]
            model = (model[0] if isinstance(model, tuple) else model)._from_config(_fitting(model, settings))
    except LOAD_FAILURES as error:
        raise BadInput(
            f"config.json: transformers cannot build this {shown} ({first_line(error)}); {OWN_CONFIG}"
        ) from error
    text, path = _text_part(model.config)
    stack = _stack(model, text, shown)
    return Skeleton(model.eval(), text, path, stack, _count_key(text))


def _fitting(model: Any, settings: Any) -> Any:
    """The part of a config that a model class takes: some causal models are built of the text part alone."""
    wanted = getattr(model, "config_class", None)
    if wanted is None or isinstance(settings, wanted):
        return settings
    text = settings.get_text_config()
    return text if isinstance(text, wanted) else settings


def _check_counts(config: Mapping[str, Any]) -> None:
    for key, value in config.items():
        if isinstance(value, Mapping):
            _check_counts(value)
        elif type(value) is int and abs(value) > LARGEST_SIZE:
            raise BadInput(f"config.json: `{printable(key)}` is {value}; beyond 2^31 is refused; {OWN_CONFIG}")
        elif type(value) is int and _COUNT.search(key):
            most = _MOST_EXPERTS if "expert" in key else _MOST_BUILT
            if value > most:
                raise BadInput(f"config.json: `{printable(key)}` is {value}; more than {most} is refused; {OWN_CONFIG}")


def _text_part(settings: Any) -> tuple[Any, tuple[str, ...]]:
    """The config object of the text decoder, and where its fields stand in config.json."""
    try:
        text = settings.get_text_config(decoder=True)
    except ValueError as error:
        raise BadInput(f"config.json: {first_line(error)}; {OWN_CONFIG}") from error
    if text is settings:
        return settings, ()
    for key in settings.sub_configs:
        part = getattr(settings, key, None)
        if part is text:
            return text, (key,)
        for inner in getattr(part, "sub_configs", {}):
            if getattr(part, inner, None) is text:
                return text, (key, inner)
    raise BadInput(
        f"config.json: the text part of this {printable(str(settings.model_type))} is not found in it; {OWN_CONFIG}"
    )


def _count_key(text: Any) -> str | None:
    """The field of config.json that counts the layers; None where a list of them does."""
    key = text.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    return key if key in text.to_dict() else None


def _stack(model: Any, text: Any, shown: str) -> str:
    from torch import nn

    count = getattr(text, "num_hidden_layers", None)
    found: list[tuple[int, str]] = [
        (sum(value.numel() for value in module.parameters()), name)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and not _TOWER.search(name)
    ]
    if not found:
        raise BadInput(
            f"config.json: no stack of {count} decoder layers is found in this {shown}; is it a text decoder?"
        )
    return max(found)[1]
