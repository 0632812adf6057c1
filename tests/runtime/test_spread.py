"""Entries of config.surgery that stand for several layers say the same as one for each."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import surgeon
from surgeon.blueprint import grafts
from surgeon.errors import BadInput
from surgeon.grafts.checks import check_surgery
from surgeon.grafts.ranges import by_ranges
from surgeon.grafts.registry import GRAFTS
from surgeon.runtime.rules import Surgery
from surgeon.runtime.spread import for_each_layer
from tests import tiny
from tests.runtime.grafting import adapters, control, every_graft, experts, gated, read_from, routed, states


def read(surgery: dict[str, Any]) -> Surgery:
    """What planners read of a surgery, all of it."""
    from types import SimpleNamespace

    layers = surgery["trunk_layers"] + len(for_each_layer(surgery).get("control", ()))
    stated = SimpleNamespace(
        num_hidden_layers=layers, surgery=surgery, layer_types=None, encoder=False, grafts=GRAFTS.values()
    )
    return check_surgery(stated)


@pytest.mark.parametrize("name", every_graft())
def test_ranges_read_as_the_entries_that_they_stand_for(name: str) -> None:
    surgery = every_graft()[name]
    short = by_ranges(surgery)
    assert len(json.dumps(short)) < len(json.dumps(surgery)) or name.startswith("gate")
    assert by_ranges(short) == short
    one, other = read(surgery), read(short)
    assert (one.of, one.homes, one.new_layers) == (other.of, other.homes, other.new_layers)


def test_an_output_of_eighty_layers_says_so_in_few_lines() -> None:
    every = tuple(range(80))
    surgery = control(layers=every, trunk=80)
    surgery |= {"adapters": adapters(layers=(*every, *range(80, 160)))["adapters"], "local_loss": {"l1": 0.01}}
    surgery |= {key: value for key, value in experts(threshold=20, trunk=80).items() if key != "trunk_layers"}
    surgery |= {key: value for key, value in states(layers=every).items() if key != "trunk_layers"}
    surgery["routed_experts"] = routed(layers=every)["routed_experts"]
    surgery = gated(surgery) | {"new_layers": list(range(0, 80, 5)), "older_layers": [3, 4]}
    assert len(json.dumps(surgery, indent=2).splitlines()) > 3000
    short = by_ranges(surgery)
    assert len(json.dumps(short, indent=2).splitlines()) <= 200
    assert by_ranges(for_each_layer(short)) == short
    assert read(short) == read(for_each_layer(short))


def test_the_order_of_a_layers_entries_stays() -> None:
    """Slots of two surgeries on one layer are two entries; where ranges would turn them, none is made."""
    entries = [{"layer": layer, "n": n} for layer, order in ((0, "ab"), (1, "ba")) for n in order]
    assert by_ranges({"trunk_layers": 2, "x": entries})["x"] == entries
    assert by_ranges({"trunk_layers": 2, "x": entries[:2]})["x"] == [
        {"layers": "0", "n": "a"},
        {"layers": "0", "n": "b"},
    ]


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ("0-99999999999", "names layers"),
        ("3,1", "do not ascend"),
        ("0,0", "do not ascend"),
        ("0-2,2", "do not ascend"),
        ("-1", "invalid literal"),
        ("", "invalid literal"),
        ("two", "invalid literal"),
        (4, "surgery` cannot be read"),
    ],
)
def test_ranges_that_are_none_are_refused(layers: Any, words: str) -> None:
    surgery = adapters()
    surgery["adapters"] = [{"layers": layers, "size": 4}]
    with pytest.raises(BadInput, match=words):
        read_from("llama", surgery)


def plan_of(operation: str) -> str:
    """A plan of one operation."""
    return f"surgeon: 1\noperations:\n  - {{op: {operation}}}\n"


@pytest.mark.usefixtures("unproven")
def test_an_output_with_an_entry_for_each_layer_verifies_and_reverts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As earlier code wrote them."""
    base, out, twice = tiny.checkpoint(tmp_path / "base", "llama"), tmp_path / "out", tmp_path / "twice"
    plan = surgeon.parse_plan(plan_of("gated_adapters, size: 4"))
    with monkeypatch.context() as patched:
        patched.setattr(grafts, "by_ranges", for_each_layer)
        surgeon.apply(plan, str(base), out)
    old = json.loads((out / "config.json").read_text())["surgery"]["adapters"]
    assert [entry["layer"] for entry in old] == list(range(6))
    verified = surgeon.verify(base, out, window=24, windows=1)
    assert verified.holds
    (code,) = (check.detail for check in verified.checks if check.name == "code")
    digest = hashlib.sha256((out / "modeling_surgeon.py").read_bytes()).hexdigest()
    assert code == f"modeling_surgeon.py ({digest[:12]}…): the file of surgeon {surgeon.__version__} for adapters"
    surgeon.apply(surgeon.parse_plan(plan_of("mixture_of_control, rank: 2")), str(out), twice)
    assert surgeon.verify(out, twice, window=24, windows=1).holds
    surgeon.revert(twice, tmp_path / "back")
    for file in ("config.json", "modeling_surgeon.py"):
        assert (tmp_path / "back" / file).read_bytes() == (out / file).read_bytes()
    surgeon.revert(tmp_path / "back", tmp_path / "first")
    assert (tmp_path / "first" / "config.json").read_bytes() == (base / "config.json").read_bytes()
    with (out / "modeling_surgeon.py").open("a") as file:
        file.write("\n")
    with pytest.raises(BadInput, match=r"modeling_surgeon\.py lies in it, which is not what this version"):
        surgeon.verify(base, out)
