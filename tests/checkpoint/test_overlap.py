from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from surgeon.checkpoint.folder import CheckpointFolder, ReadAhead
from surgeon.checkpoint.ranges import WriteBehind
from surgeon.errors import BadInput
from tests import tiny


@pytest.fixture
def base(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder.open(tiny.checkpoint(tmp_path / "base", "llama"))


def layer(base: CheckpointFolder, number: int) -> list[str]:
    return [name for name in base.tensors if f".layers.{number}." in name]


class Counted:
    """A folder's tensors, each read noted, and the most bytes that were read ahead at a time."""

    def __init__(self, base: CheckpointFolder) -> None:
        self.base, self.tensors, self.names = base, base.tensors, []

    def read(self, name: str) -> bytearray:
        self.names.append((name, threading.current_thread().name.startswith("read-ahead")))
        return self.base.read(name)


def test_tensors_are_read_ahead_once_each_and_in_order(base: CheckpointFolder) -> None:
    counted = Counted(base)
    ahead = ReadAhead(counted)  # type: ignore[arg-type]
    now, then = layer(base, 0), layer(base, 1)
    ahead.expect(now, then)
    for name in [*now, *then]:
        assert ahead.read(name) == base.read(name)
    assert counted.names == [(name, True) for name in [*now, *then]]
    # A second time, and what nobody expected, is read by whoever asks.
    for name in (now[0], "model.norm.weight"):
        assert ahead.read(name) == base.read(name)
        assert counted.names[-1] == (name, False)
    ahead.close()


def test_no_more_than_one_layer_lies_ready(base: CheckpointFolder) -> None:
    ahead = ReadAhead(base)
    now, then = layer(base, 0), layer(base, 1)
    size = sum(base.tensors[name].nbytes for name in now)
    ahead.expect(now, then)
    for name in [*now, *then]:
        assert sum(base.tensors[coming].nbytes for coming in ahead._coming) <= size
        ahead.read(name)
    assert not ahead._coming
    # What was expected and never asked for makes room for what is expected now.
    ahead.expect(layer(base, 2), [])
    ahead.expect(layer(base, 3), [])
    assert set(ahead._coming) == set(layer(base, 3))
    ahead.close()
    assert not ahead._coming


def test_a_tensor_asked_for_before_its_turn(base: CheckpointFolder) -> None:
    ahead = ReadAhead(base)
    now, then = layer(base, 0), layer(base, 1)
    ahead.expect(now, then)
    assert ahead.read(then[-1]) == base.read(then[-1])
    for name in [*now, *then[:-1]]:
        ahead.read(name)
    assert not ahead._coming
    ahead.close()


def test_a_base_cut_meanwhile_is_told_to_who_asks(base: CheckpointFolder) -> None:
    ahead = ReadAhead(base)
    names = layer(base, 0)
    for file in base.shards:
        with (base.path / file).open("r+b") as cut:
            cut.truncate(base.tensors[names[0]].begin)
    ahead.expect(names, [])
    with pytest.raises(BadInput):
        ahead.read(names[0])
    ahead.close()


def test_everything_is_written_in_order(tmp_path: Path) -> None:
    pieces = [os.urandom(1000 * k) for k in range(1, 40)]
    told: list[int] = []
    with (tmp_path / "file").open("w+b") as file:
        offset = 0
        with WriteBehind(file.fileno(), told.append) as behind:
            for piece in pieces:
                behind.write(memoryview(piece), offset)
                assert len(behind._pending) <= 4
                offset += len(piece)
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)
    assert told == [len(piece) for piece in pieces]


@pytest.mark.parametrize("pieces", [1, 50])
def test_an_error_of_writing_comes_out(pieces: int, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (tmp_path / "file").open("rb") as file, pytest.raises(OSError, match="Bad file descriptor"):  # noqa: SIM117
        with WriteBehind(file.fileno(), lambda _: None) as behind:
            for _ in range(pieces):
                behind.write(memoryview(b"bytes"), 0)


def test_after_an_error_nothing_is_under_way(tmp_path: Path) -> None:
    gate = threading.Event()
    told: list[int] = []

    def slow(count: int) -> None:
        gate.wait(0.2)
        told.append(count)

    with (tmp_path / "file").open("w+b") as file, pytest.raises(KeyboardInterrupt):  # noqa: SIM117
        with WriteBehind(file.fileno(), slow) as behind:
            for offset in range(3):
                behind.write(memoryview(b"x"), offset)
            raise KeyboardInterrupt
    assert len(told) <= 2
    assert not any(thread.name.startswith("write-behind") for thread in threading.enumerate())
