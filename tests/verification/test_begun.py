"""A trained output beside the model that a training began with: equal but for what trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import surgeon
from surgeon.manifest.manifest import Manifest
from surgeon.verification.verification import Verification
from surgeon.verification.verify import verify
from tests.training.test_train import base_of, config


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`grown` from a base, `run` trained from it, and `again` trained whole from `run`."""
    folder = tmp_path_factory.mktemp("begun")
    base_of(folder)
    settings: dict[str, Any] = {"steps": 2, "save_every": 100, "evaluate_every": 100}
    surgeon.apply("neutral-residues", folder / "base", folder / "grown")
    surgeon.train(folder / "grown", config(folder, **settings), folder / "run", device="cpu")
    whole = config(folder, what="all", keep_base=True, **settings)
    surgeon.train(folder / "run", whole, folder / "again", device="cpu")
    return folder


def broken(found: Verification) -> list[str]:
    return [check.name for check in found.checks if not check.holds]


@pytest.mark.parametrize(("begun", "run"), [("grown", "run"), ("run", "again"), ("grown", "again")])
def test_what_a_run_began_with_is_a_base_to_verify_it_against(made: Path, begun: str, run: str) -> None:
    found = verify(made / begun, made / run)
    assert found.holds and found.trained and found.comparisons and not broken(found)
    # The base of the surgery is one still.
    assert verify(made / "base", made / run).holds


def _first_tensor(folder: Path, name: str) -> None:
    """Change one number of a tensor, under the headers as they were."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            tensors[name].view(-1)[0] += 1
            save_file(tensors, file, {"format": "pt"})


def _config(folder: Path) -> None:
    """Change a number of the config that no tensor's shape depends on."""
    there = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(there | {"rms_norm_eps": 0.5}))


def _side_file(folder: Path) -> None:
    """Change a file beside the weights."""
    (folder / "generation_config.json").write_text('{"top_k": 7}')


@pytest.mark.parametrize(
    ("whose", "change", "named"),
    [
        ("grown", lambda folder: _first_tensor(folder, "model.norm.weight"), {"base", "tensors since then"}),
        ("run", lambda folder: _first_tensor(folder, "model.norm.weight"), {"tensors since then", "as left"}),
        ("run", lambda folder: _first_tensor(folder, _trained(folder)), {"as left"}),
        ("run", _config, {"files"}),
        ("run", _side_file, {"files"}),
    ],
)
def test_any_other_difference_is_named(
    made: Path, tmp_path: Path, whose: str, change: Callable[[Path], None], named: set[str]
) -> None:
    folders = {name: made / name for name in ("grown", "run")}
    folders[whose] = shutil.copytree(made / whose, tmp_path / whose)
    change(folders[whose])
    assert {*broken(verify(folders["grown"], folders["run"], logits=False))} == named


def _trained(folder: Path) -> str:
    """Return a tensor that trained."""
    return next(iter(Manifest(**json.loads((folder / "surgery.json").read_text())).trained))
