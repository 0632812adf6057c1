"""The transformers classes from which a model type's upcycled classes are composed: `anatomy` in config.json.

    "anatomy": {"autos": ["AutoModelForCausalLM"], "config": "models.qwen3_moe.configuration_qwen3_moe.Qwen3MoeConfig",
                "head": "models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeForCausalLM", …,
                "sites": [{"block": "mlp", "native": "….Qwen3MoeSparseMoeBlock", "role": "mlp"}, …],
                "trunk": {"num_hidden_layers": [4], …}}

`heads` are further heads, each with the auto class that finds it and the class of its output, and a `prefix` where its
class uses another name for the base model than the other heads. `spans` are blocks that are not one module, as all
blocks of an encoder are: the module that reads the block's input, and the one whose output is added to the stream. Both
keys are left out where they are empty, and so is `first_position` where it is 0.

`trunk` are the fields of config.json, by path, whose values differ without branches: a list with the trunk's value, or
an empty list where the trunk does not have the field.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

# The model type of an output with grafts: `upcycled_` and its base's model type.
PREFIX = "upcycled_"
MODULE = "modeling_surgeon"
# The names that grafts use for the blocks next to which they run.
ATTENTION, FFN = "self_attn", "mlp"
_CLASS = re.compile(
    r"(models\.[a-z][a-z0-9_]*\.(modeling|configuration)_[a-z0-9_]+|modeling_outputs)\.[A-Za-z][A-Za-z0-9_]*"
)
# The modules of torch at which a block may begin or end.
TORCH_CLASSES = ("torch.nn.Dropout", "torch.nn.Linear")
# Fields that are lists of names.
_LISTS = ("autos", "path", "layers")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_PATH = re.compile(r"[A-Za-z][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)*")
_MODEL_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
AUTOS = ("AutoModelForCausalLM", "AutoModelForImageTextToText")
# The auto classes of heads that return no logits over the vocabulary.
OTHER_AUTOS = (
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
)
ENCODER_AUTOS = ("AutoModelForMaskedLM", *OTHER_AUTOS)


@dataclass(frozen=True)
class SiteClass:
    """A block of a layer that can carry grafts: its path in the layer, its class, and the grafts' name for it."""

    block: str
    native: str
    role: str


@dataclass(frozen=True)
class SpanClass:
    """A block of a layer that is not one module: its first reader and its last writer, by path and class.

    Both may be the same module. `role` is the grafts' name for the block.
    """

    reads: str
    reader: str
    writes: str
    writer: str
    role: str

    @property
    def modules(self) -> str:
        """The paths of the modules that the block consists of, separated by a space."""
        ends = self.writes.rpartition(".")[0] or self.writes
        return " ".join(dict.fromkeys((self.reads, ends)))


@dataclass(frozen=True)
class HeadClass:
    """A further head: the auto class that finds it, its class, and the class of its output.

    `prefix` is the base-model prefix that its upcycled class gets, where its native class's own differs from the
    model's; else empty.
    """

    auto: str
    native: str
    output: str
    prefix: str = ""


@dataclass(frozen=True)
class Composition:
    """The transformers classes from which upcycled classes are composed.

    Each is written as its module path below `transformers` and its name. `autos` are the auto classes that find `head`,
    first the one it was built by. `model` is the class that AutoModel finds. `text` is the text decoder (for an
    encoder, the base model); `stack` is the path of its list of layers, and `text_config` its config class, at `path`
    in config.json. `output` is the class of `head`'s output. `activation` is the text config's field that names the
    activation, empty where there is none. `first_position` is the first position of a text where the model itself
    passes positions to its decoder.
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
    heads: tuple[HeadClass, ...] = ()
    spans: tuple[SpanClass, ...] = ()
    first_position: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError where a name is of a wrong form, a role or auto class is not known, or names collide."""
        classes = self.classes
        ends = [told for span in self.spans for told in (span.reader, span.writer) if told not in TORCH_CLASSES]
        for told in (*classes, *ends):
            if _CLASS.fullmatch(told) is None:
                raise ValueError(f"config.anatomy: `{told}` names no class of transformers' models")
        if _MODEL_TYPE.fullmatch(self.model_type) is None:
            raise ValueError(f"config.model_type: `{self.model_type}` is no name of a model type")
        stated = (self.activation, *(head.prefix for head in self.heads))
        for name in (*self.path, *filter(None, stated)):
            if _NAME.fullmatch(name) is None:
                raise ValueError(f"config.anatomy: `{name}` is no name of a module or field")
        blocks = (site.block for site in self.sites)
        for name in (self.stack, *blocks, *(path for span in self.spans for path in (span.reads, span.writes))):
            if _PATH.fullmatch(name) is None:
                raise ValueError(f"config.anatomy: `{name}` is no path of a module")
        roles = {site.role for site in self.sites} | {span.role for span in self.spans}
        known = ENCODER_AUTOS if self.encoder else AUTOS
        if not self.autos or set(self.autos) - set(known) or roles - {ATTENTION, FFN}:
            raise ValueError("config.anatomy: `autos` or a site's `role` is none that is known")
        others = [head.auto for head in self.heads]
        if set(others) - set(OTHER_AUTOS) or len({*others, *self.autos}) < len(others) + len(self.autos):
            raise ValueError("config.anatomy: `heads` names an auto class that is not known, or one twice")
        if type(self.first_position) is not int or not 0 <= self.first_position < 1000:
            raise ValueError("config.anatomy: `first_position` is no small number")
        if self.encoder and (self.sites or self.path):
            raise ValueError("config.anatomy: `sites` and `path` are a decoder's")
        short: dict[str, str] = {}
        for told in (*classes, *ends):
            if short.setdefault(short_name(told), told) != told:
                raise ValueError(f"config.anatomy: two classes are called `{short_name(told)}`")

    @property
    def encoder(self) -> bool:
        """Whether the model reads a sequence in both directions and has no cache."""
        return not set(self.autos) & set(AUTOS)

    @property
    def classes(self) -> tuple[str, ...]:
        """Every transformers class, except those at the ends of blocks that are not one module."""
        return self.classes_beside(self.sites)

    def classes_beside(self, sites: Sequence[SiteClass]) -> tuple[str, ...]:
        """Return the classes in `classes`, with `sites` in place of all sites."""
        own = (self.config, self.text_config, self.head, self.model, self.text, self.output, *self.layers)
        further = (told for head in self.heads for told in (head.native, head.output))
        return (*own, *(site.native for site in sites), *further)

    @property
    def name(self) -> str:
        """The model type as it is written in class names."""
        return short_name(self.config).removesuffix("Config")

    @property
    def auto(self) -> str:
        """The auto class that finds the model with its head."""
        return self.autos[0]

    def class_of(self, auto: str) -> str | None:
        """Return the upcycled class that an auto class finds; None where it finds none."""
        told = self._found.get(auto)
        return None if told is None else upcycled(told)

    @property
    def _found(self) -> dict[str, str]:
        """The native class that each auto class finds."""
        further = {head.auto: head.native for head in self.heads}
        return {"AutoModel": self.model, **dict.fromkeys(self.autos, self.head), **further}

    @property
    def auto_map(self) -> dict[str, str]:
        """The `auto_map` of the output's config."""
        classes = {"AutoConfig": self.config, **self._found}
        return {auto: f"{MODULE}.{upcycled(told)}" for auto, told in classes.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the composition in the form of `anatomy`, without the model type, which the config contains itself."""
        told = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "model_type"}
        listed = {key: [_stated(each) for each in told.pop(key)] for key in _ENTRIES}
        kept = {key: value for key, value in listed.items() if value or key == "sites"}
        first = {"first_position": told.pop("first_position")} if self.first_position else {}
        told.pop("first_position", None)
        return told | {key: [*told[key]] for key in _LISTS} | kept | first


# Keys of `anatomy` that are lists of entries.
_ENTRIES = {"sites": SiteClass, "heads": HeadClass, "spans": SpanClass}


def read_composition(model_type: str, told: Any) -> Composition:
    """Return the composition in a config's `anatomy`.

    Raises ValueError where it is invalid: the config is untrusted.
    """
    if not isinstance(told, Mapping):
        raise ValueError("config.anatomy is not there")
    known = {each.name for each in fields(Composition)} - {"model_type"}
    told = {"heads": [], "spans": [], "first_position": 0} | dict(told)
    if lacking := sorted((known ^ set(told)) - {"trunk"}):
        raise ValueError(f"config.anatomy: `{lacking[0]}` is missing or unknown")
    entries: dict[str, Any] = {key: tuple(_entries(key, kind, told[key])) for key, kind in _ENTRIES.items()}
    listed = {key: told[key] for key in _LISTS}
    texts = {key: told[key] for key in known - {*_ENTRIES, *_LISTS, "first_position"}}
    if not all(isinstance(value, list) and _texts(value) for value in listed.values()) or not _texts([*texts.values()]):
        raise ValueError("config.anatomy: names of classes must be texts")
    return Composition(
        model_type=model_type,
        autos=tuple(listed["autos"]),
        path=tuple(listed["path"]),
        layers=tuple(listed["layers"]),
        first_position=told["first_position"],
        **entries,
        **texts,
    )


def composition_of(config: Mapping[str, Any]) -> Composition | None:
    """Return the composition in a grafted checkpoint's config; None where the config has no valid one."""
    model_type = str(config.get("model_type"))
    if not model_type.startswith(PREFIX):
        return None
    try:
        return read_composition(model_type.removeprefix(PREFIX), config.get("anatomy"))
    except ValueError:
        return None


def _entries(key: str, kind: Any, told: Any) -> Iterator[Any]:
    """Yield the entries of a list of the `anatomy` as instances of `kind`. Raises ValueError."""
    names = [each.name for each in fields(kind) if each.default is MISSING]
    known = {each.name for each in fields(kind)}
    for entry in told if isinstance(told, list) else (None,):
        if not isinstance(entry, Mapping) or not set(names) <= set(entry) <= known or not _texts(list(entry.values())):
            raise ValueError(f"config.anatomy: `{key}` must be a list of entries, each with {', '.join(names)}")
        yield kind(**entry)


def _stated(entry: Any) -> dict[str, str]:
    """Return an entry's fields, except those that equal their default."""
    return {each.name: getattr(entry, each.name) for each in fields(entry) if getattr(entry, each.name) != each.default}


def _texts(values: Sequence[Any]) -> bool:
    """Return whether all values are texts."""
    return all(isinstance(value, str) for value in values)


def short_name(told: str) -> str:
    """Return the name of a class without its module."""
    return told.rpartition(".")[2]


def upcycled(told: str) -> str:
    """Return the name of the upcycled class of a native class."""
    return f"Upcycled{short_name(told)}"
