"""What the benchmarks share: a measurement in a process of its own, and the machine in words."""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any


def in_a_process(script: str, *arguments: object) -> dict[str, Any]:
    """Run `script --inner ARGUMENTS…` and give back the JSON of its last line: memory peaks and caches are its own."""
    command = [sys.executable, script, "--inner", *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(ran.stderr)
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def peak_memory() -> int:
    """The highest resident set of this process in bytes.

    What `getrusage` says of a process begins, on Linux, with the peak of the one that started it.
    """
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    found = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
    unit = 1 if sys.platform == "darwin" else 1024
    return found if found is not None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def processor() -> str:
    """The processor's model, or its architecture where the model is not known."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = (line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine()


def machine(device: str = "cpu") -> str:
    """The machine without names: processor, cores, memory, system; or the GPU."""
    if device == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        return f"{processor()}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}"
    import torch

    return torch.cuda.get_device_name()
