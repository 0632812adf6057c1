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

from surgeon.runtime.rules import read_surgery
from tests.runtime.grafting import adapters, classes, config, control, everything, experts, grafted, perturbed, states
from tests.runtime.grafting import tokens as ids

PREFIX = states(inference_routing="prefix_mean", top_k=2)
TOKEN = states(inference_routing="token", top_k=2)


def in_vllm(surgery: dict[str, Any], monkeypatch: pytest.MonkeyPatch, matrices: int, layers: int) -> Any:
    """The base model as vLLM builds it, over so many processes."""
    told = SimpleNamespace(
        get_tp_group=lambda: SimpleNamespace(world_size=matrices),
        get_pp_group=lambda: SimpleNamespace(world_size=layers),
    )
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", told)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "vllm", ALL_ATTENTION_FUNCTIONS["sdpa"])
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS, "vllm", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    made = config("llama", surgery)
    made._attn_implementation = "vllm"
    return classes("llama", "Model", surgery)(made)


@pytest.mark.parametrize(
    "surgery, matrices, layers, words",
    [
        (PREFIX, 1, 1, "inference_routing is `prefix_mean`.* set it to `token`"),
        (control(), 1, 2, "expanded twin.* set pipeline_parallel_size to 1"),
        (experts(), 1, 2, "router.* set pipeline_parallel_size to 1"),
        (adapters(), 1, 2, "with grafts.* set pipeline_parallel_size to 1"),
        (TOKEN, 1, 2, "with grafts.* set pipeline_parallel_size to 1"),
        (experts(), 2, 1, "slots.* set tensor_parallel_size to 1"),
    ],
)
def test_what_vllm_would_compute_wrongly_is_refused(
    surgery: dict[str, Any], matrices: int, layers: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=words):
        in_vllm(surgery, monkeypatch, matrices, layers)


def test_the_rest_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    in_vllm(adapters(), monkeypatch, 2, 1)
    in_vllm(TOKEN, monkeypatch, 2, 1)
    in_vllm(states(top_k=0, inference_routing="prefix_mean"), monkeypatch, 1, 1)


def test_a_vllm_that_does_not_say_how_it_splits_is_refused() -> None:
    made = config("llama", control())
    made._attn_implementation = "vllm"
    with pytest.raises(ValueError, match="use a release that"):
        read_surgery(made)


def test_slots_stand_in_vllm_in_modules_that_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    surgery = experts(targets=("self_attn.q_proj", "mlp.down_proj"))
    native = perturbed(grafted("llama", surgery)).model
    served = in_vllm(surgery, monkeypatch, 1, 1).eval()
    assert isinstance(native.layers[0].self_attn.q_proj, nn.Linear)  # PEFT and quantisers look for these
    assert not isinstance(served.layers[0].self_attn.q_proj, nn.Linear)
    # vLLM fuses blocks of a class by the names of their children: one without slots must not speak for these.
    assert "has_slots" in dict(served.layers[0].self_attn.named_children())
    served.load_state_dict(native.state_dict())
    assert torch.equal(served(ids()).last_hidden_state, native(ids()).last_hidden_state)


def test_blocks_with_grafts_keep_their_native_forward() -> None:
    """Out of its source vLLM learns where attention is computed."""
    layer = grafted("llama", everything()).model.layers[0]
    assert type(layer.self_attn) is not LlamaAttention
    assert type(layer.self_attn).forward is LlamaAttention.forward
    assert type(layer.mlp) is not LlamaMLP
    assert type(layer.mlp).forward is LlamaMLP.forward


@pytest.mark.parametrize("shared", ["by_kind", "none"])
def test_a_compiled_graph_routes_as_the_loop_does(shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    surgery = states(inference_routing="token", train_routing="token", top_k=2, shared=shared)
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
    with pytest.raises(ValueError, match=r"several sequences stand in one row.* give each sequence a row of its own"):
        grafted("llama", PREFIX)(ids(), cu_seq_lens_q=starts)
    grafted("llama", TOKEN)(ids(), cu_seq_lens_q=starts)


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
    held = pickle.loads(pickle.dumps({"local": code._active}))["local"]
    assert held.frame is None
