"""A page as one HTML file that loads nothing and runs nothing, even where a name in it is hostile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files

from surgeon._version import __version__
from surgeon.common.page.charts import picture_style
from surgeon.common.page.markup import Child, Markup, el, join, raw

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_STYLE = files(__package__) / "style.css"


def document(title: str, what: str, top: Sequence[Child], sections: Mapping[str, tuple[str, Markup | None]]) -> str:
    """The page as HTML: `top` above the contents, then the sections that are not None, by key with their short names.

    `what` is what the page is called where readers skip to it.
    """
    shown = {key: (name, made) for key, (name, made) in sections.items() if made is not None}
    contents = el(
        "nav",
        el("ul", *(el("li", el("a", name, href=f"#{key}")) for key, (name, _) in shown.items())),
        aria_label="Contents",
    )
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", title),
        el("style", raw("\n" + picture_style() + _STYLE.read_text(encoding="utf-8"))),
    )
    body = el(
        "body",
        el("a", f"Skip to the {what}", href="#main", class_="skip"),
        el("header", *top, contents),
        el("main", *(made for _, made in shown.values()), id="main"),
        el("footer", f"surgeon {__version__}. One file: no script, no network."),
    )
    return "<!DOCTYPE html>\n" + join(el("html", head, body, lang="en")) + "\n"


def facts(entries: Sequence[tuple[str, Child, str | None]]) -> Markup:
    """The most important facts side by side: a name, a value and its tone (good, warn, bad) each."""
    return el(
        "dl",
        *(el("div", el("dt", name), el("dd", value, class_=tone)) for name, value, tone in entries),
        class_="facts",
    )
