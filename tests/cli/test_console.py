"""The command line as consoles and launchers have it: any encoding is written, a rank that fails by itself says so."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surgeon.cli import commands
from surgeon.cli.entries import ENTRIES
from tests.decoders import tiny_decoder

INSERT = {"op": "insert_layers", "where": {"every": 2}, "init": {"kind": "copy"}}
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command line with a console of some encoding: its exit code, and what it wrote."""

    def run(*arguments: object, encoding: str = "utf-8") -> tuple[int, str, str]:
        # As Python opens them.
        written = [
            io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=errors, write_through=True)
            for errors in ("strict", "backslashreplace")
        ]
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["surgeon", *map(str, arguments)])
            patch.setattr(sys, "stdout", written[0])
            patch.setattr(sys, "stderr", written[1])
            with pytest.raises(SystemExit) as ended:
                commands.main()
        raw = [each.buffer.getvalue().decode("utf-8", "replace") for each in written]  # type: ignore[attr-defined]
        return int(ended.value.code or 0), raw[0], raw[1]

    return run


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "cp437"])
@pytest.mark.parametrize("command", ["", *ENTRIES])
def test_help_in_every_encoding(command: str, encoding: str, run: Run) -> None:
    code, shown, told = run(*([command] if command else []), "--help", encoding=encoding)
    assert (code, told) == (0, "")
    assert "Usage" in shown


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_results_in_every_encoding(encoding: str, run: Run, plan: Callable[..., Path], tmp_path: Path) -> None:
    base = tiny_decoder(tmp_path / "bäse ‖ Ω", "llama")
    plans, out = plan(INSERT), tmp_path / "out ∥"
    for arguments in (
        ["plans"],
        ["families"],
        ["families", base],
        ["schema"],
        ["preview", plans, base],
        ["apply", plans, base, out],
        ["verify", "--static", base, out],
        ["inspect", out],
        ["report", out, "--html", tmp_path / "report ∥.html"],
        ["delta", out, tmp_path / "delta ∥"],
        ["revert", out, tmp_path / "again ∥"],
        *(["plans", name] for name in ("llama-pro", "pmoe")),
    ):
        code, _, told = run(*arguments, encoding=encoding)
        assert code == 0, (arguments, told)
    code, _, told = run("diff", base, out, encoding=encoding)
    assert code == 1
    assert "bug" not in told
    code, _, told = run("inspect", tmp_path / "nöwhere ‖", encoding=encoding)
    assert code == 2
    assert "surgeon: " in told


LEFT = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}


@pytest.mark.parametrize("left", [LEFT, {"WORLD_SIZE": "two"}, {"RANK": "7", "WORLD_SIZE": "2"}, {"RANK": ""}])
def test_what_a_launcher_left_is_forgotten(left: Any, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in left.items():
        monkeypatch.setenv(name, value)
    code, _, told = run("plans", "no-such-plan")
    assert code == 2
    assert told.startswith("surgeon: no-such-plan")
    assert not LEFT.keys() & os.environ.keys()


def test_a_rank_that_fails_by_itself_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (LEFT | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)
    code, _, told = run("plans", "no-such-plan")
    assert code == 2
    assert told.startswith("surgeon: rank 1: no-such-plan")


def test_apply_runs_in_one_process(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (LEFT | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)
    code, _, told = run("apply", "copy", "base", "out")
    assert code == 2
    assert told.startswith("surgeon: rank 1: torchrun: `surgeon apply` runs in one process")
