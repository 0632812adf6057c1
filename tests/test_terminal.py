"""What the terminal is shown: options that are alike everywhere, colours where they belong, completion."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import surgeon
from surgeon.cli import app
from surgeon.common.listener import ProgressListener
from surgeon.plan import shipped
from tests import tiny

COMMANDS: dict[str, typer.core.TyperCommand] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
# The schema is JSON already; the demo and a chat are for eyes.
WITHOUT_JSON = {"schema", "demo", "chat"}
# These read no more than a config, headers of files beside it or nothing at all.
WITHOUT_QUIET = {"schema", "plans", "inspect"}
SURGEON = [sys.executable, "-c", "from surgeon.cli import app; app(prog_name='surgeon')"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.checkpoint(tmp_path_factory.mktemp("terminal") / "base", "llama")


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_options_are_alike(name: str) -> None:
    options = {option for parameter in COMMANDS[name].params for option in parameter.opts}
    assert ("--json" in options) == (name not in WITHOUT_JSON)
    assert ("--quiet" in options) == (name not in WITHOUT_QUIET)
    assert all(getattr(p, "help", None) for p in COMMANDS[name].params if "--json" not in p.opts), "an option untold"


def test_help_tells_exit_codes() -> None:
    told = " ".join(CliRunner().invoke(app, ["--help"]).output.split())
    for words in ("0 done", "1 a bug", "2 bad input or refused", "3 a promise does not hold", "130 interrupted"):
        assert words in told


def test_help_has_whole_summaries_and_the_version_its_programs_name() -> None:
    shown = " ".join(CliRunner().invoke(app, ["--help"], terminal_width=60).output.split())
    assert "..." not in shown.partition("Commands:")[2]
    for command in COMMANDS.values():
        assert command.help is not None
        assert " ".join(command.help.partition("\n\n")[0].split()) in shown
    assert CliRunner().invoke(app, ["--version"]).output == f"surgeon {surgeon.__version__}\n"


def test_lines_in_a_pipe_end_where_their_text_does(base: Path) -> None:
    shown = CliRunner().invoke(app, ["inspect", str(base)]).output
    assert shown.splitlines()[0].split() == ["family", "llama"]
    assert not [line for line in shown.splitlines() if line != line.rstrip()]


def test_a_plan_may_come_from_stdin(base: Path) -> None:
    plan = "surgeon: 1\noperations: [{op: pmoe_experts}]\n"
    shown = CliRunner().invoke(app, ["preview", "-", str(base), "--json"], input=plan)
    named = CliRunner().invoke(app, ["preview", "pmoe", str(base), "--json"])
    assert json.loads(shown.stdout)["layers"] == json.loads(named.stdout)["layers"]
    wrong = CliRunner().invoke(app, ["preview", "-", str(base)], input=plan.replace("op:", "opp:"))
    assert wrong.exit_code == 2 and "surgeon: <stdin>:2: " in wrong.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("apply solar BASE full", ["full: exists and holds x; choose another folder"]),
        ("apply solar BASE out --device cuda", ["--device cuda: no CUDA device is visible here; use cpu"]),
        ("verify BASE BASE --device gpu", ["--device gpu: unknown; use auto, cpu, cuda or cuda:N"]),
        ("verify BASE out --text absent.txt", ["absent.txt: cannot read the text (no such file; looked at"]),
        ("train BASE ROWS run", ["rows.jsonl:2: `chosen` and `rejected` are preferences"]),
        (
            "recall BASE --tokens many --to x.jsonl",
            ["--tokens many: give a whole number, such as 200000, 200k or 1.5M"],
        ),
        ("report BASE", ["no surgery.json, so this is not an output of surgeon"]),
        ("routing-report BASE --text a=absent.txt", ["absent.txt: cannot read the text"]),
        ("evaluate BASE --data absent.txt", ["absent.txt: no such file or folder"]),
        ("evaluate absent --data absent.txt", ["absent: no such folder, and not a Hub id either"]),
        (
            "train BASE TRAIN out",
            [
                *("TRAIN:2: unknown key `step`;", "TRAIN:3: `sources` is []"),
                *("TRAIN:4: `attention` is spda; did", "TRAIN:5: report_to[0]: wadb: no tracker of that name; did"),
            ],
        ),
    ],
)
def test_what_is_wrong_is_said_in_a_line_each_before_torch_is_asked_for(
    arguments: str, told: list[str], base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "train.yaml"
    config.write_text("surgeon_train: 1\nstep: 3\nsources: []\nattention: spda\nreport_to: [wadb]\n", encoding="utf-8")
    rows = tmp_path / "rows.yaml"
    rows.write_text("surgeon_train: 1\nsteps: 1\nwhat: all\nsources: [{name: a, share: 1, path: rows.jsonl}]\n")
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)

    def no_torch(device: str) -> str:
        raise AssertionError("torch was asked for a device")

    monkeypatch.setattr("surgeon.common.devices.resolve", no_torch)
    places = {"BASE": str(base), "TRAIN": str(config), "ROWS": str(rows)}
    ran = CliRunner().invoke(app, [places.get(word, word) for word in arguments.split()])
    assert ran.exit_code == 2, ran.output
    lines = ran.stderr.splitlines()
    assert len(lines) == len(told)
    for line, words in zip(lines, told, strict=True):
        assert line.startswith("surgeon: ") and words.replace("TRAIN", str(config)) in line, line


def test_data_on_stdout_is_json_alone(base: Path) -> None:
    shown = CliRunner().invoke(app, ["preview", "pmoe", str(base), "--json"])
    assert json.loads(shown.stdout)["promise"] == "exact"
    named = CliRunner().invoke(app, ["plans", "--json"])
    assert json.loads(named.stdout) == shipped.shipped_plans()
    plan = CliRunner().invoke(app, ["plans", "solar", "--json"])
    assert json.loads(plan.stdout)["solar"].startswith("# SOLAR")


def on_terminal(*arguments: str, **env: str) -> str:
    """What a run writes whose stdout is a terminal of 100 columns."""
    ours, theirs = pty.openpty()
    kept = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    with subprocess.Popen(
        [*SURGEON, *arguments],
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        env=kept | {"TERM": "xterm-256color", "COLUMNS": "100"} | env,
    ) as running:
        os.close(theirs)
        written = b""
        try:
            while piece := os.read(ours, 65536):
                written += piece
        except OSError:
            pass  # Linux tells of the other end's closing so.
        finally:
            os.close(ours)
        assert running.wait() == 0
    return written.decode()


def test_colours_are_for_terminals_that_want_them(base: Path) -> None:
    coloured, plain = "\x1b[36m", "\x1b[3"
    assert coloured in on_terminal("preview", "llama-pro", str(base))
    assert plain not in on_terminal("preview", "llama-pro", str(base), NO_COLOR="1")
    piped = subprocess.run([*SURGEON, "preview", "llama-pro", str(base)], capture_output=True, check=True)
    assert b"\x1b" not in piped.stdout + piped.stderr


def test_progress_is_for_terminals(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with ProgressListener() as listener:
        listener.begin("copying", 100)
        listener.advance(100)
        listener.say("a word")
    assert capsys.readouterr().err == "a word\n"
    with ProgressListener(quiet=True) as listener:
        listener.say("a word")
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with ProgressListener() as listener:
        listener.begin("copying", 100)
        listener.advance(40)
        listener.progress.refresh()
        listener.advance(60)
        listener.say("a word")
        listener.progress.refresh()
    shown = capsys.readouterr().err
    assert "40/100 bytes" in shown
    assert "working" in shown and "0:00:0" in shown, "work that nobody can measure shows the time gone by"


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("surgeon verif", ["verify"]),
        ("surgeon apply sol", ["solar"]),
        ("surgeon preview mixture-of-control/li", ["mixture-of-control/linear"]),
        ("surgeon apply mine", ["mine.yaml", "mine/"]),
        ("surgeon plans sol", ["solar"]),
        ("surgeon apply --max", ["--max-shard-size"]),
    ],
)
def test_the_shell_completes(typed: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "mine").mkdir()
    told = subprocess.run(
        SURGEON,
        env=os.environ
        | {"_SURGEON_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert sorted(told.stdout.split()) == sorted(expected), told.stderr


def test_the_shells_script_is_shown() -> None:
    # Without looking which shell started the tests.
    environment = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    script = subprocess.run(
        [*SURGEON, "--show-completion", "bash"], env=environment, capture_output=True, text=True, check=True
    )
    assert "_SURGEON_COMPLETE=complete_bash" in script.stdout
