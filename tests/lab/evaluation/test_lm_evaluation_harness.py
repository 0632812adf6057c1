"""EleutherAI's lm-evaluation-harness on outputs as they are: its own command, offline, without surgeon."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import surgeon
from surgeon.models.load import load_model
from tests import tiny
from tests.elsewhere import WITHOUT_SURGEON
from tests.training.texts import WORDS, add_tokenizer, json_lines, text
from tests.warm import warm

pytest.importorskip("lm_eval", reason="needs the extra lm-eval")

TASKS = Path(__file__).parent / "tasks"
# The command `lm_eval`, once for each list of arguments, in a process whose imports of surgeon fail.
COMMAND = (
    WITHOUT_SURGEON
    + """
from functools import partialmethod
from lm_eval.__main__ import cli_evaluate
from lm_eval.tasks import TaskManager
# None of the 14,000 tasks that it brings is asked for, and every call reads them all, which takes longer than the rest.
TaskManager.__init__ = partialmethod(TaskManager.__init__, include_defaults=False)
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["lm_eval", *arguments]
    cli_evaluate()
"""
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, outputs, and a folder of tasks with their data."""
    made = tmp_path_factory.mktemp("harness")
    add_tokenizer(tiny.checkpoint(made / "base", "llama", num_hidden_layers=4, max_position_embeddings=64))
    surgeon.apply("neutral-residues", str(made / "base"), made / "out")
    shutil.copytree(TASKS, made / "tasks")
    json_lines(made / "rolling_text.jsonl", [text(words, words) for words in (12, 20, 150)])
    with (made / "next_word.jsonl").open("w") as file:
        for number in range(8):
            choices = [" " + WORDS[(number * 7 + step) % 100] for step in (1, 20, 40)]
            question = {"context": text(9, number), "choices": choices, "answer": number % 3}
            file.write(json.dumps(question) + "\n")
    return made


def harness(folder: Path, **models: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """For each folder of a model, with what is said of it: results and samples, by task."""
    common = "--model hf --tasks next_word,rolling_text --include_path tasks --device cpu --batch_size 4 --log_samples"
    asked = [
        [
            *common.split(),
            "--model_args",
            f"pretrained={model},dtype=float32{more}",
            "--output_path",
            f"results/{model}",
        ]
        for model, more in models.items()
    ]
    ran = subprocess.run(
        [*warm(), "-c", COMMAND, json.dumps(asked)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    for model in models:
        (results,) = (folder / "results" / model).rglob("results_*.json")
        samples = {
            task: [json.loads(line) for line in next(results.parent.glob(f"samples_{task}_*")).read_text().splitlines()]
            for task in ("next_word", "rolling_text")
        }
        yield json.loads(results.read_text())["results"], samples


@pytest.mark.slow
def test_it_runs_on_outputs_and_a_preserving_one_scores_as_its_base(folder: Path) -> None:
    (base, base_samples), (found, samples) = harness(folder, base="", out=",trust_remote_code=True")
    assert math.isfinite(base["rolling_text"]["word_perplexity,none"]) and 0 <= base["next_word"]["acc,none"] <= 1
    assert numbers(found) == numbers(base)
    for task, theirs in base_samples.items():
        assert [s["filtered_resps"] for s in samples[task]] == [s["filtered_resps"] for s in theirs]
    # What it finds is what plain torch finds.
    running = load_model(folder / "base", dtype="float32")
    for sample in base_samples["next_word"]:
        context = [10 + WORDS.index(word) for word in sample["doc"]["context"].split()]
        for choice, (told, _greedy) in zip(sample["doc"]["choices"], sample["filtered_resps"], strict=True):
            ids = torch.tensor([[*context, 10 + WORDS.index(choice.strip())]])
            with torch.no_grad():
                expected = -F.cross_entropy(running(ids).logits[0, -2:-1], ids[0, -1:])
            assert float(told) == pytest.approx(float(expected), abs=1e-4)


def numbers(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {task: {k: v for k, v in found.items() if "," in k} for task, found in results.items()}
