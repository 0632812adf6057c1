"""The shipped plans that tests try: every plan, and every point of a sweep that says something else than its plan."""

from __future__ import annotations

import json

from surgeon.plan import shipped

# Points with the values of their plan, tried on another base than the plan.
_ON_ANOTHER_BASE = ("upcycle-experts/beside", "pmoe/next-task")


def _distinct() -> list[str]:
    seen = {json.dumps(shipped.load_named(name).data()) for name in shipped.names()}
    found = shipped.names()
    for name in shipped.points():
        content = json.dumps(shipped.load_named(name).data())
        if content not in seen or name in _ON_ANOTHER_BASE:
            found.append(name)
        seen.add(content)
    return found


SHIPPED = _distinct()
