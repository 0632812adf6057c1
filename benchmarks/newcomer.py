"""A newcomer's first hour, scripted: the wheel in a clean environment, outside the tree, and nothing but messages.

    python -m benchmarks.newcomer --work DIR [--borrow]

Builds the wheel, makes an environment and a small base without a chat template in DIR (which must not exist), and runs
as a user would, at 80 columns: a plan with three mistakes, preview, apply, verify, training on Alpaca data with a
mistake in its config, verify, report, and a push to the stand-in of the Hub that the tests have. A command that is
refused must name the words that its correction uses; every other must succeed. The transcript, with the seconds of
each step, becomes docs/tutorial/first-hour.md. The environment gets the versions of constraints.txt. `--borrow` lends
it the packages of this one, surgeon excepted, where torch shall not be installed again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shlex
import site
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring import machine

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "tutorial" / "first-hour.md"
COLUMNS = 80
NOT_RUN = "<!-- not run: written by benchmarks/newcomer.py, which ran it -->"

INTRODUCTION = """\
What somebody sees who has a wheel of surgeon, a base, some rows of Alpaca data, and mistakes in the first files: each
command, what it wrote at 80 columns, and the processor seconds it took. `python -m benchmarks.newcomer --work DIR` runs
it all in an environment of its own, outside the source tree, and writes this page; it ends with an error where a
refusal does not name the words that the correction uses. The base is a Llama of eight small layers with random weights,
so its losses mean nothing; the Hub is the stand-in of the tests, on the same machine (`HF_ENDPOINT`).
"""

WRONG_PLAN = """\
surgeon: 1
seed: zero
operations:
  - op: insert_layers
    where: upper_half
    init: {kind: ot_fusion}
    zero_inits: true
"""
PLAN = """\
surgeon: 1
seed: 0
operations:
  - op: insert_layers
    where: top_half
    init: {kind: ot_fusion}
    zero_init: true
"""
WRONG_TRAIN = """\
surgeon_train: 1
steps: 20
batch: 4
length: 64
sources:
  - {name: answers, path: alpaca.json, kind: chat, share: 1, validation: 0.1}
"""
TRAIN = WRONG_TRAIN.replace("sources:", "chat_template: chatml\nsources:")

TOPICS = ("bread", "rivers", "clocks", "bridges", "maps", "winter", "violins", "gardens", "ships", "letters")
QUESTIONS = ("Say in one sentence what is good about {}.", "Name the topic.", "Begin a story about {}.")
ANSWERS = (
    "What is good about {} is that many people know them, and that none has to explain why.",
    "The topic is {}.",
    "Long ago, in a town by the sea, everybody spoke of {}, and one child asked why.",
)

# A tokenizer trained on the answers, a model that knows nothing, no chat template, a licence: all that commands read.
BASE = """
import json, sys, torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

rows = json.load(open("alpaca.json"))
made = Tokenizer(models.BPE())
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
made.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
made.train_from_iterator((text for row in rows for text in row.values()), trainer)
PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>").save_pretrained("base")
torch.manual_seed(0)
config = LlamaConfig(vocab_size=made.get_vocab_size(), hidden_size=64, intermediate_size=176, num_hidden_layers=8,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, bos_token_id=0, eos_token_id=1)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained("base")
open("base/README.md", "w").write("---\\nlicense: apache-2.0\\n---\\n\\n# A small Llama that knows nothing yet\\n")
"""

# The stand-in is of the tests: a process of its own, in the tree, until its stdin closes.
STAND_IN = """
import sys
from tests.checkpoint.stand_in_hub import Hub, serve
with serve(Hub({}, exists=False)) as hub:
    print(hub.endpoint, flush=True)
    sys.stdin.read()
"""


@dataclass(frozen=True)
class Step:
    """One command: what the page says before it, a file written first, what its messages must name if it is refused."""

    says: str
    command: str
    writes: tuple[str, str] | None = None
    exits: int = 0
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ran:
    """A step, what it wrote to the terminal, and its processor seconds."""

    step: Step
    output: str
    seconds: float


STEPS = (
    Step("What is this base?", "surgeon inspect base"),
    Step(
        "A plan written from memory, with three mistakes in it.",
        "surgeon preview plan.yaml base",
        ("plan.yaml", WRONG_PLAN),
        2,
        ("integer", "top_half", "zero_init"),
    ),
    Step("All three, corrected by what the messages say.", "surgeon preview plan.yaml base", ("plan.yaml", PLAN)),
    Step("The plan carried out.", "surgeon apply plan.yaml base grown"),
    Step("Is the base still in it, bit by bit?", "surgeon verify base grown"),
    Step(
        "Now it learns to answer. The base has no chat template, which the config forgets; a dry run finds out.",
        "surgeon train grown train.yaml tuned --dry-run",
        ("train.yaml", WRONG_TRAIN),
        2,
        ("chat_template: chatml",),
    ),
    Step(
        "Corrected by the message.",
        "surgeon train grown train.yaml tuned --dry-run",
        ("train.yaml", TRAIN),
    ),
    Step(
        "What the loss will count is what it should count: the run.",
        "surgeon train grown train.yaml tuned",
    ),
    Step("Training changed only what was new?", "surgeon verify base tuned"),
    Step("One page to show to others.", "surgeon report tuned --base base"),
    Step("What would go to the Hub?", "surgeon push tuned user/model --base base --dry-run"),
    Step("The push, verified first.", "surgeon push tuned user/model --base base"),
)


def alpaca() -> str:
    """Rows of instruction, input and output, as a JSON list; some have no input."""
    rows = [
        {
            "instruction": q.format(topic),
            "input": "" if "{}" in q else f"We talk of {topic}.",
            "output": a.format(topic),
        }
        for topic in TOPICS
        for q, a in zip(QUESTIONS, ANSWERS, strict=True)
    ]
    return json.dumps(rows * 4, indent=1) + "\n"


def build_wheel(work: Path) -> Path:
    """The project's wheel, by its build backend."""
    _must([sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--quiet", "--wheel-dir", str(work)])
    return next(work.glob("*.whl"))


def environment(work: Path, wheel: Path, *, borrow: bool) -> Path:
    """A clean environment with surgeon out of the wheel; its folder of programs."""
    _must([sys.executable, "-m", "venv", str(work / "venv")])
    python = work / "venv" / "bin" / "python"
    if borrow:
        # A path in a .pth is only searched: .pth files in it, an editable surgeon's among them, are not read.
        told = subprocess.check_output([python, "-c", "import site; print(site.getsitepackages()[0])"], text=True)
        (Path(told.strip()) / "borrowed.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    known_good = ["-c", str(ROOT / "constraints.txt"), f"{wheel}[report]"]
    extra = ["--no-deps", "--force-reinstall", str(wheel)] if borrow else ["--no-compile", *known_good]
    _must([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *extra])
    return python.parent


def _must(command: list[str]) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"{shlex.join(command)}: {ran.stdout}{ran.stderr}")


@contextmanager
def stand_in() -> Iterator[str]:
    """The address of a Hub on the loopback interface."""
    command = [sys.executable, "-c", STAND_IN]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout
        yield process.stdout.readline().strip()
        process.stdin.close()


def run(step: Step, desk: Path, environ: dict[str, str]) -> Ran:
    """Carry a step out in `desk`.

    Raises:
        SystemExit: its exit code is another than the step's, or its messages lack what the correction needs.
    """
    if step.writes:
        name, content = step.writes
        (desk / name).write_text(content, encoding="utf-8")
    began = processor_seconds()
    done = subprocess.run(
        shlex.split(step.command),
        cwd=desk,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    seconds = processor_seconds() - began
    lacking = [word for word in step.names if word not in done.stdout]
    if done.returncode != step.exits or lacking:
        raise SystemExit(f"{step.command}: exit {done.returncode}, not named: {lacking}\n{done.stdout}")
    return Ran(step, done.stdout, seconds)


def processor_seconds() -> float:
    """Of all processes that this one started and that have ended: what else the machine does is not in it."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def folded(output: str, hidden: dict[str, str]) -> str:
    """Output as a terminal of 80 columns shows it, without the names of this machine."""
    for found, shown in hidden.items():
        output = output.replace(found, shown)
    lines = (line.rstrip() for line in output.strip("\n").splitlines())
    return "\n".join(part.rstrip() for line in lines for part in (re.findall(f".{{1,{COLUMNS}}}", line) or [""]))


def page(setup: list[tuple[str, float]], rans: list[Ran], hidden: dict[str, str], *, borrowed: bool) -> str:
    """docs/tutorial/first-hour.md."""
    lines = ["# The first hour", "", *INTRODUCTION.splitlines(), ""]
    for number, ran in enumerate(rans, 1):
        step = ran.step
        lines += [f"## {number}. {step.command.split()[1]}", "", step.says, ""]
        if step.writes:
            lines += [NOT_RUN, "```yaml", f"# {step.writes[0]}", step.writes[1].rstrip("\n"), "```", ""]
        lines += [NOT_RUN, "```sh", step.command, "```", "", "```text", folded(ran.output, hidden), "```", ""]
        lines += [f"Exit {step.exits}, {ran.seconds:.1f} s.", ""]
    lines += [
        "## Times",
        "",
        f"Processor seconds of one run, of each command with what it started: {machine()}, no GPU. What waits for the",
        "network or a disk is not in them. Times and rates that commands print are of the clock, on a machine that had",
        "other work too.",
        "",
        "| step | exit | seconds |",
        "|---|---|---|",
    ]
    lines += [f"| {name} | 0 | {seconds:.1f} |" for name, seconds in setup]
    lines += [f"| {n}. `{ran.step.command}` | {ran.step.exits} | {ran.seconds:.1f} |" for n, ran in enumerate(rans, 1)]
    total = sum(seconds for _, seconds in setup) + sum(ran.seconds for ran in rans)
    lines += [f"| all | | {total:.1f} |", ""]
    if borrowed:
        lines += [
            "The packages that surgeon depends on were there already (`--borrow`): their installation is not counted."
        ]
    return "\n".join(lines).rstrip("\n") + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="A newcomer's first hour, scripted.")
    parser.add_argument("--work", type=Path, required=True, help="new folder, outside the tree")
    parser.add_argument("--borrow", action="store_true", help="use the packages installed here, surgeon excepted")
    given = parser.parse_args()
    work = given.work.resolve()
    if work.exists() or work.is_relative_to(ROOT):
        raise SystemExit(f"{work}: give a folder that is not there yet, outside the source tree")
    desk = work / "desk"
    desk.mkdir(parents=True)
    setup: list[tuple[str, float]] = []

    def timed(name: str, began: float) -> None:
        setup.append((name, processor_seconds() - began))

    began = processor_seconds()
    wheel = build_wheel(work)
    timed("the wheel built", began)
    began = processor_seconds()
    programs = environment(work, wheel, borrow=given.borrow)
    timed("environment, wheel installed", began)
    left_out = ("HF_", "TRANSFORMERS_", "PYTHON", "SURGEON_", "VIRTUAL_ENV")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    environ |= {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "COLUMNS": str(COLUMNS), "NO_COLOR": "1"}
    environ |= {"HF_HOME": str(work / "hub"), "SURGEON_CACHE": str(work / "cache"), "NO_PROXY": "127.0.0.1"}
    environ |= {"no_proxy": "127.0.0.1", "HF_TOKEN": "hf_" + "x" * 34, "HF_HUB_DISABLE_XET": "1"}
    python = str(programs / "python")
    told = subprocess.check_output([python, "-c", "import surgeon; print(surgeon.__file__)"], cwd=desk, env=environ)
    if not Path(told.decode().strip()).is_relative_to(work):
        raise SystemExit(f"surgeon is not the wheel's: {told.decode().strip()}")
    (desk / "alpaca.json").write_text(alpaca(), encoding="utf-8")
    began = processor_seconds()
    subprocess.run([python, "-c", BASE], cwd=desk, env=environ, check=True, capture_output=True)
    timed("the base made", began)
    rans = []
    with stand_in() as endpoint:
        for step in STEPS:
            rans.append(run(step, desk, environ | {"HF_ENDPOINT": endpoint}))
            print(f"{rans[-1].seconds:6.1f} s  {step.command}", flush=True)
    hidden = {endpoint: "http://127.0.0.1:PORT", str(desk): "~/desk", str(work): "~"}
    PAGE.write_text(page(setup, rans, hidden, borrowed=given.borrow), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
