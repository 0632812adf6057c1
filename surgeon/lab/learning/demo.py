"""`surgeon demo`: make a base, grow it by a plan, prove that nothing was lost, and show what it learns and forgets."""

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
from surgeon.lab.learning.base import STEPS_A_SECOND, DemoBase, code, documentation, make_base, split

PLAN, GATED_PLAN = "opt-deus", "domain-gate/layers"
PROMPT = "Return the"
WRITTEN_TOKENS = 40
# The training steps of every run, as a share of the base's steps.
LEARNING_SHARE = 1 / 5
KNOWN, NEW, RECALLED = "documentation", "code", "recalled"
# For runs with recalled text: the share of recalled text, and the tokens that the base writes per replayed token.
REPLAYED, WRITTEN = 0.25, 0.5
_BATCH, _WINDOW = 8, 64
# Peak rates for new layers and for all of the base, from benchmarks/results/frontier_en-llama-8m.md (with recalled text
# and a teacher).
_RATE, _WHOLE_RATE = 1e-3, 3e-4
_VALIDATION_SEQUENCES = 64
# The longest text that the base writes, in tokens.
_DOCUMENT = 512


@dataclass(frozen=True)
class Run:
    """One row of the table: its name, the peak learning rate, and the result of `surgeon train`."""

    called: str
    rate: float
    trained: Trained


@dataclass(frozen=True)
class Learning:
    """What several ways of training on the same new text learn and forget, with the same number of steps.

    Losses are held-out losses in nats a token, by text (`KNOWN` and `NEW`): `before` of the base,
    `runs[…].trained.losses` of every run. `verification` compares the first run, in which only the new layers trained,
    with the base.
    """

    runs: tuple[Run, ...]
    verification: Verification
    steps: int
    before: dict[str, float]


@dataclass(frozen=True)
class Demo:
    """The results of a demo: the base, the surgery, its proof, texts that both models wrote, and the training runs."""

    base: DemoBase
    applied: Applied
    verification: Verification
    base_writes: str
    out_writes: str
    learning: Learning

    @property
    def holds(self) -> bool:
        """Whether all promises of the surgery and of the first training run hold."""
        return self.verification.holds and self.learning.verification.holds


def run_demo(folder: Path, *, seconds: float = 25.0, seed: int = 0, listener: Listener) -> Demo:
    """Run the demo in the new folder `folder`, with the subfolders `base/`, `grown/`, `gated/`, `texts/` and `run…/`.

    `seconds` is about the base's training time on one core; the later steps scale with it. Raises BadInput where the
    folder exists; PromiseBroken and WrongSet as `verify` and `train` do.
    """
    check_new_name(folder)
    if os.path.lexists(folder):
        raise BadInput(f"{printable(str(folder))}: exists; choose another folder: surgeon demo DIR")
    with writing(folder, kept="remove the folder first"):
        return _run_demo(folder, seconds=seconds, seed=seed, listener=listener)


def _run_demo(folder: Path, *, seconds: float, seed: int, listener: Listener) -> Demo:
    """Carry out `run_demo`, after the check that `folder` does not exist."""
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
    """Train on `new` with `surgeon train`, into `folder`/run…: the new layers of `out`, and all of `base`.

    Both are trained without anything against forgetting, and with the same remedies; new layers behind a gate are
    trained too.

    `known` are the documents that `base` was trained on; only its held-out part is read, to measure forgetting. The
    base itself writes the text that is replayed and the text on which the gate is fitted. Raises BadInput,
    PromiseBroken and WrongSet as `train` and `verify` do.
    """
    texts = folder / "texts"
    _write_texts(texts, known=known, new=new)
    with one_thread():
        listener.say("having the base write text of its own, to be replayed")
        # At least one document, which a demo of a second or two needs.
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
    """Write the texts as files of JSON lines; of the known text, only the held-out part."""
    folder.mkdir()
    to_learn, aside = split(new)
    _json_lines(folder / f"{NEW}.jsonl", to_learn)
    _json_lines(folder / f"{NEW}-held-out.jsonl", aside)
    _json_lines(folder / f"{KNOWN}-held-out.jsonl", split(known)[1])


def _write_config(path: Path, what: str, rate: float, remedies: Collection[str] = (), *, steps: int, seed: int) -> Path:
    """Write a config as a user would for `surgeon train`; `remedies`: recalled (text that the base wrote), teacher."""
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
        # The text that the base wrote is among the sources already.
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
    """Write the texts to `path` as JSON lines with the key `text`."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def demo_view(demo: Demo) -> RenderableType:
    """Return the demo for the terminal: base, surgery, proof, both models' texts, and the results of training."""
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
    """Return a table of what each run learned and forgot, with its notes."""
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
    """Return a section's title, with an empty line before it."""
    return Text(f"\n{text}", style="bold")


def _written(continuation: str) -> str:
    """Return the prompt with a model's continuation, on one line."""
    return " ".join(f"{PROMPT}{continuation}".split())
