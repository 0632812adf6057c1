"""Surgery upon surgery, trained between: every step keeps what it promises, and all of it can be taken back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import surgeon
from surgeon.models.load import load_model
from tests import tiny
from tests.checkpoints import weights

INSERT: dict[str, Any] = {
    "op": "insert_layers",
    "where": {"after": [2, 4]},
    "init": {"kind": "ot_fusion"},
}
ADAPTERS: dict[str, Any] = {"op": "gated_adapters", "layers": "all", "size": 8}
FIRST: dict[str, Any] = {"op": "pmoe_experts", "threshold": 5, "rank": 2}
NEXT: dict[str, Any] = {"op": "pmoe_experts", "rank": 3, "router_loss": {"kind": "task_id", "weight": 0.1}}


def trained(folder: Path, names: set[str], *, seed: int) -> Mapping[str, torch.Tensor]:
    """Three real steps of AdamW on the tensors `names`, written back into their shards; returns their values."""
    model = load_model(folder, dtype="float32").train()
    parameters = {name: p.requires_grad_(name in names) for name, p in model.named_parameters()}
    if hasattr(model, "freeze_base"):
        assert set(model.freeze_base()) == names
    optimiser = torch.optim.AdamW([p for p in parameters.values() if p.requires_grad], lr=1e-2)
    ids = torch.randint(3, 128, (4, 16), generator=torch.Generator().manual_seed(seed))
    extra = {"domain_ids": torch.tensor([0, 1, 1, 1])} if hasattr(model, "freeze_base") else {}
    for _ in range(3):
        optimiser.zero_grad()
        model(input_ids=ids, labels=ids, **extra).loss.backward()
        optimiser.step()
    values = {name: parameters[name].detach() for name in names}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors = load_file(shard)
        if names & set(tensors):
            changed = {name: values[name].to(t.dtype) if name in names else t for name, t in tensors.items()}
            save_file(changed, shard, metadata={"format": "pt"})
    return values


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_four_surgeries_trained_between_and_all_taken_back(family: str, tmp_path: Path) -> None:
    state = base = tiny.checkpoint(tmp_path / "state-0", family)
    promises = []
    for number, operation in enumerate((INSERT, ADAPTERS, FIRST, NEXT), 1):
        plan = tmp_path / f"{number}.yaml"
        plan.write_text(json.dumps({"surgeon": 1, "operations": [operation]}))
        out = tmp_path / f"state-{number}"
        applied = surgeon.apply(plan, str(state), out)
        promises.append(applied.manifest.promise)
        # As stored, in bfloat16; all grafts together in float32 too.
        dtypes = ["auto", "float32"] if operation is NEXT else ["auto"]
        verification = surgeon.verify(state, out, window=24, windows=1, dtypes=dtypes)
        assert verification.holds
        assert verification.identical
        before = weights(out)
        new = set(applied.manifest.new_tensors)
        trained(out, new, seed=number)
        after = weights(out)
        # The softmax over a lone column is 1 whatever the column holds: there is nothing to learn for it yet.
        lone = {"model.layers.5.expert_router.slots.0.weight"} if operation is FIRST else set()
        assert {name for name in after if not torch.equal(after[name], before[name])} == new - lone
        state = out
    assert promises == ["exact"] * 4
    surgeon.revert(state, tmp_path / "back", to=0)
    expected, found = weights(base), weights(tmp_path / "back")
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name].view(torch.uint8), expected[name].view(torch.uint8)) for name in expected)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads((base / "config.json").read_text())
    assert (tmp_path / "back" / "model.safetensors.index.json").exists()
