"""The one walk over an output's surgeries: what moved where, and no ancestor whose manifest was edited."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import surgeon
from surgeon.checkpoint.card_metadata import NOTHING_KNOWN
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.errors import BadInput
from surgeon.manifest.card import card
from surgeon.manifest.lineage import Lineage, trainable_set
from surgeon.manifest.manifest import Manifest, digest_of, manifest_of, parse
from surgeon.report.history import layer_history
from tests import tiny
from tests.end_to_end.test_refusals import refused

# For every layer of the output the base layer it is; None is a new one.
STACKS: list[list[int | None]] = [[0, None, 1], [0, 1, 2], [None, 0, 1, None, 2]]


def manifests(stacks: list[list[int | None]]) -> list[dict[str, Any]]:
    """The manifests, as data, of surgeries that inserted layers, each on the output of the one before."""
    found: list[dict[str, Any]] = []
    lineage: list[dict[str, Any]] = []
    for number, stack in enumerate(stacks, 1):
        layers = sum(layer is not None for layer in stack)
        manifest = {
            "surgeon_manifest": 1,
            "tool": {"name": "surgeon", "version": "0"},
            "base": {
                "id": f"state-{number - 1}",
                "revision": None,
                "model_type": "llama",
                "layers": layers,
                "tensors": {f"model.layers.{layer}.norm.weight": f"{layer:064x}" for layer in range(layers)},
                "config": {"num_hidden_layers": layers},
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
            "lineage": list(lineage),
        }
        found.append(manifest)
        lineage.append(
            {
                "sha256": digest_of(manifest),
                "base": f"state-{number - 1}",
                "revision": None,
                "operations": [f"op-{number}"],
                "tool": "0",
                "manifest": {key: value for key, value in manifest.items() if key != "lineage"},
            }
        )
    return found


def last(change: Callable[[list[dict[str, Any]]], None] = lambda lineage: None) -> Manifest:
    """The third surgery's manifest, its lineage changed."""
    data = json.loads(json.dumps(manifests(STACKS)[-1]))
    change(data["lineage"])
    return parse(data, file="surgery.json")


def test_three_surgeries_in_order_and_where_layers_and_tensors_stand() -> None:
    lineage = Lineage.of(last())
    assert [manifest.operations[0].op for manifest in lineage.surgeries] == ["op-1", "op-2", "op-3"]
    assert (lineage.first, lineage.count) == (1, 3)
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


@pytest.mark.parametrize("edited", [0, 1])
def test_an_edited_ancestor_is_refused_whichever_it_is(edited: int) -> None:
    def edit(lineage: list[dict[str, Any]]) -> None:
        lineage[edited]["manifest"]["plan"] = "surgeon: 1 # edited"

    # The second surgery's digest is over the first one's manifest too.
    with pytest.raises(BadInput, match=r"surgery\.json \(surgery 2\): not what its sha256 says"):
        Lineage.of(last(edit))


def test_another_digest_for_an_ancestor_is_refused() -> None:
    with pytest.raises(BadInput, match=r"\(surgery 2\): not what its sha256 says"):
        Lineage.of(last(lambda lineage: lineage[1].update(sha256="0" * 64)))


def test_ancestors_that_were_not_kept() -> None:
    lineage = Lineage.of(last(lambda lineage: lineage[1].pop("manifest")))
    assert (lineage.first, lineage.count, len(lineage.surgeries)) == (3, 3, 1)
    assert lineage.layers(2) == {0: 1, 1: 2, 2: 4}
    for number in (0, 1):
        with pytest.raises(BadInput, match="does not hold the manifest of surgery 2, since an older surgeon"):
            lineage.layers(number)


def test_surgeries_that_do_not_fit_together_are_refused() -> None:
    data = manifests([STACKS[0], [0, None, 1]])[-1]
    with pytest.raises(BadInput, match="surgery 1 made 3 layers, surgery 2 found 2"):
        Lineage.of(parse(data, file="surgery.json"))


@pytest.fixture(scope="module")
def edited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output of two surgeries, of which somebody changed the first one's manifest."""
    folder = tmp_path_factory.mktemp("edited")
    surgeon.apply("neutral-residues", tiny.checkpoint(folder / "base", "llama"), folder / "one")
    surgeon.apply("llama-pro", folder / "one", folder / "out")
    file = folder / "out" / "surgery.json"
    manifest = json.loads(file.read_text())
    new = manifest["lineage"][0]["manifest"]["new_tensors"]
    new["model.norm.weight"] = next(iter(new.values()))
    file.write_text(json.dumps(manifest))
    return folder / "out"


def test_an_edited_ancestor_is_refused_wherever_the_lineage_is_read(edited: Path, tmp_path: Path) -> None:
    folder = CheckpointFolder.open(edited)
    manifest = manifest_of(folder)
    told = r"surgery\.json \(surgery 1\): not what its sha256 says"
    with pytest.raises(BadInput, match=told):
        trainable_set(folder, manifest, "all")
    assert trainable_set(folder, manifest, "last").names
    with pytest.raises(BadInput, match=told):
        layer_history(folder, manifest)
    with pytest.raises(BadInput, match=told):
        card(manifest, folder.config, {}, NOTHING_KNOWN)
    for arguments in (
        ("report", edited, "--html", tmp_path / "page.html"),
        ("revert", edited, tmp_path / "back"),
        ("apply", "llama-pro", edited, tmp_path / "third"),
        ("preview", "llama-pro", edited),
    ):
        assert "surgery.json (surgery 1): not what its sha256 says" in refused(*arguments)
    assert not list(tmp_path.iterdir())
