"""`surgeon evaluate --mtp`: forwards are counted as transformers makes them, and tokens are the model's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import surgeon
from surgeon.data import drafts
from surgeon.errors import BadInput
from surgeon.evaluate.evaluate import evaluation_view
from tests import mtp
from tests.common.test_tables import lines
from tests.test_api import check_json
from tests.train.test_train import config
from tests.train.texts import add_tokenizer, corpus, json_lines, text

WRITTEN = 16


def forwards(folder: Path, ids: list[int]) -> int:
    """Forwards that one MTP layer's drafts need, each from the whole text before it, without its cache."""
    model = mtp.loaded(folder)
    written = model.generate(
        torch.tensor([ids]), do_sample=False, max_new_tokens=WRITTEN, eos_token_id=None, pad_token_id=0
    )[0].tolist()
    done, count = 1, 1
    while done < WRITTEN:
        known = written[: len(ids) + done]
        (drafted,) = mtp.drafts(model, torch.tensor([known]))
        done += 1 + (int(drafted[0, -1].argmax()) == written[len(known)])
        count += 1
    return count


def test_tokens_a_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "WRITTEN", WRITTEN)
    corpus(tmp_path / "fr.jsonl", seed=1)
    corpus(tmp_path / "en.jsonl", seed=2)
    add_tokenizer(mtp.checkpoint(tmp_path / "base", "mellum", dtype="float32"))
    how = config(tmp_path, what="mtp", steps=25, save_every=25, optimizer={"lr": 3e-2})
    surgeon.train(tmp_path / "base", how, tmp_path / "run", device="cpu")
    texts = [text(70, 1), text(9, 2)]
    held = json_lines(tmp_path / "held.jsonl", texts)
    found = surgeon.evaluate([tmp_path / "base", tmp_path / "run"], held, mtp=True, length=64)
    check_json(found)
    tokenizer = surgeon.open_checkpoint(tmp_path / "base").tokenizer()
    # A text ends with a token more.
    prompts = [tokenizer(texts[0]).input_ids[:32], tokenizer(texts[1]).input_ids[:5]]
    values = []
    for row in found.models:
        of = row.drafts["held"]
        counts = [forwards(Path(row.model), ids) for ids in prompts]
        assert of.tokens_a_forward.value == pytest.approx(2 * WRITTEN / sum(counts))
        assert (of.documents, of.same) == (2, 2)
        values.append(of.tokens_a_forward.value)
    assert values[1] > values[0]
    assert f"{values[1]:.3f} [" in (shown := " ".join(lines(evaluation_view(found), 160)))
    assert "2 of 2" in shown


def test_refused(tmp_path: Path) -> None:
    base = add_tokenizer(mtp.checkpoint(tmp_path / "base", "glm4_moe", depth=0))
    held = json_lines(tmp_path / "held.jsonl", [text(50, 1)])
    with pytest.raises(BadInput, match="no `num_mtp_layers`"):
        surgeon.evaluate(base, held, mtp=True)
    with pytest.raises(BadInput, match="--mtp has models write on from texts"):
        surgeon.evaluate(base, prompts="w1", mtp=True)
