"""What every test process needs before anything else is imported."""

from __future__ import annotations

import atexit
import gc
import itertools
import json
import os
import shlex
import shutil
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.warm import start, warm

# The code that checkpoints bring is cached by the name of their folder: a cache for each process, so that tests that
# run side by side do not meet there, and none of it stays in the user's own.
_CACHE = str(Path(tempfile.gettempdir()) / "surgeon-tests-cache-")
_CODE = tempfile.mkdtemp(prefix="surgeon-tests-code-")
os.environ["HF_MODULES_CACHE"] = _CODE
atexit.register(shutil.rmtree, _CODE, ignore_errors=True)
# Nothing that one test found out is known to another, but for proofs on twins: their keys hold all that they depend on,
# and a process of a test's own would import transformers for each. xdist's processes have their parent's environment.
if not os.environ.get("SURGEON_CACHE", "").startswith(_CACHE):
    os.environ["SURGEON_CACHE"] = tempfile.mkdtemp(prefix="surgeon-tests-cache-")
    atexit.register(shutil.rmtree, os.environ["SURGEON_CACHE"], ignore_errors=True)
    for kind in ("anatomies", "digests"):
        # No folder: what cannot be a cache is none.
        (Path(os.environ["SURGEON_CACHE"]) / kind).touch()
# The key by which work folders are known again is the tests' own, of all their processes.
if "SURGEON_STATE" not in os.environ:
    os.environ["SURGEON_STATE"] = _STATE = tempfile.mkdtemp(prefix="surgeon-tests-state-")
    atexit.register(shutil.rmtree, _STATE, ignore_errors=True)
# The same examples in each run, and no verdict by the clock: a busy machine would fail. tests/fuzz asks for others.
settings.register_profile(
    "surgeon", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("surgeon")


@pytest.fixture(autouse=True)
def _width_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the terminal shows does not depend on the width that a runner of tests has been told of."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True)
def _at_home() -> Iterator[None]:
    """A test that goes to another folder leaves the next one where it was."""
    home = Path.cwd()
    yield
    os.chdir(home)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A tiny Llama in bf16, four shards."""
    from tests import tiny

    return tiny.checkpoint(tmp_path / "base", "llama")


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., Path]:
    """Writes a plan of one `insert_layers` (or of any operations given) and returns its path."""

    def write(*operations: dict[str, Any], seed: int = 0, name: str = "plan.yaml", **insert: Any) -> Path:
        entries = list(operations) or [{"op": "insert_layers", **insert}]
        path = tmp_path / name
        path.write_text(json.dumps({"surgeon": 1, "seed": seed, "operations": entries}, indent=1))
        return path

    return write


def pytest_configure(config: pytest.Config) -> None:
    """One server of warm interpreters for all of xdist's processes, and they are the first of its forks.

    A process alone starts it when it wants one.
    """
    processes = config.getoption("numprocesses", None)
    if processes and not hasattr(config, "workerinput"):
        start()
        # What is of its own in its environment keeps each from a nursery: their caches of code are not yet made.
        config.option.tx = [f"popen//python=env TESTS_PROCESS={n} {shlex.join(warm())}" for n in range(processes)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first in each process' share: begun at the end, they would run alone.

    xdist's `worksteal` cuts the list into shares of one length, whose rests are handed on later.
    """
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    files = list(dict.fromkeys(item.path for item in items if item.path in slow))
    quick = iter([item for item in items if item.path not in slow])
    ordered: list[pytest.Item] = []
    for process in range(processes):
        dealt = set(files[process::processes])
        share = [item for item in items if item.path in dealt]
        length = (len(items) - len(ordered)) // (processes - process)
        ordered += [*share, *itertools.islice(quick, max(0, length - len(share)))]
    items[:] = [*ordered, *quick]


def pytest_collection_finish() -> None:
    """Python's cycle collector looks at all of torch and transformers again and again: a quarter of the time."""
    gc.collect()
    gc.freeze()
    gc.disable()


@pytest.fixture(scope="module", autouse=True)
def _collected() -> Iterator[None]:
    """What a file's tests leave is collected once, and what lives on (modules imported meanwhile) never looked at."""
    memory = sys.modules.get("accelerate.utils.memory")
    if memory is not None:
        # It collects before each training, to make room on a device.
        memory.gc = types.SimpleNamespace(collect=lambda: 0)
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is tried on a twin first: what a test breaks or counts in the writer is the output's own."""
    from surgeon.writing import proofs, small_run

    monkeypatch.setattr(small_run, "prove_small", lambda *_: None)
    # Nor is it kept as if it were.
    monkeypatch.setattr(proofs, "write_entry", lambda *_, **__: None)
