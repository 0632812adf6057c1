from __future__ import annotations

import io
import json
import re
from functools import partial
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.cli import app
from surgeon.common.listener import Quiet
from surgeon.lab.learning import base, demo
from surgeon.lab.learning.base import code
from surgeon.lab.learning.demo import KNOWN, NEW, _write_config, _write_texts, demo_view, run_demo
from surgeon.training import gate_fitting
from surgeon.training.config.loading import load_config
from surgeon.training.opening import opened_run
from surgeon.training.preparing import prepare
from tests import tiny
from tests.lab.learning.test_base import FEW_STEPS, WHOLE
from tests.training.texts import add_tokenizer, text

README = Path(__file__).resolve().parents[3] / "README.md"


def test_definitions_without_comments_and_documentation(tmp_path: Path) -> None:
    body = "    return [number for number in range(100) if number % 3 == 0 and number % 5 == 0]  # never this\n"
    definition = (
        'class C:\n    """Never this."""\n\n    def f(self):\n        """Never this either."""\n' + "    " + body
    )
    for number in range(11):
        (tmp_path / f"m{number:02}.py").write_text(
            f'"""Module."""\nVALUE = 1\n{definition.replace("C", f"C{number}", 1)}\ndef short():\n    pass\n'
        )
    (tmp_path / "m99.py").write_text("print 'Python 2'\n")
    found = code(tmp_path)
    # The first module and the eleventh.
    assert [each.splitlines()[0] for each in found] == ["class C0:", "class C10:"]
    assert not any("ever this" in each or '"""' in each or "#" in each for each in found)
    assert all("range(100)" in each for each in found)


def test_what_only_has_documentation_stays_code(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        f'class Error(Exception):\n    """Documentation."""\n\nclass {"A" * 80}:\n    """D."""\n'
    )
    assert code(tmp_path) == [f"class {'A' * 80}:\n    pass"]


def test_only_the_new_text_is_trained_on(tmp_path: Path) -> None:
    folder = add_tokenizer(tiny.checkpoint(tmp_path / "base", "llama"))
    known, new = ([text(30, seed, first=first, count=50) for seed in range(60)] for first in (0, 50))
    _write_texts(tmp_path / "texts", known=known, new=new)
    loaded = load_config(_write_config(tmp_path / "train.yaml", "all", 1e-3, steps=9, seed=3))
    out = CheckpointFolder.open(folder)
    run = opened_run(prepare(out, None, loaded, tmp_path / "run", device="cpu", processes=1), Quiet())
    data = run.data
    assert data.validation.keys() == {NEW, KNOWN}
    for _ in range(9 * run.settings.batch):
        # Of what the base knows nothing is trained on.
        assert min(token for token in data.mixture.next().ids if token >= 10) >= 60


@pytest.mark.slow
def test_the_demo_learns_and_forgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    definitions = code()
    monkeypatch.setattr(demo, "documentation", lambda: WHOLE()[:1500])
    monkeypatch.setattr(demo, "code", lambda: definitions[:120])
    monkeypatch.setattr(demo, "LEARNING_SHARE", 2.0)
    monkeypatch.setattr(gate_fitting, "_STEPS", 200)
    # A narrower base, which is verified on less text.
    monkeypatch.setattr(base, "_WIDTH", 96)
    monkeypatch.setattr(demo, "verify", partial(demo.verify, window=32, windows=2))
    shown = run_demo(tmp_path / "demo", seconds=FEW_STEPS, listener=Quiet())
    assert shown.holds
    learned = shown.learning
    assert learned.steps == 12
    assert learned.runs[0].trained.tokens == 12 * 8 * 64
    plain, whole, recalled, whole_recalled, gated = (run.trained for run in learned.runs)
    assert plain.parameters == recalled.parameters == shown.applied.preview.parameters_trainable
    assert whole.parameters == whole_recalled.parameters == shown.base.parameters
    # What is compared differs once: in what trains, at the rate that is its own, or in the remedies.
    configs = [yaml.safe_load(run.trained.path.with_suffix(".yaml").read_text()) for run in learned.runs[:4]]
    trains = [(config.pop("what"), config.pop("optimizer")) for config in configs]
    assert trains[0] == trains[2] != trains[1] == trains[3]
    assert configs[0] == configs[1] != configs[2] == configs[3]
    for run in (plain, whole, recalled, whole_recalled):
        before, after = run.losses[NEW]
        assert before == learned.before[NEW] and after < before
        assert run.losses[KNOWN][0] == learned.before[KNOWN] != run.losses[KNOWN][1]
    # The gate is fitted on new text and on what the base wrote.
    fitted = json.loads((gated.path / "surgery.json").read_text())["training"][0]["gate"]
    assert fitted
    for run in (recalled, whole_recalled):
        assert any("loss.preserve" in entry for entry in run.log)
    assert learned.verification.trained
    assert {path.name for path in (tmp_path / "demo").glob("*.yaml")} == {
        f"{run.trained.path.name}.yaml" for run in learned.runs
    }

    console = Console(width=140, record=True, file=io.StringIO())
    console.print(demo_view(shown))
    page = console.export_text()
    for loss in (learned.before[NEW], *(run.trained.losses[KNOWN][1] for run in learned.runs)):
        assert f"{loss:.3f}" in page
    assert "every tensor of the base is byte for byte in the run with new layers" in page

    # README's lines, in the folder that its first one makes.
    monkeypatch.chdir(tmp_path / "demo")
    (block,) = re.findall(r"^```sh\n(\. .venv/bin/activate .*?)^```$", README.read_text(encoding="utf-8"), re.M | re.S)
    first, _, lines = block.partition("\n")
    config, _, commands = lines.partition("\nEND\n")
    assert first == ". .venv/bin/activate && cd surgeon-demo" and config.startswith("cat > train.yaml <<'END'\n")
    Path("train.yaml").write_text(config.partition("\n")[2].replace("steps: 60", "steps: 3") + "\n")
    # Eight of the held-out documents are enough to see that they are scored.
    held_out = Path("texts") / f"{KNOWN}-held-out.jsonl"
    held_out.write_text("".join(held_out.read_text(encoding="utf-8").splitlines(keepends=True)[:8]), encoding="utf-8")
    printed = ""
    for command in commands.splitlines():
        ran = CliRunner().invoke(app, command.split()[1:])
        assert ran.exit_code == 0, (command, ran.output)
        printed = ran.stdout
    assert all(name in printed for name in ("code", "docs", "base", "tuned", "full", "Δ to base"))
