"""The README's picture of a terminal: what three commands print about a small base that is made here, as SVG.

`python docs/pictures/terminal.py` (about a minute) writes terminal.svg beside this file.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

COMMANDS = ("preview llama-pro base-model", "apply llama-pro base-model out", "verify base-model out")
COLUMNS = 104
PICTURE = Path(__file__).with_suffix(".svg")


def record(folder: Path) -> str:
    """The session in `folder`, which holds `base-model`, as SVG."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), highlight=False)
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS)}
    for command in COMMANDS:
        ran = subprocess.run(
            [sys.executable, "-m", "surgeon", *command.split()],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=True,
        )
        console.print(Text(f"$ surgeon {command}", style="bold bright_white"))
        console.print(Text.from_ansi(ran.stdout.rstrip()))
        console.print()
    # Nothing is fetched, not even a font: the reader's own monospaced one, letters held to their columns.
    drawn = console.export_svg(title="surgeon", theme=MONOKAI, unique_id="surgeon")
    drawn = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL).replace("Fira Code, monospace", "monospace")
    return "\n".join(line.rstrip() for line in drawn.splitlines() if line.strip()) + "\n"


def main() -> None:
    """Make the base and write the picture."""
    from surgeon.lab.learning.base import make_base

    with tempfile.TemporaryDirectory() as folder:
        make_base(Path(folder) / "base-model", seconds=4)
        PICTURE.write_text(record(Path(folder)), encoding="utf-8")


if __name__ == "__main__":
    main()
