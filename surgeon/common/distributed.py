"""Several processes on one job, as torchrun starts them: which one leads, and what they send each other."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from surgeon.errors import SurgeonError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# A rank may wait long for rank 0's work on a large model. If a rank dies, torchrun notices and ends the others.
_LONGEST_WAIT = datetime.timedelta(days=2)
_RANK = ("RANK", "WORLD_SIZE")


class Elsewhere(SurgeonError):
    """An error on another rank, with its exit code."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Ranks:
    """This process's rank among the `size` processes of torchrun; a single process is rank 0 of 1.

    With size 1 nothing is sent, and torch.distributed is not imported.
    """

    rank: int = 0
    size: int = 1
    # torch's process group, where it is not the default one.
    group: Any = None

    @classmethod
    def of_environment(cls) -> Ranks:
        """Return the ranks by torchrun's environment variables; without them this process is the only one."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        return cls(int(os.environ["RANK"]), size) if size > 1 and "RANK" in os.environ else cls()

    @property
    def leads(self) -> bool:
        """Whether this process owns the output and writes to the terminal."""
        return self.rank == 0

    def send(self, message: Any) -> None:
        """Send a message from rank 0 to all others; does nothing for a single process."""
        if self.size > 1:
            _distributed().broadcast_object_list([message], src=0, group=self.group)

    def receive(self) -> Any:
        """Return rank 0's message; raise it where it is an error."""
        box: list[Any] = [None]
        _distributed().broadcast_object_list(box, src=0, group=self.group)
        if isinstance(box[0], Elsewhere):
            raise box[0]
        return box[0]

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Surround, on rank 0, the work that the others wait for, and send them its outcome."""
        try:
            yield
            self.send(None)
        except SurgeonError as error:
            self.send(Elsewhere(str(error), error.exit_code))
            raise


def forget_leftovers() -> None:
    """Remove rank variables that no launcher set for this process; with them it would wait for other processes.

    A launcher's variables always include the address where processes meet.
    """
    rank, size, address, port = (os.environ.get(name, "") for name in (*_RANK, "MASTER_ADDR", "MASTER_PORT"))
    if not (address and port and rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        for name in (*_RANK, "LOCAL_RANK"):
            os.environ.pop(name, None)


@contextmanager
def waiting(ranks: Ranks) -> Iterator[Ranks]:
    """Yield connected ranks with a longer timeout, so that they can wait for one another longer inside the block."""
    distributed = _distributed()
    group = distributed.new_group(backend="gloo", timeout=_LONGEST_WAIT)
    try:
        yield replace(ranks, group=group)
    finally:
        distributed.destroy_process_group(group)


def _distributed() -> Any:
    """Return torch.distributed, which is imported only where it is needed."""
    from torch import distributed

    return distributed


def is_sharded(model: Any) -> bool:
    """Return whether FSDP2 distributed the model's parameters over the processes (training/processes/sharding.py)."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


def summed(sums: NDArray[np.float64], processes: int, device: Any) -> NDArray[np.float64]:
    """Return the elementwise sum over all processes of arrays of the same shape; unchanged for a single process."""
    if processes == 1:
        return sums
    import torch

    together = torch.from_numpy(sums).to(device if device.type == "cuda" else "cpu")
    torch.distributed.all_reduce(together)
    return together.cpu().numpy()
