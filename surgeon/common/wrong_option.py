"""What an option that a command does not have was meant to be: a near name, or the habit of another program."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import NamedTuple

# How near a name has to be, from 0 to 1: an option's own, under which `--to` is near to `--json`, and a habit's.
_NEAR = 0.7
_NEAR_A_HABIT = 0.85

# What other programs call the same things. Where a command has an option of the name, it never comes here.
_HABITS: dict[str, tuple[str, ...]] = {
    "written": (
        *("--to", "--out", "--output", "--out-dir", "--output-dir", "--out-path", "--output-path", "--out-file"),
        *("--output-file", "--outfile", "--dest", "--destination", "--save", "--save-to", "--save-dir", "-o", "-O"),
    ),
    "config": ("--config", "--config-file", "--config-path", "--cfg", "--yaml", "--plan-file", "-c"),
    "model": (
        *("--model", "--model-path", "--model-id", "--model-name", "--model-name-or-path", "--pretrained", "-m"),
        *("--base-model", "--checkpoint"),
    ),
    "device": ("--gpu", "--gpus", "--cuda", "--cpu"),
    "json": ("--format", "--output-format"),
    "dry": ("--dry-run", "--dry", "--simulate", "-n"),
    "verbose": ("--verbose", "--trace", "--traceback", "-v"),
}
_HABIT_OF = {name: habit for habit, names in _HABITS.items() for name in names}

# Arguments by what they hold, the one that is meant first.
_WRITTEN = ("DEST", "RUN", "RESULTS")
_CONFIGS = ("PLAN", "STUDY", "TASKS.YAML")
_MODELS = ("BASE", "MODEL…", "DIR", "OUT", "A")


class Option(NamedTuple):
    """An option of a command: its name and its help."""

    name: str
    help: str

    def __str__(self) -> str:
        return f"{self.name} ({self.help.partition(' (')[0]})" if self.help else self.name


class Asked(NamedTuple):
    """A command, by its name, its usage (`surgeon apply PLAN BASE OUT`), its arguments and options.

    `before` are the options of the program, which stand before the command; `after`, of the program itself, those that
    stand after a command.
    """

    command: str
    usage: str
    arguments: Sequence[str]
    options: Sequence[Option]
    before: Sequence[Option] = ()
    after: Sequence[Option] = ()


def meant(given: str, asked: Asked) -> str:
    """A sentence on what the unknown option `given` was probably meant to be; empty where nothing is near."""
    plain = given.lower().replace("_", "-") if given.startswith("--") else given
    own = {option.name: option for option in asked.options}
    before, after = ({option.name for option in others} for others in (asked.before, asked.after))
    if plain not in {*own, *before, *after, *_HABIT_OF} and not _argument(plain, asked):
        plain = _nearest(plain, [*own, *before, *sorted(after)])
    if plain in own:
        return f"Did you mean {own[plain]}?"
    if plain in before:
        return f"It stands before the command: surgeon {plain} {asked.command} …"
    if plain in after:
        return f"It stands after a command: surgeon COMMAND … {plain}"
    sentence = _by_habit(_HABIT_OF.get(plain, ""), plain, asked, own)
    if not sentence and (argument := _argument(plain, asked)):
        sentence = _no_name(argument, asked)
    return sentence


def _nearest(given: str, names: Sequence[str]) -> str:
    """The name that `given` begins, where only one does, or the nearest, a habit's too; else `given`."""
    begun = {name for name in names if name.startswith(given) and given.startswith("--") and len(given) > len("--")}
    if len(begun) == 1:
        return begun.pop()
    habits = [name for name in _HABIT_OF if name.startswith("--")]
    near = difflib.get_close_matches(given, names, n=1, cutoff=_NEAR)
    return next(iter(near or difflib.get_close_matches(given, habits, n=1, cutoff=_NEAR_A_HABIT)), given)


def _by_habit(habit: str, given: str, asked: Asked, own: dict[str, Option]) -> str:
    """What the command has for it."""
    match habit:
        case "written":
            return _written(given, asked, own)
        case "config":
            return _instead("--config", _CONFIGS, asked, own)
        case "model":
            return _instead("", _MODELS, asked, own)
        case "device" if "--device" in own:
            return f"Did you mean --device {'cpu' if given == '--cpu' else 'cuda'}?"
        case "json" if "--json" in own:
            return f"Did you mean {own['--json']}?"
        case "dry" if "--dry-run" in own:
            return f"Did you mean {own['--dry-run']}?"
        case "dry" if asked.command == "apply":
            return "`surgeon preview PLAN BASE` shows what it would do, and writes nothing."
        case "verbose":
            command = "COMMAND" if asked.after else asked.command
            return f"Progress is shown unless --quiet is given; surgeon --debug {command} … shows tracebacks."
    return ""


def _written(given: str, asked: Asked, own: dict[str, Option]) -> str:
    """Where a command writes: an argument, an option, or stdout alone."""
    places = ("OUT",) if asked.command == "apply" else _WRITTEN
    if (place := next((name for name in places if name in asked.arguments), None)) is not None:
        return _no_name(place, asked)
    if (option := own.get("--html") or own.get("--to")) is not None:
        return f"Did you mean {option}?"
    if argument := _argument(given, asked):
        return _no_name(argument, asked)
    return "It prints its result; --json > FILE writes it to a file." if "--json" in own else ""


def _instead(option: str, places: Sequence[str], asked: Asked, own: dict[str, Option]) -> str:
    """The option, or the first of these arguments that the command has."""
    if option in own:
        return f"Did you mean {own[option]}?"
    place = next((name for name in places if name in asked.arguments), None)
    return "" if place is None else _no_name(place, asked)


def _argument(given: str, asked: Asked) -> str:
    """The argument that the option is called after: BASE for `--base`; empty for none."""
    called = given.removeprefix("--").upper()
    return next((name for name in asked.arguments if called in (name, name.partition(".")[0], name.rstrip("…"))), "")


def _no_name(argument: str, asked: Asked) -> str:
    return f"{argument} is given by its place: {asked.usage}"
