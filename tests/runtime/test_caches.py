"""With grafts that differ from the base, every way to generate sees the same function."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import tiny
from tests.runtime.grafting import both, control, every_graft_in, grafted, perturbed, states, tokens

NEW_TOKENS = 4


def scores(model: Any, ids: torch.Tensor, mask: torch.Tensor, **how: Any) -> torch.Tensor:
    """Scores of greedy generation, steps by batch by vocabulary."""
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        output_scores=True,
        return_dict_in_generate=True,
        **how,
    )
    return torch.stack(out.scores)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_cached_static_padded_and_uncached_agree(family: str) -> None:
    base = tiny.model(family)
    ids = tokens(2, 14)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    padded = ids.masked_fill(mask == 0, 0)
    for name, surgery in every_graft_in(family, "gemma3_text").items():
        model = perturbed(grafted(family, surgery, base=base))
        dynamic = scores(model, padded, mask)
        for other in (
            scores(model, padded, mask, use_cache=False),
            scores(model, padded, mask, cache_implementation="static", disable_compile=True),
        ):
            torch.testing.assert_close(dynamic, other, atol=2e-5, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}")
        alone = scores(model, ids[:1, 4:], mask[:1, 4:])
        torch.testing.assert_close(dynamic[:, :1], alone, atol=2e-5, rtol=1e-4)


def test_a_static_cache_shows_no_empty_places_where_nothing_is_padded() -> None:
    """The mask may be left out there beside a cache that grows, not beside one of a fixed size."""
    model, ids = perturbed(grafted("llama", states(top_k=1))), tokens(1, 10)
    whole = torch.ones_like(ids)
    static = scores(model, ids, whole, cache_implementation="static", disable_compile=True)
    torch.testing.assert_close(static, scores(model, ids, whole, use_cache=False), atol=2e-5, rtol=1e-4)


def test_every_branch_has_a_cache_of_its_own() -> None:
    model = perturbed(grafted("gemma2", control(layers=(1, 4))))
    cache = model(tokens(), use_cache=True).past_key_values
    assert len(cache.layers) == model.config.num_hidden_layers == 8
    kinds = [type(layer).__name__ for layer in cache.layers]
    assert kinds[6] == kinds[1] != kinds[4] == kinds[7]
    assert not torch.equal(cache.layers[1].keys, cache.layers[6].keys)
    assert all(layer.get_seq_length() == 12 for layer in cache.layers)


def test_beam_search_reorders_every_branch() -> None:
    model = perturbed(grafted("llama", both()))
    ids = tokens(2, 8)
    how = {"max_new_tokens": 5, "num_beams": 3, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(ids, **how), model.generate(ids, use_cache=False, **how))


def test_a_ready_made_mask_dict_is_understood() -> None:
    """Static caches with layer types hand the model a dict of masks."""
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    model = perturbed(grafted("gemma2", both()))
    ids = tokens(2, 14)
    parts: Any = {
        "config": model.config,
        "inputs_embeds": model.get_input_embeddings()(ids),
        "attention_mask": torch.ones_like(ids),
        "past_key_values": None,
        "position_ids": torch.arange(14).unsqueeze(0),
    }
    masks = {
        "full_attention": create_causal_mask(**parts),
        "sliding_attention": create_sliding_window_causal_mask(**parts),
    }
    assert torch.equal(model(ids, attention_mask=masks).logits, model(ids).logits)


def test_recorded_outputs() -> None:
    model = perturbed(grafted("llama", both()))
    out = model(tokens(), output_hidden_states=True)
    assert len(out.hidden_states) == 6 + 1
    model.set_attn_implementation("eager")
    assert len(model(tokens(), output_attentions=True).attentions) == model.config.num_hidden_layers
