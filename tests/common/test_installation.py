"""How the package is installed, and libraries beyond its range."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from surgeon.common.installation import DISTRIBUTION, installing, lacking, untested

ROOT = Path(__file__).resolve().parents[2]


def test_a_library_beyond_the_range_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["torch>=2.7", "transformers>=5.19,<5.25", 'transformers<5; extra == "old"']
    found = {"torch": "9.0", "transformers": "5.25.1"}
    monkeypatch.setattr(metadata, "requires", lambda _: asked)
    monkeypatch.setattr(metadata, "version", found.__getitem__)
    line = untested("transformers")
    assert line is not None and "transformers 5.25.1 is newer" in line and "(below 5.25)" in line
    assert untested("torch") is None
    found["transformers"] = "5.24.3"
    assert untested("transformers") is None


def test_a_range_that_nobody_installed_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_there(_: str) -> list[str]:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "requires", not_there)
    assert untested("transformers") is None


def test_how_to_install_is_said_in_one_place() -> None:
    """Messages take the line from here, for extras that exist, and no page names a download that is not there."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert installing() == "run `pip install -e '.'` in surgeon's source tree"
    assert lacking("this", "that", "peft").endswith(
        "not installed; run `pip install -e '.[peft]'` in surgeon's source tree"
    )
    asked = set()
    for file in [*(ROOT / "surgeon").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]:
        text = file.read_text(encoding="utf-8")
        assert not re.search(rf"""install ["']?{DISTRIBUTION}""", text), file
        asked |= set(re.findall(r"""lacking\([^\n]*, "([\w-]+)"\)""", text))
    assert asked == {"parquet", "datasets", "peft"} and asked <= extras.keys()
