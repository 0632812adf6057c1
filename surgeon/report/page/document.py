"""The report as one HTML file that needs no network: its style, and its sections in order."""

from __future__ import annotations

from surgeon._version import __version__
from surgeon.report.findings import Findings
from surgeon.report.page.markup import el, join, raw
from surgeon.report.page.routing import routing_section
from surgeon.report.page.sections import (
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

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --panel: #f5f6f8; --ink: #1a212b; --soft: #525d6b; --line: #d3d8df; --focus: #0b5fff;
  --good: #1b7a3d; --bad: #b3261e; --warn: #8a5a00; --heat: #e58a3c; --cell: #b4500f;
  --base: #dfe4ea; --fused: #b9e3d6; --copied: #c3d9f7; --made: #e2d2f5; --changed: #f3d9b8;
  --c0: #1f6fc4; --c1: #c2571a; --c2: #1b7a5a; --c3: #8a3fb0; --c4: #a8203f; --c5: #5c6670;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #12161c; --panel: #1b212a; --ink: #e6eaf0; --soft: #a7b1be; --line: #38414d; --focus: #8ab4ff;
    --good: #6fce8f; --bad: #ff8a80; --warn: #f0be62; --heat: #a9561c; --cell: #ffb070;
    --base: #313a46; --fused: #17544a; --copied: #1d4578; --made: #4b3468; --changed: #5c431c;
    --c0: #74b0f5; --c1: #f09a5e; --c2: #62c9a2; --c3: #cb95ea; --c4: #f58ba2; --c5: #a9b4c0;
  }
}
* { box-sizing: border-box; }
html { scroll-behavior: smooth; -webkit-text-size-adjust: 100%; }
@media (prefers-reduced-motion: reduce) { html { scroll-behavior: auto; } }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main, header, footer { max-width: 72rem; margin: 0 auto; padding: 0 1rem; }
header { padding-top: 1.5rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 0 0 .5rem; }
h3 { font-size: 1rem; margin: 1.25rem 0 .25rem; }
p { margin: .25rem 0 .75rem; max-width: 46rem; overflow-wrap: anywhere; }
section { border-top: 1px solid var(--line); padding: 1.25rem 0; }
.soft, figcaption, .tick { color: var(--soft); }
a { color: var(--focus); }
:focus-visible { outline: 3px solid var(--focus); outline-offset: 2px; border-radius: 3px; }
.skip { position: absolute; left: -200vw; }
.skip:focus { left: 1rem; top: .5rem; background: var(--paper); padding: .5rem; }
nav ul { display: flex; flex-wrap: wrap; gap: .25rem 1rem; padding: 0; margin: .75rem 0 1.25rem; list-style: none; }
dl.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .6rem; margin: 1rem 0; }
dl.facts div { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: .55rem .75rem; }
dt { font-size: .8rem; color: var(--soft); }
dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; }
.good { color: var(--good); } .bad { color: var(--bad); } .warn { color: var(--warn); }
.pair > * { min-width: 0; }
.box { overflow-x: auto; margin: .5rem 0; max-width: 100%; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); padding-bottom: .25rem; }
th, td { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number, th.number { text-align: right; }
td.number { white-space: nowrap; }
th { vertical-align: bottom; }
th[scope=row] { vertical-align: top; }
td.words { min-width: 12rem; overflow-wrap: anywhere; }
.heated td.number, .heated th { padding: .3rem .55rem; }
.heated td.number { background: color-mix(in srgb, var(--heat) calc(var(--v) * 90%), transparent); }
details { margin: .5rem 0; }
summary { cursor: pointer; width: fit-content; color: var(--focus); }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: .75rem; overflow-x: auto;
  font: .85rem/1.45 ui-monospace, monospace; margin: .5rem 0; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem 2rem;
  align-items: start; }
figure { margin: .5rem 0; min-width: 0; }
figcaption { font-size: .875rem; margin-top: .25rem; max-width: 46rem; }
svg.chart { display: block; width: 100%; max-width: 34rem; height: auto; }
svg.stack { max-width: 36rem; }
svg text { fill: var(--ink); font: 10.5px system-ui, sans-serif; }
svg text.tick { fill: var(--soft); } svg text.small { font-size: 8px; }
svg text.head { fill: var(--soft); font-weight: 600; }
svg text.label { font-size: 11px; } svg text.number { font-weight: 600; }
svg text.sign { font-size: 9.5px; font-weight: 700; }
.layer { stroke: var(--line); stroke-width: 1; }
.layer.base { fill: var(--base); } .layer.fused { fill: var(--fused); } .layer.copied { fill: var(--copied); }
.layer.made { fill: var(--made); } .layer.changed { fill: var(--changed); }
.path { fill: none; stroke: var(--soft); stroke-width: 1; opacity: .6; }
.pill { fill: var(--paper); stroke: var(--soft); stroke-width: 1; }
.pill.trains { stroke: var(--ink); stroke-width: 2.2; }
.pill.c0 { fill: color-mix(in srgb, var(--c0) 35%, var(--paper)); }
.pill.c1 { fill: color-mix(in srgb, var(--c1) 35%, var(--paper)); }
.pill.c2 { fill: color-mix(in srgb, var(--c2) 35%, var(--paper)); }
.pill.c3 { fill: color-mix(in srgb, var(--c3) 35%, var(--paper)); }
.pill.c4 { fill: color-mix(in srgb, var(--c4) 35%, var(--paper)); }
.pill.c5 { fill: color-mix(in srgb, var(--c5) 35%, var(--paper)); }
.flag { fill: var(--ink); }
.trough { fill: var(--panel); stroke: var(--line); stroke-width: .5; }
.rule { stroke: var(--line); stroke-width: .7; } .link { stroke: var(--soft); stroke-width: .6; }
.frame { fill: none; stroke: var(--line); stroke-width: .8; }
.heat { fill: var(--cell); }
.line { fill: none; stroke-width: 1.8; } .mark { stroke-width: 1.4; } .mark.open { fill: none; }
.bar.s0, .mark.s0 { fill: var(--c0); } .line.s0, .mark.s0 { stroke: var(--c0); }
.bar.s1, .mark.s1 { fill: var(--c1); } .line.s1, .mark.s1 { stroke: var(--c1); }
.bar.s2, .mark.s2 { fill: var(--c2); } .line.s2, .mark.s2 { stroke: var(--c2); }
.bar.s3, .mark.s3 { fill: var(--c3); } .line.s3, .mark.s3 { stroke: var(--c3); }
.bar.s4 { fill: var(--c4); } .line.s4, .mark.s4 { stroke: var(--c4); }
.bar.s5 { fill: var(--c5); } .line.s5, .mark.s5 { stroke: var(--c5); }
.mark.open { fill: none; }
.line.s1 { stroke-dasharray: 6 3; } .line.s2 { stroke-dasharray: 2 3; } .line.s3 { stroke-dasharray: 9 3 2 3; }
.line.s4 { stroke-dasharray: 1 4; } .line.s5 { stroke-dasharray: 12 4; }
ul.legend { list-style: none; padding: 0; margin: .25rem 0; font-size: .875rem; }
ul.legend li { display: flex; gap: .6rem; align-items: center; margin: .2rem 0; }
ul.legend svg { flex: none; }
ul.plain { padding-left: 1.2rem; margin: .25rem 0 .75rem; }
.tokens { font: .85rem/2 ui-monospace, monospace; overflow-wrap: anywhere; max-width: 60rem; }
.tokens span { padding: .1rem .15rem; border-radius: 3px; white-space: pre-wrap; border-bottom: 2px solid;
  display: inline-block; max-width: 100%; line-height: 1.3; margin: .1rem 0; }
.tokens sub { font-size: .65rem; font-weight: 700; line-height: 1; margin-left: 1px; }
.t0 { background: color-mix(in srgb, var(--c0) 22%, transparent); border-color: var(--c0) !important; }
.t1 { background: color-mix(in srgb, var(--c1) 22%, transparent); border-color: var(--c1) !important; }
.t2 { background: color-mix(in srgb, var(--c2) 22%, transparent); border-color: var(--c2) !important; }
.t3 { background: color-mix(in srgb, var(--c3) 22%, transparent); border-color: var(--c3) !important; }
.t4 { background: color-mix(in srgb, var(--c4) 22%, transparent); border-color: var(--c4) !important; }
.t5 { background: color-mix(in srgb, var(--c5) 22%, transparent); border-color: var(--c5) !important; }
img.map { width: 100%; max-width: 22rem; height: auto; image-rendering: pixelated;
  border: 1px solid var(--line); display: block; }
footer { border-top: 1px solid var(--line); padding: 1rem; font-size: .875rem; color: var(--soft); }
"""


# The page loads nothing and runs nothing, even where a name in it is hostile.
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
