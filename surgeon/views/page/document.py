"""The whole page."""

from __future__ import annotations

from surgeon import __version__
from surgeon.findings.gathering import Findings
from surgeon.views.page.choosing import routing_section
from surgeon.views.page.markup import Markup, el, join, raw
from surgeon.views.page.sections import (
    alignment_section,
    budget_section,
    curves_section,
    headline,
    lineage_section,
    operations_section,
    proof_section,
    spectra_section,
    stack_section,
    transport_section,
)
from surgeon.views.page.style import STYLE

# Nothing is fetched and nothing runs, whatever a name in the page says.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def render(findings: Findings) -> str:
    """The page as HTML."""
    sections = {
        "stack": ("Layers", stack_section(findings)),
        "budget": ("Memory", budget_section(findings)),
        "operations": ("Operations", operations_section(findings)),
        "proof": ("Preservation", proof_section(findings)),
        "transport": ("Transport", transport_section(findings)),
        "routing": ("Routing and gates", routing_section(findings.routing)),
        "spectra": ("Singular values", spectra_section(findings)),
        "alignment": ("Alignment", alignment_section(findings)),
        "curves": ("Learning", curves_section(findings)),
        "lineage": ("Lineage", lineage_section(findings)),
    }
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
        el("title", f"{findings.name}: surgeon's report"),
        el("style", raw(STYLE)),
    )
    surgeries = len(findings.manifest.lineage) + 1
    top = el(
        "header",
        el("h1", findings.name),
        el(
            "p",
            f"{findings.model_type}, after {surgeries} {'surgery' if surgeries == 1 else 'surgeries'} by surgeon",
            class_="soft",
        ),
        headline(findings),
        *(el("p", note, class_="warn") for note in findings.notes),
        contents,
    )
    body = el(
        "body",
        el("a", "Skip to the report", href="#main", class_="skip"),
        top,
        el("main", *(made for _, made in shown.values()), id="main"),
        el("footer", f"surgeon {__version__}. One file: no script, no network."),
    )
    return "<!DOCTYPE html>\n" + join(el("html", head, body, lang="en")) + "\n"


__all__ = ["Markup", "render"]
