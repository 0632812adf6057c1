"""Slots and control states that cannot be: one line each, from headers alone, and nothing written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import surgeon
from surgeon.runtime.spread import for_each_layer
from tests import tiny
from tests.checkpoints import train
from tests.commands import refused

Write = Callable[..., Path]
EXPERTS: dict[str, Any] = {"op": "pmoe_experts"}
STATES: dict[str, Any] = {"op": "mixture_of_control", "rank": 4}


@pytest.mark.parametrize(
    ("operation", "words"),
    [
        (EXPERTS | {"threshold": 6}, ["`threshold` 6", "6 layers", "at most 5"]),
        (EXPERTS | {"threshold": -1}, ["threshold", "at least 0"]),
        (EXPERTS | {"slots": 0}, ["slots", "at least 1"]),
        (EXPERTS | {"targets": ["wq"]}, ["'wq'", "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"]),
        (EXPERTS | {"targets": ["input_layernorm"]}, ["'input_layernorm'", "no linear module"]),
        (EXPERTS | {"targets": ["q_proj", "q_proj"]}, ["twice"]),
        (EXPERTS | {"targets": []}, ["targets"]),
        (EXPERTS | {"trains_also": ["router"]}, ["trains_also", "has none yet"]),
        (EXPERTS | {"router_loss": "task"}, ["router_loss"]),
        (STATES | {"top_k": 13}, ["`top_k` 13", "12 control states"]),
        (STATES | {"top_k": 7, "gate": {"shared": "by_kind"}}, ["`top_k` 7", "6 control states"]),
        (STATES | {"sites": ["mlp"]}, ["sites", "attention"]),
        (STATES | {"sites": ["ffn", "ffn"]}, ["twice"]),
        (STATES | {"alpha": 1.5}, ["alpha"]),
        (STATES | {"routing": {"inference": "batch_mean"}}, ["inference", "sequence_mean"]),
    ],
)
def test_operations_that_do_not_fit(
    operation: dict[str, Any], words: list[str], base: Path, plan: Write, tmp_path: Path
) -> None:
    chosen = plan(operation)
    for command in (("preview", chosen, base), ("apply", chosen, base, tmp_path / "out")):
        message = refused(*command)
        for word in words:
            assert word in message, message
    assert not (tmp_path / "out").exists()


def test_what_cannot_stand_together(base: Path, plan: Write, tmp_path: Path) -> None:
    assert "control states already" in refused("preview", plan(STATES, STATES), base)
    control = {"op": "control_llm", "layers": [1]}
    assert "attach control blocks first" in refused("preview", plan(STATES, control), base)
    surgeon.preview(plan(control, STATES), str(base))
    again = EXPERTS | {"threshold": 2}
    assert "router stands above 4 layers" in refused("preview", plan(EXPERTS, again), base)
    merge = {"op": "merge_branches"}
    assert "slot 0 of rank 4" in refused("preview", plan(EXPERTS, control | {"layers": [5]}, merge), base)


def test_a_twin_of_trained_experts_is_born_equal(base: Path, plan: Write, tmp_path: Path) -> None:
    """The twin must hold what the layer computes by now, slots included, routed alike."""
    one, two = tmp_path / "one", tmp_path / "two"
    surgeon.apply(plan(EXPERTS | {"slots": 2, "threshold": 3}), str(base), one)
    train(one, seed=3)
    surgeon.apply(plan({"op": "control_llm", "layers": [1, 4]}), str(one), two)
    verification = surgeon.verify(one, two, window=24, windows=1)
    assert verification.holds
    assert verification.identical


def test_slots_are_added_over_inserted_layers(base: Path, plan: Write, tmp_path: Path) -> None:
    """The router moves with its layer; a layer inserted above it gets the next slot like every other."""
    one, two = tmp_path / "one", tmp_path / "two"
    surgeon.apply(plan(EXPERTS), str(base), one)
    train(one, seed=3)
    insert = {"op": "insert_layers", "where": {"after": [1, 4]}, "init": {"kind": "copy"}}
    surgeon.apply(plan(insert, EXPERTS | {"rank": 2}), str(one), two)
    verification = surgeon.verify(one, two, window=24, windows=1)
    assert verification.holds
    assert verification.identical
    surgery = for_each_layer(json.loads((two / "config.json").read_text())["surgery"])
    assert {entry["layer"] for entry in surgery["expert_router"]} == {5}
    by_layer: dict[int, list[int]] = {}
    for entry in surgery["experts"]:
        by_layer.setdefault(entry["layer"], []).extend(slot["slot"] for slot in entry["slots"])
    assert by_layer == {0: [0], 1: [0], 3: [0], 4: [0], 5: [0, 1], 6: [1], 7: [0, 1]}


def test_the_papers_next_task_says_that_it_moves_mass(base: Path, plan: Write, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    surgeon.apply(plan(EXPERTS), str(base), one)
    train(one, seed=3)
    chosen = plan(EXPERTS | {"new_slot_mass": "paper", "trains_also": ["router", "shared"]})
    applied = surgeon.apply(chosen, str(one), two)
    assert applied.manifest.promise == "none"
    verification = surgeon.verify(one, two, window=24, windows=1)
    assert verification.holds
    assert verification.identical is False
    new = set(applied.manifest.new_tensors)
    assert "model.layers.4.expert_router.slots.0.weight" in new
    assert "model.layers.0.self_attn.q_proj.slots.0.lora_A" in new
    assert "model.layers.4.self_attn.q_proj.slots.0.lora_A" not in new
    surgeon.revert(two, tmp_path / "untrained")
    train(two, seed=4)
    # The router has trained on: there is no way back.
    assert "trained or edited" in refused("revert", two, tmp_path / "back")


@pytest.mark.parametrize("family", ["phi3", "gemma2"])
def test_default_targets_are_query_and_value_whatever_they_are_called(family: str, plan: Write, tmp_path: Path) -> None:
    base = tiny.checkpoint(tmp_path / "base", family)
    surgeon.apply(plan(EXPERTS), str(base), tmp_path / "out")
    surgery = json.loads((tmp_path / "out" / "config.json").read_text())["surgery"]
    expected = ["self_attn.qkv_proj"] if family == "phi3" else ["self_attn.q_proj", "self_attn.v_proj"]
    assert surgery["experts"][0]["slots"][0]["targets"] == expected


def edited(folder: Path, change: Callable[[dict[str, Any]], object], name: str = "config.json") -> None:
    data = json.loads((folder / name).read_text())
    change(data)
    (folder / name).write_text(json.dumps(data))


def drop_column(config: dict[str, Any]) -> None:
    config["surgery"]["expert_router"][0]["slots"].pop()


def wrong_rank(config: dict[str, Any]) -> None:
    config["surgery"]["experts"][-1]["slots"][0]["rank"] = 7


def fewer_states(config: dict[str, Any]) -> None:
    config["surgery"]["control_states"][0]["layers"] = "0-2"


def unknown_key(config: dict[str, Any]) -> None:
    config["surgery"]["mixture"]["tau"] = 1


def not_a_list(config: dict[str, Any]) -> None:
    config["surgery"]["experts"] = 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop_column, ["config.json", "slot 1", "expert_router"]),
        (wrong_rank, ["slots.0.lora_A"]),
        (fewer_states, ["control_bank"]),
        # Which losses such a model has nobody can read; its code is ours all the same.
        (unknown_key, ["config.json", "tau"]),
        (not_a_list, ["config.json"]),
    ],
)
def test_a_grafted_base_whose_config_disagrees(
    change: Callable[[dict[str, Any]], object], words: list[str], base: Path, plan: Write, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    surgeon.apply(plan(EXPERTS | {"slots": 2}, STATES), str(base), out)
    edited(out, change)
    message = refused("apply", "neutral-residues", out, tmp_path / "next")
    for word in words:
        assert word in message, message
    assert not (tmp_path / "next").exists()


def test_a_manifest_of_the_future_is_refused_before_any_work(base: Path, plan: Write, tmp_path: Path) -> None:
    out = tmp_path / "out"
    surgeon.apply(plan(EXPERTS), str(base), out)
    edited(out, lambda data: data.update(surgeon_manifest=4), "surgery.json")
    for command in (("preview", "pmoe/next-task", out), ("apply", "pmoe/next-task", out, tmp_path / "next")):
        assert "manifest format 4, this surgeon reads 3" in refused(*command)


def test_slots_hold_still_while_others_train(base: Path, plan: Write, tmp_path: Path) -> None:
    """Earlier slots, shared LoRA and old columns are frozen in the config that any trainer reads."""
    from surgeon.models.load import load_model

    one, two = tmp_path / "one", tmp_path / "two"
    surgeon.apply(plan(EXPERTS), str(base), one)
    applied = surgeon.apply(plan(EXPERTS, STATES), str(one), two)
    model = load_model(two)
    assert set(model.freeze_base()) == set(applied.manifest.new_tensors)
    assert not any(".slots.0." in name for name in model.freeze_base())
    assert all(isinstance(p, torch.nn.Parameter) for p in model.parameters())
