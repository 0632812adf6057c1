"""A Hub id as base: preview without a byte of weights, apply through the cache, the commit in the manifest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import surgeon
from tests.checkpoint.stand_in_hub import COMMIT, Hub, files_of, serve
from tests.commands import run_surgeon
from tests.training.texts import add_tokenizer, corpus


def test_preview_apply_and_offline(base: Path, tmp_path: Path) -> None:
    home, out = tmp_path / "home", tmp_path / "out"
    with serve(Hub(files_of(base))) as hub:
        shown = run_surgeon(hub, home, "preview", "llama-pro", "user/model", "--json")
        assert shown.returncode == 0, shown.stderr
        assert json.loads(shown.stdout)["parameters"]["before"] > 0
        looked = run_surgeon(hub, home, "inspect", f"user/model@{COMMIT}", "--json")
        assert looked.returncode == 0, looked.stderr
        assert json.loads(looked.stdout)["layers"] == surgeon.inspect(base).anatomy.sizes.layers
        whole = sum(path.stat().st_size for path in base.glob("*.safetensors"))
        assert sum(count for _, name, count in hub.sent if name.endswith(".safetensors")) < whole / 2

        applied = run_surgeon(hub, home, "apply", "llama-pro", "user/model", str(out))
        assert applied.returncode == 0, applied.stderr
    manifest = surgeon.inspect(out).manifest
    assert (manifest.base.id, manifest.base.revision) == ("user/model", COMMIT)
    assert surgeon.verify(base, out, logits=False).holds

    # The server is gone: what is cached serves offline, what is not is one clear line.
    given = ["verify", f"user/model@{COMMIT}", str(out), "--static", "--json"]
    offline = run_surgeon(hub, home, *given, HF_HUB_OFFLINE="1")
    assert offline.returncode == 0 and json.loads(offline.stdout)["holds"], offline.stderr
    missing = run_surgeon(hub, tmp_path / "empty", "preview", "llama-pro", "user/model", HF_HUB_OFFLINE="1")
    assert missing.returncode == 2
    assert missing.stderr.startswith("surgeon: ")
    assert "Traceback" not in missing.stderr


def test_an_output_on_the_hub_is_evaluated_beside_its_base_here(base: Path, tmp_path: Path) -> None:
    """Its code, which is what this version ships, comes along and runs unasked."""
    add_tokenizer(base)
    surgeon.apply("neutral-residues", str(base), tmp_path / "out")
    corpus(tmp_path / "fr.jsonl", documents=12)
    with serve(Hub(files_of(tmp_path / "out"))) as hub:
        given = ["evaluate", f"user/model@{COMMIT}", "--base", str(base), "--data", str(tmp_path / "fr.jsonl")]
        ran = run_surgeon(hub, tmp_path / "home", *given, "--json", "--device", "cpu")
        assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert [row["model"] for row in found["models"]] == [str(base), f"user/model@{COMMIT}"]
    assert found["models"][1]["sources"]["fr"]["loss_difference"] == {"value": 0, "low": 0, "high": 0}
    assert found["notes"] == []


@pytest.mark.slow
def test_a_continual_run_from_the_hub(base: Path, tmp_path: Path) -> None:
    add_tokenizer(base)
    tasks = "surgeon_continual: 1\ntrain: {steps: 2, batch: 2, length: 16}\ntasks:\n"
    for number, name in enumerate(("a", "b")):
        corpus(tmp_path / f"{name}.jsonl", seed=number)
        tasks += f"  - {{name: {name}, sources: [{{path: {name}.jsonl, validation: 0.1}}]}}\n"
    (tmp_path / "tasks.yaml").write_text(tasks, encoding="utf-8")
    with serve(Hub(files_of(base))) as hub:
        given = [str(tmp_path / "tasks.yaml"), "user/model", str(tmp_path / "run")]
        ran = run_surgeon(hub, tmp_path / "home", "continual", *given, "--json", "--device", "cpu")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["base"] == "user/model"
    manifest = surgeon.inspect(tmp_path / "run").manifest
    assert [(surgery.base.id, surgery.base.revision) for surgery in manifest.lineage] == [("user/model", COMMIT)]
    assert surgeon.verify(base, tmp_path / "run", logits=False).holds
