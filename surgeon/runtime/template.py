"""The one template: the named classes of a model type, composed of the runtime's parts and transformers' own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .natives import PREFIX, Native
from .rules import GraftRules

_CONFIG = '''
class {prefix}Config({Config}):
    """The native config and `surgery`{counts}."""

    model_type = "{model_type}"
    encoder_surgery: ClassVar[bool] = {encoder}
    grafts: ClassVar[tuple[Graft, ...]] = ({grafts})

    def __init__(self, surgery: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        {attach}(self, surgery, ({heads}))
'''

_DECODER = '''
class {prefix}Attention(AttentionSite, {Attention}):
    """The native attention, able to carry grafts."""


class {prefix}MLP(FeedForwardSite, {MLP}):
    """The native MLP, able to carry grafts."""

    activation_field = "{activation}"


class {prefix}Branch(BranchLayer, {DecoderLayer}):
    """The expanded twin of a trunk layer."""

    site_classes: ClassVar[dict[str, Any]] = {{"self_attn": {prefix}Attention, "mlp": {prefix}MLP}}


class {prefix}DecoderLayer(UpcycledLayer, {DecoderLayer}):
    """A layer of the trunk."""

    site_classes: ClassVar[dict[str, Any]] = {{"self_attn": {prefix}Attention, "mlp": {prefix}MLP}}
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


@dataclass
class UpcycledCausalLMOutput(CausalLMOutputWithPast):
    """The native output, and in training the auxiliary losses before their weights (None where they are off).{losses}


@dataclass
class UpcycledSequenceClassifierOutput(SequenceClassifierOutputWithPast):
    """The native output, and in training the auxiliary losses before their weights (None where they are off).{losses}


class {prefix}ForCausalLM(UpcycledCausalLM, {prefix}PreTrainedModel, {ForCausalLM}):
    """The language model."""

    base_class = {prefix}Model
    output_class = UpcycledCausalLMOutput


class {prefix}ForSequenceClassification(
    UpcycledSequenceClassifier, {classifier}
):
    """The sequence classifier."""

    base_class = {prefix}Model
    output_class = UpcycledSequenceClassifierOutput
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


@dataclass
class UpcycledMaskedLMOutput(MaskedLMOutput):
    """The native output, and in training the auxiliary losses before their weights (None where they are off).{losses}


@dataclass
class UpcycledEncoderClassifierOutput(SequenceClassifierOutput):
    """The native output, and in training the auxiliary losses before their weights (None where they are off).{losses}


class {prefix}ForMaskedLM(UpcycledEncoderHead, {prefix}PreTrainedModel, {ForMaskedLM}):
    """The masked language model."""

    base_class = {prefix}Model
    output_class = UpcycledMaskedLMOutput{options}


class {prefix}ForSequenceClassification(
    UpcycledEncoderHead, {prefix}PreTrainedModel, {ForSequenceClassification}
):
    """The sequence classifier."""

    base_class = {prefix}Model
    output_class = UpcycledEncoderClassifierOutput{options}
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


@dataclass(frozen=True)
class Use:
    """A graft in a joined file: its rules, and what it takes by name from other parts (key, module, name)."""

    rules: GraftRules
    taken: tuple[tuple[str, str, str], ...] | None

    @property
    def source(self) -> str:
        """How the config class makes it: `ControlGraft({"lerp": Lerp})`."""
        if self.taken is None:
            return f"{self.rules.module}()"
        taken = ", ".join(f'"{key}": {name}' for key, _, name in self.taken)
        return f"{self.rules.module}({{{taken}}})"


def classes_of(native: Native, uses: tuple[Use, ...]) -> str:
    """The source of a model type's classes with these grafts, its imports from typing and transformers before it."""
    names = (*_ENCODER_CLASSES, "SelfOutput") if native.encoder else _DECODER_CLASSES
    if native.own_classifier and not native.encoder:
        names = (*names, "ForSequenceClassification")
    known = {suffix: native.native_class(suffix) for suffix in (*names, "Config")}
    models = f"transformers.models.{native.folder}"
    outputs = "MaskedLMOutput, SequenceClassifierOutput"
    if not native.encoder:
        outputs = "CausalLMOutputWithPast, SequenceClassifierOutputWithPast"
    imports = [
        "from dataclasses import dataclass",
        "from typing import Any, ClassVar",
        "import torch",
        f"from transformers.modeling_outputs import {outputs}",
        f"from {models}.configuration_{native.folder} import {known['Config']}",
        f"from {models}.modeling_{native.folder} import {', '.join(sorted(known[suffix] for suffix in names))}",
    ]
    base = f"{native.prefix}PreTrainedModel"
    if not native.own_classifier:
        imports.append("from transformers.modeling_layers import GenericForSequenceClassification")
        classifier = f"GenericForSequenceClassification, {base}"
    else:
        classifier = f"{base}, {native.native_class('ForSequenceClassification')}"
    fields = {name: what for use in uses for name, what in use.rules.losses.items()}
    text = (_CONFIG + "\n" + (_ENCODER if native.encoder else _DECODER)).format(
        **known,
        prefix=native.prefix,
        title=native.title or native.name,
        model_type=PREFIX + native.model_type,
        counts="" if native.encoder else "; `num_hidden_layers` counts the trunk and its branches",
        encoder=native.encoder,
        grafts="".join(f"{use.source}, " for use in uses).strip() if len(uses) == 1 else _listed(uses),
        heads=", ".join(f'"{head}"' for head in native.heads if head != "Model"),
        attach="attach_encoder_surgery" if native.encoder else "attach_surgery",
        activation=native.activation,
        classifier=classifier,
        unsplit="".join(f'"{native.native_class(suffix)}", ' for suffix in native.unsplit),
        numbered=(_NUMBERED if native.numbered else "") + (_POOLER if native.pooler else ""),
        options=_OPTIONS if native.pooler else "",
        losses=_losses(fields),
    )
    registered = [f"{native.prefix}Config.register_for_auto_class()"]
    registered += [f'{native.prefix}{head}.register_for_auto_class("{auto}")' for head, auto in native.heads.items()]
    return "\n".join(imports) + "\n\n" + text + "\n\n" + "\n".join(registered) + "\n"


def _listed(uses: tuple[Use, ...]) -> str:
    """The grafts one a line, as a tuple that ends with a comma stays."""
    return "".join(f"\n        {use.source}," for use in uses) + ("\n    " if uses else "")


def _losses(fields: Mapping[str, str]) -> str:
    """The rest of an output class from its docstring on: what its own fields are, and they themselves."""
    if not fields:
        return '"""'
    told = "".join(f"\n    {name}: {what}." for name, what in fields.items())
    held = "".join(f"\n    {name}: torch.FloatTensor | None = None" for name in fields)
    return f'\n{told}\n    """\n{held}'
