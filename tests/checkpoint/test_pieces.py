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

from surgeon.checkpoint import pieces as module
from surgeon.checkpoint.header import TensorInfo
from surgeon.checkpoint.pieces import Gap, Pieces, Span, indices, read_in_order, side_by_side, turned
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
    value = torch.randn(shape)
    order = [0, 0, 2, 3, 1, 5, 4]
    order = [at for at in order if at < shape[axis]]
    wanted = value.index_select(axis, torch.tensor(order)).contiguous()
    file = tmp_path / "file"
    file.write_bytes(bytes(BEGIN) + value.numpy().tobytes())
    info = TensorInfo("it", "F32", shape, "file", BEGIN, BEGIN + value.nbytes)
    pieces = indices("it", shape, 32, axis, order)
    with file.open("rb") as opened:
        found = [bytes(piece) for piece in read_in_order(pieces, {"it": info}, lambda _: opened.fileno())]  # type: ignore[arg-type]
    assert b"".join(found) == wanted.numpy().tobytes()
    assert max(map(len, found)) <= max(buffer, wanted.nbytes if axis == 0 else buffer)
    file.write_bytes(file.read_bytes()[:-4])
    with file.open("rb") as opened, pytest.raises(BadInput, match="ends"):
        list(read_in_order(Pieces.whole("it", value.nbytes), {"it": info}, lambda _: opened.fileno()))


@given(st.randoms(use_true_random=False))
def test_what_is_read_is_what_pieces_say(tmp_path_factory: pytest.TempPathFactory, rng: random.Random) -> None:
    sizes = {"a": rng.choice([6, 12, 24]), "b": rng.choice([4, 8])}
    pieces = drawn(rng, sizes)
    held: dict[str, Content] = {}
    infos, begin, stored = {}, 0, b""
    for name, size in sizes.items():
        data = hashlib.sha256(name.encode()).digest()[:size]
        held[name] = [f"{byte:02x}" for byte in data]
        infos[name] = TensorInfo(name, "U8", (size,), "file", begin, begin + size)
        begin, stored = begin + size, stored + data
    file = tmp_path_factory.getbasetemp() / "drawn"
    file.write_bytes(stored)
    found: Content = []
    with file.open("rb") as opened:
        for piece in read_in_order(pieces, infos, lambda _: opened.fileno()):
            found += [None] * piece.length if isinstance(piece, Gap) else [f"{byte:02x}" for byte in piece]
    assert found == content_of(pieces, held)
