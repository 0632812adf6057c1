"""Sampling with rows that are filled again: each text is what it would be alone, whatever stands beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from surgeon.data.decoding import Asked, Decoder, Making
from surgeon.data.generation import Turn
from surgeon.errors import BadInput
from tests import tiny

# Families by their caches: of all tokens; sliding windows; states.
REFILLED, WAVES = ("llama", "qwen3", "gpt2"), ("gemma3_text",)
# Prompts and most tokens of two continuations, one asked for after the other.
TEXTS = [([5 + n] * (1 + n % 4), 2 + 7 * n % 11, 3 + n % 3) for n in range(13)]


def decoder(model: Any, **changes: Any) -> Decoder:
    return Decoder(model, **({"rows": 4, "temperature": 1.0, "top_p": 1e-6} | changes))


def making(prompt: Sequence[int], first: int, second: int) -> Making[list[Turn]]:
    turns = [(yield Asked(prompt, set(), first))]
    turns.append((yield Asked([*prompt, *turns[0].ids, 9], {*range(40, 80)}, second)))
    return turns


def made(of: Decoder, texts: Sequence[Any] = TEXTS, seed: int = 0) -> list[list[Turn]]:
    counted: list[int] = []
    drawn = ((making(*text), np.random.default_rng([seed, n])) for n, text in enumerate(texts))
    found = list(of.write(drawn, counted.append))
    # An end counts as sampled, in waves too or not.
    assert sum(counted) >= sum(len(turn.ids) for turns in found for turn in turns)
    return found


@pytest.mark.parametrize("family", [*REFILLED, *WAVES])
def test_a_text_is_what_the_model_writes_alone(family: str) -> None:
    """Of the likeliest tokens alone: what neither padding nor what stood in the row before changes."""
    model = tiny.model(family)
    of = decoder(model)
    assert of.refills is (family in REFILLED)
    for (prompt, first, second), turns in zip(TEXTS, made(of), strict=True):
        ids, ends = [*prompt], set[int]()
        for most, turn in zip((first, second), turns, strict=True):
            expected: list[int] = []
            while len(expected) < most:
                with torch.no_grad():
                    token = int(model(torch.tensor([[*ids, *expected]])).logits[0, -1].argmax())
                if token in ends:
                    break
                expected.append(token)
            assert turn == Turn(expected, len(expected) < most)
            ids, ends = [*ids, *expected, 9], {*range(40, 80)}


def test_rows_are_filled_again() -> None:
    """A short text does not wait for a long one: as many forwards as the longest text has, not as all waves have."""
    model, calls = tiny.model("llama"), list[int]()
    of = decoder(model)
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    texts = [([5], 40, 1), *(([6], 3, 1) for _ in range(30))]
    made(of, texts)
    # Each of the three other rows writes ten texts of four tokens and two beginnings while the first writes its own.
    assert len(calls) < 90


def test_the_seed_alone_decides_what_is_drawn() -> None:
    model = tiny.model("llama")
    same = [made(decoder(model, top_p=0.9), seed=1) for _ in range(2)]
    assert same[0] == same[1] != made(decoder(model, top_p=0.9), seed=2)
    # A text's numbers are its own, so that what comes after it changes nothing.
    assert made(decoder(model, top_p=0.9), TEXTS[:6], seed=1)[0] == same[0][0]


@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_tokens_are_drawn_by_their_probability_within_the_nucleus(top_p: float) -> None:
    of = decoder(tiny.model("llama"), temperature=0.5, top_p=top_p)
    logits = torch.tensor([0.1, 0.7, -1.0, 0.6, 0.0])
    numbers = np.linspace(0, 1, 2000, endpoint=False)
    found = of._draw(logits.expand(2000, -1), [float(number) for number in numbers])
    shares = torch.tensor(found).bincount(minlength=5) / 2000
    expected = torch.softmax(logits / 0.5, -1)
    if top_p < 1:
        # The two likeliest have 0.62.
        expected[[0, 2, 4]] = 0
        expected /= expected.sum()
    torch.testing.assert_close(shares, expected, atol=2e-3, rtol=0)


def test_no_numbers_are_no_text() -> None:
    model = tiny.model("llama")
    of = decoder(model)
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    with pytest.raises(BadInput):
        made(of)
