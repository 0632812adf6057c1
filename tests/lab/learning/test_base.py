from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

import surgeon
from surgeon.common.listener import Quiet
from surgeon.lab.learning.base import DemoBase, documentation, make_base
from surgeon.models.load import load_model
from surgeon.models.tokens import token_batches

WHOLE = cache(documentation)
FEW_STEPS = 0.5


@dataclass(frozen=True)
class Made:
    """A base of a few steps, made by one core: its steps as counted, and the random state before and after."""

    base: DemoBase
    steps: list[int]
    states: tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    steps: list[int] = []
    heard = Quiet()
    heard.begin, heard.advance = lambda *begun: steps.append(begun[1]), steps.append
    before = torch.get_rng_state()
    folder = tmp_path_factory.mktemp("base")
    with cores(1):
        base = make_base(folder, WHOLE()[:1500], seconds=FEW_STEPS, seed=3, listener=heard)
    return Made(base, steps, (before, torch.get_rng_state()))


@contextlib.contextmanager
def cores(count: int) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
        assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)


def test_a_few_steps_make_a_complete_checkpoint(made: Made) -> None:
    base, folder = made.base, made.base.folder
    assert torch.equal(*made.states)
    assert isinstance(base, DemoBase) and base.tokens_trained == 6 * 8 * 64
    assert 0 < base.validation_loss < base.validation_loss_before
    # Six steps begin, and each is done.
    assert made.steps == [6, *6 * [1]]

    assert len(list(folder.glob("model-*.safetensors"))) >= 3
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "llama" and not config["tie_word_embeddings"]
    assert config["num_key_value_heads"] < config["num_attention_heads"] and config["num_hidden_layers"] >= 6
    generation = json.loads((folder / "generation_config.json").read_text())
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    assert [generation[name] for name in ids] == [config[name] for name in ids] == [0, 1, 2]

    model = load_model(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert base.parameters == sum(parameter.numel() for parameter in model.parameters())
    tokens = token_batches(folder, text=None, vocabulary=config["vocab_size"])
    assert "built-in" in tokens.source and tokens.ids.shape == (8, 128)
    tokenizer = surgeon.open_checkpoint(folder).tokenizer()
    names = "Return the list of naïve names — 名前"
    assert tokenizer.decode(tokenizer(names)["input_ids"], skip_special_tokens=True) == names


def test_only_the_seed_decides(made: Made, tmp_path: Path) -> None:
    """The number of cores does not."""
    results = []
    for name, seed, count in (("again", 3, 2), ("other", 4, 1)):
        with cores(count):
            results.append(make_base(tmp_path / name, WHOLE()[:1500], seconds=FEW_STEPS, seed=seed, listener=Quiet()))
    assert made.base.validation_loss == results[0].validation_loss != results[1].validation_loss
    first, again = made.base.folder, tmp_path / "again"
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in again.iterdir())
    assert all((first / name).read_bytes() == (again / name).read_bytes() for name in names)
