"""`surgeon demo`: make a base, grow it by a plan, prove that nothing was lost, show what it learns and forgets."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from surgeon.apply.apply import Applied, apply
from surgeon.apply.preview import preview_view
from surgeon.checkpoint.names import check_new_name
from surgeon.checkpoint.room import writing
from surgeon.common.formatting import count
from surgeon.common.listener import Listener
from surgeon.data.encoding import Encoder
from surgeon.data.packing import Batches
from surgeon.demo.base import STEPS_A_SECOND, DemoBase, code, documentation, make_base, one_thread, sample, split
from surgeon.errors import BadInput, printable
from surgeon.models.load import load_model
from surgeon.train.config import LoadedConfig, Settings, load_config, settle
from surgeon.train.optimizer import make_optimizer, make_schedule
from surgeon.train.publishing import Trained
from surgeon.train.train import train
from surgeon.train.trainer import losses_by_source
from surgeon.train.training_data import TrainingData
from surgeon.verify.verify import Verification, verification_view, verify

PLAN = "opt-deus"
PROMPT = "Return the"
WRITTEN_TOKENS = 40
# The grown model's training steps, as a share of the base's.
LEARNING_SHARE = 1 / 3
KNOWN, NEW = "documentation", "code"
_BATCH, _WINDOW, _RATE = 8, 64, 1e-3
_VALIDATION_SEQUENCES = 64


@dataclass(frozen=True)
class Learning:
    """The results of training the new layers, and of training all of the base on the same sequences at the same rate.

    Losses are held-out, in nats a token, by text (`KNOWN` and `NEW`): `before` of the base, `grown` and `whole` of
    the two after `steps` steps. `numbers` are how many train in each. `verification` compares the grown run with the
    base.
    """

    trained: Trained
    verification: Verification
    steps: int
    tokens: int
    before: dict[str, float]
    grown: dict[str, float]
    whole: dict[str, float]
    numbers: tuple[int, int]
    seconds: tuple[float, float]


@dataclass(frozen=True)
class Demo:
    """The results of a demo: the base, the surgery, its proof, texts of both models, and the training."""

    folder: Path
    base: DemoBase
    applied: Applied
    verification: Verification
    prompt: str
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
    listener.begin("training", 1000)
    done = 0

    def show(fraction: float, _words: str) -> None:
        nonlocal done
        step = int(fraction * 1000) - done
        done += step
        listener.advance(step)

    base = make_base(base_folder, documents=documents, seconds=seconds, seed=seed, progress=show)
    listener.say(f"growing it by the shipped plan {PLAN}")
    applied = apply(PLAN, str(base_folder), out, listener=listener)
    listener.say("verifying: bytes, then logits in prefill and cached decode")
    verification = verify(base_folder, out, dtypes=("auto", "float32"), listener=listener)
    base_writes, out_writes = (sample(each, PROMPT, WRITTEN_TOKENS) for each in (base_folder, out))
    steps = max(1, round(seconds * STEPS_A_SECOND * LEARNING_SHARE))
    listener.say("training the new layers on the library's code, which the base has never seen")
    learning = learn(
        base_folder, out, folder / "run", known=documents, new=code(), steps=steps, seed=seed, listener=listener
    )
    return Demo(
        folder=folder,
        base=base,
        applied=applied,
        verification=verification,
        prompt=PROMPT,
        base_writes=base_writes,
        out_writes=out_writes,
        learning=learning,
    )


def learn(
    base: Path, out: Path, run: Path, *, known: list[str], new: list[str], steps: int, seed: int, listener: Listener
) -> Learning:
    """Train the new layers of `out` on `new` by `surgeon train`, to `run`; train all of `base` too, without saving it.

    `known` are the documents that `base` was made of; only its held-out ones are read, to measure forgetting. Raises
    BadInput, PromiseBroken and WrongSet as `train` and `verify` do.
    """
    config = _write_config(run.parent, known=known, new=new, steps=steps, seed=seed)
    with one_thread():
        trained = train(out, config, run, device="cpu", listener=listener)
        assert trained is not None
        listener.say("training all of the base on the same text for the same number of steps, to compare")
        began = time.monotonic()
        numbers, whole = _train_whole(base, load_config(config), trained.operations, listener)
        seconds = time.monotonic() - began
    return Learning(
        trained=trained,
        verification=verify(base, run, logits=False, listener=listener),
        steps=steps,
        tokens=trained.tokens,
        before={name: losses[0] for name, losses in trained.losses.items()},
        grown={name: losses[1] for name, losses in trained.losses.items()},
        whole=whole,
        numbers=(trained.parameters, numbers),
        seconds=(trained.seconds, seconds),
    )


def _write_config(folder: Path, *, known: list[str], new: list[str], steps: int, seed: int) -> Path:
    """Write texts/ and train.yaml into `folder`, as a user does for `surgeon train`."""
    texts = folder / "texts"
    texts.mkdir()
    to_learn, aside = split(new)
    _json_lines(texts / f"{NEW}.jsonl", to_learn)
    _json_lines(texts / f"{NEW}-held-out.jsonl", aside)
    _json_lines(texts / f"{KNOWN}-held-out.jsonl", split(known)[1])
    path = folder / "train.yaml"
    path.write_text(
        f"""# The known text is not trained on again: its share is 0, and its held-out loss shows what is forgotten.
surgeon_train: 1
steps: {steps}
seed: {seed}
batch: {_BATCH}
length: {_WINDOW}
dtype: float32
optimizer: {{lr: {_RATE}, warmup: 0.05}}
validation_sequences: {_VALIDATION_SEQUENCES}
sources:
  - {{name: {NEW}, path: texts/{NEW}.jsonl, share: 1.0, validation: texts/{NEW}-held-out.jsonl}}
  - name: {KNOWN}
    path: texts/{KNOWN}-held-out.jsonl
    share: 0.0
    role: original
    validation: texts/{KNOWN}-held-out.jsonl
""",
        encoding="utf-8",
    )
    return path


def _json_lines(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def _train_whole(
    base: Path, loaded: LoadedConfig, operations: tuple[str, ...], listener: Listener
) -> tuple[int, dict[str, float]]:
    """Full fine-tuning of `base` by the config, on the sequences of `surgeon train` in its order.

    Returns how many numbers train, and the held-out losses at the end.
    """
    model = load_model(base, dtype="float32")
    settings, _ = settle(loaded, operations, context=model.config.max_position_embeddings, processes=1)
    encoder = Encoder(base, vocabulary=model.config.vocab_size)
    data = TrainingData.open(loaded, settings, encoder, listener.say)
    batches = Batches(data.mixture, micro_batch=settings.batch, process=0, processes=1, domains=False)
    _descend(model, settings, batches, listener)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    return numbers, losses_by_source(model, data.validation, micro_batch=settings.micro_batch)


def _descend(model: Any, settings: Settings, batches: Batches, listener: Listener) -> None:
    model.train()
    decayed = {name for name, parameter in model.named_parameters() if parameter.dim() > 1}
    optimizer = make_optimizer(model, settings, decayed=decayed)
    schedule = make_schedule(optimizer, settings)
    listener.begin("training", settings.steps, "steps")
    for _, batch in zip(range(settings.steps), batches, strict=False):
        model(**batch, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        listener.advance(1)


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
        Text.assemble(("base   ", "cyan"), _written(demo.prompt, demo.base_writes)),
        Text.assemble(("grown  ", "green"), _written(demo.prompt, demo.out_writes)),
        _title("5  what it learns and forgets"),
        *_learning(demo.learning),
        Text(),
        Text(
            f"Look at it: surgeon inspect {printable(str(demo.learning.trained.path))};"
            " the plan: surgeon plans opt-deus;"
            f' load it: AutoModelForCausalLM.from_pretrained("{printable(str(demo.applied.path))}")',
            style="dim",
        ),
    )


def _learning(learning: Learning) -> list[RenderableType]:
    steps = (
        f"{learning.steps} steps of {learning.tokens // learning.steps} tokens of Python code, none of documentation"
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("held-out loss, nats a token")
    for heading in (f"{NEW} (new)", f"{KNOWN} (known)", "numbers trained", "time"):
        table.add_column(heading, justify="right")
    table.add_row("the base", f"{learning.before[NEW]:.3f}", f"{learning.before[KNOWN]:.3f}", "", "")
    rows = (("grown, new layers trained", learning.grown), ("all of the base trained", learning.whole))
    for (name, after), numbers, seconds in zip(rows, learning.numbers, learning.seconds, strict=True):
        changes = (f"{after[text]:.3f} ({after[text] - learning.before[text]:+.3f})" for text in (NEW, KNOWN))
        table.add_row(name, *changes, count(numbers), f"{seconds:.0f} s")
    kept = learning.verification
    return [
        Text(f"{steps}; both at the same rate"),
        Padding(table, (0, 0, 0, 2), expand=False),
        Text(
            "every tensor of the base is byte for byte in the trained run"
            if kept.holds
            else "NOT every tensor of the base is in the trained run; see: surgeon verify",
            style="green" if kept.holds else "bold red",
        ),
    ]


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _written(prompt: str, continuation: str) -> str:
    text = continuation if continuation.startswith(prompt) else f"{prompt}{continuation}"
    return " ".join(text.split())
