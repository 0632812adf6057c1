"""Decoders with a head for labels or answers: layers and grafts, verified by what the head puts out, and undone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

import surgeon
from surgeon.errors import BadInput
from tests import tiny
from tests.checkpoints import edit_tensor
from tests.decoders import tiny_decoder

HEADS = ("SequenceClassification", "TokenClassification", "QuestionAnswering")
# Llama's head for answers calls the base model otherwise; Gemma 2 has none; Mixtral's layers are experts.
CASES = [("llama", head) for head in HEADS] + [("gemma2", head) for head in HEADS[:2]] + [("mixtral", HEADS[0])]
OPERATIONS: list[dict[str, Any]] = [
    {"op": "insert_layers", "where": {"after": [1]}, "init": {"kind": "copy"}},
    {"op": "gated_adapters", "layers": [0], "size": 8, "gate": "sigmoid"},
    {"op": "control_llm", "layers": [2]},
]


def classifier(folder: Path, family: str, head: str, *, padding: int | None = 0, labels: int = 3) -> Path:
    """A tiny checkpoint of that head, untied and random, with as many labels as there may be layers."""
    made = tiny_decoder(folder / "causal", family) if family == "mixtral" else None
    config = tiny.config(family, num_hidden_layers=4) if made is None else transformers.AutoConfig.from_pretrained(made)
    config.num_labels, config.pad_token_id = labels, padding
    torch.manual_seed(4)
    model = getattr(transformers, f"AutoModelFor{head}").from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(0.0 if value.ndim > 1 else 1.0, 0.1)
    model.save_pretrained(folder / "base")
    return folder / "base"


def plan_of(folder: Path, *operations: dict[str, Any]) -> Path:
    (folder / "plan.yaml").write_text(yaml.safe_dump({"surgeon": 1, "operations": list(operations)}))
    return folder / "plan.yaml"


@pytest.mark.parametrize(("family", "head"), CASES)
def test_a_decoder_with_another_head_is_operated_on(family: str, head: str, tmp_path: Path) -> None:
    base, out = classifier(tmp_path, family, head), tmp_path / "out"
    surgeon.apply(plan_of(tmp_path, *OPERATIONS), base, out)
    found = surgeon.verify(base, out, window=12, windows=3, dtypes=["auto", "float32"])
    assert found.holds and found.identical and [each.dtype for each in found.comparisons] == ["bfloat16", "float32"]
    # Labels have numbers as layers have, and stay.
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (base, out))
    assert before.get("id2label") == after.get("id2label")
    model = getattr(transformers, f"AutoModelFor{head}").from_pretrained(out, trust_remote_code=True)
    assert type(model).__name__ == f"Upcycled{type(model).native_class().__name__}"
    assert f"For{head}" in type(model).__name__
    surgeon.revert(out, tmp_path / "back")
    assert surgeon.diff(base, tmp_path / "back").same


def test_what_the_head_holds_is_compared(tmp_path: Path) -> None:
    """A head that was changed by a bit is found in its bytes; without these, by what it puts out."""
    from surgeon.models.outputs import auto_class, compare_outputs

    base, out = classifier(tmp_path, "llama", HEADS[0], padding=None), tmp_path / "out"
    surgeon.apply(plan_of(tmp_path, *OPERATIONS), base, out)
    ids = torch.arange(24).view(2, 12)
    auto = auto_class(json.loads((base / "config.json").read_text()))
    assert auto == f"AutoModelFor{HEADS[0]}" and compare_outputs(base, out, ids, auto=auto).identical
    edit_tensor(out, "score.weight", lambda value: value * 1.01)
    assert not surgeon.verify(base, out).holds
    assert not compare_outputs(base, out, ids, auto=auto).identical
    with pytest.raises(BadInput, match="head for labels or answers, which is compared whole; leave out --streamed"):
        surgeon.verify(base, out, streamed=True)


def test_widths_are_the_same_to_rounding(tmp_path: Path) -> None:
    base, out = classifier(tmp_path, "llama", HEADS[1]), tmp_path / "out"
    surgeon.apply(plan_of(tmp_path, {"op": "widen_ffn", "by": 16}), base, out)
    found = surgeon.verify(base, out, window=12, windows=2, dtypes=["float32"])
    assert found.holds and all(each.rounded for each in found.comparisons)
