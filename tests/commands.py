"""The command line as tests run it: refused with one line, or in a process of its own beside a stand-in Hub."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from typer.testing import CliRunner

from surgeon.cli import app
from tests.checkpoint.stand_in_hub import Hub


def refused(*arguments: object, code: int = 2) -> str:
    """Run the command line; it must fail with `code` and exactly one line on stderr. Returns that line."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.exit_code, result.stdout, result.stderr)
    lines = [line for line in result.stderr.splitlines() if line.startswith("surgeon: ")]
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stderr
    return lines[0]


def run_surgeon(
    hub: Hub, home: Path, *arguments: str, command: Sequence[str] = (sys.executable,), **environment: str
) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own: the client reads HF_ENDPOINT when it is imported.

    A plain interpreter: preview and apply of such a plan import no torch, which a warm one's server would do first.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    settings = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    return subprocess.run(
        [*command, "-m", "surgeon", *arguments],
        env=clean | settings | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
