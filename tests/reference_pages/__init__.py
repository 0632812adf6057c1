"""Reference pages, written from the code by `python -m tests.reference_pages` into docs/reference.

YAML files come from their schemas, the command line from the typer app, the Python page from `surgeon.__all__`, the
keys of `--json` from the docstrings of `to_json`, papers from the operations, and digests of shipped files from joining
them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.reference_pages.command_line import command_line_page
from tests.reference_pages.json_keys import json_page
from tests.reference_pages.papers import papers_page
from tests.reference_pages.python_api import python_page
from tests.reference_pages.shipped_files import shipped_files_page
from tests.reference_pages.yaml_files import plans_page, study_page, tasks_page, training_page

DOCS = Path(__file__).resolve().parent.parent.parent / "docs" / "reference"

# By the page's name in docs/reference.
PAGES: dict[str, Callable[[], str]] = {
    "plans.md": plans_page,
    "training-file.md": training_page,
    "study-file.md": study_page,
    "tasks-file.md": tasks_page,
    "command-line.md": command_line_page,
    "python.md": python_page,
    "json.md": json_page,
    "papers.md": papers_page,
    "shipped-files.md": shipped_files_page,
}
