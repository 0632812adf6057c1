"""The first hour, carried out: the wheel in a clean environment, outside the tree, and nothing but commands.

    python -m benchmarks.newcomer --work DIR [--borrow]

Builds the wheel, makes an environment in DIR (which must not exist), and runs the commands of the tutorial
(benchmarks/walks/) as a user would, at 100 columns. A command that is refused must name the words that its correction
uses; every other must succeed. The transcript becomes docs/tutorial/first-hour.md. The environment gets the versions of
constraints.txt. `--borrow` lends it the packages of this one, surgeon excepted, where torch shall not be installed
again. The Hub is the stand-in of the tests.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks.measuring import machine
from benchmarks.walks import first_hour
from benchmarks.walks.walk import COLUMNS, Desk, Ran, carry_out, processor_seconds, sections

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "tutorial"

# The stand-in is of the tests: a process of its own, in the tree, until its stdin closes. It takes the name of the
# repository that is pushed to, then names and folders of models that it has.
STAND_IN = """
import sys
from pathlib import Path
from tests.checkpoint.stand_in_hub import Hub, files_of, serve

pushed, *rest = sys.argv[1:]
hubs = [Hub(files_of(Path(folder)), repo_id=name) for name, folder in zip(rest[::2], rest[1::2])]
empty = Hub({}, repo_id=pushed, exists=False)

class Named:
    def parse_request(self):
        ready = super().parse_request()
        self.hub = next((hub for hub in hubs if ready and hub.repo_id in self.path), empty)
        return ready

with serve(empty, Named) as hub:
    for other in hubs:
        other.endpoint = hub.endpoint
    print(hub.endpoint, flush=True)
    sys.stdin.read()
"""


def build_wheel(work: Path) -> Path:
    """The project's wheel, by its build backend."""
    _must([sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--quiet", "--wheel-dir", str(work)])
    return next(work.glob("*.whl"))


def environment(work: Path, wheel: Path, *, borrow: bool) -> Path:
    """A clean environment with surgeon out of the wheel; its folder of programs."""
    _must([sys.executable, "-m", "venv", str(work / "venv")])
    python = work / "venv" / "bin" / "python"
    if borrow:
        # A path in a .pth is only searched: .pth files in it, an editable surgeon's among them, are not read.
        told = subprocess.check_output([python, "-c", "import site; print(site.getsitepackages()[0])"], text=True)
        lent = [path for path in sys.path if Path(path).name == "site-packages"]
        (Path(told.strip()) / "borrowed.pth").write_text("\n".join(lent) + "\n")
    known_good = ["-c", str(ROOT / "constraints.txt"), str(wheel)]
    extra = ["--no-deps", "--force-reinstall", str(wheel)] if borrow else ["--no-compile", *known_good]
    _must([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *extra])
    return python.parent


def _must(command: list[str]) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"{shlex.join(command)}: {ran.stdout}{ran.stderr}")


@contextmanager
def stand_in(pushed: str, models: Mapping[str, Path] | None = None) -> Iterator[str]:
    """The address of a Hub on the loopback interface that has `models` and takes a push to the repository `pushed`."""
    served = [str(part) for pair in (models or {}).items() for part in pair]
    command = [sys.executable, "-c", STAND_IN, pushed, *served]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout
        yield process.stdout.readline().strip()
        process.stdin.close()


def environment_of_a_user(work: Path, programs: Path) -> dict[str, str]:
    """The variables of this process without those that would reach surgeon, and the new environment's programs."""
    left_out = ("HF_", "TRANSFORMERS_", "PYTHON", "SURGEON_", "VIRTUAL_ENV")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    environ |= {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "COLUMNS": str(COLUMNS), "NO_COLOR": "1"}
    environ |= {"SURGEON_CACHE": str(work / "cache"), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    environ |= {"HF_TOKEN": "hf_" + "x" * 34, "HF_HUB_DISABLE_XET": "1", "TRANSFORMERS_VERBOSITY": "error"}
    return environ


def walk_first_hour(work: Path, setup: list[tuple[str, float]], *, borrowed: bool) -> str:
    """Carry out the first hour; its page."""
    desk, programs = work / "desk", work / "venv" / "bin"
    desk.mkdir()
    environ = environment_of_a_user(work, programs) | {"HF_HOME": str(work / "hub")}
    first_hour.prepare(desk)
    with stand_in("user/french") as endpoint:
        hidden = {endpoint: "http://127.0.0.1:PORT", str(desk): "~/desk", str(work): "~"}
        rans = carry_out(first_hour.STEPS, {"desk": Desk(desk, environ | {"HF_ENDPOINT": endpoint})}, hidden)
    return "\n".join([first_hour.INTRODUCTION, *sections(rans, {}), *times(setup, rans, borrowed=borrowed)])


def times(setup: list[tuple[str, float]], rans: list[Ran], *, borrowed: bool) -> Iterator[str]:
    """The table of seconds."""
    yield from (
        "## Times",
        "",
        f"Processor seconds of one run on this machine: {machine()}, no GPU.",
        *(["The packages that surgeon depends on were there already."] if borrowed else []),
        "",
        "| step | seconds |",
        "|---|---:|",
    )
    yield from (f"| {name} | {seconds:.1f} |" for name, seconds in setup)
    yield from (f"| `{ran.step.command}` | {ran.seconds:.1f} |" for ran in rans)
    total = sum(seconds for _, seconds in setup) + sum(ran.seconds for ran in rans)
    yield f"| all | {total:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="The first hour, carried out.")
    parser.add_argument("--work", type=Path, required=True, help="new folder, outside the tree")
    parser.add_argument("--borrow", action="store_true", help="use the packages installed here, surgeon excepted")
    given = parser.parse_args()
    work = given.work.resolve()
    if work.exists() or work.is_relative_to(ROOT):
        raise SystemExit(f"{work}: give a folder that is not there yet, outside the source tree")
    work.mkdir(parents=True)
    began = processor_seconds()
    wheel = build_wheel(work)
    setup = [("the wheel built", processor_seconds() - began)]
    began = processor_seconds()
    programs = environment(work, wheel, borrow=given.borrow)
    setup.append(("environment, wheel installed", processor_seconds() - began))
    command = [str(programs / "python"), "-c", "import surgeon; print(surgeon.__file__)"]
    found = subprocess.check_output(command, cwd=work, env=environment_of_a_user(work, programs), text=True).strip()
    if not Path(found).is_relative_to(work):
        raise SystemExit(f"surgeon is not the wheel's: {found}")
    text = walk_first_hour(work, setup, borrowed=given.borrow)
    page = PAGES / first_hour.PAGE
    page.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
