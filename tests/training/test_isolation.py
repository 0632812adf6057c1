"""Packed documents: isolated under every attention, and the probe before the first step finds where they are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import surgeon
from surgeon.common.listener import Quiet
from surgeon.errors import BadInput
from surgeon.models.load import load_model
from surgeon.training.gate_fitting import _states
from surgeon.training.isolation import Isolation, probe
from surgeon.training.steps import packed as packed_rows
from surgeon.training.steps.packed import builds_no_mask, give_masks_positions, run_in_one_row
from tests import tiny
from tests.decoders import tiny_decoder
from tests.training.attentions import (
    FLASH,
    Flash,
    by_segments,
    leaky_layer,
    no_mask,
    one_token_more,
    register,
    whole_rows,
)
from tests.training.test_by_document import LENGTHS, packed
from tests.training.test_train import base_of, config

__all__ = ["by_segments"]

SMALL: dict[str, Any] = {"num_hidden_layers": 2}
IDS = range(10, 110)


def measured(model: Any, *, length: int = 32) -> Isolation:
    model.config.use_cache = False
    return probe(model, length=length, micro_batch=4, packing="isolated", ids=IDS)


def opened(folder: Path, attention: str | None = None, family: str = "llama", **changes: Any) -> Any:
    changes = SMALL | {"dtype": "float32"} | changes
    return load_model(tiny.checkpoint(folder / family, family, **changes), attention=attention)


# Mixtures of experts group tokens, so that rounding depends on the neighbours.
@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", "bfloat16"), ("gemma3_text", "float32"), ("mixtral", "float32")]
)
def test_what_isolates_is_found_to(family: str, dtype: str, tmp_path: Path) -> None:
    small = {"num_local_experts": 4} if family == "mixtral" else {}
    model = opened(tmp_path, "eager", family, dtype=dtype, **small)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = measured(model)
    assert found.isolates
    assert family == "mixtral" or found.change == 0
    assert found.leaking > 0.1
    assert found.alone < 2e-2
    assert found.dtype == dtype
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "broken",
    ["takes no mask", "whole rows", "one token more", "layer 1 of an inserted one", "rows under flash attention"],
)
def test_what_is_broken_is_found_out(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_segments: Flash
) -> None:
    """Also where only the first token of a document sees one more, and where what leaks is silent at birth."""
    name = "broken"
    match broken:
        case "takes no mask":
            register(monkeypatch, name, no_mask)
        case "whole rows":
            register(monkeypatch, name, sdpa_attention_forward, whole_rows)
        case "one token more":
            register(monkeypatch, name, sdpa_attention_forward, one_token_more)
        case "layer 1 of an inserted one":
            from transformers.masking_utils import sdpa_mask

            register(monkeypatch, name, leaky_layer(1), sdpa_mask)
        case _:
            name = FLASH
    model = opened(tmp_path, name)
    if broken.startswith("layer"):
        # As a layer that a surgery inserted is born.
        for projection in (model.model.layers[1].self_attn.o_proj, model.model.layers[1].mlp.down_proj):
            projection.weight.data.zero_()
    if name != FLASH and builds_no_mask(model):
        run_in_one_row(model)
    found = measured(model)
    assert not found.isolates
    assert not found.by_grafts
    if broken.startswith("layer"):
        assert not model.model.layers[1].mlp.down_proj.weight.any()


# Sliding windows shorter than a document; keys and values that heads share.
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_flash_attention_gets_the_boundaries(family: str, tmp_path: Path, by_segments: Flash) -> None:
    """transformers' own code, with torch's attention of segments: losses, logits and gradients are eager's."""
    small = {"sliding_window": 4} if family == "mistral" else {}
    batch = packed(128)
    batch["labels"] = batch["labels"].masked_fill(batch["position_ids"] == 0, -100)
    found = []
    for attention in ("eager", FLASH):
        model = opened(tmp_path, attention, family, **small).train()
        model.config.use_cache = False
        assert builds_no_mask(model) == (attention == FLASH)
        if attention == FLASH:
            run_in_one_row(model)
        output = model(**batch)
        output.loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        # As a domain gate is fitted on.
        states = _states(model, model.model.layers[1], batch)
        found.append((output.loss, output.logits, gradients, states))
    boundaries = [length for row in LENGTHS for length in row]
    assert by_segments.seen == [boundaries] * 3
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        whole = model.eval()(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    torch.testing.assert_close(whole, found[0][1], rtol=1e-4, atol=1e-5)
    assert measured(model).isolates


def lines_of(folder: Path, to: str, **changes: Any) -> tuple[list[str], Any]:
    listener = Quiet()
    run = surgeon.train(folder / "out", config(folder, **changes), folder / to, device="cpu", listener=listener)
    assert run is not None
    return listener.said, run


def test_a_run_under_flash_attention_is_eagers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_segments: Flash
) -> None:
    """Held-out losses, steps and the teacher; where rows stay as they are, the run is refused before its first step."""
    base = base_of(tmp_path, dtype="float32", **SMALL)
    plan = {"op": "gated_adapters", "layers": [0], "size": 4, "local_loss": {"kind": "l1", "weight": 0.5}}
    inserted = {"op": "insert_layers", "where": {"after": [0]}, "init": {"kind": "copy"}}
    (tmp_path / "plan.yaml").write_text(json.dumps({"surgeon": 1, "operations": [inserted, plan]}))
    surgeon.apply(tmp_path / "plan.yaml", str(base), tmp_path / "out")
    curves = []
    for attention in ("eager", FLASH):
        changes = {"attention": attention, "preserve": {"loss": "kl", "weight": 5.0}, "steps": 3}
        said, run = lines_of(tmp_path, attention, **changes)
        assert "packing: documents isolated (checked)" in said
        curves.append([entry["loss"] for entry in run.log if "loss" in entry])
        curves[-1] += [before for before, _ in run.losses.values()]
        curves[-1] += [entry["loss.preserve"] for entry in run.log if "loss.preserve" in entry]
    assert curves[1] == pytest.approx(curves[0], rel=1e-4, abs=1e-5)
    monkeypatch.setattr(packed_rows, "run_in_one_row", lambda _model: None)
    path = config(tmp_path, attention=FLASH, steps=3)
    for call in (surgeon.train, surgeon.rehearse):
        with pytest.raises(BadInput, match=r"packed documents see each other under .*packing: joined"):
            call(tmp_path / "out", path, tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_what_cannot_run_packed_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_given: Any, **_named: Any) -> Any:
        raise ValueError("causal_conv1d cannot keep packed sequences apart here.\nMore of it.")

    register(monkeypatch, "fails", fails)
    base_of(tmp_path, dtype="float32", **SMALL)
    path = config(tmp_path, attention="fails", what="all")
    with pytest.raises(BadInput, match=r"does not run on packed documents .*apart here.; say another `attention`"):
        surgeon.train(tmp_path / "base", path, tmp_path / "run", device="cpu")


# Of transformers 5.23: the first does not hand positions to its masks, the second carries a state along the row.
def test_masks_get_positions_and_states_that_cross_are_refused(tmp_path: Path) -> None:
    gpt_oss = load_model(tiny_decoder(tmp_path / "gpt_oss", "gpt_oss"))
    assert not measured(gpt_oss).isolates
    give_masks_positions(gpt_oss)
    assert measured(gpt_oss).isolates

    modelling = packed_rows.sys.modules[type(gpt_oss).__module__]
    assert modelling.create_causal_mask is packed_rows.masking_utils.create_causal_mask
    hybrid = load_model(tiny_decoder(tmp_path / "hybrid", "lfm2_moe"))
    give_masks_positions(hybrid)
    assert not measured(hybrid).isolates


def test_grafts_that_read_a_batch_and_joined_documents_are_said(tmp_path: Path) -> None:
    base = base_of(tmp_path, dtype="float32", **SMALL)
    (tmp_path / "plan.yaml").write_text(
        json.dumps({"surgeon": 1, "operations": [{"op": "mixture_of_control", "rank": 4}]})
    )
    surgeon.apply(tmp_path / "plan.yaml", str(base), tmp_path / "out")
    said, _ = lines_of(tmp_path, "run", steps=2)
    assert "packing: documents isolated (checked)" in said
    assert any(line.startswith("what was added reads more than one document") for line in said)
    said, _ = lines_of(tmp_path, "joined", steps=2, packing="joined")
    assert "packing: documents joined, attention across them" in said
