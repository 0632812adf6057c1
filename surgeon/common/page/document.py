"""HTML pages, filled from jinja2 templates, that load nothing and run nothing, even where a name in them is hostile.

`page.html` is shared by all pages, `parts.html` has their tables and figures. A template's values are escaped, except
`Markup`, and a misspelt name in a template is an error.
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
    """Return the page that a template makes of the values `shown`."""
    style = raw("\n" + picture_style() + _STYLE.read_text(encoding="utf-8"))
    return _environment(template.parent).get_template(template.name).render(shown, style=style, version=__version__)


@cache
def _environment(folder: Path) -> Environment:
    """Return the jinja2 environment with the templates of a folder and of this one, and their filters."""
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
    """Return a value in a format; "" for None."""
    return "" if value is None else format(value, form)
