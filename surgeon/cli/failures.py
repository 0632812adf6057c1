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


class Command(TyperCommand):
    """A command that refuses empty arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments. Raises BadInput for an empty one, which `Path` would read as the current folder."""
        for number, given in enumerate(args, 1):
            if not given or (given.startswith("--") and given.endswith("=")):
                raise BadInput(
                    f"argument {number} of `{ctx.info_name}` is empty; is it a variable of the shell that is not set?"
                )
        return super().parse_args(ctx, args)


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
