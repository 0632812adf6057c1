"""`python -m tests`: lint, types and tests, in this order; arguments go to pytest. The command of the README."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    processes = str((os.cpu_count() or 1) + 1)
    checks = [
        [sys.executable, "-m", "ruff", "check", "."],
        [sys.executable, "-m", "ruff", "format", "--check", "."],
        [sys.executable, "-m", "mypy"],
        # One more than cores, as tests wait for disks and for processes of their own; who is done takes of what another
        # has left.
        [sys.executable, "-m", "pytest", "-n", processes, "--dist", "worksteal", "--durations", "20", *sys.argv[1:]],
    ]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Packages are installed without byte code; compiled anew in every process, what is imported costs minutes.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    first = None if any((ROOT / "tests").rglob("*-pytest-*.pyc")) else compiling()
    try:
        for command in checks:
            if first is not None and "pytest" in command:
                first.wait()
            print("$", *command[1:], flush=True)
            code = subprocess.run(command, cwd=ROOT, check=False).returncode
            if code:
                return code
    finally:
        if first is not None:
            first.kill()
    return 0


def compiling() -> subprocess.Popen[bytes]:
    """The first time, import what tests import beside the type checker, not in all processes of pytest at once.

    What goes wrong there goes wrong again in pytest, which tells.
    """
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
