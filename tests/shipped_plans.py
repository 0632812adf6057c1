"""The shipped plans that tests try."""

from __future__ import annotations

from functools import cache

from surgeon.plan import shipped
from surgeon.plan.plan import LoadedPlan

SHIPPED = shipped.shipped_plans()


@cache
def plan_of(name: str) -> LoadedPlan:
    """A shipped plan, read once in a process: most of the tests' modules look at all of them."""
    return shipped.load_named(name)
