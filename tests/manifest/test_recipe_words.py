"""The words of recipes in surgery.json, read back: what they say is what blueprints plan and what outputs hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import surgeon
from surgeon.checkpoint.folder import CheckpointFolder, holds_pieces
from surgeon.checkpoint.pieces import Pieces, Span
from surgeon.errors import BadInput
from surgeon.manifest.manifest import Manifest, NewTensor
from surgeon.manifest.moves import has_other_names, left_at, made_of_base
from surgeon.manifest.reading import manifest_of, parse
from surgeon.manifest.recipe_words import BaseBytes, ImpossiblePieces, base_bytes_of
from surgeon.verify.static import Drawn
from tests import tiny
from tests.decoders import tiny_decoder
from tests.manifest.edits import edited
from tests.manifest.test_lineage import last
from tests.oracle import STRUCTURES

# Numbers of two bytes.
BASE = {"table": [6, 4], "row": [4], "experts": [3, 4, 2], "model.layers.0.adapter_in.weight": [2, 4]}


def surgery() -> Manifest:
    """A surgery on a base of these tensors."""
    tensors = {name: {"dtype": "F16", "shape": shape, "sha256": "0" * 64} for name, shape in BASE.items()}
    manifest = last()
    return manifest.model_copy(
        update={"base": manifest.base.model_validate({**dict(manifest.base), "tensors": tensors})}
    )


def read_back(recipe: dict[str, Any], *shape: int, dtype: str = "F16") -> BaseBytes:
    made = NewTensor(dtype=dtype, shape=list(shape), sha256="0" * 64, operation=0, recipe=recipe)
    return base_bytes_of(made, surgery())


def test_what_the_words_say() -> None:
    copy = read_back({"copy": "table"}, 6, 4)
    assert copy.pieces == Pieces.whole("table", 48) and copy.is_copy and not copy.kept.spans and not copy.stays
    layers = read_back({"per_layer": "table", "axis": 0, "order": [0, 0, 2]}, 6, 4)
    assert layers.pieces.spans == (Span("table", 0, 16), Span("table", 0, 16, 16), Span("table", 32, 16, 32))
    assert layers.stays and layers.pieces.repeats
    columns = read_back({"per_layer": "table", "axis": 1, "order": [1]}, 6, 2)
    assert columns.pieces.spans == (Span("table", 4, 4, 0, 6, 8, 4),) and columns.stays and not columns.pieces.repeats
    rows = [["table", 4, 6], ["row", 0, 4]]
    still, begins = (read_back({"rows": rows, "still": still}, 3, 4) for still in (True, False))
    assert still.pieces == begins.pieces == Pieces(24, (Span("table", 32, 16), Span("row", 0, 8, 16)))
    assert still.stays and not begins.kept.spans and not begins.is_copy
    grown = read_back({"extended": {"copy": "table"}, "rows": 2, "named": 0}, 8, 4)
    assert grown.pieces == grown.kept == Pieces(64, (Span("table", 0, 48),)) and grown.grown_from == 6
    zeros, again = {"constant": 0.0}, {"again": "table", "rows": [0, 6]}
    wider = read_back({"joined": [{"copy": "table"}, zeros, again], "axis": 1, "sizes": [4, 1, 4]}, 6, 9)
    assert wider.pieces == wider.kept == Pieces(108, (Span("table", 0, 8, 0, 6, 8, 18),)) and not wider.stays
    between = [{"copy": "table", "rows": [0, 2]}, zeros, {"copy": "table", "rows": [2, 6]}]
    wider = read_back({"joined": between, "axis": 0, "sizes": [2, 3, 4]}, 9, 4)
    assert wider.pieces.spans == (Span("table", 0, 16), Span("table", 16, 32, 40))
    assert read_back({"average": [{"copy": "table"}, {"copy": "table"}]}, 6, 4) == BaseBytes(
        Pieces(48, ()), Pieces(48, ())
    )


def test_where_a_surgery_left_what_the_base_held() -> None:
    """At home, in what took it in, or nowhere: what begins as a copy of it is no place of its own."""
    made = {
        "row": ({"average": [{"copy": "row"}, {"copy": "row"}]}, [4]),
        "other": ({"copy": "row"}, [4]),
        "more": ({"copy": "experts"}, [3, 4, 2]),
        "lower": ({"rows": [["table", 2, 6]], "still": True}, [4, 4]),
        "upper": ({"rows": [["table", 0, 2]], "still": False}, [2, 4]),
    }
    new = {
        name: NewTensor(dtype="F16", shape=shape, sha256="0" * 64, operation=0, recipe=recipe)
        for name, (recipe, shape) in made.items()
    }
    manifest = surgery().model_copy(update={"new_tensors": new})
    found = left_at(manifest, ["row", "experts", "table"])
    assert not found["row"].spans
    assert found["experts"] == Pieces.whole("experts", 48)
    assert found["table"] == Pieces(48, (Span("upper", 0, 16), Span("lower", 0, 32, 16)))
    assert made_of_base(manifest).keys() == {"lower", "upper"}
    assert has_other_names(manifest)


IMPOSSIBLE: list[tuple[dict[str, Any], list[int]]] = [
    ({"copy": "table"}, [6, 5]),
    ({"copy": "other"}, [6, 4]),
    ({"per_layer": "table", "axis": 0, "order": [3]}, [2, 4]),
    ({"per_layer": "table", "axis": 0, "order": [-1]}, [2, 4]),
    ({"per_layer": "table", "axis": 0, "order": []}, [2, 4]),
    ({"per_layer": "table", "axis": 2, "order": [0]}, [2, 4]),
    ({"per_layer": "table", "axis": 0, "order": [0]}, [2, 5]),
    ({"per_layer": "table", "axis": 0, "order": [0]}, [4, 4]),
    ({"rows": [["table", 0, 7]], "still": True}, [7, 4]),
    ({"rows": [["table", 2, 2]], "still": True}, [0, 4]),
    ({"rows": [["table", 0, 2]], "still": False}, [3, 4]),
    ({"rows": ["table"], "still": False}, [6, 4]),
    ({"rows": [], "still": True}, [0]),
    ({"extended": {"copy": "table"}}, [5, 4]),
    ({"extended": {"copy": "table"}}, [7, 5]),
    ({"joined": [{"copy": "table"}], "axis": 1, "sizes": [5]}, [6, 5]),
    ({"joined": [{"copy": "table"}], "axis": 1, "sizes": [4, 1]}, [6, 5]),
    ({"joined": [{"copy": "table"}, {}], "axis": 1, "sizes": [4, 2]}, [6, 5]),
    ({"joined": [{"copy": "table"}, {}], "axis": 2, "sizes": [4, 1]}, [6, 5]),
    ({"joined": [{"copy": "table"}, {}], "axis": 1, "sizes": [6, -1]}, [6, 5]),
]


@pytest.mark.parametrize(("recipe", "shape"), IMPOSSIBLE, ids=lambda value: json.dumps(value))
def test_words_that_cannot_be(recipe: dict[str, Any], shape: list[int]) -> None:
    with pytest.raises(ImpossiblePieces):
        read_back(recipe, *shape)


def test_bytes_of_another_dtype_cannot_be_held() -> None:
    with pytest.raises(ImpossiblePieces, match="bytes of the base's table"):
        read_back({"copy": "table"}, 6, 4, dtype="BF16")


def test_sizes_that_a_manifest_claims_cost_nothing() -> None:
    """Every size is the file's word: nothing is made for each number of a tensor."""
    manifest = surgery()
    of = manifest.base.tensors["table"].model_copy(update={"shape": [10**9, 10**9]})
    manifest = manifest.model_copy(update={"base": manifest.base.model_copy(update={"tensors": {"table": of}})})
    words = {"per_layer": "table", "axis": 1, "order": [1, 0]}
    made = NewTensor(dtype="F16", shape=[10**9, 10**9], sha256="0" * 64, operation=0, recipe=words)
    assert len(base_bytes_of(made, manifest).pieces.spans) == 2


@pytest.mark.parametrize(
    ("family", "structure"),
    [("llama", name) for name in ("copy", "ffn", "copied ffn", "attention", "hidden", "experts", "copied experts")]
    + [("phi3", "experts"), ("phi3", "ffn"), ("gemma4_text", "copy")],
)
def test_words_are_read_as_they_were_meant(family: str, structure: str, tmp_path: Path) -> None:
    """The reader agrees with the blueprint, which has the recipes themselves, and with the bytes of the output."""
    own = family in tiny.FAMILIES
    base = tiny.checkpoint(tmp_path / "base", family) if own else tiny_decoder(tmp_path / "base", family)
    (tmp_path / "plan.yaml").write_text(json.dumps({"surgeon": 1, "operations": STRUCTURES[structure]}))
    surgeon.apply(tmp_path / "plan.yaml", str(base), tmp_path / "out", device="cpu")
    of, out = (CheckpointFolder.open(folder) for folder in (base, tmp_path / "out"))
    manifest = manifest_of(out)
    planned = {o.name: o for o in Drawn.of(manifest, of.config, of.tensors, of.own, "").blueprint.outputs if o.new}
    assert planned.keys() == manifest.new_tensors.keys()
    for name, made in manifest.new_tensors.items():
        found = base_bytes_of(made, manifest)
        assert found.kept == planned[name].kept, name
        assert holds_pieces(out, name, found.pieces, of), name


def test_a_manifest_that_says_the_impossible_is_refused(tmp_path: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        name = next(name for name, made in manifest["new_tensors"].items() if "copy" in made["recipe"])
        manifest["new_tensors"][name]["shape"].append(1)

    base = tiny.checkpoint(tmp_path / "base", "llama")
    (tmp_path / "plan.yaml").write_text(json.dumps({"surgeon": 1, "operations": STRUCTURES["copy"]}))
    surgeon.apply(tmp_path / "plan.yaml", str(base), tmp_path / "out", device="cpu")
    out = edited(tmp_path / "out", change, seal=True)
    with pytest.raises(BadInput, match=r"surgery\.json: model\.layers.* is said to hold a copy of the base's .*edited"):
        parse(json.loads((out / "surgery.json").read_text()), file="surgery.json")
