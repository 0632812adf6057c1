"""safetensors headers: one error a broken invariant, golden bytes, and the library as an oracle."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from surgeon.checkpoint.header import (
    DTYPE_BITS,
    FLOAT_DTYPES,
    Header,
    build_header,
    header_bytes,
    parse_header,
    read_header,
)
from surgeon.errors import BadInput
from tests.checkpoint.files import raw_file, tensor_bytes


def read(content: bytes, path: Path, file: str = "shard.safetensors") -> Header:
    path.write_bytes(content)
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_header(fd, file=file)
    finally:
        os.close(fd)


def parse(content: bytes) -> Header:
    """Without a file in between: what fuzzing can afford."""
    length = struct.unpack("<Q", content[:8])[0] if len(content) >= 8 else 0
    return parse_header(content[: 8 + length], file="shard.safetensors", file_size=len(content))


def entry(dtype: str, shape: object, begin: object, end: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


GOOD = {"b": entry("F32", [2], 4, 12), "a": entry("BF16", [2, 1], 0, 4), "__metadata__": {"format": "pt"}}

BROKEN: dict[str, tuple[bytes, list[str]]] = {
    "empty": (b"", ["too short"]),
    "seven bytes": (b"1234567", ["7 bytes", "too short"]),
    "header longer than the library allows": (struct.pack("<Q", 100_000_001) + b"{}", ["100,000,001"]),
    "length is all ones": (b"\xff" * 16, ["18,446,744,073,709,551,615"]),
    "header past the end": (struct.pack("<Q", 1000) + b"{}", ["truncated", "998 bytes"]),
    "no header": (raw_file(b""), ["not a JSON object"]),
    "a list": (raw_file(b"[]"), ["not a JSON object"]),
    "space first": (raw_file(b" {}"), ["not a JSON object"]),
    "not JSON": (raw_file(b"{nonsense}"), ["not valid JSON"]),
    "not UTF-8": (raw_file(b'{"\xff": 1}'), ["not UTF-8"]),
    "deeper than a header is": (raw_file({"a": entry("F32", [[1]], 0, 4)}, b"1234"), ["nested more than 3"]),
    "name twice": (
        raw_file('{"a":%s,"a":%s}' % ((json.dumps(entry("F32", [1], 0, 4)),) * 2), b"1234"),
        ["'a' occurs twice"],
    ),
    "unknown dtype": (raw_file({"a": entry("BF17", [1], 0, 2)}, b"12"), ["tensor a", "BF17", "BF16"]),
    "dtype no string": (raw_file({"a": entry(7, [1], 0, 2)}, b"12"), ["tensor a", "'7'"]),
    "negative size": (raw_file({"a": entry("F32", [-1], 0, 4)}, b"1234"), ["tensor a", "[-1]"]),
    "fractional size": (raw_file({"a": entry("F32", [1.0], 0, 4)}, b"1234"), ["tensor a", "[1.0]"]),
    "size is true": (raw_file({"a": entry("F32", [True], 0, 4)}, b"1234"), ["tensor a", "[True]"]),
    "size is minus zero": (raw_file('{"a":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}'), ["minus"]),
    "shape no list": (raw_file({"a": entry("F32", 1, 0, 4)}, b"1234"), ["tensor a", "shape 1"]),
    "one offset": (
        raw_file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, b"1234"),
        ["tensor a", "data_offsets"],
    ),
    "offsets turned round": (raw_file({"a": entry("F32", [1], 4, 0)}, b"1234"), ["tensor a", "before they begin"]),
    "size against offsets": (raw_file({"a": entry("F32", [2], 0, 4)}, b"1234"), ["tensor a", "takes 8 bytes"]),
    "product overflows": (raw_file({"a": entry("F32", [2**62, 2**62], 0, 4)}, b"1234"), ["tensor a", "overflows"]),
    "product overflows before a zero": (
        raw_file({"a": entry("F32", [2**40, 2**40, 0], 0, 0)}),
        ["tensor a", "overflows"],
    ),
    "size beyond 64 bits": (raw_file({"a": entry("F32", [0, 2**64], 0, 0)}), ["tensor a", "2^63"]),
    "half a byte": (raw_file({"a": entry("F4", [3], 0, 1)}, b"1"), ["tensor a", "whole byte"]),
    "hole at the beginning": (raw_file({"a": entry("F32", [1], 4, 8)}, b"12345678"), ["tensor a", "hole"]),
    "hole between": (
        raw_file({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 8, 12)}, b"0" * 12),
        ["tensor b", "hole", "expected 4"],
    ),
    "overlap": (
        raw_file({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 2, 6)}, b"0" * 6),
        ["tensor b", "overlaps"],
    ),
    "truncated": (raw_file({"a": entry("F32", [5], 0, 20)}, b"0" * 13), ["truncated", "7 bytes are missing"]),
    "bytes left over": (raw_file({"a": entry("F32", [1], 0, 4)}, b"0" * 9), ["5 bytes after the last tensor"]),
    "extra field": (raw_file({"a": entry("F32", [1], 0, 4) | {"x": 1}}, b"1234"), ["tensor a", "exactly"]),
    "missing field": (raw_file({"a": {"dtype": "F32", "shape": [1]}}, b"1234"), ["tensor a", "exactly"]),
    "entry no object": (raw_file({"a": 3}), ["tensor a", "exactly"]),
    "metadata of numbers": (raw_file({"__metadata__": {"a": 1}}), ["__metadata__"]),
    "metadata a list": (raw_file({"__metadata__": []}), ["__metadata__"]),
    "metadata null": (raw_file({"__metadata__": None}), ["__metadata__"]),
    "git-lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
        ["git lfs pull"],
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_every_broken_invariant_is_named(case: str, tmp_path: Path) -> None:
    content, words = BROKEN[case]
    with pytest.raises(BadInput) as caught:
        read(content, tmp_path / "shard")
    message = str(caught.value)
    assert message.startswith("shard.safetensors")
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_sound_file(tmp_path: Path) -> None:
    content = raw_file(GOOD, b"x" * 12)
    header = read(content, tmp_path / "shard")
    assert [(i.name, i.dtype, i.shape, i.nbytes, i.numel) for i in header.tensors] == [
        ("a", "BF16", (2, 1), 4, 2),
        ("b", "F32", (2,), 8, 2),
    ]
    assert header.tensors[0].begin == header.data_begin == len(content) - 12
    assert header.tensors[1].end == len(content)
    assert header.metadata == {"format": "pt"}


def test_names_cannot_reach_the_terminal_raw(tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        read(raw_file({"\x1b[31m\nx": entry("F32", [1], 4, 8)}, b"1" * 8), tmp_path / "shard", file="s\x1b.safetensors")
    assert "\x1b" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("phase", [0, 8, 56])
def test_golden_bytes(phase: int) -> None:
    wanted = [("w", "BF16", (2, 3)), ("e", "F32", (0,)), ("s", "F64", ())]
    prefix, places = build_header(wanted, metadata={"format": "pt"}, phase=phase)
    text = (
        b'{"__metadata__":{"format":"pt"},"w":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},'
        b'"e":{"dtype":"F32","shape":[0],"data_offsets":[12,12]},"s":{"dtype":"F64","shape":[],"data_offsets":[12,20]}}'
    )
    begin = {0: 256, 8: 264, 56: 248}[phase]
    assert prefix == struct.pack("<Q", begin - 8) + text + b" " * (begin - 8 - len(text))
    assert places == [(begin, begin + 12), (begin + 12, begin + 12), (begin + 12, begin + 20)]


@pytest.mark.parametrize("tensors", [[("a", "F32", (1,))] * 2, [("__metadata__", "F32", (1,))]])
def test_what_cannot_be_written(tensors: list[tuple[str, str, tuple[int, ...]]]) -> None:
    with pytest.raises(BadInput, match="cannot hold two"):
        build_header(tensors, metadata={})


def test_dtypes_are_the_library_s() -> None:
    for dtype, bits in DTYPE_BITS.items():
        content = raw_file({"a": entry(dtype, [8], 0, bits)}, b"0" * bits)
        assert safetensors.deserialize(content)[0][1]["dtype"] == dtype
        assert parse(content).tensors[0].nbytes == bits
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.deserialize(raw_file({"a": entry("F17", [8], 0, 8)}, b"0" * 8))
    # The library's message lists what it knows: a dtype added by a new version shows here.
    assert set(str(caught.value).split("expected one of ")[1].split(" at line")[0].replace("`", "").split(", ")) == set(
        DTYPE_BITS
    )
    assert DTYPE_BITS.keys() >= FLOAT_DTYPES.keys()


NAMES = st.text(min_size=0, max_size=8).filter(lambda name: name != "__metadata__")
TENSORS = st.dictionaries(
    NAMES,
    st.tuples(st.sampled_from(["F32", "BF16", "F64", "F16", "I64"]), st.lists(st.integers(0, 3), max_size=3)),
    max_size=4,
)


@settings(max_examples=150)
@given(tensors=TENSORS, metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2))
def test_the_library_reads_what_we_write(tensors: dict[str, tuple[str, list[int]]], metadata: dict[str, str]) -> None:
    wanted = [(name, dtype, tuple(shape)) for name, (dtype, shape) in tensors.items()]
    prefix, places = build_header(wanted, metadata=metadata)
    assert build_header(wanted, metadata=dict(reversed(metadata.items())))[0] == prefix
    data = b"".join(tensor_bytes(name, end - begin) for (name, _, _), (begin, end) in zip(wanted, places, strict=True))
    theirs = {
        name: (i["dtype"], tuple(i["shape"]), bytes(i["data"])) for name, i in safetensors.deserialize(prefix + data)
    }
    assert theirs == {
        name: (dtype, shape, (prefix + data)[begin:end])
        for (name, dtype, shape), (begin, end) in zip(wanted, places, strict=True)
    }
    ours = parse(prefix + data)
    assert ours.metadata == metadata
    assert sorted((i.begin, i.end) for i in ours.tensors) == sorted(places)


def accepted_by_the_library(content: bytes) -> bool:
    try:
        safetensors.deserialize(content)
    except safetensors.SafetensorError:
        return False
    return True


def accepted_by_us(content: bytes) -> bool:
    try:
        header = parse(content)
    except BadInput as error:
        assert "\n" not in str(error)
        return False
    position = header.data_begin
    for info in header.tensors:
        assert info.begin == position
        position = info.end
    assert position == len(content)
    return True


SOUND = raw_file(
    {
        "__metadata__": {"format": "pt"},
        "a": entry("F32", [2, 2], 0, 16),
        "empty": entry("BF16", [0, 3], 16, 16),
        "b": entry("BF16", [3], 16, 22),
    },
    b"0123456789abcdef012345",
)
CHARACTERS = b'0123456789-+.eE[]{}:,"\\ ntfFB_u\x00\xff'


@settings(max_examples=1500)
@given(st.lists(st.tuples(st.integers(0, len(SOUND) - 1), st.sampled_from(list(CHARACTERS))), min_size=1, max_size=4))
def test_what_the_library_refuses_we_refuse(changes: list[tuple[int, int]]) -> None:
    content = bytearray(SOUND)
    for position, byte in changes:
        content[position] = byte
    if accepted_by_us(bytes(content)):
        assert accepted_by_the_library(bytes(content))


@settings(max_examples=300)
@given(st.integers(0, len(SOUND)), st.binary(max_size=12), st.integers(0, 12))
def test_cut_and_stuffed_files(position: int, stuffed: bytes, cut: int) -> None:
    content = SOUND[:position] + stuffed + SOUND[position + cut :]
    if len(content) >= 8 and accepted_by_us(content):
        assert accepted_by_the_library(content)


WILD = st.fixed_dictionaries(
    {},
    optional={
        name: st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["F32", "BF16", "F4", "U8"]),
                "shape": st.lists(st.sampled_from([0, 1, 2, 4, 2**31, 2**62, 2**64]), max_size=3),
                "data_offsets": st.lists(st.sampled_from([0, 2, 4, 8, 16, 2**63]), min_size=2, max_size=2),
            }
        )
        for name in ("a", "b", "c")
    },
)


@settings(max_examples=500)
@given(WILD, st.sampled_from([0, 4, 8, 12, 16]))
def test_wild_headers_are_judged_as_the_library_judges_them(header: dict, size: int) -> None:
    content = raw_file(header, b"0" * size)
    assert accepted_by_us(content) == accepted_by_the_library(content)


HOSTILE = """
import os, resource, sys
from surgeon.checkpoint.header import read_header
from surgeon.errors import BadInput
before = resource.getrusage(resource.RUSAGE_SELF)
try:
    read_header(os.open(sys.argv[1], os.O_RDONLY), file="shard")
except BadInput as error:
    after = resource.getrusage(resource.RUSAGE_SELF)
    # Not ru_maxrss, which begins at what the parent held when it forked.
    peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    print(len(str(error)), after.ru_utime - before.ru_utime, int(peak.split()[1]) * 1024)
"""


@pytest.mark.parametrize(
    ("text", "times", "end"),
    [
        ('"a":[],', 12_000_000, ""),
        ('"a":[],', 700_000, '"a":[]}'),
        ("[", 90_000_000, ""),
        ("1", 90_000_000, ""),
        ('\\"', 45_000_000, ""),
        ('"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},', 150_000, '"b":0}'),
        ('"a":{"dtype":"F32","shape":[' + "2222222222," * 1000, 1_300, "1]}}"),
    ],
    ids=["values", "fewer values", "depth", "digits", "quotes", "tensors", "dimensions"],
)
def test_hostile_headers_cost_bounded_time_and_memory(text: str, times: int, end: str, tmp_path: Path) -> None:
    """Headers of up to 90 MB: refused within 20 s of processor time and 700 MB, whatever they hold."""
    path = tmp_path / "shard"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 1 + len(text) * times + len(end)) + b"{")
        for _ in range(times // 100):
            file.write((text * 100).encode())
        file.write(end.encode())
    ran = subprocess.run([sys.executable, "-c", HOSTILE, str(path)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    length, seconds, peak = map(float, ran.stdout.split())
    assert length < 500
    assert seconds < 20
    assert peak < 700e6


def test_a_header_that_changed_since_it_was_read_is_refused(tmp_path: Path) -> None:
    """Another name of the same length: nothing but the bytes themselves shows it."""
    first, second = (raw_file({name: entry("F32", [2], 0, 8)}, bytes(8)) for name in ("a", "b"))
    assert len(first) == len(second)
    path = tmp_path / "shard.safetensors"
    found = read(first, path)
    with path.open("rb+") as file:
        assert header_bytes(file.fileno(), found, file="shard") == first[:-8]
        file.write(second)
        file.flush()
        with pytest.raises(BadInput, match="shard: changed meanwhile; start again"):
            header_bytes(file.fileno(), found, file="shard")
