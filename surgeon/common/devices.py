"""The device that computes tensors: `auto`, `cpu`, `cuda` or `cuda:N`, checked before any work begins."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from surgeon.errors import BadInput, printable

_NAME = re.compile(r"cpu|cuda(?::(\d{1,3}))?")


def check(device: str) -> None:
    """Raise BadInput for a name that is none of a device, before torch is loaded to ask whether it is there."""
    if device != "auto" and _NAME.fullmatch(device) is None:
        raise BadInput(f"--device {printable(device)}: unknown; use auto, cpu, cuda or cuda:N")


def resolve(device: str) -> str:
    """The torch device that `--device` names. Raises BadInput where the name is unknown or the device is missing."""
    check(device)
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    found = _NAME.fullmatch(device)
    if found is None or device == "cpu":
        return device
    count = torch.cuda.device_count()
    if count == 0:
        raise BadInput(f"--device {device}: no CUDA device is visible to torch here; use cpu")
    if int(found[1] or 0) >= count:
        raise BadInput(f"--device {device}: torch sees {count} CUDA devices, numbered from 0; use one of them")
    return device


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread inside: tiny products are faster so, and far faster where other processes want the cores.

    Results then do not depend on the number of cores either.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
