"""A graft that loses what it keeps of earlier tokens is silent at birth; `verify` moves its tensors and notices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import surgeon
from surgeon.common.check import Check
from surgeon.grafts.registry import GRAFTS
from surgeon.verification.decoding import check_decoding
from tests.caches import CACHE
from tests.checkpoints import write_plan
from tests.decoders import tiny_decoder
from tests.runtime.grafting import adapters, alone, control, everything, gate, gated, grafted, states, tokens
from tests.verification.outputs import Made

STATEFUL: dict[str, dict[str, Any]] = {
    "states": states(top_k=1),
    "states among all": states(top_k=2, gate="cosine", projection=6),
    "gate": gate(),
    "gate that closes": gate(closes=6.0),
    "gate of prefixes": gate(reads="prefix_mean", prior=32),
    "gate of tokens": gate(reads="token", form="linear"),
    "gated adapters": gated(adapters(layers=(1, 3)), closes=1.0),
    "everything, gated": gated(everything()),
}


def checked(model: Any) -> Check:
    return check_decoding(model, tokens(4, 40))


def grown(name: str) -> Any:
    return grafted("llama", STATEFUL[name])


def without(monkeypatch: pytest.MonkeyPatch, kind: Any, method: str, *names: str) -> None:
    """Have a method of a shipped class get nothing by these names, as where the library has others for them."""
    whole: Callable[..., Any] = getattr(kind, method)

    def deaf(self: Any, *given: Any, **named: Any) -> Any:
        less = [
            each if not isinstance(each, dict) else {k: v for k, v in each.items() if k not in names} for each in given
        ]
        return whole(self, *less, **{name: None if name in names else value for name, value in named.items()})

    monkeypatch.setattr(kind, method, deaf)


@pytest.mark.parametrize("name", sorted(alone()))
def test_every_graft_is_heard_and_decodes_as_it_prefills(name: str) -> None:
    assert set(alone()) == set(GRAFTS)
    found = checked(grafted("llama", alone()[name], dtype="bfloat16"))
    assert found.holds and not found.note, found


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_what_is_kept_of_earlier_tokens_decodes_as_it_prefills(family: str, name: str) -> None:
    found = checked(grafted(family, STATEFUL[name]))
    assert found.holds and not found.note, found


@pytest.mark.parametrize("names", [(CACHE,), (CACHE, "position_ids")], ids=["refused", "silent"])
@pytest.mark.parametrize("name", STATEFUL)
def test_a_cache_under_a_dead_name_is_noticed(
    name: str, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = grown(name)
    without(monkeypatch, type(model.model), "_crossing", *names)
    found = checked(model)
    assert not found.holds
    assert "`generate` with a cache " + ("fails" if len(names) == 1 else "gives other logits") in found.detail


def test_a_twin_without_its_cache_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = grafted("llama", control("lerp"))
    without(monkeypatch, type(model.model.layers[1].expanded), "forward", CACHE)
    found = checked(model)
    assert not found.holds
    assert "control lost" in found.detail


def test_what_moves_nothing_is_said() -> None:
    found = checked(grafted("llama", control("lerp", inference_alpha=0.0)))
    assert found.holds and found.note
    assert "changes no logit" in found.detail


def test_a_base_that_decodes_otherwise_itself_is_not_held_against_what_was_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = grown("states")
    # Without a cache of its own for the first layer, in what is native.
    without(monkeypatch, type(model.model.layers[0].self_attn), "forward", CACHE)
    found = checked(model)
    assert found.holds and found.note
    assert "without what was added" in found.detail


def test_verify_says_it_and_fails_by_it(outputs: dict[str, Made], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the checkpoint as it lies there, in its own dtype; layer by layer it is said that nothing was decoded."""
    made = outputs["gated"]
    how: dict[str, Any] = {"window": 24, "windows": 3, "device": "cpu"}
    (found,) = [each for each in surgeon.verify(made.base, made.out, **how).checks if each.name == "decoding"]
    assert found.holds and not found.note
    (streamed,) = [
        each for each in surgeon.verify(made.base, made.out, streamed=True, **how).checks if each.name == "decoding"
    ]
    assert streamed.note
    assert "--streamed" in streamed.detail

    from surgeon.models.load import load_model

    model = load_model(made.out)
    without(monkeypatch, type(model.model), "_crossing", CACHE, "position_ids")
    verification = surgeon.verify(made.base, made.out, **how)
    assert verification.identical
    assert not verification.holds


def test_native_outputs_are_not_decoded_again(outputs: dict[str, Made]) -> None:
    made = outputs["fused"]
    found = surgeon.verify(made.base, made.out, window=8, windows=1, device="cpu")
    assert "decoding" not in [each.name for each in found.checks]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "gpt_oss", "qwen3_moe", "mixtral", "recurrent_gemma", "jamba"])
def test_hybrids_windows_and_mixtures_decode_as_they_prefill(model_type: str, tmp_path: Any) -> None:
    base = tiny_decoder(tmp_path / "base", model_type)
    operations = [
        {"op": "gated_adapters", "layers": "all", "size": 4},
        {"op": "mixture_of_control", "rank": 2, "sites": ["attention"]},
        {"op": "domain_gate", "layer": 0},
    ]
    surgeon.apply(write_plan(tmp_path / "plan.yaml", operations), str(base), tmp_path / "out", device="cpu")
    found = surgeon.verify(base, tmp_path / "out", window=24, windows=3, device="cpu")
    (decoding,) = [each for each in found.checks if each.name == "decoding"]
    assert found.holds
    assert decoding.holds and not decoding.note, decoding
