"""Forwards of two models side by side, so that what they are multiplied with is read once for all of them.

A forward is code of transformers that runs from end to end. Each runs in a thread of its own, one at a time: it waits
where it comes to a matrix that stays in its file (stored_matrix.py), or to a layer whose other weights are read, until
all others of its model that have yet to come there have come; then one reading serves them all. Where the base and the
output wait at matrices that look the same, one product may serve both.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

# Of results outside of the layers (logits) at a time, one forward and its twin at least.
_RESULT_BYTES = 64 * 1024 * 1024
# Threads of a forward: what is large is multiplied by the one that runs them all, with as many as torch has.
_THREADS = 4

_running = threading.local()


@dataclass(eq=False)
class Entry:
    """A layer is entered whose weights are read for all that enter; the first of them finds in `count` how many do."""

    key: Any
    place: int
    count: int = 1
    outside = False


class _Abandoned(BaseException):
    """Ends a forward that nobody waits for any more."""


class Forward:
    """A forward of the base (`side` 0) or the output (1); those with one `twin` are compared with each other."""

    def __init__(self, work: Callable[[], Any], *, side: int, twin: int) -> None:
        self.side, self.twin = side, twin
        self.result: Any = None
        self.error: BaseException | None = None
        # Why what it waited for could not be served.
        self.failure: Exception | None = None
        self.waiting: Any = None
        self.done = False
        # Forwards from end to end that it has begun: one, or one for each token.
        self.passes = 0
        self._work = work
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._away = self._abandoned = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def resume(self) -> None:
        """Let it run until it waits again or is done."""
        self.waiting = None
        if not self._thread.ident:
            self._thread.start()
        self._away = True
        self._go.release()
        self._back.acquire()
        self._away = False

    def wait(self, request: Any) -> Any:
        """Wait, from inside, until an Entry or a product (stored_matrix.py) is served. Raises why it was not."""
        self.waiting = request
        self._back.release()
        self._go.acquire()
        if self._abandoned:
            raise _Abandoned
        if self.failure is not None:
            raise self.failure
        return request

    def abandon(self) -> None:
        """End it where it is."""
        if self._away:
            self._back.acquire()
        if self._thread.ident and not self.done:
            self._abandoned = True
            self._go.release()
            self._thread.join()

    @property
    def position(self) -> tuple[int, int]:
        """How far it has come, where it waits."""
        return self.passes, self.waiting.place

    def _run(self) -> None:
        self._go.acquire()
        _running.forward = self
        try:
            torch.set_num_threads(min(_THREADS, torch.get_num_threads()))
            with torch.inference_mode():
                self.result = self._work()
        except BaseException as error:
            self.error = error
        self.done = True
        self._back.release()


def current() -> Forward | None:
    """The forward that runs in this thread; None where none does."""
    found: Forward | None = getattr(_running, "forward", None)
    return found


def run(
    forwards: Sequence[Forward],
    multiply: Callable[[Sequence[Any]], None],
    finished: Callable[[Sequence[Forward]], None],
) -> None:
    """Run them all. `finished` gets those of each twin as soon as they are done; their results are freed then.

    Of one side those that come first in `forwards` run first wherever they wait together. Raises what a forward raised,
    the base's first.
    """
    threads = torch.get_num_threads()
    left = list(forwards)

    def resume(some: Sequence[Forward]) -> None:
        for forward in some:
            forward.resume()
        for twin in dict.fromkeys(forward.twin for forward in some):
            pair = [forward for forward in left if forward.twin == twin]
            if not all(forward.done for forward in pair):
                continue
            for forward in sorted(pair, key=lambda forward: forward.side):
                if forward.error is not None:
                    raise forward.error
            finished(pair)
            for forward in pair:
                forward.result = None
                left.remove(forward)

    try:
        resume(forwards)
        # Each of them set the number for all that come later.
        torch.set_num_threads(threads)
        while left:
            served = _next(left)
            requests = [forward.waiting for forward in served]
            if isinstance(requests[0], Entry):
                _return_memory()
                for nth, request in enumerate(requests):
                    request.count = 0 if nth else len(requests)
            else:
                if requests[0].outside:
                    _return_memory()
                try:
                    with torch.inference_mode():
                        multiply(requests)
                except Exception as error:
                    # Each forward says what it means to it.
                    for forward in served:
                        forward.failure = error
            # The results are theirs.
            del requests
            resume(served)
    finally:
        torch.set_num_threads(threads)
        for forward in forwards:
            forward.abandon()


@contextmanager
def returned_memory() -> Iterator[None]:
    """Inside, what is freed goes back. From before the models are made: matrices without numbers, allocated and freed,
    would leave a hole in the heap from which all later blocks and activations come, and to which they return.
    """
    _share_memory()
    try:
        yield
    finally:
        _keep_memory()


def _glibc() -> Any:
    return ctypes.CDLL(None) if sys.platform == "linux" else None


def _share_memory() -> None:
    """One pool for all threads, of which one runs at a time (each would keep what it once had), for small pieces alone.

    glibc's M_ARENA_MAX, and M_MMAP_THRESHOLD: activations and blocks of weights go back as soon as they are freed.
    """
    if (mallopt := getattr(_glibc(), "mallopt", None)) is not None:
        mallopt(-8, 1)
        mallopt(-3, 1024 * 1024)
        _return_memory()


def _keep_memory() -> None:
    """Let freed memory be kept: glibc's largest dynamic threshold, which other code comes to by itself."""
    if (mallopt := getattr(_glibc(), "mallopt", None)) is not None:
        mallopt(-3, 32 * 1024 * 1024)
        _return_memory()


def _return_memory() -> None:
    """Give what is free back: layers leave pieces, and logits are large."""
    if (trim := getattr(_glibc(), "malloc_trim", None)) is not None:
        trim(0)


def _next(forwards: Sequence[Forward]) -> list[Forward]:
    """Return the forwards that are served next, in order."""
    base, out = (_hindmost([each for each in forwards if each.side == side and not each.done]) for side in (0, 1))
    groups = [group for group in (out, base) if group]
    for group in groups:
        if isinstance(group[0].waiting, Entry):
            return group
    if inside := [group for group in groups if not group[0].waiting.outside]:
        alike = len(inside) > 1 and base[0].waiting.alike(out[0].waiting)
        return base + out if alike else inside[0]
    return _few(base + out)


def _hindmost(forwards: Sequence[Forward]) -> list[Forward]:
    """Return one model's forwards that wait for what the one needs that has come least far."""
    if not forwards:
        return []
    last = min(forwards, key=lambda forward: forward.position)
    return [
        each for each in forwards if type(each.waiting) is type(last.waiting) and each.waiting.key == last.waiting.key
    ]


def _few(forwards: Sequence[Forward]) -> list[Forward]:
    """Return as many twins as their results leave room for, whole logits of each."""
    found: list[Forward] = []
    room = _RESULT_BYTES
    for twin in dict.fromkeys(forward.twin for forward in forwards):
        pair = [forward for forward in forwards if forward.twin == twin]
        room -= sum(forward.waiting.result_bytes for forward in pair)
        if found and room < 0:
            break
        found += pair
    return sorted(found, key=forwards.index)
