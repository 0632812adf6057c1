"""What a joined file must know of each model type: the names of transformers' own classes, and of their twins.

One `Native` a model type; a plugin's family brings its own. Not shipped: `decoder.template` and `encoder.template` are
the named classes, composed of the runtime's parts and transformers' own, with these names to be filled in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files

from .rules import GraftRules

PREFIX = "upcycled_"


@dataclass(frozen=True, eq=False)
class Native:
    """One model type of transformers.

    `module` is its folder in `transformers.models`, `name` what its classes begin with (`own` names those that are
    called otherwise, by what they would be called after `name`). `twin` is what upcycled classes are called after
    `Upcycled`, where not as `name`. `activation` is the config's field for the FFN's activation.
    `own_classifier` says that transformers 5.0 has a sequence classifier of its own for it. Of an `encoder`,
    `numbered` says that layers get their own number, `pooler` that heads ask the base model for none.
    """

    model_type: str
    name: str
    title: str = ""
    module: str = ""
    twin: str = ""
    own: Mapping[str, str] = field(default_factory=dict)
    activation: str = "hidden_act"
    own_classifier: bool = True
    encoder: bool = False
    numbered: bool = False
    pooler: bool = False
    unsplit: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """The folder in `transformers.models`."""
        return self.module or self.model_type.replace("-", "_")

    @property
    def prefix(self) -> str:
        """What the names of upcycled classes begin with."""
        return f"Upcycled{self.twin or self.name}"

    @property
    def heads(self) -> dict[str, str]:
        """Heads that have an upcycled twin, and the auto class each is found by; "Model" is the base model."""
        return ENCODER_HEADS if self.encoder else HEADS

    def native_class(self, suffix: str) -> str:
        """The name of one of transformers' own classes."""
        return self.own.get(suffix, self.name + suffix)

    @property
    def auto_map(self) -> dict[str, str]:
        """The output config's `auto_map`."""
        classes = {auto: f"{self.prefix}{head}" for head, auto in self.heads.items()}
        return {auto: f"{MODULE}.{name}" for auto, name in ({"AutoConfig": f"{self.prefix}Config"} | classes).items()}


MODULE = "modeling_surgeon"
HEADS = {
    "Model": "AutoModel",
    "ForCausalLM": "AutoModelForCausalLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
}
ENCODER_HEADS = {
    "Model": "AutoModel",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
}

_GEMMA3_TEXT = {
    "Config": "Gemma3TextConfig",
    "Model": "Gemma3TextModel",
    "ForSequenceClassification": "Gemma3TextForSequenceClassification",
}

_BUILT_IN = (
    Native("llama", "Llama"),
    Native("mistral", "Mistral"),
    Native("qwen2", "Qwen2"),
    Native("qwen3", "Qwen3"),
    Native("gemma", "Gemma"),
    Native("gemma2", "Gemma2", title="Gemma 2", activation="hidden_activation"),
    Native(
        "gemma3_text",
        "Gemma3",
        title="Gemma 3 (text)",
        module="gemma3",
        twin="Gemma3Text",
        own=_GEMMA3_TEXT,
        activation="hidden_activation",
    ),
    Native("olmo2", "Olmo2", title="OLMo 2", own_classifier=False),
    Native("phi3", "Phi3", title="Phi-3"),
    Native("roberta", "Roberta", title="RoBERTa", encoder=True, numbered=True, pooler=True, unsplit=("Embeddings",)),
    Native("deberta", "Deberta", title="DeBERTa", encoder=True),
    Native("deberta-v2", "DebertaV2", title="DeBERTa-v2 and -v3", encoder=True),
)

NATIVES: dict[str, Native] = {native.model_type: native for native in _BUILT_IN}

_NUMBERED = """
    numbered = True"""

_POOLER = """

    def __init__(self, config: Any, add_pooling_layer: bool = True) -> None:
        super().__init__(config, add_pooling_layer=add_pooling_layer)"""

_OPTIONS = """
    base_options: ClassVar[dict[str, Any]] = {"add_pooling_layer": False}"""

# transformers' own classes that the templates import beside the config, by what follows the family's name.
_DECODER_CLASSES = ("Attention", "DecoderLayer", "ForCausalLM", "MLP", "Model", "PreTrainedModel")
_ENCODER_CLASSES = (
    "ForMaskedLM",
    "ForSequenceClassification",
    "Layer",
    "Model",
    "Output",
    "PreTrainedModel",
    "SelfOutput",
)


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
    names = _ENCODER_CLASSES if native.encoder else _DECODER_CLASSES
    base, generic = f"{native.prefix}PreTrainedModel", ""
    classifier = f"{base}, {native.native_class('ForSequenceClassification')}"
    if not native.own_classifier:
        generic = "\nfrom transformers.modeling_layers import GenericForSequenceClassification"
        classifier = f"GenericForSequenceClassification, {base}"
    elif not native.encoder:
        names = (*names, "ForSequenceClassification")
    known = {suffix: native.native_class(suffix) for suffix in names}
    template = files(__package__) / ("encoder.template" if native.encoder else "decoder.template")
    return template.read_text(encoding="utf-8").format(
        **known,
        Config=native.native_class("Config"),
        natives=", ".join(sorted(known.values())),
        generic=generic,
        folder=native.folder,
        prefix=native.prefix,
        title=native.title or native.name,
        model_type=PREFIX + native.model_type,
        grafts=f"{uses[0].source}," if len(uses) == 1 else _listed(uses),
        activation=native.activation,
        classifier=classifier,
        unsplit="".join(f'"{native.native_class(suffix)}", ' for suffix in native.unsplit),
        numbered=(_NUMBERED if native.numbered else "") + (_POOLER if native.pooler else ""),
        options=_OPTIONS if native.pooler else "",
        losses=_losses({name: what for use in uses for name, what in use.rules.losses.items()}),
    )


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
