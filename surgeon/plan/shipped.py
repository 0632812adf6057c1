"""The plans shipped with surgeon: a plan's name stands for its file, a point's name for a plan with other values.

Sweeps are in plans/sweeps. The points of plans/sweeps/FOLDER/SWEEP.yaml are called FOLDER/POINT, like plans.
plans/papers has papers' experiments, with plan, training and evaluation in one file each: studies and tasks files.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from surgeon.common.json_results import by_number
from surgeon.common.places import meant
from surgeon.errors import BadInput, printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from surgeon.plan.plan import LoadedPlan
    from surgeon.plan.sweep import LoadedSweep

# The folders of studies, sweeps and papers' experiments, next to the plans.
_STUDIES, _SWEEPS, _PAPERS = "studies", "sweeps", "papers"
_OPERATION = re.compile(r"^ *- *\{?op: *([a-z_]+)", re.MULTILINE)


def folder() -> Path:
    """Return the folder of the shipped plans: inside an installed package, or `plans/` of a source tree."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "shipped_plans"
    return installed if installed.is_dir() else package.parent / "plans"


def names() -> list[str]:
    """Return the names of the shipped plans, as `surgeon apply NAME …` takes them."""
    return [name for name in _files(folder()) if name.partition("/")[0] not in (_STUDIES, _SWEEPS, _PAPERS)]


def sweeps() -> list[str]:
    """Return the names of the shipped sweeps, as `surgeon plans NAME` and the methods of a study take them."""
    return _files(folder() / _SWEEPS)


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
class FoundPlan:
    """The file of a plan, and the values that replace values in it, as `--set` gives them."""

    path: Path
    overrides: tuple[str, ...] = ()


def points() -> Mapping[str, FoundPlan]:
    """Return the points of all shipped sweeps by name, which `surgeon apply NAME …` takes like the plans' names."""
    return {point: found for name in sweeps() for point, found in _points_of(name).items()}


def _points_of(name: str) -> dict[str, FoundPlan]:
    """Return the points of a shipped sweep by their full names."""
    loaded = _load_sweep(folder() / _SWEEPS / f"{name}.yaml")
    return {_qualified(name, point): found for point, found in swept(loaded).items()}


def _find_point(name: str) -> FoundPlan | None:
    """Return the point of a shipped sweep with this name. Only sweeps of the point's own folder are read."""
    beside = (sweep for sweep in sweeps() if Path(sweep).parent == Path(name).parent)
    return next((found[name] for sweep in beside if name in (found := _points_of(sweep))), None)


def find_sweep(sweep: str | Path) -> LoadedSweep | None:
    """Read the sweep that an argument names: a sweep's file, or a shipped sweep's name; None where it is neither.

    Raises BadInput for a sweep's file with mistakes in it.
    """
    from surgeon.checkpoint.kinds import kind_of

    if str(sweep) in sweeps():
        return _load_sweep(folder() / _SWEEPS / f"{sweep}.yaml")
    return _load_sweep(Path(sweep)) if kind_of(str(sweep)) == "a sweep" else None


def swept(loaded: LoadedSweep) -> dict[str, FoundPlan]:
    """Return, by point name, the plan of a sweep (a file next to it, or a shipped plan) with the point's values."""
    found = find_plan(loaded.sweep.plan, beside=loaded.source.parent)
    return {point.name: FoundPlan(found.path, (*found.overrides, *point.overrides)) for point in loaded.points}


def _load_sweep(path: Path) -> LoadedSweep:
    """Read a sweep's file; the module is imported here, at first use."""
    from surgeon.plan.sweep import load_sweep

    return load_sweep(path)


def shipped_plans() -> list[str]:
    """Return every name of a shipped plan: names of plans, and names of the points of sweeps."""
    return [*names(), *points()]


@dataclass(frozen=True)
class Described:
    """A shipped plan, sweep or paper's experiment: its name, operations, and the first sentence of its file.

    `operations` are empty for an experiment; `points` is a sweep's number of points.
    """

    name: str
    operations: tuple[str, ...]
    about: str
    points: int = 0


def described() -> list[Described]:
    """Describe the shipped plans and sweeps, grouped by operation, and papers' experiments after them."""
    # Imported here and below, so that the shell's completion of names does not wait for it.
    from surgeon.operations import OPERATIONS

    found = {}
    for name in names():
        text = (folder() / f"{name}.yaml").read_text(encoding="utf-8")
        found[name] = Described(name, tuple(dict.fromkeys(_OPERATION.findall(text))), _about(text))
    order = list(OPERATIONS)
    for name in sweeps():
        loaded = _load_sweep(folder() / _SWEEPS / f"{name}.yaml")
        plan = found[loaded.sweep.plan]
        found[f"{_SWEEPS}/{name}"] = Described(name, plan.operations, _about(loaded.text), len(loaded.points))
    papers = [Described(name, (), _about(path.read_text(encoding="utf-8"))) for name, path in _papers().items()]
    return [*sorted(found.values(), key=lambda plan: order.index(plan.operations[0])), *papers]


def _about(text: str) -> str:
    """Return the first sentence of the comment that a file begins with."""
    comment = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    return re.split(r"(?<=\.) ", " ".join(line.lstrip("# ") for line in comment))[0]


def find_plan(plan: str | Path, *, beside: Path | None = None) -> FoundPlan:
    """Find what a plan argument names: a path, a shipped plan, or a point of a shipped sweep.

    A file in the folder `beside`, the folder of the file that names the plan, comes first. Raises BadInput where the
    argument names nothing, a folder, or a sweep.
    """
    path = Path(meant(str(plan)))
    if beside is not None and (own := beside / path).is_file():
        return FoundPlan(own)
    if (sweep := find_sweep(plan)) is not None:
        raise BadInput(
            f"{printable(str(plan))}: a sweep, not a plan; `surgeon plans {printable(str(plan))}` lists the command of"
            f" each of its {len(sweep.points)} points"
        )
    # A folder is never a plan; an output folder may have the same name as the plan that made it.
    if (path.exists() and not path.is_dir()) or path.suffix in (".yaml", ".yml"):
        return FoundPlan(path)
    known = names()
    if str(plan) in known:
        return FoundPlan(folder() / f"{plan}.yaml")
    if (point := _find_point(str(plan))) is not None:
        return point
    what = "a folder, not a plan" if path.is_dir() else "neither a plan file nor the name of a shipped plan"
    raise BadInput(f"{printable(str(plan))}: {what}; {_hint(path, [*known, *points()])}")


def load_named(plan: str | Path, overrides: Sequence[str] = ()) -> LoadedPlan:
    """Read and check the plan that an argument names (`find_plan`), with `overrides` applied. Raises BadInput."""
    from surgeon.plan.plan import load_plan

    found = find_plan(plan)
    return load_plan(found.path, [*found.overrides, *overrides])


def text_of(name: str) -> str:
    """Return the text of the shipped file or plan `name`: a study or tasks file, a plan, a sweep's point, or a sweep.

    A point's text has its values put in; a sweep's text ends with the command of each point. Raises BadInput for any
    other name.
    """
    if (whole := _whole_files().get(name)) is not None:
        return whole.read_text(encoding="utf-8")
    loaded = find_sweep(name)
    if loaded is None:
        return load_named(name).text
    also = "; each is a shipped plan too" if name in sweeps() else ""
    lines = [f"# Its points{also}:"]
    for point in loaded.points:
        command = f"surgeon apply {loaded.sweep.plan} BASE OUT {point.options}".rstrip()
        lines += [f"#   {_qualified(name, point.name) if also else point.name}", f"#     {command}"]
    return "\n".join([loaded.text.rstrip(), *lines]) + "\n"


def texts(name: str) -> dict[str, str]:
    """Return, by name, the text of a plan, point, study or tasks file; for a sweep, the texts of all its points.

    Raises BadInput for any other name.
    """
    from surgeon.plan.plan import load_plan

    if name in _whole_files():
        return {name: text_of(name)}
    loaded = find_sweep(name)
    if loaded is None:
        return {name: load_named(name).text}
    found = swept(loaded).items()
    return {_qualified(name, point): load_plan(plan.path, plan.overrides).text for point, plan in found}


def _whole_files() -> dict[str, Path]:
    """Return studies and tasks files by name; they are not plans."""
    return shipped_studies() | shipped_tasks()


def _qualified(sweep: str, point: str) -> str:
    """Return the full name of a point, which begins with the folder of its sweep."""
    return str(Path(sweep).parent / point)


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
    """Show a line for each plan, cut at the terminal's width; without `whole`, only count sweeps and plans in folders.

    `surgeon plans NAME` prints the whole text of one.
    """
    from rich.console import Group
    from rich.text import Text

    listed = [plan for plan in plans if whole or "/" not in plan.name]
    left = Counter(
        "sweeps" if plan.points else "variants" if plan.operations else "papers" for plan in plans if plan not in listed
    )
    width = max(len(plan.name) for plan in listed)
    lines = (f"{plan.name:{width}}  {plan.about}{f' ({plan.points} points)' if plan.points else ''}" for plan in listed)
    more = f"; `--all` adds {', '.join(f'{number} {kind}' for kind, number in left.items())}" if left else ""
    return Group(
        *(Text(line, no_wrap=True, overflow="ellipsis") for line in lines),
        Text(f"`surgeon plans NAME` prints one{more}", style="dim"),
    )
