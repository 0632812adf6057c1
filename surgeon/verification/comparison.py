"""What every comparison of an output with its base says, whether of a decoder's logits or of an encoder's outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from surgeon.models.compare import GrownLoss


class Comparison(Protocol):
    """The outputs of base and output over the same tokens, in one mode and one dtype.

    `LogitComparison` and `OutputComparison` are the two kinds; a fact that a kind does not have is None, or what it is
    where outputs are identical.
    """

    @property
    def mode(self) -> str:
        """How the models ran: prefill, cached decode, whole sequences."""

    @property
    def dtype(self) -> str:
        """The dtype in which both models ran."""

    @property
    def output(self) -> str:
        """Which output was compared: `logits`, or what an encoder's head returns."""

    @property
    def tokens(self) -> int:
        """How many positions were compared."""

    @property
    def identical(self) -> bool:
        """Whether every value is bit-identical."""

    @property
    def rounded(self) -> bool:
        """Whether values differ by no more than the rounding of one function computed in two ways."""

    @property
    def same_before_tail(self) -> bool:
        """Whether all logits but those of the base's last V mod 4 tokens are bit-identical."""

    @property
    def same(self) -> int:
        """How many positions have the base's values, bit for bit."""

    @property
    def apart(self) -> tuple[float, float] | None:
        """The base's and the output's mean loss at the other positions; None where none of them has a next token."""

    @property
    def max_abs_difference(self) -> float:
        """The largest absolute difference of two values."""

    @property
    def grown(self) -> GrownLoss | None:
        """What new tokens cost old ones; None where there are no new tokens."""

    @property
    def next_token(self) -> tuple[float, float, float, float] | None:
        """KL, top-1 agreement, base loss, output loss; None where no next token is predicted."""
