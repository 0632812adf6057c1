"""`surgeon train` under FSDP2: two processes with shares of the model learn what one learns with all of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import surgeon
from surgeon.errors import BadInput
from surgeon.train.checkpoints import newest_checkpoint
from surgeon.train.session import work_folder
from tests import tiny
from tests.train import sharded_runs
from tests.train.test_train import CONFIG, base_of, config, digests, grown
from tests.train.texts import add_tokenizer
from tests.warm import warm

# Every kind of graft, with every loss of its own.
EVERYTHING = """
surgeon: 1
operations:
  - {op: control_llm, layers: [1, 4], divergence: {kind: mse, weight: 1.0}}
  - {op: gated_adapters, layers: all, size: 12, gate: relu, local_loss: {kind: l1, weight: 0.01}}
  - {op: pmoe_experts, threshold: 3, slots: 2, router_loss: {kind: task_id}}
  - {op: mixture_of_control, rank: 4}
"""

# What `accelerate launch --use_fsdp --fsdp_version 2` sets, with its default of loading on one process.
ACCELERATE = {
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_MIXED_PRECISION": "no",
    "FSDP_VERSION": "2",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
}


def torchrun() -> list[str]:
    return [*warm(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python", *warm()]


def launch(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """torchrun with two processes; the machine's cores are theirs, one each."""
    variables = os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {})
    return subprocess.run([*torchrun(), *arguments], capture_output=True, text=True, check=False, env=variables)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.slow
def test_two_shares_learn_what_one_whole_learns(tmp_path: Path) -> None:
    """Loss, gradient norm, held-out losses and every trained tensor, for every graft; some without logits."""
    base_of(tmp_path, num_hidden_layers=8, dtype="float32")
    add_tokenizer(tiny.checkpoint(tmp_path / "tied-base", "gemma2", num_hidden_layers=8, dtype="float32"))
    (tmp_path / "everything.yaml").write_text(EVERYTHING, encoding="utf-8")
    runs = {
        "llama-pro": ("llama-pro", "base"),
        "everything": (str(tmp_path / "everything.yaml"), "base"),
        "tied": ("mixture-of-control", "tied-base"),
    }
    # Micro-batches of the same sequences, whoever takes them: then losses over a batch's tokens are the same too.
    # Three held-out sequences: in the second round of two there is none for the second process.
    # The base teaches, in rounds in which only one process has text of its own.
    path = config(
        tmp_path, steps=4, micro_batch=1, batch=4, sharding="fsdp", validation_sequences=3, preserve={"loss": "kl"}
    )
    alone = {}
    for name, (plan, base) in runs.items():
        (tmp_path / name).mkdir()
        surgeon.apply(plan, str(tmp_path / base), tmp_path / name / "out")
        alone[name] = surgeon.train(tmp_path / name / "out", path, tmp_path / name / "alone", device="cpu")
    shutil.copytree(tmp_path / "tied" / "out", tmp_path / "wild" / "out")
    wild = CONFIG | {"sharding": "fsdp", "save_every": 1, "optimizer": {"lr": 1e30, "warmup": 2, "clip": 0}}
    (tmp_path / "wild.yaml").write_text(yaml.safe_dump(wild), encoding="utf-8")
    # The head's weights are whole only inside the model's forward, where the fused loss takes them.
    fused = yaml.safe_load(path.read_text(encoding="utf-8")) | {"cross_entropy": "chunked"}
    (tmp_path / "fused.yaml").write_text(yaml.safe_dump(fused), encoding="utf-8")
    how = {name: "fused.yaml" if name in ("llama-pro", "tied") else "train.yaml" for name in runs}
    ran = launch(sharded_runs.__file__, str(tmp_path), "wild=wild.yaml", *(f"{name}={how[name]}" for name in runs))
    assert ran.returncode == 0, ran.stderr[-3000:]
    for name, one in alone.items():
        assert one is not None
        told = json.loads((tmp_path / name / "told.json").read_text())
        curves = [
            torch.tensor([(e["loss"], e["grad_norm"], e["loss.preserve"]) for e in log if "loss" in e])
            for log in (one.log, told["log"])
        ]
        assert len(curves[0]) == 4
        torch.testing.assert_close(*curves, rtol=1e-5, atol=1e-6, msg=lambda text, of=name: f"{of}: {text}")
        for source, (before, after) in one.losses.items():
            assert told["losses"][source]["before"] == pytest.approx(before, rel=1e-6)
            assert told["losses"][source]["after"] == pytest.approx(after, rel=1e-5)
        born, whole, sharded = (tensors(tmp_path / name / folder) for folder in ("out", "alone", "sharded"))
        assert born.keys() == whole.keys() == sharded.keys()
        for tensor, value in whole.items():
            # Against how far it went: AdamW makes a whole step of a gradient that is all rounding.
            distance, way = (sharded[tensor] - value).norm(), (value - born[tensor]).norm()
            assert distance <= 1e-3 * way, (name, tensor, distance, way)
        assert surgeon.verify(tmp_path / runs[name][1], tmp_path / name / "sharded", text=None, windows=1).holds
    stopped = [(tmp_path / "wild" / f"stopped{rank}.txt").read_text() for rank in (0, 1)]
    assert stopped[0] == stopped[1]
    assert re.match(r"step \d+: the (loss|gradient's norm) is (nan|inf); .* the checkpoint of step \d", stopped[0])


@pytest.mark.slow
def test_killed_shares_go_on_as_they_are_or_as_one(tmp_path: Path) -> None:
    """In bfloat16, so with masters; as `accelerate launch` starts it. To the bit by two processes again."""
    grown(tmp_path, "mixture-of-control")
    config(tmp_path, steps=12, save_every=3, evaluate_every=6)
    arguments = ["-m", "surgeon", "train", str(tmp_path / "out"), "--config", str(tmp_path / "train.yaml")]
    arguments += ["--device", "cpu", "--json", "--to"]
    whole = launch(*arguments, str(tmp_path / "whole"), environment=ACCELERATE)
    assert whole.returncode == 0, whole.stderr[-3000:]
    assert "sharded over 2 processes (FSDP2)" in whole.stderr
    work = work_folder(tmp_path / "run")
    begun = subprocess.Popen(
        [*torchrun(), *arguments, str(tmp_path / "run")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | ACCELERATE,
    )
    while begun.poll() is None and (not work.is_dir() or newest_checkpoint(work) is None):
        time.sleep(0.005)
    assert begun.poll() is None
    begun.terminate()  # which torchrun hands on: its processes would outlive it, were it killed
    begun.wait()
    shutil.copytree(work, work_folder(tmp_path / "other"))
    ran = launch(*arguments, str(tmp_path / "run"), environment=ACCELERATE)
    assert ran.returncode == 0, ran.stderr[-3000:]
    told = [json.loads(each.stdout) for each in (whole, ran)]
    assert 3 <= told[1]["resumed_at"] < 12
    assert told[0]["losses"] == told[1]["losses"]
    assert digests(tmp_path / "whole") == digests(tmp_path / "run")
    other = surgeon.train(tmp_path / "out", tmp_path / "train.yaml", tmp_path / "other", device="cpu")
    assert other is not None
    assert 3 <= other.resumed_at < 12
    for name, (_, after) in other.losses.items():
        assert told[0]["losses"][name]["after"] == pytest.approx(after, rel=0.01)


@pytest.mark.parametrize(
    "environment, told",
    [
        ({"FSDP_VERSION": "1"}, "launch with `--fsdp_version 2`"),
        ({"FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"}, "launch without `fsdp_offload_params`"),
        ({"FSDP_VERSION": "2", "FSDP_ACTIVATION_CHECKPOINTING": "true"}, "say `checkpointing: true`"),
        ({"FSDP_VERSION": "2", "ACCELERATE_MIXED_PRECISION": "bf16"}, "say `dtype: bfloat16`"),
    ],
)
def test_what_accelerate_launch_may_ask_for_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], told: str
) -> None:
    for variable, value in (ACCELERATE | environment).items():
        monkeypatch.setenv(variable, value)
    out = grown(tmp_path)
    with pytest.raises(BadInput, match=told):
        surgeon.train(out, config(tmp_path, steps=2), tmp_path / "run", device="cpu")
    assert not work_folder(tmp_path / "run").exists()


def test_one_process_has_nothing_to_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = grown(tmp_path)
    for variable, value in ACCELERATE.items():
        monkeypatch.setenv(variable, value)
    assert surgeon.train(out, config(tmp_path, steps=2, sharding="fsdp"), tmp_path / "run", device="cpu") is not None
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
