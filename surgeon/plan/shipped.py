"""The plans shipped with surgeon: a plan's name stands for its file.

plans/papers has papers' experiments, with plan, training and evaluation in one file each: studies and tasks files.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from surgeon.common.json_results import by_number
from surgeon.common.places import meant
from surgeon.errors import BadInput, printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from surgeon.plan.plan import LoadedPlan

# The folders of studies and papers' experiments, next to the plans.
_STUDIES, _PAPERS = "studies", "papers"
_OPERATION = re.compile(r"^ *- *\{?op: *([a-z_]+)", re.MULTILINE)


def folder() -> Path:
    """Return the folder of the shipped plans: inside an installed package, or `plans/` of a source tree."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "shipped_plans"
    return installed if installed.is_dir() else package.parent / "plans"


def shipped_plans() -> list[str]:
    """Return the names of the shipped plans, as `surgeon apply NAME …` takes them."""
    return [name for name in _files(folder()) if name.partition("/")[0] not in (_STUDIES, _PAPERS)]


def _files(within: Path) -> list[str]:
    """Return the paths of the YAML files within a folder, relative and without their ending, sorted by number."""
    found = within.rglob("*.yaml")
    return sorted((str(path.relative_to(within).with_suffix("")) for path in found), key=by_number)


def shipped_studies() -> dict[str, Path]:
    """Return the files of the shipped studies by name, as `surgeon compare NAME …` takes them."""
    return {path.stem: path for path in sorted((folder() / _STUDIES).glob("*.yaml"))} | _papers("a study")


def shipped_tasks() -> dict[str, Path]:
    """Return the files of the shipped tasks files by name, as `surgeon continual NAME …` takes them."""
    return _papers("a tasks file")


def _papers(kind: str = "") -> dict[str, Path]:
    """Return the files of papers' experiments by name, papers/PAPER/TABLE; with `kind`, only the files of that kind."""
    from surgeon.checkpoint.kinds import kind_of

    files = {f"{_PAPERS}/{name}": folder() / _PAPERS / f"{name}.yaml" for name in _files(folder() / _PAPERS)}
    return {name: path for name, path in files.items() if not kind or kind_of(str(path)) == kind}


@dataclass(frozen=True)
class Described:
    """A shipped plan or paper's experiment: its name, the first sentence of its file, and a plan's operations."""

    name: str
    operations: tuple[str, ...]
    about: str


def described() -> list[Described]:
    """Describe the shipped plans, grouped by operation, and papers' experiments after them."""
    # Imported here and below, so that the shell's completion of names does not wait for it.
    from surgeon.operations import OPERATIONS

    found = []
    for name in shipped_plans():
        text = (folder() / f"{name}.yaml").read_text(encoding="utf-8")
        found.append(Described(name, tuple(dict.fromkeys(_OPERATION.findall(text))), _about(text)))
    order = list(OPERATIONS)
    papers = [Described(name, (), _about(path.read_text(encoding="utf-8"))) for name, path in _papers().items()]
    return [*sorted(found, key=lambda plan: order.index(plan.operations[0])), *papers]


def _about(text: str) -> str:
    """Return the first sentence of the comment that a file begins with."""
    comment = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    return re.split(r"(?<=\.) ", " ".join(line.lstrip("# ") for line in comment))[0]


def find_plan(plan: str | Path, *, beside: Path | None = None) -> Path:
    """Return the file that a plan argument names: a path, or a shipped plan.

    A file in the folder `beside`, the folder of the file that names the plan, comes first. Raises BadInput where the
    argument names nothing, or a folder.
    """
    path = Path(meant(str(plan)))
    if beside is not None and (own := beside / path).is_file():
        return own
    # A folder is never a plan; an output folder may have the same name as the plan that made it.
    if (path.exists() and not path.is_dir()) or path.suffix in (".yaml", ".yml"):
        return path
    known = shipped_plans()
    if str(plan) in known:
        return folder() / f"{plan}.yaml"
    what = "a folder, not a plan" if path.is_dir() else "neither a plan file nor the name of a shipped plan"
    raise BadInput(f"{printable(str(plan))}: {what}; {_hint(path, known)}")


def load_named(plan: str | Path, overrides: Sequence[str] = ()) -> LoadedPlan:
    """Read and check the plan that an argument names (`find_plan`), with `overrides` applied. Raises BadInput."""
    from surgeon.plan.plan import load_plan

    return load_plan(find_plan(plan), overrides)


def text_of(name: str) -> str:
    """Return the text of a plan, study or tasks file that `name` names. Raises BadInput for any other name."""
    whole = (shipped_studies() | shipped_tasks()).get(name)
    return load_named(name).text if whole is None else whole.read_text(encoding="utf-8")


def _hint(path: Path, known: list[str]) -> str:
    """Suggest up to three plans that may be meant: files of the folder, plans of the group, or similar names."""
    from surgeon.checkpoint.kinds import kind_of

    beside = sorted(str(file) for file in path.glob("*.y*ml") if kind_of(str(file)) == "a plan")
    name = path.as_posix()
    group = [plan for plan in known if plan == name or plan.startswith(f"{name}/")]
    # An existing folder, or an absolute path, is not a misspelt name, even if it resembles one.
    misspelt = "" if path.is_dir() or path.is_absolute() else name.lower().replace("_", "-")
    near = (beside or group or difflib.get_close_matches(misspelt, known, n=3, cutoff=0.5))[:3]
    if not near:
        return "`surgeon plans` lists the names, a plan file ends in .yaml"
    shown = [f"`{printable(plan)}`" for plan in near]
    return f"did you mean {' or '.join(filter(None, [', '.join(shown[:-1]), shown[-1]]))}?"


def plans_view(plans: Sequence[Described], *, whole: bool) -> RenderableType:
    """Show a line for each plan, cut at the terminal's width; without `whole`, only count those in folders.

    `surgeon plans NAME` prints the whole text of one.
    """
    from rich.console import Group
    from rich.text import Text

    listed = [plan for plan in plans if whole or "/" not in plan.name]
    left = Counter("variants" if plan.operations else "papers" for plan in plans if plan not in listed)
    width = max(len(plan.name) for plan in listed)
    lines = (f"{plan.name:{width}}  {plan.about}" for plan in listed)
    more = f"; `--all` adds {', '.join(f'{number} {kind}' for kind, number in left.items())}" if left else ""
    return Group(
        *(Text(line, no_wrap=True, overflow="ellipsis") for line in lines),
        Text(f"`surgeon plans NAME` prints one{more}", style="dim"),
    )
