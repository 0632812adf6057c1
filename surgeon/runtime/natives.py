"""What a joined file must know of each model type: the names of transformers' own classes, and of their twins.

One `Native` a model type; a plugin's family brings its own. `bundle` fills these names into the templates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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

    def class_of(self, auto: str) -> str | None:
        """The upcycled class that an auto class finds; None where it finds none."""
        return next((f"{self.prefix}{head}" for head, name in self.heads.items() if name == auto), None)

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
