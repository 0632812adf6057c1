"""The spans of new tensors in surgery.json: what blueprints plan, what outputs hold, and nothing that cannot be."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import surgeon
from surgeon.blueprint.recipes import Constant, Copy, extended, kept_rows, per_layer, rows, side_by_side, sliced
from surgeon.checkpoint.folder import CheckpointFolder, holds_pieces
from surgeon.checkpoint.header import TensorInfo
from surgeon.checkpoint.pieces import Pieces, Span
from surgeon.errors import BadInput
from surgeon.manifest.manifest import Manifest, NewTensor
from surgeon.manifest.moves import boxes_of, has_other_names, left_at, made_of_base
from surgeon.manifest.reading import manifest_of, parse
from surgeon.verification.static import Drawn
from tests import tiny
from tests.decoders import tiny_decoder
from tests.manifest.edits import resealed
from tests.manifest.test_lineage import STACKS, manifests
from tests.oracle import STRUCTURES

# Numbers of two bytes.
BASE = {"table": [6, 4], "row": [4], "experts": [3, 4, 2], "model.layers.0.mlp.adapter.up_proj.weight": [6, 4]}
TABLE, ROW, _, GRAFT = (
    Copy.of(TensorInfo(name, "F16", tuple(shape), "", 0, 2 * math.prod(shape))) for name, shape in BASE.items()
)


def read(new: dict[str, dict[str, Any]], base: dict[str, list[int]] | None = None) -> Manifest:
    """A manifest with these new tensors, on a base of these tensors."""
    data = manifests(STACKS)[0]
    shapes = BASE if base is None else base
    data["base"]["tensors"] = {
        name: {"dtype": "F16", "shape": shape, "sha256": "0" * 64} for name, shape in shapes.items()
    }
    born = {"dtype": "F16", "sha256": "0" * 64, "operation": 0, "how": ""}
    data["new_tensors"] = {name: born | made for name, made in new.items()}
    return parse(resealed(data), file="surgery.json")


def read_back(recipe: Any) -> NewTensor:
    """What is read of a new tensor that is written by its recipe."""
    made = NewTensor.made(recipe, "0" * 64, 0).model_dump(exclude_unset=True)
    return read({"new": json.loads(json.dumps(made))}).new_tensors["new"]


def test_what_is_written_is_read() -> None:
    copy = read_back(TABLE)
    assert copy.pieces == Pieces.whole("table", 48) and copy.is_copy and not copy.kept.spans and not copy.stays
    layers = read_back(per_layer(TABLE, 0, 3, (0, 0, 2)))
    assert layers.pieces.spans == (Span("table", 0, 16), Span("table", 0, 16, 16), Span("table", 32, 16, 32))
    assert layers.stays and layers.pieces.repeats
    columns = read_back(per_layer(TABLE, 1, 2, (1,)))
    assert columns.pieces.spans == (Span("table", 4, 4, 0, 6, 8, 4),) and columns.stays and not columns.pieces.repeats
    assert columns.spans == {"table": "4 4 0 6 8 4"}
    parts = [(TABLE, 4, 6), (ROW, 0, 4)]
    still, begins = (read_back(rows(parts, (3, 4), still=still)) for still in (True, False))
    assert still.pieces == begins.pieces == Pieces(24, (Span("table", 32, 16), Span("row", 0, 8, 16)))
    assert still.stays and not begins.kept.spans and not begins.is_copy
    grown = read_back(extended(TABLE, ((), ())))
    assert grown.pieces == grown.kept == Pieces(64, (Span("table", 0, 48),)) and grown.grown_from == 6
    left = read_back(kept_rows(TABLE, (0, 1, 4)))
    assert left.spans == {"table": "0 16 0; 32 8 16"} and left.stays and left.grown_from is None
    zeros, again = Constant(0.0, "F16", (6, 1)), sliced(TABLE, 0, 6, again=True)
    wider = read_back(side_by_side([TABLE, zeros, again, GRAFT], 1))
    own = Span("table", 0, 8, 0, 6, 8, 26)
    assert wider.pieces == Pieces(156, (own, Span(GRAFT.source or "", 0, 8, 18, 6, 8, 26)))
    assert wider.kept == Pieces(156, (own,)) and not wider.stays
    none = read_back(zeros)
    assert (none.how, none.pieces, none.holds) == ("constant 0.0", Pieces(12, ()), None)


def test_where_a_surgery_left_what_the_base_held() -> None:
    """At home, in what took it in, or nowhere: what begins as a copy of it is no place of its own."""
    manifest = read(
        {
            "row": {"shape": [4]},
            "other": {"shape": [4], "holds": "copied", "spans": {"row": "0 8 0"}},
            "more": {"shape": [3, 4, 2], "holds": "copied", "spans": {"experts": "0 48 0"}},
            "lower": {"shape": [4, 4], "holds": "kept", "spans": {"table": "16 32 0"}},
            "upper": {"shape": [2, 4], "holds": "moved", "spans": {"table": "0 16 0"}},
        }
    )
    found = left_at(manifest, ["row", "experts", "table"])
    assert not found["row"].spans
    assert found["experts"] == Pieces.whole("experts", 48)
    assert found["table"] == Pieces(48, (Span("upper", 0, 16), Span("lower", 0, 32, 16)))
    assert made_of_base(manifest).keys() == {"lower", "upper"}
    assert has_other_names(manifest)


# Of a tensor of six rows of four numbers.
IMPOSSIBLE: dict[str, tuple[dict[str, Any], str]] = {
    "another tensor": ({"holds": "kept", "spans": {"other": "0 8 0"}}, "bytes of the base's other"),
    "another dtype": ({"holds": "kept", "spans": {"table": "0 8 0"}, "dtype": "BF16"}, "bytes of the base's table"),
    "beyond the base's": ({"holds": "kept", "spans": {"table": "44 8 0"}}, "bytes of the base's table"),
    "beyond it": ({"holds": "kept", "spans": {"table": "0 8 44"}}, "bytes of the base's table"),
    "runs beyond the base's": ({"holds": "kept", "spans": {"table": "0 4 0 6 16 8"}}, "bytes of the base's table"),
    "runs beyond it": ({"holds": "kept", "spans": {"table": "0 4 0 6 8 16"}}, "bytes of the base's table"),
    "one over another": ({"holds": "moved", "spans": {"table": "0 16 0", "row": "0 8 8"}}, "these bytes of the base"),
    "more than it has": (
        {"holds": "moved", "spans": {"table": "0 6 0 6 8 8; 0 6 6 5 8 8"}},
        "these bytes of the base",
    ),
    "nobody says how": ({"spans": {"table": "0 8 0"}}, "these bytes of the base"),
    "nothing is kept": ({"holds": "kept"}, "these bytes of the base"),
    "a copy of a part": ({"holds": "copied", "spans": {"table": "0 8 0"}}, "a copy of the base's table"),
    "a copy of another shape": ({"holds": "copied", "spans": {"experts": "0 48 0"}}, "a copy of the base's experts"),
    "runs over each other": ({"holds": "kept", "spans": {"table": "0 8 0 6 4 8"}}, r"runs over each other"),
    "runs of nothing": ({"holds": "kept", "spans": {"table": "0 0 0 6 0 0"}}, "runs over each other"),
    "no runs": ({"holds": "kept", "spans": {"table": "0 8 0 0 8 8"}}, "spans.table"),
    "before the first": ({"holds": "kept", "spans": {"table": "-8 8 0"}}, "spans.table"),
    "a number too few": ({"holds": "kept", "spans": {"table": "0 8"}}, "spans.table"),
    "nothing": ({"holds": "kept", "spans": {"table": ""}}, "spans.table"),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_spans_that_cannot_be(case: str) -> None:
    made, why = IMPOSSIBLE[case]
    with pytest.raises(BadInput, match=why) as refused:
        read({"new": {"shape": [6, 4]} | made})
    assert "\n" not in str(refused.value) and str(refused.value).startswith("surgery.json: ")


def test_bytes_that_are_no_slices_cannot_stay_while_others_train() -> None:
    made = read({"new": {"shape": [6, 4], "holds": "kept", "spans": {"table": "0 12 4"}}}).new_tensors["new"]
    with pytest.raises(BadInput, match=r"surgery\.json: a tensor of shape \[6, 4\] .* no slices of it; was it edited"):
        boxes_of(made.kept, made.shape, 16)


def test_sizes_that_a_manifest_claims_cost_nothing() -> None:
    """Every size is the file's word: nothing is made for each number of a tensor."""
    half = 10**9
    runs = f"0 {half} {half} {half} {2 * half} {2 * half}; {half} {half} 0 {half} {2 * half} {2 * half}"
    made = {"shape": [half, half], "holds": "kept", "spans": {"table": runs}}
    assert len(read({"new": made}, {"table": [half, half]}).new_tensors["new"].pieces.spans) == 2


@pytest.mark.parametrize(
    ("family", "structure"),
    [("llama", name) for name in ("copy", "ffn", "copied ffn", "attention", "hidden", "experts", "copied experts")]
    + [("phi3", "experts"), ("phi3", "ffn"), ("gemma4_text", "copy")],
)
def test_spans_are_read_as_they_were_meant(family: str, structure: str, tmp_path: Path) -> None:
    """They agree with the blueprint, which has the recipes themselves, and with the bytes of the output."""
    own = family in tiny.FAMILIES
    base = tiny.checkpoint(tmp_path / "base", family) if own else tiny_decoder(tmp_path / "base", family)
    (tmp_path / "plan.yaml").write_text(json.dumps({"surgeon": 1, "operations": STRUCTURES[structure]}))
    surgeon.apply(tmp_path / "plan.yaml", str(base), tmp_path / "out", device="cpu")
    of, out = (CheckpointFolder.open(folder) for folder in (base, tmp_path / "out"))
    manifest = manifest_of(out)
    planned = {o.name: o for o in Drawn.of(manifest, of.config, of.tensors, of.own, "").blueprint.outputs if o.new}
    assert planned.keys() == manifest.new_tensors.keys()
    for name, made in manifest.new_tensors.items():
        assert (made.pieces, made.kept) == (planned[name].recipe.own, planned[name].kept), name
        assert holds_pieces(out, name, made.pieces, of), name
