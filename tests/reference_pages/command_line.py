"""The page of the command line, from the typer app: command-line.md."""

from __future__ import annotations

import inspect
import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import typer

from surgeon.cli import app, entries

HEAD = """\
# The command line

Every command with its arguments and options, as `surgeon COMMAND --help` shows them.

| exit code | meaning |
|---|---|
| 0 | done; for `diff`: the same |
| 1 | a bug in surgeon (`--debug` before the command shows the trace); for `diff`: they differ |
| 2 | bad input, or refused: one line for each mistake says what, where and what to do |
| 3 | a promise does not hold (`verify`, `report`, `demo`) |
| 130 | interrupted; the same command continues |

- Results go to stdout, progress and errors to stderr. [The keys of `--json`](json.md).
- PLAN is a file, a shipped plan's name, or `-` for stdin.
  Relative paths in a plan on stdin start in the working directory.
- Mistakes in a plan or config are reported all at once, each with its line, before torch is imported.
- Redirected logs: `train` prints a line every `log_every` steps, `recall` one for every tenth of its tokens.
- `--install-completion` sets up completion of commands, options and shipped plans (bash, zsh, fish, PowerShell).
  `--show-completion` prints it instead.
- Tables fit the terminal; in a file or a pipe they are up to 160 characters wide.

| variable | effect |
|---|---|
| `COLUMNS`, `NO_COLOR` | width of tables; no colours |
| `OMP_NUM_THREADS` | torch's number of threads |
| `SURGEON_CACHE` | the folder of the [cache](families.md#what-is-kept), or `off` |
| `SURGEON_STATE` | the folder of the [key](../explanation/trust.md#work-folders) that signs your unfinished runs |
| `HF_HOME`, `HF_TOKEN`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`, … | as huggingface_hub reads them |

`python -m tests.reference_pages` writes what follows from the program, and a test compares the two.
"""


def command_line_page() -> str:
    """Options before a command, then every command in the order and the groups of the help."""
    root: Any = typer.main.get_command(app)
    parts = [HEAD, "## Before the command\n", _table(root)]
    for group, names in entries.GROUPS.items():
        parts.append(f"## {group}\n")
        for name in names:
            parts += [f"### {name}\n", *_command(name, root.commands[name])]
    return "\n".join(parts)


def _command(name: str, command: Any) -> list[str]:
    places = [_place(parameter) for parameter in command.params if parameter.param_type_name == "argument"]
    named = [_option(parameter, "…") for parameter in command.params if _must_be_named(parameter)]
    example = f"{name} {entries.EXAMPLES[name]}".rstrip()
    shown = [f"surgeon {' '.join([name, *places, *named, '[OPTIONS]'])}", f"surgeon {example}"]
    text = "\n\n".join(" ".join(part.split()) for part in entries.ENTRIES[name].help.split("\n\n"))
    return ["```text", *shown, "```\n", f"{text}\n", _table(command)]


def _table(command: Any) -> str:
    rows = ["| argument or option | default | meaning |", "|---|---|---|"]
    kinds = inspect.signature(command.callback, eval_str=True).parameters
    for parameter in command.params:
        # Others are typer's own.
        if parameter.name in kinds:
            kind = _kind(kinds[parameter.name].annotation)
            called = _place(parameter) if parameter.param_type_name == "argument" else _option(parameter, kind)
            rows.append(f"| `{called}` | {_default(parameter)} | {_meaning(parameter)} |")
    return "\n".join(rows) + "\n"


def _place(parameter: Any) -> str:
    called = parameter.metavar or parameter.name.upper()
    return called if parameter.required else f"[{called}]"


def _must_be_named(parameter: Any) -> bool:
    return parameter.param_type_name == "option" and bool(parameter.required)


def _option(parameter: Any, kind: str) -> str:
    """An option with its short form, its opposite and what it takes."""
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    return names if parameter.is_flag else f"{names} {parameter.metavar or kind}"


def _kind(annotation: Any) -> str:
    """The word for what an option takes, by its type in the signature that typer reads."""
    kind = get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(each for each in get_args(kind) if each is not type(None))
    if get_origin(kind) is list:
        kind = get_args(kind)[0]
    return {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH", bool: ""}[kind]


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if parameter.secondary_opts and parameter.default is not None:
        return f"`{(parameter.opts if parameter.default else parameter.secondary_opts)[0]}`"
    unset = parameter.default is None or parameter.is_flag if parameter.param_type_name == "option" else True
    return "" if unset else f"`{parameter.default}`"


def _meaning(parameter: Any) -> str:
    return " ".join((parameter.help or "").split()).replace("|", "\\|")
