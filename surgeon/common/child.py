"""A process of its own, with limits of time and memory, that opens a stranger's file and answers questions about it.

Some files are programs: a chat template loops as long as it likes and makes strings as long as it likes, the regular
expressions of a tokenizer.json may backtrack for ever, in code that no signal interrupts, and a few bytes of parquet
unpack to any size. So they are opened in a child, whose timer the kernel keeps and whose memory is bounded. Questions
and answers are JSON, a line each.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Never

from surgeon.common.library import first_line
from surgeon.errors import BadInput

# Seconds of computing for one question, and characters of it that take one second more: honest tokenizers do a million.
SECONDS = 60.0
_CHARACTERS_A_SECOND = 100_000
# Bytes beyond what the process has when it begins, and for each character of a question more.
MEMORY = 4 << 30
_MEMORY_A_CHARACTER = 256
# Bytes of the longest answer: more than any context, and for each character of a question more.
_LONGEST = 256 << 20
_LONGEST_A_CHARACTER = 16
_BUFFER = 1 << 20


class Limited(Exception):
    """A question took more than it may, or the process ended over it; the text continues a sentence."""


class Failed(Exception):
    """A library failed on a question; the text is the first line of what it said."""


class Child:
    """A child of this process, which ends with this object.

    `opens` opens the file, in the child, and returns what answers a question there: a function whose arguments are the
    question's. What JSON has no words for (bytes, dates) comes as an object of its type's name, never as a text.
    """

    def __init__(self, opens: Callable[[], Callable[..., Any]]) -> None:
        ours, theirs = socket.socketpair()
        with _quiet_fork():
            pid = os.fork()
            if pid == 0:
                # Within: tokenizers that make threads in a child of a process with threads wait for ever.
                _serve(opens, theirs)
        theirs.close()
        self._stream = ours.makefile("rwb", buffering=_BUFFER)
        ours.close()
        self._end = weakref.finalize(self, _end, os.getpid(), pid, self._stream)
        self._why = ""

    def ask(self, *question: Any) -> Any:
        """Return the answer to a question.

        Raises Limited; the child may be gone then, and stays gone. Raises Failed, and BadInput where the child does.
        """
        line = json.dumps(question).encode() + b"\n"
        try:
            self._stream.write(line)
            self._stream.flush()
            answer = self._stream.readline(_longest(len(line)) + 1)
        except (OSError, ValueError):
            # Nobody reads, or the stream was closed at an earlier question.
            answer = b""
        if not answer.endswith(b"\n"):
            raise Limited(self._ended())
        kind, said = json.loads(answer)
        if kind != "answer":
            raise {"refused": BadInput, "failed": Failed, "limited": Limited}[kind](said)
        return said

    def _ended(self) -> str:
        """End the child, and say why it is gone."""
        if (status := self._end()) is not None:
            number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            named = signal.Signals(number).name if number else "it exited"
            self._why = f"ended its process ({named}), short of memory perhaps"
            if number == signal.SIGPROF:
                self._why = f"was stopped after {SECONDS:g} seconds of computing"
        return self._why


@contextlib.contextmanager
def _quiet_fork() -> Iterator[None]:
    """Inside, neither Python nor tokenizers warn of a fork: the child takes no lock of other threads."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _end(owner: int, pid: int, stream: Any) -> int:
    """End a child at once and return its status; in any other process than its parent nothing happens."""
    if os.getpid() != owner:
        return 0
    with contextlib.suppress(OSError):
        # What was not sent.
        stream.close()
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _serve(opens: Callable[[], Callable[..., Any]], theirs: socket.socket) -> Never:
    """Answer, in the child, until the parent is gone. Nothing is printed, nothing of the parent's is touched."""
    try:
        _let_go_of_all_but(theirs.fileno())
        # Ctrl-C reaches both; the parent decides. The timer's signal ends a process even within a library's loop.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        begun = _address_space()
        stream = theirs.makefile("rwb", buffering=_BUFFER)
        answers: Callable[..., Any] | None = None
        for line in stream:
            _limit(begun, len(line))
            try:
                answers = answers or opens()
                said = json.dumps(["answer", answers(*json.loads(line))], default=_named).encode()
                if len(said) >= _longest(len(line)):
                    raise MemoryError
            except MemoryError:
                said = json.dumps(["limited", "needs more memory than it may have"]).encode()
            except BadInput as error:
                said = json.dumps(["refused", str(error)]).encode()
            except BaseException as error:
                # Its text may be as long as the text that it is about.
                said = json.dumps(["failed", first_line(error)]).encode()
            signal.setitimer(signal.ITIMER_PROF, 0)
            stream.write(said + b"\n")
            stream.flush()
    finally:
        os._exit(0)


def _named(value: Any) -> dict[str, str]:
    return {type(value).__name__: str(value)}


def _let_go_of_all_but(kept: int) -> None:
    """Point every other descriptor that the parent has open to nowhere.

    A pipe to another process, a lock or a socket would stay open as long as this child. Their numbers stay in use:
    objects of the parent that are collected here close them.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in {0, 1, 2, *(int(path.name) for path in Path("/dev/fd").iterdir())} - {nowhere, kept}:
        with contextlib.suppress(OSError):
            os.dup2(nowhere, descriptor, inheritable=descriptor < 3)


def _address_space() -> int | None:
    """Bytes of this process's address space, where the system says."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    except (OSError, ValueError):
        return None


def _limit(begun: int | None, length: int) -> None:
    """Begin the time, and bound the memory, that one question of `length` characters may take."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS + length / _CHARACTERS_A_SECOND)
    if begun is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = begun + MEMORY + length * _MEMORY_A_CHARACTER
        resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _longest(length: int) -> int:
    """Bytes of the longest answer to a question of `length` characters."""
    return _LONGEST + length * _LONGEST_A_CHARACTER
