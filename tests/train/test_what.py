"""What trains: the base's own tensors, some layers, everything, a LoRA; on a plain base and on outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import surgeon
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.errors import BadInput
from surgeon.manifest.manifest import manifest_of
from surgeon.manifest.run_files import ADAPTER_FOLDER, KEPT_FOLDER
from surgeon.manifest.trainable import Fixed, LayersSpec, trainable_set
from surgeon.models.load import load_model
from surgeon.models.teacher import BaseWithin
from surgeon.train.config import LoraSpec
from surgeon.train.lora import attach
from tests import tiny
from tests.decoders import tiny_decoder
from tests.train.test_train import base_of, config, digests
from tests.train.texts import add_tokenizer, corpus

SHORT: dict[str, Any] = {
    "steps": 2,
    "batch": 2,
    "validation_sequences": 1,
    "optimizer": {"lr": 1e-2, "warmup": 0},
}


def trained(folder: Path, out: str, to: str, **changes: Any) -> Any:
    found = surgeon.train(folder / out, config(folder, **(SHORT | changes)), folder / to, device="cpu")
    assert found is not None
    return found


def checks(base: Path, out: Path) -> dict[str, Any]:
    found = surgeon.verify(base, out, logits=False)
    assert found.holds, [check for check in found.checks if not check.holds]
    return {check.name: check for check in found.checks}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied base in bfloat16, of which all was trained and is kept, then a LoRA on that."""
    folder = tmp_path_factory.mktemp("plain")
    base_of(folder, "gemma2", num_hidden_layers=2)
    trained(folder, "base", "run", what="all", keep_base=True)
    trained(folder, "run", "second", lora={"rank": 2, "targets": ["q_proj"]})
    return folder


def test_all_of_a_plain_base_trains_and_is_told_and_comes_back(plain: Path, tmp_path: Path) -> None:
    before, after = digests(plain / "base"), digests(plain / "run")
    assert before.keys() == after.keys()
    assert not any(before[name] == after[name] for name in before)
    manifest = manifest_of(CheckpointFolder.open(plain / "run"))
    assert manifest.operations == []
    assert manifest.changed_of_base == before == manifest.kept
    assert manifest.trained == after
    found = checks(plain / "base", plain / "run")
    assert f"{len(before)} base tensors changed by training" in found["base tensors"].detail
    assert found["kept tensors"].detail == f"{len(before)} of the base's in {KEPT_FOLDER}/"
    # transformers loads what trained, and nothing of what is kept.
    loaded = AutoModelForCausalLM.from_pretrained(plain / "run").state_dict()
    own = load_model(plain / "run").state_dict()
    assert all(torch.equal(loaded[name], own[name]) for name in own)
    for run in ("run", "second"):
        surgeon.revert(plain / run, tmp_path / run)
        assert digests(tmp_path / run) == before
        names = {path.name for path in (plain / "base").iterdir()}
        assert {path.name for path in (tmp_path / run).iterdir()} == names
        for name in names - {"model.safetensors.index.json"}:
            assert (tmp_path / run / name).read_bytes() == (plain / "base" / name).read_bytes(), name


def test_what_is_kept_must_be_the_bases(plain: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(plain / "run", tmp_path / "run")
    file = next((tmp_path / "run" / KEPT_FOLDER).iterdir())
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    found = surgeon.verify(plain / "base", tmp_path / "run", logits=False)
    assert [check.name for check in found.checks if not check.holds] == ["kept tensors"]
    with pytest.raises(BadInput, match="trained or edited since surgery 1"):
        surgeon.revert(tmp_path / "run", tmp_path / "back")
    shutil.rmtree(tmp_path / "run" / KEPT_FOLDER)
    with pytest.raises(BadInput, match=r"`keep_base: true` in a training config keeps it"):
        surgeon.revert(tmp_path / "run", tmp_path / "back")
    assert checks(plain / "base", tmp_path / "run")["kept tensors"].note


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_a_lora_is_merged_and_loads_in_peft(plain: Path) -> None:
    from peft import PeftModel

    before, after = digests(plain / "run"), digests(plain / "second")
    moved = {name for name in before if before[name] != after[name]}
    assert moved == {name for name in before if "q_proj" in name}
    assert checks(plain / "base", plain / "second")["adapter"].detail == f"4 tensors in {ADAPTER_FOLDER}/"
    under = AutoModelForCausalLM.from_pretrained(plain / "run", dtype=torch.float32)
    stored = {name: value.clone() for name, value in under.state_dict().items()}
    merged = PeftModel.from_pretrained(under, plain / "second" / ADAPTER_FOLDER).merge_and_unload().state_dict()
    found = load_model(plain / "second").state_dict()
    for name, value in merged.items():
        assert torch.equal(found[name], value.to(torch.bfloat16)), name
        assert torch.equal(stored[name], value) == (name not in moved)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_a_lora_on_transposed_matrices(tmp_path: Path) -> None:
    """GPT-2's Conv1D stores a matrix inputs by outputs."""
    from peft import PeftModel

    add_tokenizer(tiny_decoder(tmp_path / "base", "gpt2"))
    for name, seed in (("fr", 1), ("en", 2)):
        corpus(tmp_path / f"{name}.jsonl", seed=seed)
    trained(tmp_path, "base", "run", lora={"rank": 2, "targets": ["c_fc"], "dropout": 0.1}, steps=1)
    ids = torch.arange(10, 30)[None]
    with torch.no_grad():
        merged = load_model(tmp_path / "run")(ids).logits
        base = load_model(tmp_path / "base")
        assert not torch.allclose(base(ids).logits, merged, atol=1e-3)
        under = PeftModel.from_pretrained(base, tmp_path / "run" / ADAPTER_FOLDER).eval()
        torch.testing.assert_close(under(ids).logits, merged, atol=1e-5, rtol=1e-5)
    with pytest.raises(BadInput, match=r"is in no linear module .*choose other targets, or name modules"):
        trained(tmp_path, "base", "no", lora={})


def test_under_a_lora_the_base_is_within(tmp_path: Path) -> None:
    base = tiny.checkpoint(tmp_path / "base", "llama", num_hidden_layers=2)
    model, plain = load_model(base), load_model(base)
    names = [f"model.layers.{index}.mlp.up_proj.weight" for index in range(2)]
    tensors = CheckpointFolder.open(base).tensors
    trains = attach(model, LoraSpec(rank=2), names, base_names=tensors, seed=7)
    ids = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = plain(ids).logits
        assert torch.equal(model(ids).logits, expected)
        for name in trains:
            model.get_parameter(name).add_(0.1)
        assert not torch.equal(model(ids).logits, expected)
        assert torch.equal(BaseWithin(model, layers=2, inserted=()).logits(input_ids=ids), expected)
        assert not torch.equal(model(ids).logits, expected)
    # The same seed draws the same, another one does not.
    first = [
        attach(each := load_model(base), LoraSpec(rank=2), names, base_names=tensors, seed=seed)
        and each.get_parameter(trains[0])
        for seed in (7, 7, 8)
    ]
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])


def test_base_and_layers_of_an_output(tmp_path: Path) -> None:
    """Neutral Residues' adapters and two tokens more: what is the base's own trains, and those do not, and back."""
    base_of(tmp_path, "llama", num_hidden_layers=4)
    surgeon.apply("neutral-residues", str(tmp_path / "base"), tmp_path / "out")
    run = trained(tmp_path, "out", "run", what="base", keep_base=True, preserve={"loss": "kl"})
    manifest = manifest_of(CheckpointFolder.open(tmp_path / "out"))
    assert run.changes.keys() == digests(tmp_path / "base").keys()
    assert not run.changes.keys() & manifest.new_tensors.keys()
    assert any("loss.preserve" in entry for entry in run.log)
    checks(tmp_path / "base", tmp_path / "run")
    surgeon.revert(tmp_path / "run", tmp_path / "back")
    assert digests(tmp_path / "back") == digests(tmp_path / "base")
    out = CheckpointFolder.open(tmp_path / "out")
    layer = trainable_set(out, manifest, LayersSpec(layers=[1, 3]))
    assert set(layer.names) == {name for name in out.tensors if ".layers.1." in name or ".layers.3." in name}
    assert layer.of_base == {name for name in layer.names if ".adapter" not in name}
    whole, added = (trainable_set(out, manifest, what) for what in ("all", "added"))
    assert set(whole.names) == set(out.tensors) == {*run.changes, *added.names}
    assert not added.of_base


def test_of_grown_tensors_the_bases_part_trains(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("surgeon: 1\noperations: [{op: widen_ffn, by: 8}]\n")
    base = tiny.checkpoint(tmp_path / "base", "llama", num_hidden_layers=1)
    surgeon.apply(tmp_path / "plan.yaml", str(base), tmp_path / "out")
    out = CheckpointFolder.open(tmp_path / "out")
    manifest = manifest_of(out)
    last, own = (trainable_set(out, manifest, what) for what in ("last", "base"))
    for name, fixed in last.fixed.items():
        size = out.tensors[name].shape[fixed.axis]
        assert fixed.size + own.fixed[name].size == size
        assert fixed.reversed(size) == own.fixed[name]
    assert own.fixed.keys() == last.fixed.keys() == set(last.names)
    assert Fixed(0, ((2, 4), (6, 8))).reversed(8) == Fixed(0, ((0, 2), (4, 6)))
    assert trainable_set(out, manifest, "all").fixed == {}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, r"train\.yaml:1: `what` is not given, and .*base has no surgery .*say `what: all`"),
        ({"what": "last"}, r"train\.yaml:\d+: `what`: .*nothing was added that could train alone"),
        ({"what": "bas"}, "did you mean `base`"),
        ({"what": {"layers": [7]}}, r"train\.yaml:\d+: `what`: there is no layer 7: the model has layers 0 to 1"),
        ({"what": {"layer": [7]}}, "unknown key `layer`; did you mean `layers`"),
        ({"what": "all", "lora": {}}, "`what` and `lora` exclude each other"),
        ({"lora": {"rang": 3}}, "did you mean `rank`"),
        ({"lora": {"targets": "fn"}}, "did you mean `ffn`"),
        ({"lora": {"targets": ["x_proj"]}}, r"no module of .* is called x_proj"),
        ({"lora": {"targets": ["embed_tokens"]}}, "no matrix of a linear module"),
    ],
)
def test_refusals(plain: Path, change: dict[str, Any], told: str) -> None:
    with pytest.raises(BadInput, match=told):
        trained(plain, "base", "no", **change)
    assert not list(plain.glob(".no.*"))
    assert not (plain / "no").exists()


def test_without_peft_it_is_said(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"needs PEFT, which is not installed; `pip install 'surgeon\[peft\]'`"):
        trained(plain, "base", "no", lora={})
