"""The shipped plans that tests try: every plan, and every point of a sweep that says something else than its plan."""

from __future__ import annotations

import json
from functools import cache

from surgeon.plan import shipped
from surgeon.plan.plan import LoadedPlan

# Points with the values of their plan, tried on another base than the plan.
_ON_ANOTHER_BASE = ("upcycle-experts/beside", "pmoe/next-task")


@cache
def plan_of(name: str) -> LoadedPlan:
    """A shipped plan or point, read once in a process: most of the tests' modules look at all of them."""
    return shipped.load_named(name)


def _distinct() -> list[str]:
    seen = {json.dumps(plan_of(name).data()) for name in shipped.names()}
    found = shipped.names()
    for name in shipped.points():
        content = json.dumps(plan_of(name).data())
        if content not in seen or name in _ON_ANOTHER_BASE:
            found.append(name)
        seen.add(content)
    return found


SHIPPED = _distinct()
