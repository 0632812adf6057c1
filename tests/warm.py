"""Interpreters that start warm: a server imports torch once, and every `python` that a test asks for is its fork.

Most of what a test's own process costs is importing torch (seconds), not what is tested. `warm()` is a command to be
used where `[sys.executable]` would be: same arguments (`-c CODE`, `-m MODULE`, `FILE`, `-I`, `-P`, `-W`); environment,
folder, pipes, signals and exit status are those of the process that the test starts. What reads the environment when
it is imported (transformers, huggingface_hub, datasets) is not in the server, nor is surgeon: they are imported anew,
under the test's own settings; only what transformers looks up in its own source files when it is imported, the names
of all its models, is looked up once. Processes that have their settings in common with earlier ones are forks of a
nursery, which has imported transformers under these. `warmer` is for tests whose processes differ in the path of their
packages alone: a server of their own, which has imported transformers too. What measures memory, imports or a terminal
wants `sys.executable` itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path

TYPE_CHECKING = False  # without `typing`: the client is started often
if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator, Sequence
    from typing import Any

# Signals that reach the client, and what its process gets: killed itself, it could not say when the other is gone.
FORWARDED = {signal.SIGTERM: signal.SIGTERM, signal.SIGINT: signal.SIGINT, signal.SIGUSR1: signal.SIGKILL}
PRELOADED = (
    *("torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch._dynamo"),
    *("torch.nn.attention.flex_attention", "scipy.optimize", "scipy.spatial"),
    *("jinja2", "PIL.Image", "regex", "pydantic", "pydantic.main", "pydantic.type_adapter", "yaml", "psutil"),
    *("pandas", "pyarrow.dataset", "pyarrow.parquet", "sklearn.metrics", "rich.console", "rich.progress", "rich.table"),
)
# What most of surgeon's own tests import of transformers, for processes that share their environment.
FURTHER = (
    *("transformers.modeling_utils", "transformers.generation.utils", "transformers.masking_utils"),
    *("transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto"),
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "mistral", "qwen2", "qwen3", "gemma")),
    *(f"transformers.models.{name}.modeling_{name}" for name in ("gemma2", "gemma3", "phi3", "olmo2")),
)
# What nearly all of them import: a nursery has to pay for itself in a few processes.
COMMON = ("transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto", "transformers.trainer")
COMMON += ("transformers.models.auto.tokenization_auto", "transformers.tokenization_utils_tokenizers")
# What no library reads when it is imported: processes that differ in it share a nursery.
UNREAD = ("PYTEST_CURRENT_TEST", "SURGEON_", "COLUMNS", "PWD", "OMP_", "MASTER_", "TORCHELASTIC_")
UNREAD += ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_", "ROLE_")
# Of as many processes with the same settings, the last begins a nursery: it costs what a few of them save.
WORTHWHILE = 3
ADDRESS = "SURGEON_TESTS_WARM"
KEPT = str(2**29)
WHERE = "transformers.utils.import_utils"  # of the names of its models


def warm() -> list[str]:
    """The command of a warm interpreter."""
    return [sys.executable, "-I", "-S", __file__, os.environ.get(ADDRESS) or start()]


def start() -> str:
    """Start the server, of this process and of those it starts; it ends with this one. Where it listens is returned."""
    import atexit
    import shutil
    import subprocess
    import tempfile

    folder = tempfile.mkdtemp(prefix="surgeon-warm-")
    path = os.environ[ADDRESS] = f"{folder}/socket"
    server = subprocess.Popen(
        [sys.executable, __file__, "serve", path],
        stdin=subprocess.PIPE,  # its end is the sign to leave
        stdout=subprocess.PIPE,
        # Its forks keep the memory that they have had: what tensors are in is not asked of the kernel each time.
        env={"MALLOC_MMAP_THRESHOLD_": KEPT, "MALLOC_TRIM_THRESHOLD_": KEPT, **os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert server.stdin is not None and server.stdout is not None

    def leave() -> None:
        server.stdin.close()
        server.wait()
        server.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(leave)
    assert server.stdout.readline() == b"listening\n"
    return path


@contextlib.contextmanager
def warmer() -> Iterator[list[str]]:
    """The command of an interpreter that has imported transformers too, under the environment of this moment."""
    import subprocess
    import tempfile

    with tempfile.TemporaryDirectory(prefix="surgeon-warmer-") as folder:
        path = f"{folder}/socket"
        server = subprocess.Popen(
            [*warm(), __file__, "serve", path, *FURTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert server.stdin is not None and server.stdout is not None
        with server.stdout, server.stdin:
            assert server.stdout.readline() == b"listening\n"
            yield [sys.executable, "-I", "-S", __file__, path]
        server.wait()


def kill(process: subprocess.Popen[Any]) -> None:
    """SIGKILL for the process behind a warm command; returns when it is gone."""
    process.send_signal(signal.SIGUSR1)
    process.wait()


# --- the client: what a test starts -------------------------------------------------------------------------------


def ask(path: str, arguments: list[str]) -> int:
    """Have the server run `python *arguments` on this process' files, in its folder and environment."""
    umask = os.umask(0)
    os.umask(umask)
    asked = {"arguments": arguments, "environment": dict(os.environ), "folder": str(Path.cwd()), "umask": umask}
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        for number in FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda received, _frame: server.sendall(bytes([FORWARDED[received]])))
        send(server, asked, [0, 1, 2])
        answer = server.recv(16)
    code = int(answer) if answer else 1
    if code < 0:  # as it died, so dies this one
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    return code


# --- the server ---------------------------------------------------------------------------------------------------


def serve(path: str, further: Sequence[str]) -> dict[str, Any]:
    """Wait for requests; returns only in the forks, each with what it was asked for."""
    import select

    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen(100)
    print("listening", flush=True)  # who asks from now on waits
    load(*PRELOADED, *further)
    if not further:
        remember_names()
    asked_with: dict[frozenset[tuple[str, str]], int] = {}
    nurseries: dict[frozenset[tuple[str, str]], socket.socket] = {}
    while True:
        readable, _, _ = select.select([listening, sys.stdin], [], [])
        reap()
        if sys.stdin in readable:
            os._exit(0)
        client, _ = listening.accept()
        try:
            files, asked = received(client)
        except EOFError:  # it was killed before it had asked
            client.close()
            continue
        read = frozenset(each for each in asked["environment"].items() if not each[0].startswith(UNREAD))
        asked_with[read] = asked_with.get(read, 0) + 1
        if asked_with[read] == WORTHWHILE and not further:
            nurseries[read], theirs = socket.socketpair()
            if os.fork() == 0:
                for other in (listening, client, *nurseries.values()):
                    other.close()
                for file in files:
                    os.close(file)
                return foster(theirs, asked["environment"])
            theirs.close()
        if read in nurseries:
            send(nurseries[read], asked, [client.fileno(), *files])
        elif os.fork() == 0:
            for other in (listening, *nurseries.values()):
                other.close()
            return keep(client, files, asked)
        client.close()
        for file in files:
            os.close(file)


def foster(requests: socket.socket, environment: dict[str, str]) -> dict[str, Any]:
    """Import transformers under these settings, and take the server's requests with them until it is gone."""
    os.environ.clear()
    os.environ.update(environment)
    load(*COMMON)
    while True:
        try:
            (client, *files), asked = received(requests, 4)
        except EOFError:
            os._exit(0)
        reap()
        if os.fork() == 0:
            requests.close()
            return keep(socket.socket(fileno=client), files, asked)
        for file in (client, *files):
            os.close(file)


def load(*names: str) -> None:
    """Import what forks shall have."""
    import gc
    import importlib

    for name in names:
        with contextlib.suppress(ModuleNotFoundError):  # pandas and sklearn are there only where others need them
            importlib.import_module(name)
    gc.freeze()  # so that a fork's collector need not look at (and copy) all of it
    gc.set_threshold(100_000)


def reap() -> None:
    """Let go of keepers that are done."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def send(to: socket.socket, asked: dict[str, Any], files: list[int]) -> None:
    """Hand on a request and its files."""
    request = json.dumps(asked).encode()
    socket.send_fds(to, [len(request).to_bytes(8, "big")], files)
    to.sendall(request)


def received(sender: socket.socket, most: int = 3) -> tuple[list[int], dict[str, Any]]:
    """A request's files, and what is asked. Raises EOFError where the sender is gone."""
    length, files, _, _ = socket.recv_fds(sender, 8, most)
    left, asked = int.from_bytes(length, "big"), b""
    while not length or len(asked) < left:
        part = sender.recv(left - len(asked)) if length else b""
        if not part:
            for file in files:
                os.close(file)
            raise EOFError
        asked += part
    return files, json.loads(asked)


def remember_names() -> None:
    """transformers reads every file of its models when it is imported, a second; the forks are given what one found.

    It is found by a fork too: the server itself has not imported transformers.
    """
    import importlib.machinery
    import pickle

    found: dict[tuple[str, object], bytes] = {}

    class Remembering:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> object:
            spec = importlib.machinery.PathFinder.find_spec(name, path) if name == WHERE else None
            if spec is None:
                return None
            execute = spec.loader.exec_module

            def executed(module: Any) -> None:
                execute(module)
                define = module.define_import_structure

                def remembered(module_path: object, prefix: str | None = None) -> object:
                    key = (str(module_path), prefix)
                    if key not in found:
                        found[key] = pickle.dumps(define(module_path, prefix))
                    return pickle.loads(found[key])

                module.define_import_structure = remembered

            spec.loader.exec_module = executed
            return spec

    sys.meta_path.insert(0, Remembering)
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        importlib.import_module("transformers.models")
        with os.fdopen(writing, "wb") as file:
            pickle.dump(found, file)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        found |= pickle.load(file)
    os.waitpid(child, 0)


def keep(client: socket.socket, files: list[int], asked: dict[str, Any]) -> dict[str, Any]:
    """Fork the asked-for process and wait beside it; returns in the fork alone."""
    import select

    child = os.fork()
    if child == 0:
        client.close()
        for target, file in enumerate(files):
            os.dup2(file, target)
            os.close(file)
        return asked
    for file in (*files, 0, 1, 2):
        os.close(file)
    ended = os.pidfd_open(child)
    while True:
        readable, _, _ = select.select([client, ended], [], [])
        if ended in readable:
            break
        received = client.recv(1)
        os.kill(child, received[0] if received else signal.SIGKILL)
        if not received:
            break
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError):  # the client was killed
        client.sendall(str(code).encode())
    os._exit(0)


def become(asked: dict[str, Any]) -> None:
    """Run what was asked for, as a fresh interpreter would; its exceptions and exit are this process'."""
    import runpy
    import types
    import warnings

    arguments, environment = asked["arguments"], asked["environment"]
    os.umask(asked["umask"])
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    isolated, safe = False, bool(environment.get("PYTHONSAFEPATH"))
    while (option := arguments.pop(0)).startswith("-") and option not in ("-c", "-m"):
        if option == "-W":
            warnings._setoption(arguments.pop(0))
        elif option == "-I":
            isolated = True
        elif option == "-P":
            safe = True
        elif option != "-u":
            raise SystemExit(f"a warm interpreter does not know {option}")
    what = arguments.pop(0) if option in ("-c", "-m") else option
    del sys.path[0]  # this file's folder
    if not isolated:
        beside = [] if safe else [{"-c": "", "-m": str(Path.cwd())}.get(option, str(Path(option).parent))]
        named = environment.get("PYTHONPATH")
        sys.path[:0] = [*beside, *(entry or str(Path.cwd()) for entry in (named.split(os.pathsep) if named else ()))]
    sys.argv[:] = [option, *arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if option == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    elif option == "-c":
        exec(compile(what, "<string>", "exec"), main.__dict__)
    else:
        runpy.run_path(what, run_name="__main__")


def leave(code: object) -> None:
    """End as an interpreter does, short of freeing one by one all objects there are, which takes half a second.

    Returns where the interpreter has something to say of it (`sys.exit("a message")`).
    """
    import atexit
    import threading

    if code is None or isinstance(code, int):
        threading._shutdown()  # waits for threads, as the interpreter does before anything else
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        asked = serve(sys.argv[2], sys.argv[3:])
        try:
            become(asked)
        except SystemExit as end:
            leave(end.code)
            raise
        leave(0)
    else:
        sys.exit(ask(sys.argv[1], sys.argv[2:]))
