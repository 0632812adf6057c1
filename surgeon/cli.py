"""The command line: parse, call one public function, show its result. The only file that prints or exits.

Data goes to stdout, progress and errors to stderr. Exit codes: 0 done; 1 a bug in surgeon (`diff`: they differ);
2 bad input or refused; 3 a promise does not hold; 130 interrupted.
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import re
import signal
import sys
import threading
import traceback
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

import surgeon
from surgeon._version import __version__
from surgeon.common.disk_space import no_room
from surgeon.common.distributed import Ranks, joined
from surgeon.common.interrupting import interrupt
from surgeon.common.json_results import Result
from surgeon.common.options import Spelling, as_option, parameters_given
from surgeon.errors import BadInput, Mistakes, SurgeonError, printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from surgeon.common.listener import ProgressListener
    from surgeon.plan.plan import LoadedPlan


class _Group(TyperGroup):
    """Commands that end every failure with one line on stderr and an exit code; their help has whole summaries."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = _Commands(_ENTRIES)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The commands by group, each with the first paragraph of its help, however long that is."""
        for group, names in _GROUPS.items():
            with formatter.section(group):
                formatter.write_dl(
                    [(name, " ".join(_ENTRIES[name].help.partition("\n\n")[0].split())) for name in names]
                )

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
    """Turn whatever a plugin's code raises into a refusal that names the plugin."""
    try:
        yield
    except BaseException as error:
        from surgeon.common.plugins import blamed

        if not isinstance(error, BrokenPipeError) and no_room(error) is None and (refusal := blamed(error)):
            raise refusal from error
        raise


class _Command(TyperCommand):
    """A command that asks, where its arguments are refused, whether two of them changed places."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            # typer's words for what it expects are pydantic's.
            for theirs, ours in _TYPES_OF_VALUES.items():
                if theirs in error.message:
                    error.message = f"it takes {ours}"
            raise

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Mistakes as error:
            # Every line of a file of another kind is wrong: one is enough beside what it is.
            hint = _mixed_up(ctx)
            if hint and error.lines[0].startswith(hint.partition(" is ")[0]):
                raise BadInput(f"{error.lines[0]}; {hint}") from error
            raise
        except BadInput as error:
            if "did you mean" not in str(error) and (hint := _mixed_up(ctx)):
                raise BadInput(f"{error}; {hint}") from error
            raise


_TYPES_OF_VALUES = {"valid integer": "a whole number", "valid number": "a number", "valid boolean": "true or false"}


def _mixed_up(ctx: typer.Context) -> str:
    """Return a question about arguments that may have changed places, by their names in the help; empty without one."""
    from surgeon.checkpoint.kinds import CHECKPOINTS, NAME, NEW, Argument, Kind, mixed_up

    outputs: dict[str, set[Kind]] = {
        "apply": {NEW, NAME},
        "train": {*CHECKPOINTS},
        "verify": {"an output of surgeon", NAME},
    }
    takes: dict[str, set[Kind]] = {
        "PLAN": {"a delta", NAME} if ctx.params.get("delta") else {"a plan", NAME},
        "BASE": {*CHECKPOINTS, NAME},
        "OUT": outputs.get(str(ctx.command.name), {"an output of surgeon"}),
        "DEST": {NEW, NAME},
        "RUN": {NEW, NAME},
        "MODEL…": {*CHECKPOINTS, NAME},
        "DATA": {"a file", "a folder", "a data file", "a training config"},
        "TRAIN.YAML": {"a training config"},
        "TASKS.YAML": {"a tasks file"},
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
        # A repeatable one is looked at only where it was given once.
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
    # The terminal's width, whatever it is: 80 columns, click's own limit, fold every option's help.
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 1_000},
)


def _complete_plan(incomplete: str) -> list[str]:
    """Complete shipped plans, and the files and folders that begin with the typed text."""
    typed = Path(incomplete)
    folder, start = (typed, "") if incomplete.endswith("/") else (typed.parent, typed.name)
    beside = sorted(folder.glob("*")) if incomplete and folder.is_dir() else []
    files = [f"{path}/" if path.is_dir() else str(path) for path in beside if path.name.startswith(start)]
    return [*_complete_shipped(incomplete), *files]


def _complete_shipped(incomplete: str) -> list[str]:
    from surgeon.plan import shipped

    return [name for name in shipped.names() if name.startswith(incomplete)]


def _complete_shipped_or_swept(incomplete: str) -> list[str]:
    from surgeon.plan import shipped

    return [name for name in [*shipped.names(), *shipped.sweeps()] if name.startswith(incomplete)]


def _complete_study(incomplete: str) -> list[str]:
    from surgeon.plan import shipped

    return [name for name in shipped.shipped_studies() if name.startswith(incomplete)]


_S = Spelling
_DTYPES = "in auto (the checkpoint's), float32, bfloat16 or float16"
# By parameter, or by command and parameter where a command means something else by it.
_SPELLINGS = {
    "plan": _S("plan file, name of a shipped plan, or - for stdin", "PLAN", kind=str, complete=_complete_plan),
    "base": _S("base checkpoint: a folder, or user/name[@revision] on the Hub", "BASE", kind=str),
    "out": _S("folder of the output", "OUT"),
    "overrides": _S(
        "a value in place of the plan's: seed=1, operations.0.init.reg=0.1; may be given again", "KEY=VALUE", "--set"
    ),
    "revision": _S("Hub revision (branch, tag or commit) of the base"),
    "device": _S("auto, cpu, cuda, cuda:N"),
    "link": _S("hard-link shards that stay as they are; both names are read-only then"),
    "take_over": _S("go on with a work folder that you did not begin in this place (a copy, an archive)"),
    "trust_remote_code": _S("run and carry a base's own code (its auto_map)"),
    "text": _S("take tokens from this text or JSON-lines file"),
    "texts": _S(
        "NAME=FILE: a domain and its text, to record routers and gates on; repeatable",
        option="--text",
        convert=lambda given: _named_texts(given),
    ),
    "window": _S("tokens in each sequence", least=2),
    "windows": _S("sequences from each text; 0 takes the whole text", least=0),
    "maps": _S("show this transport map (12.below.query); repeatable"),
    "dtype": _S(f"run the model {_DTYPES}"),
    "apply.device": _S("device that computes new weights: auto, cpu, cuda, cuda:N"),
    "apply.max_shard_bytes": _S(
        "largest shard of new tensors, cut between layers",
        option="--max-shard-size",
        kind=str,
        convert=lambda given: _bytes(given),
        default="2GB",
    ),
    "apply.read_back": _S("read the output again and compare it with the base", option="--read-back/--no-read-back"),
    "verify.out": _S("the output: a folder, or user/name[@revision] on the Hub", "OUT", kind=str),
    "verify.logits": _S("bytes only, run no model", option="--static", off=True),
    "verify.streamed": _S("hold one layer of each model at a time"),
    "verify.dtypes": _S(f"run the models {_DTYPES}; may be given again", option="--dtype"),
    "train.out": _S("folder of the output, or of a base of any kind", "OUT"),
    "train.config": _S("training file: data, steps, optimizer", "TRAIN.YAML", kind=Path),
    "train.to": _S("folder of the trained output", "RUN"),
    "train.overrides": _S(
        "a value in place of the config's: optimizer.lr=1e-4, sources.NAME.share=0.5; may be given again",
        "KEY=VALUE",
        "--set",
    ),
    "train.delta_only": _S("write only what the base lacks to RUN, for `apply --delta`"),
    "train.device": _S("auto, cpu, cuda"),
    "recall.tokens": _S(
        "tokens to write, at least: 200000, 200k, 1.5M", "N", kind=str, convert=lambda given: _count(given)
    ),
    "recall.to": _S("new file of JSON lines, for a source of `train`", "FILE"),
    "recall.prompts": _S(
        "begin (the begin-of-text token), template (the bare chat template), or a text file with a beginning a"
        " line  [default: template where BASE has one, else begin]"
    ),
    "recall.temperature": _S("temperature of the draws; 1: as the model learned"),
    "recall.top_p": _S("draw among the likeliest tokens of this share"),
    "recall.length": _S("longest document in tokens; default: 512"),
    "recall.once": _S("FILE may be there already, if BASE wrote it by these settings, here: nothing is done then"),
    "recall.batch": _S("documents at a time"),
    "recall.seed": _S("seed of the draws", least=0),
    "evaluate.models": _S("folders or Hub ids (user/name[@revision])", "MODEL…"),
    "evaluate.data": _S(
        "text file or folder, NAME=FILE, a data file (.yaml), or a training config; may be given again",
        "DATA",
        "--data",
    ),
    "evaluate.base": _S(
        "the base, a folder or a Hub id; it is the first row, and others are compared with it", kind=str
    ),
    "evaluate.prompts": _S("have each model answer this, greedily; may be given again", "TEXT", "--prompt"),
    "evaluate.answer_tokens": _S("most new tokens of an answer", least=1),
    "evaluate.sources": _S("evaluate on this source only; may be given again", option="--source"),
    "evaluate.length": _S("tokens in a window; default: the smallest context, at most 2048", least=2),
    "evaluate.batch": _S("windows at a time", least=1),
    "evaluate.most": _S("documents of each source; 0 takes all", least=0),
    "evaluate.dtype": _S(f"run the models {_DTYPES}"),
    "evaluate.labels": _S("the texts have labels, and the models a classification head"),
    "continual.tasks": _S("the tasks, in order, and their training", "TASKS.YAML"),
    "continual.run": _S("folder of the model after the last task", "RUN"),
    "continual.keep": _S("keep the earlier tasks' models, in RUN-tasks"),
    "continual.device": _S("auto, cpu, cuda"),
    "compare.study": _S("study file, or name of a shipped study", "STUDY", kind=str, complete=_complete_study),
    "compare.results": _S("folder of the page and the records", "RESULTS"),
    "compare.new": _S("text to learn: FILE or NAME=FILE; may be given again"),
    "compare.original": _S("text of what must not be forgotten; without it, the base writes some"),
    "compare.replayed": _S("text to replay where a remedy says `text`; default: the original"),
    "compare.minutes": _S("begin no run that would end later: fewer points, and what is missing is listed"),
    "compare.jobs": _S("runs at a time; default: as cores, memory, GPUs allow"),
    "compare.keep": _S("keep every trained model, in RESULTS/runs"),
    "compare.device": _S("auto, cpu, cuda"),
    "merge.dest": _S("folder of the merged model", "DEST"),
    "merge.alpha": _S("share of the expanded branch; default: the one at inference", least=0, most=1),
    "revert.dest": _S("folder of the earlier state", "DEST"),
    "revert.to": _S("keep the first N surgeries; default: all but the last", "N"),
    "revert.base": _S("the folder of that state: read, and refused where OUT says another of it"),
    "revert.base_digest": _S("the state's digest, as `apply` showed it for its base; refuse any other", "HEX"),
    "delta.dest": _S("folder of the delta", "DEST"),
    "delta.base": _S("the base: the delta then includes side files that differ from the base's"),
    "export-slot.slot": _S("the slot's number, as `surgeon inspect` shows it", "SLOT", least=0),
    "export-slot.dest": _S("folder of the adapter", "DEST"),
    "gguf-pattern.file": _S("GGUF file that llama.cpp's converter made of OUT", "FILE"),
    "gguf-pattern.dest": _S("GGUF file to write", "DEST"),
    "push.repo_id": _S("repository of the Hub: user/name", "REPO"),
    "push.base": _S("verify against this base first, logits included; default: the one that OUT names"),
    "push.public": _S("who may see the repository, if it is new  [default: private]", option="--public/--private"),
    "push.revision": _S("branch to push to, created at need; default: main"),
    "push.pull_request": _S("open a pull request instead of committing", option="--pr"),
    "push.dry_run": _S("show what would be uploaded and how much is new"),
    "push.force": _S("push although a check fails, or over a model that is not surgeon's"),
    "push.license": _S("licence for the card, where the base's is unknown: apache-2.0, mit, …"),
    "push.base_model": _S("the base's id on the Hub for the card, where it was a folder: user/name"),
    "push.delta": _S("push only what the base of the last surgery lacks"),
    "diff.a": _S("a checkpoint's folder", "A"),
    "diff.b": _S("another checkpoint's folder", "B"),
    "diff.exact": _S("read both, even where a manifest records one of them"),
    "transport-report.trained": _S("the same model after training, to compare with"),
    "transport-report.png": _S("folder for the pictures of --maps"),
    "routing-report.to": _S("write the record to this JSON file"),
    "report.html": _S("write the page to this file (default: OUT's name with .html)"),
    "report.png": _S("folder for the figures as PNG (extra `report`)"),
    "report.base": _S("the base's folder: run the static proof against it"),
    "report.logits": _S("with --base: compare logits too", option="--verify"),
    "report.routing": _S("a record by `routing-report --to`, instead of --text"),
    "report.log": _S("losses as JSON lines: step, source, loss"),
    "inspect.checkpoint": _S("a checkpoint: a folder, or user/name[@revision] on the Hub", "CHECKPOINT", kind=str),
    "families.base": _S(
        "base checkpoint: a folder, or user/name[@revision] on the Hub; default: none", "BASE", kind=str
    ),
    "families.after": _S("which operations can follow this one, in its plan and on its output", "OP"),
}
# The order of the help.
_GROUPS = {
    "Grow": ("demo", "plans", "families", "preview", "apply", "verify"),
    "Train and measure": ("train", "recall", "evaluate", "compare", "continual"),
    "Look": ("inspect", "diff", "report", "transport-report", "routing-report"),
    "Undo, convert, share": ("revert", "merge", "delta", "export-slot", "gguf-pattern", "push"),
    "For editors": ("schema",),
}
# The rest of the line behind `surgeon COMMAND`.
_EXAMPLES = {
    "demo": "",
    "plans": "llama-pro > plan.yaml",
    "families": "base-model",
    "preview": "plan.yaml base-model",
    "apply": "plan.yaml base-model out",
    "verify": "base-model out",
    "train": "out train.yaml run",
    "recall": "base-model --tokens 200000 --to recalled.jsonl",
    "evaluate": "run --base base-model --data fr=french.txt --data en=english.txt",
    "compare": "quick base-model results --new french.txt --original english.txt",
    "continual": "tasks.yaml base-model run",
    "inspect": "user/name@main",
    "diff": "base-model out",
    "report": "run --base base-model --html run.html",
    "transport-report": "out --maps 12.below.query --png pictures",
    "routing-report": "run --text french=fr.txt --text english=en.txt",
    "revert": "run base-again --to 0",
    "merge": "run merged --alpha 0.5",
    "delta": "run run-delta",
    "export-slot": "run 0 adapter",
    "gguf-pattern": "out out.gguf out-fixed.gguf",
    "push": "run user/name --dry-run",
    "schema": "--training > train.schema.json",
}
AsJson = Annotated[bool, typer.Option("--json", help="machine-readable output on stdout")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="no progress, no notes")]
# A parameter of a command that its function declares.
Declared = Any


@dataclass(frozen=True)
class _Entry:
    """A command: its help, the public function whose parameters are its options, and what runs with their values.

    Parameters of `run` that are `Declared`, and all that it takes as `**given`, are the function's; others are the
    command's own.
    """

    name: str
    help: str
    function: str
    run: Callable[..., None]

    def command(self) -> Any:
        """The command as typer has it. The function's module is read for it, not imported."""
        own = [p for p in inspect.signature(self.run, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
        declared = parameters_given(surgeon._HOMES[self.function], self.function) if self.function else []
        spelt = {parameter.name: self._spelling(parameter.name) for parameter in declared}
        parameters = [as_option(parameter, spelt[parameter.name]) for parameter in declared]
        # The command's own come before --trust-remote-code, which is the last one everywhere.
        before = len(parameters) - any(parameter.name == "trust_remote_code" for parameter in parameters)
        parameters[before:before] = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in own
            if parameter.annotation is not Declared
        ]

        def called(**words: Any) -> None:
            # What is not given has the function's default.
            given = {name: value for name, value in words.items() if value is not None or name not in spelt}
            self.run(**{name: spelt[name].value(value) if name in spelt else value for name, value in given.items()})

        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        # The mark keeps the lines of the paragraph as they are.
        text = f"{self.help}\n\n\b\nExample:\n  surgeon {self.name} {_EXAMPLES[self.name]}".rstrip()
        alone.command(self.name, cls=_Command, help=text)(called)
        return typer.main.get_command(alone)

    def _spelling(self, parameter: str) -> Spelling:
        return _SPELLINGS.get(f"{self.name}.{parameter}") or _SPELLINGS[parameter]


_ENTRIES: dict[str, _Entry] = {}


class _Commands(UserDict[str, Any]):
    """The commands by name, each made when it is asked for."""

    def __getitem__(self, name: str) -> Any:
        if isinstance(found := self.data[name], _Entry):
            found = self.data[name] = found.command()
        return found


def _command(function: str = "", *, name: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of what runs it, called as that is and with its docstring for help, for a public function."""

    def added(run: Callable[..., None]) -> Callable[..., None]:
        called = name or run.__name__
        _ENTRIES[called] = _Entry(called, inspect.getdoc(run) or "", function, run)
        return run

    return added


def _shown(
    function: str,
    view: str,
    help: str,
    *,
    name: str = "",
    always: bool = False,
    code: Callable[[Any], int] = lambda result: 0,
) -> None:
    """Add a command that calls a public function with its options and shows the result by `view` of its module.

    With `always` it is shown although `--quiet` is set. `code` gives the exit code.
    """

    def run(as_json: AsJson = False, quiet: QuietOption = False, **given: Any) -> None:
        with _listening(quiet) as listener:
            result = getattr(surgeon, function)(**given, listener=listener)
        # A public view has a home of its own.
        module = import_module(f"surgeon.{surgeon._HOMES.get(view, surgeon._HOMES[function])}")
        _show(result, getattr(module, view), as_json=as_json, quiet=quiet and not always)
        if failed := code(result):
            raise typer.Exit(failed)

    called = name or function.replace("_", "-")
    _ENTRIES[called] = _Entry(called, inspect.cleandoc(help), function, run)


class _Debug:
    on = False


def _print_version(given: bool) -> None:
    if given:
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


@_command("preview")
def preview(
    plan: Declared,
    base: Declared,
    overrides: Declared = (),
    as_json: AsJson = False,
    quiet: QuietOption = False,
    **given: Any,
) -> None:
    """Show what a plan does to a base, from headers and config alone."""
    _short()
    from surgeon.apply.preview_view import preview_view

    with _listening(quiet) as listener:
        listener.wait("reading headers")
        shown = surgeon.preview(_plan(plan, overrides), base, **given)
    _show(shown, lambda found: preview_view(found, base), as_json=as_json)


@_command("apply")
def apply(
    plan: Declared,
    base: Declared,
    out: Declared,
    overrides: Declared = (),
    delta: Annotated[
        bool, typer.Option("--delta", help="PLAN is a delta (a folder, or a Hub id): apply it to its base")
    ] = False,
    as_json: AsJson = False,
    quiet: QuietOption = False,
    **given: Any,
) -> None:
    """Grow BASE by PLAN into the new folder OUT; the same command continues an interrupted run.

    Under torchrun (`torchrun --nproc-per-node N --no-python surgeon apply …`) N processes share the layers to compute.
    `surgeon apply --delta DELTA BASE OUT` applies a delta to its base instead.
    """
    if delta:
        from surgeon.rework.apply_delta import applied_delta_view

        if overrides:
            raise BadInput("--set changes a plan, and --delta applies none; leave one of them out")
        if not Ranks.of_environment().leads:
            return
        kept = {name: given[name] for name in ("revision", "link", "trust_remote_code") if name in given}
        with _listening(quiet) as listener:
            put = surgeon.apply_delta(plan, base, out, **kept, listener=listener)
        _show(put, applied_delta_view, as_json=as_json, quiet=quiet)
        return
    from surgeon.apply.apply import applied_view

    with joined() as ranks, _listening(quiet or not ranks.leads) as listener:
        applied = surgeon.apply(_plan(plan, overrides), base, out, **given, listener=listener, ranks=ranks)
    if ranks.leads:
        _show(applied, applied_view, as_json=as_json, quiet=quiet)


_shown(
    "verify",
    "verification_view",
    "Prove that OUT keeps what its manifest promises of BASE; exit 3 where a promise does not hold.",
    always=True,
    code=lambda proof: 0 if proof.holds else 3,
)


@_command("train")
def train(
    out: Declared,
    config: Declared,
    to: Declared,
    overrides: Declared = (),
    device: Declared = "auto",
    trust_remote_code: Declared = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="write nothing: show tokens by source, a sample, memory and time")
    ] = False,
    as_json: AsJson = False,
    quiet: QuietOption = False,
    **given: Any,
) -> None:
    """Train what surgery added to OUT, and nothing else, into the new folder RUN; repeat the command to continue.

    `what` and `lora` in the config train the base's own tensors, layers or a LoRA instead, of a plain base too.

    Under torchrun (`torchrun --nproc-per-node N --no-python surgeon train …`) N processes share every step's sequences.
    """
    from surgeon.train.config.loading import load_config

    # A mistake in it is shown before anything else is even imported.
    load_config(config, overrides)

    from surgeon.train.train import rehearsal_view, trained_view

    with _sigterm_interrupts(), _listening(quiet or not Ranks.of_environment().leads) as listener:
        both: dict[str, Any] = {
            "overrides": overrides,
            "device": device,
            "trust_remote_code": trust_remote_code,
            "listener": listener,
        }
        if dry_run:
            rehearsal = surgeon.rehearse(out, config, to, **both)
        else:
            trained = surgeon.train(out, config, to, **given, **both)
    if dry_run:
        _show(rehearsal, rehearsal_view, as_json=as_json)
    elif trained is not None:
        _show(trained, trained_view, as_json=as_json, quiet=quiet)
    _leave_ranks()


_shown(
    "recall",
    "recalled_view",
    "Have BASE write text like that it was trained on, to be replayed in training; repeat the command to continue.",
)
_shown(
    "evaluate",
    "evaluation_view",
    """Measure loss, perplexity and bits per byte of models on the same held-out text, with confidence intervals.

    With --prompt each model answers too, as a chat where its tokenizer has a template; --data may then be left out.
    """,
    always=True,
)
_shown(
    "continual",
    "continued_view",
    """Learn tasks one after the other, with a surgery for each, and measure all tasks after each one.

    The same command continues an interrupted run, between tasks and within one.
    """,
)
_shown(
    "compare",
    "compared_view",
    """Compare ways of learning new text without forgetting: runs at several rates, fair frontiers, a page, advice.

    `surgeon compare quick BASE RESULTS --new NEW.txt --original KNOWN.txt` is all it takes. The same command goes on
    where it was cut off.
    """,
    always=True,
)
_shown(
    "merge",
    "merged_view",
    "Merge the control blocks of OUT into one layer each, and measure how much the function changes.",
    always=True,
)
_shown(
    "revert",
    "reverted_view",
    "Undo the last surgery of OUT, or all but the first N: DEST holds every earlier tensor, byte for byte.",
)
_shown(
    "make_delta",
    "delta_view",
    "Write the part of OUT that the base of its last surgery lacks; `apply --delta` applies it to that base.",
    name="delta",
)
_shown(
    "export_slot",
    "exported_view",
    "Write a PMoE slot of OUT as a PEFT LoRA adapter for its base: shared LoRA below the router, the slot above.",
)
_shown(
    "gguf_pattern",
    "gguf_pattern_view",
    "Write FILE, a GGUF of Gemma 2 or 3, as DEST with each layer's kind of attention, as config.json of OUT has it.",
)
_shown(
    "push",
    "pushed_view",
    "Verify OUT and push it to a repository of the Hub; the same command continues an interrupted push.",
)
_shown(
    "diff",
    "difference_view",
    "Compare A with B, tensor by tensor; exit 0 where they are the same, 1 where they differ.",
    code=lambda difference: 0 if difference.identical else 1,
)
_shown(
    "transport_report",
    "transport_view",
    "Report entropies of transport maps: how widely inserted layers' neurons correspond to their neighbours'.",
    always=True,
)
_shown(
    "routing_report",
    "routing_view",
    "Record what routers and gates of a grafted output choose, by layer and site, on texts of several domains.",
    always=True,
)


@_command("report")
def report(
    out: Declared,
    html: Declared = None,
    png: Declared = None,
    as_json: AsJson = False,
    quiet: QuietOption = False,
    **given: Any,
) -> None:
    """Write a report on OUT as one page that needs no network; exit 3 on a broken promise."""
    if html is None and png is None and not as_json:
        html = Path(f"{out.resolve().name}.html")
    with _listening(quiet) as listener:
        written = surgeon.report(out, html=html, png=png, **given, listener=listener)
    if as_json:
        _print_json(written.to_json())
    elif not quiet:
        for path in (*([written.html] if written.html else []), *written.pictures):
            print(printable(str(path), 2000))
    if written.findings.verification is not None and not written.findings.verification.holds:
        raise typer.Exit(3)


@_command("inspect", name="inspect")
def _inspect(checkpoint: Declared, as_json: AsJson = False, **given: Any) -> None:
    """Show a checkpoint's family and sizes, its surgeries and new tensors, and code that it brings; none of it runs."""
    _short()
    from surgeon.report.inspect import inspection_view

    _show(surgeon.inspect(checkpoint, **given), inspection_view, as_json=as_json)


@_command("families")
def families(base: Declared = None, as_json: AsJson = False, quiet: QuietOption = False, **given: Any) -> None:
    """List the model families; with BASE what is known or found out about it, and which operations it takes.

    With --after, list which operations can follow OP: on BASE, or as recorded on tiny models.
    """
    from surgeon.report.families import families_view

    with _listening(quiet) as listener:
        listener.wait("reading headers")
        found = surgeon.families(base, **given)
    _show(found, families_view, as_json=as_json)


@_command()
def schema(
    training: Annotated[bool, typer.Option("--training", help="the schema of training configs")] = False,
    tasks: Annotated[bool, typer.Option("--tasks", help="the schema of tasks files")] = False,
    study: Annotated[bool, typer.Option("--study", help="the schema of studies")] = False,
    sweep: Annotated[bool, typer.Option("--sweep", help="the schema of sweeps")] = False,
) -> None:
    """Print the JSON schema of plans, which editors use to complete YAML."""
    _short()
    given = {"--training": training, "--tasks": tasks, "--study": study, "--sweep": sweep}
    chosen = [name for name, is_given in given.items() if is_given]
    if len(chosen) > 1:
        raise BadInput(f"{' and '.join(chosen)} exclude each other; give one of them")
    if study:
        from surgeon.compare.config.loading import json_schema
    elif sweep:
        from surgeon.plan.sweep import json_schema
    elif tasks:
        from surgeon.continual.config.loading import json_schema
    elif training:
        from surgeon.train.config.loading import json_schema
    else:
        from surgeon.plan.plan import json_schema
    _print_json(json_schema())


@_command()
def plans(
    name: Annotated[
        str | None,
        typer.Argument(help="print this plan, or the points of this sweep", autocompletion=_complete_shipped_or_swept),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the shipped plans and sweeps, or print a plan to start from, or a sweep with the command of each point."""
    _short()
    from surgeon.plan import shipped

    if as_json:
        _print_json(shipped.names() if name is None else shipped.texts(name))
    elif name is None:
        _console().print(shipped.plans_view(shipped.described()))
    else:
        print(shipped.text_of(name), end="")


@_command()
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


def _short() -> None:
    """Look for cycles less often: in a command of a second, among what it imports, that takes a fifth of the time."""
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
    """End at SIGTERM, which schedulers and containers send, as at Ctrl-C: what is being written is waited for.

    Several processes are left as they are: torchrun ends those that wait for one that failed, and they would wait on.
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


def _show(result: Result, view: Callable[[Any], RenderableType], *, as_json: bool, quiet: bool = False) -> None:
    if as_json:
        _print_json(result.to_json())
    elif not quiet:
        _console().print(view(result))


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=True))


def _named_texts(given: list[str]) -> dict[str, Path | None]:
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


def _count(text: str) -> int:
    found = re.fullmatch(r"([0-9][0-9_,]*(?:\.[0-9]+)?)([kKmM]?)", text)
    number = float(re.sub("[_,]", "", found[1])) * {"": 1, "k": 10**3, "m": 10**6}[found[2].lower()] if found else 0
    if not found or number < 1 or number != int(number):
        raise BadInput(f"--tokens {printable(text)}: give a whole number, such as 200000, 200k or 1.5M")
    return int(number)


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
