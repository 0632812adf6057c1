"""Unknown options: each command names what it has for them, and nothing that it has not."""

from __future__ import annotations

import re

import pytest
import typer
from typer.testing import CliRunner

from surgeon.cli import app
from surgeon.common.wrong_option import _HABIT_OF

COMMANDS: dict[str, typer.core.TyperCommand] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def said(arguments: str) -> str:
    """The last line of what is shown, behind the option's name."""
    ran = CliRunner().invoke(app, arguments.split(), prog_name="surgeon")
    assert ran.exit_code == 2 and not ran.stdout, ran.output
    begin, _, sentence = ran.stderr.strip().splitlines()[-1].partition(". ")
    assert begin.startswith("Error: No such option: -")
    return sentence


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("report out --to page.html", "Did you mean --html (write the page to this file)?"),
        ("report out -o page.html", "Did you mean --html ("),
        ("report out --ouput=page.html", "Did you mean --html ("),
        ("train out --config t.yaml --output run", "Did you mean --to (folder of the trained output)?"),
        ("train out --confg t.yaml", "Did you mean --config ("),
        ("train out --delta", "Did you mean --delta-only ("),
        ("train out --gpu", "Did you mean --device cuda?"),
        ("apply plan base --out out", "OUT is given by its place: surgeon apply PLAN BASE OUT"),
        ("apply --base base plan out", "BASE is given by its place: surgeon apply PLAN BASE OUT"),
        ("apply --trust_remote_code", "Did you mean --trust-remote-code ("),
        ("apply plan base out --dry-run", "`surgeon preview PLAN BASE` shows what it would do, and writes nothing."),
        ("revert out --output base", "DEST is given by its place: surgeon revert OUT DEST"),
        ("continual --config tasks.yaml base run", "TASKS.YAML is given by its place: surgeon continual TASKS.YAML"),
        ("verify base out --output x.json", "It prints its result; --json > FILE writes it to a file."),
        ("verify base out --txt x", "Did you mean --text ("),
        ("inspect out --debug", "It stands before the command: surgeon --debug inspect …"),
        ("--json inspect out", "It stands after a command: surgeon COMMAND … --json"),
        ("diff a b --zzz", "`surgeon diff --help` lists the options."),
        ("push out user/model --yes", "`surgeon push --help` lists the options."),
    ],
)
def test_what_was_meant(given: str, told: str) -> None:
    assert said(given).startswith(told)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_nothing_is_named_that_the_command_does_not_have(command: str) -> None:
    own = {name for parameter in COMMANDS[command].params for name in parameter.opts}
    arguments = {p.metavar or p.name for p in COMMANDS[command].params if p.param_type_name == "argument"}
    written = {"--to": "FILE", "--html": "FILE", "DEST": "", "RUN": "", "RESULTS": ""}
    for given in sorted({"--out", "-o", "--config", "--model", "--cuda", "--format", "--dry", "--verbose"} - own):
        assert given in _HABIT_OF
        sentence = said(f"{command} {given} x")
        named = set(re.findall(r"--[a-z][a-z-]*", re.sub(r"\([^()]*\)", "", sentence)))
        assert named <= own | {"--debug", "--quiet", "--help"}, (given, sentence)
        if " is given by its place" in sentence:
            assert sentence.partition(" is")[0] in arguments, (given, sentence)
        if given == "--out" and command != "demo" and (own | arguments) & written.keys() and command != "apply":
            assert re.match("Did you mean --(to|html) |(DEST|RUN|RESULTS) is given", sentence), sentence
