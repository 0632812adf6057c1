"""A model as transformers builds it from a config: its class, and the stack of its text decoder's layers.

Classes come from the installed transformers, or from the checkpoint's own code where it has some and the user trusts
it. On the meta device a model of any size takes no memory for weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from surgeon.anatomy.family import LARGEST_SIZE, OWN_CONFIG, Sizes
from surgeon.anatomy.own_classes import code_of, own_class
from surgeon.checkpoint.weights import QUANTISATION
from surgeon.common.library import LOAD_FAILURES, config_of, first_line, quiet_transformers
from surgeon.errors import BadInput, printable
from surgeon.grafts.composition import ENCODER_AUTOS, OTHER_AUTOS, PREFIX

if TYPE_CHECKING:
    from torch import nn

CAUSAL = "AutoModelForCausalLM"
IMAGE_TEXT = "AutoModelForImageTextToText"
BASE = "AutoModel"
# The transformers tables of the classes that each auto class finds.
_NAMES = {
    BASE: "MODEL_MAPPING_NAMES",
    CAUSAL: "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    IMAGE_TEXT: "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "AutoModelForMaskedLM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
}

# Names of towers, the other parts of a model, which surgery does not change; a decoder's own encoder is one too.
_TOWER = re.compile(r"(^|[._])(vision|visual|vit|vq|image|audio|speech|encoder|qformer|perceiver|mtp)")
# Other lists of modules in a model with a text encoder.
_BESIDE = re.compile(r"(^|[._])(vision|visual|vit|image|audio|speech|decoder|initial|final)")
# Fields that count modules: if a config asked for a billion, they would be built one by one.
_COUNT = re.compile(r"(^|_)(num|n|max)_.*(layers?|blocks?|experts?)$|^(depth|n_layer|layers)$")
_MOST_EXPERTS = 4096
_MOST_BUILT = 1000


@dataclass(frozen=True)
class Skeleton:
    """A built model: `text` is the config object of its text decoder, found at `path` in config.json.

    `stack` is the name of the list of layers in `model`, `count_key` the config field with their number. An `encoder`
    reads a text in both directions.
    """

    model: Any
    text: Any
    path: tuple[str, ...]
    stack: str
    count_key: str | None
    encoder: bool = False

    @property
    def layers(self) -> list[nn.Module]:
        """The layers of the decoder or encoder."""
        return list(self.model.get_submodule(self.stack))

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor that checkpoints hold, by its name in memory."""
        return {name: tuple(value.shape) for name, value in self.model.state_dict(keep_vars=True).items()}

    @cached_property
    def sizes(self) -> Sizes:
        """The model's sizes, read by its config's own names for them; 0 for a size that differs between layers."""
        fields, names = self.text.to_dict(), self.text.attribute_map

        def of(key: str) -> int:
            """Return the integer of a config field by its usual name `key`; 0 where it is no integer."""
            value = fields.get(names.get(key, key))
            return value if type(value) is int else 0

        heads = of("num_attention_heads")
        return Sizes(
            layers=len(self.layers),
            hidden=of("hidden_size"),
            intermediate=of("intermediate_size"),
            heads=heads,
            kv_heads=of("num_key_value_heads") or heads,
            head_dim=of("head_dim") or (of("hidden_size") // heads if heads else 0),
            vocabulary=of("vocab_size"),
        )

    def changes(self, other: Skeleton) -> dict[str, dict[int, tuple[int, int]] | None]:
        """Return the tensors whose shapes differ in another model: for each axis, its length here and there.

        None in place of the axes for a tensor that only one model has, or whose number of axes differs.
        """
        found: dict[str, dict[int, tuple[int, int]] | None] = {}
        for name in dict.fromkeys((*self.shapes, *other.shapes)):
            one, two = self.shapes.get(name), other.shapes.get(name)
            if one is None or two is None or len(one) != len(two):
                found[name] = None
            elif one != two:
                pairs = enumerate(zip(one, two, strict=True))
                found[name] = {axis: pair for axis, pair in pairs if pair[0] != pair[1]}
        return found

    @property
    def holder(self) -> str:
        """The path of the model that holds the layers: an encoder's base model, else the innermost PreTrainedModel."""
        from transformers import PreTrainedModel

        above = self.stack.rpartition(".")[0]
        if self.encoder:
            prefix = self.model.base_model_prefix
            return prefix if self.model.base_model is not self.model and above.startswith(prefix) else ""
        while not isinstance(self.model.get_submodule(above), PreTrainedModel):
            above = above.rpartition(".")[0]
        return above


def is_known(config: Mapping[str, Any]) -> bool:
    """Return whether the installed transformers, or the checkpoint's own code, has a text model for this config."""
    return code_of(config) is not None or encoder_auto(config) is not None or auto_of(config) is not None


def classes_of(model_type: object, auto: str) -> tuple[str, ...]:
    """Return the names of the classes that an auto class finds for a model type; empty where it finds none."""
    from transformers.models.auto import modeling_auto

    found = getattr(modeling_auto, _NAMES[auto]).get(model_type, ())
    return (found,) if isinstance(found, str) else tuple(found)


def encoder_auto(config: Mapping[str, Any]) -> str | None:
    """Return the auto class that finds a text encoder as its config names it; None where it is not a text encoder.

    An encoder's type has a masked-language head, or heads for sequences and tokens and none that generates. If the
    config names a head that none of these auto classes finds, the result is the auto class without a head.
    """
    model_type, named = config.get("model_type"), [str(name) for name in config.get("architectures") or ()]
    generating = [*classes_of(model_type, CAUSAL), *classes_of(model_type, IMAGE_TEXT)]
    heads = {auto: classes_of(model_type, auto) for auto in ENCODER_AUTOS}
    masked, others = heads.pop(ENCODER_AUTOS[0]), any(heads.values())
    if not classes_of(model_type, BASE) or not (masked or (others and not generating)):
        return None
    if set(named) & set(generating) or (config.get("is_decoder") is True and generating):
        return None
    stated = {auto for auto in ENCODER_AUTOS if set(named) & set(classes_of(model_type, auto))}
    return next((auto for auto in ENCODER_AUTOS if auto in stated), BASE)


def wordless_auto(config: Mapping[str, Any]) -> str | None:
    """Return the auto class of a head for labels or answers that a decoder's config names; None where it names none."""
    named = {str(name).removeprefix("Upcycled") for name in config.get("architectures") or ()}
    model_type = str(config.get("model_type")).removeprefix(PREFIX)
    return next((auto for auto in OTHER_AUTOS if named & set(classes_of(model_type, auto))), None)


def auto_of(config: Mapping[str, Any]) -> str | None:
    """Return the auto class that finds the model of a config: causal or image-text; None where neither does."""
    named = {auto: {*classes_of(config.get("model_type"), auto)} for auto in (CAUSAL, IMAGE_TEXT)}
    architectures = {*map(str, config.get("architectures") or ())}
    stated = next((auto for auto, classes in named.items() if classes & architectures), None)
    return stated or next((auto for auto, classes in named.items() if classes), None)


def reads_images(config: Mapping[str, Any]) -> bool:
    """Return whether the head that transformers builds for a config reads images as well as text."""
    classes = {*classes_of(config.get("model_type"), IMAGE_TEXT)}
    stated = {*map(str, config.get("architectures") or ())}
    return bool(classes & stated) or (bool(classes) and auto_of(config) == IMAGE_TEXT)


def build(config: Mapping[str, Any], *, buffers: bool = False) -> Skeleton:
    """Build the model of a config.json on the meta device, in float32 and eval mode; with `buffers`, these are real.

    Raises BadInput where the installed transformers has no decoder of this type, cannot build it, or no stack of
    decoder layers is found in it.
    """
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    encoder = code_of(config) is None and encoder_auto(config) is not None
    shown = printable(str(config.get("model_type")))
    check_counts(config)
    kind, model = _classes(config, shown)
    # In full precision: quantisation changes how numbers are stored, not what is computed.
    config = {key: value for key, value in config.items() if key != QUANTISATION}
    try:
        with quiet_transformers(), no_init_weights(), init_empty_weights(include_buffers=not buffers):
            model = model._from_config(_fitting(model, config_of(config, kind)))
    except LOAD_FAILURES as error:
        builder = "transformers" if code_of(config) is None else "its own code"
        raise BadInput(
            f"config.json: {builder} cannot build this {shown} ({first_line(error)}); {OWN_CONFIG}"
        ) from error
    text, path = _text_part(model.config)
    if encoder and path:
        raise BadInput(
            f"config.json: the text encoder ({'.'.join(path)}) is a part of this {shown}, which has others; operate on"
            " an encoder of text alone"
        )
    stack = _stack(model, text, shown, encoder=encoder)
    # Without such a field in config.json, the length of a list gives the number of layers.
    count_key = text.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    return Skeleton(model.eval(), text, path, stack, count_key if count_key in text.to_dict() else None, encoder)


def _classes(config: Mapping[str, Any], shown: str) -> tuple[Any, Any]:
    """Return the classes of a config and its model. Raises BadInput where there are none."""
    import transformers
    from transformers import CONFIG_MAPPING

    code = code_of(config)
    if code is not None:
        model = own_class(code, CAUSAL)
        if model is None:
            raise BadInput(
                f"config.json: its `auto_map` names no {CAUSAL}, so it has no decoder to operate on; name it there"
            )
        return own_class(code, "AutoConfig") or model.config_class, model
    encoder = encoder_auto(config)
    auto = encoder or auto_of(config)
    if auto is None:
        raise BadInput(
            f"config.json: transformers {transformers.__version__} has no text decoder of model_type {shown!r};"
            " update it, or get a model that it knows"
        )
    kind = CONFIG_MAPPING[str(config["model_type"])]
    if encoder is not None and (config.get("is_encoder_decoder") or kind().is_encoder_decoder):
        raise BadInput(
            f"config.json: {shown} has an encoder and a decoder that reads it; surgery knows models of one stack alone"
        )
    model = getattr(transformers, auto)._model_mapping[kind]
    return kind, model[0] if isinstance(model, tuple) else model


def _fitting(model: Any, settings: Any) -> Any:
    """Return the part of a config that a model class accepts: some causal models are built from the text part only."""
    wanted = getattr(model, "config_class", None)
    if wanted is None or isinstance(settings, wanted):
        return settings
    text = settings.get_text_config()
    return text if isinstance(text, wanted) else settings


def check_counts(config: Mapping[str, Any]) -> None:
    """Raise BadInput for a count of modules, or any number, that is larger than in any model.

    A number next to a list, as in `[["global", "local"], 12]`, says how often the list repeats (GPT-Neo's
    `attention_types`).
    """
    for key, value in config.items():
        if isinstance(value, Mapping):
            check_counts(value)
        elif isinstance(value, list) and (times := [n for each in value for n in _repeats(each) if n > _MOST_BUILT]):
            raise BadInput(
                f"config.json: `{printable(key)}` repeats a list {times[0]} times; more than {_MOST_BUILT} is refused;"
                f" {OWN_CONFIG}"
            )
        elif type(value) is int and abs(value) > LARGEST_SIZE:
            raise BadInput(f"config.json: `{printable(key)}` is {value}; beyond 2^31 is refused; {OWN_CONFIG}")
        elif type(value) is int and _COUNT.search(key):
            most = _MOST_EXPERTS if "expert" in key else _MOST_BUILT
            if value > most:
                raise BadInput(f"config.json: `{printable(key)}` is {value}; more than {most} is refused; {OWN_CONFIG}")


def _repeats(entry: object) -> list[int]:
    """Return the integers in `entry` that are next to a list; empty where `entry` is no list that contains a list."""
    if not isinstance(entry, list) or not any(isinstance(each, list) for each in entry):
        return []
    return [each for each in entry if type(each) is int]


def _text_part(settings: Any) -> tuple[Any, tuple[str, ...]]:
    """Return the config object of the text decoder, and the path of its fields in config.json."""
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


def _stack(model: Any, text: Any, shown: str, *, encoder: bool) -> str:
    """Return the name of the list of a text model's layers; among several lists, that of the largest.

    Raises BadInput where no list has as many layers as the config counts, or several lists hold the parts of a layer.
    """
    from torch import nn

    count = getattr(text, "num_hidden_layers", None)
    others = _BESIDE if encoder else _TOWER
    lists = {
        name: sum(value.numel() for value in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    }
    found = [(size, name) for name, size in lists.items() if not others.search(name)]
    if not found and not encoder:
        # A decoder made from an encoder keeps the encoder's name for its stack (BERT as a decoder).
        found = [(size, name) for name, size in lists.items() if name.startswith(f"{model.base_model_prefix}.encoder.")]
    beside = [name for _, name in found if encoder and name.rpartition(".")[0] == found[0][1].rpartition(".")[0]]
    if len(beside) > 1:
        raise BadInput(
            f"config.json: this {shown} keeps the parts of its layers in lists of their own ({', '.join(beside)}), so"
            " nothing holds a layer that a control could stand in; use another model, or full fine-tuning"
        )
    if not found:
        kind = "encoder" if encoder else "decoder"
        raise BadInput(
            f"config.json: no stack of {count} {kind} layers is found in this {shown}: layers that share weights, or"
            " run several times, have no place of their own; use another model"
        )
    longest: str = max(found)[1]
    return longest
