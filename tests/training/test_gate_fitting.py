"""A domain gate is fitted before the first step; the run keeps the base's logits where it is closed, bit for bit."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import surgeon
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.common.listener import Quiet
from surgeon.data import recalled_text
from surgeon.errors import BadInput
from surgeon.manifest.reading import manifest_of
from surgeon.manifest.trainable import LayersSpec, trainable_set
from surgeon.models.load import load_model
from surgeon.models.stream import StreamedModel
from surgeon.runtime.gate import DomainGate
from surgeon.runtime.gate_rules import GateSpec
from surgeon.training import gate_fitting
from surgeon.training.config.loading import load_config
from surgeon.training.preparing import prepare
from tests.checkpoints import weights
from tests.training.test_train import base_of, config
from tests.training.texts import CHAT_TEMPLATE, corpus
from tests.warm import warm

OPERATIONS = [
    {"op": "insert_layers", "where": {"after": [2]}, "count": 1, "init": {"kind": "copy"}},
    {"op": "gated_adapters", "layers": [4], "size": 12, "gate": "none"},
    {"op": "domain_gate", "units": 8, "false_positives": 0.05},
]
SOURCES: list[dict[str, Any]] = [
    {"name": "fr", "path": "fr.jsonl", "share": 1.0, "validation": 0.3},
    {"name": "en", "path": "en.jsonl", "share": 0.0, "role": "original", "validation": 0.3},
]
OPTIMIZER = {"lr": 1e-2, "warmup": 0, "schedule": "constant", "weight_decay": 0.0}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base in bfloat16, a gated output of it, and two texts of different words beside."""
    folder = tmp_path_factory.mktemp("gate")
    base_of(folder)
    corpus(folder / "fr.jsonl", documents=300, seed=1, first=50, count=50)
    corpus(folder / "en.jsonl", documents=300, seed=2, count=50)
    (folder / "plan.yaml").write_text(json.dumps({"surgeon": 1, "operations": OPERATIONS}))
    surgeon.apply(folder / "plan.yaml", str(folder / "base"), folder / "out")
    return folder


# The base is random, so what it writes has as much of one domain as of the other: most runs do without.
SETTINGS = {"steps": 3, "sources": SOURCES, "optimizer": OPTIMIZER, "evaluate_every": 100, "recall_for_gate": 0}


class Heard(Quiet):
    """What was said, line by line."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def train(made: Path, out: str, to: str, heard: Heard | None = None, **changes: Any) -> Any:
    given = config(made, **SETTINGS | changes)
    trained = surgeon.train(made / out, given, made / to, device="cpu", listener=heard)
    assert trained is not None
    return trained


def test_a_run_fits_the_gate_and_keeps_original_text(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted, classifier = [], gate_fitting._classifier
    monkeypatch.setattr(gate_fitting, "_classifier", lambda *given: fitted.append(classifier(*given)) or fitted[-1])
    trained = train(made, "out", "run", checkpointing=True)
    figures = trained.manifest.training[-1].gate
    assert figures is not None and figures["original"] <= 0.05 < 0.7 < figures["new"]
    assert figures["accuracy"] == pytest.approx((1 - figures["original"] + figures["new"]) / 2)
    gate = {name for name in trained.changes if ".domain_gate." in name}
    read = {"weight", "offset", "bias", "out", "threshold"}
    assert {name.rpartition(".")[2] for name in gate} == read | {"turns", "turn_threshold"}
    # Without a chat template no turn is found.
    assert not any(value.any() for name, value in weights(made / "run").items() if name.endswith("domain_gate.turns"))
    assert figures["turns"] == {} and 0 < figures["opens_after"]["fr"] < 16
    # The odds, which every token pays.
    (offset,) = (value for name, value in weights(made / "run").items() if name.endswith(".domain_gate.offset"))
    assert torch.equal(offset, (fitted[0]["offset"] - 0.25).to(offset.dtype))
    assert trained.losses["fr"][1] < trained.losses["fr"][0]
    text = made / "en.jsonl"
    found = surgeon.verify(made / "base", made / "run", text=text, window=16, windows=8, dtypes=["auto", "float32"])
    assert found.holds and found.gated and found.trained
    for each in found.comparisons:
        assert 0.7 * each.tokens < each.same <= each.tokens
    apart = surgeon.verify(made / "base", made / "run", text=made / "fr.jsonl", window=16, windows=8)
    assert all(each.same < 0.7 * each.tokens and each.apart is not None for each in apart.comparisons)
    card = (made / "run" / "README.md").read_text()
    assert f"open on {figures['new']:.1%} of held-out new tokens and {figures['original']:.1%} of original" in card

    surgeon.report(made / "run", html=made / "run.html")
    page = (made / "run.html").read_text()
    shown = [f">{share:.1%}<" for both in figures["by_length"].values() for share in both if share is not None]
    assert len(shown) > 2 and all(share in page for share in shown)

    # A second run keeps the gate, and asks for no text to fit one.
    again = train(made, "run", "again", sources=SOURCES[:1], steps=1)
    assert not any(".domain_gate." in name for name in again.changes)
    surgeon.revert(made / "again", made / "back")
    base, back = (CheckpointFolder.open(made / name) for name in ("base", "back"))
    assert all(base.read(name) == back.read(name) for name in base.tensors)


def test_turns_are_fitted_where_a_template_has_them(tmp_path: Path) -> None:
    """The marks are the template's; at most the share of turns of original text opens it; the run decides so."""
    base = base_of(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>"]})
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(base)
    corpus(tmp_path / "fr.jsonl", documents=300, seed=1, first=50, count=50)
    corpus(tmp_path / "en.jsonl", documents=300, seed=2, count=50)
    (tmp_path / "plan.yaml").write_text(json.dumps({"surgeon": 1, "operations": OPERATIONS}))
    surgeon.apply(tmp_path / "plan.yaml", str(base), tmp_path / "out")
    figures = train(tmp_path, "out", "run", heard := Heard(), steps=1).manifest.training[-1].gate
    assert figures is not None and figures["turns"].keys() == {"en", "fr"}
    assert figures["turns"]["en"] <= 0.05 and figures["turns"]["fr"] > 0.7
    said = "\n".join(heard.lines)
    assert "each turn of the user decides for its answer" in said
    assert f"it opens after about {figures['opens_after']['fr']} tokens of fr" in said

    model, native = (load_model(CheckpointFolder.open(tmp_path / name)) for name in ("run", "base"))
    gate, _ = gate_fitting._gate_of(model)
    user, assistant = tokenizer.convert_tokens_to_ids(["<user>", "<assistant>"])
    assert gate.marks().tolist() == [[-1, user], [-1, tokenizer.eos_token_id], [-1, assistant]]
    for words, opens in (("w60 w61 w62 w63 w64 w65", True), ("w10 w11 w12 w13 w14 w15", False)):
        ids = torch.tensor([tokenizer(f"<user> {words} </s> <assistant> {words}")["input_ids"]])
        flow = sys.modules[type(model).__module__].Flow()
        with torch.no_grad():
            logits = model(ids, surgery_flow=flow, use_cache=False).logits
            assert flow.on[0].tolist() == [False] * 8 + [opens] * 7
            assert opens or torch.equal(logits, native(ids, use_cache=False).logits)


def test_a_language_without_passages_is_refused(made: Path) -> None:
    with pytest.raises(BadInput, match=r"`xx` is none of the languages .* give a text of it as a source"):
        train(made, "out", "never", keep_for_gate=["de", "xx"])


def test_what_is_asked_for_is_what_the_model_itself_does(made: Path) -> None:
    """The share that the threshold was chosen for, counted by forwards of the fitted model; one step of score below it
    would open the gate too often."""
    out = CheckpointFolder.open(made / "out")
    model = load_model(out)
    drawn = torch.Generator().manual_seed(0)
    gate, layer = gate_fitting._gate_of(model)
    with torch.no_grad():
        for parameter in gate.buffers():
            parameter.copy_(torch.randn(parameter.shape, generator=drawn))
    ids = torch.randint(10, 100, (12, 20), generator=drawn)
    sequences = [gate_fitting.PackedSequence(row, row, list(range(20)), 0) for row in ids.tolist()]
    scored = gate_fitting._Scored.of(model, layer, sequences)
    gate.threshold.data = gate_fitting._threshold(gate, [scored], torch.bfloat16)

    def share() -> float:
        flow = sys.modules[type(model).__module__].Flow()
        with torch.no_grad():
            model(ids, position_ids=torch.arange(20)[None], surgery_flow=flow, use_cache=False)
        return float(flow.on.double().mean())

    assert share() == float(scored.open(gate)[0].double().mean()) <= 0.05
    gate.threshold.data = gate.threshold.data - 0.05 * gate.threshold.data.abs()
    assert share() > 0.05


def test_the_share_is_kept_on_every_original_source(made: Path) -> None:
    """Not on all of them together: a small source beside a large one would be open to its last token."""
    model = load_model(CheckpointFolder.open(made / "out"))
    gate, layer = gate_fitting._gate_of(model)
    drawn = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in gate.buffers():
            parameter.copy_(torch.randn(parameter.shape, generator=drawn))

    def scored(count: int, first: int) -> gate_fitting._Scored:
        rows = torch.randint(first, first + 40, (count, 20), generator=drawn).tolist()
        sequences = [gate_fitting.PackedSequence(row, row, list(range(20)), 0) for row in rows]
        return gate_fitting._Scored.of(model, layer, sequences)

    large, small = scored(200, 10), scored(4, 60)

    def shares() -> list[float]:
        return [float(each.open(gate)[0].double().mean()) for each in (large, small)]

    chosen = [gate_fitting._threshold(gate, each, torch.float32) for each in ([large], [small], [large, small])]
    assert chosen[2] == max(chosen[:2]) > min(chosen[:2])
    gate.threshold.data = chosen[2]
    assert max(shares()) <= 0.05
    gate.threshold.data = min(chosen[:2])
    assert max(shares()) > 0.05
    # So much evidence opens it at least.
    least = float(max(chosen)) + 1
    assert gate_fitting._threshold(gate, [large, small], torch.float32, least) == least


# `surgeon`, whose process is killed at the n-th call of some function.
KILLED_IN = """
import os, signal, sys
from surgeon.data import recall, recalled_text
from surgeon.training import gate_fitting
from surgeon.training.saved.checkpoints import RunRecord

gate_fitting._STEPS, recall._RUN = 200, 1
name, left = sys.argv[1], int(sys.argv[2])
home = recalled_text.TextSoFar if name == "save" else RunRecord
real = getattr(home, name)

def killed(*given):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*given)

setattr(home, name, killed)
sys.argv[1:3] = []
from surgeon.cli import main
main()
"""


def test_a_fitting_that_was_killed_ends_as_one_that_was_not(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the second part of what the base writes, and behind the fitting's files; byte for byte. What is written is
    an original source, which is kept as the others are, and no source of the run."""
    # Enough for these texts.
    monkeypatch.setattr(gate_fitting, "_STEPS", 200)
    monkeypatch.setattr("surgeon.data.recall._RUN", 1)
    train(made, "out", "whole", steps=1, recall_for_gate=2500)
    called = ["train", *(str(made / name) for name in ("out", "train.yaml", "cut")), "--device", "cpu"]
    for name, call in (("save", 2), ("keep", 1)):
        ran = subprocess.run([*warm(), "-c", KILLED_IN, name, str(call), *called], capture_output=True, check=False)
        assert ran.returncode == -signal.SIGKILL, ran.stderr[-2000:]
    kept = {path.name for path in (made / ".cut.memory").iterdir() if path.suffix == ".jsonl"}
    assert kept == {"gate.recalled.jsonl"}
    trained = train(made, "out", "cut", steps=1, recall_for_gate=2500)
    assert not (made / ".cut.memory").exists() and trained.losses.keys() == {"fr", "en"}
    whole, cut = (CheckpointFolder.open(made / name) for name in ("whole", "cut"))
    assert whole.tensors.keys() == cut.tensors.keys()
    assert all(whole.read(name) == cut.read(name) for name in whole.tensors)
    figures = [
        json.loads((made / name / "surgery.json").read_text())["training"][-1]["gate"] for name in ("whole", "cut")
    ]
    assert figures[0] == figures[1] and min(figures[0]["kept"][name] for name in ("en", "(recalled)")) >= 0.95
    assert figures[0]["by_source"].keys() == {"fr", "en"}


@pytest.mark.parametrize("form", ["mlp", "linear"])
def test_evidence_is_a_likelihood_in_which_each_source_counts_alike(form: str) -> None:
    """Three kinds of token; one that is rare in original text as a whole, but all of one small source of it."""
    gate = DomainGate(GateSpec(0, form=form, units=8), 16)
    kinds = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    kinds = kinds * torch.rsqrt(kinds.square().mean(dim=-1, keepdim=True))

    def source(*counts: int) -> torch.Tensor:
        return kinds.repeat_interleave(torch.tensor(counts), dim=0).half()

    states = [(source(4900, 0, 100), False), (source(0, 50, 0), False), (source(20, 100, 280), True)]
    fitted = gate_fitting._classifier(gate, [lambda: states, lambda: states], 0)
    for name, parameter in gate.named_buffers():
        parameter.data = fitted[name]
    evidence = gate.evidence(kinds).squeeze(-1) / 2**16
    new, original = torch.tensor([0.05, 0.25, 0.7]), torch.tensor([0.49, 0.5, 0.01])
    assert torch.allclose(evidence, (new / original).log(), atol=0.4)


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        (SOURCES[:1], "no source has the role `original`; add one"),
        (
            [{**SOURCES[0], "validation": 0}, SOURCES[1]],
            "source fr: `validation` is 0, and the domain gate's threshold",
        ),
        (
            [{**SOURCES[0], "path": "en.jsonl"}, SOURCES[1]],
            "cannot tell the two domains apart, .* raise `false_positives`",
        ),
    ],
)
def test_a_gate_that_cannot_be_fitted_is_refused(made: Path, sources: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        train(made, "out", "never", sources=sources)
    assert not (made / "never").exists() and not list(made.glob(".never*"))


def test_nothing_trains_of_a_gate(made: Path) -> None:
    out = CheckpointFolder.open(made / "out")
    manifest = manifest_of(out)
    assert [operation.trains for operation in manifest.operations] == ["new", "new", "fitted"]
    model = load_model(CheckpointFolder.open(made / "out"))
    assert not any("domain_gate" in name for name in model.freeze_base())
    gate = {name for name in out.tensors if ".domain_gate." in name}
    every, base, layers = (trainable_set(out, manifest, what) for what in ("all", "base", LayersSpec(layers="all")))
    assert set(every.names) == out.tensors.keys() - gate and set(every.fitted) == gate == set(layers.fitted)
    assert not gate & {*base.names, *layers.names} and not base.fitted
    assert base.of_base == every.of_base == set(base.names)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gate_has_the_models_dtype_however_it_is_loaded(made: Path, dtype: str) -> None:
    """Whole, and layer by layer from its files."""
    out = CheckpointFolder.open(made / "out")
    whole, streamed = load_model(out, dtype=dtype), StreamedModel(out, dtype=dtype, device="cpu").module
    gates = [{name: value for name, value in model.named_buffers() if "gate." in name} for model in (whole, streamed)]
    assert len(gates[0]) == 7 and {value.dtype for value in gates[0].values()} == {getattr(torch, dtype)}
    assert all(
        torch.equal(value, gates[1][name]) and value.dtype == gates[1][name].dtype for name, value in gates[0].items()
    )


def test_preserve_behind_a_gate_has_nothing_to_teach(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is said, and so it is: the term is 0. Where the base itself trains it has something to teach."""
    shared = {"sources": [SOURCES[0] | {"share": 0.5}, SOURCES[1] | {"share": 0.5}], "preserve": {}, "steps": 1}
    out = CheckpointFolder.open(made / "out")

    def notes(**changes: Any) -> str:
        given = load_config(config(made, optimizer=OPTIMIZER, **shared, **changes))
        return "\n".join(prepare(out, manifest_of(out), given, tmp_path / "run", device="cpu", processes=1).notes)

    assert "`preserve` teaches nothing here" in notes()
    assert "teaches nothing" not in (said := notes(what="all")) and "the domain gate comes to read other states" in said
    # A base of whose text nothing can be kept is no reason to stop.
    monkeypatch.setattr(recalled_text, "_JUDGED", 1)
    monkeypatch.setattr(recalled_text, "_LEAST_KEPT", 2.0)
    log = train(made, "out", "taught", heard := Heard(), recall_for_gate=9000, **shared).log
    (said,) = (line for line in heard.lines if "is fitted without what the model writes" in line)
    assert "documents (" in said and "keep the base less often" in said
    assert [entry["loss.preserve"] for entry in log if "loss.preserve" in entry] == [0.0]


def test_of_turns_no_more_than_the_allowed_share_opens() -> None:
    """Ten turns with 1 to 10 nats, decided at their last tokens; two of them have a stretch of original text."""
    sums, unit = torch.arange(1.0, 11.0), 2**16
    stretches = torch.tensor([0.0, 0, 0, 0, 0, 0, 0, 0, 7, 7])
    states = torch.zeros(1, 20, 3)
    # What stands at other tokens does not decide.
    states[0, ::2] = 99 * unit
    states[0, 1::2, 0], states[0, 1::2, 1] = sums * unit, stretches * unit
    counts = (torch.arange(20) % 2 == 1)[None]
    at_work = SimpleNamespace(states=lambda _gate, _evidence: states)
    scored = gate_fitting._Scored([(torch.zeros(1, 20, 1), at_work, torch.zeros(1, 20), counts)])

    def lowest(share: float, closes: float) -> float:
        gate = SimpleNamespace(closes=closes * unit, spec=SimpleNamespace(false_positives=share))
        return scored.turn_threshold(gate)

    assert [lowest(share, 6) for share in (0, 0.1, 0.25)] == [8, 7, 6]
    assert lowest(0.2, 8) == 8
    assert lowest(0.9, 6) == -torch.inf
