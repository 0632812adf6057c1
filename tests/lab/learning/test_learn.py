"""`surgeon learn`: what it makes is what its plan and training file make by hand, and reverts to the base."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from rich.console import Console

import surgeon
from surgeon.checkpoint.folder import CheckpointFolder, digests_of
from surgeon.errors import BadInput
from surgeon.lab.learning import learn as module
from surgeon.lab.learning.learn import learned_view
from tests import tiny
from tests.test_api import check_json
from tests.training.texts import CHAT_TEMPLATE, add_tokenizer, corpus
from tests.warm import warm


def digests(folder: Path) -> dict[str, str]:
    opened = CheckpointFolder.open(folder)
    return digests_of(opened, opened.tensors, lambda _count: None)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny chat model, a text beside it, little to recall, and 42 steps on any machine."""
    monkeypatch.setattr(module, "_speed", lambda _trained: 9000.0)
    monkeypatch.setattr(module, "_LEAST_RECALL", 400)
    monkeypatch.setattr(module, "_ANSWERS", 200)
    corpus(tmp_path / "new.jsonl", seed=1, first=50, count=50)
    (tmp_path / "prompts.txt").write_text("".join(f"w{n} w{n + 1}\n" for n in range(12)))
    return add_tokenizer(tiny.checkpoint(tmp_path / "base", "llama", num_hidden_layers=4), template=CHAT_TEMPLATE)


def learned(base: Path, **given: Any) -> Any:
    folder = base.parent
    settings = {"minutes": 0.1, "answers": folder / "prompts.txt", "device": "cpu", "to": folder / "run"} | given
    return surgeon.learn(base, **{"new": [folder / "new.jsonl"]} | settings)


@pytest.mark.parametrize("way", ["layers", "most", "exact"])
def test_by_hand_the_same_bytes_and_back(base: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands that it names make the model again; it learned; reverted it is the base."""
    folder = base.parent
    if way == "exact":
        # A base of random weights writes anything, so no gate can tell new text from its own, and neither is known.
        monkeypatch.setattr(module, "recall", lambda *_, to, **__: corpus(to, seed=2, count=50))
        monkeypatch.setattr(module._Learning, "check_is_new", lambda _: None)
    found = learned(base, **({way: True} if way != "layers" else {}))
    assert found.way == way and found.verification.holds
    check_json(found)
    losses = {row.model: found.evaluation.of(row.model, "new").loss.value for row in found.evaluation.models}
    assert losses[str(folder / "run")] < losses[str(base)] - 0.05
    kept = found.evaluation.models[1].kept
    assert kept is not None and len(kept.prompts) == 12 and kept.kl is not None
    surgeon.revert(folder / "run", folder / "again", to=0)
    assert digests(folder / "again") == digests(base)
    for command in found.commands:
        subprocess.run([*warm(), "-m", *command.split()], cwd=found.work, check=True, capture_output=True, timeout=300)
    by_hand = found.work / ("blended" if found.share < 1 else "run")
    assert digests(by_hand) == digests(folder / "run")
    console = Console(width=240)
    with console.capture() as shown:
        console.print(learned_view(found))
    told = " ".join(shown.get().split())
    assert "KL a token" in told and "by hand" in told and "what it promises of the base holds" in told


def test_an_output_is_a_base_of_which_all_trains(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is blended with the output that it began with, and undone as far as that."""
    monkeypatch.setattr(module, "share_by_answers", lambda *_, **__: 0.5)
    grown = surgeon.apply("llama-pro", base, base.parent / "grown").path
    found = learned(grown, most=True)
    assert found.share == 0.5 and found.verification.holds
    surgeon.revert(base.parent / "run", base.parent / "again", to=0)
    assert digests(base.parent / "again") == digests(base)


def test_it_continues_where_it_was_cut_off(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was recalled, grown and decided stays; another request in its place is refused."""

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(module, "share_by_answers", killed)
        learned(base)
    work = base.parent / "run-learn"
    decided = json.loads((work / "decided.json").read_text())
    before = digests(work / "run")
    assert not (base.parent / "run").exists()
    said: list[str] = []
    with pytest.raises(BadInput, match=r"run-learn: is of a call with --seed 0, not 1; give the same again"):
        learned(base, seed=1, listener=SimpleNamespace(say=said.append))  # type: ignore[arg-type]
    assert not said, "that the same command continues is said where it does"
    moved = work.rename(base.parent / "elsewhere")
    shutil.copytree(moved, work)
    with pytest.raises(BadInput, match=r"run-learn: was not begun by this user in this place, so nothing in it is"):
        learned(base)
    shutil.rmtree(work)
    moved.rename(work)
    monkeypatch.setattr(module, "train", killed)
    monkeypatch.setattr(module, "share_by_answers", lambda *_, **__: 1.0)
    found = learned(base)
    assert (found.steps, found.rate) == (decided["steps"], decided["rate"])
    assert digests(base.parent / "run") == before


def test_a_data_file_says_how_rows_are_read(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys stand in the training file and in what was asked; without one, errors show how it is written."""
    folder = base.parent
    rows = (folder / "new.jsonl").read_text().replace('"text"', '"body"')
    (folder / "new.jsonl").write_text(rows + "{\n")
    with pytest.raises(
        BadInput, match=r"(?s)field: KEY.*\n.*--new DATA.yaml, which holds `{surgeon_data: 1, sources: "
    ):
        learned(base)
    entry = {"name": "mine", "path": "new.jsonl", "bad_rows": "leave_out", "field": "body"}
    data = folder / "data.yaml"
    data.write_text(yaml.safe_dump({"surgeon_data": 1, "sources": [entry]}))
    with pytest.raises(BadInput, match=r"b=.*: a data file names its sources itself; leave `b=` out"):
        learned(base, new=[f"b={data}"])
    monkeypatch.setattr(module, "share_by_answers", lambda *_, **__: 1.0)
    found = learned(base, new=[data])
    source = entry | {"path": str(folder / "new.jsonl")}
    (written, *_) = yaml.safe_load((found.work / "train.yaml").read_text())["sources"]
    assert {key: written[key] for key in source} == source
    assert json.loads((found.work / "decided.json").read_text())["asked"]["texts"] == {"mine": source}
    with pytest.raises(BadInput, match=r"train.yaml: a training file; for --new write a data file: `{surgeon_data: 1"):
        learned(base, new=[found.work / "train.yaml"], to=folder / "other")


def test_text_that_the_base_knows_is_refused(base: Path) -> None:
    """Its own text, above all."""
    folder = base.parent
    (folder / "new.jsonl").unlink()
    surgeon.recall(base, tokens=400, length=128, to=folder / "new.jsonl", device="cpu")
    with pytest.raises(BadInput, match="bits a byte, no more than text of its own"):
        learned(base)
    assert not (folder / "run").exists()


def test_refusals(base: Path) -> None:
    folder = base.parent
    for given, told in (
        ({"most": True, "exact": True}, "give one of them"),
        ({"minutes": 0}, "--minutes 0: must be more than 0"),
        ({"minutes": float("nan")}, "--minutes nan: must be more than 0"),
        ({"minutes": float("inf")}, "--minutes inf: must be more than 0, and at most 100,000"),
        ({"seed": 2**32}, "--seed 4294967296: must be at least 0, and below 4,294,967,296"),
        ({"seed": -1}, "--seed -1: must be at least 0"),
        ({"answers": folder / "none.txt"}, "none.txt"),
        ({"minutes": 0.01}, "has time for 4 steps of 512 tokens here, from which little is learned; give about"),
    ):
        with pytest.raises(BadInput, match=told):
            learned(base, **given)
        shutil.rmtree(folder / "run-learn", ignore_errors=True)
    (folder / "long.txt").write_text("w1 " * 200)
    with pytest.raises(BadInput, match="has no room for an answer"):
        learned(base, answers=folder / "long.txt")
    assert not (folder / "run-learn").exists()
    (base / "chat_template.jinja").unlink()
    chat = {"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]}
    (folder / "chats.jsonl").write_text(json.dumps(chat))
    with pytest.raises(BadInput, match="its tokenizer has no chat template, which chats need"):
        surgeon.learn(base, new=[folder / "chats.jsonl"], to=folder / "run", device="cpu")
    assert not (folder / "run-learn").exists()
    with pytest.raises(BadInput, match="nothing to learn"):
        surgeon.learn(base, new=[], to=folder / "run")
    with pytest.raises(BadInput, match=r"missing\.txt"):
        surgeon.learn(base, new=[folder / "missing.txt"], to=folder / "run")
    with pytest.raises(BadInput, match="the name own is taken"):
        surgeon.learn(base, new=[f"own={folder / 'new.jsonl'}"], to=folder / "run")
