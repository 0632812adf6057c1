"""`surgeon chat`: answers are those of `evaluate` at equal turns; history, two models, Ctrl-C, refusals."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import surgeon
from surgeon.cli import app
from surgeon.data.generation import Prompter
from tests import tiny
from tests.commands import refused
from tests.training.texts import CHAT_TEMPLATE, add_tokenizer

TOKENS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, the same as a chat model, and one with grafts, which are modules of its own code."""
    made = tmp_path_factory.mktemp("chat")
    add_tokenizer(tiny.checkpoint(made / "base", "llama", num_hidden_layers=2, dtype="float32"))
    add_tokenizer(shutil.copytree(made / "base", made / "chat"), template=CHAT_TEMPLATE)
    surgeon.apply("neutral-residues", made / "chat", made / "grown")
    return made


def chat(*arguments: object, typed: str) -> Result:
    options = ("--tokens", TOKENS, "--device", "cpu")
    return CliRunner().invoke(app, ["chat", *map(str, (*arguments, *options))], input=typed)


def expected(model: Path, *turns: str, system: str = "") -> list[str]:
    """The answers to turns that follow each other, by whole texts through `evaluate`'s own functions."""
    opened, found, before = surgeon.open_checkpoint(model), list[str](), list[dict[str, str]]()
    if system:
        before.append({"role": "system", "content": system})
    loaded, prompter = opened.load(), Prompter(opened.folder)
    for turn in turns:
        if prompter.tokenizer.chat_template:
            rendered = prompter.tokenizer.render([*before, {"role": "user", "content": turn}], prompt=True)
        else:
            rendered = "".join(each["content"] for each in before) + turn
        # This tokenizer adds nothing to a text, so a rendered chat is a plain text.
        [answer] = surgeon.answer(loaded, surgeon.encode_prompts([rendered], opened, tokens=TOKENS, chat=False))
        found.append(answer.text)
        end = "" if prompter.tokenizer.chat_template else "\n"
        before += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer.text + end}]
    return found


@pytest.mark.parametrize("model", ["base", "chat"])
def test_a_prompt_follows_the_turns_before_it(folder: Path, model: str) -> None:
    answers = expected(folder / model, "w3", "w7 w8")
    assert answers[1] != expected(folder / model, "w7 w8")[0], "the turns before make no difference"
    result = chat(folder / model, typed="w3\nw7 w8\n/new\nw7 w8\n\nw9\n")
    assert result.exit_code == 0, result.stderr
    again = expected(folder / model, "w7 w8")
    assert [line.strip() for line in result.stdout.splitlines() if line] == [each.strip() for each in answers + again]
    assert result.stderr.count("no chat template") == (model == "base")


def test_the_base_answers_first_and_keeps_its_own_turns(folder: Path) -> None:
    result = chat(folder / "grown", "--base", folder / "base", typed="w3\nw4\n/exit\nw5\n")
    names = ("base", "grown")
    answers = zip(*(expected(folder / name, "w3", "w4") for name in names), strict=True)
    lines = [f"{folder / name}: {each.strip()}" for both in answers for name, each in zip(names, both, strict=True)]
    assert [" ".join(line.split()) for line in result.stdout.splitlines()] == lines


def test_the_system_s_turn_comes_first(folder: Path) -> None:
    with_system, without = expected(folder / "chat", "w3", system="w50 w51"), expected(folder / "chat", "w3")
    assert with_system != without
    result = chat(folder / "chat", "--system", "w50 w51", typed="w3\n/new\nw3\n")
    assert [line.strip() for line in result.stdout.splitlines() if line] == [with_system[0].strip()] * 2


def test_ctrl_c_ends_an_answer_and_not_the_chat(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = expected(folder / "chat", "w3")[0].split()
    from surgeon.lab.evaluation import chat as module

    kept: list[Any] = []
    put = module._Stream.put

    def signalled(stream: Any, value: Any) -> None:
        put(stream, value)
        kept.append(stream)
        if len(kept) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(module._Stream, "put", signalled)
    result = chat(folder / "chat", typed="w3\n/new\nw3\n")
    assert result.exit_code == 0
    assert [line.split() for line in result.stdout.splitlines() if line] == [whole[:2], whole]
    assert signal.getsignal(signal.SIGINT) is not kept[0].stop


def test_what_cannot_chat_is_refused_in_a_line(folder: Path, tmp_path: Path) -> None:
    assert "no such folder" in refused("chat", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "empty" in refused("chat", folder / "chat", "--base", tmp_path / "empty")
    assert "leave --system out" in refused("chat", folder / "base", "--system", "w1")
    bare = shutil.copytree(folder / "chat", tmp_path / "bare")
    for file in bare.glob("*token*"):
        file.unlink()
    assert "tokenizer" in refused("chat", bare)
    long = chat(folder / "chat", typed="w1 " * 5000)
    assert long.exit_code == 2 and "no room for an answer" in long.stderr and "Traceback" not in long.stderr
    latin = CliRunner().invoke(app, ["chat", str(folder / "chat")], input=b"caf\xe9\n")
    assert latin.exit_code == 2 and "stdin: not UTF-8 text" in latin.stderr
