"""The commands: the public function behind each, its options, and the display of its result."""

from __future__ import annotations

import inspect
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import surgeon
from surgeon.cli.failures import Command, failing, listening, show
from surgeon.cli.options import Spelling, as_option, parameters_given
from surgeon.cli.spellings import SPELLINGS
from surgeon.common import devices
from surgeon.common.places import meant
from surgeon.errors import BadInput

# The commands by group, in the order of the help.
GROUPS = {
    "Grow": ("demo", "plans", "families", "preview", "apply", "verify"),
    "Train and measure": ("learn", "train", "recall", "evaluate", "chat", "compare", "continual"),
    "Look": ("inspect", "diff", "report", "transport-report", "routing-report"),
    "Undo, convert, share": ("revert", "refresh", "blend", "merge", "delta", "export-slot", "gguf", "push"),
    "For editors": ("schema",),
}
# Example arguments after `surgeon COMMAND`.
EXAMPLES = {
    "demo": "",
    "plans": "llama-pro > plan.yaml",
    "families": "base-model",
    "preview": "plan.yaml base-model",
    "apply": "plan.yaml base-model out",
    "verify": "base-model out",
    "learn": "base-model --new french.txt --to run --minutes 10",
    "train": "out train.yaml run",
    "recall": "base-model --tokens 200000 --to recalled.jsonl",
    "evaluate": "run --base base-model --data fr=french.txt --data en=english.txt",
    "chat": "run --base base-model",
    "compare": "quick base-model results --new french.txt --original english.txt",
    "continual": "tasks.yaml base-model run",
    "inspect": "user/name@main",
    "diff": "base-model out",
    "report": "run --base base-model --html run.html",
    "transport-report": "out",
    "routing-report": "run --text french=fr.txt --text english=en.txt",
    "revert": "run base-again --to 0",
    "refresh": "out",
    "blend": "run blended --with base-model --alpha 0.75",
    "merge": "run merged --alpha 0.5",
    "delta": "run run-delta",
    "export-slot": "run 0 adapter",
    "gguf": "run run-q8_0.gguf --converter llama.cpp --type q8_0",
    "push": "run user/name --dry-run",
    "schema": "--training > train.schema.json",
}
# Removed commands and options, and what to use instead.
_FORMER = {
    "evaluate --mtp": "an engine that serves the model counts accepted drafts",
    "evaluate --draft": "an engine that serves the model counts accepted drafts",
    "families --after": "`surgeon preview` of a plan with both operations, or on an output, says whether they combine",
    "gguf-pattern": "`surgeon gguf` writes each layer's window",
    "push --delta": "`surgeon delta`, and push its folder with the Hub's own client",
    "report --png": "the page (`--html`) has the figures, and a browser prints it",
    "report --log": "losses of every training by `surgeon train` are in the page; other logs have tools of their own",
    "report --maps": "`surgeon report` shows each map's entropy and errors",
    "report --routing": "`surgeon report OUT --text NAME=FILE` records and shows",
    "transport-report --maps": "`surgeon report` shows each map's entropy and errors",
    "transport-report --trained": "`surgeon transport-report RUN` reports on the trained model",
    "transport-report --png": "`surgeon report` shows each map's entropy and errors",
}
AsJson = Annotated[bool, typer.Option("--json", help="machine-readable output on stdout")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="no progress, no notes")]
# The annotation of a command's parameter that its public function declares.
Declared = Any


@dataclass(frozen=True)
class Entry:
    """A command: its help, the public function whose parameters are its options, and the function `run` behind it.

    Parameters of `run` that are `Declared`, and all in its `**given`, belong to the public function; others are the
    command's own.
    """

    name: str
    help: str
    function: str
    run: Callable[..., None]

    def command(self) -> Any:
        """Return the command as a typer object.

        The source of the function's module is read, but the module is not imported.
        """
        own = [p for p in inspect.signature(self.run, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
        declared = parameters_given(surgeon._HOMES[self.function], self.function) if self.function else []
        spelt = {parameter.name: self._spelling(parameter.name) for parameter in declared}
        parameters = [as_option(parameter, spelt[parameter.name]) for parameter in declared]
        # The command's own options come before --trust-remote-code, which is last in every command.
        before = len(parameters) - any(parameter.name == "trust_remote_code" for parameter in parameters)
        parameters[before:before] = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in own
            if parameter.annotation is not Declared
        ]

        def called(**words: Any) -> None:
            """Run the command with the options that were given, converted to the function's values."""
            # Leave options out that were not given, so that the function's defaults apply.
            given = {name: value for name, value in words.items() if value is not None or name not in spelt}
            given |= {name: Path(meant(str(value))) for name, value in given.items() if isinstance(value, Path)}
            devices.check(given.get("device", "auto"))
            self.run(**{name: spelt[name].value(value) if name in spelt else value for name, value in given.items()})

        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        # The mark `\b` keeps the paragraph's line breaks.
        text = f"{self.help}\n\n\b\nExample:\n  surgeon {self.name} {EXAMPLES[self.name]}".rstrip()
        alone.command(self.name, cls=Command, help=text)(called)
        return typer.main.get_command(alone)

    def _spelling(self, parameter: str) -> Spelling:
        """Return the spelling of a parameter: the command's own, else the common one."""
        found = SPELLINGS.get(f"{self.name}.{parameter}") or SPELLINGS.get(parameter)
        assert found is not None, f"`{parameter}` of `surgeon {self.name}` has no entry in SPELLINGS (spellings.py)"
        return found


ENTRIES: dict[str, Entry] = {}


class Commands(UserDict[str, Any]):
    """The commands by name, each created at its first use."""

    def __getitem__(self, name: str) -> Any:
        """Return the named command, which is made at first use."""
        if isinstance(found := self.data[name], Entry):
            found = self.data[name] = found.command()
        return found


class Group(TyperGroup):
    """A group of commands that end every failure with one line on stderr and an exit code.

    Its help shows the whole summaries of commands.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = Commands(ENTRIES)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands by group, each with the first paragraph of its help, however long that is."""
        for group, names in GROUPS.items():
            with formatter.section(group):
                formatter.write_dl(
                    [(name, " ".join(ENTRIES[name].help.partition("\n\n")[0].split())) for name in names]
                )

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the named command. Raises BadInput where the command, or an option, was removed."""
        name, *rest = args
        for asked in (name, *(f"{name} {option.partition('=')[0]}" for option in rest)):
            if asked in _FORMER:
                raise BadInput(f"`{asked}` is gone: {_FORMER[asked]}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the named command."""
        with failing():
            return super().invoke(ctx)


def command(function: str = "", *, name: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register the decorated function as a command for a public function; its name and docstring are the command's."""

    def added(run: Callable[..., None]) -> Callable[..., None]:
        """Register `run` and return it unchanged."""
        called = name or run.__name__
        ENTRIES[called] = Entry(called, inspect.getdoc(run) or "", function, run)
        return run

    return added


def shown(
    function: str,
    view: str,
    help: str,
    *,
    name: str = "",
    always: bool = False,
    code: Callable[[Any], int] = lambda result: 0,
) -> None:
    """Add a command that calls a public function with its options and shows the result by `view` of its module.

    With `always`, the result is shown even with `--quiet`. `code` computes the exit code from the result.
    """

    def run(as_json: AsJson = False, quiet: QuietOption = False, **given: Any) -> None:
        """Call the public function, show its result, and exit with its code where that is not 0."""
        with listening(quiet) as listener:
            result = getattr(surgeon, function)(**given, listener=listener)
        # A public view may be in a module of its own.
        module = import_module(f"surgeon.{surgeon._HOMES.get(view, surgeon._HOMES[function])}")
        show(result, getattr(module, view), as_json=as_json, quiet=quiet and not always)
        if failed := code(result):
            raise typer.Exit(failed)

    called = name or function.replace("_", "-")
    ENTRIES[called] = Entry(called, inspect.cleandoc(help), function, run)
