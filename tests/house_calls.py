"""`python -m tests.house --calls`: how often one room of surgeon calls into another while a plan is applied.

Counted are calls of Python functions, in every thread, whose file lies in another room than their caller's. Where code
of a library stands between the two (a cached property, a thread's start), the nearest caller in surgeon counts. That a
module is imported, and that a generator goes on, is no call.
"""

from __future__ import annotations

import dis
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

# Caller's room, callee's room, callee.
Calls = Counter[tuple[str, str, str]]
_RESUME = dis.opmap["RESUME"]
_MOST_NAMED = 40


def calls_between_rooms(package: Path, run: Callable[[], object]) -> Calls:
    """Run something of the package and count its calls from room to room."""
    found: Calls = Counter()
    rooms: dict[CodeType, str] = {}
    before = f"{package}/"

    def room(code: CodeType) -> str:
        """The room that code lies in; "" for a library's, and for a module that is imported."""
        if code not in rooms:
            within = code.co_filename.startswith(before) and code.co_name != "<module>"
            rooms[code] = code.co_filename.removeprefix(before).split("/")[0].removesuffix(".py") if within else ""
        return rooms[code]

    def count(frame: FrameType, event: str, _argument: Any) -> None:
        if event != "call" or not (callee := room(frame.f_code)) or _goes_on(frame):
            return
        caller = frame.f_back
        while caller is not None and not room(caller.f_code):
            caller = caller.f_back
        if caller is not None and (home := room(caller.f_code)) != callee:
            found[home, callee, frame.f_code.co_qualname] += 1

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def _goes_on(frame: FrameType) -> bool:
    """Whether a frame is not entered but resumed, as a generator's is after a `yield`."""
    code = frame.f_code.co_code
    return code[frame.f_lasti] == _RESUME and code[frame.f_lasti + 1] != 0


def applied(plan: str, family: str) -> Calls:
    """The calls of `apply` of a shipped plan to a tiny base, the second time: proofs are kept, modules there."""
    import surgeon
    from tests import tiny

    package = Path(surgeon.__file__).resolve().parent
    with tempfile.TemporaryDirectory(prefix="surgeon-calls-") as name:
        folder = Path(name)
        base = str(tiny.checkpoint(folder / "base", family))
        surgeon.apply(plan, base, folder / "first")
        return calls_between_rooms(package, lambda: surgeon.apply(plan, base, folder / "second"))


def report(calls: Calls, title: str) -> Iterator[str]:
    """Lines that say how many calls there were, between which rooms, and of what."""
    arrows: Counter[tuple[str, str]] = Counter()
    for (caller, callee, _), number in calls.items():
        arrows[caller, callee] += number
    yield f"{title}: {calls.total():,} calls between rooms"
    yield from (f"{number:>7,}  {caller} → {callee}" for (caller, callee), number in arrows.most_common())
    yield "most often:"
    for (caller, callee, name), number in calls.most_common(_MOST_NAMED):
        yield f"{number:>7,}  {caller} → {callee} {name}"


def main(plan: str = "llama-pro", family: str = "llama") -> None:
    """Print the calls between rooms of one apply."""
    print("\n".join(report(applied(plan, family), f"apply {plan} on a tiny {family}")))


if __name__ == "__main__":
    main(*sys.argv[1:])
