"""A trained Control LLM run infers with the α that its plan says, wherever it is loaded and merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import surgeon
from surgeon.data.encoding import Encoder
from surgeon.data.packing import Packer, held_out, split
from surgeon.data.scoring import score_sequences
from surgeon.models.load import load_model
from tests.checkpoints import weights
from tests.training.test_train import CONFIG, config, grown
from tests.training.texts import opened_texts

# Interpolator in the plan → share of the expanded branch in training and in evaluation (None: what was learned).
SHARES: dict[str, tuple[dict[str, Any], float | None, float | None]] = {
    "fixed": ({"alpha": 0.3}, 0.3, 0.3),
    "Lerp8MSE0*": ({"alpha": 1.0, "inference_alpha": 0.5}, 1.0, 0.5),
    "learned": ({"alpha": 0.4, "learnable": True}, None, None),
    "learned, another in evaluation": ({"alpha": 0.4, "learnable": True, "inference_alpha": 0.2}, None, 0.2),
}


def states(model: Any, ids: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of each control block: the pre-trained branch, the expanded one, and what became of them."""
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    hooks = [
        layer.interpolator.register_forward_hook(lambda _, given, made: seen.append((*given[1:], made[0])))
        for layer in model.model.layers
        if hasattr(layer, "control")
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("name", SHARES)
def test_the_share_of_the_expanded_branch(name: str, tmp_path: Path) -> None:
    interpolator, training, inference = SHARES[name]
    operation = {"op": "control_llm", "layers": [1, 4], "interpolator": {"kind": "lerp"} | interpolator}
    (tmp_path / "plan.yaml").write_text(json.dumps({"surgeon": 1, "operations": [operation]}), encoding="utf-8")
    out = grown(tmp_path, str(tmp_path / "plan.yaml"), dtype="float32")
    trained = surgeon.train(out, config(tmp_path, steps=6), tmp_path / "run", device="cpu")
    assert trained is not None

    held = weights(tmp_path / "run")
    learned = [float(torch.sigmoid(held[key])) for key in sorted(held) if key.endswith("interpolator.logit")]
    assert len(learned) == (2 if interpolator.get("learnable") else 0)
    assert all(abs(share - interpolator["alpha"]) > 1e-4 for share in learned)

    model = load_model(tmp_path / "run")
    ids = torch.arange(10, 42).view(2, 16)
    for mode, wanted in ((True, training), (False, inference)):
        seen = states(model.train(mode), ids)
        shares = [wanted] * 2 if wanted is not None else learned
        for (p, e, combined), share in zip(seen, shares, strict=True):
            assert (e - p).abs().max() > 1e-3
            torch.testing.assert_close(combined, p + share * (e - p), rtol=1e-4, atol=1e-5)

    # What `train` told of the end is at the α of inference too.
    source = CONFIG["sources"][0]
    documents = opened_texts(tmp_path / source["path"])
    _, kept = split(documents, source["validation"], name=source["name"])
    sequences = held_out(documents, list(kept), Encoder(out, vocabulary=128), Packer(24, "isolated", 0), most=4)
    again = score_sequences(model.eval(), sequences, micro_batch=4).loss
    assert again == pytest.approx(trained.losses["fr"][1], abs=1e-6)

    surgeon.merge(tmp_path / "run", tmp_path / "merged", window=16, windows=1)
    merged, branch = weights(tmp_path / "merged"), "model.layers.1.expanded.mlp.up_proj.weight"
    p, e = held["model.layers.1.mlp.up_proj.weight"], held[branch]
    share = inference if inference is not None else learned[0]
    torch.testing.assert_close(merged["model.layers.1.mlp.up_proj.weight"], p + share * (e - p))
