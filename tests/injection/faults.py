"""What goes wrong in a trial: a call that changes a disk is the last one of its process, or fails."""

from __future__ import annotations

import builtins
import contextlib
import errno
import functools
import hashlib
import io
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from surgeon.errors import SurgeonError

DISK = {"killed": 0, "no space": errno.ENOSPC, "input/output error": errno.EIO}
_CALLS = ("fsync", "ftruncate", "truncate", "rename", "replace", "mkdir", "unlink", "rmdir", "chmod")
_LIBRARIES = (("safetensors.torch", "save_file"), ("torch", "save"), ("surgeon.training.publishing", "save_file"))
# Seconds after which a run that hangs is ended, by a signal that no trial expects.
_PATIENCE = 300


@dataclass
class Injection:
    """Counts the calls that change a disk; at call `at` the process is killed, or the call fails.

    `at` is the call's number, from 1, or what it does to which file for the how manieth time: `replace run.json 2`.
    """

    at: int | str = 0
    fault: int = 0
    calls: int = 0
    places: Counter[str] = field(default_factory=Counter)
    patched: list[tuple[Any, str, Any]] = field(default_factory=list)

    def __enter__(self) -> Injection:
        for name in _CALLS:
            self._patch(os, name, self._counted(getattr(os, name)))
        for name in ("write", "pwrite"):
            self._patch(os, name, self._written(getattr(os, name)))
        if hasattr(os, "copy_file_range"):
            self._patch(os, "copy_file_range", self._counted(os.copy_file_range))
        self._patch(os, "open", self._counted(os.open, when=lambda given: given[1] & os.O_CREAT))
        opened = self._opened(io.open)
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
                self._step(real.__name__, given[-1] if real.__name__ in ("rename", "replace") else given[0])
            return real(*given, **named)

        return call

    def _written(self, real: Any) -> Any:
        """Of a write half is there when it goes wrong."""

        def call(handle: int, data: Any, *at: int) -> Any:
            nbytes = memoryview(data).nbytes
            self._step(real.__name__, handle, lambda: real(handle, memoryview(data).cast("B")[: nbytes // 2], *at))
            return real(handle, data, *at)

        return call

    def _opened(self, real: Any) -> Any:
        """Files that are written to: that they are opened is a call, and so is each write of theirs."""

        def call(file: Any, mode: str = "r", buffering: int = -1, *given: Any, **named: Any) -> Any:
            if not set(mode) & set("wax+"):
                return real(file, mode, buffering, *given, **named)
            self._step("open", file)
            how = dict(zip(("encoding", "errors", "newline", "closefd", "opener"), given, strict=False)) | named
            raw = _Written(file, mode, how.pop("closefd", True), how.pop("opener", None), step=self._step)
            if buffering == 0:
                return raw
            binary = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return binary if "b" in mode else io.TextIOWrapper(binary, **how, line_buffering=buffering == 1)

        return call

    def _library(self, real: Any) -> Any:
        """A library's own writing, one call to us: half of a file is there when it goes wrong."""

        def call(value: Any, to: Any, *given: Any, **named: Any) -> Any:
            def half() -> None:
                with contextlib.suppress(OSError, TypeError):
                    os.truncate(to, Path(to).stat().st_size // 2)

            real(value, to, *given, **named)
            self._step(real.__name__, to, half)

        return call

    def _step(self, name: str, file: Any, half: Callable[[], object] = lambda: None) -> None:
        """One call more, to a file (or its handle); `half` is what is done of the one that goes wrong."""
        self.calls += 1
        place = f"{name} {file if isinstance(file, int) else Path(os.fsdecode(file)).name}"
        self.places[place] += 1
        if self.at in (self.calls, f"{place} {self.places[place]}"):
            half()
            if not self.fault:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(self.fault, os.strerror(self.fault))


class _Written(io.FileIO):
    """A file whose every write is a call."""

    def __init__(self, file: Any, mode: str, closefd: bool, opener: Any, *, step: Callable[..., None]) -> None:
        super().__init__(file, mode.replace("b", "").replace("t", ""), closefd, opener)
        self._step = functools.partial(step, "write", file)

    def write(self, data: Any, /) -> int:
        """Half of it, where this is the call that goes wrong."""
        nbytes = memoryview(data).nbytes
        self._step(lambda: super(_Written, self).write(memoryview(data).cast("B")[: nbytes // 2]))
        return super().write(data)


def digests(path: Path) -> dict[str, str] | None:
    """Every file of a result by its digest; None where there is none."""
    if not os.path.lexists(path):
        return None
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if not file.is_dir())
    return {str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


class Ended(NamedTuple):
    """How a run ended: its exit code (-9 where it was killed), its last line, and how many calls it made."""

    code: int
    said: str
    calls: int


class Child:
    """A run in a forked child, from the moment that it is made until `ended`."""

    def __init__(self, run: Callable[[], object], injection: AbstractContextManager[Any]) -> None:
        self._answers, theirs = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(theirs)
            return
        signal.alarm(_PATIENCE)
        code, said = 0, ""
        try:
            with injection:
                run()
        except SurgeonError as error:
            code, said = error.exit_code, str(error)
        except BaseException as error:
            code, said = 1, f"{type(error).__name__}: {error}"
        os.write(theirs, json.dumps([said[:500], getattr(injection, "calls", 0)]).encode())
        os._exit(code)

    def kill(self) -> None:
        """Let this moment be its last; nothing where it has ended."""
        os.kill(self.pid, signal.SIGKILL)

    def ended(self) -> Ended:
        """Wait for it."""
        with os.fdopen(self._answers, "rb") as answers:
            answer = answers.read()
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        said, calls = json.loads(answer) if answer else ("", 0)
        # It may have been killed after its answer, and before its exit.
        return Ended(code, said, calls)
