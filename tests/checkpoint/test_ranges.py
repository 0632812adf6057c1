"""Bytes arrive whatever the system does with a copy: short, refused, or at the end too early."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from surgeon.checkpoint import ranges
from surgeon.checkpoint.ranges import copy_range, reserve, sha256_range, write_all, zeros_sha256
from surgeon.errors import BadInput

CONTENT = bytes(os.urandom(300_001))


@pytest.fixture
def files(tmp_path: Path) -> Iterator[tuple[int, int]]:
    (tmp_path / "source").write_bytes(CONTENT)
    source = os.open(tmp_path / "source", os.O_RDONLY)
    target = os.open(tmp_path / "target", os.O_RDWR | os.O_CREAT)
    yield source, target
    os.close(source)
    os.close(target)


def refuse_with(number: int):
    def refuse(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    return refuse


def short(most: int):
    real = os.copy_file_range
    return lambda source, target, count, **offsets: real(source, target, min(count, most), **offsets)


def short_then_refused():
    real, calls = os.copy_file_range, iter(range(100))

    def copy(source: int, target: int, count: int, **offsets: int) -> int:
        if next(calls) == 2:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return real(source, target, min(count, 70_000), **offsets)

    return copy


KERNELS = {
    "as it is": lambda: os.copy_file_range,
    "copies short": lambda: short(77_777),
    "does not know the call": lambda: refuse_with(errno.ENOSYS),
    "other file system": lambda: refuse_with(errno.EXDEV),
    "not supported": lambda: refuse_with(errno.EOPNOTSUPP),
    "pretends": lambda: lambda *_, **__: 0,
    "gives up halfway": short_then_refused,
}


@pytest.mark.skipif(not hasattr(os, "copy_file_range"), reason="no kernel copy here to take apart")
@pytest.mark.parametrize("kernel", KERNELS)
def test_all_bytes_arrive(kernel: str, files: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "copy_file_range", KERNELS[kernel]())
    monkeypatch.setattr(ranges, "_BUFFER", 50_000)
    source, target = files
    heard: list[int] = []
    copy_range(source, target, source_offset=1, target_offset=13, count=300_000, progress=heard.append)
    assert os.pread(target, 400_000, 0) == bytes(13) + CONTENT[1:]
    assert sum(heard) == 300_000


def test_a_system_without_kernel_copy(files: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "copy_file_range", raising=False)
    copy_range(*files, source_offset=0, target_offset=0, count=len(CONTENT), progress=None)
    assert os.pread(files[1], 400_000, 0) == CONTENT


@pytest.mark.parametrize("kernel", [True, False])
def test_a_source_that_ends_early_is_named(
    kernel: bool, files: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernel:
        monkeypatch.delattr(os, "copy_file_range", raising=False)
    with pytest.raises(BadInput, match=r"source: ends 99 bytes early"):
        copy_range(*files, source_offset=300_000, target_offset=0, count=100)


@pytest.mark.skipif(not hasattr(os, "copy_file_range"), reason="no kernel copy here to take apart")
def test_a_full_disk_is_not_hidden(files: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (errno.ENOSPC, errno.EIO):
        monkeypatch.setattr(os, "copy_file_range", refuse_with(number))
        with pytest.raises(OSError, match=os.strerror(number)):
            copy_range(*files, source_offset=0, target_offset=0, count=100)


def test_nothing_to_copy(files: tuple[int, int]) -> None:
    copy_range(*files, source_offset=0, target_offset=0, count=0)
    assert os.fstat(files[1]).st_size == 0


@pytest.mark.parametrize("data", [b"", b"abc", bytearray(b"abcdef"), memoryview(CONTENT)[5:90_000]])
def test_write_all_whatever_the_system_takes(
    data: bytes, files: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, piece, offset: real(fd, piece[:1_000], offset))
    write_all(files[1], data, 7)
    assert os.pread(files[1], 400_000, 7) == bytes(data)


def test_wide_items_are_written_as_bytes(files: tuple[int, int]) -> None:
    write_all(files[1], memoryview(b"12345678").cast("I"), 0)
    assert os.pread(files[1], 100, 0) == b"12345678"


def test_reserved_room_is_zeros(files: tuple[int, int]) -> None:
    reserve(files[1], 5_000_000)
    assert os.fstat(files[1]).st_size == 5_000_000
    assert os.pread(files[1], 5_000_000, 0) == bytes(5_000_000)


@pytest.mark.parametrize(("begin", "end"), [(0, 300_001), (0, 0), (17, 17), (5, 123_456), (300_000, 300_001)])
def test_digests_of_ranges(begin: int, end: int, files: tuple[int, int]) -> None:
    assert sha256_range(files[0], begin, end) == hashlib.sha256(CONTENT[begin:end]).hexdigest()


def test_digests_across_buffers(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(CONTENT * 30)
    fd = os.open(tmp_path / "big", os.O_RDONLY)
    assert sha256_range(fd, 3, 8_999_999) == hashlib.sha256((CONTENT * 30)[3:8_999_999]).hexdigest()
    os.close(fd)


def test_a_digest_past_the_end_is_refused(files: tuple[int, int]) -> None:
    with pytest.raises(BadInput, match="source: ends 1 bytes early"):
        sha256_range(files[0], 0, 300_002)


@pytest.mark.parametrize("size", [0, 1, 4 * 1024 * 1024, 9_000_001])
def test_digests_of_zeros(size: int) -> None:
    assert zeros_sha256(size) == hashlib.sha256(bytes(size)).hexdigest()
