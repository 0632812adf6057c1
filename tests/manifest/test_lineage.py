"""The one walk over an output's surgeries: what moved where, and no ancestor whose manifest was edited."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import surgeon
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.errors import BadInput
from surgeon.manifest.lineage import Lineage
from surgeon.manifest.manifest import Manifest, seal_of
from surgeon.manifest.reading import manifest_of, parse
from tests import tiny
from tests.checkpoints import train
from tests.commands import refused
from tests.manifest.edits import edited, resealed

# For every layer of the output the base layer it is; None is a new one.
STACKS: list[list[int | None]] = [[0, None, 1], [0, 1, 2], [None, 0, 1, None, 2]]


def manifests(stacks: list[list[int | None]]) -> list[dict[str, Any]]:
    """The manifests, as data, of surgeries that inserted layers, each on the output of the one before."""
    found: list[dict[str, Any]] = []
    lineage: list[dict[str, Any]] = []
    for number, stack in enumerate(stacks, 1):
        layers = sum(layer is not None for layer in stack)
        surgery = {
            "surgeon_manifest": 3,
            "tool": {"name": "surgeon", "version": "0"},
            "base": {
                "id": f"state-{number - 1}",
                "revision": None,
                "model_type": "llama",
                "layers": layers,
                "config": {"num_hidden_layers": layers},
                "tensors": {
                    f"model.layers.{layer}.norm.weight": {"dtype": "F32", "shape": [2], "sha256": f"{layer:064x}"}
                    for layer in range(layers)
                }
                | {"lm_head.weight": {"dtype": "F32", "shape": [2], "sha256": f"{99:064x}"}},
                "files": {},
            },
            "plan": "surgeon: 1",
            "promise": "exact" if number != 2 else "none",
            "native": True,
            "operations": [
                {"op": f"op-{number}", "matched": "", "promise": "exact", "reason": "", "trains": "new"},
            ],
            "layers": [
                {"base": layer, "operation": None if layer is not None else 0, "init": "", "sources": []}
                for layer in stack
            ],
            "new_tensors": {},
            "transport_maps": {},
            "files": {},
            "texts": {},
            "plugins": {},
            "training": [],
        }
        found.append(resealed({**surgery, "lineage": list(lineage)}))
        lineage.append({key: value for key, value in found[-1].items() if key != "lineage"})
    return found


def last(change: Callable[[list[dict[str, Any]]], None] = lambda lineage: None) -> Manifest:
    """The third surgery's manifest, its lineage changed."""
    data = json.loads(json.dumps(manifests(STACKS)[-1]))
    change(data["lineage"])
    return parse(data, file="surgery.json")


def test_three_surgeries_in_order_and_where_layers_and_tensors_stand() -> None:
    lineage = Lineage.of(last())
    assert [manifest.operations[0].op for manifest in lineage.surgeries] == ["op-1", "op-2", "op-3"]
    assert lineage.count == 3
    assert [manifest.base.id for manifest in lineage.since(1)] == ["state-1", "state-2"]
    assert lineage.since(3) == ()
    assert lineage.layers(0) == {0: 1, 1: 4}
    assert lineage.layers(1) == lineage.layers(2) == {0: 1, 1: 2, 2: 4}
    assert lineage.layers(3) == {layer: layer for layer in range(5)}
    names = ["model.layers.1.norm.weight", "lm_head.weight"]
    assert lineage.places(0, names) == {names[0]: "model.layers.4.norm.weight", names[1]: names[1]}
    assert lineage.places(2, names) == {names[0]: "model.layers.2.norm.weight", names[1]: names[1]}


def test_a_tensor_that_a_surgery_did_not_find_is_named() -> None:
    with pytest.raises(BadInput, match=r"surgery\.json \(surgery 1\): the base's model\.layers\.2\.x .* 2 layers"):
        Lineage.of(last()).places(0, ["model.layers.2.x"])


@pytest.mark.parametrize("number", [0, 1])
def test_an_edited_ancestor_is_refused_whichever_it_is(number: int) -> None:
    with pytest.raises(BadInput, match=rf"surgery\.json \(surgery {number + 1}\): not what its sha256 says"):
        last(lambda lineage: lineage[number].update(plan="surgeon: 1 # edited"))


def test_an_ancestor_that_is_sealed_anew_does_not_fit_the_surgery_after_it() -> None:
    """As the commits of git, each seal is over the one before."""

    def change(lineage: list[dict[str, Any]]) -> None:
        lineage[0].update(plan="surgeon: 1 # edited")
        lineage[0]["sha256"] = seal_of({**lineage[0], "lineage": []})

    with pytest.raises(BadInput, match=r"\(surgery 2\): not what its sha256 says"):
        last(change)


def test_surgeries_that_do_not_fit_together_are_refused() -> None:
    data = manifests([STACKS[0], [0, None, 1]])[-1]
    with pytest.raises(BadInput, match="surgery 1 made 3 layers, surgery 2 found 2"):
        Lineage.of(parse(data, file="surgery.json"))


def test_an_edited_ancestor_is_refused_wherever_the_manifest_is_read(tmp_path: Path) -> None:
    surgeon.apply("neutral-residues", tiny.checkpoint(tmp_path / "base", "llama"), tmp_path / "one")
    surgeon.apply("llama-pro", tmp_path / "one", tmp_path / "out")
    out = edited(tmp_path / "out", lambda manifest: manifest["lineage"][0].update(promise="none"), seal=False)
    before = sorted(tmp_path.iterdir())
    for arguments in (
        ("inspect", out),
        ("verify", tmp_path / "base", out),
        ("report", out, "--html", tmp_path / "page.html"),
        ("revert", out, tmp_path / "back"),
        ("apply", "llama-pro", out, tmp_path / "third"),
        ("preview", "llama-pro", out),
        ("delta", out, tmp_path / "delta"),
        ("diff", tmp_path / "one", out),
    ):
        assert "surgery.json (surgery 1): not what its sha256 says" in refused(*arguments)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.4.mlp.up_proj.weight"])
def test_what_was_trained_between_two_surgeries_is_of_no_earlier_state(name: str, tmp_path: Path) -> None:
    """A tensor of the base that stays where it is, and one whose layer moves (3, then 4): by the manifests alone."""
    plan = surgeon.parse_plan("surgeon: 1\noperations: [{op: insert_layers, where: {after: [1]}, init: {kind: copy}}]")
    surgeon.apply(plan, tiny.checkpoint(tmp_path / "base", "llama"), tmp_path / "one")
    for between in ("kept", "trained"):
        if between == "trained":
            train(tmp_path / "one", name, seed=0)
        out = surgeon.apply(plan, tmp_path / "one", tmp_path / between).path
        folder = CheckpointFolder.open(out)
        lineage = Lineage.of(manifest_of(folder))
        assert lineage.state(1, folder).base.tensors[name] == lineage.surgeries[1].base.tensors[name]
        if between == "kept":
            assert set(lineage.state(0, folder).tensors) == set(CheckpointFolder.open(tmp_path / "base").tensors)
            continue
        with pytest.raises(
            BadInput, match="trained or edited when surgery 2 began, so what surgery 1 found there is lost"
        ):
            lineage.state(0, folder)
