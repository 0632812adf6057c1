"""Scores of a model beside plain torch on one document at a time, and intervals beside a bootstrap."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from surgeon.data.encoding import Encoder
from surgeon.data.packing import PackedSequence, Packer, held_out
from surgeon.data.scores import Scores, difference, ratio
from surgeon.data.scoring import score_sequences
from surgeon.models.load import load_model
from tests import tiny
from tests.training.texts import add_tokenizer, corpus, opened_texts


def drawn(units: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Nats and tokens of units of very different lengths, hard and easy ones."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(5, 200, units)
    return tokens * (3 + draw.normal(0, 0.5, units)), tokens


def test_scores_are_those_of_documents_run_one_by_one(tmp_path: Path) -> None:
    folder = add_tokenizer(tiny.checkpoint(tmp_path / "base", "llama"))
    model = load_model(folder, dtype="float32")
    documents = opened_texts(corpus(tmp_path / "a.jsonl", documents=20))
    encoder = Encoder(folder, vocabulary=128)
    sequences = held_out(documents, range(20), encoder, Packer(24, "isolated", 0), most=100)
    units = [np.cumsum([position == 0 for position in each.positions]) - 1 for each in sequences]
    for number in range(1, len(units)):
        units[number] += units[number - 1][-1] + 1
    found = score_sequences(model, sequences, micro_batch=4, units=units, unit_count=int(units[-1][-1]) + 1)
    nats, tokens, right = [], [], []
    for sequence in sequences:
        begins = [n for n, position in enumerate(sequence.positions) if position == 0] + [len(sequence.ids)]
        for begin, end in itertools.pairwise(begins):
            ids = torch.tensor([sequence.ids[begin:end]])
            with torch.no_grad():
                logits = model(ids).logits[0, :-1]
            nats.append(float(F.cross_entropy(logits, ids[0, 1:], reduction="sum")) if end - begin > 1 else 0.0)
            tokens.append(end - begin - 1)
            right.append(int((logits.argmax(-1) == ids[0, 1:]).sum()))
    np.testing.assert_allclose(found.nats, nats, rtol=1e-5)
    assert found.tokens.tolist() == tokens
    assert found.right.tolist() == right
    assert found.perplexity.value == pytest.approx(np.exp(sum(nats) / sum(tokens)), rel=1e-5)
    whole = score_sequences(model, sequences, micro_batch=3)
    assert len(whole.nats) == len(sequences)
    assert whole.loss == pytest.approx(found.loss, rel=1e-6)
    assert not model.training


class Table(nn.Module):
    """A bigram model in bfloat16: each token's logits are a row of a table."""

    def __init__(self, seed: int = 0, words: int = 50) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=words)
        made = torch.randn(words, words, generator=torch.Generator().manual_seed(seed)) * 3
        self.rows = nn.Parameter(made.to(torch.bfloat16))

    def forward(self, input_ids: torch.Tensor, **_: object) -> SimpleNamespace:
        return SimpleNamespace(logits=self.rows[input_ids])


def test_losses_of_a_model_in_bfloat16_are_computed_in_float32() -> None:
    ids = torch.randint(50, (3, 20), generator=torch.Generator().manual_seed(1)).tolist()
    sequences = [PackedSequence(each, each, list(range(20)), 0) for each in ids]
    model = Table()
    found = score_sequences(model, sequences, micro_batch=2)
    rows = model.rows.detach().double()
    expected = [
        float(F.cross_entropy(rows[torch.tensor(each[:-1])], torch.tensor(each[1:]), reduction="sum")) for each in ids
    ]
    np.testing.assert_allclose(found.nats, expected, rtol=1e-6)
    # Beside another model: KL(other ‖ model), not the reverse, over the tokens that both have.
    other = Table(seed=2, words=60)
    apart = score_sequences(model, sequences, micro_batch=2, beside=other)
    p, q = (each.rows.detach().double()[:50, :50].softmax(-1) for each in (other, model))
    kl = (p * (p / q).log()).sum(-1)
    np.testing.assert_allclose(apart.nats, [float(kl[torch.tensor(each[:-1])].sum()) for each in ids], rtol=1e-5)
    same = p.argmax(-1) == q.argmax(-1)
    assert apart.right.tolist() == [int(same[torch.tensor(each[:-1])].sum()) for each in ids]
    assert score_sequences(model, sequences, micro_batch=2, beside=model).loss == 0.0


@pytest.mark.parametrize("units", [40, 400])
def test_the_interval_is_a_bootstraps(units: int) -> None:
    nats, tokens = drawn(units, 0)
    found = ratio(nats, tokens)
    draw = np.random.default_rng(1).integers(0, units, (20_000, units))
    resampled = nats[draw].sum(1) / tokens[draw].sum(1)
    assert found.value == nats.sum() / tokens.sum()
    assert found.interval is not None
    wide = found.interval[1] - found.interval[0]
    np.testing.assert_allclose(found.interval, np.quantile(resampled, [0.025, 0.975]), atol=0.06 * wide)


def test_of_few_units_the_interval_holds_the_truth_more_often_than_a_bootstraps() -> None:
    """And nearly as often as it says."""
    held = resampled_held = 0
    for seed in range(1000):
        nats, tokens = drawn(6, seed)
        interval = ratio(nats, tokens).interval
        assert interval is not None
        held += interval[0] < 3 < interval[1]
        draw = np.random.default_rng(seed).integers(0, 6, (400, 6))
        low, high = np.quantile(nats[draw].sum(1) / tokens[draw].sum(1), [0.025, 0.975])
        resampled_held += low < 3 < high
    assert 910 < held < 960
    assert resampled_held < held - 50


def test_a_paired_difference_is_a_bootstraps_and_narrower_than_an_unpaired_one() -> None:
    nats, tokens = drawn(200, 3)
    better = nats - tokens * (0.1 + np.random.default_rng(4).normal(0, 0.02, 200))
    found = difference(better, tokens, nats, tokens)
    draw = np.random.default_rng(5).integers(0, 200, (20_000, 200))
    resampled = (better[draw].sum(1) - nats[draw].sum(1)) / tokens[draw].sum(1)
    assert found.interval is not None
    np.testing.assert_allclose(found.interval, np.quantile(resampled, [0.025, 0.975]), atol=5e-4)
    alone = ratio(nats, tokens).interval
    assert alone is not None
    assert found.interval[1] - found.interval[0] < 0.1 * (alone[1] - alone[0])
    assert difference(nats, tokens, nats, tokens).interval == (0, 0)


def test_one_unit_has_no_interval_and_perplexity_may_be_infinite() -> None:
    one = Scores(np.array([1e6]), np.array([10]), np.array([3]))
    assert one.loss_ratio.interval is None
    assert one.perplexity.value == np.inf
    assert one.accuracy.value == 0.3
