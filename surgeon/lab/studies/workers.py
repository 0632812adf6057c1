"""Workers that carry out tasks: this process, or several that stay for many runs; none outlives its study."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, Self

from surgeon.common.processes import start_python
from surgeon.errors import BadInput, printable

Task = dict[str, Any]
Answer = dict[str, Any]

# What workers are started by.
PYTHON = [sys.executable]


class Here:
    """This process, one task at a time."""

    def __init__(self) -> None:
        self._task: Task | None = None

    def __enter__(self) -> Self:
        """Nothing to start."""
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to end."""

    @property
    def free(self) -> bool:
        """Whether it has nothing to do."""
        return self._task is None

    def begin(self, task: Task) -> None:
        """Note the task."""
        assert self._task is None
        self._task = task

    def wait(self) -> tuple[Task, Answer]:
        """Do it."""
        from surgeon.lab.studies.running import carry_out

        assert self._task is not None
        task, self._task = self._task, None
        return task, carry_out(task)


class Processes:
    """`count` processes, each for many tasks, of one thread on a CPU; dealt out to `gpus` GPUs where there are any.

    What they write to stderr goes to `logs`/worker-N.log.
    """

    def __init__(self, count: int, *, logs: Path, gpus: int = 0) -> None:
        self._count = count
        self._logs = logs
        self._gpus = gpus
        self._all: list[subprocess.Popen[bytes]] = []
        self._tasks: dict[int, Task] = {}
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Self:
        """Start them."""
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
        """End them; what they had not finished is made again."""
        self._selector.close()
        for number in range(len(self._all)):
            self.kill(number)
        for worker in self._all:
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                assert pipe is not None
                pipe.close()

    def kill(self, number: int) -> None:
        """End one of them at once."""
        self._all[number].kill()

    @property
    def free(self) -> bool:
        """Whether one of them has nothing to do."""
        return len(self._tasks) < self._count

    def begin(self, task: Task) -> None:
        """Give a free one its task."""
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
        """The next task that ends, and its answer. Raises BadInput where a worker is gone."""
        assert self._tasks
        while True:
            for key, _ in self._selector.select():
                pipe = self._all[key.data].stdout
                assert pipe is not None
                line = pipe.readline()
                if not line.endswith(b"\n"):
                    raise self._gone(key.data)
                return self._tasks.pop(key.data), json.loads(line)

    def _gone(self, number: int) -> BadInput:
        code = self._all[number].wait()
        log = self._logs / f"worker-{number}.log"
        said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
        more = f" ({printable(said[-1])})" if said else ""
        return BadInput(
            f"{printable(str(log))}: a worker {how}{more}; if memory was short, give fewer --jobs; the same command"
            " goes on"
        )


# Workers that do tasks; context managers.
Workers = Here | Processes


def serve() -> None:
    """Carry out tasks, a line of JSON each, from stdin; answers go to what was stdout. Ends as soon as stdin does."""
    answers = os.fdopen(os.dup(1), "wb")
    # What libraries print is no answer.
    os.dup2(2, 1)
    tasks: list[bytes] = []
    there = threading.Semaphore(0)

    def read() -> None:
        for line in sys.stdin.buffer:
            tasks.append(line)
            there.release()
        # The study was killed or has ended: nobody waits for what is under way.
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    from surgeon.lab.studies.running import carry_out

    try:
        while True:
            there.acquire()
            answers.write(json.dumps(carry_out(json.loads(tasks.pop(0)))).encode() + b"\n")
            answers.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        # At once: the thread that reads holds stdin, over which the interpreter would abort, and the trace not be last.
        os._exit(1)


if __name__ == "__main__":
    serve()
