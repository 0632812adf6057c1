"""`surgeon train` by two processes, with shares of the model (FSDP2) or all of it each: what one learns, they learn."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

import surgeon
from surgeon.common.listener import Quiet
from surgeon.errors import BadInput
from surgeon.training import gate_fitting
from surgeon.training.places import memory_folder, work_folder
from surgeon.training.publishing import Trained
from surgeon.training.saved.checkpoints import newest_checkpoint
from tests import tiny
from tests.training import sharded_runs
from tests.training.test_train import CONFIG, base_of, config, digests, grown
from tests.training.texts import add_tokenizer
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

# Runs of two processes that are compared with those of one.
ALONE = ("native", "everything", "unsharded", "gated")
RESUMED = {"steps": 12, "save_every": 3, "evaluate_every": 6}


def torchrun() -> list[str]:
    return [*warm(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python", *warm()]


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    """torchrun with two processes; the machine's cores are theirs, one each."""
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([*torchrun(), *arguments], capture_output=True, text=True, check=False, env=variables)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@dataclass(frozen=True)
class Launched:
    """Runs of two processes, all in one launch, and what one process made of some of them, by name."""

    folder: Path
    alone: dict[str, Trained]

    def told(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / name / "told.json").read_text())
        return found


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """A class of transformers' own; all grafts on tied weights; one unsharded; one to be resumed; a wild one; one whose
    own text somebody changed."""
    folder = tmp_path_factory.mktemp("launched")
    base_of(folder, num_hidden_layers=4, dtype="float32")
    add_tokenizer(tiny.checkpoint(folder / "tied-base", "gemma2", dtype="float32"))
    add_tokenizer(tiny.checkpoint(folder / "small-base", "llama"))
    (folder / "everything.yaml").write_text(EVERYTHING, encoding="utf-8")
    # Micro-batches of the same sequences, whoever takes them: then losses over a batch's tokens are the same too.
    # Three held-out sequences: in the second round of two there is none for the second process.
    # The base teaches, in rounds in which only one process has text of its own.
    shared = {"steps": 3, "micro_batch": 1, "batch": 4, "sharding": "fsdp", "validation_sequences": 3}
    shared |= {"preserve": {"loss": ["kl", "fisher"], "weight": {"kl": 1.0, "fisher": 100.0}, "sequences": 3}}
    # What the model writes for itself, the first process writes.
    itself = {"name": "en", "generate": {"tokens": 300, "length": 16, "batch": 8}, "share": 0.25, "role": "original"}
    written = {"sources": [CONFIG["sources"][0], itself | {"validation": 0.1}]}
    wild = {"sharding": "fsdp", "save_every": 1, "optimizer": {"lr": 1e30, "warmup": 2, "clip": 0}}
    runs: dict[str, tuple[str, str, dict[str, Any]]] = {
        "native": ("llama-pro", "base", shared | written),
        # The head's weights are whole only inside the model's forward, where the fused loss takes them.
        "everything": (str(folder / "everything.yaml"), "tied-base", shared | {"cross_entropy": "chunked"}),
        "unsharded": ("control-llm", "base", {**shared, "micro_batch": 2, "sharding": "none"}),
        # Fitted by each process, and then the first one's. What the base says is asked of both, and kept, before the
        # first step; new text too, as on other text the gate is closed.
        "gated": (
            "domain-gate",
            "base",
            shared | {"preserve": {"teacher": {"cached": 16}, "on": "all"}, "recall_for_gate": 300},
        ),
        "resumed": ("mixture-of-control", "small-base", RESUMED | {"sharding": "fsdp"}),
        "wild": ("mixture-of-control", "small-base", wild),
        "spoiled": ("mixture-of-control", "small-base", RESUMED | written),
    }
    alone = {}
    for name, (plan, base, changes) in runs.items():
        (folder / name).mkdir()
        surgeon.apply(plan, str(folder / base), folder / name / "out")
        config(folder, **changes).rename(folder / f"{name}.yaml")
        if name in ALONE:
            with patch.object(gate_fitting, "_STEPS", sharded_runs.GATE_STEPS):
                one = surgeon.train(
                    folder / name / "out", folder / f"{name}.yaml", folder / name / "alone", device="cpu"
                )
            assert one is not None
            alone[name] = one
    memory_folder(folder / "spoiled" / "together").mkdir()
    (memory_folder(folder / "spoiled" / "together") / "en.jsonl").write_text("{}")
    # What ends early first, so that what comes after shows that the group goes on.
    order = sorted(runs, key=lambda name: name not in ("spoiled", "wild"))
    ran = launch(sharded_runs.__file__, str(folder), *(f"{name}={name}.yaml" for name in order))
    assert ran.returncode == 0, ran.stderr[-3000:]
    return Launched(folder, alone)


@pytest.mark.slow
@pytest.mark.parametrize("name, base", [(name, "tied-base" if name == "everything" else "base") for name in ALONE])
def test_two_processes_learn_what_one_learns(launched: Launched, name: str, base: str) -> None:
    """Loss, gradient norm, held-out losses and every trained tensor, for every graft; one without logits."""
    one, told = launched.alone[name], launched.told(name)
    curves = [
        torch.tensor(
            [
                [e.get(key, 0.0) for key in ("loss", "grad_norm", "loss.preserve", "loss.fisher")]
                for e in log
                if "loss" in e
            ]
        )
        for log in (one.log, told["log"])
    ]
    assert len(curves[0]) == 3
    # Of two sequences at once, a mean over tokens of an auxiliary loss weighs each a little otherwise.
    near = {"rtol": 1e-4, "atol": 1e-5} if name == "unsharded" else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(*curves, **near)
    for source, (before, after) in one.losses.items():
        assert told["losses"][source]["before"] == pytest.approx(before, rel=1e-6)
        assert told["losses"][source]["after"] == pytest.approx(after, rel=2e-4)
    folder = launched.folder / name
    born, whole, both = (tensors(folder / made) for made in ("out", "alone", "together"))
    assert born.keys() == whole.keys() == both.keys()
    for tensor, value in whole.items():
        # Against how far it went: AdamW makes a whole step of a gradient that is all rounding.
        distance, way = (both[tensor] - value).norm(), (value - born[tensor]).norm()
        assert distance <= 1e-3 * way, (tensor, distance, way)
    assert surgeon.verify(launched.folder / base, folder / "together", window=16, windows=1).holds


@pytest.mark.slow
def test_what_one_process_finds_stops_every_process_alike(launched: Launched) -> None:
    for name, told in {
        "wild": r"step \d+: the (loss|gradient's norm) is (nan|inf); .* the checkpoint of step \d",
        # The first process alone looked at it.
        "spoiled": r".*en\.jsonl: not what this model writes by these settings; remove",
    }.items():
        stopped = [(launched.folder / name / f"stopped{rank}.txt").read_text() for rank in (0, 1)]
        assert stopped[0] == stopped[1]
        assert re.match(told, stopped[0])


@pytest.mark.slow
def test_killed_shares_go_on_as_they_are_or_as_one(launched: Launched, tmp_path: Path) -> None:
    """In bfloat16, so with masters. To the bit by two processes again."""
    out = launched.folder / "resumed" / "out"
    path = config(launched.folder, **RESUMED, sharding="fsdp")
    arguments = ["-m", "surgeon", "train", "--device", "cpu", "--json", str(out), str(path)]
    work = work_folder(tmp_path / "run")
    begun = subprocess.Popen(
        [*torchrun(), *arguments, str(tmp_path / "run")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    while begun.poll() is None and (not work.is_dir() or newest_checkpoint(work) is None):
        time.sleep(0.005)
    assert begun.poll() is None
    begun.terminate()  # which torchrun hands on: its processes would outlive it, were it killed
    begun.wait()
    shutil.copytree(work, work_folder(tmp_path / "other"))
    ran = launch(*arguments, str(tmp_path / "run"))
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "sharded over 2 processes (FSDP2)" in ran.stderr
    whole, told = launched.told("resumed"), json.loads(ran.stdout)
    assert 3 <= told["resumed_at"] < 12
    assert whole["losses"] == told["losses"]
    assert digests(launched.folder / "resumed" / "together") == digests(tmp_path / "run")
    other = surgeon.train(out, path, tmp_path / "other", take_over=True, device="cpu")
    assert other is not None
    assert 3 <= other.resumed_at < 12
    for name, (_, after) in other.losses.items():
        assert told["losses"][name]["after"] == pytest.approx(after, rel=0.01)


@pytest.mark.parametrize(
    "environment, told",
    [
        ({"ACCELERATE_USE_FSDP": "true"}, "launch without `--use_fsdp`, and say `sharding: fsdp`"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "launch without `--use_deepspeed`, and say `sharding: fsdp`"),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "say `dtype: bfloat16`"),
    ],
)
def test_what_accelerate_launch_may_ask_for_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], told: str
) -> None:
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    out = grown(tmp_path)
    with pytest.raises(BadInput, match=told):
        surgeon.train(out, config(tmp_path, steps=2), tmp_path / "run", device="cpu")
    assert not work_folder(tmp_path / "run").exists()


def test_one_process_has_nothing_to_shard(tmp_path: Path) -> None:
    out, listener = grown(tmp_path), Quiet()
    asked = config(tmp_path, steps=2, sharding="fsdp")
    assert surgeon.train(out, asked, tmp_path / "run", device="cpu", listener=listener) is not None
    assert "one process: nothing is sharded" in listener.said
