"""The choice of a checkpoint's weight files, by the rules of transformers, and a check that index and files agree."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from surgeon.checkpoint.damages import led_below
from surgeon.checkpoint.header import FLOAT_DTYPES, QUANTISED_DTYPES, Header, TensorInfo
from surgeon.checkpoint.source import Source
from surgeon.checkpoint.strict_json import parse_json_strict
from surgeon.common.formatting import listed
from surgeon.errors import BadInput, printable

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64_000_000

# Causal masks that old versions of transformers stored with GPT-2, GPT-NeoX and others; no current version reads them.
_MASKS = (".attn.bias", ".attention.bias", "attention.masked_bias", "attn.masked_bias")

# The field of config.json that marks quantised weights, and the methods whose tensors surgery can move as bytes.
QUANTISATION = "quantization_config"
COMPRESSED = "compressed-tensors"
_PASSED = ("fp8", "mxfp4", COMPRESSED)

_LONGEST_NAME = 500
# The most parts in a shard's name: subfolders of the checkpoint's folder, and the file.
_DEEPEST = 4
_AGAIN = "they are of two downloads: get both again"

_SHARD = re.compile(r"model-.*\.safetensors", re.DOTALL)
# Old pickled checkpoints of transformers, and a command that converts them to safetensors without running pickled code.
_TORCH = re.compile(r"pytorch_model(-[0-9]+-of-[0-9]+)?\.bin")
_CONVERT = (
    "in a copy of that folder run `python -c 'import glob, torch, safetensors.torch as s; s.save_file({k:"
    " v.clone().contiguous()"
    ' for f in glob.glob("pytorch_model*.bin") for k, v in torch.load(f, map_location="cpu", weights_only=True)'
    '.items()}, "model.safetensors", {"format": "pt"})\'`, which runs no code of theirs'
)
_PICKLED = re.compile(r".*\.(bin|pt|pth|ckpt)", re.DOTALL)


@dataclass(frozen=True)
class Weights:
    """The files that hold weights; `weight_map` is the index's map (tensor name → file), None for a single file.

    `passed_over` are the tensors named by an index that is ignored because a single weight file exists.
    """

    files: tuple[str, ...]
    weight_map: dict[str, str] | None = None
    notes: list[str] = field(default_factory=list)
    passed_over: Collection[str] = ()


def choose_weights(source: Source, *, shown: str | None = None) -> Weights:
    """Choose the weight files of a checkpoint, as transformers does.

    A single file is preferred to an index. Raises BadInput where there are no safetensors weights, where a shard is
    missing, and where a file looks like a shard but is not in the index: the file and the index are then of two
    downloads. Errors call the checkpoint `shown`, by default the source's own name.
    """
    shown = source.shown if shown is None else shown
    # A folder with the name of a weight file is chosen like a file; opening it then gives the error.
    names = sorted(name.removesuffix("/") for name in source.listing())
    tensors_files = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    notes: list[str] = []
    if SINGLE_FILE in names:
        others = [name for name in names if name == INDEX_FILE or (name in tensors_files and name != SINGLE_FILE)]
        if others:
            notes.append(f"{SINGLE_FILE} is used, as transformers does; ignored beside it: {listed(others, 1)}")
        return Weights((SINGLE_FILE,), None, notes, _passed_over(source) if INDEX_FILE in names else ())
    if INDEX_FILE not in names:
        raise BadInput(f"{shown}: {_why_no_weights(names, tensors_files)}{led_below(source.tree(), 'config.json')}")
    weight_map = _weight_map(source.small(INDEX_FILE, max_bytes=MAX_INDEX_BYTES))
    files = tuple(sorted(set(weight_map.values())))
    if any("/" in file for file in files):
        # Some checkpoints have their shards in a subfolder; transformers reads these too.
        names += [name for name in source.tree() if "/" in name]
    if missing := [file for file in files if file not in names]:
        way = led_below(names, missing[0]) or "; download again"
        raise BadInput(f"{shown}: {listed(missing, 1)} missing, of {len(files)} shards in the index{way}")
    unlisted = [name for name in tensors_files if name not in files]
    if strays := [name for name in unlisted if _SHARD.fullmatch(name)]:
        raise BadInput(
            f"{shown}: {listed(strays, 1)} looks like a shard, yet {INDEX_FILE} does not name it; remove it, or get the"
            " index that belongs to it"
        )
    if unlisted:
        notes.append(f"not in the index, ignored: {listed(unlisted, 1)}")
    return Weights(files, weight_map, notes)


def _passed_over(source: Source) -> Collection[str]:
    """Return the tensors that the ignored index names; empty where it cannot be read."""
    try:
        return _weight_map(source.small(INDEX_FILE, max_bytes=MAX_INDEX_BYTES)).keys()
    except BadInput:
        return ()


def _why_no_weights(names: list[str], tensors_files: list[str]) -> str:
    """Return why a folder with these files has no readable weights, with advice."""
    for wanted in (SINGLE_FILE, INDEX_FILE):
        if way := led_below((name for name in names if "/" not in name), wanted):
            return f"no {wanted} here{way}"
    if shards := [name for name in tensors_files if _SHARD.fullmatch(name)]:
        return f"shards ({listed(shards, 1)}) without {INDEX_FILE}; download that too"
    if "adapter_config.json" in names:
        return (
            "a PEFT adapter, not a base: `surgeon merge BASE ADAPTER OUT` merges it into the base that it was made on"
        )
    if "config.json" not in names and not any(name.endswith((".gguf", ".safetensors")) for name in names):
        return "no config.json and no weights here; expected the folder of a transformers checkpoint"
    if tensors_files:
        return f"neither {SINGLE_FILE} nor {INDEX_FILE}; {listed(tensors_files, 1)} is not the model's weights"
    if pickled := [name for name in names if _PICKLED.fullmatch(name)]:
        usual = any(_TORCH.fullmatch(name) for name in pickled)
        return (
            f"only pickled weights ({listed(pickled, 1)}), which surgeon never opens because they can run code;"
            f" {_CONVERT if usual else 'get the safetensors, or save the model with transformers once'}"
        )
    if gguf := [name for name in names if name.endswith(".gguf")]:
        return f"only GGUF weights ({listed(gguf, 1)}); give that file in place of its folder"
    return f"no weights here; expected {SINGLE_FILE} or {INDEX_FILE}"


def _weight_map(content: bytes) -> dict[str, str]:
    """Return the index's map from tensor names to file names.

    Raises BadInput where it is missing or has an unsafe file name.
    """
    index = parse_json_strict(content, file=INDEX_FILE, max_bytes=MAX_INDEX_BYTES)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadInput(f"{INDEX_FILE}: no `weight_map` that names the file of each tensor; download it again")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not _is_plain(file):
            raise BadInput(
                f"{INDEX_FILE}: places tensor {printable(tensor)} in {printable(str(file))!r}; expected the"
                " name of a .safetensors file in the same folder, or in one below it; download it again"
            )
    return weight_map


def _is_plain(file: str) -> bool:
    """Return whether this is a safe relative name of a .safetensors file: few parts, none hidden, no odd characters."""
    parts = file.split("/")
    return (
        file.endswith(".safetensors")
        and file.isprintable()
        and len(parts) <= _DEEPEST
        and all(part and not part.startswith(".") and len(part.encode()) <= 255 for part in parts)
        and not set(file) & set("\\\0")
    )


def check_weights(weights: Weights, headers: Mapping[str, Header], config: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """Return all tensors of all shards. Raises BadInput where index and headers disagree or a dtype is not allowed."""
    tensors: dict[str, TensorInfo] = {}
    for file in weights.files:
        for info in headers[file].tensors:
            if weights.weight_map is not None:
                _check_place(info, weights.weight_map)
            _check_tensor_name(info)
            _check_float(info, config)
            tensors[info.name] = info
    for name, file in (weights.weight_map or {}).items():
        if name not in tensors:
            raise BadInput(
                f"{INDEX_FILE}: places tensor {printable(name)} in {printable(file)}, which lacks it; {_AGAIN}"
            )
    if lacking := [name for name in weights.passed_over if name not in tensors]:
        raise BadInput(
            f"{SINGLE_FILE}: lies beside {INDEX_FILE}, so it is read alone, as transformers does, and lacks"
            f" {listed(lacking, 1)} of the {len(weights.passed_over)} tensors that the index names; remove the one that"
            " is not the model's"
        )
    if not tensors:
        raise BadInput(f"{printable(weights.files[0])}: holds no tensors; download it again")
    return tensors


def _check_place(info: TensorInfo, weight_map: Mapping[str, str]) -> None:
    """Raise BadInput where the index does not list the tensor, or lists it in another file."""
    place = weight_map.get(info.name)
    if place is None:
        raise BadInput(
            f"{printable(info.file)}: holds tensor {printable(info.name)}, which {INDEX_FILE} does not name; {_AGAIN}"
        )
    if place != info.file:
        raise BadInput(
            f"{printable(info.file)}: holds tensor {printable(info.name)}, which {INDEX_FILE} places in"
            f" {printable(place)}; {_AGAIN}"
        )


def _check_tensor_name(info: TensorInfo) -> None:
    """Raise BadInput for a name that is too long or not printable.

    Names become module paths, JSON keys and terminal output.
    """
    if not (info.name.isprintable() and 0 < len(info.name) <= _LONGEST_NAME):
        raise BadInput(
            f"{printable(info.file)}: a tensor is called {printable(info.name)!r}, which is no module's name (1 to"
            f" {_LONGEST_NAME} characters that can be shown); get the model's own files"
        )


def quantisation(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return config.json's quantisation settings where surgery can move such tensors as bytes; else None."""
    found = config.get(QUANTISATION)
    return found if isinstance(found, Mapping) and found.get("quant_method") in _PASSED else None


# Where to get full-precision weights, for methods whose weights transformers never stores in full precision.
_NEVER = "; transformers computes with such weights and never stores them in full: get the model that they were made of"
_FULL = {"gptq": _NEVER, "awq": _NEVER}


def in_full(method: object) -> str:
    """Return the end of an error about a quantised base: where to get full-precision weights; "" for most methods."""
    return _FULL.get(str(method), "")


def _check_float(info: TensorInfo, config: Mapping[str, Any]) -> None:
    """Raise BadInput where surgery cannot use a tensor of this dtype.

    Accepted are floats, I64, masks stored as BOOL or U8, and quantised dtypes where the config's method is supported.
    """
    # I64 tensors are indices, tables and positions, neither weights nor quantised. They are copied like any tensor.
    if info.dtype in FLOAT_DTYPES or info.dtype == "I64":
        return
    if info.dtype in ("BOOL", "U8") and info.name.endswith(_MASKS):
        return
    if info.dtype in QUANTISED_DTYPES and quantisation(config) is not None:
        return
    raise BadInput(
        f"{printable(info.file)}: tensor {printable(info.name)} is {info.dtype}; surgery needs plain floating-point"
        f" weights ({', '.join(sorted(FLOAT_DTYPES))}), not quantised ones"
    )
