"""`surgeon evaluate --prompt`: answers are transformers' own greedy ones, of grafted models too; what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import surgeon
from surgeon.cli import app
from surgeon.errors import BadInput
from surgeon.lab.evaluation.evaluate import evaluation_view
from tests import tiny
from tests.common.test_tables import lines
from tests.test_api import check_json
from tests.training.texts import CHAT_TEMPLATE, WORDS, add_tokenizer, json_lines

PROMPTS = ["w3", "w7 w8 w9 w60 w2"]
# What a stranger's checkpoint may ask of generation.
STRANGE = {
    "do_sample": True,
    "temperature": 9.0,
    "num_beams": 3,
    "repetition_penalty": 5.0,
    "min_new_tokens": 30,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, the same as a chat model, and grafted outputs whose new weights are drawn at random."""
    made = tmp_path_factory.mktemp("answers")
    add_tokenizer(tiny.checkpoint(made / "base", "llama", num_hidden_layers=4, dtype="float32"))
    add_tokenizer(shutil.copytree(made / "base", made / "chat"), template=CHAT_TEMPLATE)
    for plan in ("neutral-residues", "pmoe", "mixture-of-control"):
        surgeon.apply(plan, str(made / "base"), made / plan)
        changed = shutil.copytree(made / plan, made / f"{plan}-changed")
        for shard in changed.glob("*.safetensors"):
            tensors, draw = load_file(shard), torch.Generator().manual_seed(0)
            new = {name for name in tensors if name not in surgeon.open_checkpoint(made / "base").tensors}
            for name in sorted(new):
                tensors[name] = (torch.randn(tensors[name].shape, generator=draw) / 5).to(tensors[name].dtype)
            save_file(tensors, shard, metadata={"format": "pt"})
    json_lines(made / "fr.jsonl", ["w1 w2 w3", "w4 w5"])
    return made


def transformers_own(model: Path, prompt: str, tokens: int) -> tuple[str, int]:
    """The answer by transformers alone, and its length in tokens."""
    tokenizer, running = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    if tokenizer.chat_template:
        turn = [{"role": "user", "content": prompt}]
        given = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    else:
        given = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    made = running.generate(**given, max_new_tokens=tokens, do_sample=False)[0, given["input_ids"].shape[1] :]
    text = tokenizer.decode(made, skip_special_tokens=True)
    return text.strip(), len(made) - int(made[-1] == tokenizer.eos_token_id)


@pytest.mark.parametrize("model", ["base", "chat"])
def test_answers_are_transformers_own_greedy_ones(folder: Path, tmp_path: Path, model: str) -> None:
    """Whatever a checkpoint's own generation settings are."""
    found = surgeon.evaluate(folder / model, prompts=PROMPTS, answer_tokens=12, device="cpu")
    expected = [transformers_own(folder / model, prompt, 12) for prompt in PROMPTS]
    assert [(each.text.strip(), each.tokens) for each in found.models[0].answers] == expected
    assert len({text for text, _ in expected}) == 2, "the two prompts have one answer"
    shutil.copytree(folder / model, tmp_path / "other")
    for name in ("config.json", "generation_config.json"):
        path = tmp_path / "other" / name
        settings = json.loads(path.read_text()) if path.exists() else {}
        # No token of the model's ends a text here.
        ends = {"eos_token_id": [-1, 128, 2**63]} if name == "generation_config.json" else {}
        path.write_text(json.dumps(settings | STRANGE | ends))
    other = surgeon.evaluate(tmp_path / "other", prompts=PROMPTS, answer_tokens=12, device="cpu")
    assert other.models[0].answers == found.models[0].answers


def test_a_chat_template_makes_another_answer(folder: Path) -> None:
    found = surgeon.evaluate([folder / "base", folder / "chat"], prompts=PROMPTS[0], answer_tokens=6, device="cpu")
    base, chat = (found.answer(str(folder / name), PROMPTS[0]).text for name in ("base", "chat"))
    assert base.strip() != chat.strip()
    with pytest.raises(KeyError):
        found.answer("base", PROMPTS[0])


@pytest.mark.parametrize("ends", ["generation_config.json", "template"])
def test_an_answer_ends_where_its_turn_does(folder: Path, tmp_path: Path, ends: str) -> None:
    """By the generation settings or the template, although config.json names another token."""
    whole = surgeon.evaluate(folder / "chat", prompts=PROMPTS[0], answer_tokens=12, device="cpu").models[0].answers[0]
    assert not whole.ended and whole.tokens == 12
    words = whole.text.split()
    last = next(word for word in words[2:] if word in WORDS)
    shutil.copytree(folder / "chat", tmp_path / "ends")
    number = AutoTokenizer.from_pretrained(folder / "chat").convert_tokens_to_ids(last)
    if ends == "template":
        settings = json.loads((tmp_path / "ends" / "tokenizer_config.json").read_text())
        settings["extra_special_tokens"] = [last]
        (tmp_path / "ends" / "tokenizer_config.json").write_text(json.dumps(settings))
        # Users' turns, and so the prompt, are as they were.
        template = CHAT_TEMPLATE.replace("</s>", "{{ '" + last + "' if m.role == 'assistant' else '</s>' }}")
        (tmp_path / "ends" / "chat_template.jinja").write_text(template)
    else:
        (tmp_path / "ends" / ends).write_text(json.dumps({"eos_token_id": [2, number]}))
    cut = surgeon.evaluate(tmp_path / "ends", prompts=PROMPTS[0], answer_tokens=12, device="cpu").models[0].answers[0]
    assert cut.ended and cut.text.split() == words[: words.index(last)]


@pytest.mark.parametrize("plan", ["neutral-residues", "pmoe", "mixture-of-control"])
def test_grafted_models_answer_too(folder: Path, plan: str) -> None:
    """As their base at birth; changed, as a loop over whole forwards does."""
    models = [folder / plan, folder / f"{plan}-changed"]
    found = surgeon.evaluate(models, base=folder / "base", prompts=PROMPTS, answer_tokens=8, device="cpu")
    base, born, changed = (row.answers for row in found.models)
    assert born == base != changed
    checkpoint = surgeon.open_checkpoint(models[1])
    model, tokenizer = checkpoint.load(), checkpoint.tokenizer()
    for prompt, answer in zip(PROMPTS, changed, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        begin = ids.shape[1]
        with torch.no_grad():
            while ids.shape[1] < begin + 8 and (next_id := model(ids).logits[:, -1:].argmax(-1)).item() != 2:
                ids = torch.cat([ids, next_id], dim=1)
        assert answer.tokens == ids.shape[1] - begin
        assert answer.text.split() == tokenizer.decode(ids[0, begin:], skip_special_tokens=True).split()


def test_the_command_shows_answers_under_each_other_with_and_without_text(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    given = ["evaluate", "pmoe-changed", "--base", "base", "--prompt", PROMPTS[0], "--prompt", PROMPTS[1]]
    given += ["--answer-tokens", "5", "--device", "cpu"]
    alone = CliRunner().invoke(app, given)
    assert alone.exit_code == 0, alone.output
    data = json.loads(CliRunner().invoke(app, [*given, "--json"]).stdout)
    assert [each["prompt"] for each in data["answers"]] == PROMPTS and data["length"] is None
    shown = [line.split(maxsplit=1) for line in alone.stdout.splitlines() if line.strip()]
    expected = []
    for each in data["answers"]:
        expected.append(["prompt", each["prompt"]])
        for row in each["models"]:
            expected.append([row["model"], row["text"].strip() + " …" * (not row["ended"])])
            assert row["tokens"] <= 5
    assert [[name, text.strip()] for name, text in shown] == expected
    both = CliRunner().invoke(app, [*given, "--data", "fr.jsonl"])
    assert "Δ to base" in both.stdout and alone.stdout in both.stdout
    found = surgeon.evaluate("base", "fr.jsonl", prompts=PROMPTS[0], answer_tokens=2, device="cpu")
    check_json(found)
    assert found.models[0].same_tokens is True and repr(found).endswith("1 answers)")


def test_a_context_cuts_an_answer_and_no_prompt(folder: Path) -> None:
    prompt = " ".join(WORDS[:100] + WORDS[:25])
    found = surgeon.evaluate(folder / "base", prompts=["w1", prompt], device="cpu")
    assert found.notes == (f"{folder / 'base'}: its context of 128 leaves 3 tokens for the answer to prompt 2",)
    assert found.models[0].answers[1].tokens <= 3 < found.models[0].answers[0].tokens


def test_nothing_of_an_answer_reaches_the_terminal_as_it_is(folder: Path) -> None:
    spoken = "one\x1b[2J\u202e\r\ntwo\x07\u2028three [bold]"
    found = surgeon.evaluate(folder / "base", prompts="w1", answer_tokens=1, device="cpu")
    answers = (surgeon.Answer(spoken, (1, 2, 3), True), surgeon.Answer("", (), True))
    (row,) = found.models
    rows = tuple(type(row)(name, None, (), (each,)) for name, each in zip(("a\x1b", "b"), answers, strict=True))
    view = evaluation_view(type(found)(rows, None, "auto", "cpu", (), ("w1\x1b",)))
    shown = [line.rstrip() for line in lines(view, 80)]
    assert shown == [
        r"prompt  w1\x1b",
        r"a\x1b   one\x1b[2J\u202e\r",
        r"        two\x07\u2028three [bold]",
        "b       (no words)",
    ]


def test_bad_prompts_are_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_tokenizer(tiny.checkpoint(folder / "encoder", "roberta"))
    long = " ".join(WORDS[:100] * 2)
    given: list[tuple[str, dict[str, Any], str]] = [
        ("base", {"prompts": "w1", "answer_tokens": 4000, "length": 1}, "length is 1"),
        ("base", {"prompts": ["w1", long]}, r"base: prompt 2 \(w0 w1 .*\) has 200 tokens, and its context of 128 has"),
        ("encoder", {"prompts": "w1"}, "an encoder, which predicts no next token"),
    ]
    for model, options, told in given:
        with pytest.raises(BadInput, match=told) as raised:
            surgeon.evaluate(folder / model, device="cpu", **options)
        assert "\n" not in str(raised.value)

    def no_torch(device: str) -> str:
        raise AssertionError("torch was asked for a device")

    monkeypatch.setattr("surgeon.common.devices.resolve", no_torch)
    for arguments, told in (
        ([], "nothing to evaluate on: give text (--data), a prompt to answer (--prompt), or prompts by which"),
        (["--answers", "shipped"], "--answers compares a model's answers with its base's; give the base too (--base)"),
        (["--answers", "none.txt", "--base", str(folder / "base")], "none.txt"),
        (["--answers", "shipped", "--labels", "--data", "fr.jsonl"], "answer no prompts; leave --answers out"),
        (["--prompt", "w1", "--prompt", " \n"], "prompt 2 is empty; give the words that the models are to answer"),
        (["--prompt", "w1\udcff"], r"prompt 1 (w1\udcff) is not UTF-8 text; give it in that encoding"),
        (["--prompt", "w1", "--labels", "--data", "fr.jsonl"], "answer no prompts; leave --prompt out"),
        (["--prompt", "w1", "--source", "fr"], "--source fr: there is no data to take it from; give --data too"),
    ):
        ran = CliRunner().invoke(app, ["evaluate", str(folder / "base"), *arguments])
        assert ran.exit_code == 2 and ran.stderr.count("\n") == 1, ran.output
        assert ran.stderr.startswith("surgeon: ") and told in ran.stderr


def test_answers_kept_are_a_table_and_data(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every model beside the first; the figures are those of `kept_answers`."""
    monkeypatch.chdir(folder)
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt, "expected": "w"}) + "\n" for prompt in PROMPTS)
    )
    given = ["evaluate", "pmoe", "pmoe-changed", "--base", "base", "--answers", "prompts.jsonl", "--device", "cpu"]
    data = json.loads(CliRunner().invoke(app, [*given, "--json"]).stdout)
    opened = [surgeon.open_checkpoint(folder / name) for name in ("pmoe", "pmoe-changed")]
    asked = surgeon.read_prompts("prompts.jsonl")
    expected = surgeon.kept_answers(surgeon.open_checkpoint(folder / "base"), opened, asked, device="cpu")
    assert ["kept" in row for row in data["models"]] == [False, True, True]
    assert [row["kept"] for row in data["models"][1:]] == [each.to_json() for each in expected]
    assert data["models"][1]["kept"]["same"]["value"] == 1 > data["models"][2]["kept"]["same"]["value"]
    shown = CliRunner().invoke(app, given).stdout
    assert "2 answers" in shown and "before the first difference" in shown and "pmoe-changed" in shown
