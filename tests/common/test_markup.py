"""HTML of escaped pieces, built or by template: whatever a name or text holds, it stays text."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from surgeon.common.page.document import rendered
from surgeon.common.page.markup import Markup, el, join, lines, text

HOSTILE = (
    "<script>alert(1)</script>",
    '" onclick="alert(1)',
    "' onclick='alert(1)",
    "&lt;b&gt;",
    "</td><td>",
    "{{ 7 * 7 }}",
    "\x1b[31m",
)
# The parts that pages are made of, each shown a name that anybody gave.
PARTS = {
    "facts": "{{ parts.facts([(name, name, name)]) }}",
    "box": "{% call parts.box(name, name) %}<tbody><tr><td>{{ name }}</td></tr></tbody>{% endcall %}",
    "table": "{{ parts.table(name, [name], [[name], [none]], numbers=[0]) }}",
    "shaded": "{{ parts.shaded(name, name, [name], [(name, [0.5, none])]) }}",
    "folded": "{% call parts.folded(name) %}{{ name }}{% endcall %}",
    "figure": "{% call parts.figure(picture) %}{{ name }}{% endcall %}",
    "filters": "<p>{{ name|lines }}{{ name|count if name is number else name|replace('x', 'y') }}{{ name ~ name }}</p>",
}
PICTURE = Markup("<svg></svg>")


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


def made(folder: Path, part: str, name: str) -> Reader:
    """What a template makes of a part."""
    (folder / "one.html").write_text('{% import "parts.html" as parts %}\n' + part, encoding="utf-8")
    return Reader(rendered(folder / "one.html", name=name, picture=PICTURE))


@pytest.mark.parametrize("part", PARTS)
def test_a_text_stays_a_text_wherever_a_template_puts_it(part: str, tmp_path: Path) -> None:
    plain = made(tmp_path, PARTS[part], "plain")
    for hostile in HOSTILE:
        shown = hostile.replace("\x1b", "\\x1b")
        read = made(tmp_path, PARTS[part], hostile)
        assert read.tags == plain.tags
        assert [name for name, _ in read.attributes] == [name for name, _ in plain.attributes]
        assert read.attributes == [(name, value and value.replace("plain", shown)) for name, value in plain.attributes]
        assert read.words == plain.words.replace("plain", shown)


def test_a_page_escapes_its_name_and_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    whole = '{% extends "page.html" %}{% set title, what = name, name %}{% set sections = [(name, name, name, name)] %}'
    (tmp_path / "whole.html").write_text(whole, encoding="utf-8")
    for hostile in HOSTILE:
        read = Reader(rendered(tmp_path / "whole.html", name=hostile))
        assert "script" not in read.tags and not any(name.startswith("on") for name, _ in read.attributes)
        assert read.words.count(hostile.replace("\x1b", "\\x1b")) == 5
    with pytest.raises(UndefinedError):
        rendered(tmp_path / "whole.html", named="misspelt")


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_text_stays_a_text_in_what_is_built(hostile: str) -> None:
    shown = hostile.replace("\x1b", "\\x1b")
    for built in (el("p", hostile), el("p", text(hostile)), el("p", lines(hostile)), el("p", join(hostile, None))):
        read = Reader(built)
        assert (read.tags, read.words) == (["p"], shown)
    read = Reader(el("a", "here", title=hostile, hidden=True, id=None))
    assert (read.tags, read.words) == (["a"], "here")
    assert read.attributes == [("title", shown), ("hidden", "")]
