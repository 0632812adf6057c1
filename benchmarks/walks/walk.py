"""A tutorial as data: commands in order, what is written before them, which part of their output the page shows."""

from __future__ import annotations

import resource
import shlex
import subprocess
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

COLUMNS = 100
NOT_RUN = "<!-- not run: written by benchmarks/newcomer.py, which ran it -->"
LEFT_OUT = "…"


@dataclass(frozen=True)
class Step:
    """One command of a tutorial.

    `title` begins a section of the page and `says` comes before the command. `writes` are files made first, as
    (name, content), and shown. A command with `exits` 2 must name `names`, the words that its correction uses. `cuts`
    are parts that the page leaves out: from a line up to another that stays, by how they begin; "" is the end. `then`
    follows the output. `at` is the desk that the step runs at; `hidden` steps are not shown.
    """

    command: str
    title: str = ""
    says: str = ""
    writes: tuple[tuple[str, str], ...] = ()
    exits: int = 0
    names: tuple[str, ...] = ()
    cuts: tuple[tuple[str, str], ...] = ()
    then: str = ""
    at: str = "desk"
    hidden: bool = False


@dataclass(frozen=True)
class Desk:
    """A folder to run in, and the environment variables there."""

    folder: Path
    environ: Mapping[str, str]


@dataclass(frozen=True)
class Ran:
    """A step, the lines that it wrote to the terminal, and its processor seconds."""

    step: Step
    output: list[str]
    seconds: float


def processor_seconds() -> float:
    """Return the seconds of all processes that this one started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def carry_out(steps: Sequence[Step], desks: Mapping[str, Desk], hidden: Mapping[str, str]) -> list[Ran]:
    """Run the steps one after the other; show each one's time.

    Args:
        steps: what to run.
        desks: where, by the names that steps use.
        hidden: names of this machine, with what the page shows in their place.

    Raises:
        SystemExit: a step ends otherwise than it should.
    """
    rans = []
    for step in steps:
        rans.append(run(step, desks[step.at], hidden))
        print(f"{rans[-1].seconds:6.1f} s  {step.command}", flush=True)
    return rans


def run(step: Step, desk: Desk, hidden: Mapping[str, str]) -> Ran:
    """Carry a step out at its desk.

    Raises:
        SystemExit: its exit code is another than the step's, or its messages lack what the correction needs.
    """
    for name, content in step.writes:
        (desk.folder / name).write_text(content, encoding="utf-8")
    began = processor_seconds()
    done = subprocess.run(
        shlex.split(step.command),
        cwd=desk.folder,
        env=dict(desk.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    seconds = processor_seconds() - began
    lacking = [word for word in step.names if word not in done.stdout]
    if done.returncode != step.exits or lacking:
        raise SystemExit(f"{step.command}: exit {done.returncode}, not named: {lacking}\n{done.stdout}")
    return Ran(step, folded(done.stdout, hidden), seconds)


def folded(output: str, hidden: Mapping[str, str]) -> list[str]:
    """Return lines of at most 100 columns, wrapped between words, without the names of this machine."""
    for found, shown in hidden.items():
        output = output.replace(found, shown)
    lines = (line.rstrip() for line in output.strip("\n").splitlines())
    kept = {"replace_whitespace": False, "drop_whitespace": True, "break_on_hyphens": False}
    return [part for line in lines for part in (textwrap.wrap(line, COLUMNS, **kept) or [""])]


def cut(lines: list[str], cuts: Sequence[tuple[str, str]]) -> list[str]:
    """Return the lines without the parts that are cut out; each leaves one "…".

    Raises:
        SystemExit: a part does not begin or end where it should.
    """
    for first, last in cuts:
        begins = [number for number, line in enumerate(lines) if line.strip().startswith(first)]
        ends = [n for n in range(begins[0] + 1, len(lines)) if lines[n].strip().startswith(last)] if begins else []
        if not ends:
            raise SystemExit(f"no part of the output from {first!r} to {last!r}:\n" + "\n".join(lines))
        lines = [*lines[: begins[0]], LEFT_OUT, *(lines[ends[0] :] if last else [])]
    return lines


def sections(rans: Sequence[Ran], labels: Mapping[str, str]) -> Iterator[str]:
    """The lines of a page: every step, with its files and its output, which a label of its desk comes before."""
    for ran in rans:
        step = ran.step
        if step.hidden:
            continue
        if step.title:
            yield from (f"## {step.title}", "")
        if step.says:
            yield from (step.says.rstrip("\n"), "")
        for name, content in step.writes:
            yield from (NOT_RUN, "```yaml", f"# {name}", content.rstrip("\n"), "```", "")
        yield from (NOT_RUN, "```sh", step.command, "```", "")
        if step.at in labels:
            yield from (labels[step.at], "")
        yield from ("```text", *cut(ran.output, step.cuts), "```", "")
        if step.then:
            yield from (step.then.rstrip("\n"), "")
