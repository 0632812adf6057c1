"""`insert_layers` above the layers that matter least on a text, against plain transformers; whole stacks and blocks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import surgeon
from surgeon.errors import BadInput
from surgeon.operations.insert_layers import ADEPT, InsertLayers
from tests.checkpoints import weights
from tests.edits.test_drop_layers import MEASURED, base_of, influences, load, loss_of, plan_of, tokens_of, without

LEAST = {"least": 2} | MEASURED


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_of(tmp_path_factory.mktemp("least"))


@pytest.mark.parametrize("by", ["loss", "influence"])
def test_new_layers_stand_above_those_that_matter_least(by: str, base: Path, tmp_path: Path) -> None:
    plan = plan_of(tmp_path, {"op": "insert_layers", "where": LEAST | {"by": by}, "init": "copy"})
    out = surgeon.apply(plan, base, tmp_path / "out", device="cpu").path
    ids = tokens_of(base)
    before = loss_of(load(base), ids)
    if by == "loss":
        scores = [loss_of(without(load(base), [layer]), ids) - before for layer in range(6)]
    else:
        scores = influences(load(base), ids)
    least = sorted(sorted(range(6), key=scores.__getitem__)[:2])

    manifest = json.loads((out / "surgery.json").read_text())
    facts = manifest["facts"]["0"]
    assert facts["gaps"] == least
    assert list(facts["scores"]) == [str(layer) for layer in range(6)]
    assert list(facts["scores"].values()) == pytest.approx(scores, abs=1e-5)
    assert facts["before"] == pytest.approx(before, abs=1e-5)
    new = [number for number, layer in enumerate(manifest["layers"]) if layer["operation"] is not None]
    assert new == [least[0] + 1, least[1] + 2]
    found, old = weights(out), weights(base)
    for number, below in zip(new, least, strict=True):
        name = "self_attn.q_proj.weight"
        assert found[f"model.layers.{number}.{name}"].equal(old[f"model.layers.{below}.{name}"])
    verified = surgeon.verify(base, out, device="cpu", window=8, windows=1)
    assert verified.holds and verified.promise == "exact"
    assert InsertLayers.papers_for(layer["init"] for layer in manifest["layers"] if layer["init"])[-1] == ADEPT
    assert surgeon.revert(out, tmp_path / "back").path.is_dir()


def test_a_gap_that_the_init_cannot_fill_is_none_of_the_least(base: Path, tmp_path: Path) -> None:
    """All others are taken before it: the top layer has none above it to be averaged with."""
    where = LEAST | {"by": "influence", "least": 5}
    found = surgeon.preview(plan_of(tmp_path, {"op": "insert_layers", "where": where, "init": "average"}), base)
    assert "after layers 0-4" in found.blueprint.operations[0].matched
    more = where | {"least": 6}
    with pytest.raises(BadInput, match=r"`least` 6: init average fits after only 5 of the 6 layers; give fewer"):
        surgeon.preview(plan_of(tmp_path, {"op": "insert_layers", "where": more, "init": "average"}), base)


def test_the_layers_are_those_of_the_base(base: Path, tmp_path: Path) -> None:
    first = {"op": "insert_layers", "where": [1], "init": "copy"}
    with pytest.raises(BadInput, match="make it the plan's first operation, or apply two plans"):
        surgeon.preview(plan_of(tmp_path, first, first | {"where": LEAST}), base)


@pytest.mark.parametrize(
    ("options", "order"),
    [
        ({"times": 3}, [*range(6), *range(6), *range(6)]),
        ({"times": 2, "range": [1, 3]}, [0, 1, 2, 3, 1, 2, 3, 4, 5]),
        ({"times": 4, "range": [5, 5]}, [0, 1, 2, 3, 4, 5, 5, 5, 5]),
        ({"slices": [[0, 4], [2, 6]]}, [0, 1, 2, 3, 2, 3, 4, 5]),
        ({"slices": [[3, 6], [0, 3], [5, 6]]}, [3, 4, 5, 0, 1, 2, 5]),
        ({"slices": [[0, 1], [4, 6]]}, [0, 4, 5]),
    ],
)
def test_a_stack_or_a_block_of_it_occurs_again(
    options: dict[str, object], order: list[int], base: Path, tmp_path: Path
) -> None:
    """As by hand: the native class with its layers in that order, the same object where a layer occurs again."""
    plan = plan_of(tmp_path, {"op": "stack_layers"} | options)
    out = load(surgeon.apply(plan, base, tmp_path / "out", device="cpu").path)
    ids, by_hand = tokens_of(base), load(base)
    layers = by_hand.model.layers
    by_hand.model.layers = type(layers)(layers[number] for number in order)
    by_hand.config.num_hidden_layers = len(order)
    assert loss_of(out, ids) == loss_of(by_hand, ids) != loss_of(load(base), ids)


def test_a_block_that_is_not_there_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no layer 6: the model has layers 0 to 5"):
        surgeon.preview(plan_of(tmp_path, {"op": "stack_layers", "times": 2, "range": [4, 7]}), base)
