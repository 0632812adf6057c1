"""The plans that come with surgeon: a plan's name stands for its file."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from surgeon.common.json_results import by_number
from surgeon.errors import BadInput, printable

if TYPE_CHECKING:
    from rich.console import RenderableType

# The folder of studies beside the plans.
_STUDIES = "studies"
_OPERATION = re.compile(r"^ *- *\{?op: *([a-z_]+)", re.MULTILINE)


def folder() -> Path:
    """Where the shipped plans lie: inside an installed package, or `plans/` of a source tree."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "shipped_plans"
    return installed if installed.is_dir() else package.parent / "plans"


def shipped_plans() -> list[str]:
    """Names of the shipped plans, as `surgeon apply NAME …` takes them."""
    plans = folder()
    found = (path for path in plans.rglob("*.yaml") if path.parent != plans / _STUDIES)
    return sorted((str(path.relative_to(plans).with_suffix("")) for path in found), key=by_number)


def shipped_studies() -> dict[str, Path]:
    """The files of the shipped studies by name, as `surgeon compare NAME …` takes them."""
    return {path.stem: path for path in sorted((folder() / _STUDIES).glob("*.yaml"))}


@dataclass(frozen=True)
class Described:
    """A shipped plan: its name, its operations, and the first sentence of its file, which says what it is."""

    name: str
    operations: tuple[str, ...]
    about: str


def described() -> list[Described]:
    """The shipped plans, those of one operation together."""
    # Here and below, as the shell, which completes names, does not wait for it.
    from surgeon.operations import OPERATIONS

    found = []
    for name in shipped_plans():
        text = (folder() / f"{name}.yaml").read_text(encoding="utf-8")
        operations = tuple(dict.fromkeys(_OPERATION.findall(text)))
        comment = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
        about = " ".join(line.lstrip("# ") for line in comment)
        found.append(Described(name, operations, re.split(r"(?<=\.) ", about)[0]))
    return sorted(found, key=lambda plan: list(OPERATIONS).index(plan.operations[0]))


def find_plan(plan: str | Path) -> Path:
    """The file a plan argument means: a path, or the name of a shipped plan. BadInput where it is neither."""
    path = Path(plan)
    # A folder is never a plan; an output may well be called as the plan it was made by.
    if (path.exists() and not path.is_dir()) or path.suffix in (".yaml", ".yml"):
        return path
    known = shipped_plans()
    if str(plan) in known:
        return folder() / f"{plan}.yaml"
    what = "a folder, not a plan" if path.is_dir() else "neither a plan file nor the name of a shipped plan"
    raise BadInput(f"{printable(str(plan))}: {what}; {_hint(path, known)}")


def _hint(path: Path, known: list[str]) -> str:
    """The three plans that may be meant: files of a folder, plans of a group, names alike."""
    from surgeon.checkpoint.kinds import kind_of

    beside = sorted(str(file) for file in path.glob("*.y*ml") if kind_of(str(file)) == "a plan")
    name = path.as_posix()
    group = [plan for plan in known if plan == name or plan.startswith(f"{name}/")]
    # A folder that is there, or a path from the root, is no misspelt name, however many letters they share.
    misspelt = "" if path.is_dir() or path.is_absolute() else name.lower().replace("_", "-")
    near = (beside or group or difflib.get_close_matches(misspelt, known, n=3, cutoff=0.4))[:3]
    if not near:
        return "`surgeon plans` lists the names, a plan file ends in .yaml"
    shown = [f"`{printable(plan)}`" for plan in near]
    return f"did you mean {' or '.join(filter(None, [', '.join(shown[:-1]), shown[-1]]))}?"


def plans_view(plans: Sequence[Described]) -> RenderableType:
    """The shipped plans under their operations, a line each."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    from surgeon.common.tables import FittedTable

    parts: list[RenderableType] = []
    for operation in dict.fromkeys(plan.operations[0] for plan in plans):
        table = FittedTable(headings=False)
        for plan in plans:
            if plan.operations[0] == operation:
                table.add_row(plan.name, plan.about)
        parts += [*([Text()] if parts else []), Text(operation, style="bold"), Padding(table, (0, 0, 0, 2))]
    return Group(*parts)
