"""The loss of a base on a text before and after parts of it go, as facts keep it and messages show it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from surgeon.blueprint.blueprint import Claim
from surgeon.common.schema import Many
from surgeon.errors import BadInput, printable
from surgeon.operations.operation import Spec
from surgeon.operations.prepare import OpenedBase

Finite = Annotated[float, Field(allow_inf_nan=False)]


class TextLoss(Spec):
    """Losses on a text, in nats per token over `tokens` predictions: of the base, and without the parts that go."""

    text: str
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    tokens: Annotated[Many, Field(ge=1)]
    before: Finite
    after: Finite


def said_of(cost: TextLoss | None) -> str:
    """Return words for `matched` on a measured loss; empty where none was measured."""
    if cost is None:
        return ""
    grows = f"{cost.after - cost.before:+.4f}"
    return f"; loss on {printable(cost.text)} {cost.before:.4f} → {cost.after:.4f} nats ({grows})"


def claim_of_cost(what: str, cost: TextLoss | None) -> Claim:
    """Return the claim of an operation that takes parts out: none, with the cost where it was measured.

    `what` describes what is gone.
    """
    if cost is None:
        return Claim("none", f"{what}; what that costs was not measured (`text`), and every layer is to be trained on")
    grows = f"{cost.after - cost.before:+.4f} nats a token on {printable(cost.text)} ({cost.tokens:,} tokens)"
    return Claim("none", f"{what}: {grows}; every layer is to be trained on")


def check_first(base: OpenedBase, what: str) -> None:
    """Raise BadInput where an operation before this one changes the base, on which `what` are to be measured."""
    if base.number:
        raise BadInput(
            f"{what} are measured on a text with the base itself: make it the plan's first operation, or apply two"
            " plans"
        )
