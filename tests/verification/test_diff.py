"""`surgeon diff`: what became of every tensor, told from a manifest or read, and the exit codes of diff(1)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import surgeon
from surgeon.cli import app
from surgeon.errors import BadInput
from surgeon.verification.diff import Difference
from tests import tiny
from tests.checkpoints import edit_config, train, weights, write_plan
from tests.commands import refused
from tests.manifest.edits import edited
from tests.rework.test_revert import chain

UP = "model.layers.{}.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return chain(tmp_path_factory.mktemp("llama"), "llama")


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


def kinds(found: Difference) -> dict[str, Any]:
    """Everything but who was read and where the folders lie."""
    told = found.to_json()
    return {key: told[key] for key in ("added", "removed", "changed", "moved", "same", "config")}


def assert_accounts_for_all(found: Difference, a: Path, b: Path) -> None:
    here = [*found.same, *found.moved, *found.changed, *found.removed]
    there = [*found.same, *found.moved.values(), *found.changed.values(), *found.added]
    assert sorted(here) == sorted(weights(a))
    assert sorted(there) == sorted(weights(b))


def test_inserted_layers_move_the_others(llama: list[Path]) -> None:
    """New layers after 0 and 3: told from the manifest, read with `exact`, and read without any manifest alike."""
    found = surgeon.diff(llama[0], llama[1])
    assert found.not_read == llama[0]
    assert_accounts_for_all(found, llama[0], llama[1])
    assert set(found.added) == set(surgeon.inspect(llama[1]).manifest.new_tensors)
    assert {found.moved[UP.format(i)] for i in range(1, 6)} == {UP.format(i) for i in (2, 3, 4, 6, 7)}
    assert UP.format(0) in found.same
    assert "lm_head.weight" in found.same
    assert not found.changed
    assert not found.removed
    assert found.config == {"num_hidden_layers": (6, 8)}
    exact = surgeon.diff(llama[0], llama[1], exact=True)
    assert exact.not_read is None
    assert kinds(exact) == kinds(found)


def test_without_a_manifest_layers_are_matched_by_their_bytes(llama: list[Path], tmp_path: Path) -> None:
    grown = copied(llama[1], tmp_path / "grown")
    (grown / "surgery.json").unlink()
    found = surgeon.diff(llama[0], grown)
    assert found.not_read is None
    assert kinds(found) == kinds(surgeon.diff(llama[0], llama[1]))


def test_the_other_way_round(llama: list[Path]) -> None:
    there, back = surgeon.diff(llama[1], llama[2]), surgeon.diff(llama[2], llama[1])
    assert back.not_read == there.not_read == llama[1]
    assert set(back.removed) == set(there.added) > set()
    assert {b: a for a, b in back.moved.items()} == there.moved
    assert back.same == there.same


def test_an_earlier_ancestor_is_read(llama: list[Path]) -> None:
    found = surgeon.diff(llama[0], llama[3])
    assert found.not_read is None
    assert_accounts_for_all(found, llama[0], llama[3])
    assert found.moved[UP.format(4)] == UP.format(7)
    assert not found.changed
    assert not found.removed


def test_trained_tensors_are_changed(llama: list[Path], tmp_path: Path) -> None:
    """In the output they are seen at once; in a base that is told from the manifest only by `exact`."""
    grown, base = copied(llama[1], tmp_path / "grown"), copied(llama[0], tmp_path / "base")
    train(grown, UP.format(4), "model.norm.weight", seed=1)
    found = surgeon.diff(llama[0], grown)
    assert found.not_read == llama[0]
    assert found.changed == {UP.format(3): UP.format(4), "model.norm.weight": "model.norm.weight"}
    assert_accounts_for_all(found, llama[0], grown)

    train(base, UP.format(5), seed=2)
    assert not surgeon.diff(base, llama[1]).changed
    assert surgeon.diff(base, llama[1], exact=True).changed == {UP.format(5): UP.format(7)}

    every = surgeon.diff(llama[1], grown)
    assert every.not_read is None
    assert every.changed == {UP.format(4): UP.format(4), "model.norm.weight": "model.norm.weight"}
    assert not every.moved


def test_whole_layers_trained_keep_their_numbers(tmp_path: Path) -> None:
    """Nothing is shared that could tell which layer is which."""
    base = tiny.checkpoint(tmp_path / "base", "llama")
    other = copied(base, tmp_path / "other")
    train(other, *weights(other), seed=4)
    found = surgeon.diff(base, other)
    assert found.changed == {name: name for name in weights(base)}


@pytest.mark.parametrize("change", ["config", "names", "earlier"])
def test_a_base_that_does_not_fit_the_manifest_is_read(change: str, llama: list[Path], tmp_path: Path) -> None:
    base = copied(llama[1], tmp_path / "base")
    assert surgeon.diff(base, llama[2]).not_read == base
    if change == "config":
        edit_config(base, rope_theta=7.0)
    elif change == "earlier":
        (base / "surgery.json").unlink()
    else:
        base = llama[0]
    assert surgeon.diff(base, llama[2]).not_read is None


def test_merged_branches_are_changed(tmp_path: Path) -> None:
    states = chain(tmp_path, "llama", [[{"op": "control_llm", "layers": [1]}]])
    merged = tmp_path / "merged"
    surgeon.apply(write_plan(tmp_path / "merge.yaml", [{"op": "merge_branches", "alpha": 0.5}]), str(states[1]), merged)
    found = surgeon.diff(states[1], merged)
    assert found.not_read == states[1]
    assert found.removed == tuple(sorted(name for name in weights(states[1]) if "expanded" in name))
    assert set(found.changed) == {name for name in weights(merged) if name.startswith("model.layers.1.")}


def test_other_dtype_is_changed(tmp_path: Path) -> None:
    """The same weights, cast: nothing is the same."""
    a = tiny.checkpoint(tmp_path / "a", "llama")
    b = tiny.checkpoint(tmp_path / "b", "llama", dtype="float32")
    assert len(surgeon.diff(a, b).changed) == len(weights(a))


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["diff", *map(str, arguments)])
    shown = result.stdout if "--json" in arguments else " ".join(result.stdout.split())
    return result.exit_code, shown


def test_command_line(llama: list[Path], tmp_path: Path) -> None:
    same = copied(llama[0], tmp_path / "same")
    code, shown = run(llama[0], same)
    assert code == 0
    assert "the same; both were read" in shown
    code, shown = run(llama[0], llama[1])
    assert code == 1
    assert "layers 1-3 → 2-4, 4-5 → 6-7" in shown
    assert "6 → 8" in shown
    assert "was not read" in shown
    code, told = run(llama[0], llama[1], "--json", "--exact", "--quiet")
    assert code == 1
    assert json.loads(told)["not_read"] is None
    assert json.loads(told)["config"] == {"num_hidden_layers": {"a": 6, "b": 8}}
    assert run(llama[0], llama[1], "--quiet") == (1, "")
    edit_config(same, added=None)
    assert run(llama[0], same)[0] == 1


def test_bad_input_is_refused(llama: list[Path], tmp_path: Path) -> None:
    assert "no such folder" in refused("diff", llama[0], tmp_path / "none")
    out = copied(llama[1], tmp_path / "out")
    edited(out, lambda manifest: manifest["layers"][1].update(base=1), seal=True)
    assert "`layers`" in refused("diff", llama[0], out)
    (out / "surgery.json").write_text("{}")
    with pytest.raises(BadInput, match="not a surgeon manifest"):
        surgeon.diff(llama[0], out)
