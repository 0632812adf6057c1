"""The command line as tests run it: refused with one line, or in a process of its own beside a stand-in Hub."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from typer.testing import CliRunner

from surgeon.cli import app
from tests.checkpoint.stand_in_hub import Hub
from tests.warm import warm


def refused(*arguments: object, code: int = 2) -> str:
    """Run the command line; it must fail with `code` and exactly one line on stderr. Returns that line."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.exit_code, result.stdout, result.stderr)
    lines = [line for line in result.stderr.splitlines() if line.startswith("surgeon: ")]
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stderr
    return lines[0]


def run_surgeon(hub: Hub, home: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own: the client reads HF_ENDPOINT when it is imported."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    settings = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    return subprocess.run(
        [*warm(), "-m", "surgeon", *arguments],
        env=clean | settings | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


# `surgeon`, whose process is killed as soon as the checkpoint of a step is complete in a folder of some name.
_KILLED_AT = """
import os, signal, sys
from surgeon.training.steps import trainer
within, step = sys.argv[1], int(sys.argv[2])
complete = trainer.complete

def killed(checkpoint, reached, *more):
    complete(checkpoint, reached, *more)
    if reached >= step and within in str(checkpoint):
        os.kill(os.getpid(), signal.SIGKILL)

trainer.complete = killed
sys.argv[1:3] = []
from surgeon.cli import main
main()
"""


def killed_at(step: int, *arguments: str, within: str = "") -> None:
    """Run the command line until the checkpoint of a step is complete (in a path with `within`), and kill it there."""
    command = [*warm(), "-c", _KILLED_AT, within, str(step), *arguments]
    ran = subprocess.run(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, check=False)
    assert ran.returncode == -signal.SIGKILL, (ran.returncode, ran.stderr[-2000:])
