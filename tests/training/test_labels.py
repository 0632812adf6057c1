"""Labelled texts train the classification head of an encoder, and what surgery added to it."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console

import surgeon
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.common.listener import Quiet
from surgeon.data.examples import batch_of_examples
from surgeon.data.scores import Judged
from surgeon.errors import BadInput
from surgeon.manifest.reading import manifest_of
from surgeon.plan.plan import head_plan
from surgeon.training.config.loading import load_config
from surgeon.training.loading import loaded_model
from surgeon.training.opening import opened_run
from surgeon.training.preparing import prepare
from surgeon.training.steps import trainer
from surgeon.training.train import rehearsal_view
from tests import tiny
from tests.elsewhere import run_elsewhere
from tests.encoders import tiny_encoder
from tests.training.test_train import digests
from tests.training.texts import add_tokenizer, text

NAMES = ("low", "middle", "high")
CONFIG: dict[str, Any] = {
    "surgeon_train": 1,
    "steps": 40,
    "batch": 8,
    "micro_batch": 4,
    "length": 24,
    "evaluate_every": 40,
    "save_every": 20,
    "log_every": 10,
    "optimizer": {"lr": 2e-2, "warmup": 0, "schedule": "constant"},
    "sources": [{"name": "words", "path": "words.jsonl", "kind": "labels", "share": 1.0, "validation": 0.25}],
}


def headed(folder: Path, family: str = "roberta", *, pairs: bool = False, **overrides: Any) -> Path:
    """A tiny encoder with a head for three labels, its tokenizer, and texts of which the words say the label."""
    named = {"id2label": dict(enumerate(NAMES)), "label2id": {name: nth for nth, name in enumerate(NAMES)}}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_hidden_layers": 2}
    base = tiny.model(family, **({"head": "ForSequenceClassification"} | still | named | overrides))
    base.save_pretrained(folder / "base", max_shard_size="30KB")
    add_tokenizer(folder / "base")
    if pairs:
        from tokenizers import Tokenizer
        from tokenizers.processors import TemplateProcessing

        file = folder / "base" / "tokenizer.json"
        tokenizer = Tokenizer.from_file(str(file))
        tokenizer.post_processor = TemplateProcessing(
            single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
        tokenizer.save(str(file))
    rows(folder / "words.jsonl")
    return folder / "base"


def rows(path: Path, *, count: int = 120, pairs: bool = False) -> Path:
    """Texts of the first, second or last thirty words, called so."""
    made = []
    for nth in range(count):
        which = nth % 3
        row: dict[str, Any] = {"text": text(5 + nth % 20, nth, first=30 * which, count=30), "label": NAMES[which]}
        if pairs:
            row["text_pair"] = text(5, nth + 1000, first=0, count=90)
        made.append(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
    return path


def config(folder: Path, **changes: Any) -> Path:
    path = folder / "labels.yaml"
    path.write_text(yaml.safe_dump(CONFIG | changes), encoding="utf-8")
    return path


PLAN = "surgeon: 1\noperations:\n  - {op: mixture_of_control, rank: 4}\n"


def grown(folder: Path, family: str = "roberta", **options: Any) -> Path:
    base = headed(folder, family, **options)
    (folder / "plan.yaml").write_text(PLAN)
    surgeon.apply(folder / "plan.yaml", str(base), folder / "out")
    return folder / "out"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("labels")
    grown(folder)
    return folder, surgeon.train(folder / "out", config(folder, keep_base=True), folder / "run", device="cpu")


def test_the_head_and_what_surgery_added_train(trained: tuple[Path, Any]) -> None:
    folder, run = trained
    manifest = manifest_of(CheckpointFolder.open(folder / "out"))
    base = digests(folder / "base")
    head = {name for name in base if name.startswith("classifier.")}
    assert head
    assert run.changes.keys() == {*manifest.new_tensors, *head}
    after = digests(folder / "run")
    assert all(after[name] == digest for name, digest in base.items() if name not in head)
    before, loss = run.losses["words"]
    assert loss < before - 0.1
    assert run.scores["words"]["accuracy"] > 0.5
    assert run.scores["words"].keys() == {"accuracy", "matthews"}
    assert manifest_of(CheckpointFolder.open(folder / "run")).training[-1].scores == run.scores
    found = surgeon.verify(folder / "base", folder / "run", logits=False)
    assert found.holds, [check for check in found.checks if not check.holds]
    surgeon.revert(folder / "run", folder / "back")
    assert digests(folder / "back") == base


ELSEWHERE = """
import json, sys, torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
run, rows = sys.argv[1:]
model = AutoModelForSequenceClassification.from_pretrained(run, trust_remote_code=True).eval()
tokenizer = AutoTokenizer.from_pretrained(run, trust_remote_code=True)
named = []
for line in open(rows):
    with torch.no_grad():
        ids = torch.tensor([tokenizer(json.loads(line)["text"])["input_ids"][:24]])
        named.append(model.config.id2label[int(model(ids).logits.argmax())])
assert "surgeon" not in sys.modules
json.dump(named, sys.stdout)
"""


def test_the_run_is_judged_and_loads_elsewhere(trained: tuple[Path, Any], tmp_path: Path) -> None:
    """What `evaluate` counts is what a process without surgeon finds, text by text, and what the run said."""
    folder, run = trained
    wanted = [json.loads(line)["label"] for line in (folder / "words.jsonl").read_text().splitlines()]
    found = surgeon.evaluate(
        [folder / "out", folder / "run"], folder / "words.jsonl", labels=True, length=24, most=0, device="cpu", batch=7
    )
    before, after = (found.of(str(folder / name), "words") for name in ("out", "run"))
    assert after.examples == len(wanted)
    assert after.accuracy_difference is not None
    assert after.accuracy_difference.value == pytest.approx(after.accuracy.value - before.accuracy.value)
    named = run_elsewhere(ELSEWHERE, str(folder / "run"), str(folder / "words.jsonl"), cache=tmp_path)
    assert after.accuracy.value == pytest.approx(np.mean([a == b for a, b in zip(named, wanted, strict=True)]))
    held = surgeon.evaluate(folder / "run", config(folder), labels=True, length=24, device="cpu")
    (only,) = held.models[0].sources
    assert only.accuracy.value == run.scores["words"]["accuracy"]
    assert only.loss.value == pytest.approx(run.losses["words"][1], rel=1e-5)
    json.dumps(found.to_json())


class Killed(Exception):
    pass


def test_a_run_that_was_cut_off(trained: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, run = trained
    finish = trainer.complete

    def killed(work: Path, step: int, best: int | None = None) -> None:
        finish(work, step, best)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "complete", killed)
        with pytest.raises(Killed):
            surgeon.train(folder / "out", config(folder), folder / "again", device="cpu")
    again = surgeon.train(folder / "out", config(folder), folder / "again", device="cpu")
    assert again is not None
    assert again.resumed_at == 20
    assert digests(folder / "again") == digests(folder / "run")
    assert (again.scores, again.tokens) == (run.scores, run.tokens)


def test_a_step_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    """The mean over the micro-batches of a step, the balance loss in it, and AdamW: by hand, from the same batches."""
    out = grown(tmp_path, "deberta", pairs=True)
    rows(tmp_path / "words.jsonl", count=40, pairs=True)
    asked = config(tmp_path, steps=3, length=20, optimizer=CONFIG["optimizer"] | {"clip": 0.0, "weight_decay": 0.0})
    opened, loaded = CheckpointFolder.open(out), load_config(asked)
    prepared = prepare(opened, manifest_of(opened), loaded, tmp_path / "no", device="cpu", processes=1)
    run = opened_run(prepared, Quiet())
    model, training = loaded_model(run)
    model.train()
    optimizer = torch.optim.AdamW([model.get_parameter(name) for name in training.names], lr=2e-2, weight_decay=0.0)
    kinds: set[int] = set()
    for _ in range(3):
        for _ in range(2):
            pad = run.data.mixture.streams[0].encoder.pad
            batch = batch_of_examples([run.data.mixture.next() for _ in range(4)], pad=pad)
            kinds |= set(batch["token_type_ids"].flatten().tolist())
            (model(**batch).loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert kinds == {0, 1}
    trained = surgeon.train(out, asked, tmp_path / "run", device="cpu")
    assert trained is not None
    from surgeon.models.outputs import load_encoder

    found = load_encoder(tmp_path / "run", auto="AutoModelForSequenceClassification")
    for name in training.names:
        torch.testing.assert_close(found.get_parameter(name), model.get_parameter(name), atol=1e-6, rtol=1e-5)


def test_a_derived_encoder_with_its_pooler(tmp_path: Path) -> None:
    """`what: all` of a plain base, two labels by number, epochs; BERT's pooler is a part of the head."""
    named = {"id2label": {0: "no", 1: "yes"}, "label2id": {"no": 0, "yes": 1}}
    tiny_encoder(tmp_path / "base", "bert", "AutoModelForSequenceClassification", vocab_size=128, **named)
    add_tokenizer(tmp_path / "base")
    lines = [json.dumps({"text": text(6, nth), "label": nth % 2}) for nth in range(16)]
    (tmp_path / "words.jsonl").write_text("\n".join(lines))
    (tmp_path / "plan.yaml").write_text(PLAN)
    surgeon.apply(tmp_path / "plan.yaml", str(tmp_path / "base"), tmp_path / "out")
    asked = config(tmp_path, steps=None, epochs=1, batch=4)
    run = surgeon.train(tmp_path / "out", asked, tmp_path / "run", device="cpu")
    assert run is not None
    assert run.settings["steps"] == 3
    head = run.changes.keys() & digests(tmp_path / "base").keys()
    assert head == {f"{name}.{part}" for name in ("bert.pooler.dense", "classifier") for part in ("weight", "bias")}
    assert run.unchanged == ()


@pytest.fixture(scope="module")
def headless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A masked-language model without a head for labels, the same with control states, and texts with labels."""
    folder = tmp_path_factory.mktemp("headless")
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_hidden_layers": 2}
    tiny.model("roberta", **still).save_pretrained(folder / "base", max_shard_size="30KB")
    add_tokenizer(folder / "base")
    (folder / "plan.yaml").write_text(PLAN)
    surgeon.apply(folder / "plan.yaml", str(folder / "base"), folder / "out")
    rows(folder / "words.jsonl")
    return folder


def test_an_encoder_without_a_head_gets_one(headless: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for name in ("base", "out") for path in (headless / name).iterdir()}
    said = Quiet()
    asked = config(headless, labels=["high", "low", "middle"])
    run = surgeon.train(headless / "out", asked, tmp_path / "run", device="cpu", listener=said)
    assert run is not None
    assert {path: path.read_bytes() for name in ("base", "out") for path in (headless / name).iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    (line,) = [line for line in said.said if "no classification head" in line]
    assert "made one for 3 labels (high, low, middle), drawn by seed 0" in line
    grown = manifest_of(CheckpointFolder.open(headless / "out")).new_tensors
    head = {f"classifier.{module}.{part}" for module in ("dense", "out_proj") for part in ("weight", "bias")}
    assert run.changes.keys() == {*grown, *head}
    assert run.scores["words"]["accuracy"] > 0.5
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert written["id2label"] == {"0": "high", "1": "low", "2": "middle"}
    for of in ("out", "base"):
        found = surgeon.verify(headless / of, tmp_path / "run")
        assert found.holds, [check for check in found.checks if not check.holds]
    surgeon.revert(tmp_path / "run", tmp_path / "back", to=0)
    assert digests(tmp_path / "back") == digests(headless / "base")
    judged = surgeon.evaluate(tmp_path / "run", asked, labels=True, length=24, device="cpu")
    assert judged.models[0].sources[0].accuracy.value == run.scores["words"]["accuracy"]
    whole = surgeon.evaluate(tmp_path / "run", headless / "words.jsonl", labels=True, length=24, most=0, device="cpu")
    named = run_elsewhere(ELSEWHERE, str(tmp_path / "run"), str(headless / "words.jsonl"), cache=tmp_path)
    wanted = [json.loads(line)["label"] for line in (headless / "words.jsonl").read_text().splitlines()]
    right = np.mean([a == b for a, b in zip(named, wanted, strict=True)])
    assert whole.models[0].sources[0].accuracy.value == pytest.approx(right)
    # The head of an earlier run is the next run's to train, and no new one is made.
    again = surgeon.train(tmp_path / "run", config(headless, what="head", steps=2), tmp_path / "more", device="cpu")
    assert again is not None
    assert again.changes.keys() == head
    assert surgeon.verify(headless / "out", tmp_path / "more", logits=False).holds


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # PEFT asks by the old name
def test_a_lora_beside_a_new_head(headless: Path, tmp_path: Path) -> None:
    """PEFT gives RUN's outputs from the base and the adapter, which holds the head; the base's matrices are merged."""
    import peft
    from transformers import AutoModelForSequenceClassification

    asked = config(headless, steps=6, lora={"rank": 2, "targets": "attention"}, save_every=6, evaluate_every=6)
    run = surgeon.train(headless / "base", asked, tmp_path / "run", device="cpu")
    assert run is not None
    changed = {name for name in run.changes if not name.startswith("classifier.")}
    assert {name.partition(".attention.")[2] for name in changed} == {
        f"{module}.weight" for module in ("self.query", "self.key", "self.value", "output.dense")
    }
    assert len(run.changes) == len(changed) + 4
    assert surgeon.verify(headless / "base", tmp_path / "run", logits=False).holds
    ids = torch.arange(5, 15)[None]
    base = AutoModelForSequenceClassification.from_pretrained(headless / "base", num_labels=3)
    tuned = peft.PeftModel.from_pretrained(base, str(tmp_path / "run" / "adapter")).eval()
    whole = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run").eval()
    with torch.no_grad():
        torch.testing.assert_close(tuned(input_ids=ids).logits, whole(input_ids=ids).logits, atol=1e-5, rtol=1e-5)


def test_a_dry_run_counts_texts_and_labels(headless: Path) -> None:
    there = sorted(headless.iterdir())
    told = surgeon.rehearse(headless / "out", config(headless), headless / "never", device="cpu")
    assert sorted({*headless.iterdir()} - {headless / "labels.yaml"}) == [p for p in there if p.name != "labels.yaml"]
    (source,) = told.sources
    assert sum(source.labels.values()) == source.documents == 90
    assert source.passes == pytest.approx(40 * 8 / 90)
    assert told.tokens == source.run_tokens
    assert told.samples[0].label in NAMES
    assert told.seconds > 0
    shown = StringIO()
    Console(file=shown, width=200).print(rehearsal_view(told))
    assert "its label: " in shown.getvalue()
    json.dumps(told.to_json())


@pytest.mark.parametrize("family", ["bert", "modernbert", "distilbert"])
@pytest.mark.parametrize("bare", [False, True], ids=["masked words", "no head"])
def test_heads_of_derived_encoders(family: str, bare: bool, tmp_path: Path) -> None:
    """Whatever the type calls its head; names of a base without a prefix are kept, and every tensor finds its place."""
    from transformers import AutoModelForSequenceClassification

    tiny_encoder(tmp_path / "base", family, "AutoModel" if bare else "AutoModelForMaskedLM")
    plan = head_plan(["no", "yes"], seed=1)
    surgeon.apply(plan, str(tmp_path / "base"), tmp_path / "out")
    assert surgeon.verify(tmp_path / "base", tmp_path / "out").identical
    model, told = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["mismatched_keys"]
    assert model.config.id2label == {0: "no", 1: "yes"}
    assert 0.01 < float(model.get_parameter("classifier.weight").detach().std()) < 0.03
    surgeon.apply(plan, str(tmp_path / "base"), tmp_path / "same")
    assert digests(tmp_path / "same") == digests(tmp_path / "out")


def test_the_figures_are_sklearns() -> None:
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    drawn = np.random.default_rng(1)
    for labels in (2, 3):
        wanted, given = drawn.integers(labels, size=(2, 50))
        found = Judged(np.zeros(50), given, wanted, labels)
        assert found.accuracy.value == pytest.approx(accuracy_score(wanted, given))
        assert found.matthews == pytest.approx(matthews_corrcoef(wanted, given))
        assert found.f1 == (None if labels > 2 else pytest.approx(f1_score(wanted, given)))
    alone = Judged(np.zeros(3), np.zeros(3, dtype=int), np.zeros(3, dtype=int), 2)
    assert (alone.f1, alone.matthews) == (None, None)


def test_what_is_refused(tmp_path: Path) -> None:
    # Like the real RoBERTa's, the model is not told to which text a token belongs.
    out = grown(tmp_path, type_vocab_size=1)

    def refused(told: str, *lines: dict[str, Any], model: Path = out, **changes: Any) -> None:
        if lines:
            (tmp_path / "words.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        with pytest.raises(BadInput, match=told):
            surgeon.train(model, config(tmp_path, **changes), tmp_path / "run", device="cpu")
        assert not (tmp_path / "run").exists()

    low, high = {"text": "w1", "label": "low"}, {"text": "w99", "label": "high"}
    refused(r"words\.jsonl:2: no key `label`; .*add it", low, {"text": "w2"})
    refused(
        r"`label` is neither a name nor a whole number \(0\.5\); labels are classes", low, {"text": "w2", "label": 0.5}
    )
    refused(
        r"the label 'huge' is none of the model's \(low, middle, high\)", *[low] * 3, {"text": "w", "label": "huge"}
    )
    refused("every text has the label 'low'; there is nothing to tell apart", *[low] * 4)
    pair = {"text": "w1", "text_pair": "w2", "label": "middle"}
    refused("puts nothing between two texts; join them yourself in `text`, or use a base", pair, low, high, low)
    mixed = [*CONFIG["sources"], {"name": "fr", "path": "words.jsonl", "share": 0.0}]
    refused("source 'fr' is of the kind text, others have labels; one run trains one task", low, high, sources=mixed)
    refused("`preserve` holds next tokens to the base's", preserve={"loss": "kl"})
    refused("`sharding` is for language models", sharding="fsdp")
    refused("`labels` is for an encoder without a classification head, .* has one for low, middle, high", labels=2)
    refused("`labels` names 'low' twice", labels=["low", "low"])
    refused("has 134 positions, a window has 136 tokens", *[low, high] * 4, length=136)
    decoder = add_tokenizer(tiny.checkpoint(tmp_path / "decoder", "llama"))
    refused(r"`kind: labels` trains .*is a decoder \(llama\); have it write the labels", model=decoder, what="all")
    masked = add_tokenizer(tiny.checkpoint(tmp_path / "masked", "roberta"))

    def unknown(told: str, *labels: object, **changes: Any) -> None:
        refused(told, *({"text": "w1", "label": label} for label in labels), model=masked, what="all", **changes)
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".run")]

    unknown(r"some texts have names as labels \('high'\), others numbers \(1\)", "low", 1, "high", 2)
    unknown("every text has the label 'low'", *["low"] * 4)
    unknown("the label -1; classes are numbered from 0", -1, 0, 1, 2)
    unknown("have 100,000 labels, at most 1,000 are learned; are they classes", 99_999, 0, 1, 2)
    unknown("`labels` is 3, and the texts have the label 3; .*use 4 at least", 0, 1, 2, 3, labels=3)
    unknown("the label 'low' is none of the model's", "low", "high", "low", "high", labels=["huge", "tiny"])
    text_alone = [{"name": "t", "path": "words.jsonl", "share": 1.0}]
    refused("`what: head` is for texts with labels", model=masked, what="head", sources=text_alone)
    data = tmp_path / "words.jsonl"
    with pytest.raises(BadInput, match=r"an encoder, which predicts no next token; .*--labels"):
        surgeon.evaluate(out, data, device="cpu")
    with pytest.raises(BadInput, match="no classification model, and the data has labels"):
        surgeon.evaluate(decoder, data, labels=True, device="cpu")
    with pytest.raises(BadInput, match=r"source words has labels; give --labels"):
        surgeon.evaluate(out, config(tmp_path), device="cpu")
