"""A base that brings its own code grows in depth, once the user trusts it; its code goes along, byte for byte."""

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
from surgeon.checkpoint.trust import check_written
from surgeon.errors import BadInput
from tests import tiny
from tests.checkpoints import add_letters, weights
from tests.elsewhere import WITHOUT_SURGEON
from tests.end_to_end.test_any_decoder import TRAINING
from tests.own_code import AUTO_MAP, pebble
from tests.train.texts import corpus
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
    assert len(out.backbone.blocks) == 2 * len(base.backbone.blocks) > 0
    assert torch.equal(base(input_ids=ids).logits, out(input_ids=ids).logits)
    assert base.generate(ids, max_new_tokens=4).tolist() == out.generate(ids, max_new_tokens=4).tolist()
print("the same")
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two kinds of layers, by a list of the config."""
    return add_letters(pebble(tmp_path_factory.mktemp("own") / "base", vocab_size=512, layer_windows=[0, 4, 0]))


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    (tmp_path / "plan.yaml").write_text(INSERT)
    return tmp_path / "plan.yaml"


def test_from_preview_to_training_and_back(base: Path, plan: Path, tmp_path: Path) -> None:
    shown = surgeon.preview(plan, base, **TRUST)
    assert any("found on a twin" in note and "2 kinds" in note for note in shown.notes)
    assert set(shown.blueprint.config) == set(json.loads((base / "config.json").read_text()))
    assert shown.blueprint.config["layer_windows"] == [0, 0, 4, 4, 0, 0]
    surgeon.apply(plan, base, tmp_path / "out", **TRUST)
    manifest = json.loads((tmp_path / "out" / "surgery.json").read_text())
    for name in CODE:
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()
        assert manifest["files"][name] == manifest["base"]["files"][name]
    assert "trust_remote_code=True" in (tmp_path / "out" / "README.md").read_text()
    text = corpus(tmp_path / "words.jsonl", documents=30)
    options: dict[str, Any] = {"text": text, "window": 24, "windows": 1, **TRUST}
    verified = surgeon.verify(base, tmp_path / "out", dtypes=["auto", "float32"], **options)
    assert verified.holds and verified.identical
    told = subprocess.run(
        [*warm(), "-c", ELSEWHERE], input=f"{base} {tmp_path / 'out'}\n", capture_output=True, text=True, check=False
    )
    assert told.stdout == "the same\n", told.stderr

    # Its code makes its mask itself, of no positions.
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(TRAINING | {"packing": "joined"}))
    surgeon.train(tmp_path / "out", tmp_path / "train.yaml", tmp_path / "run", device="cpu", **TRUST)
    trained = surgeon.verify(base, tmp_path / "run", **options)
    assert trained.holds and trained.trained
    surgeon.revert(tmp_path / "run", tmp_path / "back", **TRUST)
    before, after = weights(base), weights(tmp_path / "back")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    for name in (*CODE, "config.json"):
        assert json.dumps((base / name).read_text().split()) == json.dumps(
            (tmp_path / "back" / name).read_text().split()
        )


def test_it_grows_twice_and_stacks(base: Path, plan: Path, tmp_path: Path) -> None:
    surgeon.apply(plan, base, tmp_path / "one", **TRUST)
    plan.write_text("surgeon: 1\noperations:\n  - {op: stack_layers, bottom: 4, top: 4}\n")
    surgeon.apply(plan, tmp_path / "one", tmp_path / "two", **TRUST)
    assert surgeon.verify(base, tmp_path / "two", logits=False, **TRUST).holds
    assert surgeon.inspect(tmp_path / "two", **TRUST).anatomy.sizes.layers == 8
    surgeon.revert(tmp_path / "two", tmp_path / "back", to=0, **TRUST)
    before, after = weights(base), weights(tmp_path / "back")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_delta_brings_the_code(base: Path, plan: Path, tmp_path: Path) -> None:
    surgeon.apply(plan, base, tmp_path / "out", **TRUST)
    surgeon.make_delta(tmp_path / "out", tmp_path / "delta", **TRUST)
    with pytest.raises(BadInput, match="code of its own"):
        surgeon.apply_delta(tmp_path / "delta", base, tmp_path / "again")
    surgeon.apply_delta(tmp_path / "delta", base, tmp_path / "again", **TRUST)
    for file in (tmp_path / "out").iterdir():
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
    "operation",
    [
        "{op: control_llm, layers: all}",
        "{op: gated_adapters, size: 8}",
        "{op: pmoe_experts, threshold: 1, targets: [to_three]}",
        "{op: mixture_of_control, rank: 4}",
    ],
)
def test_grafts_are_refused_with_the_reason(base: Path, plan: Path, operation: str) -> None:
    plan.write_text(f"surgeon: 1\noperations:\n  - {operation}\n")
    with pytest.raises(BadInput, match="the base's own code"):
        surgeon.preview(plan, base, **TRUST)


def changed(base: Path, to: Path, name: str, old: str, new: str) -> Path:
    shutil.copytree(base, to)
    text = (to / name).read_text()
    assert old in text
    (to / name).write_text(text.replace(old, new))
    return to


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        ("modeling_pebble.py", "hidden_states + self.mix(", "0.5 * hidden_states + self.mix(", "cannot be added"),
        # What a layer does depends on how many there are: no setting shows it.
        ("modeling_pebble.py", "stream = layer(", "stream = (1 + len(self.backbone.blocks) / 8) * layer(", "logits"),
        ("modeling_pebble.py", "import torch\n", "import torch_of_nobody\n", "torch_of_nobody"),
        ("modeling_pebble.py", "self.post_init()", "raise KeyError('x')", "its own code cannot build"),
        ("modeling_pebble.py", "class PebbleForCausalLM", "class Other", "PebbleForCausalLM"),
        ("config.json", "modeling_pebble.Pebble", "user/name--modeling_pebble.Pebble", "lies beside the weights"),
        ("config.json", "modeling_pebble.Pebble", "modeling_x.Pebble", "modeling_x.py is not beside"),
        ("config.json", "AutoModelForCausalLM", "AutoModelForMaskedLM", "names no AutoModelForCausalLM"),
    ],
)
def test_code_that_proves_nothing_is_refused(
    base: Path, plan: Path, tmp_path: Path, name: str, old: str, new: str, words: str
) -> None:
    folder = changed(base, tmp_path / "other", name, old, new)
    with pytest.raises(BadInput, match=words) as refused:
        surgeon.preview(plan, folder, **TRUST)
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


def test_changed_code_is_seen(base: Path, plan: Path, tmp_path: Path) -> None:
    surgeon.apply(plan, base, tmp_path / "out", **TRUST)
    with (tmp_path / "out" / CODE[1]).open("a") as file:
        file.write("# more\n")
    found = surgeon.verify(base, tmp_path / "out", logits=False, **TRUST)
    assert {check.name for check in found.checks if not check.holds} == {"files"}
    (tmp_path / "out" / CODE[1]).unlink()
    found = surgeon.verify(base, tmp_path / "out", logits=False, **TRUST)
    assert {check.name for check in found.checks if not check.holds} == {"files"}


def test_a_config_of_a_manifest_names_no_other_code() -> None:
    check_written({"model_type": "pebble", "auto_map": AUTO_MAP}, "OUT/surgery.json", trusted=AUTO_MAP)
    for trusted, mapped in ((None, AUTO_MAP), (AUTO_MAP, AUTO_MAP | {"AutoModel": "evil/code--m.M"})):
        with pytest.raises(BadInput, match="auto_map"):
            check_written({"model_type": "pebble", "auto_map": mapped}, "OUT/surgery.json", trusted=trusted)


def test_the_code_of_another_folder_never_answers(base: Path, plan: Path, tmp_path: Path) -> None:
    """Two bases with modules of the same names, in one process."""
    other = changed(base, tmp_path / "other", "modeling_pebble.py", "torch.sin(", "torch.cos(")
    surgeon.apply(plan, base, tmp_path / "one", **TRUST)
    surgeon.apply(plan, other, tmp_path / "two", **TRUST)
    for of, out in ((base, "one"), (other, "two")):
        assert surgeon.verify(of, tmp_path / out, windows=1, window=16, **TRUST).identical
    assert not surgeon.verify(base, tmp_path / "two", logits=False, **TRUST).holds
