"""Processes that cannot import surgeon, in which outputs are loaded and run as their users do."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.warm import warm

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
