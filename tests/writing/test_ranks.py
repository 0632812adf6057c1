"""Several processes on one output: the same bytes as one, and one line when any of them fails."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import surgeon
from tests import tiny
from tests.warm import warm

SETTINGS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def two_ranks(*arguments: object) -> subprocess.CompletedProcess[str]:
    launcher = [*warm(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python", *warm()]
    return subprocess.run(
        [*launcher, "-m", "surgeon", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | SETTINGS,
        timeout=600,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["20KB", "2GB"])
def test_two_processes_write_what_one_writes(shard: str, tmp_path: Path) -> None:
    """Computed layers in shards of their own, and several in one shard that both processes write to."""
    base = tiny.checkpoint(tmp_path / "base", "qwen3")
    ran = two_ranks("apply", "opt-deus", base, tmp_path / "two", "--max-shard-size", shard)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("done") == 1  # one process speaks
    limit = {"20KB": 20_000, "2GB": 2_000_000_000}[shard]
    surgeon.apply("opt-deus", str(base), tmp_path / "one", max_shard_bytes=limit)
    names = {path.name for path in (tmp_path / "one").iterdir()}
    assert names == {path.name for path in (tmp_path / "two").iterdir()}
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


@pytest.mark.slow
@pytest.mark.parametrize("gap", [2, 3])
def test_a_failure_of_any_process_is_one_line_and_no_output(gap: int, tmp_path: Path) -> None:
    """The layer after `gap` is computed by rank 0 (gap 2) or rank 1 (gap 3); its upper source holds a NaN."""
    base = tiny.checkpoint(tmp_path / "base", "llama")
    name = f"model.layers.{gap + 1}.self_attn.q_proj.weight"
    for path in base.glob("*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            tensors[name][0, 0] = torch.nan
            save_file(tensors, path, metadata={"format": "pt"})
    plan = tmp_path / "plan.yaml"
    after = [gap, 5 - gap] if gap == 2 else [0, gap]
    plan.write_text(
        "surgeon: 1\noperations:\n  - op: insert_layers\n"
        f"    where: {{after: {sorted(after)}}}\n    init: {{kind: average}}\n    zero_init: false\n"
    )
    ran = two_ranks("apply", plan, base, tmp_path / "out", "--quiet")
    assert ran.returncode != 0
    told = [line for line in ran.stderr.splitlines() if line.startswith("surgeon:")]
    assert len(told) == 1, ran.stderr
    assert name in told[0]
    assert "nan" in told[0]
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.surgeon").exists()


def test_a_refusal_before_any_work_reaches_every_process(tmp_path: Path) -> None:
    base = tiny.checkpoint(tmp_path / "base", "llama")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    ran = two_ranks("apply", "copy", base, tmp_path / "out")
    assert ran.returncode != 0
    assert sum(line.startswith("surgeon:") for line in ran.stderr.splitlines()) == 1, ran.stderr
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"
