"""Outputs that the tests of this room share."""

from __future__ import annotations

import pytest

import surgeon
from tests.verification.outputs import Made, make


@pytest.fixture(scope="session")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    """Outputs with every operation, by name, in one folder; `delta` beside them is that of the one named `three`."""
    folder = tmp_path_factory.mktemp("outputs")
    made = make(folder)
    surgeon.make_delta(made["three"].out, folder / "delta")
    return made
