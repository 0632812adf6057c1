"""Plugins whose code raises whatever it likes: each is named, and only what came from outside is an interruption."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import surgeon
from surgeon.cli import app
from surgeon.common import plugins
from surgeon.common.interrupting import interrupt
from surgeon.common.plugins import Registry, blamed
from surgeon.errors import BadInput
from tests.plugin.test_plugin import install

GROUP = "surgeon.operations"
POINTS = f"[{GROUP}]\nspoilt = surgeon_spoilt:thing\n"
RAISED = (
    *("SystemExit(0)", "SystemExit()", "KeyboardInterrupt()", "GeneratorExit()", "BaseException('odd')"),
    *("RecursionError('deep')", "ImportError('no such thing')", "FileNotFoundError(2, 'No such file', 'own.json')"),
)
NOT_ADMITTED = "class Odd:\n    @property\n    def __class__(self):\n        raise {}\nthing = Odd()\n"
CALLED = "def thing():\n    raise {}\n"


@pytest.fixture
def spoilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Install a distribution with the code given."""

    def installed(code: str) -> None:
        site = install(
            tmp_path / str(len(list(tmp_path.iterdir()))), name="surgeon_spoilt", entry_points=POINTS, code=code
        )
        (info,) = site.glob("*.dist-info")
        found = tuple(importlib.metadata.Distribution.at(info).entry_points)
        monkeypatch.setattr(plugins, "_installed", lambda: found)
        monkeypatch.syspath_prepend(site)
        sys.modules.pop("surgeon_spoilt", None)
        plugins.plugins.cache_clear()

    # As the command line sets it: with Python's own handler nothing tells one interruption from the other.
    before = signal.signal(signal.SIGINT, interrupt)
    yield installed
    signal.signal(signal.SIGINT, before)
    sys.modules.pop("surgeon_spoilt", None)
    plugins.plugins.cache_clear()


def registry() -> Registry[Any]:
    return Registry(GROUP, {}, lambda plugin: plugin.value if isinstance(plugin.value, object) else None)


@pytest.mark.parametrize("raised", RAISED)
def test_whatever_it_raises_it_is_named(raised: str, spoilt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = raised.partition("(")[0]
    spoilt(f"raise {raised}\n")
    with pytest.raises(
        BadInput, match=rf"plugin surgeon-spoilt 0\.1: its entry point `spoilt`.* \({kind}: .*; repair it .*or un"
    ):
        len(registry())
    spoilt(NOT_ADMITTED.format(raised))
    odd = Registry(GROUP, {}, lambda plugin: plugin.value if isinstance(plugin.value, str) else None)
    with pytest.raises(
        BadInput, match=rf"plugin surgeon-spoilt 0\.1: its `spoilt` .* is of no use \({kind}: .*; repair it .*or un"
    ):
        len(odd)
    spoilt(CALLED.format(raised))
    thing = registry()["spoilt"]
    monkeypatch.setattr(surgeon, "inspect", lambda *_, **__: thing())
    result = CliRunner().invoke(app, ["inspect", "."])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"surgeon: plugin surgeon-spoilt 0.1: its code failed ({kind}: ")


def test_an_interruption_is_nobodys_fault(spoilt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a plugin is at work too."""
    spoilt("import os, signal\ndef thing():\n    os.kill(os.getpid(), signal.SIGINT)\n    [0 for _ in range(10**7)]\n")
    thing = registry()["spoilt"]
    monkeypatch.setattr(surgeon, "inspect", lambda *_, **__: thing())
    assert CliRunner().invoke(app, ["inspect", "."]).exit_code == 130
    spoilt(f"import os, signal\nos.kill({os.getpid()}, signal.SIGINT)\n[0 for _ in range(10**7)]\n")
    with pytest.raises(KeyboardInterrupt):
        len(registry())


def test_what_no_plugin_raised_is_not_laid_at_its_door(spoilt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spoilt(
        "from surgeon.errors import BadInput\ndef thing():\n    raise BadInput('refused by the plugin, as it may')\n"
    )
    for raised in (registry()["spoilt"], lambda: 1 // 0):
        with pytest.raises((BadInput, ZeroDivisionError)) as found:
            raised()
        assert blamed(found.value) is None
    # Code that a command calls, a base's own say, cannot end it as if it were done.
    monkeypatch.setattr(surgeon, "inspect", lambda *_, **__: sys.exit(0))
    result = CliRunner().invoke(app, ["inspect", "."])
    assert result.exit_code == 1 and "code that this command called ended Python (SystemExit: 0)" in result.stderr


def test_none_is_looked_for_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it came onto the path: a notebook has it there."""
    install(tmp_path, name="surgeon_spoilt", entry_points=POINTS, code="raise SystemExit(0)\n")
    monkeypatch.chdir(tmp_path)
    for entry in ("", str(tmp_path), "."):
        with monkeypatch.context() as patched:
            patched.setattr(sys, "path", [entry, *sys.path])
            importlib.invalidate_caches()
            assert not [found for found in plugins._installed.__wrapped__() if found.value.startswith("surgeon_spoilt")]
    with monkeypatch.context() as patched:
        patched.chdir("/")
        patched.setattr(sys, "path", [str(tmp_path), *sys.path])
        importlib.invalidate_caches()
        assert [found for found in plugins._installed.__wrapped__() if found.value.startswith("surgeon_spoilt")]
