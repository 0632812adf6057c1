"""Which models of the installed transformers take which surgery: every model type, tiny, from plan to proof.

`python -m benchmarks.coverage [--encoders] [TYPE …] [--again | --since DAY]` makes a tiny checkpoint of each type (its
default config with sizes shrunk, changed by tests/decoders.py where that cannot run, in bfloat16; every parameter and
every stored buffer random), applies one plan for each surgery, verifies the output against its base (every byte, and
logits of prefill and cached generation in bfloat16 and in float32) and reverts it (every byte). `apply` itself runs a
step of training on a twin where it attaches something. What each gave (`exact`, or the first line of the reason) is a
line of results/coverage.jsonl, with the versions it was run with. A pair whose plans all have a result is not run again
without `--again`, so the sweep goes on where it was cut off; one of everything anew goes on with `--since` the day on
which it began. Each pair runs in a process of its own with a time limit. The page results/coverage.md and the section
of docs/reference/families.md are written from all lines, at the end of a run or by `--families` alone. With
`--encoders` it runs encoders and control states alone (tests/encoders.py), whose outputs are compared on whole
sequences, some of them padded, and prints a table, also to the file `--to`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
ROWS, PAGE = RESULTS / "coverage.jsonl", RESULTS / "coverage.md"
DOCS = Path(__file__).parent.parent / "docs" / "reference" / "families.md"
BEGIN, END = "<!-- written by `python -m benchmarks.coverage --families` -->", "<!-- until here -->"
# CPU seconds for one pair, and how many times as long it may take where other programs have the cores, or it waits.
LIMIT, PATIENCE = 900, 10
EXACT, NO_CHECKPOINT, NOT_RUN = "exact", "no tiny checkpoint", "not run"
NO_PROMISE = "none"

PLANS = {
    "insert": "{op: insert_layers, where: {every: 1}, init: {kind: copy}}",
    "branch": "{op: control_llm, layers: {every: 1}}",
    "adapters": "{op: gated_adapters, size: 8}",
    "slot": "{op: pmoe_experts, threshold: 1}",
    "states": "{op: mixture_of_control, rank: 4}",
}
_PLAN = "surgeon: 1\nseed: 0\noperations:\n  - {}\n"
ENCODER_PLANS = {"states": PLANS["states"]}
# Saves a tiny checkpoint of a model type and auto class in a folder.
Maker = Callable[..., Path]


@dataclass
class Row:
    """What one model type gave for each surgery; when, with what, and (if kept) in how many seconds."""

    model_type: str
    auto: str
    told: dict[str, str] = field(default_factory=dict)
    seconds: float | None = None
    day: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def order(self) -> tuple[str, str]:
        """Where it stands on the page: by auto class, then by the alphabet."""
        return self.auto, self.model_type


def tried(model_type: str, auto: str, plans: dict[str, str], made: Maker) -> Iterator[tuple[str, str]]:
    """Every plan on a tiny checkpoint of this type, as `made` makes it, each with what it gave."""
    import surgeon
    from surgeon.errors import SurgeonError

    with scratch() as folder:
        try:
            base = made(folder / "base", model_type, auto, dtype="bfloat16")
        except Exception as error:
            yield from dict.fromkeys(plans, f"{NO_CHECKPOINT}: {_line(error)}").items()
            return
        for name, operation in plans.items():
            plan, out = folder / f"{name}.yaml", folder / name
            try:
                plan.write_text(_PLAN.format(operation))
                surgeon.apply(str(plan), str(base), out)
                found = surgeon.verify(str(base), out, windows=2, window=32, dtypes=("auto", "float32"))
                yield name, _outcome(found, base, folder / f"{name}-back", out)
            except SurgeonError as error:
                yield name, _line(error)
            except Exception as error:
                yield name, f"CRASH {type(error).__name__}: {_line(error)}"


def _outcome(found: Any, base: Path, back: Path, out: Path) -> str:
    """What a verified output gave: the promise that it holds, to the bit where that says so, and the way back."""
    import surgeon

    if not found.holds or (found.promise == EXACT and not (found.identical or found.tail_alone)):
        return "DIFFERS"
    if found.promise == NO_PROMISE:
        return NO_PROMISE
    surgeon.revert(out, back)
    return found.promise if _same_bytes(base, back) else "NOT REVERTED"


def in_a_process(model_type: str, auto: str, plans: dict[str, str], limit: int, made: Maker) -> Row:
    """`tried` in a process that is ended after `limit` CPU seconds; what it found until then is kept."""
    from surgeon import __version__

    began = time.perf_counter()
    versions = {name: metadata.version(name) for name in ("transformers", "torch")} | {"surgeon": __version__}
    row = Row(model_type, auto, day=datetime.date.today().isoformat(), versions=versions)
    context = multiprocessing.get_context("fork")
    receives, sends = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sends, model_type, auto, plans, limit, made))
    process.start()
    sends.close()
    reason = ""
    try:
        while len(row.told) < len(plans):
            if not receives.poll(max(0.0, limit * PATIENCE - (time.perf_counter() - began))):
                reason = f"HANG: no result within {limit * PATIENCE} s"
                break
            name, words = receives.recv()
            row.told[name] = words
    except EOFError:
        process.join()
        reason = f"CRASH: the process ended with {process.exitcode}"
        if process.exitcode == -signal.SIGXCPU:
            reason = f"HANG: no result within {limit} CPU seconds"
    process.kill()
    process.join()
    for nth, name in enumerate(list(plans)[len(row.told) :]):
        row.told[name] = NOT_RUN if nth else reason
    row.seconds = round(time.perf_counter() - began, 1)
    return row


def _child(sends: Connection, model_type: str, auto: str, plans: dict[str, str], limit: int, made: Maker) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    warnings.simplefilter("ignore")
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere):
        for found in tried(model_type, auto, plans, made):
            sends.send(found)


def _same_bytes(base: Path, back: Path) -> bool:
    """Whether both folders hold the same tensors, bit for bit, and the same config."""
    import torch
    from safetensors.torch import load_file

    one, other = (
        {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}
        for folder in (base, back)
    )
    # JSON has no infinity: an output's config.json has transformers' word for it.
    texts = [(folder / "config.json").read_text() for folder in (base, back)]
    configs = [json.loads(text, parse_constant=lambda constant: {"__float__": constant}) for text in texts]
    for config in configs:
        # Code beside a type that transformers has is left out of every output, and its name with it.
        config.pop("auto_map", None)
    return configs[0] == configs[1] and one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_PREFIX = "surgeon-coverage-"


def _line(error: BaseException) -> str:
    words = str(error).splitlines()[0] if str(error) else type(error).__name__
    return re.sub(rf"\S*/{_PREFIX}\w+/", "", words).replace("|", "/")[:230]


def read_rows(file: Path = ROWS) -> list[Row]:
    """What was found so far, in the page's order."""
    if not file.exists():
        return []
    return sorted((Row(**json.loads(line)) for line in file.read_text().splitlines()), key=lambda row: row.order)


def keep(rows: Iterable[Row], file: Path = ROWS) -> None:
    """Write all rows, one a line; a sweep that is cut off leaves the file whole."""
    text = "".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in sorted(rows, key=lambda r: r.order))
    staged = file.with_suffix(".part")
    staged.write_text(text)
    staged.replace(file)


_ABOUT = """# Which decoders take which surgery

`python -m benchmarks.coverage`, {versions}, on {days}. Model types of transformers' auto classes for causal and
image-text models: a tiny checkpoint of the type's default config (sizes shrunk, every parameter and every stored
buffer random, bfloat16) and five plans: a copy after every layer (`insert`), a twin beside every layer (`branch`),
gated adapters, a PMoE slot, control states. Each output is
verified against its base (every byte; logits of prefill and cached generation, in bfloat16 and in float32) and reverted
(every byte and the config).
`exact`, or the first line of the reason. "no tiny checkpoint":
the type's default config cannot be built or run by itself here (it lacks a setting that real checkpoints have, wants
a package that is not installed, or is no decoder), which says nothing of real checkpoints of that type.
"not run": these grafts were not run yet.
`coverage.jsonl` has each row's day, versions and seconds.

Where a default config cannot run as it is, `CHANGES` and `WHOLE` in tests/decoders.py say what was changed.
Two of these make a case easier than real checkpoints are: Jamba's layers were made all alike (of its real pattern
single copies are refused, whole periods are exact: tests/end_to_end/test_any_decoder.py), and Gemma 4 is without
embeddings for each layer (with them new layers are exact, branches refused: tests/anatomy/test_parts_of_layers.py).
"""


def page(rows: list[Row]) -> str:
    """The whole page of results."""
    versions = sorted({", ".join(f"{name} {said}" for name, said in row.versions.items()) for row in rows})
    days = sorted({row.day for row in rows})
    span = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"{_ABOUT.format(versions='; '.join(versions), days=span)}\n{table(rows, PLANS)}\n"


def table(rows: list[Row], plans: dict[str, str]) -> str:
    """The rows as Markdown, after how many are exact."""
    counts = ", ".join(f"{name} {sum(row.told.get(name) == 'exact' for row in rows)}" for name in plans)
    lines = [f"exact, of {len(rows)}: {counts}", "", f"| model type | auto class | {' | '.join(plans)} |"]
    lines.append("|---" * (len(plans) + 2) + "|")
    for row in rows:
        auto = row.auto.removeprefix("AutoModelFor")
        told = [row.told.get(name, "") for name in plans]
        same = [words if not n or words == EXACT or words != told[0] else "the same" for n, words in enumerate(told)]
        lines.append(f"| {row.model_type} | {auto} | {' | '.join(same)} |")
    return "\n".join(lines)


def section(rows: list[Row]) -> str:
    """What docs/reference/families.md says of all of them: how many, and which, take which surgery."""
    counts = ", ".join(f"{name} {sum(row.told[name] == EXACT for row in rows)}" for name in PLANS)
    groups: dict[str, list[str]] = {}
    for row in rows:
        groups.setdefault(_group(row), []).append(_named(row))
    head = f"Of {len(rows)} pairs of model type and auto class, exact: {counts}. `*` is the class for images and text."
    lines = [head, "", "| what works | types | which |", "|---|---|---|"]
    for title in (_ALL, _SOME, _EARLIER, _NEW, _REFUSED, _UNBUILT):
        if found := groups.get(title):
            lines.append(f"| {title} | {len(found)} | {', '.join(found)} |")
    return "\n".join(lines)


_ALL = "new layers and every graft"
_SOME = "new layers, and grafts but for those named"
_NEW = "grafts, but no silent new layers after every layer"
_REFUSED = "nothing"
_EARLIER = "new layers; grafts are not run yet"
_UNBUILT = "not tried: the default config gives no tiny checkpoint"


def _group(row: Row) -> str:
    exact = {name for name, words in row.told.items() if words == EXACT}
    if row.told["insert"].startswith(NO_CHECKPOINT):
        return _UNBUILT
    if NOT_RUN in row.told.values() and "insert" in exact:
        return _EARLIER
    if "insert" in exact:
        return _ALL if exact == PLANS.keys() else _SOME
    return _NEW if exact else _REFUSED


def _named(row: Row) -> str:
    # Markdown would take two stars for emphasis.
    name = f"{row.model_type}\\*" if "Image" in row.auto else row.model_type
    if NOT_RUN in row.told.values():
        return name
    lacking = [surgery for surgery in PLANS if surgery != "insert" and row.told[surgery] != EXACT]
    if len(lacking) < len(PLANS) - 1:
        return f"{name} (no {', '.join(lacking)})" if lacking else name
    return f"{name} (no graft)" if row.told["insert"] == EXACT else name


def with_section(text: str, section: str) -> str:
    """The page with this section between its two marks."""
    head, mark, rest = text.partition(f"{BEGIN}\n")
    _, end, tail = rest.partition(f"\n{END}")
    assert mark and end, "docs/reference/families.md has no place for the section"
    return f"{head}{mark}{section}{end}{tail}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("types", nargs="*")
    parser.add_argument("--again", action="store_true", help="also what has a result already")
    parser.add_argument("--since", metavar="DAY", help="also what was run before this day (2026-11-24)")
    parser.add_argument("--limit", type=int, default=LIMIT, help="CPU seconds for one pair")
    parser.add_argument("--families", action="store_true", help="run nothing, write both pages")
    parser.add_argument("--encoders", action="store_true", help="encoders and control states, as a table")
    parser.add_argument("--to", type=Path, help="a file for the encoders' table too")
    asked = parser.parse_args()
    if asked.encoders:
        text = encoders_table(asked.types, limit=asked.limit)
        print(text)
        if asked.to:
            asked.to.write_text(text + "\n")
        return
    if not asked.families:
        since = "9999" if asked.again else asked.since or ""
        sweep(asked.types, since=since, limit=asked.limit)
    rows = read_rows()
    PAGE.write_text(page(rows))
    DOCS.write_text(with_section(DOCS.read_text(), section(rows)))


def encoders_table(types: list[str], *, limit: int) -> str:
    """What encoders of these types (all, if none is named) gave, as Markdown."""
    from tests.encoders import encoders, tiny_encoder

    rows = [
        in_a_process(model_type, auto, ENCODER_PLANS, limit, tiny_encoder)
        for model_type, auto in encoders()
        if not types or model_type in types
    ]
    return table(rows, ENCODER_PLANS)


def sweep(types: list[str], *, since: str, limit: int) -> None:
    """Run the pairs of these types (all, if none is named) that have no result since that day; keep each at once."""
    # Imported once, for the processes of all pairs.
    import torch  # noqa: F401
    import transformers.modeling_utils  # noqa: F401

    from tests.decoders import decoders, tiny_decoder

    rows = {row.order: row for row in read_rows()}
    done = {order for order, row in rows.items() if NOT_RUN not in row.told.values() and row.day >= since}
    for model_type, auto in decoders():
        if (types and model_type not in types) or ((auto, model_type) in done):
            continue
        row = in_a_process(model_type, auto, PLANS, limit, tiny_decoder)
        rows[row.order] = row
        keep(rows.values())
        print(f"{row.seconds:6.1f} s  {model_type} {auto}: {row.told}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
