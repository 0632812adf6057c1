"""Pieces compose, associatively, and turn round; what is read is what they say, beside indexing by torch."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surgeon.checkpoint import piece_bytes as module
from surgeon.checkpoint.header import TensorInfo
from surgeon.checkpoint.piece_bytes import Gap, OtherBytes, compared, copy_pieces, in_files, places_of, read_in_order
from surgeon.checkpoint.pieces import Pieces, Span, indices, side_by_side, stacked, turned
from surgeon.errors import BadInput

# What every byte of a tensor is: a name for each byte of the first base, None for one that was made otherwise.
Content = list[str | None]
BEGIN = 5


def content_of(pieces: Pieces, held: Mapping[str, Content]) -> Content:
    """Byte by byte what `pieces` say, of tensors that hold this."""
    made: Content = [None] * pieces.nbytes
    for span in pieces.spans:
        for run in range(span.count):
            for byte in range(span.length):
                at = span.at + run * span.every + byte
                assert made[at] is None, "two spans at one place"
                made[at] = held[span.tensor][span.offset + run * span.step + byte]
    return made


def divisors(number: int) -> list[int]:
    return [by for by in range(1, number + 1) if number % by == 0]


def drawn(rng: random.Random, sizes: Mapping[str, int]) -> Pieces:
    """Slices in another order, tensors side by side, or runs at other distances, with bytes of its own between them."""
    name = rng.choice(list(sizes))
    kind = rng.choice(["slices", "columns", "runs"])
    if kind == "slices":
        before = rng.choice(divisors(sizes[name]))
        size = rng.choice(divisors(sizes[name] // before))
        order = [rng.randrange(size) for _ in range(rng.randint(1, size + 2))]
        return indices(name, (before, size, sizes[name] // before // size), 8, 1, order)
    if kind == "columns":
        before = rng.choice(divisors(sizes[name]))
        widths = [rng.randint(1, 4), sizes[name] // before, rng.randint(1, 4)]
        spans = side_by_side(widths, before=before)
        return Pieces.of(sum(widths) * before, spans).through({"1": Pieces.whole(name, sizes[name])})
    spans, at = [], rng.randint(0, 2)
    for source in rng.sample(list(sizes), 2):
        length = rng.randint(1, max(1, sizes[source] // 3))
        step = rng.randint(length, sizes[source])
        count = (sizes[source] - length) // step + 1
        every = length + rng.randint(0, 2)
        spans.append(Span(source, 0, length, at, count, *((step, every) if count > 1 else (0, 0))))
        at += (count - 1) * every + length
    return Pieces.of(at + rng.randint(0, 2), spans)


def surgeries(rng: random.Random) -> Iterator[tuple[dict[str, Pieces], dict[str, Content], dict[str, Content]]]:
    """Three maps, one on the output of the other, with what their tensors hold before and after."""
    held: dict[str, Content] = {
        f"b{n}": [f"b{n}.{at}" for at in range(rng.choice([4, 6, 8, 12, 24]))] for n in range(3)
    }
    for level in range(3):
        sizes = {name: len(content) for name, content in held.items()}
        made = {f"{level}.{n}": drawn(rng, sizes) for n in range(3)}
        after = {name: content_of(pieces, held) for name, pieces in made.items()}
        yield made, held, after
        held = after


@given(st.randoms(use_true_random=False))
def test_maps_compose_associatively_and_turn_round(rng: random.Random) -> None:
    (first, base, _), (second, _, _), (third, _, last) = surgeries(rng)
    left = {name: pieces.through(second).through(first) for name, pieces in third.items()}
    both = {name: pieces.through(first) for name, pieces in second.items()}
    right = {name: pieces.through(both) for name, pieces in third.items()}
    for name in third:
        assert content_of(left[name], base) == content_of(right[name], base) == last[name]
    there = {byte for content in last.values() for byte in content}
    back = turned(left, {name: len(content) for name, content in base.items()})
    for name, content in base.items():
        # Every byte that is still somewhere is found, and where it is said to be.
        assert content_of(back[name], last) == [byte if byte in there else None for byte in content]
        assert back[name].covered == there.issuperset(content)


def test_what_holds_all_of_a_tensor_comes_before_parts_of_others() -> None:
    maps = {"part": Pieces(4, (Span("it", 0, 4),)), "all": Pieces(9, (Span("it", 0, 8, 1),))}
    assert turned(maps, {"it": 8})["it"] == Pieces(8, (Span("all", 1, 8),))


# The default takes many rows at once; 96 bytes are two rows of the first shape, 32 less than one row of any.
@pytest.mark.parametrize("buffer", [module._BUFFER, 96, 32])
@pytest.mark.parametrize(("shape", "axis"), [((7, 12), 1), ((12, 7), 0), ((3, 6, 5), 1), ((2, 3, 6), 2)])
def test_slices_are_read_in_order(
    buffer: int, shape: tuple[int, ...], axis: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BUFFER", buffer)
    monkeypatch.setattr(module, "_CHUNK", buffer)
    value = torch.randn(shape)
    order = [0, 0, 2, 3, 1, 5, 4]
    order = [at for at in order if at < shape[axis]]
    wanted = value.index_select(axis, torch.tensor(order)).contiguous()
    file = tmp_path / "file"
    file.write_bytes(bytes(BEGIN) + value.numpy().tobytes())
    info = TensorInfo("it", "F32", shape, "file", BEGIN, BEGIN + value.nbytes)
    pieces = in_files({"": indices("it", shape, 32, axis, order)}, {"it": info})[""]
    with file.open("rb") as opened:
        found = [bytes(piece) for piece in read_in_order(pieces, lambda _: opened.fileno())]  # type: ignore[arg-type]
    assert b"".join(found) == wanted.numpy().tobytes()
    assert max(map(len, found)) <= max(buffer, wanted.nbytes if axis == 0 else buffer)
    file.write_bytes(file.read_bytes()[:-4])
    with file.open("rb") as opened, pytest.raises(BadInput, match="ends"):
        list(read_in_order(places_of({"it": info})["it"], lambda _: opened.fileno()))


Stored = tuple[dict[str, TensorInfo], bytes, dict[str, Content]]


def stored(sizes: Mapping[str, int]) -> Stored:
    """Tensors of these sizes in a file: where they lie, the file's content, and what each holds."""
    held: dict[str, Content] = {}
    infos, begin, content = {}, 0, b""
    for name, size in sizes.items():
        data = hashlib.sha256(name.encode()).digest()[:size]
        held[name] = [f"{byte:02x}" for byte in data]
        infos[name] = TensorInfo(name, "U8", (size,), "file", begin, begin + size)
        begin, content = begin + size, content + data
    return infos, content, held


@given(st.randoms(use_true_random=False))
def test_what_is_read_and_copied_is_what_pieces_say(
    tmp_path_factory: pytest.TempPathFactory, rng: random.Random
) -> None:
    sizes = {"a": rng.choice([6, 12, 24]), "b": rng.choice([4, 8])}
    pieces = drawn(rng, sizes)
    infos, content, held = stored(sizes)
    file, target = (tmp_path_factory.getbasetemp() / name for name in ("drawn", "laid"))
    file.write_bytes(content)
    target.write_bytes(b"\xff" * (pieces.nbytes + 3))
    places = in_files({"": pieces}, infos)[""]
    found: Content = []
    moved: list[int] = []
    with file.open("rb") as opened, target.open("r+b") as laid:
        for piece in read_in_order(places, lambda _: opened.fileno()):
            found += [None] * piece.length if isinstance(piece, Gap) else [f"{byte:02x}" for byte in piece]
        copy_pieces(
            places,
            lambda _: opened.fileno(),
            target=laid.fileno(),
            begin=BEGIN - 2,
            progress=moved.append,
        )
    told = content_of(pieces, held)
    assert found == told
    copied = [f"{byte:02x}" for byte in target.read_bytes()]
    assert copied == ["ff"] * (BEGIN - 2) + [byte or "ff" for byte in told]
    assert sum(moved) == sum(byte is not None for byte in told) == sum(span.nbytes for span in pieces.spans)


@given(st.randoms(use_true_random=False))
def test_a_byte_that_is_another_is_found(tmp_path_factory: pytest.TempPathFactory, rng: random.Random) -> None:
    """Beside what pieces say anything may lie; of that every byte counts."""
    sizes = {"a": 24, "b": 8}
    pieces = drawn(rng, sizes)
    infos, content, held = stored(sizes)
    told = content_of(pieces, held)
    file, written = (tmp_path_factory.getbasetemp() / name for name in ("compared", "written"))
    file.write_bytes(content)
    made = bytearray(int(byte, 16) if byte is not None else rng.randrange(256) for byte in told)
    at = rng.randrange(len(made))
    places = in_files({"": pieces}, infos)[""]
    with file.open("rb") as opened:
        for changed in (False, True):
            made[at] ^= changed
            written.write_bytes(bytes(BEGIN) + made)
            with written.open("rb") as other:

                def read(handle: int = other.fileno()) -> list[tuple[bytes, bool]]:
                    pairs = compared(places, lambda _: opened.fileno(), handle, BEGIN)
                    return [(bytes(piece), copied) for piece, copied in pairs]

                if changed and told[at] is not None:
                    with pytest.raises(OtherBytes):
                        read()
                    continue
                assert b"".join(piece for piece, _ in read()) == made
                assert sum(len(piece) for piece, copied in read() if copied) == sum(s.nbytes for s in pieces.spans)


@given(st.randoms(use_true_random=False))
def test_tensors_side_by_side(rng: random.Random) -> None:
    """As numpy and torch join tensors along an axis: each one's run after the other, once for each row before it."""
    sizes = {"a": 24, "b": 12}
    before = rng.choice([1, 2, 3, 4])
    parts = [indices(name, (before, size // before), 8, 1, range(size // before)) for name, size in sizes.items()]
    parts.insert(rng.randint(0, 2), Pieces(before, ()))
    _, _, held = stored(sizes)
    contents = [content_of(part, held) for part in parts]
    wanted: Content = []
    for row in range(before):
        for each in contents:
            width = len(each) // before
            wanted += each[row * width : (row + 1) * width]
    assert content_of(stacked(parts, before=before), held) == wanted
