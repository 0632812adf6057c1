"""What every test process needs before anything else is imported."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

# The code that checkpoints bring is cached by the name of their folder: a cache for each process, so that tests that
# run side by side do not meet there, and none of it stays in the user's own.
_CODE = tempfile.mkdtemp(prefix="surgeon-tests-code-")
os.environ["HF_MODULES_CACHE"] = _CODE
atexit.register(shutil.rmtree, _CODE, ignore_errors=True)


@pytest.fixture(autouse=True)
def _width_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the terminal shows does not depend on the width that a runner of tests has been told of."""
    monkeypatch.delenv("COLUMNS", raising=False)


def pytest_collection_finish() -> None:
    """Python's cycle collector looks at all of torch and transformers again and again: a quarter of the time."""
    gc.collect()
    gc.freeze()
    gc.disable()


@pytest.fixture(scope="module", autouse=True)
def _collected() -> Iterator[None]:
    """What a file's tests leave is collected once, and what lives on (modules imported meanwhile) never looked at."""
    yield
    gc.collect()
    gc.freeze()
