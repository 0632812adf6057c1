"""The device that computes tensors: `auto`, `cpu`, `cuda` or `cuda:N`, checked before any work begins."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from surgeon.errors import BadInput, printable

_NAME = re.compile(r"cpu|cuda(?::(\d{1,3}))?")


def check(device: str) -> None:
    """Raise BadInput for a device that does not exist, as far as this is known before torch is loaded."""
    if device == "auto":
        return
    if _NAME.fullmatch(device) is None:
        raise BadInput(f"--device {printable(device)}: unknown; use auto, cpu, cuda or cuda:N")
    if device != "cpu" and not _has_driver():
        raise BadInput(f"--device {device}: no CUDA device is visible here; use cpu")


def _has_driver() -> bool:
    """Return whether the driver of an NVIDIA or AMD GPU is present and shows a device; without it torch sees none."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    if Path("/dev/kfd").exists():
        return True
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    return True


def resolve(device: str) -> str:
    """Return the torch device for `--device`. Raises BadInput where the name is unknown or the device is missing."""
    check(device)
    if device == "cpu" or not _has_driver():
        return "cpu"
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    found = _NAME.fullmatch(device)
    assert found is not None, device
    count = torch.cuda.device_count()
    if count == 0:
        raise BadInput(f"--device {device}: no CUDA device is visible here; use cpu")
    if int(found[1] or 0) >= count:
        raise BadInput(f"--device {device}: torch sees {count} CUDA devices, numbered from 0; use one of them")
    return device


def multiplies_bfloat16() -> bool:
    """Return whether this CPU has instructions for products of bfloat16 matrices.

    Without them torch computes the products in another way, which takes longer than float32.
    """
    import torch

    if platform.machine().lower() in ("aarch64", "arm64"):
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return torch.cpu._is_avx512_bf16_supported()


def fast_dtype(device: str) -> str:
    """Return the dtype in which a checkpoint is run where speed counts: `auto`, or float32 on a CPU without bfloat16.

    `auto` is the checkpoint's. Raises BadInput as `resolve` does.
    """
    return "auto" if resolve(device) != "cpu" or multiplies_bfloat16() else "float32"


def free_memory(device: str) -> int | None:
    """Return the bytes that this process can still take on `device` (cpu, cuda); None where this is not known.

    On a CPU it is what the kernel calls available, which counts file pages that it can drop, and at most what a control
    group of Linux (a container) leaves.
    """
    if device != "cpu":
        import torch

        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    found = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]))
    with contextlib.suppress(OSError, ValueError):
        # The limit is the word `max` where there is none.
        limit, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
        found.append(max(0, limit - used))
    if not found:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            found.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(found, default=None)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread in the block.

    This is faster for tiny products, above all where other processes use the cores, and results then do not depend on
    the number of cores.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
