"""`surgeon evaluate`: beside plain torch, beside the base, across tokenizers, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from typer.testing import CliRunner

import surgeon
from surgeon.cli import app
from surgeon.data.encoding import Encoder
from surgeon.errors import BadInput
from surgeon.lab.evaluation.open_texts import open_texts
from surgeon.lab.evaluation.results import Evaluation
from surgeon.models.load import load_model
from surgeon.models.templates import TEMPLATES
from tests import tiny
from tests.models.test_tokens import byte_tokenizer
from tests.training.test_train import config
from tests.training.texts import CHAT_TEMPLATE, WORDS, add_tokenizer, corpus, json_lines, text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, outputs of it, one of them with other new weights, and texts."""
    made = tmp_path_factory.mktemp("evaluated")
    add_tokenizer(tiny.checkpoint(made / "base", "llama", num_hidden_layers=4))
    for plan in ("neutral-residues", "mixture-of-control", "pmoe"):
        surgeon.apply(plan, str(made / "base"), made / plan)
    shutil.copytree(made / "neutral-residues", made / "changed")
    for shard in (made / "changed").glob("*.safetensors"):
        tensors = load_file(shard)
        draw = torch.Generator().manual_seed(0)
        for name, tensor in tensors.items():
            if "adapter" in name:
                tensors[name] = (torch.randn(tensor.shape, generator=draw) / 20).to(tensor.dtype)
        save_file(tensors, shard, metadata={"format": "pt"})
    corpus(made / "fr.jsonl", documents=60, seed=1, first=50, count=50)
    corpus(made / "en.jsonl", seed=2, count=50)
    json_lines(made / "long.jsonl", [text(words, words) for words in (40, 260, 128, 127, 500, 3)])
    return made


def plainly(model: Path, data: Path, *, context: int) -> tuple[list[float], list[int], list[int], list[int]]:
    """Each document's nats, tokens, right guesses and bytes, window by window, in plain torch."""
    running = load_model(model, dtype="float32")
    encoder = Encoder(model, vocabulary=10**9)
    sums: tuple[list[float], list[int], list[int], list[int]] = ([], [], [], [])
    for line in data.read_text().splitlines():
        ids = torch.tensor([*encoder.tokenizer.ids(json.loads(line)["text"]), encoder.tokenizer.eos_token_id])
        nats, right = 0.0, 0
        for begin in range(0, len(ids) - 1, context - 1):
            window = ids[begin : begin + context]
            with torch.no_grad():
                logits = running(window[None]).logits[0, :-1].float()
            nats += float(F.cross_entropy(logits, window[1:], reduction="sum"))
            right += int((logits.argmax(-1) == window[1:]).sum())
        first = encoder.tokenizer.decode(ids[:1].tolist())
        for kept, value in zip(
            sums, (nats, len(ids) - 1, right, len(json.loads(line)["text"].encode()) - len(first)), strict=True
        ):
            kept.append(value)  # type: ignore[arg-type]
    return sums


def plain_kl(base: Path, model: Path, file: Path) -> float:
    """Σ p log(p / q) a token, in float64 over both models' own logits, of documents that fit a window."""
    encoder, models = Encoder(base, vocabulary=10**9), [surgeon.open_checkpoint(each).load() for each in (base, model)]
    nats, tokens = 0.0, 0
    for line in file.read_text(encoding="utf-8").splitlines():
        ids = torch.tensor([[*encoder.tokenizer.ids(json.loads(line)["text"]), encoder.tokenizer.eos_token_id]])
        assert ids.shape[1] <= 128
        with torch.no_grad():
            p, q = (each(ids).logits[0, :-1].double().softmax(-1) for each in models)
        nats += float((p * (p / q).log()).sum())
        tokens += ids.shape[1] - 1
    return nats / tokens


@pytest.mark.parametrize("model", ["base", "changed", "mixture-of-control"])
def test_numbers_are_those_of_plain_torch_window_by_window(folder: Path, model: str) -> None:
    found = surgeon.evaluate(folder / model, folder / "long.jsonl", dtype="float32", device="cpu", batch=3)
    (scores,) = found.models[0].sources
    nats, tokens, right, nbytes = plainly(folder / model, folder / "long.jsonl", context=128)
    assert (scores.source, scores.documents, scores.tokens, scores.nbytes) == ("long", 6, sum(tokens), sum(nbytes))
    assert scores.loss.value == pytest.approx(sum(nats) / sum(tokens), rel=1e-6)
    assert scores.perplexity.value == pytest.approx(math.exp(sum(nats) / sum(tokens)), rel=1e-5)
    assert scores.bits_per_byte.value == pytest.approx(sum(nats) / math.log(2) / sum(nbytes), rel=1e-6)
    assert scores.accuracy.value == sum(right) / sum(tokens)
    mean = sum(nats) / sum(tokens)
    residuals = np.array(nats) - mean * np.array(tokens)
    reach = 2.5706 * math.sqrt(6 / 5 * float((residuals**2).sum())) / sum(tokens)  # Student's t, 5 degrees, 97.5 %
    assert scores.loss.interval == pytest.approx((mean - reach, mean + reach), rel=1e-5)
    assert (
        any("longer than 128 tokens" in note for note in found.notes) and sum("longer" in n for n in found.notes) == 1
    )


def test_a_preserving_output_is_its_base_exactly_and_a_changed_one_is_told_apart(folder: Path) -> None:
    names = ["neutral-residues", "mixture-of-control", "pmoe", "changed"]
    data = {"fr": folder / "fr.jsonl", "long": folder / "long.jsonl"}
    found = surgeon.evaluate([folder / name for name in names], data, base=folder / "base", kl=True, device="cpu")
    assert [row.model for row in found.models] == [str(folder / name) for name in ("base", *names)]
    first = found.models[0].sources
    assert all(scores.loss_difference is None is scores.bits_difference is scores.apart for scores in first)
    for row in found.models[1:-1]:
        for scores, base in zip(row.sources, first, strict=True):
            assert scores.loss == base.loss and scores.accuracy == base.accuracy
            for beside in (scores.loss_difference, scores.bits_difference, scores.apart):
                assert beside is not None
                assert (beside.value, beside.interval) == (0, (0, 0))
    changed = found.of(str(folder / "changed"), "fr")
    assert changed.loss_difference is not None and changed.loss_difference.interval is not None
    low, high = changed.loss_difference.interval
    assert changed.loss_difference.value == pytest.approx(changed.loss.value - first[0].loss.value)
    assert low < changed.loss_difference.value < high
    # Paired, so far narrower than the spread of the loss itself.
    assert changed.loss.interval is not None
    assert high - low < changed.loss.interval[1] - changed.loss.interval[0]
    assert changed.apart is not None
    assert changed.apart.value == pytest.approx(
        plain_kl(folder / "base", folder / "changed", folder / "fr.jsonl"), rel=1e-3
    )
    assert not any("--base" in note for note in found.notes)
    assert repr(found).startswith("Evaluation(5 models, ") and "\n" not in repr(found)
    assert found.of(str(folder / "pmoe"), "long").documents == 6
    with pytest.raises(KeyError):
        found.of("pmoe", "short")


def test_batches_do_not_change_what_is_found(folder: Path) -> None:
    one, many = (
        surgeon.evaluate(folder / "changed", folder / "fr.jsonl", batch=batch, dtype="float32", device="cpu").models[0]
        for batch in (1, 16)
    )
    assert one.sources[0].loss.value == pytest.approx(many.sources[0].loss.value, rel=1e-6)
    assert one.sources[0].tokens == many.sources[0].tokens


def test_tokenizers_that_differ_are_compared_by_bytes(folder: Path, tmp_path: Path) -> None:
    other = byte_tokenizer(tiny.checkpoint(tmp_path / "bytes", "llama", vocab_size=300), eos=True)
    found = surgeon.evaluate([folder / "base", tmp_path / "bytes"], folder / "fr.jsonl", device="cpu")
    base, beside = (row.sources[0] for row in found.models)
    assert other is None or beside.tokens > 3 * base.tokens
    assert not found.models[1].same_tokens and beside.loss_difference is None
    assert beside.bits_difference is not None
    assert beside.bits_difference.value == pytest.approx(beside.bits_per_byte.value - base.bits_per_byte.value)
    assert any("compare bits per byte" in note for note in found.notes)


def test_of_what_is_not_foretold_no_byte_counts(folder: Path, tmp_path: Path) -> None:
    """The first token, where it is a word; with a beginning-of-sequence token every byte is foretold."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    shutil.copytree(folder / "base", tmp_path / "begins")
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save_pretrained(tmp_path / "begins")
    path = json_lines(tmp_path / "a.jsonl", ["w10 w11 w12", "w1 w2"])
    without, begun = (
        surgeon.evaluate(model, path, device="cpu").models[0].sources[0]
        for model in (folder / "base", tmp_path / "begins")
    )
    assert (without.tokens, without.nbytes) == (3 + 2, len(" w11 w12") + len(" w2"))
    assert (begun.tokens, begun.nbytes) == (4 + 3, len("w10 w11 w12") + len("w1 w2"))


def test_chats_are_scored_by_what_the_assistant_says(tmp_path: Path) -> None:
    base = add_tokenizer(tiny.checkpoint(tmp_path / "base", "llama"), template=CHAT_TEMPLATE)
    chat = [{"role": "user", "content": "w1 w2 w3"}, {"role": "assistant", "content": "w4 w5"}]
    (tmp_path / "chat.jsonl").write_text((json.dumps({"turns": chat}) + "\n") * 3)
    data = tmp_path / "data.yaml"
    entry = {"name": "chat", "path": "chat.jsonl", "kind": "chat", "field": "turns"}
    data.write_text(yaml.safe_dump({"surgeon_data": 1, "sources": [entry]}))
    (found,) = surgeon.evaluate(base, data, device="cpu").models[0].sources
    assert (found.documents, found.tokens, found.nbytes) == (3, 3 * 3, 3 * len("w4 w5"))


def test_a_training_config_s_chat_template_is_for_models_without_one(tmp_path: Path) -> None:
    bare = add_tokenizer(tiny.checkpoint(tmp_path / "bare", "llama"))
    own = add_tokenizer(shutil.copytree(bare, tmp_path / "own"), template=CHAT_TEMPLATE)
    named = add_tokenizer(shutil.copytree(bare, tmp_path / "named"), template=TEMPLATES["zephyr"])
    chat = [{"role": "user", "content": "w1 w2 w3"}, {"role": "assistant", "content": "w4 w5"}]
    (tmp_path / "chat.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 4)
    source = {"name": "chat", "path": "chat.jsonl", "kind": "chat", "share": 1.0, "validation": 0.5}
    data = config(tmp_path, sources=[source], chat_template="zephyr")
    rows = surgeon.evaluate([named, bare, own], data, device="cpu").models
    losses = [row.sources[0].loss for row in rows]
    assert losses[0] == losses[1] != losses[2]
    with pytest.raises(BadInput, match="bare: its tokenizer has no chat template"):
        surgeon.evaluate(bare, config(tmp_path, sources=[source]), device="cpu")


def test_chats_that_a_template_refuses_are_named_by_line_before_a_model_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As training does, whichever model it is; left out, they are left out for every model."""
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHAT_TEMPLATE
    models = [tmp_path / name for name in ("base", "other")]
    for model, template in zip(models, (CHAT_TEMPLATE, strict), strict=True):
        add_tokenizer(tiny.checkpoint(model, "llama"), template=template)
    turns = [{"role": "user", "content": "w1 w2 w3"}, {"role": "assistant", "content": "w4 w5"}]
    chats = [turns, turns, [{"role": "system", "content": "w6"}, *turns], turns]
    (tmp_path / "folder").mkdir()
    data = json_lines(tmp_path / "folder" / "chat.jsonl", chats, key="messages")  # type: ignore[arg-type]
    with monkeypatch.context() as without, pytest.raises(BadInput) as caught:
        without.setattr("surgeon.manifest.checkpoint.Checkpoint.load", lambda *_a, **_k: pytest.fail("a model is run"))
        surgeon.evaluate(models, data, device="cpu")
    assert str(caught.value).startswith(f"{data}:3: {tmp_path}/other/chat_template.jinja: its chat template fails on")
    assert "(no system); remove this chat (1 of 4 rows: line 3; to leave them out, give" in str(caught.value)
    with pytest.raises(BadInput, match=r"\(1 of 4 rows: chat.jsonl line 3; "):
        surgeon.evaluate(models[1], data.parent, device="cpu")
    entry = {"name": "chat", "path": str(data), "bad_rows": "leave_out"}
    (tmp_path / "data.yaml").write_text(yaml.safe_dump({"surgeon_data": 1, "sources": [entry]}))
    found = surgeon.evaluate(models, tmp_path / "data.yaml", device="cpu")
    assert [row.sources[0].documents for row in found.models] == [3, 3]
    assert "source chat: 1 rows that cannot be used are left out (`bad_rows`): chat.jsonl:3" in found.notes


def test_a_training_config_gives_what_training_held_out(folder: Path, tmp_path: Path) -> None:
    for name in ("fr.jsonl", "en.jsonl"):
        shutil.copy(folder / name, tmp_path)
    sources: list[dict[str, Any]] = [
        {"name": "fr", "path": "fr.jsonl", "share": 1.0, "validation": 0.1},
        {"name": "en", "path": "en.jsonl", "share": 0.0, "validation": "en.jsonl"},
        {"name": "rest", "path": "en.jsonl", "share": 0.0, "validation": 0.0},
    ]
    said: list[str] = []
    held = {each.name: each for each in open_texts(config(tmp_path, sources=sources), say=said.append)}
    assert {name: len(each.numbers) for name, each in held.items()} == {"fr": 6, "en": 60}
    assert said == ["source rest: skipped, because the training config holds none of it out"]
    (only,) = open_texts(config(tmp_path, sources=sources), only=["fr"], most=4, say=said.append)
    assert set(only.numbers) < set(held["fr"].numbers) and len(only.numbers) == 4
    assert said[-1] == "source fr: 4 of its 6 documents (--most)"


def test_the_losses_are_those_that_training_tells(folder: Path, tmp_path: Path) -> None:
    """Of documents that fit a sequence each, by the same model."""
    for name in ("fr.jsonl", "en.jsonl"):
        shutil.copy(folder / name, tmp_path)
    path = config(tmp_path, steps=2, length=64, validation_sequences=1000)
    trained = surgeon.train(folder / "neutral-residues", path, tmp_path / "run", device="cpu")
    assert trained is not None
    for model, moment in ((folder / "neutral-residues", 0), (tmp_path / "run", 1)):
        found = surgeon.evaluate(model, path, device="cpu")
        for scores in found.models[0].sources:
            # Training drops the last sequence where it is not full, and begins none with a cut document's first token.
            assert scores.loss.value == pytest.approx(trained.losses[scores.source][moment], rel=0.05)


def test_the_command_shows_a_table_or_json(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    given = ["evaluate", "changed", "--base", "base", "--data", "fr.jsonl", "--data", "english=en.jsonl"]
    shown = CliRunner().invoke(app, [*given, "--device", "cpu", "--most", "20"])
    assert shown.exit_code == 0, shown.output
    assert "Δ to base" in shown.stdout and "english 20 documents" in shown.stdout
    assert "source fr: 20 of its 60 documents (--most)" in shown.stderr
    told = CliRunner().invoke(app, [*given, "--device", "cpu", "--most", "20", "--json", "--source", "english"])
    data = json.loads(told.stdout)
    assert [row["model"] for row in data["models"]] == ["base", "changed"]
    assert data["models"][0]["sources"].keys() == {"english"}
    cell = data["models"][1]["sources"]["english"]
    assert cell["loss_difference"]["low"] < cell["loss_difference"]["value"] < cell["loss_difference"]["high"]
    assert f"{cell['loss']['value']:.4f}" in shown.stdout
    alone = CliRunner().invoke(app, ["evaluate", "changed", "--data", "fr.jsonl", "--device", "cpu"])
    assert alone.exit_code == 0 and "Δ" not in alone.stdout


def test_a_loss_that_is_no_number_is_told_as_one(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "base", tmp_path / "broken")
    for shard in (tmp_path / "broken").glob("*.safetensors"):
        tensors = load_file(shard)
        tensors = {k: v * float("nan") if k == "model.norm.weight" else v for k, v in tensors.items()}
        save_file(tensors, shard, metadata={"format": "pt"})
    found = surgeon.evaluate([tmp_path / "broken", folder / "base"], folder / "fr.jsonl", device="cpu", most=5)
    told = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert told["models"][0]["sources"]["fr"]["loss"]["value"] == "nan"
    assert isinstance(told["models"][1]["sources"]["fr"]["loss"]["value"], float)
    assert "broken: it computes NaN, which model.norm.weight holds; get it again" in [
        note.replace(f"{tmp_path}/", "") for note in found.notes
    ]
    with pytest.raises(BadInput, match=r"broken: it computes NaN, which model\.norm\.weight holds; get it again"):
        surgeon.recall(tmp_path / "broken", tokens=60, to=tmp_path / "x.jsonl", length=16, prompts="begin")


def evaluated(folder: Path, model: str, *data: str, **options: Any) -> Evaluation:
    return surgeon.evaluate(folder / model, [d.replace("FOLDER", str(folder)) for d in data], device="cpu", **options)


def test_bad_input_is_one_line(folder: Path, tmp_path: Path) -> None:
    (folder / "blank.jsonl").write_text('{"text": "  "}\n')
    (folder / "bad.jsonl").write_text('{"text": "w1 w2"}\n{"text": \n')
    (folder / "data.yaml").write_text("surgeon_data: 1\nsources:\n  - {name: a, path: fr.jsonl, shar: 1}\n")
    (folder / "short.jsonl").write_text('{"text": "w1"}\n')
    shutil.copytree(folder / "base", folder / "mute", ignore=shutil.ignore_patterns("tokenizer*"), dirs_exist_ok=True)
    shutil.copytree(folder / "base", folder / "torn", dirs_exist_ok=True)
    text_of = (folder / "torn" / "config.json").read_text()
    (folder / "torn" / "config.json").write_text(text_of.replace('"num_hidden_layers": 4', '"num_hidden_layers": 5'))
    add_tokenizer(tiny.checkpoint(folder / "encoder", "roberta"))
    fine = "FOLDER/fr.jsonl"
    for model, data, options, told in (
        ("absent", [fine], {}, "absent"),
        ("mute", [fine], {}, "no tokenizer that can be loaded"),
        ("torn", [fine], {}, r"model\.layers\.4\."),
        ("encoder", [fine], {}, "an encoder"),
        ("base", ["FOLDER/none.jsonl"], {}, r"none\.jsonl: no such file"),
        ("base", ["FOLDER/blank.jsonl"], {}, r"blank\.jsonl: no document with text"),
        ("base", ["FOLDER/bad.jsonl"], {}, r"bad\.jsonl:2: not JSON"),
        ("base", ["FOLDER/data.yaml"], {}, r"data\.yaml:3: unknown key `shar`"),
        ("base", ["a=FOLDER/data.yaml"], {}, "names its sources itself"),
        ("base", [fine, fine], {}, "the name fr is used twice"),
        ("base", [fine], {"sources": ["de"]}, "--source de: no such source; the data has fr"),
        ("base", [fine], {"length": 1}, "length is 1"),
        ("base", [fine], {"dtype": "int8"}, "dtype 'int8' is not known"),
        ("base", [], {}, "no data"),
    ):
        with pytest.raises(BadInput, match=told) as raised:
            evaluated(folder, model, *data, **options)
        assert "\n" not in str(raised.value)
    ran = CliRunner().invoke(app, ["evaluate", str(folder / "base"), "--data", str(folder / "none.jsonl")])
    assert ran.exit_code == 2 and ran.stderr.startswith("surgeon: ")


def test_a_source_of_one_token_documents_is_refused(folder: Path, tmp_path: Path) -> None:
    """They have an end besides, unless the tokenizer has none."""
    shutil.copytree(folder / "base", tmp_path / "endless")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (path := tmp_path / "endless" / name).exists():
            path.write_text(path.read_text().replace('"eos_token"', '"an_end"'))
    path = json_lines(tmp_path / "one.jsonl", [WORDS[3], WORDS[4]])
    with pytest.raises(BadInput, match="source one: none of its tokens counts"):
        surgeon.evaluate(tmp_path / "endless", path, device="cpu")
    (ends,) = surgeon.evaluate(folder / "base", path, device="cpu").models[0].sources
    # What is foretold is the two ends, which stand for no byte.
    assert (ends.tokens, ends.nbytes) == (2, 0)
    assert math.isfinite(ends.loss.value) and math.isnan(ends.bits_per_byte.value)
