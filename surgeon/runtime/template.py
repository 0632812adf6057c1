"""The one template: the named classes of a model type, composed of the runtime's parts and transformers' own."""

from __future__ import annotations

from .natives import PREFIX, Native

_CONFIG = '''
class {prefix}Config({Config}):
    """The native config and `surgery`{counts}."""

    model_type = "{model_type}"

    def __init__(self, surgery: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        {attach}(self, surgery)
'''

_DECODER = '''
class {prefix}Attention(AttentionSite, {Attention}):
    """The native attention, able to carry grafts."""


class {prefix}MLP(FeedForwardSite, {MLP}):
    """The native MLP, able to carry grafts."""

    activation_field = "{activation}"


class {prefix}Branch(BranchLayer, {DecoderLayer}):
    """The expanded twin of a trunk layer."""

    mlp_class = {prefix}MLP


class {prefix}DecoderLayer(UpcycledLayer, {DecoderLayer}):
    """A layer of the trunk."""

    attention_class = {prefix}Attention
    mlp_class = {prefix}MLP
    branch_class = {prefix}Branch


class {prefix}PreTrainedModel(UpcycledPreTrained, {PreTrainedModel}):
    """What all upcycled {title} models share."""

    config_class = {prefix}Config
    _no_split_modules: ClassVar[list[str]] = ["{prefix}DecoderLayer"]
    # Hidden states of the trunk alone; attentions of trunk and branches, each branch after its twin.
    _can_record_outputs: ClassVar[dict[str, Any]] = {{
        "hidden_states": {prefix}DecoderLayer,
        "attentions": {Attention},
    }}


class {prefix}Model(UpcycledModel, {prefix}PreTrainedModel, {Model}):
    """The base model."""

    layer_class = {prefix}DecoderLayer


class {prefix}ForCausalLM(UpcycledCausalLM, {prefix}PreTrainedModel, {ForCausalLM}):
    """The language model."""

    base_class = {prefix}Model


class {prefix}ForSequenceClassification(
    UpcycledSequenceClassifier, {classifier}
):
    """The sequence classifier."""

    base_class = {prefix}Model
'''

_ENCODER = '''
class {prefix}SelfOutput(EncoderSite, {SelfOutput}):
    """The end of the native attention, able to carry a control state."""


class {prefix}Output(EncoderSite, {Output}):
    """The end of the native FFN, able to carry a control state."""


class {prefix}Layer(UpcycledEncoderLayer, {Layer}):
    """A layer."""

    attention_end = {prefix}SelfOutput
    ffn_end = {prefix}Output


class {prefix}PreTrainedModel(UpcycledPreTrained, {PreTrainedModel}):
    """What all upcycled {title} models share."""

    config_class = {prefix}Config
    _no_split_modules: ClassVar[list[str]] = [{unsplit}"{prefix}Layer"]


class {prefix}Model(UpcycledEncoder, {prefix}PreTrainedModel, {Model}):
    """The base model."""

    layer_class = {prefix}Layer{numbered}


class {prefix}ForMaskedLM(UpcycledMaskedLM, {prefix}PreTrainedModel, {ForMaskedLM}):
    """The masked language model."""

    base_class = {prefix}Model{options}


class {prefix}ForSequenceClassification(
    UpcycledEncoderClassifier, {prefix}PreTrainedModel, {ForSequenceClassification}
):
    """The sequence classifier."""

    base_class = {prefix}Model{options}
'''

_NUMBERED = """
    numbered = True"""

_POOLER = """

    def __init__(self, config: Any, add_pooling_layer: bool = True) -> None:
        super().__init__(config, add_pooling_layer=add_pooling_layer)"""

_OPTIONS = """
    base_options: ClassVar[dict[str, Any]] = {"add_pooling_layer": False}"""

# transformers' own classes that the templates name, by what follows the family's name.
_DECODER_CLASSES = ("Attention", "DecoderLayer", "ForCausalLM", "MLP", "Model", "PreTrainedModel")
_ENCODER_CLASSES = ("ForMaskedLM", "ForSequenceClassification", "Layer", "Model", "Output", "PreTrainedModel")


def classes_of(native: Native) -> str:
    """The source of a model type's classes, its imports from typing and transformers before it."""
    names = (*_ENCODER_CLASSES, "SelfOutput") if native.encoder else _DECODER_CLASSES
    if native.own_classifier and not native.encoder:
        names = (*names, "ForSequenceClassification")
    known = {suffix: native.native_class(suffix) for suffix in (*names, "Config")}
    models = f"transformers.models.{native.folder}"
    imports = [
        "from typing import Any, ClassVar",
        f"from {models}.configuration_{native.folder} import {known['Config']}",
        f"from {models}.modeling_{native.folder} import {', '.join(sorted(known[suffix] for suffix in names))}",
    ]
    base = f"{native.prefix}PreTrainedModel"
    if not native.own_classifier:
        imports.append("from transformers.modeling_layers import GenericForSequenceClassification")
        classifier = f"GenericForSequenceClassification, {base}"
    else:
        classifier = f"{base}, {native.native_class('ForSequenceClassification')}"
    text = (_CONFIG + "\n" + (_ENCODER if native.encoder else _DECODER)).format(
        **known,
        prefix=native.prefix,
        title=native.title or native.name,
        model_type=PREFIX + native.model_type,
        counts="" if native.encoder else "; `num_hidden_layers` counts the trunk and its branches",
        attach="attach_encoder_surgery" if native.encoder else "attach_surgery",
        activation=native.activation,
        classifier=classifier,
        unsplit="".join(f'"{native.native_class(suffix)}", ' for suffix in native.unsplit),
        numbered=(_NUMBERED if native.numbered else "") + (_POOLER if native.pooler else ""),
        options=_OPTIONS if native.pooler else "",
    )
    registered = [f"{native.prefix}Config.register_for_auto_class()"]
    registered += [f'{native.prefix}{head}.register_for_auto_class("{auto}")' for head, auto in native.heads.items()]
    return "\n".join(imports) + "\n\n" + text + "\n\n" + "\n".join(registered) + "\n"
