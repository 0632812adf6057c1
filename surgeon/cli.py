"""The command line: parse, call one public function, show its result. The only file that prints or exits.

Data goes to stdout, progress and errors to stderr. Exit codes: 0 done; 1 a bug in surgeon (`diff`: they differ);
2 bad input or refused; 3 a promise does not hold; 130 interrupted.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

import surgeon
from surgeon._version import __version__
from surgeon.checkpoint.disk_space import no_room
from surgeon.common.distributed import Ranks, joined
from surgeon.common.interrupting import interrupt
from surgeon.common.json_results import Result
from surgeon.errors import BadInput, Mistakes, SurgeonError, printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from surgeon.common.listener import ProgressListener
    from surgeon.plan.plan import LoadedPlan


_ResultT = TypeVar("_ResultT", bound=Result)


class _Group(TyperGroup):
    """Commands that end every failure with one line on stderr and an exit code; their help has whole summaries."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _unknown_options_explained(ctx):
            return super().parse_args(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The list of commands, each with the first paragraph of its help, however long that is."""
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [
            (name, " ".join((command.help or "").partition("\n\n")[0].split()))
            for name, command in found
            if command is not None and not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def invoke(self, ctx: Any) -> Any:
        try:
            with _plugins_named():
                done = super().invoke(ctx)
            # What is shown is written at the latest here, where there may be no room for it.
            sys.stdout.flush()
            return done
        except Mistakes as error:
            _fail(error.lines, error.exit_code)
        except SurgeonError as error:
            _fail(str(error), error.exit_code)
        except KeyboardInterrupt:
            _fail("interrupted; the same command continues where it stopped", 130)
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except SystemExit as error:
            # Nothing of surgeon's raises it: a command that was not carried out must not end as if it were done.
            _fail(f"code that this command called ended Python (SystemExit: {error}); --debug shows where", 1)
        except Exception as error:
            # Usage errors (an unknown option, say) have their own exit code; typer shows them.
            if isinstance(getattr(error, "exit_code", None), int):
                raise
            if (why := no_room(error)) is not None:
                where = getattr(error, "filename", None)
                _stop_writing(where)
                _fail(f"{where or 'the output'}: {why}; make room and run the same command again", 2)
            if isinstance(error, OSError):
                # What a command did not foresee of paths, permissions and disks is not in surgeon either.
                named = f"{error.filename}: " if isinstance(error.filename, str) else ""
                _fail(f"{named}{error.strerror or error}; check the path, its permissions and the disk", 2)
            summary = f"{type(error).__name__}: {error}".splitlines()[0]
            _fail(f"a bug in surgeon: {summary} (--debug shows the trace; please report it)", 1)


@contextmanager
def _plugins_named() -> Iterator[None]:
    """What a plugin's code raised is a refusal that names the plugin, whatever it is."""
    try:
        yield
    except BaseException as error:
        from surgeon.common.plugins import blamed

        if not isinstance(error, BrokenPipeError) and no_room(error) is None and (refusal := blamed(error)):
            raise refusal from error
        raise


class _Command(TyperCommand):
    """A command that asks, where its arguments are refused, whether they stand in each other's places."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _unknown_options_explained(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Mistakes as error:
            # Of a file of another kind every line is wrong: one is enough beside what it is.
            hint = _mixed_up(ctx)
            if hint and error.lines[0].startswith(hint.partition(" is ")[0]):
                raise BadInput(f"{error.lines[0]}; {hint}") from error
            raise
        except BadInput as error:
            if "did you mean" not in str(error) and (hint := _mixed_up(ctx)):
                raise BadInput(f"{error}; {hint}") from error
            raise


@contextmanager
def _unknown_options_explained(ctx: typer.Context) -> Iterator[None]:
    """An unknown option's error says what was probably meant, in place of a list of names that share letters."""
    try:
        yield
    except Exception as error:
        # typer has a class for it, which is not public; its possibilities are what it takes for near.
        if hasattr(error, "possibilities") and hasattr(error, "option_name"):
            _explain(error, ctx)
        raise


def _explain(error: Any, ctx: typer.Context) -> None:
    from surgeon.common.wrong_option import Asked, Option, meant

    def options(of: Any) -> list[Option]:
        named = [p for p in of.params if p.param_type_name == "option"]
        return [Option(name, p.help or "") for p in named for name in p.opts if name.startswith("--")]

    command = ctx.command
    arguments = [p.metavar or str(p.name) for p in command.params if p.param_type_name == "argument"]
    below = command.commands.values() if isinstance(command, TyperGroup) else ()
    asked = Asked(
        command=ctx.info_name or "",
        usage=" ".join([ctx.command_path, *arguments]),
        arguments=arguments,
        options=options(command),
        before=[] if ctx.parent is None else options(ctx.parent.command),
        after=[option for one in below for option in options(one)],
    )
    error.possibilities = None
    sentence = meant(error.option_name, asked) or f"`{ctx.command_path} --help` lists the options."
    error.message = f"No such option: {printable(error.option_name)}. {sentence}"


def _mixed_up(ctx: typer.Context) -> str:
    """What to ask about the arguments of a command, by what each is called in its help."""
    from surgeon.checkpoint.kinds import CHECKPOINTS, NAME, NEW, Argument, Kind, mixed_up

    takes: dict[str, set[Kind]] = {
        "PLAN": {"a delta", NAME} if ctx.params.get("delta") else {"a plan", NAME},
        "BASE": {*CHECKPOINTS, NAME},
        "OUT": {"apply": {NEW, NAME}, "train": {*CHECKPOINTS}}.get(str(ctx.command.name), {"an output of surgeon"}),
        "DEST": {NEW, NAME},
        "RUN": {NEW, NAME},
        "MODEL…": {*CHECKPOINTS, NAME},
        "DATA": {"a file", "a folder", "a data file", "a training config"},
        "TRAIN.YAML": {"a training config"},
        "TASKS.YAML": {"a tasks file"},
        "STUDY": {"a study", NAME},
        "RESULTS": {NEW, NAME, "a folder"},
        "DIR": {*CHECKPOINTS},
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
        # Of a repeatable one it is looked at only where it was given once.
        if isinstance(given, list) and len(given) == 1:
            given = given[0]
        if called in takes and isinstance(given, str | Path):
            arguments.append(Argument(called, str(given), frozenset(takes[called])))
    return mixed_up(arguments)


def _stop_writing(where: str | None) -> None:
    """Let go of what is still to be written to a full stdout: Python would try again, and fail again, at its end."""
    if where is None:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str | Sequence[str], code: int) -> NoReturn:
    if _Debug.on:
        traceback.print_exc()
    if Ranks.of_environment().leads:
        for line in [message] if isinstance(message, str) else message:
            print(f"surgeon: {printable(line, 2000)}", file=sys.stderr)
    raise typer.Exit(code)


app = typer.Typer(
    name="surgeon",
    cls=_Group,
    help="Grow a pretrained language model by a plan, and prove that nothing was lost.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog=(
        "Exit codes: 0 done; 1 a bug in surgeon (diff: they differ); 2 bad input or refused; 3 a promise does not"
        " hold (verify, demo); 130 interrupted. Data goes to stdout, progress and errors to stderr."
    ),
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _complete_plan(incomplete: str) -> list[str]:
    """For the shell: shipped plans, and the files and folders that begin with the typed text."""
    typed = Path(incomplete)
    folder, start = (typed, "") if incomplete.endswith("/") else (typed.parent, typed.name)
    beside = sorted(folder.glob("*")) if incomplete and folder.is_dir() else []
    files = [f"{path}/" if path.is_dir() else str(path) for path in beside if path.name.startswith(start)]
    return [*_complete_shipped(incomplete), *files]


def _complete_shipped(incomplete: str) -> list[str]:
    from surgeon.plan import shipped

    return [name for name in shipped.names() if name.startswith(incomplete)]


def _complete_study(incomplete: str) -> list[str]:
    from surgeon.plan import shipped

    return [name for name in shipped.shipped_studies() if name.startswith(incomplete)]


PlanArgument = Annotated[
    str,
    typer.Argument(
        metavar="PLAN", help="plan file, name of a shipped plan, or - for stdin", autocompletion=_complete_plan
    ),
]
BaseArgument = Annotated[str, typer.Argument(metavar="BASE", help="base checkpoint: a folder or a Hub id")]
OutArgument = Annotated[Path, typer.Argument(metavar="OUT", help="folder of the output")]
Revision = Annotated[str | None, typer.Option(help="Hub revision (branch, tag or commit) of the base")]
AsJson = Annotated[bool, typer.Option("--json", help="machine-readable output on stdout")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="no progress, no notes")]
RemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="run and carry a base's own code (its auto_map)")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N")]
Link = Annotated[
    bool,
    typer.Option("--link", help="hard-link shards that stay as they are; both names are read-only then"),
]
TakeOver = Annotated[
    bool,
    typer.Option(
        "--take-over", help="go on with a work folder that you did not begin in this place (a copy, an archive)"
    ),
]
TextFile = Annotated[Path | None, typer.Option(help="take tokens from this text or JSON-lines file")]
NamedTexts = Annotated[
    list[str] | None,
    typer.Option("--text", help="NAME=FILE: a domain and its text, to record routers and gates on; repeatable"),
]
Window = Annotated[int, typer.Option(min=2, help="tokens in each sequence")]
Windows = Annotated[int, typer.Option(min=0, help="sequences from each text; 0 takes the whole text")]
PlanOverrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="a value in place of the plan's: seed=1, operations.0.init.reg=0.1; may be given again",
    ),
]
Maps = Annotated[list[str] | None, typer.Option(help="show this transport map (12.below.query); repeatable")]


class _Debug:
    on = False


def _print_version(asked: bool) -> None:
    if asked:
        print(f"surgeon {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="print the version", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    _Debug.on = debug


@app.command()
def preview(
    plan: PlanArgument,
    base: BaseArgument,
    overrides: PlanOverrides = None,
    revision: Revision = None,
    link: Link = False,
    as_json: AsJson = False,
    quiet: QuietOption = False,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Show what a plan does to a base, from headers and config alone."""
    _short()
    from surgeon.apply.preview_view import preview_view

    with _listening(quiet) as listener:
        listener.wait("reading headers")
        asked = _plan(plan, overrides)
        shown = surgeon.preview(asked, base, revision=revision, link=link, trust_remote_code=trust_remote_code)
    _show(shown, lambda found: preview_view(found, base), as_json=as_json)


@app.command()
def apply(
    plan: PlanArgument,
    base: BaseArgument,
    out: OutArgument,
    overrides: PlanOverrides = None,
    revision: Revision = None,
    device: Annotated[str, typer.Option(help="device that computes new weights: auto, cpu, cuda, cuda:N")] = "auto",
    max_shard_size: Annotated[str, typer.Option(help="largest shard of new tensors, cut between layers")] = "2GB",
    read_back: Annotated[
        bool, typer.Option("--read-back/--no-read-back", help="read the output again and compare it with the base")
    ] = True,
    link: Link = False,
    delta: Annotated[
        bool, typer.Option("--delta", help="PLAN is a delta (a folder, or a Hub id): apply it to its base")
    ] = False,
    as_json: AsJson = False,
    quiet: QuietOption = False,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Grow BASE by PLAN into the new folder OUT; the same command continues an interrupted run.

    Under torchrun (`torchrun --nproc-per-node N --no-python surgeon apply …`) N processes share the layers to compute.
    `surgeon apply --delta DELTA BASE OUT` applies a delta to its base instead.
    """
    from surgeon.apply.apply import applied_view
    from surgeon.rework.apply_delta import applied_delta_view

    if delta:
        if overrides:
            raise BadInput("--set changes a plan, and --delta applies none; leave one of them out")
        if not Ranks.of_environment().leads:
            return
        with _listening(quiet) as listener:
            put = surgeon.apply_delta(
                plan, base, out, revision=revision, link=link, trust_remote_code=trust_remote_code, listener=listener
            )
        _show(put, applied_delta_view, as_json=as_json, quiet=quiet)
        return
    with joined() as ranks, _listening(quiet or not ranks.leads) as listener:
        applied = surgeon.apply(
            _plan(plan, overrides),
            base,
            out,
            revision=revision,
            device=device,
            max_shard_bytes=_bytes(max_shard_size),
            read_back=read_back,
            link=link,
            trust_remote_code=trust_remote_code,
            listener=listener,
            ranks=ranks,
        )
    if not ranks.leads:
        return
    _show(applied, applied_view, as_json=as_json, quiet=quiet)


@app.command()
def verify(
    ctx: typer.Context,
    base: Annotated[Path, typer.Argument(metavar="BASE", help="the base checkpoint's folder")],
    out: OutArgument,
    static: Annotated[bool, typer.Option("--static", help="bytes only, run no model")] = False,
    streamed: Annotated[bool, typer.Option("--streamed", help="hold one layer of each model at a time")] = False,
    text: TextFile = None,
    window: Window = 128,
    windows: Windows = 8,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            help="run the models in auto (the checkpoint's), float32, bfloat16 or float16; may be given again"
        ),
    ] = None,
    device: Device = "auto",
    as_json: AsJson = False,
    quiet: QuietOption = False,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Prove that OUT keeps what its manifest promises of BASE; exit 3 where a promise does not hold."""
    from surgeon.verify.verify import verification_view

    given = {"logits": not static, "dtypes": dtype or ["auto"]}
    if not _run(ctx, surgeon.verify, verification_view, always=True, without=("static", "dtype"), **given).holds:
        raise typer.Exit(3)


@app.command()
def train(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="folder of the output, or of a base of any kind")],
    config: Annotated[
        Path, typer.Option("--config", metavar="TRAIN.YAML", help="training config: data, steps, optimizer")
    ],
    to: Annotated[Path, typer.Option("--to", metavar="RUN", help="folder of the trained output")],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="a value in place of the config's: optimizer.lr=1e-4, sources.NAME.share=0.5; may be given again",
        ),
    ] = None,
    delta_only: Annotated[
        bool, typer.Option("--delta-only", help="write only what the base lacks to RUN, for `apply --delta`")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="write nothing: show tokens by source, a sample, memory and time")
    ] = False,
    link: Link = False,
    take_over: TakeOver = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda")] = "auto",
    as_json: AsJson = False,
    quiet: QuietOption = False,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Train what surgery added to OUT, and nothing else, into the new folder RUN; repeat the command to continue.

    `what` and `lora` in the config train the base's own tensors, layers or a LoRA instead, of a plain base too.

    Under torchrun (`torchrun --nproc-per-node N --no-python surgeon train …`) N processes share every step's sequences.
    """
    from surgeon.train.config import load_config

    # A mistake in it is shown before anything else is even imported.
    load_config(config, overrides or ())

    from surgeon.train.train import rehearsal_view, trained_view

    with _sigterm_interrupts(), _listening(quiet or not Ranks.of_environment().leads) as listener:
        given: dict[str, Any] = {
            "overrides": overrides or (),
            "device": device,
            "trust_remote_code": trust_remote_code,
            "listener": listener,
        }
        if dry_run:
            rehearsal = surgeon.rehearse(out, config, to, **given)
        else:
            trained = surgeon.train(out, config, to, delta_only=delta_only, link=link, take_over=take_over, **given)
    if dry_run:
        _show(rehearsal, rehearsal_view, as_json=as_json)
    elif trained is not None:
        _show(trained, trained_view, as_json=as_json, quiet=quiet)
    _leave_ranks()


@app.command()
def recall(
    ctx: typer.Context,
    base: BaseArgument,
    tokens: Annotated[int, typer.Option(min=1, help="tokens to write, at least")],
    to: Annotated[Path, typer.Option(metavar="FILE", help="new file of JSON lines, for a source of `train`")],
    prompts: Annotated[
        str | None,
        typer.Option(
            help="begin (the begin-of-text token), template (the bare chat template), or a text file with a beginning a"
            " line  [default: template where BASE has one, else begin]"
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="of the draws; 1: as the model learned")] = 1.0,
    top_p: Annotated[float, typer.Option(help="draw among the likeliest tokens of this share")] = 1.0,
    length: Annotated[int | None, typer.Option(help="longest document in tokens; default: 512")] = None,
    batch: Annotated[int, typer.Option(help="documents at a time")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="of the draws")] = 0,
    take_over: TakeOver = False,
    revision: Revision = None,
    dtype: Annotated[
        str, typer.Option(help="run the model in auto (the checkpoint's), float32, bfloat16 or float16")
    ] = "auto",
    device: Device = "auto",
    as_json: AsJson = False,
    quiet: QuietOption = False,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Have BASE write text like that it was trained on, to be replayed in training; repeat the command to continue."""
    from surgeon.data.recall import recalled_view

    _run(ctx, surgeon.recall, recalled_view)


@app.command()
def evaluate(
    ctx: typer.Context,
    models: Annotated[list[str], typer.Argument(metavar="MODEL…", help="folders or Hub ids (user/name[@revision])")],
    data: Annotated[
        list[str],
        typer.Option(
            metavar="DATA",
            help="text file or folder, NAME=FILE, a data file (.yaml), or a training config; may be given again",
        ),
    ],
    base: Annotated[
        str | None,
        typer.Option(help="the base, a folder or a Hub id; it is the first row, and others are compared with it"),
    ] = None,
    sources: Annotated[
        list[str] | None, typer.Option("--source", help="evaluate on this source only; may be given again")
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=2, help="tokens in a window; default: the smallest context, at most 2048")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="windows at a time")] = 8,
    most: Annotated[int, typer.Option(min=0, help="documents of each source; 0 takes all")] = 500,
    labels: Annotated[
        bool, typer.Option("--labels", help="the texts have labels, and the models a classification head")
    ] = False,
    dtype: Annotated[
        str, typer.Option(help="run the models in auto (the checkpoint's), float32, bfloat16 or float16")
    ] = "auto",
    device: Device = "auto",
    as_json: AsJson = False,
    quiet: QuietOption = False,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Measure loss, perplexity and bits per byte of models on the same held-out text, with confidence intervals."""
    from surgeon.evaluate.evaluate import evaluation_view

    _run(ctx, surgeon.evaluate, evaluation_view, always=True)


@app.command()
def continual(
    ctx: typer.Context,
    tasks: Annotated[Path, typer.Argument(metavar="TASKS.YAML", help="the tasks, in order, and their training")],
    base: BaseArgument,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="folder of the model after the last task")],
    revision: Revision = None,
    keep: Annotated[bool, typer.Option("--keep", help="keep the earlier tasks' models, in RUN-tasks")] = False,
    take_over: TakeOver = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda")] = "auto",
    as_json: AsJson = False,
    quiet: QuietOption = False,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Learn tasks one after the other, with a surgery for each, and measure all tasks after each one.

    The same command continues an interrupted run, between tasks and within one.
    """
    from surgeon.continual.continual import continued_view

    _run(ctx, surgeon.continual, continued_view)


@app.command()
def compare(
    ctx: typer.Context,
    study: Annotated[
        str,
        typer.Argument(metavar="STUDY", help="study file, or name of a shipped study", autocompletion=_complete_study),
    ],
    base: BaseArgument,
    results: Annotated[Path, typer.Argument(metavar="RESULTS", help="folder of the page and the records")],
    new: Annotated[list[str] | None, typer.Option(help="text to learn: FILE or NAME=FILE; may be given again")] = None,
    original: Annotated[
        list[str] | None, typer.Option(help="text of what must not be forgotten; without it, the base writes some")
    ] = None,
    replayed: Annotated[
        list[str] | None, typer.Option(help="text to replay where a remedy says `text`; default: the original")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="begin no run that would end later: fewer points, and what is missing is listed"),
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="runs at a time; default: as cores, memory, GPUs allow")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="keep every trained model, in RESULTS/runs")] = False,
    take_over: TakeOver = False,
    revision: Revision = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda")] = "auto",
    as_json: AsJson = False,
    quiet: QuietOption = False,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Compare ways of learning new text without forgetting: runs at several rates, fair frontiers, a page, advice.

    `surgeon compare quick BASE RESULTS --new NEW.txt --original KNOWN.txt` is all it takes. The same command goes on
    where it was cut off.
    """
    from surgeon.compare.compare import compared_view

    given = {"new": new or (), "original": original or (), "replayed": replayed or ()}
    _run(ctx, surgeon.compare, compared_view, always=True, without=tuple(given), **given)


@app.command()
def merge(
    ctx: typer.Context,
    out: OutArgument,
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="folder of the merged model")],
    alpha: Annotated[
        float | None, typer.Option(min=0, max=1, help="share of the expanded branch; default: the one at inference")
    ] = None,
    text: TextFile = None,
    window: Window = 128,
    windows: Windows = 8,
    device: Device = "auto",
    link: Link = False,
    as_json: AsJson = False,
    quiet: QuietOption = False,
) -> None:
    """Merge the control blocks of OUT into one layer each, and measure how much the function changes."""
    from surgeon.rework.merge import merged_view

    _run(ctx, surgeon.merge, merged_view, always=True)


@app.command()
def revert(
    ctx: typer.Context,
    out: OutArgument,
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="folder of the earlier state")],
    to: Annotated[
        int | None, typer.Option("--to", metavar="N", help="keep the first N surgeries; default: all but the last")
    ] = None,
    base: Annotated[
        Path | None, typer.Option(help="the folder of that state: read, and refused where OUT says another of it")
    ] = None,
    base_digest: Annotated[
        str | None,
        typer.Option(metavar="HEX", help="the state's digest, as `apply` showed it for its base; refuse any other"),
    ] = None,
    link: Link = False,
    as_json: AsJson = False,
    quiet: QuietOption = False,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Undo the last surgery of OUT, or all but the first N: DEST holds every earlier tensor, byte for byte."""
    from surgeon.rework.revert import reverted_view

    _run(ctx, surgeon.revert, reverted_view)


@app.command("delta")
def make_delta(
    ctx: typer.Context,
    out: OutArgument,
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="folder of the delta")],
    base: Annotated[
        Path | None, typer.Option(help="the base: the delta then includes side files that differ from the base's")
    ] = None,
    as_json: AsJson = False,
    quiet: QuietOption = False,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Write the part of OUT that the base of its last surgery lacks; `apply --delta` applies it to that base."""
    from surgeon.rework.make_delta import delta_view

    _run(ctx, surgeon.make_delta, delta_view)


@app.command("export-slot")
def export_slot(
    ctx: typer.Context,
    out: OutArgument,
    slot: Annotated[
        int, typer.Argument(metavar="SLOT", min=0, help="the slot's number, as `surgeon inspect` shows it")
    ],
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="folder of the adapter")],
    as_json: AsJson = False,
    quiet: QuietOption = False,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Write a PMoE slot of OUT as a PEFT LoRA adapter for its base: shared LoRA below the router, the slot above."""
    from surgeon.share.export_slot import exported_view

    _run(ctx, surgeon.export_slot, exported_view)


@app.command("gguf-pattern")
def gguf_pattern(
    ctx: typer.Context,
    out: OutArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="GGUF file that llama.cpp's converter made of OUT")],
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="GGUF file to write")],
    as_json: AsJson = False,
    quiet: QuietOption = False,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Write FILE, a GGUF of Gemma 2 or 3, as DEST with each layer's kind of attention, as config.json of OUT has it."""
    from surgeon.share.gguf_pattern import gguf_pattern_view

    _run(ctx, surgeon.gguf_pattern, gguf_pattern_view)


@app.command()
def push(
    ctx: typer.Context,
    out: OutArgument,
    repo_id: Annotated[str, typer.Argument(metavar="REPO", help="repository of the Hub: user/name")],
    base: Annotated[
        Path | None,
        typer.Option(help="verify against this base first, logits included; default: the one that OUT names"),
    ] = None,
    public: Annotated[
        bool | None,
        typer.Option("--public/--private", help="who may see the repository, if it is new  [default: private]"),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="branch to push to, created at need; default: main")] = None,
    pr: Annotated[bool, typer.Option("--pr", help="open a pull request instead of committing")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show what would be uploaded and how much is new")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="push although a check fails, or over a model that is not surgeon's")
    ] = False,
    license: Annotated[
        str | None, typer.Option(help="licence for the card, where the base's is unknown: apache-2.0, mit, …")
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(help="the base's id on the Hub for the card, where it was a folder: user/name")
    ] = None,
    delta: Annotated[bool, typer.Option("--delta", help="push only what the base of the last surgery lacks")] = False,
    as_json: AsJson = False,
    quiet: QuietOption = False,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Verify OUT and push it to a repository of the Hub; the same command continues an interrupted push."""
    from surgeon.share.push import pushed_view

    _run(ctx, surgeon.push, pushed_view, without="pr", pull_request=pr)


@app.command()
def diff(
    ctx: typer.Context,
    a: Annotated[Path, typer.Argument(metavar="A", help="a checkpoint's folder")],
    b: Annotated[Path, typer.Argument(metavar="B", help="another checkpoint's folder")],
    exact: Annotated[
        bool, typer.Option("--exact", help="read both, even where a manifest records one of them")
    ] = False,
    as_json: AsJson = False,
    quiet: QuietOption = False,
) -> None:
    """Compare A with B, tensor by tensor; exit 0 where they are the same, 1 where they differ."""
    from surgeon.verify.diff import difference_view

    if not _run(ctx, surgeon.diff, difference_view).identical:
        raise typer.Exit(1)


@app.command("transport-report")
def transport_report(
    ctx: typer.Context,
    out: OutArgument,
    trained: Annotated[Path | None, typer.Option(help="the same model after training, to compare with")] = None,
    maps: Maps = None,
    png: Annotated[Path | None, typer.Option(help="folder for the pictures of --maps")] = None,
    device: Device = "auto",
    as_json: AsJson = False,
    quiet: QuietOption = False,
) -> None:
    """Report entropies of transport maps: how widely inserted layers' neurons correspond to their neighbours'."""
    from surgeon.report.transport import transport_view

    given = {"maps": maps or (), "pictures": png}
    _run(ctx, surgeon.transport_report, transport_view, always=True, without=("maps", "png"), **given)


@app.command("routing-report")
def routing_report(
    ctx: typer.Context,
    out: OutArgument,
    text: NamedTexts = None,
    to: Annotated[Path | None, typer.Option(help="write the record to this JSON file")] = None,
    window: Window = 128,
    windows: Windows = 8,
    device: Device = "auto",
    as_json: AsJson = False,
    trust_remote_code: RemoteCode = False,
    quiet: QuietOption = False,
) -> None:
    """Record what routers and gates of a grafted output choose, by layer and site, on texts of several domains."""
    from surgeon.report.routing import routing_view

    _run(ctx, surgeon.routing_report, routing_view, always=True, without="text", texts=_named_texts(text or []))


@app.command()
def report(
    out: OutArgument,
    html: Annotated[
        Path | None, typer.Option(help="write the page to this file (default: OUT's name with .html)")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="folder for the figures as PNG (extra `report`)")] = None,
    base: Annotated[Path | None, typer.Option(help="the base's folder: run the static proof against it")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="with --base: compare logits too")] = False,
    text: NamedTexts = None,
    routing: Annotated[Path | None, typer.Option(help="a record by `routing-report --to`, instead of --text")] = None,
    log: Annotated[Path | None, typer.Option(help="losses as JSON lines: step, source, loss")] = None,
    maps: Maps = None,
    window: Window = 128,
    windows: Windows = 8,
    device: Device = "auto",
    as_json: AsJson = False,
    trust_remote_code: RemoteCode = False,
    quiet: QuietOption = False,
) -> None:
    """Write a report on OUT as one page that needs no network; exit 3 on a broken promise."""
    if html is None and png is None and not as_json:
        html = Path(f"{out.resolve().name}.html")
    with _listening(quiet) as listener:
        written = surgeon.report(
            out,
            html=html,
            png=png,
            base=base,
            logits=verify,
            texts=_named_texts(text) if text else None,
            routing=routing,
            log=log,
            maps=maps or (),
            window=window,
            windows=windows,
            device=device,
            trust_remote_code=trust_remote_code,
            listener=listener,
        )
    if as_json:
        _print_json(written.to_json())
    elif not quiet:
        for path in (*([written.html] if written.html else []), *written.pictures):
            print(printable(str(path), 2000))
    if written.findings.verification is not None and not written.findings.verification.holds:
        raise typer.Exit(3)


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a checkpoint's folder")],
    as_json: AsJson = False,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Show a checkpoint's family and sizes, its surgeries and its new tensors."""
    _short()
    from surgeon.report.inspect import inspection_view

    inspection = surgeon.inspect(folder, trust_remote_code=trust_remote_code)
    _show(inspection, inspection_view, as_json=as_json)


@app.command()
def families(
    base: Annotated[
        str | None, typer.Argument(metavar="BASE", help="base checkpoint: a folder or a Hub id; default: none")
    ] = None,
    revision: Revision = None,
    as_json: AsJson = False,
    quiet: QuietOption = False,
    trust_remote_code: RemoteCode = False,
) -> None:
    """List the model families; with BASE what is known or found out about it, and which operations it takes."""
    from surgeon.report.families import families_view

    with _listening(quiet) as listener:
        listener.wait("reading headers")
        found = surgeon.families(base, revision=revision, trust_remote_code=trust_remote_code)
    _show(found, families_view, as_json=as_json)


@app.command()
def schema(
    training: Annotated[bool, typer.Option("--training", help="the schema of training configs")] = False,
    tasks: Annotated[bool, typer.Option("--tasks", help="the schema of tasks files")] = False,
    study: Annotated[bool, typer.Option("--study", help="the schema of studies")] = False,
) -> None:
    """Print the JSON schema of plans, which editors use to complete YAML."""
    _short()
    asked = [name for name, given in (("--training", training), ("--tasks", tasks), ("--study", study)) if given]
    if len(asked) > 1:
        raise BadInput(f"{' and '.join(asked)} exclude each other; give one of them")
    if study:
        from surgeon.compare.config import json_schema
    elif tasks:
        from surgeon.continual.config import json_schema
    elif training:
        from surgeon.train.config import json_schema
    else:
        from surgeon.plan.plan import json_schema
    _print_json(json_schema())


@app.command()
def plans(
    name: Annotated[
        str | None, typer.Argument(help="print this shipped plan", autocompletion=_complete_shipped)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the shipped plans, or print one to start from."""
    _short()
    from surgeon.plan import shipped

    if as_json:
        _print_json(shipped.names() if name is None else {name: shipped.find_plan(name).read_text(encoding="utf-8")})
    elif name is None:
        _console().print(shipped.plans_view(shipped.described()))
    else:
        print(shipped.find_plan(name).read_text(encoding="utf-8"), end="")


@app.command()
def demo(
    folder: Annotated[Path | None, typer.Argument(metavar="DIR", help="new folder; default: surgeon-demo")] = None,
    seconds: Annotated[float, typer.Option(min=0, help="seconds to train the small base")] = 25,
    quiet: QuietOption = False,
) -> None:
    """Make a small base without network, grow it, prove that nothing was lost, and show what training learns."""
    from surgeon.demo.demo import demo_view, run_demo

    with _listening(quiet) as listener:
        shown = run_demo(folder or Path("surgeon-demo"), seconds=seconds, listener=listener)
    _console().print(demo_view(shown))
    if not shown.holds:
        raise typer.Exit(3)


for _registered in app.registered_commands:
    _registered.cls = _Command


def _short() -> None:
    """For a command that is done in a second: looking for cycles among what it imports is a fifth of that."""
    gc.set_threshold(100_000)


def _leave_ranks() -> None:
    """End a finished process of torchrun: gloo's threads may outlive the interpreter, whose exit then aborts."""
    if Ranks.of_environment().size > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _console() -> Console:
    from rich.console import Console

    # File names and tensor names are shown as they are: no markup, no emoji codes, no guessing at what is a number.
    # In a file or a pipe a table keeps its columns: there is no window width to fold it to.
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160
    return Console(markup=False, emoji=False, highlight=False, width=width)


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """SIGTERM, which schedulers and containers send, ends as Ctrl-C does: what is being written is waited for.

    Not of several processes: torchrun ends those that wait for one that failed, and they would wait on.
    """
    if Ranks.of_environment().size > 1 or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _listening(quiet: bool) -> Iterator[ProgressListener]:
    from surgeon.common.listener import ProgressListener

    with ProgressListener(quiet=quiet) as listener:
        yield listener


def _run(
    ctx: typer.Context,
    function: Callable[..., _ResultT],
    view: Callable[[_ResultT], RenderableType],
    *,
    always: bool = False,
    without: str | tuple[str, ...] = (),
    **given: Any,
) -> _ResultT:
    """Call `function` with a command's options, which have the names of its parameters, and show its result.

    `given` are passed in place of the options `without`; with `always` the result is shown although `--quiet` is set.
    """
    left_out = {"as_json", "quiet", *([without] if isinstance(without, str) else without)}
    options = {name: value for name, value in ctx.params.items() if name not in left_out}
    with _listening(ctx.params["quiet"]) as listener:
        result = function(**options, **given, listener=listener)
    _show(result, view, as_json=ctx.params["as_json"], quiet=ctx.params["quiet"] and not always)
    return result


def _show(result: _ResultT, view: Callable[[_ResultT], RenderableType], *, as_json: bool, quiet: bool = False) -> None:
    if as_json:
        _print_json(result.to_json())
    elif not quiet:
        _console().print(view(result))


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=True))


def _named_texts(given: list[str]) -> dict[str, Path | None]:
    if not given:
        return {"probe": None}
    named: dict[str, Path | None] = {}
    for entry in given:
        name, equals, file = entry.partition("=")
        if not (name and equals and file):
            raise BadInput(f"--text {printable(entry)}: give a name and a file, as in --text french=fr.txt")
        if name in named:
            raise BadInput(f"--text {printable(entry)}: the name {printable(name)} is given twice")
        named[name] = Path(file)
    return named


def _plan(given: str, overrides: Sequence[str] | None) -> LoadedPlan:
    """The plan that is named, or the one on stdin (`-`), whose relative paths start in this folder."""
    overrides = overrides or ()
    if given != "-":
        from surgeon.apply.preview import loaded_plan

        return loaded_plan(given, overrides)
    from surgeon.common.yaml import LARGEST_FILE, decoded

    if Ranks.of_environment().size > 1:
        raise BadInput("PLAN -: torchrun starts several processes, and stdin has the plan once; give a file")
    if sys.stdin.isatty():
        raise BadInput("PLAN -: stdin is the terminal; redirect a plan to it, or give a file")
    source = "<stdin>"
    raw = sys.stdin.buffer.read(LARGEST_FILE + 1)
    if len(raw) > LARGEST_FILE:
        raise BadInput(f"{source}: larger than {LARGEST_FILE:,} bytes; is this a plan?")
    return surgeon.parse_plan(decoded(raw, source), source=source, overrides=overrides)


def _bytes(text: str) -> int:
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "B": 1}
    for unit, factor in units.items():
        if text.upper().endswith(unit):
            number = text[: -len(unit)].strip()
            if number.replace(".", "", 1).isdigit() and float(number) > 0:
                return max(1, int(float(number) * factor))
    raise BadInput(f"--max-shard-size {printable(text)}: give a size such as 500MB or 2GB")


def main() -> None:
    """Run the command line."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    app()
