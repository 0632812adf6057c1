"""What engines that build a model around the shipped code ask of it, and what is refused there.

The engines themselves run in benchmarks/engines, outside of the suite.
"""

from __future__ import annotations

import inspect
import pickle
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from surgeon.runtime.rules import engine_of, engine_ranks
from tests import tiny
from tests.runtime.grafting import (
    adapters,
    classes,
    config,
    control,
    everything,
    experts,
    gate,
    grafted,
    grafted_encoder,
    perturbed,
    states,
)
from tests.runtime.grafting import tokens as ids

PREFIX = states(inference_routing="prefix_mean", top_k=2)
TOKEN = states(inference_routing="token", top_k=2)


def in_vllm(surgery: dict[str, Any], monkeypatch: pytest.MonkeyPatch, matrices: int, engine: str = "vllm") -> Any:
    """The base model as vLLM or SGLang builds it, over so many processes."""
    told = SimpleNamespace(
        get_tp_group=lambda: SimpleNamespace(world_size=matrices),
    )
    part = {"vllm": "vllm.distributed", "sglang": "sglang.srt.distributed"}.get(engine, "none")
    monkeypatch.setitem(sys.modules, f"{part}.parallel_state", told)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, engine, ALL_ATTENTION_FUNCTIONS["sdpa"])
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS, engine, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    made = config("llama", surgery)
    made._attn_implementation = engine
    return classes("llama", "Model", surgery)(made)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    "surgery, matrices, words",
    [
        (PREFIX, 1, "inference_routing is `prefix_mean`.* set it to `token`"),
        (gate(), 1, "a domain gate decides by the tokens before each .* or one without a gate"),
        (experts(), 2, "slots.* set tensor_parallel_size to 1"),
    ],
)
def test_what_an_engine_would_compute_wrongly_is_refused(
    surgery: dict[str, Any], matrices: int, words: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=words):
        in_vllm(surgery, monkeypatch, matrices, engine)


@pytest.mark.parametrize("surgery", [PREFIX, gate()], ids=["prefix_mean", "gate"])
def test_an_attention_that_nobody_knows_is_refused_where_a_sequence_is_read(
    surgery: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By any name, when the model is built or later; transformers' own and kernels that it calls are known."""
    with pytest.raises(ValueError, match=r"the attention is `flat`, none of transformers' own"):
        in_vllm(surgery, monkeypatch, 1, "flat")
    model = grafted("llama", surgery)
    model.config._attn_implementation = "flat"
    with pytest.raises(ValueError, match=r"the attention is `flat`, none of transformers' own"):
        model(ids())
    known = ["eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_4", "paged|eager", None]
    for name in [*known, "kernels-community/vllm-flash-attn3", "paged|kernels-community/flash-attn2@v1:fwd"]:
        assert engine_of(SimpleNamespace(_attn_implementation=name)) is None
    encoder = states(inference_routing="sequence_mean")
    reader = grafted_encoder("roberta", encoder)
    reader.config._attn_implementation = "flat"
    with pytest.raises(ValueError, match="the attention is `flat`"):
        reader(ids())


def test_the_rest_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    in_vllm(adapters(), monkeypatch, 2)
    in_vllm(adapters(), monkeypatch, 2, "sglang")
    in_vllm(TOKEN, monkeypatch, 2)
    in_vllm(states(top_k=0, inference_routing="prefix_mean"), monkeypatch, 1)


@pytest.mark.parametrize(
    "surgery", [control(), adapters(), experts(), TOKEN], ids=["control", "adapters", "experts", "states"]
)
def test_engines_that_ask_are_told_that_layers_stay_in_one_process(surgery: dict[str, Any]) -> None:
    """They ask where they would split layers; told that there is no plan, vLLM would infer one."""
    assert grafted("llama", surgery).model.native_class()(tiny.config("llama")).supports_pp_plan is True
    for model in (grafted("llama", surgery), grafted("llama", surgery).model):
        with pytest.raises(ValueError, match="set pipeline_parallel_size to 1"):
            _ = model.supports_pp_plan


def test_a_vllm_that_does_not_say_how_it_splits_is_refused() -> None:
    with pytest.raises(ValueError, match="use a release that"):
        engine_ranks(SimpleNamespace(_attn_implementation="vllm"))


@pytest.mark.parametrize("engine", ["vllm", "sglang", "flat"])
def test_slots_stand_in_engines_in_modules_that_they_leave(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    surgery = experts(targets=("self_attn.q_proj", "mlp.down_proj"))
    native = perturbed(grafted("llama", surgery)).model
    served = in_vllm(surgery, monkeypatch, 1, engine).eval()
    assert isinstance(native.layers[0].self_attn.q_proj, nn.Linear)  # PEFT and quantisers look for these
    assert not isinstance(served.layers[0].self_attn.q_proj, nn.Linear)
    # vLLM fuses blocks of a class by the names of their children: one without slots must not speak for these.
    assert "has_slots" in dict(served.layers[0].self_attn.named_children())
    served.load_state_dict(native.state_dict())
    assert torch.equal(served(ids()).last_hidden_state, native(ids()).last_hidden_state)


def test_slots_that_something_replaced_after_loading_are_missed() -> None:
    """As a quantiser does that goes by types, in a layer or a twin; what wraps them, as PEFT does, may stay."""
    for surgery in (experts(), everything()):
        model = grafted("llama", surgery).model
        where = model.layers[4].self_attn if surgery == experts() else model.layers[4].expanded.mlp
        name = "o_proj" if surgery == experts() else "down_proj"
        native = getattr(where, name)
        setattr(where, name, nn.Sequential(native))
        model(ids())
        setattr(where, name, nn.Linear(native.in_features, native.out_features, bias=False))
        with pytest.raises(RuntimeError, match=rf"`{name}` had PMoE's slots, and a Linear stands in its place"):
            model(ids())


def test_blocks_with_grafts_keep_their_native_forward() -> None:
    """Out of its source vLLM learns where attention is computed."""
    layer = grafted("llama", everything()).model.layers[0]
    assert type(layer.self_attn) is not LlamaAttention
    assert type(layer.self_attn).forward is LlamaAttention.forward
    assert type(layer.mlp) is not LlamaMLP
    assert type(layer.mlp).forward is LlamaMLP.forward


@pytest.mark.parametrize(("shared", "trained"), [("by_kind", "token"), ("none", "token"), ("all", "batch_mode")])
def test_a_compiled_graph_routes_as_the_loop_does(shared: str, trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    surgery = states(inference_routing="token", train_routing=trained, top_k=2, shared=shared)
    model = perturbed(grafted("llama", surgery)).double()
    gradients = []
    for compiled in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiled=compiled: compiled)
        logits = model.eval()(ids()).logits
        model.train().zero_grad()
        model(ids(), labels=ids()).loss.backward()
        found = {name: parameter.grad for name, parameter in model.named_parameters() if "control_bank" in name}
        gradients.append({"logits": logits.detach()} | found)
    assert gradients[0].keys() == gradients[1].keys()
    for name, value in gradients[0].items():
        other = gradients[1][name]
        # A control that no token chose has no gradient in the loop, one of zeros in the graph.
        torch.testing.assert_close(other, torch.zeros_like(other) if value is None else value)


def test_sequences_in_one_row_are_refused_where_a_mean_over_each_is_taken() -> None:
    starts = torch.tensor([0, 4, 10], dtype=torch.int32)
    for given in ({"cu_seq_lens_q": starts}, {"seq_idx": torch.zeros(2, 12, dtype=torch.int32)}):
        for surgery in (PREFIX, gate()):
            with pytest.raises(ValueError, match=r"several sequences stand in one row.* give each sequence a row"):
                grafted("llama", surgery)(ids(), **given)
    grafted("llama", TOKEN)(ids(), cu_seq_lens_q=starts)
    encoder = grafted_encoder("roberta", states(inference_routing="sequence_mean"))
    positions = torch.cat([torch.arange(2, 8), torch.arange(2, 8)]).expand(2, -1)
    for given in ({"position_ids": positions}, {"cu_seq_lens_q": starts}):
        with pytest.raises(ValueError, match=r"several sequences stand in one row.*`sequence_mean`"):
            encoder(ids(), **given)
    encoder(ids(), position_ids=torch.arange(2, 14).expand(2, -1))
    encoder.train()(ids(), position_ids=positions)


@pytest.mark.parametrize("surgery", [PREFIX, gate()], ids=["prefix_mean", "gate"])
@pytest.mark.parametrize(
    "positions, words",
    [
        ([3, 4, 5, 6], "row 0 begin at 3, and no cache holds the tokens before"),
        # Several requests in one row, of which one has its first tokens in an engine's own cache.
        ([0, 1, 5, 6], "row 0 jump to 5, and no cache holds the tokens before"),
        ([7, 4, 9, 2], "row 0 begin at 7"),
    ],
)
def test_tokens_that_nothing_tells_of_are_refused(surgery: dict[str, Any], positions: list[int], words: str) -> None:
    model = grafted("llama", surgery)
    with pytest.raises(ValueError, match=words):
        model(ids(1, 4), position_ids=torch.tensor([positions]))
    model.train()(ids(1, 4), position_ids=torch.tensor([positions]))
    # Where a mask shows every token of the row, none stands before it.
    model.eval()(ids(1, 4), position_ids=torch.tensor([positions]), attention_mask=torch.ones(1, 4, dtype=torch.long))


def test_a_packed_document_chooses_as_alone() -> None:
    """By the mean over its own tokens, where positions begin anew or a mask keeps documents apart."""
    model = perturbed(grafted("llama", PREFIX), scale=0.5)
    first, second = ids(1, 9), ids(1, 11, seed=8)
    row, positions = torch.cat([first, second], dim=1), torch.cat([torch.arange(9), torch.arange(11)])[None]
    shown = torch.ones(20, 20, dtype=torch.bool).tril()
    shown[9:, :9] = False
    with torch.no_grad():
        alone = torch.cat([model(each, use_cache=False).logits for each in (first, second)], dim=1)
        for given in ({"position_ids": positions}, {"attention_mask": shown[None, None]}):
            torch.testing.assert_close(model(row, **given, use_cache=False).logits, alone, atol=2e-6, rtol=1e-5)


def test_a_config_that_comes_with_a_copy_of_its_code_is_the_models_own() -> None:
    """vLLM pickles a config for its workers together with all that its class names, so that two copies are loaded."""
    surgery = experts()
    native = perturbed(grafted("llama", surgery))
    made = config("llama", surgery)
    code, own = sys.modules[type(made).__module__], type(made)
    source = inspect.getsource(code)
    copied = ModuleType(code.__name__)
    # What is executed finds its dataclasses by the module's name.
    sys.modules[code.__name__] = copied
    try:
        exec(compile(source, str(code.__file__), "exec"), vars(copied))
    finally:
        sys.modules[code.__name__] = code
    made.__class__ = getattr(copied, own.__name__)
    model = classes("llama", "Model", surgery)(made).eval()
    assert type(model.config) is own
    model.load_state_dict(native.model.state_dict())
    assert torch.equal(model(ids()).last_hidden_state, native.model(ids()).last_hidden_state)
    held = pickle.loads(pickle.dumps({"local": code.here}))["local"]
    assert held.frame is None
