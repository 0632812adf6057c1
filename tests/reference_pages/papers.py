"""The bibliography that the operations carry: papers.md."""

from __future__ import annotations

import re
from unicodedata import normalize

from surgeon.operations import OPERATIONS
from surgeon.operations.inits import INITS
from surgeon.operations.operation import Paper
from tests.reference_pages.operations import link

PAPERS_HEAD = """\
# Papers

The papers behind the operations. Model cards, and `surgeon report`, cite those that an output used;
[CITATION.cff](../../CITATION.cff) cites surgeon. `python -m tests.reference_pages` writes this page from the
operations, and a test compares the two.

| paper | operations |
|---|---|
"""


def papers_page() -> str:
    """The bibliography: which operation each paper is behind, and its BibTeX entry."""
    users: dict[Paper, list[str]] = {}
    for op, operation in OPERATIONS.items():
        for paper in operation.papers:
            inits = [kind for kind, init in INITS.items() if op == "insert_layers" and init.paper == paper]
            made = f" ({', '.join(f'`{kind}`' for kind in inits)})" if inits else ""
            users.setdefault(paper, []).append(f"[{op}]({link(op)}){made}")
    rows = [f"| {_cited(paper)} | {', '.join(ops)} |" for paper, ops in users.items()]
    entries = "\n\n".join(paper.bibtex for paper in users)
    return PAPERS_HEAD + "\n".join(rows) + f"\n\n## BibTeX\n\n```bibtex\n{entries}\n```\n"


def _cited(paper: Paper) -> str:
    where = f", {paper.venue}" if paper.venue else ""
    when = "" if str(paper.year) in where else f", {paper.year}"
    link = f", [arXiv:{paper.arxiv}](https://arxiv.org/abs/{paper.arxiv})" if paper.arxiv else ""
    return f"{_names(paper.authors)}: *{paper.title}*{where}{when}{link}"


def _names(authors: str) -> str:
    """The authors of a BibTeX entry as people write them: given names first."""
    plain = re.sub(r"\{\\'(\w)\}", lambda found: normalize("NFC", f"{found[1]}\N{COMBINING ACUTE ACCENT}"), authors)
    people = plain.split(" and ")
    names = [" ".join(reversed(person.split(", "))) for person in people if person != "others"]
    return ", ".join(names) + (" and others" if "others" in people else "")
