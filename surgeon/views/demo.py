"""What `surgeon demo` shows at its end."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from surgeon.demo.learning import KNOWN, NEW, Learning
from surgeon.demo.run import Demo
from surgeon.errors import printable
from surgeon.views.terminal import count, preview_view, verification_view


def demo_view(demo: Demo) -> RenderableType:
    """The base, the surgery, the proof, both models writing, and what training taught and cost."""
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
            else "NOT every tensor of the base is in the trained run; look: surgeon verify",
            style="green" if kept.holds else "bold red",
        ),
    ]


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _written(prompt: str, continuation: str) -> str:
    text = continuation if continuation.startswith(prompt) else f"{prompt}{continuation}"
    return " ".join(text.split())
