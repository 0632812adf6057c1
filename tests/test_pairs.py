"""The record of pairs is what every pair of operations gives, and the benchmark that writes it can fail."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import surgeon
from benchmarks import pairs
from surgeon.apply.preflight import check_skeleton
from surgeon.operations import OPERATIONS


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, pairs.Bases]]:
    with pairs.beside_adapter(tmp_path_factory.mktemp("adapted")):
        yield {name: pairs.Bases(name, tmp_path_factory.mktemp(name)) for name in pairs.FAMILIES}


# A cell of twenty: of every operation some as the first and some as the second. The benchmark does, and proves, all.
SOME = [both for number, both in enumerate(pairs.EVERY) if sum(divmod(number, len(OPERATIONS))) % 20 == 0]


@pytest.fixture(scope="module")
def tables(families: dict[str, pairs.Bases]) -> tuple[pairs.Cells, pairs.Cells]:
    return pairs.tables(families, SOME)


def test_record_and_page_are_what_headers_say_of_pairs(tables: tuple[pairs.Cells, pairs.Cells]) -> None:
    record = pairs.record_text(pairs.record_of(*tables))
    assert pairs.RECORD.read_text(encoding="utf-8") == record, "run `python -m benchmarks.pairs`"
    page = pairs.PAGE.read_text(encoding="utf-8")
    assert page == pairs.with_section(page, pairs.section(OPERATIONS)), "run `python -m benchmarks.pairs --page`"
    for found in (cell for cells in tables for each in cells.values() for cell in each.values()):
        assert bool(found.promise) != bool(found.refusal)
        assert "\n" not in found.refusal and not found.refusal.startswith("plan.yaml")


def test_some_pairs_have_every_operation_in_both_places() -> None:
    for place in (0, 1):
        assert {both[place] for both in SOME} == {*OPERATIONS}


def test_models_of_pairs_want_the_tensors_that_are_planned(tables: tuple[pairs.Cells, pairs.Cells]) -> None:
    """Built without weights: names and shapes of what one plan makes, of both operations."""
    for (first, second), found in tables[0].items():
        for name, drawn in ((name, each.drawn) for name, each in found.items() if each.drawn is not None):
            if not drawn.native:
                check_skeleton(drawn.config, drawn.outputs)
                continue
            if drawn.config["model_type"] != name:
                # Experts are one tensor in memory and many on disk: the table's own run loads them.
                continue
            config = transformers.AutoConfig.for_model(**drawn.config)
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config)
            wanted = {n: tuple(v.shape) for n, v in model.state_dict(keep_vars=True).items()}
            wanted = {n: shape for n, shape in wanted.items() if n not in model.all_tied_weights_keys}
            assert {o.name: tuple(o.recipe.shape) for o in drawn.outputs} == wanted, (name, first, second)


def test_the_page_names_every_pair_once_for_each_family_and_plan() -> None:
    """Lists leave nothing out: of each operation every other one, or all of them at once."""
    text = pairs.PAGE.read_text(encoding="utf-8")
    for first in OPERATIONS:
        section = text.partition(f"\n## {first}\n")[2].partition("\n## ")[0]
        for part in section.split("On its output, by a new plan:"):
            lines = [line for line in part.splitlines() if line.startswith("- ")]
            for family in pairs.FAMILIES:
                of_it = [x for x in lines if f"({family})" in x.partition(":")[0] or "(" not in x.partition(":")[0]]
                named = [op for line in of_it for op in re.findall(r"`(\w+)`", line.partition(":")[2])]
                everything = any("everything" in line for line in of_it)
                assert sorted(named) == ([] if everything else sorted(OPERATIONS)), (first, family)


# Of each kind of cell one that is carried out here; `python -m benchmarks.pairs` does all.
ONE = [("llama", "merge_branches", "mixture_of_control"), ("gemma2", "insert_layers", "control_llm")]
TWO = [("llama", "upcycle_experts", "drop_layers"), ("gemma2", "widen_ffn", "gated_adapters")]


@pytest.mark.parametrize(
    ("family", "first", "second", "prove"),
    [(*cell, pairs.prove_one_plan) for cell in ONE] + [(*cell, pairs.prove_two_plans) for cell in TWO],
)
def test_a_pair_keeps_its_promise(
    families: dict[str, pairs.Bases], family: str, first: str, second: str, prove: Callable[..., Any], tmp_path: Path
) -> None:
    assert prove(families[family], first, second, tmp_path) == []


def test_what_breaks_a_promise_is_found(families: dict[str, pairs.Bases], tmp_path: Path) -> None:
    base = families["llama"].of("", "")
    applied = surgeon.apply(pairs.plan_of(pairs.pair("insert_layers", "control_llm")[0]), base, tmp_path / "out")
    out, drawn = applied.path, applied.preview.blueprint
    assert pairs.differing(out, out) == [] and pairs.alike(base, out, drawn, exact=True) == []
    assert any("input_layernorm" in line for line in pairs.differing(out, base))
    shard = next(path for path in out.glob("*.safetensors") if "model.layers.2.mlp.down_proj.weight" in load_file(path))
    held = load_file(shard)
    held["model.layers.2.mlp.down_proj.weight"] += 1
    save_file(held, shard, metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(json.loads((out / "config.json").read_text()) | {"rope_theta": 1.0}))
    assert len(pairs.alike(base, out, drawn, exact=False)) == 4
    assert "logits differ" in pairs.kept(base, out, tmp_path / "back") or pairs.kept(base, out, tmp_path / "again")
