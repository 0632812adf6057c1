"""The base inside a model: whatever was added and however it was trained, to the bit what the base computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import surgeon
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.errors import BadInput, SurgeonError
from surgeon.manifest.reading import manifest_of
from surgeon.manifest.trainable import trainable_set
from surgeon.manifest.within import Within, base_within
from surgeon.models.load import load_model
from surgeon.models.teacher import BaseWithin
from surgeon.operations import OPERATIONS
from surgeon.training.trainable.trainable_set import unfreeze
from tests import tiny
from tests.decoders import tiny_decoder

# Every operation that adds something: alone, so that none hides another.
ADDED: dict[str, list[dict[str, Any]]] = {
    "insert_layers": [{"op": "insert_layers", "where": {"after": [0, 2]}, "count": 2, "init": {"kind": "copy"}}],
    "control_llm": [{"op": "control_llm", "layers": [1], "interpolator": {"kind": "plerp"}}],
    "gated_adapters": [{"op": "gated_adapters", "layers": "all", "size": 8, "gate": "sigmoid"}],
    "pmoe_experts": [{"op": "pmoe_experts", "threshold": 2, "slots": 2}],
    "mixture_of_control": [{"op": "mixture_of_control", "rank": 4}],
    "domain_gate": [
        {"op": "insert_layers", "where": {"after": [1]}, "init": {"kind": "copy"}},
        {"op": "gated_adapters", "layers": "all", "size": 8},
        {"op": "domain_gate"},
    ],
}
# Those that leave nothing behind in which the base could be run: parts of wider tensors, modules of another class,
# layers that are gone, no model of their own.
REFUSED = {
    "upcycle_experts": ({"op": "upcycle_experts", "experts": 4}, "in a module of another kind"),
    "drop_layers": ({"op": "drop_layers", "layers": [2]}, "layer 2: taken out by surgery 1"),
    "widen_ffn": ({"op": "widen_ffn", "by": 8}, "a part of a wider tensor"),
    "widen_attention": ({"op": "widen_attention", "groups": 2}, "a part of a wider tensor"),
    "widen_hidden": ({"op": "widen_hidden", "times": 2}, "a part of a wider tensor"),
    "pad_to": ({"op": "pad_to", "tensor_parallel": 8}, "a part of a wider tensor"),
}
NOT_WITHIN = {
    *("stack_layers", "merge_adapter", "merge_branches", "fold_adapters", "grow_vocabulary", "imported_lora"),
    *("trim_vocabulary", "dequantise", "drop_experts", "add_experts"),
    # In tests of their own.
    *("untie_embeddings", "extract_text"),
}


def added(folder: Path, base: Path, operations: list[dict[str, Any]]) -> tuple[Any, Within]:
    """An output all of whose new tensors have grown far from their birth, and where its base is."""
    (folder / "plan.yaml").write_text(json.dumps({"surgeon": 1, "operations": operations}))
    surgeon.apply(folder / "plan.yaml", str(base), folder / "out")
    out = CheckpointFolder.open(folder / "out")
    wanted = trainable_set(out, manifest_of(out), "last")
    model = load_model(out)
    drawn = torch.Generator().manual_seed(1)
    for name in unfreeze(model, wanted, base_names=out.tensors):
        parameter = model.get_parameter(name)
        noise = torch.randn(parameter.shape, generator=drawn).to(parameter.dtype)
        parameter.data = parameter.data + 0.2 * noise
    for name in wanted.fitted:
        if name.endswith(".threshold"):
            # Below every score: the gate is open.
            model.get_buffer(name).fill_(-1.0)
    return model, base_within(out, manifest_of(out), training=wanted.names)


def check_same(model: Any, within: Within, base: Any) -> None:
    ids = torch.randint(3, 100, (3, 20), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected, grown = base(ids).logits, model(ids).logits
    assert not torch.equal(grown, expected)
    teacher = BaseWithin(model.train(), layers=within.layers, inserted=within.inserted, grafts=within.grafts)
    assert torch.equal(teacher.logits(input_ids=ids), expected)
    # Everything is back where it was, and training goes on.
    assert model.training
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, grown)


@pytest.mark.parametrize("operation", ADDED)
@pytest.mark.parametrize("family", ["gemma2", "falcon"])
def test_it_is_the_base_to_the_bit(operation: str, family: str, tmp_path: Path) -> None:
    """A described family, in bfloat16, and a derived one, in float32."""
    if family == "gemma2":
        base = tiny.checkpoint(tmp_path / "base", family)
    else:
        base = tiny_decoder(tmp_path / "base", family)
    operations = ADDED[operation]
    if family == "falcon" and operation == "pmoe_experts":
        operations = [{**operations[0], "targets": ["query_key_value"]}]
    model, within = added(tmp_path, base, operations)
    assert within.newborn
    check_same(model, within, load_model(base))


def test_of_several_surgeries_the_first_base(tmp_path: Path) -> None:
    base = tiny.checkpoint(tmp_path / "base", "llama")
    (tmp_path / "first.yaml").write_text(json.dumps({"surgeon": 1, "operations": ADDED["gated_adapters"]}))
    surgeon.apply(tmp_path / "first.yaml", str(base), tmp_path / "first")
    more = ADDED["insert_layers"] + ADDED["mixture_of_control"]
    model, within = added(tmp_path, tmp_path / "first", more)
    assert (within.layers, within.inserted) == (8, (1, 4))
    check_same(model, within, load_model(base))


def test_new_grafts_beside_old_ones_are_not_switched_off_alone(tmp_path: Path) -> None:
    base = tiny.checkpoint(tmp_path / "base", "llama")
    for name, operation in (("first", "gated_adapters"), ("second", "mixture_of_control")):
        (tmp_path / "plan.yaml").write_text(json.dumps({"surgeon": 1, "operations": ADDED[operation]}))
        surgeon.apply(tmp_path / "plan.yaml", str(base), tmp_path / name)
        base = tmp_path / name
    out = CheckpointFolder.open(base)
    assert not base_within(out, manifest_of(out)).grafts
    with pytest.raises(BadInput, match="the last surgery grafted onto a model that had grafts"):
        base_within(out, manifest_of(out), last=True)


def test_every_operation_is_here() -> None:
    assert ADDED.keys() | REFUSED.keys() | NOT_WITHIN >= set(OPERATIONS)


@pytest.mark.parametrize("name", REFUSED)
def test_where_the_base_cannot_be_run_is_said(name: str, tmp_path: Path) -> None:
    operation, reason = REFUSED[name]
    (tmp_path / "plan.yaml").write_text(json.dumps({"surgeon": 1, "operations": [operation]}))
    surgeon.apply(tmp_path / "plan.yaml", str(tiny.checkpoint(tmp_path / "base", "llama")), tmp_path / "out")
    out = CheckpointFolder.open(tmp_path / "out")
    with pytest.raises(BadInput, match=reason):
        base_within(out, manifest_of(out))


def test_what_is_no_longer_within_is_refused(tmp_path: Path) -> None:
    base = tiny.checkpoint(tmp_path / "base", "llama")
    control = {"op": "control_llm", "layers": [1], "interpolator": {"kind": "lerp", "alpha": 0.5}}
    (tmp_path / "plan.yaml").write_text(json.dumps({"surgeon": 1, "operations": [control]}))
    surgeon.apply(tmp_path / "plan.yaml", str(base), tmp_path / "out")
    (tmp_path / "merge.yaml").write_text(json.dumps({"surgeon": 1, "operations": [{"op": "merge_branches"}]}))
    surgeon.apply(tmp_path / "merge.yaml", str(tmp_path / "out"), tmp_path / "merged")
    merged = CheckpointFolder.open(tmp_path / "merged")
    with pytest.raises(BadInput, match="so its earlier value is lost; take the base of that surgery"):
        base_within(merged, manifest_of(merged))
    out = CheckpointFolder.open(tmp_path / "out")
    assert base_within(out, manifest_of(out), training=["model.norm.weight"]).apart
    assert not base_within(out, manifest_of(out), training=[]).apart


def test_a_model_that_does_something_else_without_its_grafts_is_found_out(tmp_path: Path) -> None:
    model = tiny.model("llama")
    teacher = BaseWithin(model, layers=6, inserted=[])
    ids = torch.arange(3, 15)[None]
    teacher.check(ids, None)
    # A layer more than the manifest says is not the base's.
    with pytest.raises(SurgeonError, match="does not compute what the base does"):
        BaseWithin(model, layers=6, inserted=[2]).check(ids, None)
    with pytest.raises(BadInput, match="its list of 7 layers is not found"):
        BaseWithin(model, layers=7, inserted=[2])
