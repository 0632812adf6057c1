"""Tiny checkpoints and shipped plans, shared by the end-to-end tests."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from surgeon.plan.shipped import load_named
from tests import tiny
from tests.warm import warm

ROOT = Path(__file__).resolve().parents[2]
PLANS = ROOT / "plans"


def attaches_grafts(name: str) -> bool:
    """Whether a shipped plan attaches a graft to the base on which it is tried.

    Experts do so beside an MLP that no class of transformers holds with them.
    """
    operations = load_named(name).plan.operations
    return any(op.grafts and (op.op != "upcycle_experts" or name.endswith("/beside")) for op in operations)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A tiny Llama in bf16, four shards."""
    return tiny.checkpoint(tmp_path / "base", "llama")


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., Path]:
    """Writes a plan of one `insert_layers` (or of any operations given) and returns its path."""

    def write(*operations: dict[str, Any], seed: int = 0, name: str = "plan.yaml", **insert: Any) -> Path:
        entries = list(operations) or [{"op": "insert_layers", **insert}]
        path = tmp_path / name
        path.write_text(json.dumps({"surgeon": 1, "seed": seed, "operations": entries}, indent=1))
        return path

    return write


def weights(folder: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint, read by the safetensors library."""
    found: dict[str, Any] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        found |= load_file(shard)
    return found


def as_bytes(value: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes."""
    return value.contiguous().view(-1).view(torch.uint8)


def same_bytes(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two checkpoints hold the same tensors, in their dtypes, bit for bit."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and torch.equal(as_bytes(one[name]), as_bytes(other[name]))
        for name in one
    )


WITHOUT_SURGEON = """
import importlib.abc, json, sys

class NoSurgeon(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "surgeon":
            raise ModuleNotFoundError("surgeon is not installed here")

sys.meta_path.insert(0, NoSurgeon())
"""

LOADER = (
    WITHOUT_SURGEON
    + """
import torch
from transformers import AutoModelForCausalLM, AutoConfig
results = {}
for folder in sys.argv[2:]:
    trust = {"trust_remote_code": True} if sys.argv[1] == "trust" else {}
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **trust)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    ids = torch.arange(3, 23).reshape(2, 10) % model.config.vocab_size
    with torch.inference_mode():
        logits = model(ids).logits
        told = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
        uncached = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, use_cache=False)
    results[folder] = {
        "class": type(model).__name__,
        "layers": len(model.model.layers),
        "logits": logits.float().flatten().tolist(),
        "told": told.tolist(),
        "told_uncached": uncached.tolist(),
    }
json.dump(results, sys.stdout)
"""
)


def load_elsewhere(*folders: Path, cache: Path, trust: bool = False) -> list[dict[str, Any]]:
    """Load, run and generate in a process that cannot import surgeon, with an empty modules cache."""
    results = run_elsewhere(LOADER, "trust" if trust else "plain", *map(str, folders), cache=cache)
    return [results[str(folder)] for folder in folders]


def run_elsewhere(script: str, *arguments: str, cache: Path) -> Any:
    """Run a script in a process that starts with an empty cache; what it prints is read as JSON."""
    ran = subprocess.run(
        [*warm(), "-c", script, *arguments],
        capture_output=True,
        text=True,
        cwd=cache,
        env={"PATH": "/usr/bin:/bin", "HF_HOME": str(cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    # Older versions of tokenizers print warnings before it.
    return json.loads(ran.stdout.splitlines()[-1])
