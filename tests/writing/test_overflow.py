"""0 × f(x) is no number where f overflows: `apply` looks where weights allow that, and `exact` says its condition."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

import surgeon
from surgeon.common.listener import Quiet
from surgeon.common.promises import CONDITION
from surgeon.errors import BadInput
from surgeon.models import stream
from surgeon.models.load import load_model
from surgeon.verification.verification import verdict
from surgeon.writing.apply import applied_view
from tests import tiny
from tests.checkpoints import write_plan
from tests.quantised import tiny_quantised

# The layer with large weights; the number of the stream that they read, which is zero below the layer's own output.
LAYER, NUMBER = 2, 5
LARGE = {"float16": 6e4, "bfloat16": 1e30, "float32": 1e30}
READERS = {"ffn": ("gate_proj", "up_proj"), "attention": ("q_proj", "k_proj", "v_proj")}
# Copies of that layer above it, which read what it writes.
INSERTED: dict[str, Any] = {"op": "insert_layers", "where": {"after": [LAYER]}, "init": {"kind": "copy"}}
PLANS: dict[str, list[dict[str, Any]]] = {
    "insert": [INSERTED],
    "insert with grafts": [INSERTED, {"op": "gated_adapters", "layers": [0], "size": 4}],
}


class Heard(Quiet):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def edited(folder: Path, edit: Callable[[str, torch.Tensor], None]) -> Path:
    for shard in folder.glob("*.safetensors"):
        tensors = load_file(shard)
        for name, tensor in tensors.items():
            edit(name, tensor)
        save_file(tensors, shard, metadata={"format": "pt"})
    return folder


def lurking(folder: Path, dtype: str, block: str) -> Path:
    """A base that computes numbers, and overflows in a copy of one of its layers that stands elsewhere."""

    def edit(name: str, tensor: torch.Tensor) -> None:
        layer = int(name.split(".")[2]) if ".layers." in name else -1
        if "embed_tokens" in name:
            tensor[:, NUMBER] = 0
        if name.endswith(("o_proj.weight", "down_proj.weight")) and layer < LAYER:
            tensor[NUMBER] = 0
        if name.endswith("o_proj.weight") and layer == LAYER:
            tensor[NUMBER] = 0
        if name.endswith("down_proj.weight") and layer == LAYER:
            tensor[NUMBER] *= 10
        if layer == LAYER and any(f".{reader}." in name for reader in READERS[block]):
            tensor[:, NUMBER] = LARGE[dtype]

    return edited(tiny.checkpoint(folder, "llama", dtype=dtype, num_hidden_layers=4), edit)


@pytest.mark.parametrize("block", READERS)
@pytest.mark.parametrize("dtype", LARGE)
def test_a_copy_that_overflows_where_the_base_does_not_is_refused(dtype: str, block: str, tmp_path: Path) -> None:
    base = lurking(tmp_path / "base", dtype, block)
    for name, operations in PLANS.items():
        plan = write_plan(tmp_path / "plan.yaml", operations)
        try:
            out = surgeon.apply(plan, str(base), tmp_path / "out", device="cpu").path
        except BadInput as error:
            assert re.search(rf"layer {LAYER + 1} of the output .* 0 × infinity", str(error))
            caught = error
        else:
            # Attention in bfloat16 overflows on some processors alone: what is written computes numbers on this one.
            assert (dtype, block) == ("bfloat16", "attention")
            assert bool(load_model(out)(torch.arange(10, 34)[None]).logits.isfinite().all())
            shutil.rmtree(out)
            continue
        assert "\n" not in str(caught)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "plan.yaml"], name


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders of models that are run layer by layer."""
    found: list[str] = []
    build = stream.build_model

    def built(folder: Any, **options: Any) -> Any:
        found.append(folder.path.name)
        return build(folder, **options)

    monkeypatch.setattr(stream, "build_model", built)
    return found


@pytest.mark.parametrize(("dtype", "runs"), [("float16", 1), ("bfloat16", 0), ("float32", 0)])
def test_ordinary_weights_are_looked_at_in_float16_alone(
    dtype: str, runs: int, streamed: list[str], tmp_path: Path
) -> None:
    base = tiny.checkpoint(tmp_path / "base", "gemma2", dtype=dtype)
    heard = Heard()
    plan = write_plan(tmp_path / "plan.yaml", PLANS["insert with grafts"])
    applied = surgeon.apply(plan, str(base), tmp_path / "out", device="cpu", listener=heard)
    assert len(streamed) == runs
    assert not any("finite" in said for said in heard.said)
    assert surgeon.verify(base, tmp_path / "out", window=8, windows=1, device="cpu").identical

    console = Console(width=300)
    with console.capture() as capture:
        console.print(applied_view(applied))
    assert "promise exact: proven on a twin" in capture.get() and CONDITION in capture.get()
    assert CONDITION in (tmp_path / "out" / "README.md").read_text()
    assert CONDITION in surgeon.preview(plan, str(base)).to_json()["proof"]["text"]
    static = surgeon.verify(base, tmp_path / "out", logits=False)
    assert "no model ran" in verdict(static).plain and CONDITION in verdict(static).plain


def test_a_base_that_computes_no_numbers_itself_is_not_held_against_what_is_new(
    streamed: list[str], tmp_path: Path
) -> None:
    def edit(name: str, tensor: torch.Tensor) -> None:
        if name.endswith("layers.3.mlp.up_proj.weight"):
            tensor.fill_(1e38)

    base = edited(tiny.checkpoint(tmp_path / "base", "llama", num_hidden_layers=4), edit)
    plan = write_plan(tmp_path / "plan.yaml", [INSERTED | {"where": {"after": [3]}}])
    surgeon.apply(plan, str(base), tmp_path / "out", device="cpu")
    assert len(streamed) == 2


def test_what_cannot_be_run_layer_by_layer_is_said(tmp_path: Path) -> None:
    base = tiny_quantised(tmp_path / "base", "qwen3", "fp8")
    for shard in base.glob("*.safetensors"):
        halved = {
            name: value.half() if value.dtype == torch.bfloat16 else value for name, value in load_file(shard).items()
        }
        save_file(halved, shard, metadata={"format": "pt"})
    operations = [{"op": "gated_adapters", "layers": [0], "size": 4}]
    heard = Heard()
    surgeon.apply(
        write_plan(tmp_path / "plan.yaml", operations), str(base), tmp_path / "out", device="cpu", listener=heard
    )
    (said,) = [said for said in heard.said if "finite" in said]
    assert said.startswith("not looked at: whether what is new stays finite (") and "`surgeon verify`" in said
