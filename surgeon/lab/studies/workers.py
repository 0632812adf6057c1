"""Workers that carry out tasks: this process, or several processes that end with their study."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from surgeon.common.processes import start_python
from surgeon.errors import BadInput, printable

Task = dict[str, Any]
Answer = dict[str, Any]

# The command that starts a worker's Python.
PYTHON = [sys.executable]


class Here:
    """A worker that carries out tasks in this process, one at a time."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        """Begin without a task; `tell` receives how far one is."""
        self._tell = tell
        self._task: Task | None = None

    def __enter__(self) -> Self:
        """Return the worker; nothing needs to start."""
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing; nothing needs to end."""

    @property
    def free(self) -> bool:
        """Whether no task is waiting."""
        return self._task is None

    def begin(self, task: Task) -> None:
        """Store the task; `wait` carries it out."""
        assert self._task is None
        self._task = task

    def wait(self) -> tuple[Task, Answer]:
        """Carry out the stored task; return (the task, its answer)."""
        from surgeon.lab.studies.running import carry_out

        assert self._task is not None
        task, self._task = self._task, None
        return task, carry_out(task, self._tell)


class Processes:
    """A pool of `count` worker processes with one CPU thread each, spread over `gpus` GPUs where there are any.

    The stderr of worker N goes to `logs`/worker-N.log.
    """

    def __init__(self, count: int, *, logs: Path, tell: Callable[[str], None], gpus: int = 0) -> None:
        """Set up the pool; the processes start when its context begins. `tell` receives how far a task is."""
        self._tell = tell
        self._read = [b""] * count
        self._count = count
        self._logs = logs
        self._gpus = gpus
        self._all: list[subprocess.Popen[bytes]] = []
        self._tasks: dict[int, Task] = {}
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Self:
        """Start all workers."""
        for number in range(self._count):
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            if self._gpus:
                visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
                names = visible if visible != [""] else [str(gpu) for gpu in range(self._gpus)]
                environment["CUDA_VISIBLE_DEVICES"] = names[number % len(names)]
            with (self._logs / f"worker-{number}.log").open("wb") as log:
                worker = start_python(
                    ["-m", "surgeon.lab.studies.workers"],
                    python=PYTHON,
                    environment=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                )
            assert worker.stdout is not None
            self._selector.register(worker.stdout, selectors.EVENT_READ, number)
            self._all.append(worker)
        return self

    def __exit__(self, *_: object) -> None:
        """Kill all workers; unfinished tasks are lost."""
        self._selector.close()
        for number in range(len(self._all)):
            self.kill(number)
        for worker in self._all:
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                assert pipe is not None
                pipe.close()

    def kill(self, number: int) -> None:
        """Kill one worker at once."""
        self._all[number].kill()

    @property
    def free(self) -> bool:
        """Whether a worker has no task."""
        return len(self._tasks) < self._count

    def begin(self, task: Task) -> None:
        """Send the task to a worker that has none. Raises BadInput where that worker has ended."""
        number = next(number for number in range(self._count) if number not in self._tasks)
        pipe = self._all[number].stdin
        assert pipe is not None
        self._tasks[number] = task
        try:
            pipe.write(json.dumps(task).encode() + b"\n")
            pipe.flush()
        except BrokenPipeError:
            raise self._gone(number) from None

    def wait(self) -> tuple[Task, Answer]:
        """Wait for the next task to end; return (the task, its answer). Raises BadInput where a worker has ended."""
        assert self._tasks
        while True:
            for key, _ in self._selector.select():
                # Not by the pipe's own buffer: what waits there is not seen by `select`.
                if not (read := os.read(key.fd, 1 << 16)):
                    raise self._gone(key.data)
                *lines, self._read[key.data] = (self._read[key.data] + read).split(b"\n")
                for message in map(json.loads, lines):
                    if "at" not in message:
                        return self._tasks.pop(key.data), message
                    self._tell(message["at"])

    def _gone(self, number: int) -> BadInput:
        """Wait for a worker that has ended; return the error with its exit status and the last line of its log."""
        code = self._all[number].wait()
        log = self._logs / f"worker-{number}.log"
        said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
        more = f" ({printable(said[-1])})" if said else ""
        return BadInput(
            f"{printable(str(log))}: a worker {how}{more}; if memory was short, give fewer --jobs; the same command"
            " goes on"
        )


# Workers that carry out tasks; both are context managers.
Workers = Here | Processes


def serve() -> None:
    """Carry out tasks from stdin, one line of JSON each, and write answers to the original stdout, until stdin ends."""
    answers = os.fdopen(os.dup(1), "wb")
    # Send what libraries print to stderr, so that stdout contains only answers.
    os.dup2(2, 1)
    tasks: list[bytes] = []
    there = threading.Semaphore(0)

    def read() -> None:
        """Collect tasks from stdin; end this process when stdin ends."""
        for line in sys.stdin.buffer:
            tasks.append(line)
            there.release()
        # The study was killed or has ended: nobody waits for the current task.
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    from surgeon.lab.studies.running import carry_out

    def send(answer: Answer) -> None:
        """Write one line to the study."""
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()

    try:
        while True:
            there.acquire()
            send(carry_out(json.loads(tasks.pop(0)), lambda text: send({"at": text})))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        # Exit without cleanup: the reading thread holds stdin, so a normal exit would abort the interpreter and print
        # more after the traceback.
        os._exit(1)


if __name__ == "__main__":
    serve()
