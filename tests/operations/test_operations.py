"""The table of operations is complete: what the house asks of one, every one of them answers, and truly."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import surgeon
from surgeon.blueprint.grafts import grafts_of
from surgeon.checkpoint.card_metadata import NOTHING_KNOWN
from surgeon.grafts.registry import kinds
from surgeon.manifest.card import card
from surgeon.operations import OPERATIONS, legends, origin_of, papers_of
from surgeon.operations.operation import Operation
from surgeon.plan.plan import parse_plan
from tests import tiny
from tests.house import PACKAGE
from tests.manifest.edits import edited
from tests.shipped_plans import SHIPPED, plan_of

PLANS = {name: plan_of(name).plan for name in SHIPPED}


def shipped_with(op: str) -> list[str]:
    return [name for name, plan in PLANS.items() if any(operation.op == op for operation in plan.operations)]


@pytest.mark.parametrize("op", OPERATIONS)
def test_an_operation_says_what_the_house_asks_of_it(op: str) -> None:
    operation = OPERATIONS[op]
    _, room, file = operation.__module__.split(".")
    assert room in ("operations", "edits") and file == op, "one file an operation, called as plans call it"
    assert issubclass(operation, Operation)
    assert operation.papers
    for paper in operation.papers:
        assert paper.key and paper.authors and paper.title and paper.year > 2000
        assert paper.arxiv or paper.venue
        assert paper.bibtex.startswith("@") and paper.bibtex.count("{") == paper.bibtex.count("}")
    training = operation.training
    assert training.source and 0 < training.lr <= 1e-2 and training.min_lr <= training.lr
    assert shipped_with(op), f"no plan in plans/ uses {op}"


def test_the_papers_of_all_operations_have_keys_of_their_own() -> None:
    papers = {paper for operation in OPERATIONS.values() for paper in operation.papers}
    assert len({paper.key for paper in papers}) == len({paper.title for paper in papers}) == len(papers)


@pytest.mark.parametrize("op", OPERATIONS)
def test_an_operation_attaches_the_grafts_that_it_says(op: str, tmp_path: Path) -> None:
    """Of shipped plans that hold this operation alone: what the output has, where the base has no grafts.

    Of one that stands behind others always: what the output has that is not theirs.
    """
    alone = [name for name in shipped_with(op) if {operation.op for operation in PLANS[name].operations} == {op}]
    plans = alone or shipped_with(op)
    assert plans
    found: set[str] = set()
    letters: set[str] = set()
    for number, name in enumerate(plans):
        base = tiny.base_for(name, tmp_path / str(number))
        before = json.loads((base / "config.json").read_text()).get("surgery", {})
        config = surgeon.preview(name, str(base)).blueprint.config
        others = [OPERATIONS[operation.op] for operation in PLANS[name].operations if operation.op != op]
        if not _kinds(before):
            found |= _kinds(config.get("surgery", {})) - {kind for other in others for kind in other.grafts}
            seen = {graft.sign[:1] for here in grafts_of(config).values() for graft in here}
            letters |= seen - {letter for other in others for letter in other.legend}
    assert found == set(OPERATIONS[op].grafts)
    # A kind without a sign of its own has `+`, and the report calls it by its text.
    assert letters - {"+"} == set(OPERATIONS[op].legend), "the report explains every sign"


def numbers_in(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where whole numbers stand in JSON data."""
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from numbers_in(value, (*path, key))
    elif isinstance(data, int) and not isinstance(data, bool):
        yield path


@pytest.mark.parametrize("op", [op for op in OPERATIONS if OPERATIONS[op].facts is not None])
def test_facts_that_do_not_fit_are_no_crash(op: str, tmp_path: Path) -> None:
    """Anybody may have written them: `edit` refuses in a line what it cannot use, and raises nothing else."""
    name = shipped_with(op)[0]
    base, out = tiny.base_for(name, tmp_path), tmp_path / "out"
    surgeon.apply(name, str(base), out)
    kept = json.loads((out / "surgery.json").read_text()).get("facts", {})
    for path in list(numbers_in(kept))[:3]:
        for wrong in (10**6, -1):
            changed = shutil.copytree(out, tmp_path / "changed")
            edited(changed, partial(put_in, path, wrong), seal=True)
            with contextlib.suppress(surgeon.SurgeonError):
                surgeon.verify(str(base), changed, logits=False)
            shutil.rmtree(changed)


def put_in(path: tuple[Any, ...], value: int, manifest: dict[str, Any]) -> None:
    """Set what stands at a path of the facts of a manifest."""
    data = manifest["facts"]
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = value


def test_the_letters_of_grafts_differ_and_have_a_colour_of_the_page() -> None:
    style = (PACKAGE / "common" / "page" / "picture.css").read_text(encoding="utf-8")
    assert len(legends()) == sum(len(operation.legend) for operation in OPERATIONS.values())
    for letter, legend in legends().items():
        assert len(letter) == 1 and legend.words and f"--c{legend.colour}:" in style


def _kinds(surgery: Mapping[str, Any]) -> set[str]:
    return {kind for kind in kinds() if surgery.get(kind)}


@pytest.mark.parametrize("name", [name for name in PLANS if name.count("/") < 1])
def test_what_made_a_layer_knows_what_it_is(name: str, tmp_path: Path) -> None:
    """The first word of a new layer's `init` is one that its operation has in `origins`."""
    drawn = surgeon.preview(name, str(tiny.base_for(name, tmp_path))).blueprint
    for layer in drawn.layers:
        if layer.base is None:
            assert layer.operation is not None
            operation = OPERATIONS[drawn.operations[layer.operation].op]
            assert layer.init.partition(",")[0] in operation.origins


def test_facts_about_one_operation_of_a_plan_are_its_own() -> None:
    text = "surgeon: 1\noperations:\n"
    text += "  - {op: pmoe_experts, from_peft: me/adapter}\n"
    text += "  - {op: pmoe_experts, router_loss: {kind: task_id}}\n"
    text += "  - {op: insert_layers, where: all, init: {kind: shuffle, reg: 0.5}}\n"
    text += "  - {op: insert_layers, where: all, init: {kind: copy}}\n"
    imported, routed, fused, copied = parse_plan(text).plan.operations
    assert [operation.has_facts for operation in (imported, routed, copied)] == [True, False, False]
    assert [operation.needs_task_ids for operation in (imported, routed, fused)] == [False, True, False]
    assert fused.transport_settings is not None and fused.transport_settings["reg"] == 0.5
    assert copied.transport_settings is None


def test_papers_are_those_of_the_inits_that_each_operation_used() -> None:
    def keys(*done: tuple[str, list[str]]) -> list[str]:
        return [paper.key for paper in papers_of(done)]

    assert keys(("insert_layers", ["copy, zero-init"])) == ["wu2024llama"]
    assert keys(("insert_layers", ["shuffle"])) == ["cao2025progressive"]
    assert keys(("insert_layers", [])) == []
    # The copies that another operation stacks are none of LLaMA PRO's.
    done = (("insert_layers", ["ot_fusion, zero-init"]), ("control_llm", ["copy, zero-init"]))
    assert keys(*done, *done) == ["cao2025progressive", "wei2025control"]


def test_an_operation_that_is_unknown_here_is_met_with_neutral_words(tmp_path: Path) -> None:
    """A newer surgeon's, or a plugin's that is not installed: no paper, and a layer that is simply new."""
    assert papers_of([("of_a_plugin", ["copy"])]) == []
    assert origin_of("of_a_plugin", "copy") == origin_of("insert_layers", "of_a_plugin") == origin_of("", "") == "made"
    base = tiny.checkpoint(tmp_path / "base", "llama")
    surgeon.apply("copy", str(base), tmp_path / "out")
    edited(tmp_path / "out", lambda manifest: manifest["operations"][0].update(op="of_a_plugin"), seal=True)
    text = card(surgeon.inspect(tmp_path / "out").manifest, {}, {}, NOTHING_KNOWN).decode()
    assert "of_a_plugin" in text and "## Papers" not in text
    surgeon.report(tmp_path / "out", html=tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "of_a_plugin" in page and 'class="layer made"' in page and "<h3>Papers</h3>" not in page
