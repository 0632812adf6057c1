"""`surgeon demo`: make a base, grow it by a plan, prove that nothing was lost, show what it learns and forgets."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from surgeon import (
    Applied,
    Trained,
    Verification,
    apply,
    evaluate,
    preview_view,
    recall,
    train,
    verification_view,
    verify,
)
from surgeon.common.devices import one_thread
from surgeon.common.disk_space import writing
from surgeon.common.formatting import count
from surgeon.common.listener import Listener
from surgeon.common.names import check_new_name
from surgeon.errors import BadInput, printable
from surgeon.lab.demonstration.base import STEPS_A_SECOND, DemoBase, code, documentation, make_base, split

PLAN, GATED_PLAN = "opt-deus", "domain-gate/layers"
PROMPT = "Return the"
WRITTEN_TOKENS = 40
# The training steps of every run, as a share of the base's.
LEARNING_SHARE = 1 / 5
KNOWN, NEW, RECALLED = "documentation", "code", "recalled"
# Of a run that remembers, how much of its text the base wrote; and how many tokens it writes for each that is replayed.
REPLAYED, WRITTEN = 0.25, 0.5
_BATCH, _WINDOW = 8, 64
# Peak rates, as benchmarks/results/frontier_en-llama-8m.md found them for either with recalled text and a teacher.
_RATE, _WHOLE_RATE = 1e-3, 3e-4
_VALIDATION_SEQUENCES = 64
# The longest text that the base writes, in tokens.
_DOCUMENT = 512


@dataclass(frozen=True)
class Run:
    """One row: what `surgeon train` made at the peak `rate`, and how the table calls it."""

    called: str
    rate: float
    trained: Trained


@dataclass(frozen=True)
class Learning:
    """What several ways to train on the same new text learn and forget, in as many steps.

    Losses are held-out, in nats a token, by text (`KNOWN` and `NEW`): `before` of the base, `runs[…].trained.losses`
    of every run. `verification` compares the first run, of which only the new layers were trained, with the base.
    """

    runs: tuple[Run, ...]
    verification: Verification
    steps: int
    before: dict[str, float]


@dataclass(frozen=True)
class Demo:
    """The results of a demo: the base, the surgery, its proof, texts of both models, and the training."""

    base: DemoBase
    applied: Applied
    verification: Verification
    base_writes: str
    out_writes: str
    learning: Learning

    @property
    def holds(self) -> bool:
        """Whether every promise of the surgery and of the training run holds."""
        return self.verification.holds and self.learning.verification.holds


def run_demo(folder: Path, *, seconds: float = 25.0, seed: int = 0, listener: Listener) -> Demo:
    """Run the demo into the new folder `folder`: `base/`, `grown/` and `run/`.

    `seconds` is about what the base's training takes on one core; the later steps scale with it. Raises BadInput where
    the folder exists; PromiseBroken and WrongSet as `verify` and `train` do.
    """
    check_new_name(folder)
    if os.path.lexists(folder):
        raise BadInput(f"{printable(str(folder))}: exists; choose another folder: surgeon demo DIR")
    with writing(folder, kept="remove the folder first"):
        return _run_demo(folder, seconds=seconds, seed=seed, listener=listener)


def _run_demo(folder: Path, *, seconds: float, seed: int, listener: Listener) -> Demo:
    """`run_demo`, where there is nothing at `folder`."""
    documents = documentation()
    base_folder, out = folder / "base", folder / "grown"
    try:
        base_folder.mkdir(parents=True)
    except OSError as error:
        raise BadInput(f"{printable(str(folder))}: cannot be made ({error.strerror}); choose another folder") from None
    listener.say(f"training a small Llama on Python's own documentation (about {seconds:.0f} s)")
    base = make_base(base_folder, documents, seconds=seconds, seed=seed, listener=listener)
    listener.say(f"growing it by the shipped plan {PLAN}")
    applied = apply(PLAN, str(base_folder), out, listener=listener)
    listener.say("verifying: bytes, then logits in prefill and cached decode")
    verification = verify(base_folder, out, dtypes=("auto", "float32"), listener=listener)
    written = evaluate(out, base=base_folder, prompts=PROMPT, answer_tokens=WRITTEN_TOKENS, device="cpu")
    base_writes, out_writes = (row.answers[0].text for row in written.models)
    steps = max(1, round(seconds * STEPS_A_SECOND * LEARNING_SHARE))
    learning = learn(base_folder, out, folder, known=documents, new=code(), steps=steps, seed=seed, listener=listener)
    return Demo(base, applied, verification, base_writes, out_writes, learning)


def learn(
    base: Path, out: Path, folder: Path, *, known: list[str], new: list[str], steps: int, seed: int, listener: Listener
) -> Learning:
    """Train on `new` by `surgeon train`, to `folder`/run…: the new layers of `out`, and all of `base`.

    Both are trained without anything against forgetting, and with the same remedies; the layers behind a gate too.

    `known` are the documents that `base` was made of; only its held-out ones are read, to measure forgetting: what is
    replayed, and what the gate is fitted on, the base writes. Raises BadInput, PromiseBroken and WrongSet as `train`
    and `verify` do.
    """
    texts = folder / "texts"
    _write_texts(texts, known=known, new=new)
    with one_thread():
        listener.say("having the base write text of its own, to be replayed")
        # In a demo of a second or two, one document.
        tokens = max(_DOCUMENT, round(WRITTEN * REPLAYED * steps * _BATCH * _WINDOW))
        recall(
            base,
            tokens=tokens,
            length=_DOCUMENT,
            to=texts / f"{RECALLED}.jsonl",
            seed=seed,
            device="cpu",
            listener=listener,
        )
        listener.say(f"growing the base by the shipped plan {GATED_PLAN} too")
        gated = apply(GATED_PLAN, str(base), folder / "gated", listener=listener).path
        runs = []
        for called, name, model, rate, remedies in (
            ("new layers", "run", out, _RATE, ()),
            ("all of the base", "run-whole", base, _WHOLE_RATE, ()),
            ("new layers, recalled + teacher", "run-recalled", out, _RATE, ("recalled", "teacher")),
            ("all of the base, recalled + teacher", "run-whole-recalled", base, _WHOLE_RATE, ("recalled", "teacher")),
            ("new layers behind a gate, recalled", "run-gated", gated, _RATE, ("recalled",)),
        ):
            listener.say(f"training: {called}")
            what = "base" if model == base else "last"
            config = _write_config(folder / f"{name}.yaml", what, rate, remedies, steps=steps, seed=seed)
            trained = train(model, config, folder / name, device="cpu", listener=listener)
            assert trained is not None
            runs.append(Run(called, rate, trained))
    first = runs[0].trained
    return Learning(
        runs=tuple(runs),
        verification=verify(base, first.path, logits=False, listener=listener),
        steps=steps,
        before={name: losses[0] for name, losses in first.losses.items()},
    )


def _write_texts(folder: Path, *, known: list[str], new: list[str]) -> None:
    """The texts, as files of JSON lines; of what is known the held-out part alone."""
    folder.mkdir()
    to_learn, aside = split(new)
    _json_lines(folder / f"{NEW}.jsonl", to_learn)
    _json_lines(folder / f"{NEW}-held-out.jsonl", aside)
    _json_lines(folder / f"{KNOWN}-held-out.jsonl", split(known)[1])


def _write_config(path: Path, what: str, rate: float, remedies: Collection[str] = (), *, steps: int, seed: int) -> Path:
    """A config, as a user writes it for `surgeon train`; `remedies`: recalled (text that the base wrote), teacher."""
    share = REPLAYED if "recalled" in remedies else 0.0
    lines = [
        "# The known text is not trained on: its share is 0, and its held-out loss shows what is forgotten.",
        "surgeon_train: 1",
        f"steps: {steps}",
        f"seed: {seed}",
        f"batch: {_BATCH}",
        f"length: {_WINDOW}",
        "dtype: float32",
        f"what: {what}",
        f"optimizer: {{lr: {rate}, warmup: 0.05}}",
        f"validation_sequences: {_VALIDATION_SEQUENCES}",
        *(["preserve: {loss: kl}"] if "teacher" in remedies else []),
        # What the base wrote is among the sources already.
        *(["recall_for_gate: 0"] if share else []),
        "sources:",
        f"  - {{name: {NEW}, path: texts/{NEW}.jsonl, share: {1 - share}, validation: texts/{NEW}-held-out.jsonl}}",
        f"  - name: {KNOWN}",
        f"    path: texts/{KNOWN}-held-out.jsonl",
        "    share: 0.0",
        "    role: original",
        f"    validation: texts/{KNOWN}-held-out.jsonl",
    ]
    if share:
        lines.append(
            f"  - {{name: {RECALLED}, path: texts/{RECALLED}.jsonl, share: {share}, role: original, validation: 0.1}}"
        )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _json_lines(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def demo_view(demo: Demo) -> RenderableType:
    """The base, the surgery, the proof, both models' texts, and what training learnt and cost."""
    base = demo.base
    return Group(
        _title("1  the base"),
        Text(
            f"{count(base.parameters)} parameters, {base.tokens_trained:,} tokens of Python's documentation,"
            f" {base.seconds:.0f} s; held-out loss {base.validation_loss_before:.2f} → {base.validation_loss:.2f} nats"
        ),
        _title("2  the surgery"),
        Padding(preview_view(demo.applied.preview, str(base.folder)), (0, 0, 0, 2), expand=False),
        _title("3  the proof"),
        Padding(verification_view(demo.verification), (0, 0, 0, 2), expand=False),
        _title("4  both write, greedily"),
        Text.assemble(("base   ", "cyan"), _written(demo.base_writes)),
        Text.assemble(("grown  ", "green"), _written(demo.out_writes)),
        _title("5  what it learns and forgets"),
        *_learning(demo.learning),
        Text(),
        Text(
            f"Look at it: surgeon inspect {printable(str(demo.learning.runs[0].trained.path))};"
            " the plan: surgeon plans opt-deus;"
            f' load it: AutoModelForCausalLM.from_pretrained("{printable(str(demo.applied.path))}")',
            style="dim",
        ),
    )


def _learning(learning: Learning) -> list[RenderableType]:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("what is trained")
    for heading in ("rate", f"{NEW} (new)", f"{KNOWN} (known)", "numbers trained", "time"):
        table.add_column(heading, justify="right")
    table.add_row("nothing: the base", "", f"{learning.before[NEW]:.3f}", f"{learning.before[KNOWN]:.3f}", "", "")
    for run in learning.runs:
        after = {name: losses[1] for name, losses in run.trained.losses.items()}
        changes = (f"{after[text]:.3f} ({after[text] - learning.before[text]:+.3f})" for text in (NEW, KNOWN))
        table.add_row(
            run.called, f"{run.rate:g}", *changes, f"{run.trained.parameters:,}", f"{run.trained.seconds:.0f} s"
        )
    kept = learning.verification
    return [
        Text(
            f"held-out loss, nats a token, in windows of {_WINDOW} tokens, after {learning.steps} steps of"
            f" {_BATCH * _WINDOW} tokens of Python code, none of the documentation"
        ),
        Padding(table, (0, 0, 0, 2), expand=False),
        Text(
            f"recalled: the base wrote {REPLAYED:.0%} of the text; teacher: a KL term that keeps to the base on it;"
            " rows with the same remedies compare"
        ),
        Text(
            "every tensor of the base is byte for byte in the run with new layers"
            if kept.holds
            else "NOT every tensor of the base is in the run with new layers; see: surgeon verify",
            style="green" if kept.holds else "bold red",
        ),
    ]


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _written(continuation: str) -> str:
    return " ".join(f"{PROMPT}{continuation}".split())
