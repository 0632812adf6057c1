"""A child process, with limits of time and memory, that opens an untrusted file and answers questions about it.

Some files are programs. A chat template can loop and build strings without limit. The regular expressions of a
tokenizer.json may backtrack for ever, in code that no signal handler interrupts. A few bytes of parquet can unpack to
any size. So these files are opened in a child, whose timer the kernel keeps and whose memory is limited. Questions and
answers are lines of JSON.
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

# CPU seconds for one question, and the question's characters per further second; usual tokenizers handle a million.
SECONDS = 60.0
_CHARACTERS_A_SECOND = 100_000
# Bytes that the child may add to its initial memory, and further bytes for each character of a question.
MEMORY = 4 << 30
_MEMORY_A_CHARACTER = 256
# Bytes of the longest answer (more than any context needs), and further bytes for each character of a question.
_LONGEST = 256 << 20
_LONGEST_A_CHARACTER = 16
_BUFFER = 1 << 20


class Limited(Exception):
    """A question exceeded a limit, or ended the child; the text continues a sentence."""


class Failed(Exception):
    """A library failed on a question; the text is the first line of its error."""


class Child:
    """A child of this process, which ends with this object.

    `opens` opens the file, in the child, and returns the function that answers questions there; its arguments are the
    question's. Values that JSON lacks (bytes, dates) arrive as an object with the type's name as key, never as text.
    """

    def __init__(self, opens: Callable[[], Callable[..., Any]]) -> None:
        """Fork the child, which waits for questions; it calls `opens` at the first question."""
        ours, theirs = socket.socketpair()
        with _quiet_fork():
            pid = os.fork()
            if pid == 0:
                # Still within `_quiet_fork`: tokenizers that start threads in a forked child can deadlock.
                _serve(opens, theirs)
        theirs.close()
        self._stream = ours.makefile("rwb", buffering=_BUFFER)
        ours.close()
        self._end = weakref.finalize(self, _end, os.getpid(), pid, self._stream)
        self._why = ""

    def ask(self, *question: Any) -> Any:
        """Return the answer to a question.

        Raises Limited where a limit is exceeded; the child may have ended then, and is not restarted. Raises Failed
        where a library fails, and BadInput where the function that answers raises it.
        """
        line = json.dumps(question).encode() + b"\n"
        try:
            self._stream.write(line)
            self._stream.flush()
            answer = self._stream.readline(_longest(len(line)) + 1)
        except (OSError, ValueError):
            # The child has ended, or the stream was closed at an earlier question.
            answer = b""
        if not answer.endswith(b"\n"):
            raise Limited(self._ended())
        kind, said = json.loads(answer)
        if kind != "answer":
            raise {"refused": BadInput, "failed": Failed, "limited": Limited}[kind](said)
        return said

    def _ended(self) -> str:
        """End the child, and return why it ended."""
        if (status := self._end()) is not None:
            number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            named = signal.Signals(number).name if number else "it exited"
            self._why = f"ended its process ({named}), short of memory perhaps"
            if number == signal.SIGPROF:
                self._why = f"was stopped after {SECONDS:g} seconds of computing"
        return self._why


@contextlib.contextmanager
def _quiet_fork() -> Iterator[None]:
    """Suppress the fork warnings of Python and tokenizers in the block: the child uses no lock of other threads."""
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
    """Kill a child and return its wait status; in a process other than its parent, do nothing and return 0."""
    if os.getpid() != owner:
        return 0
    with contextlib.suppress(OSError):
        # Discard data that was not sent.
        stream.close()
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _serve(opens: Callable[[], Callable[..., Any]], theirs: socket.socket) -> Never:
    """Answer questions, in the child, until the parent is gone. Prints nothing, and touches nothing of the parent's."""
    try:
        _let_go_of_all_but(theirs.fileno())
        # Ctrl-C reaches both processes; the parent decides. The timer's signal ends even a library's loop.
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
                # Keep only the first line: the whole text may be as long as the question's text.
                said = json.dumps(["failed", first_line(error)]).encode()
            signal.setitimer(signal.ITIMER_PROF, 0)
            stream.write(said + b"\n")
            stream.flush()
    finally:
        os._exit(0)


def _named(value: Any) -> dict[str, str]:
    """Return a value that JSON lacks as an object: its type's name, and the value as text."""
    return {type(value).__name__: str(value)}


def _let_go_of_all_but(kept: int) -> None:
    """Redirect every other descriptor that is open in the parent to /dev/null.

    Otherwise a pipe to another process, a lock or a socket would stay open as long as this child. The numbers stay in
    use, because objects of the parent that are collected here will close them.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in {0, 1, 2, *(int(path.name) for path in Path("/dev/fd").iterdir())} - {nowhere, kept}:
        with contextlib.suppress(OSError):
            os.dup2(nowhere, descriptor, inheritable=descriptor < 3)


def _address_space() -> int | None:
    """Return the bytes of this process's address space; None where the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    except (OSError, ValueError):
        return None


def _limit(begun: int | None, length: int) -> None:
    """Start the time limit, and set the memory limit, for one question of `length` characters."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS + length / _CHARACTERS_A_SECOND)
    if begun is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = begun + MEMORY + length * _MEMORY_A_CHARACTER
        resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _longest(length: int) -> int:
    """Return the bytes of the longest allowed answer to a question of `length` characters."""
    return _LONGEST + length * _LONGEST_A_CHARACTER
