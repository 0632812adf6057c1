"""Attention document by document: what it computes is what a mask leaves of the whole."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from surgeon.models.load import load_model
from surgeon.training.steps import by_document as room
from surgeon.training.steps.by_document import Span, by_document, spans_of
from tests import tiny

LENGTHS = ((5, 1, 10), (16,), (3, 13))


def packed(vocabulary: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(vocabulary, (len(LENGTHS), 16), generator=torch.Generator().manual_seed(0))
    positions = [[place for length in row for place in range(length)] for row in LENGTHS]
    return {"input_ids": ids, "labels": ids, "position_ids": torch.tensor(positions)}


# With a sliding window, with keys and values that heads share, with norms of queries and keys.
@pytest.mark.parametrize("family", ["mistral", "llama", "gemma3_text"])
def test_losses_and_gradients_are_those_of_the_whole(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"sliding_window": 4} if family != "llama" else {}
    tiny.checkpoint(tmp_path / "base", family, dtype="float32", **small)
    model: Any = load_model(tmp_path / "base", attention="sdpa")
    # With a cache transformers looks for no packed documents.
    model.config.use_cache = False
    batch, longest = packed(model.config.vocab_size), []

    def watched(module: Any, query: torch.Tensor, *given: Any, **named: Any) -> Any:
        longest.append(query.shape[2])
        return sdpa_attention_forward(module, query, *given, **named)

    monkeypatch.setattr(room, "sdpa_attention_forward", watched)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", watched)
    found = []
    for apart in (False, True):
        one = copy.deepcopy(model)
        longest.clear()
        if apart:
            with by_document(), by_document():
                loss = one(**batch).loss
        else:
            loss = one(**batch).loss
        loss.backward()
        found.append((loss, [parameter.grad for parameter in one.parameters()]))
        layers = len(longest) // (6 if apart else 1)
        assert longest == ([5, 1, 10, 16, 3, 13] if apart else [16]) * layers, "documents, and no whole sequence of two"
        assert layers == model.config.num_hidden_layers
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is watched


def test_narrow_dtypes_attend_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed and one document a row, with gradients and without: one loss, and the hidden states stay narrow."""
    tiny.checkpoint(tmp_path / "base", "llama", dtype="bfloat16")
    model: Any = load_model(tmp_path / "base", attention="sdpa")
    model.config.use_cache = False
    seen: set[torch.dtype] = set()

    def watched(module: Any, query: torch.Tensor, *given: Any, **named: Any) -> Any:
        seen.update((query.dtype, *(each.dtype for each in given[:2])))
        return sdpa_attention_forward(module, query, *given, **named)

    monkeypatch.setattr(room, "sdpa_attention_forward", watched)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", watched)
    batch = packed(model.config.vocab_size)
    for given in (batch, {"input_ids": batch["input_ids"], "labels": batch["labels"]}):
        seen.clear()
        with by_document():
            loss = model(**given).loss
            with torch.no_grad():
                assert torch.equal(model(**given).loss, loss)
            assert model.model(given["input_ids"]).last_hidden_state.dtype == torch.bfloat16
        assert seen == {torch.float32}
        loss.backward()


def test_masks_that_keep_nothing_apart_stay_whole() -> None:
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    apart = causal.clone()
    apart[2:, :2] = False
    assert spans_of(torch.stack([apart, causal])[:, None]) == [
        [Span(0, 2, True), Span(2, 6, True)],
        [Span(0, 6, True)],
    ]
    assert spans_of(causal[None, None]) is None
    # A first token that all see: the rest is in two parts, and yet no part stands alone.
    sink = apart.clone()
    sink[:, 0] = True
    assert spans_of(sink[None, None]) is None
    assert spans_of(apart[None, None].float()) is None
    assert spans_of(apart[None, None, :3]) is None
    window = apart & ~causal.tril(-2)
    assert spans_of(window[None, None]) == [[Span(0, 2, True), Span(2, 6, False)]]
