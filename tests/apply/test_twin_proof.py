"""Exactness is stated once a twin has proven it; a family or plan that is wrong is refused before a byte is written."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

import surgeon
from surgeon.apply.apply import Applied, applied_view
from surgeon.apply.preview import open_headers
from surgeon.apply.twin_proof import prove_blueprint
from surgeon.blueprint.blueprint import Blueprint
from surgeon.blueprint.recipes import Constant, Copy, renamed
from surgeon.common import cache
from surgeon.errors import BadInput
from surgeon.families import anatomy_cache, derived, grafting, silence
from surgeon.families.dissect import dissect
from surgeon.families.twin import twin_of
from tests import tiny
from tests.decoders import tiny_decoder

INSERT = {"op": "insert_layers", "where": {"after": [1, 3]}, "init": {"kind": "copy"}}
WITHOUT_LISTS = {"no_rope_layers": None, "layer_types": None, "no_rope_layer_interval": 4}


def plan_of(folder: Path, *operations: dict[str, Any]) -> Path:
    (folder / "plan.yaml").write_text(yaml.safe_dump({"surgeon": 1, "operations": list(operations)}))
    return folder / "plan.yaml"


def changed(folder: Path, **fields: Any) -> Path:
    """The checkpoint with other fields in its config.json; None takes one out."""
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps({key: each for key, each in config.items() if each is not None}))
    return folder


@pytest.mark.parametrize("left_out", [False, True])
def test_lists_that_a_class_derives_are_those_of_the_output(left_out: bool, tmp_path: Path) -> None:
    """Every fourth of SmolLM3's layers has no rotary embedding: the list of them follows from an interval."""
    base = changed(tiny_decoder(tmp_path / "base", "smollm3", layers=6), **(WITHOUT_LISTS if left_out else {}))
    surgeon.apply(plan_of(tmp_path, INSERT), base, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["no_rope_layers"] == [1, 1, 1, 1, 0, 0, 1, 1]
    assert config["layer_types"] == ["full_attention"] * 8
    found = surgeon.verify(base, tmp_path / "out", window=16, windows=1)
    assert found.holds and found.identical


def test_a_gate_that_is_shut_for_a_twins_tokens_is_not_one_that_never_learns(tmp_path: Path) -> None:
    """A ReLU gate of one layer alone may pass none of a dozen tokens: its gradient is then looked for elsewhere."""
    base = tiny.checkpoint(tmp_path / "base", "llama", num_hidden_layers=2, vocab_size=320)
    surgeon.apply(plan_of(tmp_path, {"op": "gated_adapters", "layers": [1], "size": 8}), base, tmp_path / "out")


def test_a_wrong_finding_is_refused_before_a_byte_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once what is to be silent was found wrongly, the twin of the output computes something else."""
    base = changed(tiny_decoder(tmp_path / "base", "smollm3", layers=6), **WITHOUT_LISTS)
    search = silence._search

    def wrong(run: silence.Run, shared: tuple[str, ...]) -> silence.Silence:
        found = search(run, shared)
        return replace(found, values={"self_attn.q_proj.weight": 0.0, "mlp.down_proj.weight": 0.0})

    monkeypatch.setattr(silence, "_search", wrong)
    derived._derived.cache_clear()
    try:
        with pytest.raises(BadInput, match=r"on a twin of this model .*layer [23] of the output"):
            surgeon.apply(plan_of(tmp_path, INSERT), base, tmp_path / "out")
    finally:
        derived._derived.cache_clear()
    assert {path.name for path in tmp_path.iterdir()} == {"base", "plan.yaml"}


def with_constants(blueprint: Blueprint) -> Blueprint:
    """New tensors that should be zero are not."""
    outputs = [
        replace(o, recipe=replace(o.recipe, value=0.5)) if o.new and isinstance(o.recipe, Constant) else o
        for o in blueprint.outputs
    ]
    return replace(blueprint, outputs=tuple(outputs))


def with_another_source(blueprint: Blueprint) -> Blueprint:
    """A base tensor of the lowest layer stands in the one above, and the other way round."""
    sources = {
        f"model.layers.{n}.self_attn.v_proj.weight": f"model.layers.{1 - n}.self_attn.v_proj.weight" for n in (0, 1)
    }
    outputs = [
        replace(o, recipe=renamed(o.recipe, sources[o.recipe.source]))
        if isinstance(o.recipe, Copy) and o.recipe.source in sources
        else o
        for o in blueprint.outputs
    ]
    return replace(blueprint, outputs=tuple(outputs))


PLANS = {
    "llama-pro": with_constants,
    "control-llm/stack": with_constants,
    "control-llm": with_another_source,
    "neutral-residues": with_constants,
    "pmoe": with_constants,
    "mixture-of-control": with_constants,
    "upcycle-experts": with_constants,
    "upcycle-experts/beside": with_constants,
    "grow-vocabulary": with_another_source,
    # On a base with slots of an earlier task.
    "pmoe/next-task": with_constants,
}


@pytest.mark.parametrize("plan", PLANS)
def test_the_proof_fails_where_the_plan_is_carried_out_otherwise(plan: str, tmp_path: Path) -> None:
    base = tiny.base_for(plan, tmp_path)
    drawn = surgeon.preview(plan, base).blueprint
    folder = open_headers(base, revision=None, trust_remote_code=False)
    anatomy = dissect(folder.config, folder.tensors)
    assert drawn.promise == "exact"
    prove_blueprint(drawn, anatomy, folder.config)
    with pytest.raises(BadInput, match="on a twin"):
        prove_blueprint(PLANS[plan](drawn), anatomy, folder.config)


@pytest.fixture
def proofs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where proofs are kept, none at first."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "proofs"


def shown(applied: Applied) -> str:
    told = io.StringIO()
    Console(file=told, width=300).print(applied_view(applied))
    return told.getvalue()


def how(base: Path) -> str:
    found: str = surgeon.preview("llama-pro", base).proof.how
    return found


def test_a_promise_says_how_it_is_known(proofs: Path, tmp_path: Path) -> None:
    base = tiny.checkpoint(tmp_path / "base", "llama")
    before = surgeon.preview("llama-pro", base)
    assert before.proof.text == before.to_json()["proof"]["text"]
    assert before.proof.text.startswith("proven on a twin (") and proofs.exists()
    # What writes proves it again.
    first, second = (surgeon.apply("llama-pro", base, tmp_path / name) for name in ("first", "second"))
    (entry,) = proofs.iterdir()
    assert entry.stat().st_mode & 0o077 == 0
    assert surgeon.preview("llama-pro", base).proof.text.startswith("proven on a twin of this config before (cached ")
    assert "promise exact: proven on a twin (" in shown(first) and "promise exact: proven on a twin (" in shown(second)
    assert set(second.manifest.proven) == {"transformers", "torch"}
    assert (tmp_path / "first" / "surgery.json").read_bytes() == (tmp_path / "second" / "surgery.json").read_bytes()
    assert "a tiny model of the same config" in (tmp_path / "second" / "README.md").read_text()
    # A further preview takes no torch.
    code = (
        "import sys, surgeon; assert surgeon.preview('llama-pro', sys.argv[1]).proof.how == 'cached';"
        " assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, base], check=True)
    plain = surgeon.apply("solar", base, tmp_path / "solar")
    assert plain.preview.proof.text == "" and plain.manifest.proven == {}


def test_another_config_version_or_code_is_proven_anew(
    proofs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny.checkpoint(tmp_path / "base", "llama")
    surgeon.apply("llama-pro", base, tmp_path / "out")
    assert how(base) == "cached"
    assert surgeon.preview("copy", base).proof.how != "cached"
    assert how(changed(tiny.checkpoint(tmp_path / "other", "llama"), rope_theta=5000.0)) == "proven"
    for name, value in (("versions", lambda: {"transformers": "0", "torch": "0"}), ("_code", lambda: "another")):
        with monkeypatch.context() as patched:
            patched.setattr(anatomy_cache, name, value)
            assert how(base) == "proven"
    whole = {entry: entry.read_bytes() for entry in proofs.iterdir()}
    for damaged in (lambda _: b"{", lambda _: b"[]", lambda held: held.replace(b'"key":"', b'"key":"0')):
        for entry, held in whole.items():
            entry.write_bytes(damaged(held))
        assert how(base) == "proven"


def test_a_refusal_is_not_kept(proofs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny.checkpoint(tmp_path / "base", "llama")

    def refused(*_given: object) -> None:
        raise BadInput("on a twin of this model nothing is as it was")

    monkeypatch.setattr(sys.modules["surgeon.apply.twin_proof"], "prove_blueprint", refused)
    for _ in range(2):
        with pytest.raises(BadInput, match="on a twin"):
            surgeon.apply(plan_of(tmp_path, INSERT), base, tmp_path / "out")
    assert not proofs.exists()


def test_a_graft_that_no_gradient_reaches_is_refused(tmp_path: Path) -> None:
    """A gate that is shut whatever it reads."""
    base = tiny.checkpoint(tmp_path / "base", "llama")
    drawn = surgeon.preview(plan_of(tmp_path, {"op": "gated_adapters", "layers": [1], "size": 4}), base).blueprint
    twin = twin_of(json.loads((base / "config.json").read_text()))
    model = grafting.with_grafts(twin, drawn.config, heads=2)
    (gate,) = (module for module in model.modules() if type(module).__name__ == "BlockGate")
    gate.register_forward_hook(lambda _module, _given, score: -score.abs())
    with pytest.raises(BadInput, match="get no gradient"):
        grafting.check_grafts(twin, replace(twin, model=model))


def in_another_order(blueprint: Blueprint) -> Blueprint:
    """Of a tensor with a part for each layer, the first two parts stand in each other's place."""
    outputs = []
    for output in blueprint.outputs:
        spans = output.recipe.spans if isinstance(output.recipe, Copy) and output.recipe.source is None else ()
        if len(spans) > 1 and spans[0].count > 1:
            one, other = spans[0], replace(spans[1], at=spans[0].at)
            swapped = replace(output.recipe, spans=(other, replace(one, at=other.length), *spans[2:]))
            output = replace(output, recipe=swapped)
        outputs.append(output)
    assert outputs != list(blueprint.outputs)
    return replace(blueprint, outputs=tuple(outputs))


def test_columns_that_belong_to_layers_are_proven_on_a_twin(tmp_path: Path) -> None:
    """Gemma 4's embeddings for each layer lie side by side: a layer's are the same columns of every row."""
    base = tiny_decoder(tmp_path / "base", "gemma4_text", hidden_size_per_layer_input=8)
    drawn = surgeon.preview(plan_of(tmp_path, INSERT), base).blueprint
    folder = open_headers(base, revision=None, trust_remote_code=False)
    anatomy = dissect(folder.config, folder.tensors)
    prove_blueprint(drawn, anatomy, folder.config)
    with pytest.raises(BadInput, match="on a twin"):
        prove_blueprint(in_another_order(drawn), anatomy, folder.config)
