"""`push` against the stand-in Hub: what goes wrong at a request, and what the repository holds afterwards."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.checkpoint.stand_in_hub import COMMIT, Hub, files_of, serve
from tests.injection.command import Command, Place
from tests.injection.faults import DISK, Child, Ended, Injection, digests

# At request N: the server never gets it; does what it says, and the answer is lost; answers 503, or is gone from then
# on; the process is killed before the server does it, or after.
REQUESTS = (
    "request cut",
    "answer lost",
    "503",
    "503 from then on",
    "killed before a request",
    "killed after a request",
)


@dataclass(frozen=True)
class Push(Command):
    """Push the output `work / result` onto an older state of it, or (`new`) to a repository that is not there."""

    again: bool = True
    new: bool = False

    @property
    def kinds(self) -> tuple[tuple[str, ...], ...]:
        """Faults at calls to the disk, and at requests."""
        return (tuple(DISK), REQUESTS)

    def _place(self, inputs: Path, folder: Path) -> Place:
        return _PushPlace(self, inputs, folder)


class _PushPlace(Place):
    """An output, and a repository, which outlives its server: each run has one of its own."""

    def __init__(self, command: Push, inputs: Path, folder: Path) -> None:
        super().__init__(command, inputs, folder)
        shutil.copytree(inputs / "deeper", self.work / command.result)
        self.older = {} if command.new else files_of(inputs / "slots")
        part_bytes = 30_000 if command.new else None
        self.hub = Hub(dict(self.older), exists=not command.new, private=not command.new, part_bytes=part_bytes)

    def prepare(self) -> None:
        from huggingface_hub import constants

        os.environ.update(HF_TOKEN="hf_" + "x" * 34, NO_PROXY="127.0.0.1", no_proxy="127.0.0.1")
        constants.ENDPOINT, constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET = self.hub.endpoint, False, True
        # The client waits for seconds before it tries again, and reads certificates, of which none is asked for here.
        time.sleep = lambda _: None
        unencrypted = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        ssl.create_default_context = lambda *_, **__: unencrypted

    def there(self) -> dict[str, str] | None:
        hub = self.hub
        if digests(self.work / self.command.result) != digests(self.inputs / "deeper"):
            return {"OUT": "is not what it was"}
        if hub.commit == COMMIT and hub.files == self.older and not hub.history:
            return None
        held = {name: hashlib.sha256(content).hexdigest() for name, content in hub.files.items()}
        # The first of the history is what was there.
        return held | {"commits": str(len(hub.history) - 1), "private": str(hub.private)}

    def left(self) -> list[str]:
        return super().left() + sorted(path.name for path in self.temporary.iterdir())

    def disturbed(self, fault: str, at: int | str) -> Ended:
        if fault in DISK or isinstance(at, str):
            with serve(self.hub, join=True):
                return super().disturbed(fault, at)
        meddling = _Meddling(fault, at)
        with serve(self.hub, meddling.handler(), join=True):
            child = Child(self.run, Injection())
            meddling.child.set_result(child)
            ended = child.ended()
        return ended._replace(calls=meddling.calls)

    def at_once(self, moments: Sequence[float | None]) -> list[Ended]:
        # All that was sent has been worked on when the server is down.
        with serve(self.hub, join=True):
            return super().at_once(moments)


@dataclass
class _Meddling:
    """Counts the requests of a run, and does to the one `at` what `fault` says."""

    fault: str
    at: int
    calls: int = 0
    child: Future[Child] = field(default_factory=Future)
    counting: threading.Lock = field(default_factory=threading.Lock)

    def handler(self) -> type:
        """What a handler of requests begins with."""
        meddle = self._meddle

        class Meddled:
            def do_HEAD(self) -> None:
                meddle(self, super().do_HEAD)

            def do_GET(self) -> None:
                meddle(self, super().do_GET)

            def do_POST(self) -> None:
                meddle(self, super().do_POST)

            def do_PUT(self) -> None:
                meddle(self, super().do_PUT)

        return Meddled

    def _meddle(self, handler: Any, answer: Callable[[], None]) -> None:
        with self.counting:
            self.calls += 1
            number = self.calls
        if number != self.at and not (self.fault == "503 from then on" and 0 < self.at < number):
            answer()
        elif self.fault.startswith("503"):
            handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
            handler._send(503, b"", {})
        else:
            if self.fault in ("answer lost", "killed after a request"):
                handler.wfile = io.BytesIO()
                answer()
            if self.fault.startswith("killed"):
                self.child.result().kill()
            handler.connection.shutdown(socket.SHUT_RDWR)
            handler.close_connection = True
