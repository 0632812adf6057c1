"""A judgement of a checkpoint's folder: whose code it contains, and which settings lead a loader to further files.

Each folder is judged by itself, from file names and JSON only: nothing is imported, and no code of the folder runs.
Code is a `.py` file anywhere in the folder, a JSON field that makes transformers run code or fetch a compiled kernel,
or a reference of the form "repo--module.Class". Code counts as surgeon's own only if it is byte for byte the code that
this version ships for the folder's config. Where transformers implements a model type itself, the folder's code for
that type is left out, as transformers does without `trust_remote_code` (`without_code`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from surgeon.checkpoint.source import MAX_SIDE_FILE_BYTES, Source, is_side_file
from surgeon.checkpoint.weights import INDEX_FILE, QUANTISATION, SINGLE_FILE, in_full, quantisation
from surgeon.common.library import has_class, has_own, has_type
from surgeon.common.plugins import any_installed
from surgeon.errors import BadInput, printable
from surgeon.grafts.bundle import CODE_FILE, bundle
from surgeon.grafts.composition import composition_of

MAX_CODE_BYTES = 1_000_000

Code = Literal["none", "shipped", "foreign"]
Classes = Literal["installed", "shipped", "own"]

# Vocabularies, which are not searched: they are large and contain no settings.
_VOCABULARIES = frozenset({"tokenizer.json", "vocab.json", "added_tokens.json", "tekken.json"})
# Files that transformers reads when it loads a processor; surgeon copies some of them to the output.
_PROCESSORS = re.compile(r"[A-Za-z0-9_]*processor_config\.json")
_PARSED = "config.json"

# Fields that name code to run, whatever their value, unless the value is empty.
_CODE_FIELDS = frozenset({"auto_map", "custom_pipelines", "custom_generate", "kernel_config"})
# Auto classes other than a model's in an `auto_map`, each with the settings that name transformers' own class.
_NAMED_BY = {
    "AutoTokenizer": ("tokenizer_class",),
    "AutoProcessor": ("processor_class",),
    "AutoImageProcessor": ("image_processor_type",),
    "AutoFeatureExtractor": ("feature_extractor_type", "image_processor_type"),
    "AutoVideoProcessor": ("video_processor_type",),
}
_TOKENIZER_SETTINGS = "tokenizer_config.json"
# Switches that let a loader run code.
_SWITCHES = frozenset({"trust_remote_code", "use_kernels", "allow_all_kernels"})
# Fields that may name a Hub repository with compiled attention or expert kernels: transformers downloads these.
_IMPLEMENTATION = re.compile(r"_*(attn|experts)_implementation.*", re.DOTALL)
_REFERENCE = re.compile(r"(?:[\w.-]+/)?[\w.-]+--[\w./-]+\.[A-Za-z_]\w*")
_LONGEST_REFERENCE = 300
_MOST_NAMED = 6
# A field with the checkpoint's origin, often a cache path. Such a path also contains `--`, but is no reference to code.
_ORIGIN = "name_or_path"

# Fields of config.json that make transformers read other files, or build a model that differs from the other fields.
_ELSEWHERE = {
    "transformers_weights": "names another file of weights than the index",
    "configuration_files": "names other config files, of which transformers would take one",
    "fusion_config": "lets transformers replace modules of the model",
    "distributed_config": "lets transformers spread the model over devices",
    "attribute_map": "gives the fields of the config other meanings",
    "sub_configs": "gives parts of the config other classes",
    "sub_configs_defaults": "gives parts of the config other classes",
    "extra_files": "names further files of weights",
    "extra_config_files": "names further config files",
}
_QUANTISED = (QUANTISATION, "compression_config")


class ForeignCode(BadInput):
    """Raised where a folder needs its own code and the user does not trust it."""


@dataclass(frozen=True)
class Brought:
    """The code in a checkpoint's folder.

    `code` states its origin: none, shipped by surgeon, or foreign. `found` describes the first thing that is not
    surgeon's (empty if there is none). `scripts` lists every `.py` file. `classes` states the origin of the model's
    classes: the `installed` transformers, the code that surgeon `shipped`, or the folder's `own` code. A folder may
    contain foreign code that its model does not need.
    """

    code: Code
    found: str
    scripts: tuple[str, ...]
    classes: Classes


NO_CODE = Brought("none", "", (), "installed")


def brought_by(config: Mapping[str, Any], source: Source) -> Brought:
    """Return the code in a folder whose config.json is `config`.

    Raises BadInput where a necessary file is unreadable.
    """
    listing = source.listing()
    scripts = tuple(name for name in source.tree() if name.lower().endswith(".py"))
    mapped = config.get("auto_map") or None
    ours = mapped is not None and _is_shipped(config, listing, source)
    classes: Classes = "installed" if mapped is None else "shipped" if ours else "own"
    found = _not_ours(config, listing, source, scripts, ours=ours)
    code: Code = "foreign" if found else "shipped" if ours else "none"
    return Brought(code, found, scripts, classes)


def _is_shipped(config: Mapping[str, Any], listing: Mapping[str, int], source: Source) -> bool:
    """Return whether the folder's code file and `auto_map` are exactly what this version ships for `config`."""
    native = composition_of(config)
    if native is None or config.get("auto_map") != native.auto_map or CODE_FILE not in listing:
        return False
    return source.small(CODE_FILE, max_bytes=MAX_CODE_BYTES) == bundle(config)


def _not_ours(
    config: Mapping[str, Any], listing: Mapping[str, int], source: Source, scripts: Iterable[str], *, ours: bool
) -> str:
    """Describe the first thing in the folder that is, or leads to, code other than surgeon's; "" if there is none.

    `ours`: the folder's code file is the code that this version ships.
    """
    native = composition_of(config)
    if config.get("auto_map") and (native is None or config["auto_map"] != native.auto_map):
        return f"{_PARSED} has an `auto_map`"
    if lying := [name for name in scripts if not (ours and name == CODE_FILE)]:
        makers = "surgeon and its plugins ship" if any_installed() else "surgeon ships"
        return f"{printable(lying[0])} lies in it, which is not what this version of {makers}"
    if config.get("auto_map") and not ours:
        return f"{_PARSED} has an `auto_map` to {CODE_FILE}, which is not there"
    for name, content in _settings(config, listing, source):
        if found := leads_to_code(content, except_auto_map=name == _PARSED):
            return f"{printable(name)} {found}"
    return ""


def _settings(config: Mapping[str, Any], listing: Mapping[str, int], source: Source) -> Iterator[tuple[str, Any]]:
    """Yield each JSON file of loading settings with its content, parsed by Python's json as loaders do.

    Files that cannot be read or parsed are skipped.
    """
    yield _PARSED, config
    for name, size in listing.items():
        carried = is_side_file(name) and name.endswith(".json") and name not in _VOCABULARIES
        if name == _PARSED or size > MAX_SIDE_FILE_BYTES or not (carried or _PROCESSORS.fullmatch(name)):
            continue
        try:
            yield name, json.loads(source.small(name, max_bytes=MAX_SIDE_FILE_BYTES))
        except (BadInput, ValueError, RecursionError):
            # For example a link out of the folder. Such a file is neither read nor copied, and `notes` reports it.
            continue


def leads_to_code(content: Any, *, except_auto_map: bool = False) -> str:
    """Describe what makes a loader run or fetch code, at any depth of parsed JSON; return "" if nothing does.

    With `except_auto_map`, a top-level `auto_map` is ignored: the caller has judged it.
    """
    if isinstance(content, dict) and except_auto_map:
        content = {key: value for key, value in content.items() if key != "auto_map"}
    for key, value in _walk(content):
        if (key in _CODE_FIELDS and value not in (None, {}, [], "")) or (key in _SWITCHES and value):
            return f"has `{key}`"
        if _IMPLEMENTATION.fullmatch(key) and any(isinstance(text, str) and "/" in text for _, text in _walk(value)):
            return f"asks for kernels from the Hub (`{printable(key)}`)"
        short = isinstance(value, str) and len(value) <= _LONGEST_REFERENCE
        # The form of a reference to code in a repository: "repo--module.Class".
        if short and not key.endswith(_ORIGIN) and _REFERENCE.fullmatch(value):
            return f"refers to code elsewhere ({printable(value)})"
    return ""


def _walk(content: Any) -> Iterator[tuple[str, Any]]:
    """Yield every value at any depth with its key; list items are yielded with the key of their list."""
    waiting: list[tuple[str, Any]] = [("", content)]
    while waiting:
        key, value = waiting.pop()
        yield key, value
        if isinstance(value, dict):
            waiting.extend((str(inner), item) for inner, item in value.items())
        elif isinstance(value, list):
            waiting.extend((key, item) for item in value)


def check_trusted(brought: Brought, shown: str, *, trust_remote_code: bool) -> None:
    """Raise ForeignCode where the folder has code that is not surgeon's and the user does not trust it."""
    if brought.code == "foreign" and not trust_remote_code:
        raise _foreign(shown, brought.found)


def _foreign(shown: str, found: str) -> ForeignCode:
    """Return the error for a folder that needs its own code; `found` describes that code."""
    way = "read it, then remove it or pass `--trust-remote-code`"
    if found.startswith(CODE_FILE):
        way = f"where an earlier surgeon wrote it, `surgeon refresh {shown}` writes this version's; else {way}"
    return ForeignCode(f"{shown}: brings code of its own ({found}), which surgeon neither runs nor copies; {way}")


@dataclass(frozen=True)
class WithoutCode:
    """A folder's settings once its own code is left out.

    `config` is the config without code. `settings` maps the names of other changed files to their new content. `note`
    reports what is left out. `model_code` is the model class that config.json's `auto_map` named, or "".
    """

    config: dict[str, Any]
    settings: Mapping[str, bytes]
    note: str
    model_code: str


def without_code(config: Mapping[str, Any], source: Source, brought: Brought) -> WithoutCode:
    """Return a folder's settings without its foreign code, as transformers reads them without trust.

    Transformers then uses its own classes. Raises ForeignCode where it lacks the model type or a class that the code
    has, or where anything else leads to code.
    """
    if not has_type(config.get("model_type")):
        raise _foreign(source.shown, brought.found)
    read = dict(_settings(config, source.listing(), source))
    beside = looked_in(config, read.get(_TOKENIZER_SETTINGS))
    left: list[str] = []
    settings: dict[str, bytes] = {}
    kept: dict[str, Any] = dict(config)
    for name, content in read.items():
        found = only_in_code(content, beside, of_model=name == _PARSED)
        alone = content if found or not _mapped(content) else _alone(name, content)
        if found := found or leads_to_code(alone):
            raise _foreign(source.shown, f"{printable(name)} {found}")
        if alone is content:
            continue
        left.append(f"{printable(name)}'s `auto_map`")
        if name == _PARSED:
            kept = alone
        else:
            settings[name] = _written(name, alone)
    left += map(printable, sorted(brought.scripts))
    if len(left) > _MOST_NAMED:
        left = [*left[: _MOST_NAMED - 1], f"{len(left) - _MOST_NAMED + 1} more"]
    words = f"{', '.join(left[:-1])} and {left[-1]} are" if left[1:] else f"{left[0]} is"
    mapped = config.get("auto_map")
    built = next((str(mapped[a]) for a in mapped if a.startswith("AutoModel")), "") if isinstance(mapped, dict) else ""
    note = f"{words} left out: transformers has {config['model_type']} itself"
    return WithoutCode(kept, settings, note, printable(built, 60))


def _alone(name: str, content: Any) -> Any:
    """Return parsed settings without any `auto_map`. Raises BadInput where they are nested too deep."""
    try:
        return without_auto_map(content)
    except RecursionError:
        raise _unwritable(name) from None


def _written(name: str, content: Any) -> bytes:
    """Return settings as the bytes of a JSON file. Raises BadInput where they cannot be written."""
    try:
        return f"{json.dumps(content, indent=2, ensure_ascii=False)}\n".encode()
    except (UnicodeEncodeError, RecursionError):
        raise _unwritable(name) from None


def _unwritable(name: str) -> BadInput:
    """Return the error for a settings file that cannot be written without its `auto_map`."""
    return BadInput(
        f"{printable(name)}: half of a UTF-16 pair in it, or brackets nested too deep to write it without its"
        " `auto_map`; take that out of the file"
    )


def without_auto_map(settings: Any) -> Any:
    """Return parsed JSON without any `auto_map`, at every depth."""
    return json.loads(
        json.dumps(settings), object_hook=lambda part: {key: part[key] for key in part if key != "auto_map"}
    )


def names_code(config: Mapping[str, Any], source: Source) -> bool:
    """Return whether any settings file of a folder has an `auto_map`."""
    return any(_mapped(content) for _, content in _settings(config, source.listing(), source))


def _mapped(content: Any) -> list[dict[str, Any]]:
    """Return the objects in parsed JSON, at any depth, that have a non-empty `auto_map`."""
    return [part for _, part in _walk(content) if isinstance(part, dict) and part.get("auto_map")]


def looked_in(config: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Return the fields in which transformers looks up class names: config.json, overridden by the tokenizer's
    settings.

    The model type is always config.json's.
    """
    over = tokenizer if isinstance(tokenizer, dict) else {}
    return {**config, **over, "model_type": config.get("model_type")}


def only_in_code(settings: Any, beside: Mapping[str, Any], *, of_model: bool = False) -> str:
    """Describe a class that an `auto_map` in the settings, at any depth, names and transformers lacks; "" if none.

    Args:
        settings: Parsed JSON. An `auto_map` that is a list belongs to a tokenizer.
        beside: The result of `looked_in`.
        of_model: Whether the settings are config.json's, for which only models, configs and tokenizers are checked.
    """
    for part in _mapped(settings):
        mapped = part["auto_map"]
        if not isinstance(mapped, dict | list):
            return "has an `auto_map` that is neither a list nor names"
        for auto in mapped if isinstance(mapped, dict) else ("AutoTokenizer",):
            if of_model and auto != "AutoTokenizer" and not _of_models(auto):
                continue
            if lacking := _lacking(auto, part, beside):
                return f"has an `auto_map` for {printable(auto)}, and {lacking}"
    return ""


def _of_models(auto: str) -> bool:
    """Return whether an auto class is for configs or models, not for tokenizers or processors."""
    return auto == "AutoConfig" or auto.startswith("AutoModel")


def _lacking(auto: str, part: Mapping[str, Any], beside: Mapping[str, Any]) -> str:
    """Describe the class that transformers lacks: one that the settings name, or one for the model type.

    Return "" if none.
    """
    if _of_models(auto):
        model_type = part.get("model_type") or beside["model_type"]
        return "" if has_type(model_type) else f"transformers has no {printable(str(model_type), 60)}"
    keys = _NAMED_BY.get(auto, ())
    looked = (part, beside) if auto == "AutoTokenizer" else (part,)
    named = next(filter(None, ([s[key] for key in keys if s.get(key) is not None] for s in looked)), [])
    if named:
        return "" if all(map(has_class, named)) else f"transformers has no {printable(str(named[0]), 60)}"
    return "" if has_own(auto, beside["model_type"]) else "no class of transformers beside it"


def check_config(config: Mapping[str, Any]) -> None:
    """Raise BadInput for a config.json that would make transformers load something other than it describes."""
    refuse_quantised(config)
    for key, does in _ELSEWHERE.items():
        if config.get(key) not in (None, {}, [], ""):
            raise BadInput(f"config.json: `{key}` {does}; take it out, if the model does not need it")
    for key in config:
        # transformers sets a config's fields as attributes; Python itself needs the attributes with these names.
        if key.startswith("__"):
            raise BadInput(f"config.json: `{printable(key)}` would overwrite what Python keeps there; take it out")


def refuse_quantised(config: Mapping[str, Any], *, passed: bool = True) -> None:
    """Raise BadInput for the config of a quantised checkpoint, also where only its text model is marked as quantised.

    With `passed`, quantisation methods whose tensors can be moved as bytes are accepted.
    """
    if passed and quantisation(config) is not None:
        config = {key: value for key, value in config.items() if key != QUANTISATION}
    for key, method in _walk(dict(config)):
        if key in _QUANTISED and method is not None:
            kind = method.get("quant_method", "unknown method") if isinstance(method, Mapping) else "unknown method"
            raise BadInput(
                f"config.json: the base is quantised ({printable(str(kind))}); surgery needs the full-precision"
                f" weights, operate on those and quantise the output{in_full(kind)}"
            )


def check_written(config: Mapping[str, Any], shown: str, *, trusted: Any = None) -> None:
    """Raise BadInput for a config about to be written that leads to code other than surgeon's, or to other files.

    Used for configs from a manifest, which anybody can have edited. `trusted` is the `auto_map` of a folder whose own
    code the user trusts.
    """
    native = composition_of(config)
    mapped = config.get("auto_map") or None
    found = leads_to_code(dict(config), except_auto_map=True)
    if mapped is not None and (native is None or mapped != native.auto_map) and mapped != trusted:
        found = "has `auto_map`"
    if found:
        raise BadInput(f"{shown}: the config.json kept in it {found}; was it edited by hand?")
    check_config(config)


_ADAPTER = re.compile(r"adapter_(config\.json|model(\..*)?\.(safetensors|bin))")
_RANK_SHARD = re.compile(r"shard-[0-9]{5}-model-[0-9]{5}-of-[0-9]{5}\.safetensors")
_GENERATE = "custom_generate"


def beside_weights(listing: Mapping[str, int], shards: Iterable[str]) -> dict[str, str]:
    """Return the files next to the weights that would make loaders load something else, each with its effect.

    Surgeon ignores these files: it never reads them, copies them or shows them to transformers.
    """
    shards = tuple(shards)
    found: dict[str, str] = {}
    for name in listing:
        if name in shards:
            continue
        if _ADAPTER.fullmatch(name):
            found[name] = "part of a PEFT adapter, which transformers would add to the model"
            if name == "adapter_config.json":
                found[name] += "; `merge_adapter` merges it into the weights (`from:` this folder)"
        elif name.rstrip("/") == _GENERATE:
            found[name] = "transformers would look for code there that replaces `generate`"
        elif _RANK_SHARD.fullmatch(name):
            found[name] = "transformers would take it for a checkpoint saved by several processes, and load that"
    return found


def strays(listing: Mapping[str, int], shards: Iterable[str]) -> dict[str, str]:
    """Return the files that surgeon never writes next to an output's weights, each with its effect or appearance."""
    shards = tuple(shards)
    found = beside_weights(listing, shards)
    for name in listing:
        if name.endswith(".index.json") and (name != INDEX_FILE or SINGLE_FILE in shards):
            found[name] = "an index of other weights"
        elif name.endswith(".safetensors") and name not in shards and name not in found:
            found[name] = "weights that the output does not have"
    return found
