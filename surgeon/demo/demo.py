"""`surgeon demo`: make a base, grow it by a plan, prove that nothing was lost, show what training learns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from surgeon.apply.apply import Applied, apply
from surgeon.apply.preview import preview_view
from surgeon.common.formatting import count
from surgeon.common.listener import Listener
from surgeon.demo.base import STEPS_A_SECOND, DemoBase, make_base, sample
from surgeon.demo.corpus import code, documentation
from surgeon.demo.learning import KNOWN, NEW, Learning, learn
from surgeon.errors import BadInput, printable
from surgeon.verify.verify import Verification, verification_view, verify

PLAN = "opt-deus"


PROMPT = "Return the"


WRITTEN_TOKENS = 40


# The grown model's training steps, as a share of the base's.
LEARNING_SHARE = 1 / 3


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
    if folder.exists():
        raise BadInput(f"{printable(str(folder))}: exists; choose another folder: surgeon demo DIR")
    documents = documentation()
    base_folder, out = folder / "base", folder / "grown"
    base_folder.mkdir(parents=True)
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
