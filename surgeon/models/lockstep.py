"""Running the forwards of two models side by side, so that each matrix is read once for all of them.

A forward is transformers code that runs from beginning to end. Each runs in its own thread, one at a time. It waits
where it reaches a matrix that stays in its file (stored_matrix.py), or a layer whose other weights must be read, until
all other forwards of its model that still have to get there have arrived. Then one reading serves them all. Where base
and output wait at matrices that look the same, one product may serve both.
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

# The most bytes of results outside the layers (logits) at a time; at least one pair of forwards is served.
_RESULT_BYTES = 64 * 1024 * 1024
# torch threads in a forward; large products run in the main thread, with as many as torch has.
_THREADS = 4

_running = threading.local()


@dataclass(eq=False)
class Entry:
    """A request to enter a layer whose weights are read once for all forwards that enter together.

    `count` is the number of these forwards for the first of them, and 0 for the others.
    """

    key: Any
    place: int
    count: int = 1
    outside = False


class _Abandoned(BaseException):
    """The exception that ends a forward that is no longer needed."""


class Forward:
    """A forward of the base (`side` 0) or of the output (1); two forwards with the same `pair` are compared."""

    def __init__(self, work: Callable[[], Any], *, side: int, pair: int) -> None:
        self.side, self.pair = side, pair
        self.result: Any = None
        self.error: BaseException | None = None
        # The error with which its request failed.
        self.failure: Exception | None = None
        self.waiting: Any = None
        self.done = False
        # The number of passes through the model begun so far: one, or one for each token.
        self.passes = 0
        self._work = work
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._away = self._abandoned = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def resume(self) -> None:
        """Let the forward run until it waits again or is done."""
        self.waiting = None
        if not self._thread.ident:
            self._thread.start()
        self._away = True
        self._go.release()
        self._back.acquire()
        self._away = False

    def wait(self, request: Any) -> Any:
        """Wait, in the forward's thread, until `request`, an Entry or a product (stored_matrix.py), is served.

        Returns the request. Raises the exception with which serving it failed.
        """
        self.waiting = request
        self._back.release()
        self._go.acquire()
        if self._abandoned:
            raise _Abandoned
        if self.failure is not None:
            raise self.failure
        return request

    def abandon(self) -> None:
        """End the forward where it waits, and join its thread; do nothing where it is done or was never started."""
        if self._away:
            self._back.acquire()
        if self._thread.ident and not self.done:
            self._abandoned = True
            self._go.release()
            self._thread.join()

    @property
    def position(self) -> tuple[int, int]:
        """The place in the model where the forward waits: its pass, and the place in that pass."""
        return self.passes, self.waiting.place

    def _run(self) -> None:
        """Run the forward in its own thread; store its result, or the exception that it raised."""
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
    """Return the forward that runs in this thread; None where none does."""
    found: Forward | None = getattr(_running, "forward", None)
    return found


def run(
    forwards: Sequence[Forward],
    multiply: Callable[[Sequence[Any]], None],
    finished: Callable[[Sequence[Forward]], None],
) -> None:
    """Run all forwards. `finished` gets each pair as soon as both are done; then their results are freed.

    `multiply` computes the products that forwards wait for. On each side, where several wait together, the order of
    `forwards` decides which run first. Raises the exception of a forward, the base's first.
    """
    threads = torch.get_num_threads()
    left = list(forwards)

    def resume(some: Sequence[Forward]) -> None:
        """Let these forwards run on, then pass each pair that is done to `finished` and free its results.

        Raises the exception of a forward that is done, the base's first.
        """
        for forward in some:
            forward.resume()
        for number in dict.fromkeys(forward.pair for forward in some):
            pair = [forward for forward in left if forward.pair == number]
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
        # Each forward has set the number of threads for all later code.
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
                    # Each forward raises the error itself, where it waits.
                    for forward in served:
                        forward.failure = error
            # Only the forwards keep the results.
            del requests
            resume(served)
    finally:
        torch.set_num_threads(threads)
        for forward in forwards:
            forward.abandon()


@contextmanager
def returned_memory() -> Iterator[None]:
    """Return freed memory to the system while the context is open. Open it before the models are built.

    Otherwise matrices without numbers, allocated and freed, would leave a hole in the heap: later blocks and
    activations would be allocated there, and freed memory would stay there.
    """
    _share_memory()
    try:
        yield
    finally:
        _keep_memory()


def _glibc() -> Any:
    """Return the C library on Linux, else None."""
    return ctypes.CDLL(None) if sys.platform == "linux" else None


def _share_memory() -> None:
    """Use one memory pool for all threads, and only for small pieces; only one thread runs at a time.

    With several pools each would keep its own freed memory. glibc's M_ARENA_MAX and M_MMAP_THRESHOLD are set:
    activations and blocks of weights are returned to the system as soon as they are freed.
    """
    if (mallopt := getattr(_glibc(), "mallopt", None)) is not None:
        mallopt(-8, 1)
        mallopt(-3, 1024 * 1024)
        _return_memory()


def _keep_memory() -> None:
    """Have glibc keep freed memory again, below its largest dynamic threshold, which other code reaches by itself."""
    if (mallopt := getattr(_glibc(), "mallopt", None)) is not None:
        mallopt(-3, 32 * 1024 * 1024)
        _return_memory()


def _return_memory() -> None:
    """Return free memory to the system: layers leave small pieces, and logits are large."""
    if (trim := getattr(_glibc(), "malloc_trim", None)) is not None:
        trim(0)


def _next(forwards: Sequence[Forward]) -> list[Forward]:
    """Return the waiting forwards that are served next, in order: first those that enter a layer, then products."""
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
    """Return the forwards of one model that wait for the same layer or matrix as the forward furthest behind."""
    if not forwards:
        return []
    last = min(forwards, key=lambda forward: forward.position)
    return [
        each for each in forwards if type(each.waiting) is type(last.waiting) and each.waiting.key == last.waiting.key
    ]


def _few(forwards: Sequence[Forward]) -> list[Forward]:
    """Return the first pairs for whose results (whole logits) there is memory, at least one pair."""
    found: list[Forward] = []
    room = _RESULT_BYTES
    for number in dict.fromkeys(forward.pair for forward in forwards):
        pair = [forward for forward in forwards if forward.pair == number]
        room -= sum(forward.waiting.result_bytes for forward in pair)
        if found and room < 0:
            break
        found += pair
    return sorted(found, key=forwards.index)
