"""The loss of a base on a text before and after parts of it go, as facts keep it and messages show it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from surgeon.common.schema import Many
from surgeon.errors import printable
from surgeon.operations.operation import Spec

Finite = Annotated[float, Field(allow_inf_nan=False)]


class TextLoss(Spec):
    """Losses on a text, in nats per token over `tokens` predictions: of the base, and without the parts that go."""

    text: str
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    tokens: Annotated[Many, Field(ge=1)]
    before: Finite
    after: Finite

    @property
    def a_token(self) -> str:
        """Describe the growth in words."""
        return f"{self.after - self.before:+.4f} nats a token on {printable(self.text)} ({self.tokens:,} tokens)"


def said_of(cost: TextLoss | None) -> str:
    """Return words for `matched` on a measured loss; empty where none was measured."""
    if cost is None:
        return ""
    grows = f"{cost.after - cost.before:+.4f}"
    return f"; loss on {printable(cost.text)} {cost.before:.4f} → {cost.after:.4f} nats ({grows})"
