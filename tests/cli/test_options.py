"""The command line's options are the parameters of public functions: names, defaults, none left out, none twice."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import surgeon
from surgeon.cli import app
from surgeon.cli.entries import ENTRIES, EXAMPLES, GROUPS
from surgeon.cli.options import COMPUTED, parameters_of
from surgeon.cli.spellings import SPELLINGS
from surgeon.errors import BadInput

FUNCTIONS = {name: home for name, home in surgeon._HOMES.items() if inspect.isfunction(getattr(surgeon, name))}
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
CALLING = {name: entry for name, entry in ENTRIES.items() if entry.function}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_is_read_from_the_source_is_what_python_has(function: str) -> None:
    real = inspect.signature(getattr(surgeon, function)).parameters.values()
    read = parameters_of(FUNCTIONS[function], function)
    assert [p.name for p in read] == [p.name for p in real]
    for ours, pythons in zip(read, real, strict=True):
        assert ours.annotation == pythons.annotation
        assert ours.keyword == (pythons.kind is pythons.KEYWORD_ONLY)
        assert ours.required == (pythons.default is pythons.empty)
        assert ours.required or ours.default is COMPUTED or ours.default == pythons.default


@pytest.mark.parametrize("name", CALLING)
def test_a_command_has_every_parameter_of_its_function_with_its_default(name: str) -> None:
    options = {parameter.name: parameter for parameter in COMMANDS[name].params}
    for parameter in inspect.signature(getattr(surgeon, CALLING[name].function)).parameters.values():
        if parameter.annotation.startswith(("Listener", "Ranks", "Callable[")):
            assert parameter.name not in options
            continue
        option, spelling = options[parameter.name], CALLING[name]._spelling(parameter.name)
        assert option.required == (parameter.default is parameter.empty)
        assert option.help
        # A flag without its opposite turns something on.
        assert option.default is not True or option.secondary_opts
        if option.default is not None:
            assert spelling.value(option.default) == parameter.default
        elif not option.required:
            assert parameter.default is None or not parameter.default or parameter.default == ("auto",)


def test_every_help_text_belongs_to_a_parameter() -> None:
    used = set()
    for name, entry in CALLING.items():
        for parameter in parameters_of(surgeon._HOMES[entry.function], entry.function):
            own = f"{name}.{parameter.name}"
            used.add(own if own in SPELLINGS else parameter.name)
    assert set(SPELLINGS) <= used


def test_what_was_not_given_is_left_to_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def push(**options: Any) -> None:
        given.update(options)
        raise surgeon.BadInput("enough")

    monkeypatch.setattr(surgeon, "push", push)
    assert CliRunner().invoke(app, ["push", "out", "user/name", "--private", "--pr"]).exit_code == 2
    assert given.pop("listener") is not None
    asked = {"out": Path("out"), "repo_id": "user/name", "public": False, "pull_request": True}
    flags = ("dry_run", "force", "trust_remote_code")
    assert given == asked | dict.fromkeys(flags, False)


def test_every_command_has_its_group_and_an_example_that_it_takes() -> None:
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(ENTRIES) == sorted(EXAMPLES)
    assert all(entry.help.strip() for entry in ENTRIES.values()), "each says what it does"
    for name, example in EXAMPLES.items():
        COMMANDS[name].make_context(name, example.partition(" > ")[0].split())


@pytest.mark.parametrize("width", [70, 150])
def test_help_is_as_wide_as_the_terminal(width: int) -> None:
    command = [sys.executable, "-m", "surgeon", "chat", "-h"]
    shown = subprocess.run(
        command, env=os.environ | {"COLUMNS": str(width)}, capture_output=True, text=True, check=True
    )
    assert width * 0.85 < max(map(len, shown.stdout.splitlines())) < width


def test_a_command_s_help_imports_nothing_of_what_it_runs() -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom surgeon.cli import app\n"
        "shown = CliRunner().invoke(app, ['apply', '--help']).output\nassert '--max-shard-size' in shown, shown\n"
        "print(*sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(ran.stdout.split())
    # pydantic is typer's own, which checks options by it.
    assert not loaded & {"yaml", "torch", "numpy", "surgeon.writing.apply", "surgeon.plan", "surgeon.checkpoint.folder"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("train out t.yaml run --devise cpu", "No such option: --devise (Possible options: --device, --set)"),
        ("verify base out --txt x", "--text"),
        ("diff a b --zzz", "No such option: --zzz"),
        ("reprot out", "No such command 'reprot'. Did you mean 'report'"),
        ("verify base out --window 1", "greater than or equal to 2"),
        ("merge out dest --alpha 2", "less than or equal to 1"),
        ("train out train.yaml", "Missing argument 'RUN'"),
        ("verify base out --window ten", "valid integer"),
        ("apply plan base", "Missing argument 'OUT'"),
        ("diff a b --e\x1bxact", "--e\\x1bxact"),
        ("evaluate run --mtp --data a.txt", "`evaluate --mtp` is gone: an engine that serves"),
        ("evaluate run --draft=head", "`evaluate --draft` is gone: an engine that serves"),
        ("gguf-pattern out a.gguf b.gguf", "`gguf-pattern` is gone: `surgeon gguf` writes each layer's window"),
        ("families --after control_llm", "`families --after` is gone: `surgeon preview` of a plan"),
        ("report out --png figures", "`report --png` is gone: the page"),
        ("transport-report out --maps=a --png b", "`transport-report --maps` is gone: `surgeon report"),
        ("report out --routing r.json", "`report --routing` is gone: `surgeon report OUT --text"),
        ("push out user/name --delta", "`push --delta` is gone: `surgeon delta`"),
    ],
)
def test_what_a_command_does_not_take_is_refused(given: str, said: str) -> None:
    ran = CliRunner().invoke(app, given.split(" "), prog_name="surgeon")
    assert ran.exit_code == 2 and not ran.stdout
    assert said in " ".join(ran.stderr.split()), ran.stderr


@pytest.mark.parametrize("name", [name for name in CALLING if any(p.name == "device" for p in COMMANDS[name].params)])
def test_a_device_that_is_not_there_is_refused_before_anything_else(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(BadInput, match="--device cuda: no CUDA device is visible here; use cpu"):
        replace(CALLING[name], run=lambda **_: pytest.fail("it ran")).command().callback(device="cuda")


@pytest.mark.parametrize(
    "given", [("evaluate", "base", "--data", ""), ("apply", "plan", "base", ""), ("report", "--html=")]
)
def test_an_empty_argument_is_no_path_to_the_current_folder(given: tuple[str, ...]) -> None:
    """As a variable of the shell leaves it that is not set."""
    shown = CliRunner().invoke(app, [*given])
    number = len(given) - 1
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert shown.stderr.startswith(f"surgeon: argument {number} of `{given[0]}` is empty; is it a variable")
