"""Drafts, blueprints and layouts as data: numbers, names and shards, without any weight."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surgeon.anatomy.dissect import dissect
from surgeon.blueprint.blueprint import Blueprint
from surgeon.blueprint.draft import Draft
from surgeon.blueprint.recipes import Constant, Copy
from surgeon.blueprint.shards import lay_out
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.errors import BadInput
from surgeon.plan.plan import draw, parse_plan
from tests import tiny


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> CheckpointFolder:
    return CheckpointFolder.open(tiny.checkpoint(tmp_path_factory.mktemp("base"), "gemma2"))


def blueprint(base: CheckpointFolder, *operations: dict) -> Blueprint:
    text = json.dumps({"surgeon": 1, "operations": list(operations)})
    return draw(parse_plan(text, source="plan"), dissect(base.config, base.tensors), base.config)


def insert(*after: int, kind: str = "copy") -> dict:
    return {"op": "insert_layers", "where": {"after": list(after)}, "init": {"kind": kind}}


def test_sources_are_numbered_as_in_the_output(base: CheckpointFolder) -> None:
    """Also after a later operation has pushed both a new layer and its source upwards."""
    drawn = blueprint(base, insert(4), insert(0, 2))
    assert [layer.base for layer in drawn.layers] == [0, None, 1, 2, None, 3, 4, None, 5]
    assert [layer.sources for layer in drawn.layers if layer.base is None] == [(0,), (3,), (6,)]
    assert [layer.operation for layer in drawn.layers if layer.base is None] == [1, 1, 0]
    assert drawn.layer_of_base == (0, 2, 3, 5, 6, 8)


def test_a_copy_of_a_new_layer_is_made_as_that_layer_was(base: CheckpointFolder) -> None:
    drawn = blueprint(base, insert(2, kind="average"), insert(3))
    recipes = {output.name: output.recipe for output in drawn.outputs}
    name = "mlp.gate_proj.weight"
    assert recipes[f"model.layers.4.{name}"] == recipes[f"model.layers.3.{name}"]


def test_a_new_layer_of_another_shape_is_refused(base: CheckpointFolder) -> None:
    draft = Draft(dissect(base.config, base.tensors), base.config, seed=0)
    made = draft.copy_of(1, operation=0)
    name = "mlp.gate_proj.weight"
    rows, columns = made.tensors[name].shape
    made.tensors[name] = Constant(0.0, "BF16", (rows + 8, columns))
    draft.insert({1: [made]})
    told = rf"layers\.2\.{name}: the plan makes this tensor \(.*\) of shape \[{rows + 8}, {columns}\], a layer of"
    with pytest.raises(BadInput, match=told):
        draft.finish()


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True), min_size=1, max_size=3))
def test_whatever_is_inserted_the_base_stays(base: CheckpointFolder, gaps: list[list[int]]) -> None:
    """Every base tensor is there once, as a copy; names are unique; configs count the layers."""
    drawn = blueprint(base, *(insert(*after) for after in gaps))
    kept = [output.recipe.source for output in drawn.outputs if not output.new and isinstance(output.recipe, Copy)]
    assert sorted(kept) == sorted(base.tensors)
    names = [output.name for output in drawn.outputs]
    assert len(names) == len(set(names))
    grown = 6 + sum(len(after) for after in gaps)
    assert drawn.config["num_hidden_layers"] == len(drawn.config["layer_types"]) == len(drawn.layers) == grown
    types = base.config["layer_types"]
    assert [
        t for t, layer in zip(drawn.config["layer_types"], drawn.layers, strict=True) if layer.base is not None
    ] == types


@settings(max_examples=30)
@given(st.integers(1, 200_000))
def test_new_shards_are_cut_between_layers(base: CheckpointFolder, limit: int) -> None:
    drawn = blueprint(base, insert(0, 1, 2, 3, 4, 5))
    shards = lay_out(drawn.outputs, base.tensors, max_new_shard_bytes=limit)
    assert [shard.mirrored for shard in shards if shard.mirrored] == list(base.shards)
    new = [shard for shard in shards if shard.mirrored is None]
    layers = [{output.name.split(".")[2] for output in shard.outputs} for shard in new]
    assert sum(len(held) for held in layers) == 6, "a layer lies in two shards"
    for shard, held in zip(new, layers, strict=True):
        assert len(held) == 1 or sum(output.nbytes for output in shard.outputs) <= limit
    assert [shard.file for shard in shards][-1].endswith(f"-of-{len(shards):05d}.safetensors")
    assert sorted(o.name for shard in shards for o in shard.outputs) == sorted(o.name for o in drawn.outputs)


def test_new_shards_are_filled_before_another_begins(base: CheckpointFolder) -> None:
    drawn = blueprint(base, insert(0, 1, 2, 3, 4, 5))
    layer = sum(output.nbytes for output in drawn.outputs if output.new) // 6
    for fits in (1, 2, 3, 6):
        for limit in (fits * layer, (fits + 1) * layer - 1):
            shards = lay_out(drawn.outputs, base.tensors, max_new_shard_bytes=limit)
            assert [shard.nbytes for shard in shards if shard.mirrored is None] == [fits * layer] * (6 // fits)


def test_growth_without_end_is_refused(base: CheckpointFolder) -> None:
    doubling = {"op": "insert_layers", "where": {"every": 1}, "init": {"kind": "copy"}}
    with pytest.raises(BadInput, match="more than 10000 is refused"):
        blueprint(base, *[doubling] * 12)


def test_lists_of_layer_numbers_are_renumbered(tmp_path: Path) -> None:
    folder = CheckpointFolder.open(tiny.checkpoint(tmp_path, "llama"))
    changed = {**folder.config, "mlp_only_layers": [1, 4]}
    plan = parse_plan(json.dumps({"surgeon": 1, "operations": [insert(1)]}), source="plan")
    drawn = draw(plan, dissect(changed, folder.tensors), changed)
    assert [layer.like for layer in drawn.layers] == [0, 1, 1, 2, 3, 4, 5]
    assert drawn.config["mlp_only_layers"] == [1, 2, 5]
