"""Mistakes by room: each room has one, and each can still be made (`python -m tests.mutations` makes them)."""

from __future__ import annotations

import ast

import pytest

from tests.house import HERE, PACKAGE
from tests.mutations.by_room import MISTAKES
from tests.mutations.mechanical import drawn


def test_every_room_has_a_mistake() -> None:
    rooms = {room for room in HERE.rooms if any((PACKAGE / room).glob("*.py")) and room != "lab"}
    assert {mistake.room for mistake in MISTAKES} == rooms
    assert len({mistake.words for mistake in MISTAKES}) == len(MISTAKES)


@pytest.mark.parametrize("words", [mistake.words for mistake in MISTAKES])
def test_a_mistake_can_still_be_made(words: str) -> None:
    (mistake,) = (each for each in MISTAKES if each.words == words)
    for file, old, new in mistake.edits:
        text = (PACKAGE / file).read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{file} no longer has {old!r} once: make this mistake where it stands now"
        compile(text.replace(old, new), file, "exec")


def test_mechanical_mistakes_are_the_same_ones_and_change_the_code() -> None:
    one, other = ([*drawn(20, 7, ["plan", "blueprint"])] for _ in range(2))
    assert one == other
    assert len({mistake.words for mistake in one}) == len(one) == 20
    for mistake in one:
        ((_, old, new),) = mistake.edits
        assert ast.dump(ast.parse(old)) != ast.dump(ast.parse(new)), mistake.words
