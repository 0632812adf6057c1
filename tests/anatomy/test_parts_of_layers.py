"""Decoders with tensors outside the layers that hold a part for each: Gemma 4's embeddings per layer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import surgeon
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.errors import BadInput
from surgeon.lab.reports.history import layer_history, parameter_budget
from surgeon.manifest.reading import manifest_of
from tests.checkpoints import add_letters, weights
from tests.decoders import tiny_decoder
from tests.end_to_end.test_any_decoder import TRAINING
from tests.training.texts import corpus

WIDTH = 8
# By name, the axis of the parts.
HELD = {"embed_tokens_per_layer.weight": 1, "per_layer_model_projection.weight": 0}
# As in the small published models, upper layers reuse the keys and values of the last two below them.
SHARING = {
    "hidden_size_per_layer_input": WIDTH,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "per_layer_config": {},
}
IDS = torch.randint(5, 100, (1, 12), generator=torch.Generator().manual_seed(0))
COPIES = "{op: insert_layers, where: {after: [2, 3]}, init: {kind: copy}}"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts") / "base"
    return add_letters(tiny_decoder(folder, "gemma4_text", dtype="bfloat16", **SHARING))


@pytest.fixture(scope="module")
def out(base: Path) -> Path:
    return _applied(base, "out", COPIES)


def _applied(onto: Path, name: str, *operations: str) -> Path:
    path = onto.parent / f"{name}.yaml"
    path.write_text("surgeon: 1\noperations:\n" + "".join(f"  - {operation}\n" for operation in operations))
    surgeon.apply(path, str(onto), onto.parent / name)
    return onto.parent / name


def _same(one: Path, other: Path) -> bool:
    mine, theirs = weights(one), weights(other)
    return mine.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in mine.items())


def _check_parts(base: Path, out: Path, order: list[int]) -> None:
    before, after = weights(base), weights(out)
    for name, axis in HELD.items():
        held = before[f"model.{name}"].split(WIDTH, dim=axis)
        assert torch.equal(after[f"model.{name}"], torch.cat([held[layer] for layer in order], dim=axis))


def test_from_preview_to_a_second_surgery_and_back(base: Path, out: Path, tmp_path: Path) -> None:
    _check_parts(base, out, [0, 1, 2, 2, 3, 3])
    verified = surgeon.verify(base, out, window=24, windows=1, dtypes=["auto", "float32"])
    assert verified.holds
    assert verified.identical
    assert any(check.name == "base tensors" and "; 2 tensors hold" in check.detail for check in verified.checks)
    surgeon.revert(out, tmp_path / "back")
    assert _same(tmp_path / "back", base)
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads((base / "config.json").read_text())

    twice = _applied(out, "twice", "{op: control_llm, layers: [2], expansion: stack}")
    _check_parts(base, twice, [0, 1, 2, 2, 2, 3, 3])
    verified = surgeon.verify(out, twice, window=24, windows=1)
    assert verified.holds
    assert verified.identical
    assert surgeon.verify(base, twice, logits=False).holds
    surgeon.make_delta(twice, tmp_path / "delta")
    surgeon.apply_delta(tmp_path / "delta", str(out), tmp_path / "again")
    assert _same(tmp_path / "again", twice)
    for to, state in ((1, out), (0, base)):
        surgeon.revert(twice, tmp_path / f"state-{to}", to=to)
        assert _same(tmp_path / f"state-{to}", state)
    folder = CheckpointFolder.open(twice)
    manifest = manifest_of(folder)
    budget = parameter_budget(folder, manifest, layer_history(folder, manifest))
    held = WIDTH * (256 + 64)
    assert budget.total == sum(value.numel() for value in weights(twice).values())
    assert budget.base == sum(value.numel() for value in weights(base).values())
    assert budget.trainable == budget.new - held


def test_training_leaves_the_parts_as_they_are(base: Path, out: Path, tmp_path: Path) -> None:
    corpus(tmp_path / "words.jsonl", documents=60)
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(TRAINING | {"steps": 2}))
    surgeon.train(out, tmp_path / "train.yaml", tmp_path / "run", device="cpu")
    before, after = weights(out), weights(tmp_path / "run")
    assert all(torch.equal(before[f"model.{name}"], after[f"model.{name}"]) for name in HELD)
    scales = [float(after[f"model.layers.{layer}.layer_scalar"]) for layer in range(6)]
    assert [scale == 1.0 for scale in scales] == [False, False, False, True, False, True]
    assert not all(torch.equal(value, after[name]) for name, value in before.items())
    assert surgeon.verify(base, tmp_path / "run", logits=False).holds
    surgeon.revert(tmp_path / "run", tmp_path / "back")
    assert _same(tmp_path / "back", base)


def test_a_part_that_was_edited(base: Path, out: Path, tmp_path: Path) -> None:
    """Found by verify; of an old layer revert gives nothing back, of a new one it is not asked."""
    out = shutil.copytree(out, tmp_path / "out")
    name = "model.per_layer_model_projection.weight"
    shard = next(file for file in out.glob("*.safetensors") if name in load_file(file))
    held = load_file(shard)
    for layer, is_old in ((3, False), (4, True)):
        edited = {key: value.clone() for key, value in held.items()}
        edited[name][layer * WIDTH, 0] += 1
        save_file(edited, shard, metadata={"format": "pt"})
        verified = surgeon.verify(base, out, logits=False)
        assert [check.name for check in verified.checks if not check.holds] == ["base tensors"]
        if is_old:
            with pytest.raises(BadInput, match=r"per_layer_model_projection.*trained or edited"):
                surgeon.revert(out, tmp_path / "back")
            assert not (tmp_path / "back").exists()
        else:
            surgeon.revert(out, tmp_path / f"back-{layer}")
            assert _same(tmp_path / f"back-{layer}", base)


def test_a_branch_reads_the_part_of_its_layer(base: Path, tmp_path: Path) -> None:
    """A part of its own lets shapes fit, and computes nothing; it goes when the branch goes."""
    out = _applied(base, "branches", "{op: control_llm, layers: [3]}")
    _check_parts(base, out, [0, 1, 2, 3, 3])
    verified = surgeon.verify(base, out, window=24, windows=1, dtypes=["auto", "float32"])
    assert verified.holds and verified.identical
    surgeon.revert(out, tmp_path / "back")
    assert _same(tmp_path / "back", base)

    corpus(tmp_path / "words.jsonl", documents=60)
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(TRAINING | {"steps": 2}))
    surgeon.train(out, tmp_path / "train.yaml", tmp_path / "run", device="cpu")
    _check_parts(base, tmp_path / "run", [0, 1, 2, 3, 3])
    name = "model.layers.3.expanded.per_layer_input_gate.weight"
    assert not torch.equal(weights(tmp_path / "run")[name], weights(out)[name])
    model, grafted = (AutoModelForCausalLM.from_pretrained(each, trust_remote_code=True).eval() for each in (out, out))
    with torch.no_grad():
        for held, axis in HELD.items():
            grafted.get_parameter(f"model.{held}").narrow(axis, 4 * WIDTH, WIDTH).fill_(7.0)
        assert torch.equal(grafted(IDS).logits, model(IDS).logits)
        grafted.get_parameter(f"model.{held}").narrow(axis, 3 * WIDTH, WIDTH).fill_(7.0)
        assert not torch.equal(grafted(IDS).logits, model(IDS).logits)

    adapters = "{op: gated_adapters, size: 4, layers: [0]}"
    of = manifest_of(CheckpointFolder.open(_applied(base, "in one", "{op: control_llm, layers: [3]}", adapters)))
    assert {of.new_tensors[f"model.{held}"].operation for held in HELD} == {0}
    beside = manifest_of(CheckpointFolder.open(_applied(out, "beside", adapters))).new_tensors
    assert beside and not {f"model.{held}" for held in HELD} & beside.keys()
    both = _applied(out, "both", "{op: insert_layers, where: {after: [2]}, init: {kind: copy}}")
    _check_parts(base, both, [0, 1, 2, 2, 3, 3])
    assert surgeon.verify(out, both, window=24, windows=1).identical
    _check_parts(base, _applied(tmp_path / "run", "merged", "{op: merge_branches}"), [0, 1, 2, 3])


def test_a_branch_where_another_kind_stands_is_refused(base: Path) -> None:
    """The topmost layer of a Gemma 4, whatever config.json lists, has full attention: so has the last branch."""
    with pytest.raises(BadInput, match=r"the highest of `layers` must be one of 3 there, or use `expansion: stack`"):
        _applied(base, "sliding", "{op: control_llm, layers: [2]}")


def test_as_many_layers_as_before_have_the_parts_of_those_that_they_are_like(base: Path) -> None:
    other = "{op: drop_layers, layers: [2]}"
    _check_parts(base, _applied(base, "moved", COPIES.replace("[2, 3]", "[3]"), other), [0, 1, 3, 3])


def test_a_copy_of_what_lends_its_keys_is_refused(base: Path) -> None:
    """The layers above would read the new layer's keys and values, which are not the old one's."""
    with pytest.raises(BadInput, match="cannot be described: its layer 2, which is to be as layer 1 of the base"):
        _applied(base, "lent", "{op: insert_layers, where: {after: [1]}, init: {kind: copy}}")
