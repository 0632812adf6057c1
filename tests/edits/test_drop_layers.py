"""`drop_layers` against plain transformers: layers taken out of the native class by hand, and measures in float64."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

import surgeon
from surgeon.anatomy.skeleton import CAUSAL
from surgeon.cli import app
from surgeon.common.listener import Listener, Quiet
from surgeon.errors import BadInput
from surgeon.models.layer_choice import collapsed
from tests import tiny, vocabularies
from tests.checkpoints import add_letters, weights
from tests.decoders import tiny_decoder
from tests.models.grown import edit
from tests.vocabularies import ENGLISH, write_text

WINDOW, WINDOWS = 16, 6
MEASURED = {"text": "en.jsonl", "window": WINDOW, "windows": WINDOWS}


def plan_of(folder: Path, *operations: dict[str, Any], name: str = "plan.yaml") -> Path:
    """A plan of `drop_layers` with these settings (or of other operations), and the text beside it."""
    write_text(folder / "en.jsonl", ENGLISH, times=4)
    entries = [entry if "op" in entry else {"op": "drop_layers"} | entry for entry in operations]
    (folder / name).write_text(json.dumps({"surgeon": 1, "operations": entries}))
    return folder / name


def base_of(folder: Path, family: str = "llama", **overrides: Any) -> Path:
    settings = {"vocab_size": 320, "num_hidden_layers": 6, "dtype": "float32"} | overrides
    return vocabularies.byte_level(tiny.checkpoint(folder / "base", family, **settings))


def load(folder: Path, dtype: str = "auto") -> Any:
    """Every parameter in memory of its own, so that models compute on the same footing."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    for value in model.parameters():
        value.data = value.data.clone()
    return model


def without(model: Any, layers: list[int]) -> Any:
    """By hand: the list of layers without some."""
    model.model.layers = torch.nn.ModuleList(
        [layer for number, layer in enumerate(model.model.layers) if number not in layers]
    )
    return model


def tokens_of(base: Path) -> torch.Tensor:
    """The text as it is measured: documents joined by the end of text, in whole windows."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    ids: list[int] = []
    for nth, document in enumerate(ENGLISH * 4):
        between = [tokenizer.eos_token_id] if nth and tokenizer.eos_token_id is not None else []
        ids += [*between, *tokenizer(document, add_special_tokens=False)["input_ids"]]
    return torch.tensor(ids[: WINDOW * WINDOWS]).reshape(WINDOWS, WINDOW)


@torch.inference_mode()
def loss_of(model: Any, ids: torch.Tensor) -> float:
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].double()
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))


@torch.inference_mode()
def states_of(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """What each layer reads, and what the last leaves, in float64."""
    found: list[torch.Tensor] = []
    layers = model.model.layers
    hooks = [layer.register_forward_pre_hook(lambda _m, args: found.append(args[0].double())) for layer in layers]
    hooks.append(layers[-1].register_forward_hook(lambda _m, _a, out: found.append(out.double())))
    model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def cosine(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one * other).sum(-1) / (one.norm(dim=-1) * other.norm(dim=-1))


def influences(model: Any, ids: torch.Tensor) -> list[float]:
    states = states_of(model, ids)
    return [1 - float(cosine(a, b).mean()) for a, b in pairwise(states)]


def greedily(base: Path, ids: torch.Tensor, count: int, candidates: int) -> list[int]:
    gone: list[int] = []
    for _ in range(count):
        left = [layer for layer in range(6) if layer not in gone]
        ranks = influences(without(load(base), gone), ids)
        ranked = sorted(left, key=lambda layer: ranks[left.index(layer)])[:candidates]
        gone.append(min(ranked, key=lambda layer: loss_of(without(load(base), [*gone, layer]), ids)))
    return sorted(gone)


def applied_to(
    base: Path, folder: Path, *, listener: Listener | None = None, **entry: Any
) -> tuple[Any, dict[str, Any]]:
    """The output as loaded, and what the manifest says of what was taken out."""
    surgeon.apply(plan_of(folder, entry), base, folder / "out", device="cpu", listener=listener)
    manifest = json.loads((folder / "out" / "surgery.json").read_text())
    return load(folder / "out"), manifest["facts"]["0"] | {"layers": manifest["dropped"]["0"]}


@pytest.mark.parametrize("by", ["block_influence", "angular", "loss"])
def test_what_goes_is_what_float64_on_plain_transformers_chooses(by: str, tmp_path: Path) -> None:
    base = base_of(tmp_path)
    ids = tokens_of(base)
    native = load(base, "float64")
    candidates = {"candidates": 3} if by == "loss" else {}
    made, told = applied_to(base, tmp_path, listener=(heard := Quiet()), count=2, by=by, **MEASURED, **candidates)
    states = states_of(native, ids)
    influence = influences(native, ids)
    angles = [float((torch.arccos(cosine(a, b)) / math.pi).mean()) for a, b in zip(states, states[2:], strict=False)]
    lowest = angles.index(min(angles))
    wanted = {
        "block_influence": sorted(sorted(range(6), key=influence.__getitem__)[:2]),
        "angular": [lowest, lowest + 1],
        "loss": greedily(base, ids, 2, 3),
    }[by]
    assert told["layers"] == wanted and told["chosen"]
    assert told["text"]["scores"] == pytest.approx(angles if by == "angular" else influence, abs=1e-5)
    assert told["text"]["tokens"] == WINDOWS * (WINDOW - 1)
    assert told["text"]["before"] == pytest.approx(loss_of(native, ids), abs=1e-5)
    assert told["text"]["after"] == pytest.approx(loss_of(without(native, wanted), ids), abs=1e-5)
    assert f"the base's loss is {told['text']['before']:.4f} nats a token" in heard.said
    steps = [line for line in heard.said if re.match(r"layer \d goes \([12] of 2\): loss ", line)]
    assert len(steps) == (2 if by == "loss" else 0)
    assert by != "loss" or steps[1].endswith(f"{told['text']['after']:.4f}")
    # Native, with fewer layers, and to the bit what the base computes without them.
    assert type(made).__name__ == "LlamaForCausalLM" and made.config.num_hidden_layers == 4
    with torch.inference_mode():
        assert torch.equal(made(ids).logits, without(load(base), wanted)(ids).logits)
    shown = (tmp_path / "out" / "README.md").read_text()
    assert f"{told['text']['before']:.4f} → {told['text']['after']:.4f}" in shown and "fewer layers" in shown
    found = surgeon.verify(base, tmp_path / "out", device="cpu", windows=1, window=16)
    assert found.holds and found.promise == "none"


def test_laco_merges_by_its_equation_and_follows_its_algorithm(tmp_path: Path) -> None:
    """θ_l + Σ (θ_{l+k} − θ_l) in float64; its walk from the top by hand, with the likeness of last states."""
    base = base_of(tmp_path)
    ids, held = tokens_of(base), weights(base)

    def merged(layer: int, above: list[int]) -> dict[str, torch.Tensor]:
        stem = f"model.layers.{layer}."
        own = {name.removeprefix(stem): value.double() for name, value in held.items() if name.startswith(stem)}
        others = [{s: held[f"model.layers.{o}.{s}"].double() for s in own} for o in above]
        return {s: value + sum(other[s] - value for other in others) for s, value in own.items()}

    made, told = applied_to(base, tmp_path, count=2, by="laco", merge=1, interval=2, threshold=-1, **MEASURED)
    # With every merge taken: layers 4 and 2 take those above them in.
    assert told["layers"] == [3, 5] and told["merged"] == {"2": {"3": 1}, "4": {"5": 1}}
    expected = without(load(base, "float64"), [3, 5])
    for place, (layer, above) in {2: (2, [3]), 3: (4, [5])}.items():
        expected.model.layers[place].load_state_dict(merged(layer, above))
    assert told["text"]["after"] == pytest.approx(loss_of(expected, ids), abs=1e-5)
    with torch.inference_mode():
        assert torch.allclose(made(ids).logits.double(), expected(ids).logits, atol=1e-5)
    one = without(load(base, "float64"), [5])
    one.model.layers[4].load_state_dict(merged(4, [5]))
    last = states_of(load(base, "float64"), ids)[-1]
    near = [float(cosine(states_of(model, ids)[-1], last).mean()) for model in (one, expected)]
    assert told["text"]["scores"] == pytest.approx(near, abs=1e-5)
    # One layer into the one below is its deletion, and that is what is said.
    card = (tmp_path / "out" / "README.md").read_text()
    assert "layer 2 by 3, 4 by 5" in card and "nothing is merged there" in card and "merged into" not in card

    # By default two, from the top down, within a range; the rest of the count is one layer more.
    (tmp_path / "two").mkdir()
    made, told = applied_to(base, tmp_path / "two", count=3, by="laco", threshold=-1, range=[1, 4], **MEASURED)
    assert told["layers"] == [2, 3, 4] and told["merged"] == {"1": {"2": -1, "3": 1, "4": 1}}
    assert "3 by" not in (tmp_path / "two" / "out" / "README.md").read_text()

    stack = collapsed(collapsed({n: {n: 1} for n in range(4)}, 2, 1), 0, 2)
    assert stack == {0: {0: -1, 1: 1, 3: 1}}


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "gemma4_text"])
def test_layers_that_are_still_silent_go_to_the_bit(family: str, tmp_path: Path) -> None:
    """Grown, then shrunk again: the base's logits; proven on a twin where surgeon derives the model type."""
    if family in ("qwen3_moe", "gemma4_text"):
        base = add_letters(tiny_decoder(tmp_path / "base", family, CAUSAL, dtype="bfloat16"))
    else:
        base = base_of(tmp_path, family, num_hidden_layers=4, dtype="bfloat16")
    grow = {"op": "insert_layers", "where": {"after": [0, 1]}, "init": {"kind": "copy"}}
    surgeon.apply(plan_of(tmp_path, grow), base, tmp_path / "grown", device="cpu")
    new = [1, 3]
    surgeon.apply(plan_of(tmp_path, {"layers": new}), tmp_path / "grown", tmp_path / "out", device="cpu")
    proof = surgeon.verify(tmp_path / "grown", tmp_path / "out", device="cpu", streamed=True, windows=1, window=16)
    assert proof.holds and proof.promise == "exact" and proof.identical
    assert any(check.name == "layers taken out" for check in proof.checks)
    before, after = weights(base), weights(tmp_path / "out")
    assert before.keys() == after.keys() and all(torch.equal(value, after[name]) for name, value in before.items())
    # A layer that writes is none of them.
    mixed = surgeon.preview(plan_of(tmp_path, {"layers": [1, 2]}), tmp_path / "grown").blueprint
    assert mixed.promise == "none"
    if family == "gemma4_text":
        # Nor is one that scales the stream.
        edit(tmp_path / "grown", "model.layers.3.layer_scalar", lambda value: value * 0.5)
        assert surgeon.preview(plan_of(tmp_path, {"layers": new}), tmp_path / "grown").blueprint.promise == "none"


def test_merged_layers_are_measured_with_their_stored_buffers(tmp_path: Path) -> None:
    base = add_letters(tiny_decoder(tmp_path / "base", "gemma4_text", layers=3))
    made, told = applied_to(base, tmp_path, count=1, by="laco", merge=1, threshold=-1, **MEASURED)
    ids = tokens_of(base)
    assert told["text"]["before"] == pytest.approx(loss_of(load(base), ids), abs=1e-5)
    assert told["text"]["after"] == pytest.approx(loss_of(made, ids), abs=1e-5)


def test_a_claim_that_is_false_of_the_base_is_found(tmp_path: Path) -> None:
    from tests.manifest.edits import edited

    base = base_of(tmp_path, dtype="bfloat16")
    surgeon.apply(plan_of(tmp_path, {"layers": [2]}), base, tmp_path / "out", device="cpu")

    def lie(manifest: dict[str, Any]) -> None:
        drawn = surgeon.preview(plan_of(tmp_path, {"layers": [2]}), base)
        assert drawn.blueprint.promise == "none"
        manifest["facts"]["0"]["silent"] = [2]

    edited(tmp_path / "out", lie, seal=True)
    found = surgeon.verify(base, tmp_path / "out", logits=False)
    assert "layers taken out" in {check.name for check in found.checks if not check.holds}


def test_per_layer_settings_follow_and_a_broken_pattern_is_said(tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention"] * 3
    base = base_of(tmp_path, "gemma2")
    broken = surgeon.preview(plan_of(tmp_path, {"layers": [1]}), base)
    assert any("repeat every 2 layers" in note and "whole periods" in note for note in broken.notes)
    kept = surgeon.preview(plan_of(tmp_path, {"layers": [2, 3]}), base)
    assert not any("repeat" in note for note in kept.notes)
    assert broken.blueprint.config["layer_types"] == [types[0], *types[2:]]
    shown = CliRunner().invoke(app, ["preview", str(tmp_path / "plan.yaml"), str(base)], env={"COLUMNS": "120"})
    assert shown.exit_code == 0 and "taken out" in shown.output


def test_what_is_gone_does_not_come_back_and_a_delta_is_small(tmp_path: Path) -> None:
    base = base_of(tmp_path, dtype="bfloat16")
    surgeon.apply(plan_of(tmp_path, {"layers": [1, 4]}), base, tmp_path / "out", device="cpu")
    with pytest.raises(BadInput, match=r"layer 1 \(and 1 more\): taken out by surgery 1 \(drop_layers\)"):
        surgeon.revert(tmp_path / "out", tmp_path / "back")
    # A surgery on what is left can be taken back, to the output without the layers.
    grow = {"op": "insert_layers", "where": {"after": [0]}, "init": {"kind": "copy"}}
    surgeon.apply(plan_of(tmp_path, grow, name="grow.yaml"), tmp_path / "out", tmp_path / "again", device="cpu")
    surgeon.revert(tmp_path / "again", tmp_path / "shrunk")
    one, other = weights(tmp_path / "out"), weights(tmp_path / "shrunk")
    assert one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())
    delta = surgeon.make_delta(tmp_path / "out", tmp_path / "delta")
    assert delta.tensors == 0
    surgeon.apply_delta(tmp_path / "delta", str(base), tmp_path / "joined")
    for file in (tmp_path / "out").iterdir():
        assert file.read_bytes() == (tmp_path / "joined" / file.name).read_bytes()
    assert len(surgeon.diff(base, tmp_path / "out").removed) == 18
    surgeon.report(tmp_path / "again", html=tmp_path / "page.html")
    assert "6 layers became 5" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_layers_that_others_need_stay(tmp_path: Path) -> None:
    """Of a hybrid the one layer with attention, whose length its cache takes; and one whose keys others read."""
    hybrid = add_letters(tiny_decoder(tmp_path / "hybrid", "qwen3_next", CAUSAL))
    with pytest.raises(
        BadInput, match=r"on a twin of this model, out: the model cannot be run \(.*; leave one of these layers in"
    ):
        surgeon.preview(plan_of(tmp_path, {"layers": [3]}), hybrid)
    sharing = {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [64] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    }
    base = add_letters(tiny_decoder(tmp_path / "sharing", "gemma3n_text", CAUSAL, **sharing))
    plan = plan_of(tmp_path, {"count": 1, "by": "loss", "candidates": 4} | MEASURED)
    measured = surgeon.preview(plan, base).blueprint.dropped
    assert all(layer in (2, 3) for layers in measured.values() for layer in layers)


REFUSED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "all": ([{"layers": [0, 1, 2, 3, 4, 5]}], "all 6 layers would go"),
    "all by count": ([{"count": 6} | MEASURED], "`count` 6 of 6 layers: at least one must stay"),
    "none such": ([{"layers": [6]}], "there is no layer 6"),
    "twice": ([{"layers": [2, 2]}], "layer 2 is listed twice"),
    "no text": ([{"count": 1, "text": "no.jsonl"}], "no such text"),
    "short text": ([{"count": 1, "text": "en.jsonl", "window": 64}], "too short to measure layers on"),
    "not first": ([{"layers": [0]}, {"count": 1} | MEASURED], "make it the plan's first operation"),
    "laco nowhere": ([{"count": 2, "by": "laco"} | MEASURED], "only 0 of 2 layers merge"),
    "laco of more than there are": ([{"count": 2, "by": "laco", "merge": 6} | MEASURED], "there are only 5 layers"),
    "laco beyond the top": (
        [{"count": 2, "by": "laco", "range": [0, 9]} | MEASURED],
        "goes up to layer 9; there are 6",
    ),
    "with grafts": ([{"op": "gated_adapters", "size": 4, "layers": [2]}, {"layers": [2]}], "layer 2 has grafts"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_go_is_refused_in_a_line(case: str, tmp_path: Path) -> None:
    operations, words = REFUSED[case]
    base = base_of(tmp_path, "gemma2")
    with pytest.raises(BadInput, match=words) as refused:
        surgeon.preview(plan_of(tmp_path, *operations), base)
    assert "\n" not in str(refused.value)
