"""What a command prints (result on stdout, progress on stderr) and how it fails (a line per mistake, exit code)."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn, TextIO, cast

import typer
from typer.core import TyperCommand

from surgeon.common.disk_space import no_room
from surgeon.common.distributed import Elsewhere, Ranks
from surgeon.common.interrupting import interrupt
from surgeon.common.json_results import Result
from surgeon.errors import BadInput, Mistakes, SurgeonError, printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from surgeon.common.listener import ProgressListener


class Debug:
    """The setting whether tracebacks are shown."""

    on = False


@contextmanager
def failing() -> Iterator[None]:
    """End every failure of a command with one line on stderr and an exit code."""
    try:
        with _plugins_named():
            yield
        # Flush the output here at the latest, where a full disk can still be reported.
        sys.stdout.flush()
    except Mistakes as error:
        fail(error.lines, error.exit_code)
    except SurgeonError as error:
        fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        fail("interrupted; the same command continues where it stopped", 130)
    except (typer.Exit, typer.Abort, BrokenPipeError):
        raise
    except SystemExit as error:
        # Surgeon itself never raises it. A command that was not completed must not end as if it were done.
        fail(f"code that this command called ended Python (SystemExit: {error}); --debug shows where", 1)
    except Exception as error:
        # Usage errors, for example an unknown option, have their own exit code; typer shows them.
        if isinstance(getattr(error, "exit_code", None), int):
            raise
        if (why := no_room(error)) is not None:
            where = getattr(error, "filename", None)
            _stop_writing(where)
            fail(f"{where or 'the output'}: {why}; make room and run the same command again", 2)
        if isinstance(error, OSError):
            # Unexpected errors of paths, permissions and disks are not bugs of surgeon.
            named = f"{error.filename}: " if isinstance(error.filename, str) else ""
            fail(f"{named}{error.strerror or error}; check the path, its permissions and the disk", 2)
        summary = f"{type(error).__name__}: {error}".splitlines()[0]
        fail(f"a bug in surgeon: {summary} (--debug shows the trace; please report it)", 1)


@contextmanager
def _plugins_named() -> Iterator[None]:
    """Convert any exception of a plugin's code to a refusal that names the plugin."""
    try:
        yield
    except BaseException as error:
        from surgeon.common.plugins import blamed

        if not isinstance(error, BrokenPipeError) and no_room(error) is None and (refusal := blamed(error)):
            raise refusal from error
        raise


# Replacements for typer's words about a number beyond its bounds.
_BOUNDS = {
    "Input should be greater than or equal to": "it must be at least",
    "Input should be less than or equal to": "it must be at most",
}


class Command(TyperCommand):
    """A command that asks, where its arguments are refused, whether two of them were swapped."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments; errors about values use surgeon's own words.

        Raises BadInput for an empty argument, which `Path` would read as the current folder.
        """
        for number, given in enumerate(args, 1):
            if not given or (given.startswith("--") and given.endswith("=")):
                raise BadInput(
                    f"argument {number} of `{ctx.info_name}` is empty; is it a variable of the shell that is not set?"
                )
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            # typer describes expected values in pydantic's words.
            for theirs, ours in _TYPES_OF_VALUES.items():
                if theirs in error.message:
                    error.message = f"it takes {ours}"
            for theirs, ours in _BOUNDS.items():
                error.message = error.message.replace(theirs, ours)
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except Mistakes as error:
            # In a file of another kind every line is wrong: show one mistake and the hint.
            hint = mixed_up_arguments(ctx)
            if hint and error.lines[0].startswith(hint.partition(" is ")[0]):
                raise BadInput(f"{error.lines[0]}; {hint}") from error
            raise
        except BadInput as error:
            hint = "" if "did you mean" in str(error) else mixed_up_arguments(ctx)
            # An argument of another kind explains only what is said of itself.
            if hint.startswith("did you swap") or (hint and str(error).startswith(hint.partition(" is ")[0])):
                raise BadInput(f"{error}; {hint}") from error
            raise


_TYPES_OF_VALUES = {"valid integer": "a whole number", "valid number": "a number", "valid boolean": "true or false"}


def mixed_up_arguments(ctx: typer.Context) -> str:
    """Return a question whether arguments were swapped, by their names in the help; "" where nothing suggests it."""
    from surgeon.checkpoint.kinds import CHECKPOINTS, NAME, NEW, Argument, Kind, mixed_up

    outputs: dict[str, set[Kind]] = {
        "apply": {NEW, NAME},
        "train": {*CHECKPOINTS},
        "verify": {"an output of surgeon", NAME},
        # OUT may be a base into which an adapter is merged; DEST is then the adapter's folder.
        "merge": {*CHECKPOINTS, NAME},
    }
    takes: dict[str, set[Kind]] = {
        "PLAN": {"a delta", NAME} if ctx.params.get("delta") else {"a plan", NAME},
        "BASE": {*CHECKPOINTS, NAME},
        "OUT": outputs.get(str(ctx.command.name), {"an output of surgeon"}),
        "DEST": {NEW, NAME, "a folder"},
        "RUN": {NEW, NAME},
        "MODEL…": {*CHECKPOINTS, NAME},
        "DATA": {"a file", "a folder", "a data file", "a training config"},
        "TRAIN.YAML": {"a training config"},
        "TASKS": {"a tasks file", NAME},
        "STUDY": {"a study", NAME},
        "RESULTS": {NEW, NAME, "a folder"},
        "CHECKPOINT": {*CHECKPOINTS, NAME},
        "A": {*CHECKPOINTS},
        "B": {*CHECKPOINTS},
        "REPO": {NAME},
        "--base": {*CHECKPOINTS, NAME},
        "--text": {"a file"},
    }
    arguments = []
    for parameter in ctx.command.params:
        called = parameter.metavar or parameter.opts[0]
        given = ctx.params.get(parameter.name or "")
        # A repeatable argument is examined only where it was given once.
        if isinstance(given, list) and len(given) == 1:
            given = given[0]
        if called in takes and isinstance(given, str | Path):
            arguments.append(Argument(called, str(given), frozenset(takes[called])))
    return mixed_up(arguments)


def _stop_writing(where: str | None) -> None:
    """Discard what is still to be written to a full stdout: else Python would try again, and fail again, at exit."""
    if where is None:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(message: str | Sequence[str], code: int) -> NoReturn:
    """Print the mistakes on stderr, one line each, and exit with `code`; with `--debug`, print the traceback too.

    A rank that only received another rank's error prints nothing.
    """
    if Debug.on:
        traceback.print_exc()
    ranks = Ranks.of_environment()
    # An error of another rank is printed by that rank.
    if ranks.leads or not isinstance(sys.exception(), Elsewhere):
        by = "" if ranks.leads else f"rank {ranks.rank}: "
        for line in [message] if isinstance(message, str) else message:
            print(f"surgeon: {by}{printable(line, 2000)}", file=sys.stderr)
    raise typer.Exit(code)


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Treat SIGTERM, which schedulers and containers send, like Ctrl-C in the block: data being written is completed.

    With several processes nothing changes: torchrun ends processes that wait for a failed one, and with this handler
    they would keep waiting.
    """
    if Ranks.of_environment().size > 1 or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def console() -> Console:
    """Return a console for stdout: the terminal, a file or a pipe."""
    from rich.console import Console

    # File names and tensor names are shown unchanged: no markup, no emoji codes, no highlighted numbers.
    # In a file or a pipe a table keeps its columns, as there is no window width to fit.
    terminal = sys.stdout.isatty()
    width = None if terminal or "COLUMNS" in os.environ else 160
    file = None if terminal else cast(IO[str], _Unpadded(sys.stdout))
    return Console(markup=False, emoji=False, highlight=False, width=width, file=file)


class _Unpadded:
    """A file or pipe wrapper that removes the spaces that fill a table's last column."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        """Write text without trailing spaces in its lines."""
        return self._file.write(re.sub(r" +$", "", text, flags=re.M))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def listening(quiet: bool) -> Iterator[ProgressListener]:
    """Show progress on stderr, unless `quiet`; first report libraries newer than any tested version."""
    from surgeon.common.installation import untested
    from surgeon.common.listener import ProgressListener

    with ProgressListener(quiet=quiet) as listener:
        for line in filter(None, map(untested, ("transformers", "torch"))):
            listener.say(line)
        yield listener


def show(result: Result, view: Callable[[Any], RenderableType], *, as_json: bool, quiet: bool = False) -> None:
    """Print a result by its view, or as JSON; with `quiet`, only JSON is printed."""
    if as_json:
        print_json(result.to_json())
    elif not quiet:
        console().print(view(result))


def print_json(data: Any) -> None:
    """Print data as JSON."""
    print(json.dumps(data, indent=2, ensure_ascii=True))
