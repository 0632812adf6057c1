"""`surgeon revert`: every earlier state of a chain of surgeries comes back byte for byte, or nothing is written."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import surgeon
from surgeon.checkpoint.staging import Staging
from surgeon.cli import app
from surgeon.common.listener import Quiet
from surgeon.errors import BadInput
from tests import tiny
from tests.checkpoints import train, weights, write_plan
from tests.commands import refused
from tests.manifest.edits import edited
from tests.writing.test_interruptions import fail_after

INSERT: dict[str, Any] = {"op": "insert_layers", "where": {"after": [0, 3]}, "init": {"kind": "copy"}}
ADAPTERS: dict[str, Any] = {"op": "gated_adapters", "layers": [1, 5], "size": 8}
CONTROL: dict[str, Any] = {"op": "control_llm", "layers": [1, 4], "interpolator": {"kind": "lerp", "learnable": True}}
# The third surgery inserts beneath what the second grafted, so that grafts move with their layers.
SURGERIES = [[INSERT], [ADAPTERS], [INSERT | {"where": {"after": [1]}}, CONTROL]]


def chain(folder: Path, family: str, surgeries: list[list[dict[str, Any]]] = SURGERIES) -> list[Path]:
    """States 0 to S of a chain; each was trained before the next surgery."""
    states = [tiny.checkpoint(folder / "state-0", family)]
    for number, operations in enumerate(surgeries, 1):
        out = folder / f"state-{number}"
        surgeon.apply(write_plan(folder / f"{number}.yaml", operations), str(states[-1]), out)
        train(out, seed=number)
        states.append(out)
    return states


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return chain(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def out(llama: list[Path], tmp_path: Path) -> Path:
    """A copy of the last state, to be spoilt."""
    return Path(shutil.copytree(llama[-1], tmp_path / "out"))


def assert_same_state(found: Path, state: Path) -> None:
    there, expected = weights(found), weights(state)
    assert there.keys() == expected.keys()
    for name, value in expected.items():
        assert there[name].dtype == value.dtype
        assert torch.equal(there[name].view(torch.uint8), value.view(torch.uint8)), name
    assert json.loads((found / "config.json").read_text()) == json.loads((state / "config.json").read_text())

    def small(folder: Path) -> dict[str, bytes]:
        named = {"config.json", "model.safetensors.index.json"}
        return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix != ".safetensors" and p.name not in named}

    assert small(found) == small(state)


WIDER: dict[str, dict[str, Any]] = {
    "ffn": {"op": "widen_ffn", "to": 96},
    "attention": {"op": "widen_attention", "groups": 2},
    "hidden": {"op": "widen_hidden", "times": 2},
}


@pytest.mark.parametrize(
    ("first", "second"), [("ffn", "hidden"), ("attention", "hidden"), ("hidden", "ffn"), ("hidden", "attention")]
)
def test_what_was_widened_along_both_axes_comes_back(first: str, second: str, tmp_path: Path) -> None:
    """Rows by one surgery and columns by the other: the first base lies in a corner of each matrix."""
    base = tiny.checkpoint(tmp_path / "base", "llama")
    for on, name, operation in ((base, "one", first), (tmp_path / "one", "two", second)):
        surgeon.apply(write_plan(tmp_path / f"{name}.yaml", [WIDER[operation]]), str(on), tmp_path / name)
    for number, state in enumerate((base, tmp_path / "one")):
        surgeon.revert(tmp_path / "two", tmp_path / f"back-{number}", to=number)
        assert weights(tmp_path / f"back-{number}").keys() == weights(state).keys()
        for name, value in weights(state).items():
            assert torch.equal(weights(tmp_path / f"back-{number}")[name], value), name
    # A base's own byte that is another now is not given back.
    shard = next(iter(sorted((tmp_path / "two").glob("*.safetensors"))))
    held = load_file(shard)
    matrix = next(value for name, value in held.items() if "proj" in name)
    matrix[0, 0] += 1
    save_file(held, shard, metadata={"format": "pt"})
    with pytest.raises(BadInput, match="trained or edited"):
        surgeon.revert(tmp_path / "two", tmp_path / "again", to=0)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_every_state_of_a_chain_comes_back(number: int, llama: list[Path], tmp_path: Path) -> None:
    reverted = surgeon.revert(llama[3], tmp_path / "back", to=number)
    assert_same_state(tmp_path / "back", llama[number])
    assert (reverted.to, reverted.surgeries, len(reverted.undone)) == (number, 3, 3 - number)
    assert reverted.tensors + reverted.dropped == len(weights(llama[3]))
    assert (tmp_path / "back" / "surgery.json").exists() == (number > 0)
    assert any((tmp_path / "back").glob("*.py")) == (number == 2)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_states_taken_back_one_by_one(llama: list[Path], tmp_path: Path) -> None:
    """Without `--to` the last surgery is taken out; the state before is an output like any other."""
    here = llama[3]
    for number in (2, 1, 0):
        surgeon.revert(here, tmp_path / str(number))
        here = tmp_path / str(number)
        assert_same_state(here, llama[number])
    assert len(list(here.glob("*.safetensors"))) == len(list(llama[0].glob("*.safetensors"))) > 1
    with pytest.raises(BadInput, match=r"no surgery\.json"):
        surgeon.revert(here, tmp_path / "further")


def test_a_state_taken_back_verifies_and_grows_again(llama: list[Path], tmp_path: Path) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    surgeon.revert(llama[3], first, to=1)
    applied = surgeon.apply(llama[0].parent / "2.yaml", str(first), again)
    assert surgeon.verify(first, again, logits=False).holds
    assert applied.manifest.lineage == surgeon.inspect(llama[2]).manifest.lineage


@pytest.mark.parametrize("family", ["gemma3_text", "qwen2"])
def test_layer_types_and_tied_embeddings(family: str, tmp_path: Path) -> None:
    states = chain(tmp_path, family)
    for number in (0, 2):
        surgeon.revert(states[3], tmp_path / f"back-{number}", to=number)
        assert_same_state(tmp_path / f"back-{number}", states[number])
    assert "lm_head.weight" not in weights(tmp_path / "back-0")


def test_stacked_layers_come_out_again(tmp_path: Path) -> None:
    base, grown = tiny.checkpoint(tmp_path / "base", "llama"), tmp_path / "grown"
    chosen = write_plan(tmp_path / "plan.yaml", [{"op": "stack_layers", "bottom": 5, "top": 4}])
    surgeon.apply(chosen, str(base), grown)
    surgeon.revert(grown, tmp_path / "back")
    assert_same_state(tmp_path / "back", base)


def test_command_line(llama: list[Path], tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["revert", str(llama[3]), str(tmp_path / "shown"), "--to", "1"])
    assert shown.exit_code == 0, shown.output
    words = " ".join(shown.stdout.split())
    assert "1 of its surgeries" in words
    assert "gated_adapters; insert_layers, control_llm" in words
    told = CliRunner().invoke(app, ["revert", str(llama[3]), str(tmp_path / "told"), "--json", "--quiet"])
    data = json.loads(told.stdout)
    assert data["undone"] == [["insert_layers", "control_llm"]]
    assert (data["to"], data["surgeries"], data["base"]) == (2, 3, "state-2")
    quiet = CliRunner().invoke(app, ["revert", str(llama[3]), str(tmp_path / "quiet"), "--to", "0", "--quiet"])
    assert (quiet.exit_code, quiet.output) == (0, "")


def trained(out: Path) -> None:
    train(out, "model.layers.0.mlp.up_proj.weight", seed=3)


def lost(out: Path) -> None:
    shard = next(path for path in out.glob("*.safetensors") if "model.layers.0.mlp.up_proj.weight" in load_file(path))
    tensors = load_file(shard)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, shard, metadata={"format": "pt"})
    index = json.loads((out / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.layers.0.mlp.up_proj.weight"]
    (out / "model.safetensors.index.json").write_text(json.dumps(index))


def edit(change: Callable[[dict[str, Any]], None], *, seal: bool = False) -> Callable[[Path], None]:
    return lambda out: (edited(out, change, seal=seal), None)[1]


def another_digest(manifest: dict[str, Any]) -> None:
    manifest["lineage"][1]["base"]["tensors"]["model.norm.weight"]["sha256"] = "0" * 64


def another_ancestor(manifest: dict[str, Any]) -> None:
    """An entry of the lineage, by whose seal the second surgery knows it."""
    manifest["lineage"][0]["plan"] = "surgeon: 1"


def another_graft(manifest: dict[str, Any]) -> None:
    manifest["layers"][0]["base"] = 1


SPOILT: dict[str, tuple[Callable[[Path], None], list[str], list[str]]] = {
    "trained base tensor": (trained, ["--to", "0"], ["model.layers.0.mlp.up_proj.weight", "trained or edited", "base"]),
    "tensor missing": (lost, [], ["model.layers.0.mlp.up_proj.weight", "no shard"]),
    "no manifest": (lambda out: (out / "surgery.json").unlink(), [], ["no surgery.json"]),
    "as many as there are": (lambda out: None, ["--to", "3"], ["3 surgeries", "between 0 and 2"]),
    "negative": (lambda out: None, ["--to", "-1"], ["--to -1", "between 0 and 2"]),
    "no config of the base": (edit(lambda m: m["base"].pop("config")), [], ["surgery.json", "base.config"]),
    "edited ancestor": (edit(another_digest), ["--to", "1"], ["surgery.json (surgery 2)", "edited"]),
    "edited ancestor's ancestor": (edit(another_ancestor), [], ["surgery.json (surgery 1)", "edited"]),
    "layers named twice": (edit(another_graft, seal=True), [], ["`layers`", "once"]),
    "not a manifest": (edit(lambda m: m.pop("plan")), [], ["surgery.json", "plan"]),
}


@pytest.mark.parametrize("case", SPOILT)
def test_refusals_are_one_line_and_write_nothing(case: str, out: Path, tmp_path: Path) -> None:
    spoil, options, words = SPOILT[case]
    spoil(out)
    told = refused("revert", out, tmp_path / "back", *options)
    for word in words:
        assert word in told, told
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_destinations_that_are_refused(llama: list[Path], tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "thesis.txt").write_text("mine")
    assert "exists" in refused("revert", llama[3], tmp_path / "there")
    assert "never written to" in refused("revert", llama[3], llama[3] / "inside")


def test_what_was_trained_between_surgeries_is_told_from_the_manifests(llama: list[Path], tmp_path: Path) -> None:
    """A base tensor trained after the first surgery: later states come back, earlier ones do not."""
    first = Path(shutil.copytree(llama[1], tmp_path / "first"))
    train(first, "model.norm.weight", seed=5)
    second = tmp_path / "second"
    surgeon.apply(write_plan(tmp_path / "plan.yaml", [ADAPTERS]), str(first), second)
    surgeon.revert(second, tmp_path / "back", to=1)
    assert_same_state(tmp_path / "back", first)
    told = refused("revert", second, tmp_path / "base", "--to", "0")
    assert "model.norm.weight: trained or edited when surgery 2 began" in told


def test_merged_branches_are_lost(tmp_path: Path) -> None:
    states = chain(tmp_path, "llama", [[CONTROL]])
    merged = tmp_path / "merged"
    surgeon.apply(write_plan(tmp_path / "merge.yaml", [{"op": "merge_branches", "alpha": 0.5}]), str(states[1]), merged)
    for number in ("0", "1"):
        told = refused("revert", merged, tmp_path / "back", "--to", number)
        assert "surgery 2 (merge_branches) gave it another value" in told
        assert "(state-1)" in told
    assert not (tmp_path / "back").exists()


def test_code_is_the_one_of_then(out: Path, llama: list[Path], tmp_path: Path) -> None:
    """A state whose files of code are no longer shipped takes them from the output, where they are what was kept."""
    name = "modeling_surgeon.py"
    changed = b"# as an older version had it\n" + (out / name).read_bytes()

    def older(manifest: dict[str, Any]) -> None:
        for files in (manifest["lineage"][1]["files"], manifest["base"]["files"]):
            files[name] = hashlib.sha256(changed).hexdigest()

    edited(out, older, seal=True)
    assert f"{name}: neither" in refused("revert", out, tmp_path / "back")
    (out / name).write_bytes(changed)
    assert "--trust-remote-code" in refused("revert", out, tmp_path / "back")
    surgeon.revert(out, tmp_path / "back", trust_remote_code=True)
    assert (tmp_path / "back" / name).read_bytes() == changed


def test_lineage_grows_by_a_manifest_a_surgery(llama: list[Path]) -> None:
    lineage = json.loads((llama[3] / "surgery.json").read_text())["lineage"]
    assert len(lineage) == 2
    assert all("lineage" not in surgery for surgery in lineage)


def test_a_run_cut_off_is_continued(llama: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        fail_after(patched, 4, errno.ENOSPC)
        told = refused("revert", llama[3], tmp_path / "back", "--to", "1")
    assert "the disk is full" in told
    assert not (tmp_path / "back").exists()
    again = CliRunner().invoke(app, ["revert", str(llama[3]), str(tmp_path / "back"), "--to", "1"])
    assert "continuing an earlier run" in again.stderr
    assert_same_state(tmp_path / "back", llama[1])


@pytest.mark.parametrize("number", [0, 1])
def test_killed_after_it_was_complete(
    number: int, llama: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Staging, "_clean_up", lambda self: None)
        surgeon.revert(llama[3], tmp_path / "back", to=number)
    assert (tmp_path / ".back.surgeon").exists()
    listener = Quiet()
    surgeon.revert(llama[3], tmp_path / "back", to=number, listener=listener)
    assert any("already complete" in line for line in listener.said)
    assert [path.name for path in tmp_path.iterdir()] == ["back"]
    assert_same_state(tmp_path / "back", llama[number])


def test_a_grafted_base_without_a_manifest_keeps_its_code(llama: list[Path], tmp_path: Path) -> None:
    """Saved again by another tool, say: state 0 is then a grafted checkpoint, which is nothing without its code."""
    saved = Path(shutil.copytree(llama[2], tmp_path / "saved"))
    (saved / "surgery.json").unlink()
    (saved / "README.md").unlink()
    surgeon.apply(write_plan(tmp_path / "plan.yaml", [INSERT]), str(saved), tmp_path / "grown")
    surgeon.revert(tmp_path / "grown", tmp_path / "back")
    assert_same_state(tmp_path / "back", saved)
