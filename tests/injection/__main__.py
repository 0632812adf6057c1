"""`python -m tests.injection`: every command that writes, killed and failed at every call that changes a disk.

Each trial runs in a forked child, in which one call is the last (SIGKILL), or fails (no space, an input/output error);
of `push` each request too: not sent, answer lost, refused, killed before and after. Afterwards the result is absent or
complete; the same command again ends well, byte-equal, and leaves nothing beside. Of a push the result is the
repository on a stand-in for the Hub: at its old commit, or one complete commit on.

Prints a table of commands, calls and faults; `--every N` takes every Nth call, a command's name that
command alone; with `--killed` no call fails.
`--random N` kills each command N times at random moments instead, beside two processes that keep disk and processor
busy, and N times as one of two runs at once.
`--small-disks N` runs each on file systems of N sizes that are too small for its result, and again with room (as root).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.injection.commands import COMMANDS, inputs
from tests.injection.pushing import Push
from tests.injection.trials import at_random, injected, load, on_small_disks


def main() -> int:
    """Print the table; 1 where anything went wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.injection", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, help="take every Nth call (default: each command's own)")
    parser.add_argument("--begin", type=int, default=1, metavar="K", help="begin with call K")
    parser.add_argument("--killed", action="store_true", help="kill at a call, and let none fail")
    parser.add_argument("--random", type=int, metavar="N", help="kill at N random moments, under load")
    parser.add_argument("--small-disks", type=int, metavar="N", help="run on file systems of N sizes too small (root)")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    parser.add_argument("commands", nargs="*", metavar="COMMAND", help="commands, by name (default: all)")
    asked = parser.parse_args()
    if unknown := set(asked.commands) - {command.name for command in COMMANDS}:
        parser.error(f"no such command: {', '.join(sorted(unknown))}")
    # Imported before the forks, and patched there.
    import huggingface_hub.hf_api  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch  # noqa: F401

    import surgeon.share.push
    import surgeon.training.session  # noqa: F401

    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        made = inputs(Path(folder) / "inputs")
        print("| command | calls | fault | trials | absent | complete | wrong | seconds |")
        print("|---|---|---|---|---|---|---|---|", flush=True)
        for command in COMMANDS:
            if asked.commands and command.name not in asked.commands:
                continue
            began = time.perf_counter()
            if asked.small_disks:
                if isinstance(command, Push):
                    # It writes nothing where it runs.
                    continue
                table = {"small disk": on_small_disks(command, made, Path(folder), asked.small_disks)}
            elif asked.random:
                with load(Path(folder)):
                    table = at_random(command, made, Path(folder), asked.random, asked.seed)
            else:
                only = ("killed",) if asked.killed else ()
                table = injected(command, made, Path(folder), asked.every or command.every, asked.begin, only=only)
            seconds = f"{time.perf_counter() - began:.0f}"
            for fault, found in table.items():
                calls = "" if found.calls is None else found.calls
                row = (
                    command.name,
                    calls,
                    fault,
                    found.trials,
                    found.absent,
                    found.complete,
                    len(found.wrong),
                    seconds,
                )
                print("|", " | ".join(map(str, row)), "|", flush=True)
                wrong += found.wrong
    for sentence in wrong:
        print(sentence, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
