"""The pictures of the docs are what the report's code draws now."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from surgeon.operations import OPERATIONS
from tests import drawings


def test_every_operation_has_its_picture_and_no_other_is_there() -> None:
    assert set(drawings.PLANS) == set(OPERATIONS)
    there = {file.relative_to(drawings.PICTURES).as_posix() for file in drawings.PICTURES.glob("operations/*")}
    assert there == {f"operations/{op}.svg" for op in OPERATIONS}


def test_the_pictures_of_growth_are_those_of_the_results() -> None:
    """`python -m tests.drawings` writes them."""
    assert (drawings.PICTURES / "growth.svg").read_text(encoding="utf-8") == drawings.of_growth()
    assert (drawings.PICTURES / "learned.svg").read_text(encoding="utf-8") == drawings.of_learned()


@pytest.mark.parametrize("op", drawings.PLANS)
def test_the_picture_of_an_operation_is_drawn_now(op: str) -> None:
    """`python -m tests.drawings` writes them."""
    drawn = drawings.of_operation(op)
    assert (drawings.PICTURES / "operations" / f"{op}.svg").read_text(encoding="utf-8") == drawn
    root = ElementTree.fromstring(drawn)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert not {"script", "image", "foreignObject"} & {part.tag.rpartition("}")[2] for part in root.iter()}
