"""A grafted model is bit-exactly its base at birth: every family and graft, fp32 and bf16.

Every interpolator and gate, and every way to share slots and states, in either dtype, each in a family of its own; they
differ in norms, windows and heads.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from surgeon.runtime.graft import cache_in
from tests import tiny
from tests.caches import CACHE
from tests.runtime.grafting import both, control, every_graft, every_graft_in, grafted, perturbed, tokens


def prefill_and_decode(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """Logits of the whole prompt at once, then of its last four tokens one by one over a cache."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = [model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits]
        step = ids.shape[1] - 4
        out = model(ids[:, :step], attention_mask=mask[:, :step], position_ids=positions[:, :step], use_cache=True)
        for now in range(step, ids.shape[1]):
            out = model(
                ids[:, now : now + 1],
                attention_mask=mask[:, : now + 1],
                position_ids=positions[:, now : now + 1],
                **{CACHE: cache_in(out)},
                use_cache=True,
            )
            logits.append(out.logits)
    return logits


def left_padded() -> tuple[torch.Tensor, torch.Tensor]:
    """Two prompts longer than the sliding window, the first left-padded."""
    ids = tokens(2, 14)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return ids.masked_fill(mask == 0, 0), mask


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_logits_are_the_bases_bit_for_bit(family: str, dtype: str) -> None:
    base = tiny.model(family, dtype=dtype)
    ids, mask = left_padded()
    expected = prefill_and_decode(base, ids, mask)
    differing = [
        (name, step)
        for name, surgery in every_graft_in(family, {"float32": "gemma3_text", "bfloat16": "llama"}[dtype]).items()
        for step, (logits, native) in enumerate(
            zip(prefill_and_decode(grafted(family, surgery, base=base, dtype=dtype), ids, mask), expected, strict=True)
        )
        if not torch.equal(logits, native)
    ]
    assert not differing


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_eager_attention_is_exact_too(family: str) -> None:
    base = tiny.model(family)
    ids, mask = left_padded()
    model = grafted(family, both(), base=base)
    for one in (base, model):
        one.set_attn_implementation("eager")
    for logits, native in zip(prefill_and_decode(model, ids, mask), prefill_and_decode(base, ids, mask), strict=True):
        assert torch.equal(logits, native)


def test_training_mode_is_exact_too() -> None:
    base = tiny.model("llama")
    ids = tokens()
    model = grafted("llama", both(), base=base).train()
    assert torch.equal(model(ids).logits, base(ids).logits)


def test_an_adapter_trained_before_is_copied_with_its_layer() -> None:
    """A second surgery on an adapted layer: the branch holds a copy of the adapter and is born identical."""
    once = perturbed(grafted("llama", {"trunk_layers": 6, "adapters": [{"layer": 4, "size": 12}]}))
    surgery = control(layers=(4,))
    surgery["adapters"] = [{"layer": 4, "size": 12, "frozen": True}, {"layer": 6, "size": 12}]
    twice = grafted("llama", surgery, base=once)
    ids = tokens()
    assert torch.equal(twice(ids).logits, once(ids).logits)
    names = twice.graft_parameter_names()
    assert any(".expanded.mlp.adapter." in name for name in names)
    assert not any(name.startswith("model.layers.4.mlp.adapter.") for name in names)
    # What stands in the branch trains where the branch itself does not.
    surgery["control"][0]["frozen"] = True
    names = grafted("llama", surgery, base=once).graft_parameter_names()
    assert names and all(".4.expanded.mlp.adapter." in name for name in names)


def test_a_changed_graft_changes_the_function() -> None:
    """The equality above would be worth nothing if the grafts took no part."""
    base = tiny.model("llama")
    ids = tokens()
    for name, surgery in every_graft().items():
        difference = (perturbed(grafted("llama", surgery, base=base))(ids).logits - base(ids).logits).abs().max()
        assert difference > 1e-3, name
