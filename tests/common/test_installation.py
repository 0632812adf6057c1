"""Another distribution's files in this package's folder are noticed, and it is named."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from surgeon.common.installation import clash, untested


def installed(site: Path, name: str, *files: str) -> None:
    """What an installer leaves of a distribution: its list of files."""
    info = site / f"{name}-0.1.dist-info"
    info.mkdir()
    rows = [*(f"{file},sha256=x,1" for file in files), f"{info.name}/RECORD,,"]
    (info / "RECORD").write_text("\n".join(rows), encoding="utf-8")


@pytest.mark.parametrize("other", ["surgeon", "surgeon_plus", "Scalpel.py"])
def test_another_owner_of_the_package_is_named(tmp_path: Path, other: str) -> None:
    installed(tmp_path, "model_surgeon", "surgeon/__init__.py", "surgeon/cli.py")
    installed(tmp_path, other, "another/__init__.py", "surgeon/__init__.py")
    line = clash(tmp_path / "surgeon")
    assert line is not None and f"`{other}`" in line and "\n" not in line
    assert f"pip uninstall -y {other} model-surgeon" in line and str(tmp_path / "surgeon") in line


def test_neighbours_are_none(tmp_path: Path) -> None:
    """Plugins and packages with names alike; a list that is not there; a source tree."""
    installed(tmp_path, "model_surgeon", "surgeon/__init__.py")
    installed(tmp_path, "surgeon_scale", "surgeon_scale/__init__.py", "other/surgeon/__init__.py")
    (tmp_path / "broken-1.dist-info").mkdir()
    assert clash(tmp_path / "surgeon") is None
    assert clash() is None


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
    def lacking(_: str) -> list[str]:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "requires", lacking)
    assert untested("transformers") is None
