"""Reading and writing safetensors headers; every invariant is checked before any tensor byte is used.

A file is 8 bytes of little-endian header length N, N bytes of JSON, then the tensors without holes. The JSON maps each
name to dtype, shape and offsets relative to the end of the header.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from surgeon.checkpoint.strict_json import parse_json_strict
from surgeon.errors import BadInput, printable

# The alignment in bytes that vector instructions of today's processors may need.
ALIGNMENT = 64
# The safetensors library has the same limit.
MAX_HEADER_BYTES = 100_000_000
# The deepest nesting in a header: {name: {"shape": [...]}}.
_MAX_DEPTH = 3
# The largest count: torch and all readers use signed 64-bit integers.
_MAX_COUNT = 2**63 - 1
_AGAIN = "is the file damaged? download it again"
_LFS_POINTER = b"version https://git-lfs"
_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}

# Bits of one element, for every dtype the format knows (safetensors 0.8).
DTYPE_BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


class FloatDtype(NamedTuple):
    """A floating dtype: its name in torch, and its format code in `struct` (None: `struct` has no such format)."""

    torch: str
    packed: str | None


# The dtypes that surgery computes with.
FLOAT_DTYPES: dict[str, FloatDtype] = {
    "F64": FloatDtype("float64", "<d"),
    "F32": FloatDtype("float32", "<f"),
    "F16": FloatDtype("float16", "<e"),
    "BF16": FloatDtype("bfloat16", None),
}

# The dtypes of quantised weights and scales, which surgery moves as bytes. In each, zero bytes encode the value zero.
QUANTISED_DTYPES = ("F8_E4M3", "F8_E8M0", "U8", "I8", "I32")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor's entry in a header. `begin` and `end` are byte offsets in the file `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int
    # Bytes of the tensor, and number of its elements.
    nbytes: int = field(init=False, repr=False, compare=False)
    numel: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", self.end - self.begin)
        object.__setattr__(self, "numel", math.prod(self.shape))

    def first(self, shape: tuple[int, ...]) -> TensorInfo | None:
        """Return the first rows as a tensor of `shape`; None where `shape` is no leading part of this tensor."""
        if self.shape == shape:
            return self
        fits = bool(shape) and self.shape[1:] == shape[1:] and 0 < shape[0] < self.shape[0]
        nbytes = self.nbytes // self.shape[0] * shape[0] if fits else 0
        return replace(self, shape=shape, end=self.begin + nbytes) if fits else None


@dataclass(frozen=True)
class Header:
    """One file's header: tensors in the order of their data, and the sha256 of the 8 + N header bytes."""

    tensors: tuple[TensorInfo, ...]
    metadata: dict[str, str] = field(hash=False)
    data_begin: int
    sha256: str


def read_header(fd: int, *, file: str) -> Header:
    """Read and check the header of the open file `fd`; errors call it `file`.

    Raises BadInput where the header breaks an invariant of the format, or the file's size does not fit it.
    """
    size = os.fstat(fd).st_size
    first = _pread(fd, 64)
    length = header_length(first, file=file, file_size=size)
    return parse_header(_pread(fd, 8 + length), file=file, file_size=size)


def header_bytes(fd: int, header: Header, *, file: str) -> bytes:
    """Return the bytes before the data of the open file `fd`. Raises BadInput where they no longer match `header`."""
    found = _pread(fd, header.data_begin)
    if hashlib.sha256(found).hexdigest() != header.sha256:
        raise BadInput(f"{printable(file)}: changed meanwhile; start again when nothing writes to it")
    return found


def header_length(first: bytes, *, file: str, file_size: int) -> int:
    """Return N, the length of the JSON, from a file's first bytes (8 are needed, 64 to recognise a git-lfs pointer).

    Raises BadInput where the file is a git-lfs pointer, too short or truncated, or the header is too large.
    """
    shown = printable(file)
    if first.startswith(_LFS_POINTER):
        raise BadInput(f"{shown}: a git-lfs pointer, not the weights themselves; run `git lfs pull` in the folder")
    if len(first) < 8:
        raise BadInput(f"{shown}: {file_size} bytes, too short for a safetensors file; download it again")
    length: int = struct.unpack("<Q", first[:8])[0]
    if length > MAX_HEADER_BYTES:
        raise BadInput(
            f"{shown}: the file announces a header of {length:,} bytes, at most {MAX_HEADER_BYTES:,} are read;"
            " is this a safetensors file?"
        )
    if 8 + length > file_size:
        raise BadInput(
            f"{shown}: truncated, {8 + length - file_size:,} bytes of the header itself are missing; download it again"
        )
    return length


def parse_header(prefix: bytes, *, file: str, file_size: int) -> Header:
    """Parse the header from the first 8 + N bytes of a file of `file_size` bytes; errors call the file `file`.

    Raises BadInput where the header breaks an invariant of the format, or the size does not fit it.
    """
    shown = printable(file)
    if len(prefix) < 9 or prefix[8:9] != b"{":
        raise BadInput(f"{shown}: the header is not a JSON object; is this a safetensors file?")
    parsed = parse_json_strict(prefix[8:], file=f"{file} (header)", max_depth=_MAX_DEPTH)
    if not isinstance(parsed, dict):
        raise BadInput(f"{shown}: the header is not a JSON object; {_AGAIN}")
    metadata = _metadata(parsed.pop(_METADATA, {}), shown)
    data_begin = len(prefix)
    tensors = sorted(
        (_tensor(name, entry, file, data_begin) for name, entry in parsed.items()),
        key=lambda info: (info.begin, info.end),
    )
    _check_contiguous(tensors, shown, data_begin, file_size)
    return Header(tuple(tensors), metadata, data_begin, hashlib.sha256(prefix).hexdigest())


def _metadata(found: Any, shown: str) -> dict[str, str]:
    """Return the header's metadata unchanged. Raises BadInput where it does not map strings to strings."""
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise BadInput(f"{shown}: `{_METADATA}` in the header must map strings to strings; {_AGAIN}")
    return found


class _Odd(ValueError):
    """A fault in a tensor's entry; the caller adds the names of tensor and file."""


def _tensor(name: str, entry: Any, file: str, data_begin: int) -> TensorInfo:
    """Return the checked entry of one tensor.

    Raises BadInput, with the file's and tensor's names, for a faulty entry.
    """
    try:
        return _checked(name, entry, file, data_begin)
    except _Odd as odd:
        raise BadInput(f"{printable(file)}: tensor {printable(name)}: {odd}; {_AGAIN}") from None


def _checked(name: str, entry: Any, file: str, data_begin: int) -> TensorInfo:
    """Return one tensor's entry with file offsets.

    Raises _Odd where fields, dtype, shape or data offsets are faulty.
    """
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise _Odd("expected exactly dtype, shape and data_offsets in the header")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _Odd(f"unknown dtype {printable(str(dtype))!r}; expected one of {', '.join(DTYPE_BITS)}")
    if not _counts(shape):
        raise _Odd(f"shape {printable(str(shape))} is not a list of whole numbers from 0 to 2^63 - 1")
    if not _counts(offsets) or len(offsets) != 2:
        raise _Odd(f"data_offsets {printable(str(offsets))} are not two whole numbers")
    begin, end = offsets
    if begin > end:
        raise _Odd(f"data_offsets end ({end}) before they begin ({begin})")
    expected = _nbytes(dtype, shape)
    if end - begin != expected:
        raise _Odd(f"{dtype} {printable(str(shape))} takes {expected} bytes, data_offsets {end - begin}")
    return TensorInfo(name, dtype, tuple(shape), file, data_begin + begin, data_begin + end)


def _counts(found: Any) -> bool:
    """Return whether a JSON value is a list of whole numbers from 0 to 2^63 - 1."""
    # `type`, not isinstance: JSON's true is an int to Python.
    return isinstance(found, list) and all(type(n) is int and 0 <= n <= _MAX_COUNT for n in found)


def _nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the size in bytes of a tensor. Raises _Odd on overflow, or where it is not a whole number of bytes."""
    bits = 1
    for size in (*shape, DTYPE_BITS[dtype]):
        bits *= size
        # Checked at every step, as the library does: a later 0 must not hide an overflow, and the product stays small.
        if bits > _MAX_COUNT:
            raise _Odd(f"shape {printable(str(list(shape)))} overflows 64 bits")
    if bits % 8:
        raise _Odd(f"{dtype} {printable(str(list(shape)))} does not end on a whole byte")
    return bits // 8


def _check_contiguous(tensors: Sequence[TensorInfo], shown: str, data_begin: int, file_size: int) -> None:
    """Raise BadInput where the sorted tensors do not fill the file from `data_begin` on, one directly after another."""
    position = data_begin
    for info in tensors:
        if info.begin != position:
            kind = "overlaps the tensor before it" if info.begin < position else "leaves a hole before it"
            raise BadInput(
                f"{shown}: tensor {printable(info.name)} {kind}: begins at {info.begin - data_begin},"
                f" expected {position - data_begin}; {_AGAIN}"
            )
        position = info.end
    if position > file_size:
        raise BadInput(f"{shown}: truncated, {position - file_size:,} bytes are missing; download it again")
    if position < file_size:
        raise BadInput(f"{shown}: {file_size - position:,} bytes after the last tensor that no tensor owns; {_AGAIN}")


def build_header(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]], *, metadata: Mapping[str, str], phase: int = 0
) -> tuple[bytes, list[tuple[int, int]]]:
    """Build the header of a file that holds `tensors` (name, dtype, shape) in this order.

    Return (prefix, places): the bytes before the data (length, JSON padded with spaces), and each tensor's absolute
    (begin, end) in bytes. The data begins at `phase` modulo 64: float32 products on mapped weights round by their
    alignment, so a copy that must compute the same bits needs its original's alignment. The same arguments give the
    same bytes. Raises BadInput where the result could not be read back.
    """
    assert phase % 8 == 0, phase
    header: dict[str, Any] = {_METADATA: dict(sorted(metadata.items()))} if metadata else {}
    position = 0
    places: list[tuple[int, int]] = []
    for name, dtype, shape in tensors:
        if name in header or name == _METADATA:
            raise BadInput(f"{printable(name)}: a file cannot hold two tensors of this name; rename one")
        try:
            end = position + _nbytes(dtype, shape)
        except _Odd as odd:
            raise BadInput(f"{printable(name)}: {odd}; {_AGAIN}") from None
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        places.append((position, end))
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * ((phase - len(text) - 8) % ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise BadInput(
            f"a header of {len(text):,} bytes is more than the {MAX_HEADER_BYTES:,} that readers allow; use more shards"
        )
    prefix = struct.pack("<Q", len(text)) + text
    return prefix, [(len(prefix) + begin, len(prefix) + end) for begin, end in places]


def _pread(fd: int, count: int) -> bytes:
    """Return the first `count` bytes of a file, or fewer where the file is shorter."""
    content = b""
    while part := os.pread(fd, count - len(content), len(content)):
        content += part
    return content


def check_dtype(name: str) -> None:
    """Raise BadInput for a name that is neither `auto` nor a floating dtype of torch that shards can hold."""
    known = sorted(dtype.torch for dtype in FLOAT_DTYPES.values())
    if name != "auto" and name not in known:
        raise BadInput(f"dtype {printable(name)!r} is not known; use auto, {', '.join(known)}")
