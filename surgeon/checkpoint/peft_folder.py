"""A PEFT LoRA adapter's folder: config and header are checked, tensors are read on demand, no pickle is opened."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surgeon.checkpoint.damages import empty_of, led_below
from surgeon.checkpoint.header import FLOAT_DTYPES, Header
from surgeon.checkpoint.ranges import sha256_range
from surgeon.checkpoint.source import MAX_SIDE_FILE_BYTES, LocalSource, is_side_file, read_tensor
from surgeon.checkpoint.strict_json import parse_json_strict
from surgeon.common.patterns import Matcher
from surgeon.errors import BadInput, printable, said_of

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 4_000_000
_OF_TOKENIZER = re.compile(r"token|vocab|merges|template|tekken|\.(model(\.v\w+)?|tiktoken|codes)$")

_AGAIN = "get the adapter's own file again"
_PICKLE = "adapter_model.bin"

# Keys that change the product B A are read; others concern only training, or must be empty (see `check_settings`).
_READ = {"peft_type", "r", "lora_alpha", "use_rslora", "lora_dropout", "alpha_pattern", "init_lora_weights"}
_OF_NO_EFFECT = {
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    # The tensors' shapes give the ranks.
    "rank_pattern",
    # How the base stores its matrix; PEFT detects this itself.
    "fan_in_fan_out",
    "megatron_core",
    "qalora_group_size",
    "ensure_weight_tying",
    "runtime_config",
    # Settings of initialisations, which take effect only through `init_lora_weights`.
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
}
# Initialisations that do not change the base's weights.
_PLAIN_INITS = (True, False, None, "gaussian", "orthogonal", "eva", "mica")


@dataclass(frozen=True)
class AdapterTensor:
    """One tensor of an adapter: its dtype, its shape and the sha256 of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True)
class Adapter:
    """The facts about an adapter that a blueprint needs and a manifest keeps: no weights, no path.

    `id` is a Hub id or a folder's name, `revision` the commit on the Hub. `tensors` has PEFT's names as keys.
    """

    id: str
    revision: str | None
    alpha: float
    rslora: bool
    dropout: float
    alpha_pattern: Mapping[str, float]
    tensors: Mapping[str, AdapterTensor]

    def scale(self, module: str, rank: int) -> float:
        """Return the factor that multiplies B A at `module` (a path in the base model); `rank` is the module's.

        Patterns of `alpha_pattern` are matched as in PEFT.
        """
        alpha = matched(self.alpha_pattern, module, self.alpha, self._matcher)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    @functools.cached_property
    def _matcher(self) -> Matcher:
        """The matcher of `alpha_pattern`; its errors name this adapter."""
        return Matcher(f"{printable(self.id)}: `alpha_pattern`")

    def identity(self) -> dict[str, Any]:
        """Return all fields as JSON data, for a digest."""
        tensors = {name: [tensor.dtype, list(tensor.shape), tensor.sha256] for name, tensor in self.tensors.items()}
        facts = [self.id, self.revision, self.alpha, self.rslora, self.dropout]
        return {"facts": facts, "alpha_pattern": dict(self.alpha_pattern), "tensors": tensors}


@dataclass(frozen=True)
class AdapterFolder:
    """An opened adapter; `facts` describes it, `read` returns a tensor's bytes, `config` is its adapter_config.json."""

    facts: Adapter
    config: Mapping[str, Any] = field(repr=False)
    _source: LocalSource = field(repr=False)
    _header: Header = field(repr=False)

    @classmethod
    def open(cls, path: Path, *, id: str, revision: str | None = None) -> AdapterFolder:
        """Open a local folder and hash its tensors.

        Raises BadInput for anything but a LoRA that needs only its base's weights.
        """
        if path.is_file():
            raise BadInput(f"{printable(str(path))}: a file; give the adapter's folder, {printable(str(path.parent))}")
        source = LocalSource(path)
        listing = source.listing()
        check_adapter_files(listing, source.shown, source.tree())
        content = source.small(ADAPTER_CONFIG, max_bytes=MAX_CONFIG_BYTES)
        shown = printable(str(path / ADAPTER_CONFIG))
        config = parse_json_strict(content, file=shown, max_bytes=MAX_CONFIG_BYTES)
        if not isinstance(config, dict):
            raise BadInput(f"{shown}: holds a {type(config).__name__}, expected a JSON object; {_AGAIN}")
        _check_kind(config, shown)
        with said_of(source.shown):
            header = source.headers([ADAPTER_WEIGHTS])[ADAPTER_WEIGHTS]
        if empty := empty_of(header.tensors):
            raise BadInput(f"{source.shown}: {empty}")
        for info in header.tensors:
            if info.dtype not in FLOAT_DTYPES:
                raise BadInput(
                    f"{source.shown}: tensor {printable(info.name)} is {info.dtype}; plain floating-point"
                    f" numbers are read ({', '.join(sorted(FLOAT_DTYPES))}): save it in one of these"
                )
        rank = _number(config, "r", shown, 8)
        if rank < 1:
            raise BadInput(f"{shown}: `r` is {rank}; at least 1 is expected; {_AGAIN}")
        facts = Adapter(
            id=id,
            revision=revision,
            alpha=_number(config, "lora_alpha", shown, 8),
            rslora=_flag(config, "use_rslora", shown),
            dropout=_dropout(config, shown),
            alpha_pattern=numbers_of(config, "alpha_pattern", shown),
            tensors=_hashed(source, header),
        )
        return cls(facts, config, source, header)

    @property
    def shown(self) -> str:
        """The path of the adapter's config file, for messages."""
        return printable(str(self._source.path / ADAPTER_CONFIG))

    def check_settings(self, known: Collection[str], reasons: Mapping[str, str], advice: str) -> None:
        """Raise BadInput for a setting that makes the adapter more than B A times a number at linear modules.

        `known` are keys that the caller reads itself. `reasons` explain why other keys are refused; `advice` tells the
        user what to do.
        """
        for key, value in self.config.items():
            if key in _READ or key in _OF_NO_EFFECT or key in known or value in (None, False, "", [], {}, "none"):
                continue
            reason = reasons.get(key, "surgeon does not know what that does to the adapter's output")
            raise BadInput(f"{self.shown}: `{printable(key)}` is {_show(value)}: {reason}; {advice}")

    def read(self, name: str) -> bytearray:
        """Return one tensor's bytes. Raises BadInput where they changed after the adapter was opened."""
        content = read_tensor(self._source, next(info for info in self._header.tensors if info.name == name))
        if hashlib.sha256(content).hexdigest() != self.facts.tensors[name].sha256:
            raise BadInput(
                f"{self._source.shown}: tensor {printable(name)} was changed meanwhile; run the same command again"
            )
        return content

    @property
    def side_files(self) -> tuple[str, ...]:
        """The names of the tokenizer's files, chat template included."""
        return tuple(filter(is_of_tokenizer, self._source.listing()))

    def read_side_file(self, name: str) -> bytes:
        """Return the content of one of `side_files`."""
        return self._source.small(name, max_bytes=MAX_SIDE_FILE_BYTES)

    def check_unchanged(self) -> None:
        """Raise BadInput where the adapter's file changed since it was opened."""
        self._source.check_unchanged()


def is_of_tokenizer(name: str) -> bool:
    """Return whether a side file belongs to the tokenizer or its chat template."""
    return is_side_file(name) and _OF_TOKENIZER.search(name) is not None


def check_adapter_files(listing: Iterable[str], shown: str, tree: Iterable[str]) -> None:
    """Raise BadInput where the folder lacks the files of a readable adapter; `tree` also lists files in subfolders."""
    names = {name.removesuffix("/") for name in listing}
    if any(name.startswith("adapters.") for name in names):
        raise BadInput(
            f"{shown}: an adapter of mlx-lm; merge it there (`mlx_lm.fuse --model BASE --adapter-path ADAPTER"
            " --save-path OUT`), or write it as PEFT's: `lora_a` and `lora_b` transposed are"
            " `base_model.model.….lora_A.weight` and `….lora_B.weight`, `r` is `rank`, `lora_alpha` `scale` × `rank`"
        )
    if ADAPTER_CONFIG not in names:
        way = "; give the folder that `save_pretrained` of PEFT's model wrote"
        if ADAPTER_WEIGHTS in names:
            way = f" beside {ADAPTER_WEIGHTS}, and it says rank and scale; get it from where that file is from"
        elif "config.json" in names:
            way = "; this is the folder of a whole model: give that of the adapter"
        raise BadInput(f"{shown}: no {ADAPTER_CONFIG} here{led_below(tree, ADAPTER_CONFIG) or way}")
    if ADAPTER_WEIGHTS in names:
        return
    if _PICKLE in names:
        raise BadInput(
            f"{shown}: only pickled weights ({_PICKLE}), which surgeon never opens because they can run code; convert"
            " them where you trust them: `PeftModel.from_pretrained(BASE, ADAPTER).save_pretrained(NEW)` writes"
            " safetensors"
        )
    raise BadInput(
        f"{shown}: no {ADAPTER_WEIGHTS} here{led_below(tree, ADAPTER_WEIGHTS) or '; is the download complete?'}"
    )


def matched(patterns: Mapping[str, float], module: str, default: float, matcher: Matcher) -> float:
    """Return the number of the first pattern that matches a module's path or its end, as in PEFT; else `default`."""
    starts = [0, *(at + 1 for at, letter in enumerate(module) if letter == ".")]
    return next((value for pattern, value in patterns.items() if matcher.whole(pattern, module, starts)), default)


def _check_kind(config: Mapping[str, Any], shown: str) -> None:
    """Raise BadInput for an adapter that is no LoRA, or was trained on weights other than the base's own."""
    kind = config.get("peft_type")
    if kind != "LORA":
        way = "write it so" if str(kind).upper() == "LORA" else "give another adapter"
        raise BadInput(f"{shown}: `peft_type` is {_show(kind)}; only LORA is read; {way}")
    init = config.get("init_lora_weights", True)
    if not any(init is plain or (isinstance(plain, str) and init == plain) for plain in _PLAIN_INITS):
        raise BadInput(
            f"{shown}: `init_lora_weights` is {_show(init)}, which changed the base's own weights; save it as a plain"
            " LoRA (`save_pretrained(NEW, path_initial_model_for_weight_conversion=INITIAL)`)"
        )


def _number(config: Mapping[str, Any], key: str, shown: str, default: float) -> float:
    """Return a setting as a float, or `default` where it is missing.

    Raises BadInput for anything but a finite number.
    """
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e300 < value < 1e300:
        raise BadInput(f"{shown}: `{key}` is {_show(value)}; a finite number is expected; {_AGAIN}")
    return float(value)


def _flag(config: Mapping[str, Any], key: str, shown: str) -> bool:
    """Return a setting as a bool; missing or null counts as False. Raises BadInput for another value."""
    value = config.get(key) or False
    if value is not True and value is not False:
        raise BadInput(f"{shown}: `{key}` is {_show(value)}; true or false is expected; {_AGAIN}")
    return value


def _dropout(config: Mapping[str, Any], shown: str) -> float:
    """Return `lora_dropout`, 0 where it is missing. Raises BadInput where it is not in [0, 1)."""
    value = _number(config, "lora_dropout", shown, 0.0)
    if not 0.0 <= value < 1.0:
        raise BadInput(f"{shown}: `lora_dropout` is {value}; it must lie in [0, 1); {_AGAIN}")
    return value


def numbers_of(config: Mapping[str, Any], key: str, shown: str) -> dict[str, float]:
    """Return a setting that maps module names, or patterns, to numbers; empty where it is missing.

    Raises BadInput where it is anything else.
    """
    found = config.get(key) or {}
    if not isinstance(found, dict):
        raise BadInput(f"{shown}: `{key}` must map names of modules to numbers; {_AGAIN}")
    return {pattern: _number(found, pattern, shown, 0.0) for pattern in found}


def _hashed(source: LocalSource, header: Header) -> dict[str, AdapterTensor]:
    """Return dtype, shape and sha256 of each tensor in the adapter's file, sorted by name.

    Raises BadInput where the file changed or cannot be read.
    """
    fd = source.open_shard(ADAPTER_WEIGHTS)
    try:
        return {
            info.name: AdapterTensor(info.dtype, info.shape, sha256_range(fd, info.begin, info.end))
            for info in sorted(header.tensors, key=lambda info: info.name)
        }
    finally:
        os.close(fd)


def _show(value: object) -> str:
    return printable(repr(value), 80)
