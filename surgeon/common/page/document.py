"""Pages: HTML files that load nothing and run nothing, even where a name in them is hostile. jinja2 fills templates.

`page.html` is what all pages share, `parts.html` their tables and figures. Whatever a template shows is escaped, but
for `Markup`, and a name that a template misspells is an error.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from surgeon._version import __version__
from surgeon.common.formatting import at_revision, count, size
from surgeon.common.page.charts import picture_style
from surgeon.common.page.markup import lines, raw, text

_STYLE = files(__package__) / "style.css"


def rendered(template: Path, **shown: Any) -> str:
    """Return the page that a template makes of what it is to show."""
    style = raw("\n" + picture_style() + _STYLE.read_text(encoding="utf-8"))
    return _environment(template.parent).get_template(template.name).render(shown, style=style, version=__version__)


@cache
def _environment(folder: Path) -> Environment:
    """The templates of a folder and of this one, and what they may call."""
    environment = Environment(
        loader=FileSystemLoader([folder, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=text,
        extensions=["jinja2.ext.do"],
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(count=count, size=size, lines=lines, at_revision=at_revision, by=_by)
    return environment


def _by(value: Any, form: str) -> str:
    """A value by a format; nothing for None."""
    return "" if value is None else format(value, form)
