"""The plans that come with surgeon: a plan's name stands for its file."""

from __future__ import annotations

import difflib
from pathlib import Path

from surgeon.errors import BadInput, printable


def folder() -> Path:
    """Where the shipped plans lie: inside an installed package, or `plans/` of a source tree."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "shipped_plans"
    return installed if installed.is_dir() else package.parent / "plans"


def names() -> list[str]:
    """Names of the shipped plans, as `surgeon apply NAME …` takes them."""
    plans = folder()
    return sorted(str(path.relative_to(plans).with_suffix("")) for path in plans.rglob("*.yaml"))


def find_plan(plan: str | Path) -> Path:
    """The file a plan argument means: a path, or the name of a shipped plan. BadInput where it is neither."""
    path = Path(plan)
    # A folder is never a plan; an output may well be called as the plan it was made by.
    if (path.exists() and not path.is_dir()) or path.suffix in (".yaml", ".yml"):
        return path
    known = names()
    if str(plan) in known:
        return folder() / f"{plan}.yaml"
    close = difflib.get_close_matches(str(plan), known, n=1)
    hint = f"did you mean `{close[0]}`?" if close else "`surgeon plans` lists the names, a plan file ends in .yaml"
    raise BadInput(f"{printable(str(plan))}: neither a plan file nor the name of a shipped plan; {hint}")
