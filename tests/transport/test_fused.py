"""Fused kernels without a GPU: interpreted, in a process of their own, and compiled for cards that are not here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from surgeon.transport.passes import TORCH
from surgeon.transport.sinkhorn import passes_for
from tests.warm import warm

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

# Every width class, as a launch would have it; no driver is asked. Prints the shared memory taken, the widest's last.
COMPILE = """
import sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from surgeon.transport import fused

POINTERS = {"kernel", "v", "partial", "cost", "g", "f", "shift", "of_rows"}
for m in (1024, 14336):
    way = fused._Launch(torch.empty(1, m))
    constants = {"ROWS": way.rows, "BLOCK": way.block, "STAGES": way.stages}
    for kernel in (fused._sweep_kernel, fused._minima_kernel, fused._exp_kernel, fused._finish_kernel):
        kinds = {
            name: "constexpr" if name in constants else "*fp32" if name in POINTERS
            else "fp32" if name in ("scale", "factor") else "i32"
            for name in kernel.arg_names
        }
        fixed = {(kernel.arg_names.index(name),): value for name, value in constants.items() if name in kinds}
        source = ASTSource(fn=kernel, signature=kinds, constexprs=fixed)
        made = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options=way.options)
        assert len(made.asm["cubin"]) > 1000
        print(made.metadata.shared)
"""


def run(*arguments: str, interpret: bool) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1" if interpret else "0"}
    # Triton from 3.9 reads the variable when it is imported, which a warm interpreter did before.
    command = [sys.executable] if interpret else warm()
    ran = subprocess.run([*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-5000:]
    return ran.stdout


def test_interpreted_kernels_agree_with_torch() -> None:
    triton = pytest.importorskip("triton")
    if Version(triton.__version__) < Version("3.4"):
        pytest.skip("torch 2.7's interprets by what NumPy warns of")
    file = HERE / "interpreted_fused.py"
    told = run("-m", "pytest", str(file), "-q", "-p", "no:cacheprovider", "-n0", interpret=True)
    assert " passed" in told
    assert "skipped" not in told


def test_kernels_compile_for_an_a100() -> None:
    """And what they hold in shared memory fits any card that is at hand since."""
    pytest.importorskip("triton")
    told = run("-c", COMPILE, "80", interpret=False)
    assert max(int(line) for line in told.split()) < 99 * 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_processor_has_torch_s_passes(dtype: torch.dtype) -> None:
    assert passes_for(torch.ones(3, 4, dtype=dtype)) is TORCH
