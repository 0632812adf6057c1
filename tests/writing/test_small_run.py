"""A promise is stated once the program, run small, has kept it; what is wrong is refused before a byte is written."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

import surgeon
from surgeon.anatomy import anatomy_cache, derivation, derived, silence
from surgeon.anatomy.dissect import dissect
from surgeon.blueprint.blueprint import Blueprint
from surgeon.blueprint.draft import Draft
from surgeon.blueprint.recipes import Constant, Copy, renamed
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.common import cache
from surgeon.errors import BadInput
from surgeon.grafts import bundle as bundle_module
from surgeon.manifest import compose
from surgeon.operations import insert_layers
from surgeon.writing import job, small_run, surgery
from surgeon.writing.apply import Applied, applied_view
from tests import tiny
from tests.checkpoints import write_plan
from tests.decoders import tiny_decoder

# What plants a mistake in the program.
Fault = Callable[[pytest.MonkeyPatch], None]

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


@pytest.fixture(autouse=True)
def _nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another test proved says nothing of a mistake that is planted here."""
    monkeypatch.setenv(cache.VARIABLE, "off")


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
        with pytest.raises(
            BadInput, match=r"on a twin of this model, the logits .* are not the base's, .*`zero_init: false`"
        ):
            surgeon.apply(plan_of(tmp_path, INSERT), base, tmp_path / "out")
    finally:
        derived._derived.cache_clear()
    assert {path.name for path in tmp_path.iterdir()} == {"base", "plan.yaml"}


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


def with_constants(blueprint: Blueprint) -> Blueprint:
    """New tensors that should be zero are not."""
    outputs = [
        replace(o, recipe=replace(o.recipe, value=0.5)) if o.new and isinstance(o.recipe, Constant) else o
        for o in blueprint.outputs
    ]
    return replace(blueprint, outputs=tuple(outputs))


def drawing(change: Callable[[Blueprint], Blueprint]) -> Fault:
    """A planner that makes something else of every plan."""

    def planted(patch: pytest.MonkeyPatch) -> None:
        finish = Draft.finish
        patch.setattr(Draft, "finish", lambda draft: change(finish(draft)))

    return planted


def half_silent(patch: pytest.MonkeyPatch) -> None:
    """Of what silences a new layer, the last tensor keeps its numbers."""
    silence = insert_layers.silence

    def left(tensors: Any, kind: Any) -> Any:
        last = list(kind.silence)[-1]
        return silence(tensors, kind) | {last: tensors[last]}

    patch.setattr(insert_layers, "silence", left)


def settings_of_other_layers(patch: pytest.MonkeyPatch) -> None:
    """Every list of the config with an entry a layer is the wrong way round, or the rotary base is another."""
    grown = derivation.Derivation.grown

    def turned(found: Any, order: Any, opened: Any = ()) -> Any:
        made = grown(found, order, opened)
        return made | (
            {"layer_types": types[::-1]}
            if len(set(types := made.get("layer_types") or ())) > 1
            else {"rms_norm_eps": 0.1}
        )

    patch.setattr(derivation.Derivation, "grown", turned)


def bytes_of_another_place(patch: pytest.MonkeyPatch) -> None:
    """The writer takes a tensor's bytes from where another lies, and so does what reads back."""
    places_in = job.places_in

    def moved(tensors: Any, shards: Any) -> Any:
        places = dict(places_in(tensors, shards))
        one, other = (f"model.layers.{n}.mlp.up_proj.weight" for n in (0, 1))
        places[one], places[other] = places[other], places[one]
        return places

    patch.setattr(surgery, "places_in", moved)


def code(old: bytes, new: bytes) -> Fault:
    """What ships computes something else."""

    def planted(patch: pytest.MonkeyPatch) -> None:
        joined = bundle_module._joined

        def changed(*given: Any) -> bytes:
            made = joined(*given)
            assert old in made
            return made.replace(old, new)

        patch.setattr(bundle_module, "_joined", changed)

    return planted


def manifest_of_other_layers(patch: pytest.MonkeyPatch) -> None:
    """surgery.json says of every layer of the base that it is the one below."""
    layers_of = compose._layers_of

    def shifted(blueprint: Blueprint) -> Any:
        return [
            each if not each.base else each.model_copy(update={"base": each.base - 1}) for each in layers_of(blueprint)
        ]

    patch.setattr(compose, "_layers_of", shifted)


def manifest_of_other_digests(patch: pytest.MonkeyPatch) -> None:
    """surgery.json has the digests of other bytes."""
    new_of = compose._new_tensors_of

    def other(*given: Any) -> Any:
        return {name: each.model_copy(update={"sha256": "0" * 64}) for name, each in new_of(*given).items()}

    patch.setattr(compose, "_new_tensors_of", other)


INSERT_ONE = {"op": "insert_layers", "where": {"after": [1]}, "init": {"kind": "copy"}}
ADAPTERS = {"op": "gated_adapters", "size": 8, "gate": "none", "local_loss": "none"}
CONTROL = {"op": "control_llm", "layers": [1], "interpolator": {"kind": "lerp", "alpha": 0.3}}
FAULTS: dict[str, tuple[dict[str, Any], Fault]] = {
    "one writer is not silenced": (INSERT_ONE, half_silent),
    "another source": (ADAPTERS, drawing(with_another_source)),
    "no zeros": (ADAPTERS, drawing(with_constants)),
    "settings of other layers": (INSERT_ONE, settings_of_other_layers),
    "bytes of another place": (ADAPTERS, bytes_of_another_place),
    "code adds what it reads": (ADAPTERS, code(b"output = self.down_proj(", b"output = 1e-2 * x + self.down_proj(")),
    "code weighs both branches": (CONTROL, code(b"p.lerp(e, alpha)", b"(1 - alpha) * p + alpha * e")),
    "manifest of other layers": (INSERT_ONE, manifest_of_other_layers),
    "manifest of other digests": (ADAPTERS, manifest_of_other_digests),
}


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_of_the_program_is_noticed_before_a_byte_is_written(
    fault: str, model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In planner, writer, shipped code or manifest; on a twin that is random everywhere."""
    operation, planted = FAULTS[fault]
    base, plan = tiny.checkpoint(tmp_path / "base", model_type), plan_of(tmp_path, operation)
    planted(monkeypatch)
    with pytest.raises(BadInput, match="on a twin of this model"):
        surgeon.apply(plan, base, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"base", "plan.yaml"}


@pytest.mark.parametrize("plan", ["grow-vocabulary", "pmoe/next-task", "upcycle-experts", "upcycle-experts/beside"])
def test_a_plan_that_makes_no_zeros_is_noticed(plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a base with slots of an earlier task; where a vocabulary grows, the old rows stand elsewhere."""
    base = tiny.base_for(plan, tmp_path)
    drawing(with_another_source if plan == "grow-vocabulary" else with_constants)(monkeypatch)
    with pytest.raises(BadInput, match="on a twin of this model"):
        surgeon.apply(plan, base, tmp_path / "out")


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3", "gemma4_text"])
def test_each_tensor_that_must_be_silent_counts(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other keeps the numbers of the layer that the new one is a copy of."""
    base = tiny_decoder(tmp_path / "base", model_type)
    silence = insert_layers.silence
    folder = CheckpointFolder.open(base)
    anatomy = dissect(folder.config, folder.tensors)
    for loud in anatomy.kinds[anatomy.kind_of[1]].silence:

        def left(held: Any, kind: Any, loud: str = loud) -> Any:
            return silence(held, kind) | {loud: held[loud]}

        with monkeypatch.context() as patch, pytest.raises(BadInput, match="on a twin of this model, the logits"):
            patch.setattr(insert_layers, "silence", left)
            surgeon.apply(plan_of(tmp_path, INSERT_ONE), base, tmp_path / "out")


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
    # What was proven before is not proven again.
    first, second = (surgeon.apply("llama-pro", base, tmp_path / name) for name in ("first", "second"))
    (entry,) = proofs.iterdir()
    assert entry.stat().st_mode & 0o077 == 0
    assert surgeon.preview("llama-pro", base).proof.text.startswith("proven on a twin of this config before (cached ")
    assert all("promise exact: proven on a twin of this config before (" in shown(each) for each in (first, second))
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
    for damaged in (lambda _: b"{", lambda held: held[:-1] + b"x", lambda held: held.partition(b"\n")[2]):
        for entry, held in whole.items():
            entry.write_bytes(damaged(held))
        assert how(base) == "proven"


def test_a_refusal_is_not_kept(proofs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny.checkpoint(tmp_path / "base", "llama")

    def refused(*_given: object) -> None:
        raise BadInput("on a twin of this model nothing is as it was")

    monkeypatch.setattr(small_run, "prove_small", refused)
    for _ in range(2):
        with pytest.raises(BadInput, match="on a twin"):
            surgeon.apply(plan_of(tmp_path, INSERT), base, tmp_path / "out")
    assert not proofs.exists()


def test_a_graft_that_no_gradient_reaches_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate that is shut whatever it reads."""
    base = tiny.checkpoint(tmp_path / "base", "llama")
    code(b"return F.linear(x, self.weight)", b"return -F.linear(x, self.weight).abs()")(monkeypatch)
    with pytest.raises(BadInput, match="what is new gets no gradient"):
        surgeon.apply(plan_of(tmp_path, {"op": "gated_adapters", "layers": [1], "size": 4}), base, tmp_path / "out")


def test_a_graft_that_training_would_leave_out_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny.checkpoint(tmp_path / "base", "llama")
    code(b"names = dict.fromkeys(self.graft_parameter_names())", b"names = {}")(monkeypatch)
    with pytest.raises(BadInput, match="`freeze_base` names no new parameter"):
        surgeon.apply(plan_of(tmp_path, {"op": "gated_adapters", "layers": [1], "size": 4}), base, tmp_path / "out")


def test_what_is_as_wide_as_the_stream_is_so_in_the_twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OPT projects its embeddings where their width is another than the stream's; heads grow with a wider stream."""
    monkeypatch.setenv("SURGEON_CACHE", "off")
    base = tiny_decoder(tmp_path / "base", "opt", num_hidden_layers=2)
    config = json.loads((base / "config.json").read_text())
    assert config["word_embed_proj_dim"] == config["hidden_size"]
    plan = write_plan(tmp_path / "plan.yaml", [{"op": "widen_hidden", "times": 2}])
    assert surgeon.apply(plan, base, tmp_path / "out", device="cpu").manifest.promise == "rounding"
    assert surgeon.verify(base, tmp_path / "out", device="cpu", window=16, windows=1).holds
