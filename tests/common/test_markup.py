"""HTML that is built of escaped pieces: whatever a name or text holds, it stays text."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from surgeon.common.page.markup import Markup, el, figure, folded, lines, pair, section, shaded_table, table, text

HOSTILE = (
    "<script>alert(1)</script>",
    '" onclick="alert(1)',
    "' onclick='alert(1)",
    "&lt;b&gt;",
    "</td><td>",
    "\x1b[31m",
)


class Reader(HTMLParser):
    """The elements of a page with their attributes, and its words."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_text_stays_a_text_wherever_it_is_put(hostile: str) -> None:
    shown = hostile.replace("\x1b", "\\x1b")
    places = {
        "child": (el("p", hostile), ["p"]),
        "text": (el("p", text(hostile)), ["p"]),
        "lines": (el("pre", lines(hostile)), ["pre"]),
        "folded": (folded(hostile, "more"), ["details", "summary"]),
        "caption": (figure(Markup("<svg></svg>"), hostile), ["figure", "svg", "figcaption"]),
        "pair": (pair(hostile), ["div"]),
        "heading": (section("key", hostile), ["section", "h2"]),
    }
    for place, (made, tags) in places.items():
        read = Reader(made)
        assert read.tags == tags, place
        assert shown in read.words, place


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_text_stays_a_text_in_attributes_and_tables(hostile: str) -> None:
    shown = hostile.replace("\x1b", "\\x1b")
    read = Reader(el("a", "here", title=hostile, hidden=True, id=None))
    assert (read.tags, read.words) == (["a"], "here")
    assert read.attributes == [("title", shown), ("hidden", "")]
    for made in (
        table(hostile, [hostile], [[hostile]], numbers=[0]),
        shaded_table(hostile, hostile, [hostile], [(hostile, [0.5])]),
    ):
        read = Reader(made)
        assert set(read.tags) == {"div", "table", "caption", "thead", "tbody", "tr", "th", "td"}
        assert read.words.count(shown) >= 3
        assert dict(read.attributes)["aria-label"] == shown
        assert not any(name.startswith("on") for name, _ in read.attributes)
