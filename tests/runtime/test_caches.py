"""With grafts that differ from the base, every way to generate sees the same function."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from surgeon.runtime.graft import cache_in
from tests import tiny
from tests.caches import CACHE
from tests.runtime.grafting import (
    adapters,
    both,
    control,
    every_graft_in,
    everything,
    experts,
    gate,
    grafted,
    perturbed,
    states,
    tokens,
)

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
    cache = cache_in(model(tokens(), use_cache=True))
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
    # transformers 5.0 says `input_embeds`, and wants `cache_position`.
    asked = inspect.signature(create_causal_mask).parameters
    embeds = next(name for name in asked if name.endswith("_embeds"))
    older = {"cache_position": torch.arange(14)} if embeds == "input_embeds" else {}
    parts: Any = older | {
        "config": model.config,
        embeds: model.get_input_embeddings()(ids),
        "attention_mask": torch.ones_like(ids),
        CACHE: None,
        "position_ids": torch.arange(14).unsqueeze(0),
    }
    masks = {
        "full_attention": create_causal_mask(**parts),
        "sliding_attention": create_sliding_window_causal_mask(**parts),
    }
    assert torch.equal(model(ids, attention_mask=masks).logits, model(ids).logits)


def test_recorded_outputs() -> None:
    model = perturbed(grafted("llama", both()))
    out = model.model(tokens(), output_hidden_states=True)
    assert len(out.hidden_states) == model.config.num_hidden_layers + 1
    assert torch.equal(out.hidden_states[-1], out.last_hidden_state)
    model.set_attn_implementation("eager")
    assert len(model(tokens(), output_attentions=True).attentions) == model.config.num_hidden_layers


# What each graft has above and below so many first layers: twins of some layers, of all, none of what crosses layers.
DRAFTS = (
    (everything(), (1, 3, 6)),
    (states(layers=(2, 5), inference_routing="prefix_mean", top_k=1), (1, 3)),
    (gate(), (1, 2)),
)


# Windows of every second layer in gemma2, of every layer in mistral, none in llama.
@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_drafts_by_the_first_layers(family: str) -> None:
    base, ids = tiny.model(family), tokens(1, 14)
    how = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    for surgery, depths in DRAFTS:
        model = perturbed(grafted(family, surgery, base=base))
        right = model.generate(ids, **how)
        for depth in depths:
            assert torch.equal(model.generate(ids, assistant_early_exit=depth, **how), right)
            # As transformers makes a model of its first layers.
            model.config.num_hidden_layers = depth
            whole, cache = model(ids, use_cache=False).logits, DynamicCache(config=model.config)
            parts = [model(some, **{CACHE: cache}).logits for some in ids.split((9, 1, 1, 1, 2), dim=1)]
            torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=2e-5, rtol=1e-4)
            model.config.num_hidden_layers = model.surgery.trunk_layers + len(surgery.get("control", ()))
            assert not torch.allclose(model(ids).logits, whole, atol=1e-3) or depth == model.surgery.trunk_layers


def test_a_cache_without_places_for_twins_is_refused() -> None:
    model = perturbed(grafted("llama", control()))
    model.config.num_hidden_layers = 3
    static = StaticCache(config=model.config, max_cache_len=16)
    with pytest.raises(ValueError, match=r"StaticCache has 3 places.* up to 7; pass a DynamicCache"):
        model(tokens(), **{CACHE: static})


@pytest.mark.parametrize("what", ["adapters", "branches", "branches with adapters", "slots"])
def test_decoding_and_prefill_read_no_number_on_the_host(what: str) -> None:
    """On a device without values whatever reads one raises an error; control states have a test of their own."""
    kinds = {"adapters": adapters(), "branches": control(), "branches with adapters": both(), "slots": experts()}
    model = perturbed(grafted("llama", kinds[what]))
    with torch.no_grad():
        cache = cache_in(model(tokens(), use_cache=True))
        model.to("meta")
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys.to("meta"), layer.values.to("meta")
            for kept in getattr(layer, "kept", {}).values():
                kept.update({name: each.to("meta") for name, each in kept.items()})
        model(tokens(2, 1).to("meta"), **{CACHE: cache})
        model(tokens(2, 9).to("meta"))
