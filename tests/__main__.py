"""`python -m tests`: lint, types and tests, in this order; arguments go to pytest. The command of the README."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    checks = [
        [sys.executable, "-m", "ruff", "check", "."],
        [sys.executable, "-m", "ruff", "format", "--check", "."],
        [sys.executable, "-m", "mypy"],
        # A process for each core, a file's tests in one of them; each computes with one thread.
        [sys.executable, "-m", "pytest", "-n", "auto", "--dist", "loadfile", "--durations", "15", *sys.argv[1:]],
    ]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for command in checks:
        print("$", *command[1:], flush=True)
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
