"""A headless Chromium, where there is one: pages are laid out at a width, measured from inside, and photographed."""

from __future__ import annotations

import functools
import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

# The page stands in a frame of the width asked for (a window cannot be as narrow as a phone) and is measured by its
# host: its own policy forbids it scripts, which stays in force inside.
_HOST = """<!DOCTYPE html><meta charset="utf-8"><style>body{{margin:0}}iframe{{border:0;display:block}}</style>
<iframe id="page" style="width:{width}px;height:{height}px" srcdoc="{page}"></iframe><pre id="found"></pre>
<script>
document.getElementById("page").addEventListener("load", (event) => {{
  const view = event.target.contentWindow, page = view.document;
  if ({unfolded}) page.querySelectorAll("details").forEach((one) => {{ one.open = true; }});
  const box = (node) => {{ const r = node.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; }};
  const pictures = [...page.querySelectorAll("svg[role=img]")].filter((svg) => svg.checkVisibility());
  // A line of text as tall as its letters: boxes of lines have room above and below.
  const inked = (text) => {{
    const [left, top, right, bottom] = box(text), room = (bottom - top) * 0.2;
    return [left, top + room, right, bottom - room];
  }};
  const found = {{
    inner: view.innerWidth,
    scroll: page.documentElement.scrollWidth,
    height: page.documentElement.scrollHeight,
    background: view.getComputedStyle(page.body).backgroundColor,
    ink: view.getComputedStyle(page.body).color,
    rows: [...page.querySelectorAll("svg.stack g.row")].map((row) => ({{
      box: box(row.querySelector("rect.layer")),
      words: [...row.querySelectorAll("text.label")].map(box),
      pills: [...row.querySelectorAll("rect.pill")].map(box),
      signs: [...row.querySelectorAll("text.sign")].map(box),
      flags: [...row.querySelectorAll("path.flag")].map(box),
    }})),
    figures: [...page.querySelectorAll("svg.chart, img")].map(box),
    overlapping: pictures.flatMap((svg) => {{
      const texts = [...svg.querySelectorAll("text:not([transform])")].map((text) => [text.textContent, inked(text)]);
      const over = (a, b) => a[0] < b[2] - 1 && b[0] < a[2] - 1 && a[1] < b[3] - 1 && b[1] < a[3] - 1;
      return texts.flatMap(([words, a], nth) => texts.slice(nth + 1).filter(([_, b]) => over(a, b))
        .map(([others, _]) => words + " / " + others));
    }}),
    smallest: Math.min(...pictures.flatMap((svg) => [...svg.querySelectorAll("text:not(.small)")].map((text) =>
      parseFloat(view.getComputedStyle(text).fontSize) * svg.getScreenCTM().a))),
    outside: pictures.flatMap((svg) => [
      ...svg.querySelectorAll("text")].filter((text) => {{
      const a = text.getBoundingClientRect(), b = svg.getBoundingClientRect();
      return a.left < b.left - 1 || a.right > b.right + 1 || a.top < b.top - 1 || a.bottom > b.bottom + 1;
    }}).map((text) => text.textContent)),
    blank: [...page.images].filter((image) => !image.naturalWidth).length,
    focusable: [...page.querySelectorAll("a, summary, [tabindex='0']")].filter((node) => node.tabIndex === 0).length,
  }};
  document.getElementById("found").textContent = JSON.stringify(found);
}});
</script>"""


def find() -> str | None:
    """The browser's command, None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@functools.cache
def _flags() -> tuple[str, ...]:
    return ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")


def measure(page: str, folder: Path, *, width: int, dark: bool = False, unfolded: bool = False) -> dict[str, Any]:
    """What the page looks like from inside, `width` pixels wide; `unfolded` opens every `details` first."""
    host = _host(page, folder, width=width, height=1600, unfolded=unfolded)
    dumped = _run("--virtual-time-budget=5000", "--dump-dom", _window(width), _scheme(dark), host.as_uri())
    found = re.search(r'<pre id="found">(.*?)</pre>', dumped, re.DOTALL)
    assert found and found[1], "the page was not measured"
    told: dict[str, Any] = json.loads(html.unescape(found[1]))
    return told


def photograph(page: str, to: Path, *, width: int, height: int, dark: bool = False, unfolded: bool = False) -> None:
    """A screenshot of the page's top, `width` × `height` pixels (and what a window is wider, blank)."""
    host = _host(page, to.parent, width=width, height=height, unfolded=unfolded)
    _run("--virtual-time-budget=5000", f"--screenshot={to}", _window(width, height), _scheme(dark), host.as_uri())


def _host(page: str, folder: Path, *, width: int, height: int, unfolded: bool) -> Path:
    host = folder / "host.html"
    filled = _HOST.format(
        width=width, height=height, page=html.escape(page, quote=True), unfolded=str(unfolded).lower()
    )
    host.write_text(filled, encoding="utf-8")
    return host


def _window(width: int, height: int = 1600) -> str:
    return f"--window-size={max(width, 500)},{height}"


def _scheme(dark: bool) -> str:
    return f"--blink-settings=preferredColorScheme={0 if dark else 1}"


def _run(*arguments: str) -> str:
    browser = find()
    assert browser is not None
    ran = subprocess.run([browser, *_flags(), *arguments], capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout
