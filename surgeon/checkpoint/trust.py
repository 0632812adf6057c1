"""Whose code a checkpoint brings, and what in its folder would lead a loader away from its config and weights.

Judged for each folder by itself, from names and JSON alone: nothing is imported, nothing of the folder runs. Code is
a `.py` file anywhere in the folder, a JSON field that makes transformers run code or fetch a compiled kernel, and a
reference of the form "repo--module.Class". It is surgeon's own only if it is byte for byte what this version ships for
the folder's config. Where transformers has a model type itself, the code that a folder brings for it is left out, as
transformers does without trust (`without_code`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal

from packaging.version import Version

from surgeon.checkpoint.source import MAX_SIDE_FILE_BYTES, Source, is_side_file
from surgeon.checkpoint.weights import INDEX_FILE, QUANTISATION, SINGLE_FILE, in_full, quantisation
from surgeon.common.library import has_class, has_own, has_type
from surgeon.errors import BadInput, printable
from surgeon.grafts.bundle import CODE_FILE, bundle
from surgeon.grafts.composition import PREFIX, composition_of

MAX_CODE_BYTES = 1_000_000

Code = Literal["none", "shipped", "foreign"]
Classes = Literal["installed", "shipped", "own"]

# Vocabularies: large, and nothing in them is a setting.
_VOCABULARIES = frozenset({"tokenizer.json", "vocab.json", "added_tokens.json", "tekken.json"})
# Read where a processor is loaded; surgeon carries some of them along.
_PROCESSORS = re.compile(r"[A-Za-z0-9_]*processor_config\.json")
_PARSED = "config.json"

# Fields that name code to run: whatever they hold, unless it is nothing at all.
_CODE_FIELDS = frozenset({"auto_map", "custom_pipelines", "custom_generate", "kernel_config"})
# What an `auto_map` may name a class for beside a model, and the settings that name transformers' own.
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
# Attention or experts by the name of a Hub repository: transformers downloads its compiled kernels.
_IMPLEMENTATION = re.compile(r"_*(attn|experts)_implementation.*", re.DOTALL)
_REFERENCE = re.compile(r"(?:[\w.-]+/)?[\w.-]+--[\w./-]+\.[A-Za-z_]\w*")
_LONGEST_REFERENCE = 300
_MOST_NAMED = 6
# By which name the grafts of earlier versions looked the cache up, and since when transformers gives it another.
_OLD_CACHE, _CACHE_RENAMED = b'.get("past_key_values")', Version("5.24")
# Where a checkpoint came from: often the path of a cache, which is spelled with `--` too.
_ORIGIN = "name_or_path"

# Fields of config.json by which transformers reads other files, or builds another model than the rest describes.
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
    """A folder needs code of its own, which the user does not trust."""


@dataclass(frozen=True)
class Brought:
    """What a folder brings: whose `code`, what was `found` that is not surgeon's, every script in it, and `classes`.

    `classes` says which the model is built of: those of the `installed` transformers, those that surgeon `shipped`, or
    the folder's `own`. A folder may hold foreign code that its model does not need.
    """

    code: Code
    found: str
    scripts: tuple[str, ...]
    classes: Classes


NO_CODE = Brought("none", "", (), "installed")


def brought_by(config: Mapping[str, Any], source: Source) -> Brought:
    """Judge a folder whose config.json is `config`. Raises BadInput where a file that must be read cannot be."""
    listing = source.listing()
    scripts = tuple(name for name in source.tree() if name.lower().endswith(".py"))
    mapped = config.get("auto_map") or None
    ours = mapped is not None and _is_shipped(config, listing, source)
    classes: Classes = "installed" if mapped is None else "shipped" if ours else "own"
    found = _not_ours(config, listing, source, scripts, ours=ours)
    code: Code = "foreign" if found else "shipped" if ours else "none"
    return Brought(code, found, scripts, classes)


def _is_shipped(config: Mapping[str, Any], listing: Mapping[str, int], source: Source) -> bool:
    native = composition_of(config)
    if native is None or config.get("auto_map") != native.auto_map or CODE_FILE not in listing:
        return False
    return source.small(CODE_FILE, max_bytes=MAX_CODE_BYTES) == bundle(config)


def _not_ours(
    config: Mapping[str, Any], listing: Mapping[str, int], source: Source, scripts: Iterable[str], *, ours: bool
) -> str:
    """The first thing in the folder that is, or leads to, code which is not surgeon's; nothing where there is none."""
    native = composition_of(config)
    if config.get("auto_map") and (native is None or config["auto_map"] != native.auto_map):
        earlier = str(config.get("model_type")).startswith(PREFIX) and "anatomy" not in config
        of_what = " of an earlier surgeon, whose code this version does not ship" if earlier else ""
        return f"{_PARSED} has an `auto_map`{of_what}"
    if lying := [name for name in scripts if not (ours and name == CODE_FILE)]:
        found = f"{printable(lying[0])} lies in it, which is not what this version of surgeon ships"
        wrong = known_wrong(source) if lying[0] == CODE_FILE else ""
        return f"{found}; {wrong}" if wrong else found
    if config.get("auto_map") and not ours:
        return f"{_PARSED} has an `auto_map` to {CODE_FILE}, which is not there"
    for name, content in _settings(config, listing, source):
        if found := leads_to_code(content, except_auto_map=name == _PARSED):
            return f"{printable(name)} {found}"
    return ""


def known_wrong(source: Source) -> str:
    """Return why code that an earlier surgeon shipped is wrong under the installed transformers; empty where it is not.

    The code is read as text.
    """
    installed = metadata.version("transformers")
    if Version(installed) < _CACHE_RENAMED or _OLD_CACHE not in source.small(CODE_FILE, max_bytes=MAX_CODE_BYTES):
        return ""
    return f"under transformers {installed} it does not find the cache, and loses what grafts keep between tokens"


def _settings(config: Mapping[str, Any], listing: Mapping[str, int], source: Source) -> Iterator[tuple[str, Any]]:
    """The JSON files that say how to load something, parsed as Python's loaders do; what they cannot parse is left."""
    yield _PARSED, config
    for name, size in listing.items():
        carried = is_side_file(name) and name.endswith(".json") and name not in _VOCABULARIES
        if name == _PARSED or size > MAX_SIDE_FILE_BYTES or not (carried or _PROCESSORS.fullmatch(name)):
            continue
        try:
            yield name, json.loads(source.small(name, max_bytes=MAX_SIDE_FILE_BYTES))
        except (BadInput, ValueError, RecursionError):
            # A link out of the folder, say: it is neither read nor carried along, which `notes` says.
            continue


def leads_to_code(content: Any, *, except_auto_map: bool = False) -> str:
    """What in parsed JSON, at any depth, makes a loader run code or fetch some, in words; nothing where nothing does.

    `except_auto_map` passes over an `auto_map` at the top, which the caller has judged.
    """
    if isinstance(content, dict) and except_auto_map:
        content = {key: value for key, value in content.items() if key != "auto_map"}
    for key, value in _walk(content):
        if (key in _CODE_FIELDS and value not in (None, {}, [], "")) or (key in _SWITCHES and value):
            return f"has `{key}`"
        if _IMPLEMENTATION.fullmatch(key) and any("/" in text for text in _strings(value)):
            return f"asks for kernels from the Hub (`{printable(key)}`)"
        if isinstance(value, str) and not key.endswith(_ORIGIN) and _is_reference(value):
            return f"refers to code elsewhere ({printable(value)})"
    return ""


def _is_reference(text: str) -> bool:
    return len(text) <= _LONGEST_REFERENCE and _REFERENCE.fullmatch(text) is not None


def _walk(content: Any) -> Iterator[tuple[str, Any]]:
    """Every value at any depth with its key; of lists every item, with the list's key."""
    waiting: list[tuple[str, Any]] = [("", content)]
    while waiting:
        key, value = waiting.pop()
        yield key, value
        if isinstance(value, dict):
            waiting.extend((str(inner), item) for inner, item in value.items())
        elif isinstance(value, list):
            waiting.extend((key, item) for item in value)


def _strings(value: Any) -> Iterator[str]:
    return (item for _, item in _walk(value) if isinstance(item, str))


def check_trusted(brought: Brought, shown: str, *, trust_remote_code: bool) -> None:
    """Raise ForeignCode for code that is not surgeon's, unless the user has asked for it."""
    if brought.code == "foreign" and not trust_remote_code:
        raise _foreign(shown, brought.found)


def _foreign(shown: str, found: str) -> ForeignCode:
    way = "read it, then remove it or pass `--trust-remote-code`"
    if found.startswith(CODE_FILE):
        way = f"where an earlier surgeon wrote it, `surgeon refresh {shown}` writes this version's; else {way}"
    return ForeignCode(f"{shown}: brings code of its own ({found}), which surgeon neither runs nor copies; {way}")


@dataclass(frozen=True)
class WithoutCode:
    """A folder without the code that it brings: its `config`, other `settings` that change, by file name, and a `note`
    of what is left out. `model_code` names what config.json's `auto_map` said that the model is built of, if it did."""

    config: dict[str, Any]
    settings: Mapping[str, bytes]
    note: str
    model_code: str


def without_code(config: Mapping[str, Any], source: Source, brought: Brought) -> WithoutCode:
    """A folder with foreign code as transformers reads it without trust: by its own classes, where it has the type.

    Raises ForeignCode where it lacks the type or a class that the code has, or anything else leads to code.
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
    try:
        return without_auto_map(content)
    except RecursionError:
        raise _unwritable(name) from None


def _written(name: str, content: Any) -> bytes:
    try:
        return f"{json.dumps(content, indent=2, ensure_ascii=False)}\n".encode()
    except (UnicodeEncodeError, RecursionError):
        raise _unwritable(name) from None


def _unwritable(name: str) -> BadInput:
    return BadInput(
        f"{printable(name)}: half of a UTF-16 pair in it, or brackets nested too deep to write it without its"
        " `auto_map`; take that out of the file"
    )


def without_auto_map(settings: Any) -> Any:
    """Parsed JSON without any `auto_map`, at whatever depth."""
    return json.loads(
        json.dumps(settings), object_hook=lambda part: {key: part[key] for key in part if key != "auto_map"}
    )


def names_code(config: Mapping[str, Any], source: Source) -> bool:
    """Whether any file of settings in a folder has an `auto_map`."""
    return any(_mapped(content) for _, content in _settings(config, source.listing(), source))


def _mapped(content: Any) -> list[dict[str, Any]]:
    """The parts of parsed JSON, at any depth, that have an `auto_map`."""
    return [part for _, part in _walk(content) if isinstance(part, dict) and part.get("auto_map")]


def looked_in(config: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Where transformers looks for the name of a class: config.json, with its tokenizer's settings over it."""
    over = tokenizer if isinstance(tokenizer, dict) else {}
    return {**config, **over, "model_type": config.get("model_type")}


def only_in_code(settings: Any, beside: Mapping[str, Any], *, of_model: bool = False) -> str:
    """What an `auto_map` of settings, at any depth, names that transformers has no class for, in words; else nothing.

    Args:
        settings: Parsed JSON. A list as `auto_map` is that of a tokenizer.
        beside: What `looked_in` gives.
        of_model: They are those of config.json, which needs neither processors nor what no loader asks for.
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
    return auto == "AutoConfig" or auto.startswith("AutoModel")


def _lacking(auto: str, part: Mapping[str, Any], beside: Mapping[str, Any]) -> str:
    """What transformers has no class of its own for, in words: one that settings name, or one for the model type."""
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
    """Raise BadInput for a config.json by which transformers would load something else than it describes."""
    refuse_quantised(config)
    for key, does in _ELSEWHERE.items():
        if config.get(key) not in (None, {}, [], ""):
            raise BadInput(f"config.json: `{key}` {does}; take it out, if the model does not need it")
    for key in config:
        # transformers makes attributes of a config's fields, and these hold the object itself together.
        if key.startswith("__"):
            raise BadInput(f"config.json: `{printable(key)}` would overwrite what Python keeps there; take it out")


def refuse_quantised(config: Mapping[str, Any], *, passed: bool = True) -> None:
    """Raise BadInput for the config of a quantised checkpoint, which may say so of its text model alone.

    With `passed`, methods are not refused whose tensors can be moved as bytes.
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
    """Raise BadInput for a config that is to be written out, yet leads to code that is not surgeon's, or elsewhere.

    For a config that comes from a manifest, which anybody can have edited; `trusted` is the `auto_map` of a folder
    whose own code the user trusts.
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
    """Files beside the weights by which loaders would load something else, each with what it does.

    Surgeon sets them aside: it never reads them, copies them or shows them to transformers.
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
    """Files that surgeon never writes beside an output's weights, each with what it does or looks like."""
    shards = tuple(shards)
    found = beside_weights(listing, shards)
    for name in listing:
        if name.endswith(".index.json") and (name != INDEX_FILE or SINGLE_FILE in shards):
            found[name] = "an index of other weights"
        elif name.endswith(".safetensors") and name not in shards and name not in found:
            found[name] = "weights that the output does not have"
    return found
