"""The inits of `insert_layers`, taken from their table: at every gap, the edges too, each makes a layer or refuses."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import surgeon
from surgeon.blueprint.blueprint import Blueprint
from surgeon.errors import BadInput
from surgeon.operations.inits import INITS
from surgeon.operations.insert_layers import InsertLayers
from surgeon.plan.plan import parse_plan
from tests import tiny
from tests.checkpoints import weights
from tests.shipped_plans import SHIPPED, plan_of

DEPTH = 4
# What an init must be told where the base's weights are random.
ON_RANDOM = {"lesa": ", poor_fit: keep"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.checkpoint(tmp_path_factory.mktemp("base"), "llama", num_hidden_layers=DEPTH)


def drawn(base: Path, init: str, where: str, **options: Any) -> Blueprint:
    asked = "".join(f", {key}: {str(value).lower()}" for key, value in options.items())
    plan = f"surgeon: 1\noperations:\n  - {{op: insert_layers, where: {where}, init: {{kind: {init}}}{asked}}}\n"
    return surgeon.preview(parse_plan(plan), str(base)).blueprint


def layers_read(blueprint: Blueprint) -> set[int]:
    """Numbers of the base's layers that new tensors are made from."""
    sources = {name for output in blueprint.outputs if output.new for name in output.recipe.sources}
    return {int(name.split(".")[2]) for name in sources}


@pytest.mark.parametrize("kind", INITS)
def test_an_init_is_shipped_and_cited(kind: str) -> None:
    init = INITS[kind]
    assert init.paper in InsertLayers.papers
    assert InsertLayers.papers_for([f"{kind}, zero-init"]) == (init.paper,)
    assert InsertLayers.origin_of(f"{kind}, zero-init") == init.origin
    assert kind in shipped_inits()


@cache
def shipped_inits() -> frozenset[str]:
    """The inits of all shipped plans and their points."""
    operations = (operation for name in SHIPPED for operation in plan_of(name).plan.operations)
    return frozenset(operation.init.kind for operation in operations if isinstance(operation, InsertLayers))


@pytest.mark.parametrize("kind", INITS)
def test_an_init_reads_the_layers_that_it_says(kind: str, base: Path) -> None:
    made = drawn(base, kind, "{after: [1]}", zero_init=False)
    layer = made.layers[2]
    assert layer.base is None and layer.init == kind
    read, sources = layers_read(made), {made.layers[source].base for source in layer.sources}
    assert sources <= ({1, 2} if INITS[kind].reads_above else {1})
    assert read == (set(range(DEPTH)) if kind == "lesa" else sources)
    assert made.promise == "none"
    assert drawn(base, kind, "{after: [1]}").promise == "exact"


@pytest.mark.parametrize("kind", INITS)
def test_an_init_makes_tensors_of_the_layer_below_and_the_same_every_time(
    kind: str, base: Path, tmp_path: Path
) -> None:
    init = f"init: {{kind: {kind}{ON_RANDOM.get(kind, '')}}}"
    text = f"{{op: insert_layers, where: {{after: [1]}}, {init}, zero_init: false}}"
    plan = parse_plan(f"surgeon: 1\noperations:\n  - {text}\n")
    made = []
    for name in ("once", "again"):
        surgeon.apply(plan, str(base), tmp_path / name)
        made.append(weights(tmp_path / name))
    assert made[0].keys() == made[1].keys()
    for suffix in (name.split(".", 3)[3] for name in made[0] if name.startswith("model.layers.1.")):
        below, new = (made[0][f"model.layers.{layer}.{suffix}"] for layer in (1, 2))
        again = made[1][f"model.layers.2.{suffix}"]
        assert (new.shape, new.dtype) == (below.shape, below.dtype), suffix
        assert torch.equal(new, again), f"{suffix} comes out otherwise a second time"


@pytest.mark.parametrize("kind", INITS)
def test_above_the_top_layer_an_init_makes_a_layer_or_refuses(kind: str, base: Path) -> None:
    if not INITS[kind].reads_above:
        assert drawn(base, kind, "{after: [1, 3]}").layers[-1].base is None
        return
    with pytest.raises(BadInput, match=f"init {kind} needs a layer above; after the top layer 3 there is none") as no:
        drawn(base, kind, "{after: [1, 3]}")
    for other in str(no.value).rpartition("use ")[2].split(" or "):
        assert drawn(base, other, "{after: [1, 3]}").layers[-1].base is None


@pytest.mark.parametrize("kind", INITS)
def test_several_new_layers_in_a_gap_differ_or_are_refused(kind: str, base: Path) -> None:
    if INITS[kind].reads_above:
        with pytest.raises(BadInput, match=f"init {kind} would make equal layers; use copy or random"):
            drawn(base, kind, "{after: [1]}", per_gap=2)
        return
    made = drawn(base, kind, "{after: [1]}", per_gap=2)
    assert [layer.base for layer in made.layers] == [0, 1, None, None, 2, 3]
    first, second = (
        {o.name.split(".", 3)[3]: o.recipe for o in made.outputs if f"layers.{number}." in o.name} for number in (2, 3)
    )
    assert first.keys() == second.keys() and first != second


@pytest.mark.parametrize("kind", [kind for kind in INITS if not INITS[kind].reads_above])
def test_below_the_lowest_layers_an_init_makes_layers_or_refuses(kind: str, base: Path) -> None:
    """Three new layers above layer 0: copies would be of layers -2, -1 and 0."""
    below = INITS[kind](kind=kind).reads_below(3)
    if below > 1:
        told = f"init {kind} with `per_gap` 3 needs {below} layers below each gap; after layer 0 there are only 1"
        with pytest.raises(BadInput, match=told):
            drawn(base, kind, "{after: [0, 3]}", per_gap=3)
        assert layers_read(drawn(base, kind, f"{{after: [{below - 1}]}}", per_gap=3, zero_init=False)) == set(
            range(below)
        )
    else:
        assert [layer.base for layer in drawn(base, kind, "{after: [0]}", per_gap=3).layers][:5] == [
            0,
            None,
            None,
            None,
            1,
        ]


def test_an_init_that_is_not_in_the_table_is_refused_with_those_that_are_near(base: Path) -> None:
    with pytest.raises(BadInput, match="unknown kind `ot_fuse`; did you mean `ot_fusion`"):
        drawn(base, "ot_fuse", "all")


def test_an_average_is_the_mean_of_both_sides(base: Path, tmp_path: Path) -> None:
    """In float64, of every tensor that is not zeros so that the layer is silent."""
    out = tmp_path / "out"
    entry = "{op: insert_layers, where: {after: [1]}, init: {kind: average}, zero_init: false}"
    plan = f"surgeon: 1\noperations:\n  - {entry}\n"
    surgeon.apply(parse_plan(plan), base, out)
    before, after = weights(base), weights(out)
    for name in (name for name in after if name.startswith("model.layers.2.")):
        one, other = (before[name.replace("layers.2.", f"layers.{layer}.")].double() for layer in (1, 2))
        assert torch.equal(after[name], ((one + other) / 2).to(after[name].dtype)), name
