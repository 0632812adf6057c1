"""`surgeon families`: the answers are those of the code that refuses, for usual and for other model types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import surgeon
from surgeon.anatomy.decoders import USUAL_DECODERS, USUAL_ENCODERS
from surgeon.cli import app
from surgeon.errors import BadInput
from surgeon.lab.reports.families import Families, KnownBase, Trial
from surgeon.operations import OPERATIONS
from surgeon.operations.insert_layers import InsertLayers
from tests import tiny
from tests.decoders import tiny_decoder

# Whose answers are compared with a preview's; every trial takes the same way.
SOME = ("insert_layers", "gated_adapters", "widen_ffn", "merge_branches")


def known(base: Path) -> KnownBase:
    found = surgeon.families(base)
    assert isinstance(found, KnownBase)
    return found


def previewed(trial: Trial, base: Path) -> tuple[str | None, str]:
    """What `surgeon preview` says of a plan that asks for what was tried."""
    entry = json.dumps({"op": trial.op, **trial.options})
    try:
        return surgeon.preview(surgeon.parse_plan(f"surgeon: 1\noperations: [{entry}]"), base).blueprint.promise, ""
    except BadInput as error:
        return None, str(error).partition(f"({trial.op}): ")[2] or str(error)


def test_all_families_are_listed() -> None:
    found = surgeon.families()
    assert isinstance(found, Families)
    assert found.decoders == dict.fromkeys(USUAL_DECODERS, tuple(OPERATIONS))
    assert found.encoders == dict.fromkeys(USUAL_ENCODERS, ("mixture_of_control",))
    shown = CliRunner().invoke(app, ["families"])
    assert shown.exit_code == 0
    for name in (*USUAL_DECODERS, *USUAL_ENCODERS):
        assert name in shown.output
    assert f"so is any other text decoder or encoder of the installed transformers ({found.derived_by})" in shown.output
    assert json.loads(CliRunner().invoke(app, ["families", "--json"]).output) == found.to_json()


def test_a_usual_base_with_two_types_of_layers(tmp_path: Path) -> None:
    base = tiny.checkpoint(tmp_path / "base", "gemma3_text", num_hidden_layers=12)
    found = known(base)
    assert (found.model_type, found.period) == ("gemma3_text", 6)
    assert {kind.title: kind.layers for kind in found.kinds} == {
        "sliding_attention": (0, 1, 2, 3, 4, 6, 7, 8, 9, 10),
        "full_attention": (5, 11),
    }
    norms = {"post_attention_layernorm.weight": -1.0, "post_feedforward_layernorm.weight": -1.0}
    assert all((kind.silence, kind.refusal) == (norms, "") for kind in found.kinds)
    refused = {trial.op: trial.refusal for trial in found.trials if trial.promise is None}
    assert refused.keys() == {
        *("merge_branches", "fold_adapters", "grow_vocabulary", "upcycle_experts", "widen_attention", "widen_hidden"),
        "merge_adapter",
        "extract_text",
        *("trim_vocabulary", "dequantise", "drop_experts", "add_experts"),
    }
    # One group of heads more would not divide its hidden size; two do.
    assert found.takes("widen_attention")
    assert "no tokenizer.json" in refused["grow_vocabulary"]
    some = [trial for trial in found.trials if trial.op in SOME]
    assert [(trial.promise, trial.refusal) for trial in some] == [previewed(each, base) for each in some]

    surgeon.apply("control-llm", base, tmp_path / "out")
    assert known(tmp_path / "out").takes("merge_branches")


def test_an_encoder(tmp_path: Path) -> None:
    found = known(tiny.checkpoint(tmp_path / "base", "roberta"))
    assert [op for op in OPERATIONS if found.takes(op)] == ["mixture_of_control"]
    assert [(len(kind.layers), kind.silence) for kind in found.kinds] == [(6, {})]
    refused = [trial for trial in found.trials if trial.promise is None]
    assert all("the base is an encoder (roberta)" in trial.refusal for trial in refused)
    shown = CliRunner().invoke(app, ["families", str(tmp_path / "base")], env={"COLUMNS": "200"})
    # One sentence once.
    assert shown.output.count("the base is an encoder") == 2
    assert shown.output.count("the same") == len(refused) - 2


# Jamba with a shorter period.
EXPERTS = {"expert_layer_period": 2, "expert_layer_offset": 1}

DERIVED: dict[str, tuple[dict[str, Any], int | None, dict[str, str], dict[str, str]]] = {
    # Kinds: what silences each, or why nothing does; operations: words of the first refusal.
    "jamba": (
        {"layers": 8, "attn_layer_period": 4, "attn_layer_offset": 2, **EXPERTS},
        4,
        {
            "JambaMambaMixer, JambaMLP": "mamba.out_proj.weight",
            "JambaMambaMixer, JambaSparseMoeBlock": "feed_forward.experts.0.down_proj.weight",
            "JambaAttention, JambaMLP": "self_attn.o_proj.weight",
        },
        {
            "insert_layers": "would be another kind",
            "merge_branches": "no control block to merge",
        },
    ),
    "bart": (
        {},
        1,
        {"BartAttention, GELUActivation, BartAttention, Linear, Linear": "even with all its weights zero"},
        {"insert_layers": "even with all its weights zero"},
    ),
}


@pytest.mark.parametrize("model_type", DERIVED)
def test_a_derived_base(model_type: str, tmp_path: Path) -> None:
    changes, period, kinds, refusals = DERIVED[model_type]
    base = tiny_decoder(tmp_path / "base", model_type, **changes)
    found = known(base)
    assert (found.model_type, found.period) == (model_type, period)
    assert "found on a twin" in found.evidence
    assert sorted(layer for kind in found.kinds for layer in kind.layers) == list(
        range({"jamba": 8, "bart": 4}[model_type])
    )
    assert [kind.title for kind in found.kinds] == list(kinds)
    for kind in found.kinds:
        assert kinds[kind.title] in kind.silence or kinds[kind.title] in kind.refusal
    for op, words in refusals.items():
        assert any(words in trial.refusal for trial in found.trials if trial.op == op), op
    assert found.takes("insert_layers") is (model_type == "jamba")
    trials = [trial for trial in found.trials if trial.op in SOME]
    assert {trial.promise is None for trial in trials} == {True, False}
    assert [(trial.promise, trial.refusal) for trial in trials] == [previewed(t, base) for t in trials]
    if model_type == "bart":
        told = json.loads(CliRunner().invoke(app, ["families", str(base), "--json"]).output)
        told["evidence"] = found.evidence  # the seconds that it took
        assert told == json.loads(json.dumps(found.to_json()))


def test_an_operation_whose_examples_say_too_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin may need options and name no examples."""
    monkeypatch.setattr(InsertLayers, "examples", ({},))
    found = known(tiny.checkpoint(tmp_path / "base", "llama"))
    (trial,) = (trial for trial in found.trials if trial.op == "insert_layers")
    assert trial.promise is None
    assert "not tried" in trial.refusal and "`where` Field required; `init` Field required" in trial.refusal


def test_what_is_no_base(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="name the base too"):
        surgeon.families(revision="main")
    base = tiny.checkpoint(tmp_path / "base", "llama")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"model_type": "nobody_s"}))
    ran = CliRunner().invoke(app, ["families", str(base)])
    assert ran.exit_code == 2
    assert "nobody_s" in ran.output
