"""Several processes at one job, as torchrun starts them: who leads, what is sent between them."""

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

# A rank may wait for another's transport maps or for rank 0's read-back of a large model; one that died is noticed by
# torchrun, which ends the rest.
_LONGEST_WAIT = datetime.timedelta(days=2)
_RANK = ("RANK", "WORLD_SIZE")


class Elsewhere(SurgeonError):
    """An error that another rank has met, with its exit code; `momentary` ones may pass (a full disk)."""

    def __init__(self, message: str, exit_code: int = 2, *, momentary: bool = False) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.momentary = momentary

    def __reduce__(self) -> tuple[Any, ...]:
        return Elsewhere, (str(self), self.exit_code)


@dataclass(frozen=True)
class Report:
    """The end of one rank's share: reports of transport maps by shard file, or an error's text and exit code."""

    maps: dict[str, dict[str, Any]]
    error: str | None = None
    exit_code: int = 2
    momentary: bool = False


@dataclass(frozen=True)
class Ranks:
    """This process among the `size` that torchrun started; one alone is rank 0 of 1.

    With size 1 nothing is sent anywhere, and torch.distributed is not imported.
    """

    rank: int = 0
    size: int = 1
    # torch's, where it is another than the default one.
    group: Any = None

    @classmethod
    def of_environment(cls) -> Ranks:
        """Read torchrun's environment; without it this process is alone."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        return cls(int(os.environ["RANK"]), size) if size > 1 and "RANK" in os.environ else cls()

    @property
    def leads(self) -> bool:
        """True for the process that owns the output and writes to the terminal."""
        return self.rank == 0

    @property
    def local_device(self) -> str | None:
        """The CUDA device that torchrun means this process to have, if it is one of several."""
        return f"cuda:{os.environ['LOCAL_RANK']}" if self.size > 1 and "LOCAL_RANK" in os.environ else None

    def send(self, message: Any) -> None:
        """From rank 0 to all others."""
        if self.size > 1:
            _distributed().broadcast_object_list([message], src=0, group=self.group)

    def receive(self) -> Any:
        """Return what rank 0 sends; raise it where it is an error."""
        box: list[Any] = [None]
        _distributed().broadcast_object_list(box, src=0, group=self.group)
        return _opened(box[0])

    def gather(self, report: Report) -> list[Report]:
        """Collect every rank's report on every rank; raise the first error among them."""
        if self.size == 1:
            reports = [report]
        else:
            reports = [report] * self.size
            _distributed().all_gather_object(reports, report, group=self.group)
        for found in reports:
            if found.error is not None:
                raise Elsewhere(found.error, found.exit_code, momentary=found.momentary)
        return reports

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Surround, on rank 0, all that the others wait for, and send them how it ended."""
        try:
            yield
            self.send(None)
        except Elsewhere:  # they know: it came out of `gather`
            raise
        except SurgeonError as error:
            self.send(Elsewhere(str(error), error.exit_code))
            raise


def forget_leftovers() -> None:
    """Take ranks out of the environment that no launcher set for this process: it would wait for the others.

    Every launcher says where processes meet.
    """
    rank, size, address, port = (os.environ.get(name, "") for name in (*_RANK, "MASTER_ADDR", "MASTER_PORT"))
    if not (address and port and rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        for name in (*_RANK, "LOCAL_RANK"):
            os.environ.pop(name, None)


@contextmanager
def joined() -> Iterator[Ranks]:
    """The ranks that torchrun's environment names, which can send to each other inside."""
    ranks = Ranks.of_environment()
    if ranks.size == 1:
        yield ranks
        return
    distributed = _distributed()
    distributed.init_process_group("gloo", timeout=_LONGEST_WAIT)
    try:
        yield ranks
    finally:
        distributed.destroy_process_group()


@contextmanager
def waiting(ranks: Ranks) -> Iterator[Ranks]:
    """Ranks that have joined, able inside to wait for one another longer than what they joined for lets them."""
    distributed = _distributed()
    group = distributed.new_group(backend="gloo", timeout=_LONGEST_WAIT)
    try:
        yield replace(ranks, group=group)
    finally:
        distributed.destroy_process_group(group)


def _distributed() -> Any:
    from torch import distributed

    return distributed


def _opened(message: Any) -> Any:
    if isinstance(message, Elsewhere):
        raise message
    return message


def is_sharded(model: Any) -> bool:
    """Return whether FSDP2 dealt the model's parameters out to the processes (train/processes/sharding.py)."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


def summed(sums: NDArray[np.float64], processes: int, device: Any) -> NDArray[np.float64]:
    """The sums of all processes, each of which has its own of the same shape; those of one process as they are."""
    if processes == 1:
        return sums
    import torch

    together = torch.from_numpy(sums).to(device if device.type == "cuda" else "cpu")
    torch.distributed.all_reduce(together)
    return together.cpu().numpy()
