"""A base that brings its own code trains, once it is trusted; its code goes along, byte for byte. No plan is for it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import surgeon
from surgeon.anatomy.dissect import dissect_folder
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.trust import check_written
from surgeon.errors import BadInput
from surgeon.models.load import load_model
from tests import tiny
from tests.checkpoints import add_letters
from tests.elsewhere import WITHOUT_SURGEON
from tests.end_to_end.test_any_decoder import TRAINING
from tests.own_code import AUTO_MAP, pebble
from tests.training.texts import corpus
from tests.warm import warm

INSERT = "surgeon: 1\noperations:\n  - {op: insert_layers, where: {every: 1}, init: {kind: copy}}\n"
CODE = ("configuration_pebble.py", "modeling_pebble.py")
TRUST: dict[str, Any] = {"trust_remote_code": True}
ELSEWHERE = f"""
{WITHOUT_SURGEON}
import torch
from transformers import AutoModelForCausalLM
base, out = (AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True) for folder in input().split())
ids = torch.arange(40).view(2, 20) % 60
with torch.no_grad():
    assert not torch.equal(base(input_ids=ids).logits, out(input_ids=ids).logits)
    assert out.generate(ids, max_new_tokens=4).shape == (2, 24)
print("trained")
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two kinds of layers, by a list of the config."""
    return add_letters(pebble(tmp_path_factory.mktemp("own") / "base", vocab_size=512, layer_windows=[0, 4, 0]))


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    (tmp_path / "plan.yaml").write_text(INSERT)
    return tmp_path / "plan.yaml"


def trained(base: Path, folder: Path) -> Path:
    """A run of the base as it is."""
    corpus(folder / "words.jsonl", documents=30)
    # Its code makes its mask itself, of no positions.
    (folder / "train.yaml").write_text(yaml.safe_dump(TRAINING | {"packing": "joined", "what": "all"}))
    surgeon.train(base, folder / "train.yaml", folder / "run", device="cpu", **TRUST)
    return folder / "run"


def test_it_trains_and_comes_back(base: Path, tmp_path: Path) -> None:
    run = trained(base, tmp_path)
    for name in CODE:
        assert (run / name).read_bytes() == (base / name).read_bytes()
    assert "trust_remote_code=True" in (run / "README.md").read_text()
    found = surgeon.verify(base, run, text=tmp_path / "words.jsonl", window=24, windows=1, **TRUST)
    assert found.holds and found.trained
    told = subprocess.run(
        [*warm(), "-c", ELSEWHERE], input=f"{base} {run}\n", capture_output=True, text=True, check=False
    )
    assert told.stdout == "trained\n", told.stderr


def test_a_delta_brings_the_code(base: Path, tmp_path: Path) -> None:
    out = trained(base, tmp_path)
    surgeon.make_delta(out, tmp_path / "delta", **TRUST)
    with pytest.raises(BadInput, match="code of its own"):
        surgeon.apply_delta(tmp_path / "delta", base, tmp_path / "again")
    surgeon.apply_delta(tmp_path / "delta", base, tmp_path / "again", **TRUST)
    for file in filter(Path.is_file, out.iterdir()):
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


def test_without_trust_it_is_refused_in_one_line(base: Path, plan: Path, tmp_path: Path) -> None:
    for command in (
        lambda: surgeon.preview(plan, base),
        lambda: surgeon.apply(plan, base, tmp_path / "out"),
        lambda: surgeon.verify(base, tmp_path / "out"),
    ):
        with pytest.raises(BadInput, match=r"brings code of its own.*--trust-remote-code") as refused:
            command()
        assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "operation", ["{op: insert_layers, where: {every: 1}, init: {kind: copy}}", "{op: control_llm, layers: all}"]
)
def test_operations_are_refused_with_what_to_do(base: Path, plan: Path, tmp_path: Path, operation: str) -> None:
    plan.write_text(f"surgeon: 1\noperations:\n  - {operation}\n")
    for command in (
        lambda: surgeon.preview(plan, base, **TRUST),
        lambda: surgeon.apply(plan, base, tmp_path / "out", **TRUST),
    ):
        with pytest.raises(
            BadInput, match=r"the base's own code, .*; use a release of transformers .* or convert"
        ) as refused:
            command()
        assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


def changed(base: Path, to: Path, name: str, old: str, new: str) -> Path:
    shutil.copytree(base, to)
    text = (to / name).read_text()
    assert old in text
    (to / name).write_text(text.replace(old, new))
    return to


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        ("modeling_pebble.py", "import torch\n", "import torch_of_nobody\n", "torch_of_nobody"),
        ("modeling_pebble.py", "self.post_init()", "raise KeyError('x')", "its own code cannot build"),
        ("modeling_pebble.py", "class PebbleForCausalLM", "class Other", "PebbleForCausalLM"),
        ("config.json", "modeling_pebble.Pebble", "user/name--modeling_pebble.Pebble", "lies beside the weights"),
        ("config.json", "modeling_pebble.Pebble", "modeling_x.Pebble", "modeling_x.py is not beside"),
        ("config.json", "AutoModelForCausalLM", "AutoModelForMaskedLM", "names no AutoModelForCausalLM"),
    ],
)
def test_code_that_builds_no_decoder_is_refused(
    base: Path, tmp_path: Path, name: str, old: str, new: str, words: str
) -> None:
    folder = changed(base, tmp_path / "other", name, old, new)
    with pytest.raises(BadInput, match=words) as refused:
        dissect_folder(CheckpointFolder.open(folder, **TRUST))
    assert "\n" not in str(refused.value)


def test_an_auto_map_of_a_tokenizer_says_nothing_of_the_model(plan: Path, tmp_path: Path) -> None:
    base = tiny.checkpoint(tmp_path / "base", "llama")
    settings = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(settings | {"auto_map": {"AutoTokenizer": ["x.T", None]}}))
    (base / "x.py").write_text("raise SystemExit\n")
    assert surgeon.families(base, **TRUST).takes("insert_layers")
    surgeon.apply(plan, base, tmp_path / "out", **TRUST)
    assert surgeon.verify(base, tmp_path / "out", logits=False, **TRUST).holds
    assert (tmp_path / "out" / "x.py").read_bytes() == (base / "x.py").read_bytes()


def test_changed_code_is_seen(base: Path, tmp_path: Path) -> None:
    out = trained(base, tmp_path)
    with (out / CODE[1]).open("a") as file:
        file.write("# more\n")
    found = surgeon.verify(base, out, logits=False, **TRUST)
    assert {check.name for check in found.checks if not check.holds} == {"files"}
    (out / CODE[1]).unlink()
    found = surgeon.verify(base, out, logits=False, **TRUST)
    assert {check.name for check in found.checks if not check.holds} == {"files"}


def test_a_config_of_a_manifest_names_no_other_code() -> None:
    check_written({"model_type": "pebble", "auto_map": AUTO_MAP}, "OUT/surgery.json", trusted=AUTO_MAP)
    for trusted, mapped in ((None, AUTO_MAP), (AUTO_MAP, AUTO_MAP | {"AutoModel": "evil/code--m.M"})):
        with pytest.raises(BadInput, match="auto_map"):
            check_written({"model_type": "pebble", "auto_map": mapped}, "OUT/surgery.json", trusted=trusted)


def test_the_code_of_another_folder_never_answers(base: Path, tmp_path: Path) -> None:
    """Two bases with modules of the same names, in one process."""
    other = changed(base, tmp_path / "other", "modeling_pebble.py", "torch.sin(", "torch.cos(")
    ids = torch.arange(20).view(1, 20)
    with torch.no_grad():
        one, two = (
            load_model(CheckpointFolder.open(folder, **TRUST))(input_ids=ids).logits for folder in (base, other)
        )
    assert not torch.equal(one, two)
    anatomies = [dissect_folder(CheckpointFolder.open(folder, **TRUST)) for folder in (base, other)]
    assert len({str(type(anatomy.derivation.seen.derived.skeleton.model)) for anatomy in anatomies}) == 2
