"""Bases in the formats of compressed-tensors: which tensors hold one matrix, and how its numbers are coded.

The numbers of a module's matrix are stored as integers of few bits packed in 32-bit words (`weight_packed`), or as
plain integers or FP8 (`weight`), with scales, perhaps zero points, and perhaps the group of each column
(`weight_g_idx`). `config_groups` of config.json define how each module is coded. Everything here is read from headers
and config.json, which are untrusted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from surgeon.anatomy.family import OWN_CONFIG
from surgeon.checkpoint.damages import ANOTHER
from surgeon.checkpoint.header import FLOAT_DTYPES, TensorInfo
from surgeon.checkpoint.weights import COMPRESSED, QUANTISATION, quantisation
from surgeon.common.patterns import Matcher
from surgeon.errors import BadInput, printable

# The formats that surgeon reads: integers packed in words, or plain numbers.
_PACKED = "pack-quantized"
_PLAIN = ("int-quantized", "naive-quantized", "float-quantized")
# Mixed: each group names its own.
_MIXED = "mixed-precision"
_STRATEGIES = ("tensor", "channel", "group", "block")
_WHOLE = ("I8", "I32", "I64")
# Suffixes of the tensors next to a matrix. Those about activations are not needed once the numbers are plain.
WEIGHT, PACK = ".weight", ".weight_packed"
SCALE, ZERO, ORDER, SHAPE = ".weight_scale", ".weight_zero_point", ".weight_g_idx", ".weight_shape"
OF_ACTIVATIONS = (
    *(f".{of}_{what}" for of in ("input", "output") for what in ("scale", "zero_point", "global_scale")),
    *(f".{of}_scale" for of in ("q", "k", "v")),
)
BESIDE = (SCALE, ZERO, ORDER, SHAPE, *OF_ACTIVATIONS)
_WORD = 32
_FULL_ONES = "operate on the full-precision weights"


@dataclass(frozen=True)
class Code:
    """The storage of a matrix's numbers: `bits` each, in words of 32 bits if `packed`; `floating`: FP8 (E4M3).

    `block` is the rows and columns of numbers that share a scale, according to `strategy`.
    """

    bits: int
    floating: bool
    packed: bool
    symmetric: bool
    strategy: str
    block: tuple[int, int]

    @property
    def zeros_packed(self) -> bool:
        """Whether zero points are packed in words, along the rows."""
        return self.packed and not self.symmetric and self.strategy in ("group", "channel")

    def grid(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """Return the number of blocks along each axis in a matrix of this shape."""
        return tuple(-(-size // of) for size, of in zip(shape, self.block, strict=True))

    def words(self, numbers: int) -> int:
        """Return how many words hold this many numbers; a number may begin in one word and end in the next."""
        return -(-numbers * self.bits // _WORD)


@dataclass(frozen=True)
class Pack:
    """The tensors that hold one matrix, by name on disk, and the matrix's name and shape in full precision."""

    weight: str
    scales: str
    zeros: str | None
    order: str | None
    sizes: str | None
    name: str
    shape: tuple[int, int]
    code: Code

    @property
    def all(self) -> tuple[str, ...]:
        """Every tensor of the matrix, the one with its numbers first."""
        further = (self.zeros, self.order, self.sizes)
        return (self.weight, self.scales, *(name for name in further if name is not None))


@dataclass(frozen=True)
class _Group:
    """One of `config_groups`: the modules that it applies to, and how their weights are coded.

    A 0 in the code's `block` stands for a matrix's whole axis.
    """

    name: str
    targets: tuple[str, ...]
    format: str
    code: Code


def packs_of(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, Pack]:
    """Return the matrices that a checkpoint (or a part of one) stores in such a format, by the tensor that holds the
    numbers.

    Empty where its config.json names no such format. Raises BadInput naming the first tensor that contradicts
    config.json.
    """
    settings = quantisation(config)
    if settings is None or settings["quant_method"] != COMPRESSED:
        return {}
    groups, ignored = list(_groups(settings)), _texts(settings, "ignore")
    matcher = Matcher(f"config.json: `{QUANTISATION}`")

    def fits(target: str, module: str) -> bool:
        """Return whether a group's target matches a module."""
        # A module's name, or after `re:` a pattern that its name begins with.
        pattern = target.removeprefix("re:")
        return target == module if pattern == target else bool(matcher.ends(pattern, module))

    found: dict[str, Pack] = {}
    for name, info in tensors.items():
        module = _module(name)
        if module is None or (
            name.endswith(WEIGHT) and f"{module}{SCALE}" not in tensors and info.dtype in FLOAT_DTYPES
        ):
            continue
        if (ignore := next((each for each in ignored if fits(each, module)), None)) is not None:
            raise BadInput(
                f"{_place(info)}: quantised, yet `ignore` of config.json's `{QUANTISATION}` names"
                f" {printable(ignore, 80)}; {ANOTHER}"
            )
        group = next((each for each in groups if any(fits(target, module) for target in each.targets)), None)
        group = group or next((each for each in groups if {"Linear", "Embedding"} & {*each.targets}), None)
        if group is None:
            raise BadInput(
                f"{_place(info)}: quantised, yet no group of config.json's `{QUANTISATION}` is for it; {ANOTHER}"
            )
        found[name] = _pack(module, info, group, tensors)
    _check_owned(found, tensors)
    return found


def unpacked(tensors: Mapping[str, TensorInfo], packs: Mapping[str, Pack]) -> dict[str, TensorInfo]:
    """Return the headers that the tensors would have if nothing were quantised, for code that uses only names and
    shapes.
    """
    made: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        if (pack := packs.get(name)) is not None:
            made[pack.name] = TensorInfo(pack.name, "BF16", pack.shape, info.file, info.begin, info.end)
        elif not packs or not name.endswith(BESIDE):
            made[name] = info
    return made


def cannot_be_loaded(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> str:
    """Return why transformers would not compute the numbers that the format of such a base defines; empty where it
    would.
    """
    packs = packs_of(config, tensors)
    codes: dict[tuple[Any, ...], Pack] = {}
    for pack in packs.values():
        expert = ".experts." in pack.name
        code = pack.code
        spread = tuple(0 if of == size else of for of, size in zip(code.block, pack.shape, strict=True))
        codes.setdefault((expert, code.bits, code.floating, code.packed, pack.zeros is not None, spread), pack)
        if expert and pack.zeros is not None:
            return f"transformers leaves out the zero points of experts ({printable(pack.zeros)})"
        if expert and not code.packed and (not code.floating or code.block not in (pack.shape, (1, pack.shape[1]))):
            return f"transformers reads experts in packs, or in FP8 with a scale a row ({printable(pack.weight)})"
        dtype = FLOAT_DTYPES[tensors[pack.scales].dtype].torch
        if expert and code.packed and dtype != config.get("dtype", config.get("torch_dtype", dtype)):
            return f"transformers leaves experts in {dtype}, the dtype of {printable(pack.scales)}"
        if pack.order is not None:
            return f"transformers does not read {printable(pack.order)}, the groups of columns"
    for expert in (False, True):
        if len(several := [pack for key, pack in codes.items() if key[0] is expert]) > 1:
            return (
                f"transformers reads {printable(several[0].name)} and {printable(several[1].name)} by one group of"
                " `config_groups`"
            )
    return ""


def _module(name: str) -> str | None:
    """Return the module whose matrix's numbers a tensor holds; None for other tensors."""
    return next((name.removesuffix(end) for end in (PACK, WEIGHT) if name.endswith(end)), None)


def _place(info: TensorInfo) -> str:
    """Return a tensor's name and file, for a message."""
    return f"{printable(info.name)} ({info.file})"


def _check_owned(packs: Mapping[str, Pack], tensors: Mapping[str, TensorInfo]) -> None:
    """Raise BadInput for scales and the like without a quantised matrix, and for dtypes that no format uses."""
    owned = {name for pack in packs.values() for name in pack.all}
    for name, info in tensors.items():
        if name in owned or name.endswith(OF_ACTIVATIONS):
            continue
        if name.endswith(BESIDE):
            raise BadInput(f"{_place(info)}: no quantised matrix stands beside it; {ANOTHER}")
        if info.dtype not in (*FLOAT_DTYPES, "I64"):
            raise BadInput(f"{_place(info)}: dtype {info.dtype}, which {COMPRESSED} has no such tensor of; {ANOTHER}")


def _pack(module: str, info: TensorInfo, group: _Group, tensors: Mapping[str, TensorInfo]) -> Pack:
    """Return the tensors of a module's matrix.

    Raises BadInput where one is missing, or has a shape that does not fit.
    """
    packed = info.name.endswith(PACK)
    if packed != (group.format == _PACKED) or (packed and f"{module}{WEIGHT}" in tensors):
        raise BadInput(
            f"{_place(info)}: group `{printable(group.name)}` of config.json's `{QUANTISATION}` is in the format"
            f" {group.format}, which stores no such tensor; {ANOTHER}"
        )
    wanted = "I32" if packed else "F8_E4M3" if group.code.floating else "I8"
    if info.dtype != wanted or len(info.shape) != 2 or 0 in info.shape:
        raise BadInput(
            f"{_place(info)}: {info.dtype} {list(info.shape)}; a matrix in {group.format} is {wanted}, rows by columns"
        )
    scales = tensors.get(f"{module}{SCALE}")
    if scales is None:
        raise BadInput(f"{_place(info)}: {info.dtype}, yet no {printable(module + SCALE)} beside it; {ANOTHER}")
    shape = (info.shape[0], _columns(info, scales, group))
    rows, columns = group.code.block
    code = replace(group.code, block=(rows or shape[0], columns or shape[1]))
    if packed and info.shape[1] != code.words(shape[1]):
        raise BadInput(
            f"{_place(info)}: {info.shape[1]} words a row, where {shape[1]} columns of {code.bits} bits take"
            f" {code.words(shape[1])}; {ANOTHER}"
        )
    _check_grid(scales, shape, code, FLOAT_DTYPES)
    zeros = _zeros(module, shape, code, group, tensors)
    order, sizes = tensors.get(f"{module}{ORDER}"), tensors.get(f"{module}{SHAPE}")
    if order is not None and (code.strategy != "group" or order.shape != (shape[1],) or order.dtype not in _WHOLE):
        raise BadInput(
            f"{_place(order)}: {order.dtype} {list(order.shape)}, not the groups of {shape[1]} columns; {ANOTHER}"
        )
    if packed and (sizes is None or sizes.shape != (2,) or sizes.dtype not in _WHOLE):
        found = "missing" if sizes is None else f"{sizes.dtype} {list(sizes.shape)}"
        raise BadInput(f"{printable(module + SHAPE)}: {found}; expected the two sizes of {_place(info)}")
    name = f"{module}{WEIGHT}"
    beside = tuple(None if each is None else each.name for each in (zeros, order, sizes if packed else None))
    return Pack(info.name, scales.name, beside[0], beside[1], beside[2], name, shape, code)


def _columns(info: TensorInfo, scales: TensorInfo, group: _Group) -> int:
    """Return how many columns a matrix has, as far as headers determine it."""
    if group.format != _PACKED:
        return info.shape[1]
    if group.code.strategy == "group" and scales.shape:
        return scales.shape[-1] * group.code.block[1]
    # Exact only where a row fills its last word; `weight_shape` is compared when the numbers are read.
    return info.shape[1] * _WORD // group.code.bits


def _check_grid(info: TensorInfo, shape: tuple[int, int], code: Code, dtypes: Any) -> None:
    """Raise BadInput where a tensor has no number for each block of `code`, or a dtype that is not in `dtypes`."""
    grid = code.grid(shape)
    fits = info.shape == grid or (math.prod(grid) == 1 == info.numel) or (grid[1] == 1 and info.shape == grid[:1])
    if not fits or info.dtype not in dtypes:
        raise BadInput(
            f"{_place(info)}: {info.dtype} {list(info.shape)}, not one for each of {list(grid)} blocks of"
            f" {list(code.block)} in {list(shape)}; {ANOTHER}"
        )


def _zeros(
    module: str, shape: tuple[int, int], code: Code, group: _Group, tensors: Mapping[str, TensorInfo]
) -> TensorInfo | None:
    """Return the zero points of a module's matrix; None where none are stored.

    Raises BadInput where they are missing although the group is not symmetric, or have another shape or dtype.
    """
    zeros = tensors.get(f"{module}{ZERO}")
    if zeros is None:
        if not code.symmetric:
            raise BadInput(
                f"{printable(module + ZERO)}: missing, and group `{printable(group.name)}` of config.json's"
                f" `{QUANTISATION}` is not symmetric; {ANOTHER}"
            )
        return None
    if code.zeros_packed:
        wanted = (code.words(shape[0]), code.grid(shape)[1])
        if zeros.dtype != "I32" or zeros.shape != wanted:
            raise BadInput(
                f"{_place(zeros)}: {zeros.dtype} {list(zeros.shape)}; packed zero points of {list(shape)} are I32"
                f" {list(wanted)}; {ANOTHER}"
            )
    else:
        _check_grid(zeros, shape, code, ("F8_E4M3", "BF16") if code.floating else ("I8",))
    return zeros


def _groups(settings: Mapping[str, Any]) -> Iterator[_Group]:
    """Yield the entries of `config_groups` that quantise weights.

    Raises BadInput for settings that no format has, or that surgeon does not read.
    """
    for key, does in (("sparsity_config", "sparse"), ("transform_config", "rotated")):
        if settings.get(key):
            raise BadInput(f"config.json: `{QUANTISATION}.{key}`: {does} weights are not dequantised; {_FULL_ONES}")
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _unread("config_groups", groups)
    for name, told in groups.items():
        weights = told.get("weights") if isinstance(told, Mapping) else told
        place = f"config_groups.{printable(str(name), 40)}"
        if isinstance(told, Mapping) and weights is None:
            continue
        if not isinstance(weights, Mapping) or not isinstance(told, Mapping):
            raise _unread(place, told)
        kind = told.get("format") or settings.get("format")
        if kind not in (_PACKED, *_PLAIN) or (kind == _PACKED and weights.get("type", "int") != "int"):
            raise BadInput(
                f"config.json: `{QUANTISATION}` stores weights in the format {printable(str(kind), 40)}, which surgeon"
                f" does not dequantise ({', '.join((_PACKED, *_PLAIN))}); {_FULL_ONES}"
            )
        yield _group(str(name), place, told, weights, str(kind))


def _group(name: str, place: str, told: Mapping[str, Any], weights: Mapping[str, Any], kind: str) -> _Group:
    """Return one entry of `config_groups` as a `_Group`; `kind` is its format.

    `place` names the entry in errors. Raises BadInput for a setting that no format has.
    """
    bits, numbers = weights.get("num_bits", 8), weights.get("type", "int")
    if type(bits) is not int or not 1 <= bits <= 8 or numbers not in ("int", "float"):
        raise _unread(f"{place}.weights", f"{bits} bits of {numbers}")
    if (kind != _PACKED and bits != 8) or weights.get("dynamic") not in (None, False):
        raise _unread(f"{place}.weights", f"{bits} bits in {kind}")
    size, block = weights.get("group_size"), weights.get("block_structure")
    inferred = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.get("strategy") or inferred
    if strategy not in _STRATEGIES:
        raise _unread(f"{place}.weights.strategy", strategy)
    if strategy == "group" and not (type(size) is int and size > 0):
        raise _unread(f"{place}.weights.group_size", size)
    pair = isinstance(block, list) and len(block) == 2 and all(type(each) is int and each > 0 for each in block)
    if strategy == "block" and not pair:
        raise _unread(f"{place}.weights.block_structure", block)
    symmetric = weights.get("symmetric", True)
    if type(symmetric) is not bool:
        raise _unread(f"{place}.weights.symmetric", symmetric)
    blocks: dict[str, Any] = {"tensor": (0, 0), "channel": (1, 0), "group": (1, size), "block": block}
    rows, columns = blocks[strategy]
    code = Code(bits, numbers == "float", kind == _PACKED, symmetric, str(strategy), (rows, columns))
    return _Group(name, tuple(_texts(told, "targets", place)), kind, code)


def _texts(settings: Mapping[str, Any], key: str, place: str = "") -> list[str]:
    """Return the list of texts at `key`, empty where there is none. Raises BadInput for any other value."""
    found = settings.get(key) or []
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise _unread(f"{place}.{key}" if place else key, found)
    return found


def _unread(place: str, found: object) -> BadInput:
    """Return the error for the value `found` of the setting `place`, which no format has."""
    shown = printable(str(found), 60)
    return BadInput(f"config.json: `{QUANTISATION}.{place}` is {shown}, which no format has; {OWN_CONFIG}")
