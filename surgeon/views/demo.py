"""What `surgeon demo` shows at its end."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from surgeon.demo.run import Demo
from surgeon.errors import printable
from surgeon.views.terminal import count, preview_view, verification_view


def demo_view(demo: Demo) -> RenderableType:
    """The base, the surgery, the proof, and both models writing."""
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
        Text(),
        Text(
            f"Look at it: surgeon inspect {printable(str(demo.applied.path))}; the plan: surgeon plans opt-deus;"
            f' load it: AutoModelForCausalLM.from_pretrained("{printable(str(demo.applied.path))}")',
            style="dim",
        ),
    )


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _written(prompt: str, continuation: str) -> str:
    text = continuation if continuation.startswith(prompt) else f"{prompt}{continuation}"
    return " ".join(text.split())
