from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch

from surgeon.demo import base as demo
from surgeon.demo.base import DemoBase, documentation, make_base, sample
from surgeon.models.load import load_model
from surgeon.models.tokens import token_batches

WHOLE = cache(documentation)
FEW_STEPS = 0.5


@pytest.fixture
def little_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "documentation", lambda: WHOLE()[:1500])


def test_a_few_steps_make_a_complete_checkpoint(little_text: None, tmp_path: Path) -> None:
    told: list[tuple[float, str]] = []
    state = torch.get_rng_state()
    made = make_base(tmp_path, seconds=FEW_STEPS, seed=1, progress=lambda share, words: told.append((share, words)))
    assert torch.equal(state, torch.get_rng_state())
    assert isinstance(made, DemoBase) and made.folder == tmp_path and made.steps == 6
    assert 0 < made.validation_loss < made.validation_loss_before and made.train_loss > 0
    shares = [share for share, _ in told]
    assert shares == sorted(shares) and (shares[0], shares[-1]) == (0.0, 1.0)
    assert any("step 6 of 6" in words for _, words in told)

    assert len(list(tmp_path.glob("model-*.safetensors"))) >= 3
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "llama" and not config["tie_word_embeddings"]
    assert config["num_key_value_heads"] < config["num_attention_heads"] and config["num_hidden_layers"] >= 6
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    assert [generation[name] for name in ids] == [config[name] for name in ids] == [0, 1, 2]

    model = load_model(tmp_path)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert made.parameters == sum(parameter.numel() for parameter in model.parameters())
    tokens = token_batches(tmp_path, text=None, vocabulary=config["vocab_size"])
    assert "built-in" in tokens.source and tokens.ids.shape == (8, 128)
    written = sample(tmp_path, "Return the list of naïve names — 名前", 4)
    # What was said before is the prompt, letter by letter: the tokenizer loses nothing.
    assert written.startswith("Return the list of naïve names — 名前")


def test_only_the_seed_decides(little_text: None, tmp_path: Path) -> None:
    first, again, other = (tmp_path / name for name in ("first", "again", "other"))
    threads = torch.get_num_threads()
    results = []
    try:
        # The number of cores does not.
        for folder, seed, cores in ((first, 3, 1), (again, 3, 2), (other, 4, 1)):
            torch.set_num_threads(cores)
            results.append(make_base(folder, seconds=FEW_STEPS, seed=seed))
            assert torch.get_num_threads() == cores
    finally:
        torch.set_num_threads(threads)
    assert results[0].validation_loss == results[1].validation_loss != results[2].validation_loss
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in again.iterdir())
    assert all((first / name).read_bytes() == (again / name).read_bytes() for name in names)


@pytest.mark.slow
def test_half_the_demos_training_writes_words(tmp_path: Path) -> None:
    made = make_base(tmp_path, seconds=12)
    assert made.validation_loss < 4.5 < 7 < made.validation_loss_before
    words = {word for text in WHOLE() for word in re.findall(r"[a-z]+", text.lower())}
    for prompt in ("Return the", "This module provides"):
        written = sample(tmp_path, prompt, 48).removeprefix(prompt)
        found = re.findall(r"[a-z]+", written.lower())
        assert len(found) >= 20 and len(set(found)) >= 6
        assert sum(word in words for word in found) >= 0.9 * len(found)
