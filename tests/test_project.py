"""What stands around the package says what the package says: citation, versions, workflows, the site's contents."""

from __future__ import annotations

import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

import surgeon
from tests.house import PACKAGE

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PYTHONS = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def test_the_citation_is_of_this_version() -> None:
    citation = read("CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == surgeon.__version__
    assert citation["license"] == PROJECT["license"]
    # Papers are cited by who used them: docs/reference/papers.md has all.
    assert "references" not in citation and "docs/reference/papers.md" in citation["message"]


def test_annotations_are_for_users_too() -> None:
    assert Path(surgeon.__file__).with_name("py.typed").is_file()
    assert "Typing :: Typed" in PROJECT["classifiers"]


def test_workflows_run_what_is_run_here() -> None:
    ci = read(".github/workflows/ci.yml")["jobs"]
    assert ci["tests"]["strategy"]["matrix"]["python"] == PYTHONS == ["3.11", "3.12", "3.13"]
    assert ci["tests"]["steps"][-1]["run"].endswith(" .ci/run")
    ends = read(".github/workflows/versions.yml")["jobs"]["quick"]["strategy"]["matrix"]["include"]
    assert [(end["resolution"], end["python"], end.get("beyond", "")) for end in ends] == [
        ("lowest-direct", PYTHONS[0], ""),
        ("highest", PYTHONS[-1], ""),
        ("highest", PYTHONS[-1], "transformers torch"),
    ]


def test_actions_are_pinned_by_commit() -> None:
    for workflow in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        for used in re.findall(r"uses: *(.*)", workflow.read_text(encoding="utf-8")):
            assert re.fullmatch(r"\S+@[0-9a-f]{40} # v[\d.]+", used), f"{workflow.name}: {used}"


def test_issues_ask_for_what_answers_need() -> None:
    for name in ("bug", "family"):
        form = read(f".github/ISSUE_TEMPLATE/{name}.yml")
        asked = {part["id"]: part for part in form["body"] if "id" in part}
        assert "surgeon inspect BASE --json" in asked["inspect"]["attributes"]["label"]
        assert asked["inspect"]["validations"]["required"] and asked["versions"]["validations"]["required"]


def pages(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from pages(entry)


def test_the_site_has_every_page_once() -> None:
    listed = list(pages(read("mkdocs.yml")["nav"]))
    assert sorted(listed) == sorted(str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md"))


def test_links_and_pictures_are_written_in_markdown() -> None:
    """mkdocs neither checks nor turns an address in HTML, so what it leads to would be missing in the site."""
    for page in (ROOT / "docs").rglob("*.md"):
        found = re.findall(r"""<[^>]+\s(?:src|href)=["'](?!https?:)[^>]*>""", page.read_text(encoding="utf-8"))
        assert not found, (page.name, found)


def test_the_policy_names_the_formats_as_the_code_checks_them() -> None:
    policy = (ROOT / "docs" / "reference" / "versions.md").read_text(encoding="utf-8")
    named = dict(re.findall(r"^\| [^|]+ \| `(surgeon\w*)` \| (\d+) \|", policy, re.M))
    source = "\n".join(file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py"))
    checked = dict(re.findall(r"^    (surgeon\w*): (?:Annotated\[)?Literal\[(\d+)\]", source, re.M))
    assert named == checked


def test_no_field_stands_in_pydantics_own_namespace() -> None:
    """Before 2.10 pydantic warns of fields that begin with `model_`, once for each, wherever surgeon is imported."""
    for module in (
        "manifest.manifest",
        "training.config.schema",
        "lab.studies.config.schema",
        "lab.courses.config.schema",
        "rework.make_delta",
    ):
        importlib.import_module(f"surgeon.{module}")

    def below(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
        for found in model.__subclasses__():
            yield found
            yield from below(found)

    ours = [model for model in below(BaseModel) if model.__module__.startswith("surgeon.")]
    assert len(ours) > 40
    for model in ours:
        if any(field.startswith("model_") for field in model.model_fields):
            assert model.model_config.get("protected_namespaces") == (), model
