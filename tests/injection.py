"""`python -m tests.injection`: every command that writes, killed and failed at every call that changes a disk.

Each trial runs in a forked child, in which one call is the last (SIGKILL), or fails (no space, an input/output error).
Afterwards the result is absent or complete; the same command again ends well, byte-equal, and leaves nothing beside.
Prints a table of commands, calls and faults; `--every N` takes every Nth call, a command's name that command alone.
"""

from __future__ import annotations

import argparse
import builtins
import collections
import contextlib
import errno
import hashlib
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import surgeon
from surgeon.errors import SurgeonError

FAULTS = {"killed": 0, "no space": errno.ENOSPC, "input/output error": errno.EIO}
_CALLS = ("write", "pwrite", "fsync", "ftruncate", "truncate", "rename", "replace", "mkdir", "unlink", "rmdir", "chmod")
_LIBRARIES = (("safetensors.torch", "save_file"), ("torch", "save"), ("surgeon.train.publishing", "save_file"))


@dataclass(frozen=True)
class Command:
    """A command that writes: `run(inputs, work)` makes `work / result`, of inputs that it only reads."""

    name: str
    run: Callable[[Path, Path], object]
    result: str = "out"
    # Trials of these take seconds each: every Nth call is enough where not asked otherwise.
    every: int = 1


def _train(inputs: Path, work: Path) -> None:
    surgeon.train(inputs / "deeper", inputs / "train.yaml", work / "out", device="cpu")


def _continual(inputs: Path, work: Path) -> None:
    surgeon.continual(inputs / "tasks.yaml", inputs / "base", work / "out", device="cpu")


COMMANDS = (
    Command("apply", lambda inputs, work: surgeon.apply("llama-pro", str(inputs / "base"), work / "out")),
    Command("revert", lambda inputs, work: surgeon.revert(inputs / "deeper", work / "out")),
    Command("delta", lambda inputs, work: surgeon.make_delta(inputs / "deeper", work / "out")),
    Command(
        "apply --delta",
        lambda inputs, work: surgeon.apply_delta(inputs / "delta", str(inputs / "base"), work / "out"),
    ),
    Command("export-slot", lambda inputs, work: surgeon.export_slot(inputs / "slots", 0, work / "out")),
    Command("report", lambda inputs, work: surgeon.report(inputs / "deeper", html=work / "out")),
    Command("merge", lambda inputs, work: surgeon.merge(inputs / "branched", work / "out", windows=1), every=5),
    Command("train", _train, every=9),
    Command("continual", _continual, every=25),
)


def inputs(folder: Path) -> Path:
    """What the commands work on, made once: nothing in it is written to again."""
    from tests import tiny
    from tests.train.texts import add_tokenizer, corpus

    base = add_tokenizer(tiny.checkpoint(folder / "base", "llama", num_hidden_layers=8))
    for plan, name in (("llama-pro", "deeper"), ("pmoe", "slots"), ("control-llm", "branched")):
        surgeon.apply(plan, str(base), folder / name)
    surgeon.make_delta(folder / "deeper", folder / "delta")
    corpus(folder / "text.jsonl", documents=20)
    training = {"steps": 2, "batch": 2, "length": 16, "save_every": 1, "evaluate_every": 2, "validation_sequences": 2}
    source = {"name": "text", "path": "text.jsonl", "share": 1.0, "validation": 0.2}
    (folder / "train.yaml").write_text(json.dumps({"surgeon_train": 1, **training, "sources": [source]}))
    del training["validation_sequences"]
    tasks = [{"name": name, "sources": [{"path": "text.jsonl", "validation": 0.2}]} for name in "ab"]
    plan = {"rank": 2, "threshold": 2}
    (folder / "tasks.yaml").write_text(
        json.dumps({"surgeon_continual": 1, "plan": plan, "train": training, "evaluation_sequences": 2, "tasks": tasks})
    )
    return folder


@dataclass
class Injection:
    """Counts the calls that change a disk; at call `at` (from 1) the process is killed, or the call fails."""

    at: int = 0
    fault: int = 0
    calls: int = 0
    patched: list[tuple[Any, str, Any]] = field(default_factory=list)

    def __enter__(self) -> Injection:
        for name in _CALLS:
            self._patch(os, name, self._counted(getattr(os, name)))
        if hasattr(os, "copy_file_range"):
            self._patch(os, "copy_file_range", self._counted(os.copy_file_range))
        self._patch(os, "open", self._counted(os.open, when=lambda given: given[1] & os.O_CREAT))
        opened = self._counted(io.open, when=lambda given: any(c in (given[1:] or ("r",))[0] for c in "wax+"))
        self._patch(io, "open", opened)
        self._patch(builtins, "open", opened)
        for home, name in _LIBRARIES:
            if home in sys.modules:
                self._patch(sys.modules[home], name, self._library(getattr(sys.modules[home], name)))
        return self

    def __exit__(self, *_: object) -> None:
        for home, name, real in reversed(self.patched):
            setattr(home, name, real)

    def _patch(self, home: Any, name: str, by: Any) -> None:
        self.patched.append((home, name, getattr(home, name)))
        setattr(home, name, by)

    def _counted(self, real: Any, when: Callable[[Any], Any] = lambda _: True) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            if when(given):
                self._step()
            return real(*given, **named)

        return call

    def _library(self, real: Any) -> Any:
        """A library's own writing, one call to us: half of a file is there when it goes wrong."""

        def call(value: Any, to: Any, *given: Any, **named: Any) -> Any:
            real(value, to, *given, **named)
            if self.calls + 1 == self.at:
                with contextlib.suppress(OSError, TypeError):
                    os.truncate(to, Path(to).stat().st_size // 2)
            self._step()

        return call

    def _step(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            if not self.fault:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(self.fault, os.strerror(self.fault))


def digests(path: Path) -> dict[str, str] | None:
    """Every file of a result by its digest; None where there is none."""
    if not os.path.lexists(path):
        return None
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if not file.is_dir())
    return {str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def in_a_child(run: Callable[[], object], injection: Injection) -> tuple[int, str, int]:
    """Exit code (-9 where it was killed), the last line that was said, and how many calls it made."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        code, said = 0, ""
        try:
            with injection:
                run()
        except SurgeonError as error:
            code, said = error.exit_code, str(error)
        except BaseException as error:
            code, said = 1, f"{type(error).__name__}: {error}"
        os.write(theirs, json.dumps([said[:500], injection.calls]).encode())
        os._exit(code)
    os.close(theirs)
    with os.fdopen(ours, "rb") as answers:
        answer = answers.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said, calls = json.loads(answer) if answer else ("", 0)
    return code, said, calls


@dataclass
class Found:
    """What trials of one command and one fault showed; `wrong` are sentences, none where all is well."""

    calls: int = 0
    trials: int = 0
    absent: int = 0
    complete: int = 0
    wrong: list[str] = field(default_factory=list)


def trial(
    command: Command, made: Path, work: Path, expected: dict[str, str], at: int, fault: str, found: Found
) -> None:
    """One call of one run goes wrong, and the same command runs again."""
    result = work / command.result
    code, said, calls = in_a_child(lambda: command.run(made, work), Injection(at, FAULTS[fault]))
    if code == 0 and calls < at:
        # Threads write in pieces that differ a little from run to run: this one was done before that call.
        return
    there = digests(result)
    where = f"{command.name}, call {at}, {fault}"
    found.trials += 1
    found.absent += there is None
    found.complete += there is not None
    if there not in (None, expected):
        found.wrong.append(f"{where}: neither absent nor complete")
    if code not in (-signal.SIGKILL, 0, 2) or (fault == "killed") != (code == -signal.SIGKILL) or "\n" in said:
        found.wrong.append(f"{where}: exit code {code}: {said}")
    code, said, _ = in_a_child(lambda: command.run(made, work), Injection())
    if code and not (there is not None and "exists" in said):
        found.wrong.append(f"{where}: the run after: exit code {code}: {said}")
    if digests(result) != expected:
        found.wrong.append(f"{where}: the run after is not byte-equal")
    left = sorted(path.name for path in work.iterdir() if path != result)
    # What was complete when it was killed is not taken up again by every command; its work folder is named as its own.
    if left and there is None:
        found.wrong.append(f"{where}: left behind: {', '.join(left)}")


@contextlib.contextmanager
def place(parent: Path) -> Iterator[Path]:
    """An empty folder, gone afterwards."""
    folder = Path(tempfile.mkdtemp(dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def injected(command: Command, made: Path, parent: Path, every: int, begin: int = 1) -> dict[str, Found]:
    """Every `every`th call of a command, once with each fault."""
    with place(parent) as work:
        code, said, calls = in_a_child(lambda: command.run(made, work), Injection())
        assert code == 0, f"{command.name}: {said}"
        expected = digests(work / command.result)
        assert expected
    table: dict[str, Found] = collections.defaultdict(Found)
    for at in range(begin, calls + 1, every):
        for fault in FAULTS:
            table[fault].calls = calls
            with place(parent) as work:
                trial(command, made, work, expected, at=at, fault=fault, found=table[fault])
    return table


def main() -> int:
    """Print the table; 1 where anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, help="take every Nth call (default: each command's own)")
    parser.add_argument("commands", nargs="*", help="commands, by name (default: all)")
    asked = parser.parse_args()
    import safetensors.torch  # noqa: F401
    import torch  # noqa: F401  (before the forks, and patched there)

    import surgeon.train.session  # noqa: F401

    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        made = inputs(Path(folder) / "inputs")
        print("| command | calls | fault | trials | absent | complete | wrong | seconds |")
        print("|---|---|---|---|---|---|---|---|", flush=True)
        for command in COMMANDS:
            if asked.commands and command.name not in asked.commands:
                continue
            began = time.perf_counter()
            for fault, found in injected(command, made, Path(folder), asked.every or command.every).items():
                row = (command.name, found.calls, fault, found.trials, found.absent, found.complete, len(found.wrong))
                print("|", " | ".join(map(str, row)), "|", f"{time.perf_counter() - began:.0f} |", flush=True)
                wrong += found.wrong
    for sentence in wrong:
        print(sentence, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
