"""`surgeon report`: one HTML page about an output that needs no other files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgeon.common import devices
from surgeon.common.disk_space import writing
from surgeon.common.files import check_readable
from surgeon.common.listener import Listener, Quiet
from surgeon.common.names import check_new_name
from surgeon.common.work_folders import write_durably
from surgeon.errors import BadInput, printable
from surgeon.lab.reports.findings import Findings, gather


@dataclass(frozen=True)
class Reported:
    """The result of `report`: the page that was written, and the findings that it shows."""

    html: Path | None
    findings: Findings

    def __repr__(self) -> str:
        return f"Reported({str(self.html) if self.html else None!r})"

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`: the page's file, and every number that it shows.

        Keys:
            `html`: the page that was written, or null
            `name`, `model_type`, `dtypes`, `promise`, `budget`, `layers`, `ends`, `notes`: the output
            `verification`, `routing`: as of `verify` and `routing_report`, or null
            `maps`, `runs`, `curves`: the numbers behind the figures
        """
        return {"html": None if self.html is None else str(self.html), **self.findings.to_json()}


def report(
    out: str | Path,
    *,
    html: str | Path | None = None,
    base: str | Path | None = None,
    logits: bool = False,
    texts: Mapping[str, Path | None] | None = None,
    window: int = 128,
    windows: int = 8,
    device: str = "auto",
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Reported:
    """Report on an output, as one page.

    Args:
        out: the output's folder
        html: the page to write, which needs no network
        base: the base's folder, against which the static proof runs
        logits: also compare logits with the base's
        texts: by their domains' names, texts on which choices of routers and gates are recorded
        window: tokens in each sequence
        windows: sequences of each text; 0: all of it
        device: where models run
        trust_remote_code: run the output's own code
        listener: gets progress and notes

    Returns:
        the page and its contents, including checks that fail

    Raises:
        BadInput: where an option or file is wrong
        PromiseBroken: where `verify` cannot run the output
    """
    page, texts = None if html is None else Path(html), texts or {}
    devices.check(device)
    if logits and base is None:
        raise BadInput("--verify compares logits with the base's; give --base DIR")
    if page is not None:
        check_place(page)
    for text in texts.values():
        if text is not None:
            check_readable(text)
    findings = gather(
        Path(out),
        base,
        texts,
        logits=logits,
        window=window,
        windows=windows,
        device=device,
        trust_remote_code=trust_remote_code,
        listener=listener or Quiet(),
    )
    if page is not None:
        from surgeon.lab.reports.page.document import render

        with writing(page):
            write_durably(page, render(findings))
    return Reported(page, findings)


def check_place(html: Path) -> None:
    """Raise BadInput, before any work, where the page cannot be written to `html`."""
    check_new_name(html)
    shown = printable(str(html))
    if html.is_dir():
        raise BadInput(f"--html {shown}: a folder; give the page's file name")
    if html.exists() and html.suffix.lower() not in (".html", ".htm"):
        raise BadInput(f"--html {shown}: exists, and its name is not a page's; give a name such as report.html")
    if not html.parent.is_dir():
        raise BadInput(f"--html {shown}: cannot be written, there is no folder {printable(str(html.parent))}; make it")
    if html.exists() and not html.is_file():
        raise BadInput(f"--html {shown}: not a file, so no page is written there; give the page's file name")
