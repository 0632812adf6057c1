"""Decoders some of whose blocks are no modules: bare matrices (OPT), and blocks that norm the stream's sum (RemBERT).

RemBERT's cache has entries for two kinds of attention.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from surgeon.anatomy.derivation import composition_for
from surgeon.anatomy.twin import twin_of_small
from surgeon.grafts.bundle import import_bundle
from surgeon.grafts.composition import ATTENTION, FFN, PREFIX
from tests.decoders import tiny_config
from tests.runtime.grafting import perturbed
from tests.runtime.test_born import left_padded, prefill_and_decode

# Where a layer's FFN is read and written, by model type, and where its attention is none of its own.
SPANS = {
    "opt": {FFN: ("fc1", "fc2")},
    "rembert": {ATTENTION: ("attention.self", "attention.output.dropout"), FFN: ("intermediate", "output.dropout")},
}
SURGERY: dict[str, Any] = {
    "trunk_layers": 4,
    "adapters": [{"layer": layer, "size": 12, "gate": "sigmoid"} for layer in (0, 3, 4)],
    "control": [{"layer": 1, "branch": 4, "interpolator": {"kind": "dlerp"}, "divergence": {"kind": "mse"}}],
    "control_states": [{"layer": layer, "sites": ["attention", "ffn"]} for layer in (0, 2)],
    "routed_experts": [{"layer": 2, "experts": 4, "size": 8, "top_k": 2}],
    "mixture": {"rank": 4, "alpha": 0.6, "top_k": 2},
}


@cache
def models(model_type: str, dtype: str) -> tuple[Any, Any]:
    """A decoder with random weights, and the same with newborn grafts."""
    config = tiny_config(model_type)
    native = twin_of_small(config, seed=1).model
    composition = composition_for(json.dumps(config, sort_keys=True))
    assert {span.role: (span.reads, span.writes) for span in composition.spans} == SPANS[model_type]
    said = {"model_type": PREFIX + model_type, "anatomy": composition.to_json(), "surgery": SURGERY}
    kind = getattr(import_bundle(said), str(composition.class_of("AutoModelForCausalLM")))
    given = {key: value for key, value in config.items() if key != "model_type"}
    given[native.config.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = 5
    torch.manual_seed(1)
    model = kind._from_config(kind.config_class(**given, surgery=SURGERY, anatomy=said["anatomy"]))
    held = native.state_dict()
    copies = {name.replace(".1.", ".1.expanded."): value for name, value in held.items() if ".1." in name}
    model.load_state_dict(held | copies, strict=False)
    model.tie_weights()
    return native.to(getattr(torch, dtype)).eval(), model.to(getattr(torch, dtype)).eval()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", SPANS)
def test_born_the_base_and_heard_once_they_speak(model_type: str, dtype: str) -> None:
    native, model = models(model_type, dtype)
    ids, mask = left_padded()
    expected = prefill_and_decode(native, ids, mask)
    assert all(map(torch.equal, prefill_and_decode(model, ids, mask), expected))
    held = {name: value.clone() for name, value in model.state_dict().items()}
    spoken = prefill_and_decode(perturbed(model), ids, mask)
    assert not any(map(torch.equal, spoken, expected))
    if dtype == "float32":
        # One by one over a cache, the last tokens get what they got all at once.
        assert torch.allclose(torch.cat(spoken[1:], dim=1), spoken[0][:, -4:], atol=1e-4)
    with model.grafts(enabled=False):
        assert all(map(torch.equal, prefill_and_decode(model, ids, mask), expected))
    model.load_state_dict(held)


def test_quantisers_leave_matrices_beside_which_something_stands() -> None:
    """One in the place of theirs would not hear of grafts, which would be lost without a word."""
    model = models("opt", "float32")[1]
    stem = "model.decoder.layers."
    assert {f"{stem}{place}" for place in ("0.fc1", "0.fc2", "1.expanded.fc2")} <= model._left_by_quantisers()
    assert f"{stem}1.fc1" not in model._left_by_quantisers()


def seen_in(layer: Any, names: dict[str, str], run: Any) -> dict[str, Tensor]:
    """What modules of a layer, by their paths, get (`x`) and make (`y`) in a run."""
    found: dict[str, Tensor] = {}

    def keep(key: str) -> Any:
        def hook(_: Any, given: Any, made: Any) -> None:
            found[f"{key} x"] = given[0]
            found[f"{key} y"] = made[0] if isinstance(made, tuple) else made

        return hook

    hooks = [layer.get_submodule(path).register_forward_hook(keep(key)) for key, path in names.items()]
    with torch.no_grad():
        run()
    for each in hooks:
        each.remove()
    return found


def test_an_adapter_joins_what_bare_matrices_add_to_the_stream() -> None:
    """OPT: residual + fc2(ReLU(fc1(x))) + adapter(x)."""
    _, model = models("opt", "float32")
    held = {name: value.clone() for name, value in model.state_dict().items()}
    layer = perturbed(model).model.decoder.layers[3]
    ids = torch.randint(3, 100, (2, 7), generator=torch.Generator().manual_seed(0))
    seen = seen_in(layer, {"norm": "final_layer_norm", "layer": ""}, lambda: model(ids))
    x = seen["norm y"]
    ffn = F.linear(F.relu(F.linear(x, layer.fc1.weight, layer.fc1.bias)), layer.fc2.weight, layer.fc2.bias)
    with torch.no_grad():
        expected = seen["norm x"] + ffn + layer.mlp.adapter(x)[0]
    assert torch.allclose(seen["layer y"].flatten(0, 1), expected.reshape(-1, expected.shape[-1]), atol=1e-5)
    model.load_state_dict(held)


def test_an_adapter_stands_before_the_norm_of_the_sum() -> None:
    """RemBERT: LayerNorm(FFN(x) + adapter(x) + x)."""
    _, model = models("rembert", "float32")
    held = {name: value.clone() for name, value in model.state_dict().items()}
    layer = perturbed(model).rembert.encoder.layer[3]
    ids = torch.randint(3, 100, (2, 7), generator=torch.Generator().manual_seed(0))
    names = {"middle": "intermediate", "dense": "output.dense", "layer": ""}
    seen = seen_in(layer, names, lambda: model(ids))
    x = seen["middle x"]
    with torch.no_grad():
        expected = layer.output.LayerNorm(seen["dense y"] + layer.mlp.adapter(x)[0] + x)
    assert torch.allclose(seen["layer y"], expected, atol=1e-5)
    model.load_state_dict(held)
