"""`surgeon report`: what the page says is what manifest and model say, and nothing in it can be anything but text."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import surgeon
from surgeon.cli import app
from surgeon.lab.reports.curves import Curve, GateActivity, TrainingRun, curves_of
from surgeon.lab.reports.page.document import render
from surgeon.lab.reports.report import Reported
from surgeon.lab.reports.routing_record import GateChoices, RouterChoices, RouterPlace, RoutingReport, TextChoices
from surgeon.models.load import load_model
from tests import tiny
from tests.checkpoints import edit_tensor, train, weights, write_plan
from tests.commands import refused
from tests.manifest.edits import edited as sealed_edit
from tests.manifest.edits import resealed
from tests.models.test_tokens import byte_tokenizer
from tests.rework.test_revert import chain

FUSED: dict[str, Any] = {"op": "insert_layers", "where": {"after": [2, 4]}, "init": {"kind": "ot_fusion"}}
ADAPTERS: dict[str, Any] = {"op": "gated_adapters", "layers": "all", "size": 8}
SLOTS: dict[str, Any] = {"op": "pmoe_experts", "threshold": 5, "rank": 2, "slots": 2}
CONTROL: dict[str, Any] = {"op": "control_llm", "layers": [1, 4]}
STATES: dict[str, Any] = {"op": "mixture_of_control", "layers": [0, 3], "rank": 3, "top_k": 2}

# What ends nothing and therefore must be closed: every element that is not one of these.
VOID = {"meta", "br", "img", "link", "hr", "col"}
HOSTILE = "<script>alert(1)</script>\"'&\u202e"


class Reader(HTMLParser):
    """Checks that elements nest, and keeps ids, links, attributes and the words between tags."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        held = dict(attrs)
        assert len(held) == len(attrs), f"<{tag}> has an attribute twice"
        self.elements.append((tag, held))
        if tag == "table":
            # On a phone a wide table scrolls in its box, also by keyboard, and not the page.
            assert self.open[-1] == "div"
            assert (self.elements[-2][1]["class"], self.elements[-2][1]["tabindex"]) == ("box", "0")
        if held.get("id"):
            self.ids.append(str(held["id"]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not (self.open and self.open[-1] == "style"):
            self.words.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert not reader.open
    assert len(set(reader.ids)) == len(reader.ids), "an id stands twice"
    for tag, attributes in reader.elements:
        named = attributes.get("aria-labelledby")
        assert named is None or set(named.split()) <= set(reader.ids)
        target = attributes.get("href")
        assert target is None or (target.startswith("#") and target[1:] in reader.ids), target
        assert tag != "img" or str(attributes["src"]).startswith("data:image/png;base64,")
        assert tag != "img" or attributes["alt"]
        assert tag not in ("script", "link", "iframe", "object", "base", "form")
        assert not any(name.startswith("on") for name in attributes)
    return reader


def check_alone(page: str) -> None:
    """Nothing in it is fetched from anywhere."""
    assert '<meta http-equiv="Content-Security-Policy" content="default-src \'none\';' in page
    page = re.sub(r"data:image/png;base64,[A-Za-z0-9+/=]+", "data:", page)
    assert not re.search(r"https?:|//[a-z]|url\(|@import|src=\"(?!data:)", page, re.IGNORECASE)


def reported(out: Path, to: Path, **options: Any) -> tuple[Reported, str, Reader]:
    told = surgeon.report(out, html=to, **options)
    page = to.read_text(encoding="utf-8")
    check_alone(page)
    return told, page, read(page)


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return chain(tmp_path_factory.mktemp("chain"), "llama", [[FUSED], [ADAPTERS], [SLOTS]])


def test_the_page_tells_what_manifest_and_model_tell(grown: list[Path], tmp_path: Path) -> None:
    told, page, reader = reported(grown[-1], tmp_path / "page.html")
    words = " ".join(reader.words)
    model = load_model(grown[-1])
    manifest = surgeon.inspect(grown[-1]).manifest
    assert manifest is not None
    budget = told.findings.budget
    assert budget.total == sum(p.numel() for p in model.parameters())
    assert budget.base == sum(t.numel() for t in weights(grown[0]).values())
    assert budget.new == sum(t.numel() for name, t in weights(grown[-1]).items() if name in manifest.new_tensors)
    assert budget.base + budget.earlier + budget.new == budget.total
    assert (
        budget.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)
        or budget.trainable == budget.new
    )
    assert budget.stored_bytes == sum(t.nbytes for t in weights(grown[-1]).values())
    for number in (budget.total, budget.base, budget.earlier, budget.new):
        assert f"{number:,}" in words
    history = told.findings.history
    assert [layer.base for layer in history.layers] == [0, 1, 2, None, 3, 4, None, 5]
    assert [layer.sources for layer in history.layers if layer.base is None] == [(2, 4), (5, 7)]
    assert {layer.surgery for layer in history.layers} == {None, 1}
    assert not any(layer.trains for layer in history.layers), "the last surgery brought grafts only"
    assert "6 → 8" in words
    assert "fused 2+4" in words
    kinds = [tuple(sorted(mark.kind for mark in layer.marks)) for layer in history.layers]
    assert (
        kinds
        == [("adapters", "experts")] * 5 + [("adapters", "expert_router", "experts")] + [("adapters", "experts")] * 2
    )
    by_surgery = {(mark.kind, mark.surgery, mark.trains) for layer in history.layers for mark in layer.marks}
    assert by_surgery == {("adapters", 2, False), ("experts", 3, True), ("expert_router", 3, True)}
    assert {mark.sign for mark in history.layers[-1].marks} == {"A", "S0–1"}
    for number in range(1, 4):
        assert f"Plan of surgery {number}" in words
    assert "Not checked for this page" in words
    assert "arXiv:2508.08011" in words
    assert "Learning and forgetting" not in words
    assert 'id="routing"' not in page


def test_maps_are_told_by_the_layer_they_made(grown: list[Path], tmp_path: Path) -> None:
    told, page, _ = reported(grown[-1], tmp_path / "page.html")
    first = surgeon.inspect(grown[1]).manifest
    assert first is not None
    maps = {(m.layer, m.module): m for m in told.findings.maps}
    assert {layer for layer, _ in maps} == {"3", "6"}
    recorded = first.transport_maps["operations[0].after[4].0.query"]
    fact = maps["6", "query"]
    assert (fact.entropy, fact.row_error) == (recorded["entropy"], recorded["row_error"])
    assert fact.uniform == pytest.approx(math.log(recorded["rows"] * recorded["columns"]))
    assert f"{fact.entropy:.3f}" in page


@pytest.mark.parametrize("logits", [False, True])
def test_proof_is_run_against_the_base(logits: bool, base: Path, tmp_path: Path) -> None:
    surgeon.apply(write_plan(tmp_path / "p.yaml", [FUSED, ADAPTERS]), str(base), tmp_path / "out")
    told, page, reader = reported(tmp_path / "out", tmp_path / "p.html", base=base, logits=logits, window=16, windows=2)
    assert told.findings.verification is not None
    assert told.findings.verification.holds
    assert told.findings.verification.identical is (True if logits else None)
    words = " ".join(reader.words)
    assert ("every logit is bit-identical" if logits else "every static promise holds") in words
    assert "FAILS" not in page


def test_a_broken_promise_is_told_and_ends_with_3(base: Path, tmp_path: Path) -> None:
    out, page = tmp_path / "out", tmp_path / "page.html"
    surgeon.apply(write_plan(tmp_path / "p.yaml", [FUSED]), str(base), out)
    edit_tensor(out, "model.layers.1.mlp.up_proj.weight", lambda tensor: tensor + 1)
    ran = CliRunner().invoke(app, ["report", str(out), "--html", str(page), "--base", str(base), "-q"])
    assert ran.exit_code == 3
    words = " ".join(read(page.read_text()).words)
    assert "a promise does not hold" in words
    assert "model.layers.1.mlp.up_proj.weight" in words


def test_training_is_not_called_a_broken_base(grown: list[Path], tmp_path: Path) -> None:
    _, _, reader = reported(grown[3], tmp_path / "page.html", base=grown[2])
    words = " ".join(reader.words)
    assert "the base is kept; new tensors changed since birth" in words
    assert "a promise does not hold" not in words


@pytest.fixture(scope="module")
def choosing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that chooses, trained, with a tokenizer."""
    folder = tmp_path_factory.mktemp("choosing")
    base = tiny.checkpoint(folder / "base", "llama", dtype="float32", vocab_size=300)
    byte_tokenizer(base, eos=False)
    plan = write_plan(folder / "plan.yaml", [CONTROL, ADAPTERS, SLOTS | {"threshold": 2, "slots": 3}, STATES])
    surgeon.apply(plan, str(base), folder / "out")
    train(folder / "out", seed=4)
    return folder / "out"


def test_the_page_shows_what_routers_and_gates_choose(choosing: Path, tmp_path: Path) -> None:
    recorded = surgeon.routing_report(choosing, {"probe": None}, window=16, windows=3)
    told, page, _ = reported(choosing, tmp_path / "a.html", texts={"probe": None}, window=16, windows=3)
    assert told.findings.routing == recorded
    text = recorded.texts["probe"]
    assert text.router is not None
    for mean in text.router.mean:
        assert f">{mean:.3g}</td>" in page
    assert f">{text.gates['0.adapter'].closed:.3g}</td>" in page
    for state in text.states[0]:
        assert f">{state:.3g}</td>" in page


def test_merged_layers_are_not_called_kept(base: Path, tmp_path: Path) -> None:
    surgeon.apply(write_plan(tmp_path / "p.yaml", [CONTROL]), str(base), tmp_path / "out")
    surgeon.merge(tmp_path / "out", tmp_path / "merged", window=8, windows=1)
    told, page, _ = reported(tmp_path / "merged", tmp_path / "page.html")
    layers = told.findings.history.layers
    assert [layer.index for layer in layers if layer.origin == "changed"] == [1, 4]
    assert {layer.surgery for layer in layers if layer.origin == "changed"} == {2}
    assert not any(layer.marks for layer in layers)
    assert "changed: a layer of the base with other weights" in page


def test_training_runs_are_told_by_the_manifest(base: Path, tmp_path: Path) -> None:
    out, run = tmp_path / "out", tmp_path / "run"
    wide = byte_tokenizer(tiny.checkpoint(tmp_path / "wide", "llama", vocab_size=300), eos=False) or tmp_path / "wide"
    surgeon.apply(write_plan(tmp_path / "p.yaml", [ADAPTERS]), str(wide), out)
    (tmp_path / "text.txt").write_text("Some words of a domain, again and again.\n" * 400)
    (tmp_path / "train.yaml").write_text(
        "surgeon_train: 1\nsteps: 4\nbatch: 2\nlength: 16\nevaluate_every: 2\noptimizer: {lr: 0.01}\n"
        "sources:\n  - {name: words, path: text.txt, share: 1.0, validation: text.txt}\n"
    )
    trained = surgeon.train(out, tmp_path / "train.yaml", run)
    assert trained is not None
    told, page, reader = reported(run, tmp_path / "a.html", base=wide)
    [done] = told.findings.runs
    before, after = trained.losses["words"]
    assert (done.steps, done.losses) == (4, {"words": (before, after)})
    assert f"words {before:.3f} → {after:.3f}" in reader.words
    assert "every static promise holds, also after training" in reader.words
    assert "Held-out losses each time that training measured them" in page
    [measured] = told.findings.curves
    assert (measured.source, [step for step, _ in measured.points]) == ("words", [0, 2, 4])
    assert (measured.points[0][1], measured.points[-1][1]) == (before, after)
    assert "did not change" not in page
    for name, (largest, _) in trained.changes.items():
        assert name in page
        assert f"{largest:.3g}" in page


def test_hostile_words_stay_words(grown: list[Path], tmp_path: Path) -> None:
    """Names of texts, tokens, sources, the plan and the manifest's words: all of it by anybody."""
    out = tmp_path / "out"
    shutil.copytree(grown[-1], out)
    manifest = json.loads((grown[-1] / "surgery.json").read_text())
    manifest["plan"] = f"surgeon: 1\n# {HOSTILE}\n" + "operations:\n  - op: pmoe_experts\n"
    manifest["base"]["id"] = HOSTILE
    manifest["operations"][0] |= {"op": HOSTILE, "matched": HOSTILE, "reason": HOSTILE}
    manifest["tool"]["version"] = HOSTILE
    manifest["layers"][0]["grafts"].append({"text": HOSTILE, "operation": 0})
    manifest["transport_maps"] = {
        HOSTILE: {
            "rows": 2,
            "columns": 2,
            "entropy": 1.0,
            "row_error": 0.1,
            "column_error": 0.1,
            "iterations": 1,
            "converged": False,
        }
    }
    manifest["lineage"][-1]["operations"][0]["op"] = HOSTILE
    (out / "surgery.json").write_text(json.dumps(resealed(manifest)))
    told, _, _ = reported(out, tmp_path / "plain.html")
    routing = RoutingReport(
        HOSTILE,
        RouterPlace(5, 2),
        (),
        {
            HOSTILE: TextChoices(
                tokens=1,
                router=RouterChoices((0.5, 0.5), (0.0, 1.0)),
                states=(),
                gates={HOSTILE: GateChoices(1.0, 0.0, 1.0)},
                experts={},
            )
        },
    )
    curve = Curve(HOSTILE, ((0, 1.0), (3, 0.5)))
    page = render(dataclasses.replace(told.findings, routing=routing, curves=(curve,)))
    reader = read(page)
    assert "<script" not in page
    assert "\u202e" not in page
    shown = HOSTILE.replace("\u202e", "\\u202e")
    assert sum(shown in words for words in reader.words) >= 9


REFUSED: dict[str, tuple[Callable[[Path, Path], list[object]], str]] = {
    "no output of surgeon": (lambda out, tmp: [out.parent / "state-0"], "not an output of surgeon"),
    "logits without a base": (lambda out, tmp: [out, "--verify"], "--base"),
    "a manifest without a layer": (
        lambda out, tmp: [edited(out, tmp, lambda m: (m["layers"].pop(), m["base"].update(layers=7)))],
        "surgery 2 made 8 layers, surgery 3 found 7; was it edited by hand?",
    ),
    "an earlier manifest of another model": (
        lambda out, tmp: [edited(out, tmp, lambda m: m["lineage"][0]["layers"].pop(3))],
        "surgery 1 made 7 layers, surgery 2 found 8; was it edited by hand?",
    ),
    "a folder as page": (lambda out, tmp: [out, "--html", tmp], "a folder"),
    "no such folder": (lambda out, tmp: [out, "--html", tmp / "nowhere" / "page.html"], "cannot be written"),
    "a text that is not there": (lambda out, tmp: [out, "--text", f"a={tmp / 'x'}"], "cannot read the text"),
}


def edited(out: Path, tmp: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of the output whose manifest somebody changed."""
    copy = shutil.copytree(out, tmp / "edited")
    return sealed_edit(copy, change, seal=True)


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_are_one_line(case: str, grown: list[Path], tmp_path: Path) -> None:
    arguments, words = REFUSED[case]
    assert words in refused("report", *arguments(grown[-1], tmp_path))


def test_command_line(grown: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran = CliRunner().invoke(app, ["report", str(grown[-1])])
    assert ran.exit_code == 0, ran.output
    assert ran.stdout.split() == ["state-3.html"]
    assert [path.name for path in tmp_path.iterdir()] == ["state-3.html"]
    check_alone((tmp_path / "state-3.html").read_text())
    ran = CliRunner().invoke(app, ["report", str(grown[-1]), "--json", "-q"])
    data = json.loads(ran.stdout)
    assert data["html"] is None
    assert len(data["layers"]) == 8
    assert data["budget"]["new"] == surgeon.report(grown[-1]).findings.budget.new


@pytest.mark.parametrize("family", ["gemma3_text", "phi3", "roberta"])
def test_other_families(family: str, tmp_path: Path) -> None:
    base = tiny.checkpoint(tmp_path / "base", family)
    operations = [STATES | {"layers": "all"}] if family == "roberta" else [FUSED, ADAPTERS, SLOTS]
    surgeon.apply(write_plan(tmp_path / "p.yaml", operations), str(base), tmp_path / "out")
    told, _, _ = reported(tmp_path / "out", tmp_path / "page.html", base=base)
    assert told.findings.verification is not None
    assert told.findings.verification.holds
    assert told.findings.budget.base == sum(t.numel() for t in weights(base).values())


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tiny.checkpoint(tmp_path / "base", "llama")


def test_a_tensor_that_trained_in_vain_is_named(grown: list[Path], tmp_path: Path) -> None:
    changes = {"a.weight": (0.0, 0.0), "b.weight": (0.5, None)}
    gate = GateActivity.of({"new": 0.9, "original": 0.01, "by_length": {"<b>": [None, 0.5], "9-": "no", "x": [7, "y"]}})
    run = TrainingRun(surgery=1, steps=3, tokens=9, losses={}, changes=changes, gate=gate)
    told, _, _ = reported(grown[-1], tmp_path / "page.html")
    findings = dataclasses.replace(told.findings, runs=(run,))
    page = render(findings)
    assert "Run 1 trained these tensors without changing them: a.weight." in page
    row = '<tr><td class="number">{}</td><td class="number">{}</td><td class="number">{}</td></tr>'
    assert row.format("&lt;b&gt;", "50.0%", "") in page and row.format("all", "90.0%", "1.0%") in page
    assert "<b>" not in page
    assert GateActivity.of({"new": float("nan"), "original": 0.01}) is GateActivity.of(None) is None
    assert "was zero" in page


def test_losses_of_several_runs_are_one_curve() -> None:
    """The second run's steps follow the first's; a run without curves has its beginning and its end."""
    first = TrainingRun(1, 4, 9, {"a": (3.0, 2.0)}, {})
    second = TrainingRun(2, 2, 9, {"a": (2.0, 1.5)}, {}, curves={"a": ((0, 2.0), (1, 1.75), (2, 1.5))})
    points = ((0, 3.0), (4, 2.0), (4, 2.0), (5, 1.75), (6, 1.5))
    assert curves_of([first, second]) == (Curve("a", points),)
