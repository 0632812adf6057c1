"""Which of transformers' classes the upcycled ones of a derived model type are composed of: `anatomy` in config.json.

    "anatomy": {"autos": ["AutoModelForCausalLM"], "config": "models.qwen3_moe.configuration_qwen3_moe.Qwen3MoeConfig",
                "head": "models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeForCausalLM", …,
                "sites": [{"block": "mlp", "native": "….Qwen3MoeSparseMoeBlock", "role": "mlp"}, …],
                "trunk": {"num_hidden_layers": [4], …}}

`trunk` are the fields of config.json, by their path, that read otherwise without branches: a list of the one value, or
an empty list where the field is not there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from .natives import MODULE

# By these names grafts know the blocks beside which they stand.
ATTENTION, FFN = "self_attn", "mlp"
_CLASS = re.compile(
    r"(models\.[a-z][a-z0-9_]*\.(modeling|configuration)_[a-z0-9_]+|modeling_outputs)\.[A-Za-z][A-Za-z0-9_]*"
)
# Fields that are lists of names.
_LISTS = ("autos", "path", "layers")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_MODEL_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
AUTOS = ("AutoModelForCausalLM", "AutoModelForImageTextToText")


@dataclass(frozen=True)
class SiteClass:
    """A block of a layer that can carry grafts: its name there, its class, and the name by which grafts know it."""

    block: str
    native: str
    role: str


@dataclass(frozen=True)
class Composition:
    """Classes of transformers, each as its module below `transformers` and its name.

    `autos` are the auto classes that find `head`, its own first; `model` is what AutoModel finds; `text` the text
    decoder, whose list of layers is called `stack`, and whose config is `text_config`, at `path` in config.json.
    `output` is what `head` returns, `activation` the text config's field that names the activation, empty where it has
    none.
    """

    model_type: str
    autos: tuple[str, ...]
    config: str
    text_config: str
    path: tuple[str, ...]
    head: str
    model: str
    text: str
    stack: str
    output: str
    activation: str
    layers: tuple[str, ...]
    sites: tuple[SiteClass, ...]

    # What any `Native` says of itself.
    encoder = False
    prefix = "Upcycled"

    def __post_init__(self) -> None:
        classes = (self.config, self.text_config, self.head, self.model, self.text, self.output, *self.layers)
        for told in (*classes, *(site.native for site in self.sites)):
            if _CLASS.fullmatch(told) is None:
                raise ValueError(f"config.anatomy: `{told}` names no class of transformers' models")
        if _MODEL_TYPE.fullmatch(self.model_type) is None:
            raise ValueError(f"config.model_type: `{self.model_type}` is no name of a model type")
        blocks = (site.block for site in self.sites)
        for name in (self.stack, *self.path, *blocks, *((self.activation,) if self.activation else ())):
            if _NAME.fullmatch(name) is None:
                raise ValueError(f"config.anatomy: `{name}` is no name of a module or field")
        if not self.autos or set(self.autos) - set(AUTOS) or {site.role for site in self.sites} - {ATTENTION, FFN}:
            raise ValueError("config.anatomy: `autos` or a site's `role` is none that is known")
        short: dict[str, str] = {}
        for told in (*classes, *(site.native for site in self.sites)):
            if short.setdefault(short_name(told), told) != told:
                raise ValueError(f"config.anatomy: two classes are called `{short_name(told)}`")

    @property
    def title(self) -> str:
        """What people are told that it is."""
        return self.name

    @property
    def name(self) -> str:
        """The model type, as classes are called."""
        return short_name(self.config).removesuffix("Config")

    @property
    def auto(self) -> str:
        """The auto class that finds the model with its head."""
        return self.autos[0]

    def class_of(self, auto: str) -> str | None:
        """The upcycled class that an auto class finds; None where it finds none."""
        told = self.head if auto in self.autos else self.model if auto == "AutoModel" else None
        return None if told is None else upcycled(told)

    @property
    def auto_map(self) -> dict[str, str]:
        """The output config's `auto_map`."""
        classes = {"AutoConfig": self.config, "AutoModel": self.model, **dict.fromkeys(self.autos, self.head)}
        return {auto: f"{MODULE}.{upcycled(told)}" for auto, told in classes.items()}

    def to_json(self) -> dict[str, Any]:
        """As `anatomy` says it; the model type is told by the config itself."""
        told = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "model_type"}
        sites = [{each.name: getattr(site, each.name) for each in fields(site)} for site in self.sites]
        return told | {key: [*told[key]] for key in _LISTS} | {"sites": sites}


def read_composition(model_type: str, told: Any) -> Composition:
    """The composition in a config's `anatomy`. Raises ValueError where it is none: it may be a stranger's."""
    if not isinstance(told, Mapping):
        raise ValueError("config.anatomy is not there")
    known = {each.name for each in fields(Composition)} - {"model_type"}
    if lacking := sorted((known ^ set(told)) - {"trunk"}):
        raise ValueError(f"config.anatomy: `{lacking[0]}` is missing or unknown")
    sites = told["sites"]
    if not isinstance(sites, list) or not all(
        isinstance(site, Mapping) and set(site) == {"block", "native", "role"} and _texts(list(site.values()))
        for site in sites
    ):
        raise ValueError("config.anatomy: `sites` must be a list of blocks, each with `block`, `native` and `role`")
    listed = {key: told[key] for key in _LISTS}
    texts = {key: told[key] for key in known - {"sites", *_LISTS}}
    if not all(isinstance(value, list) and _texts(value) for value in listed.values()) or not _texts([*texts.values()]):
        raise ValueError("config.anatomy: names of classes must be texts")
    return Composition(
        model_type=model_type,
        autos=tuple(listed["autos"]),
        path=tuple(listed["path"]),
        layers=tuple(listed["layers"]),
        sites=tuple(SiteClass(**site) for site in sites),
        **texts,
    )


def _texts(values: Sequence[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def short_name(told: str) -> str:
    """A class by its name alone."""
    return told.rpartition(".")[2]


def upcycled(told: str) -> str:
    """What the upcycled twin of a class is called."""
    return f"Upcycled{short_name(told)}"
