"""The common interface of comparisons of an output with its base: a decoder's logits or an encoder's outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from surgeon.models.compare import GrownLoss


class Comparison(Protocol):
    """A comparison of the base's and the output's results on the same tokens, in one mode and one dtype.

    `LogitComparison` and `OutputComparison` are the two kinds. A fact that a kind lacks is None, or the value that it
    has where outputs are identical.
    """

    @property
    def mode(self) -> str:
        """How the models ran: prefill, cached decode, whole sequences."""

    @property
    def dtype(self) -> str:
        """The dtype in which both models ran."""

    @property
    def output(self) -> str:
        """The compared output: `logits`, or an output of an encoder's head."""

    @property
    def tokens(self) -> int:
        """The number of compared positions."""

    @property
    def identical(self) -> bool:
        """Whether every value is bit-identical."""

    @property
    def rounded(self) -> bool:
        """Whether values differ by no more than rounding, as when one function is computed in two ways."""

    @property
    def same_before_tail(self) -> bool:
        """Whether all logits, except those of the base's last V mod 4 tokens, are bit-identical."""

    @property
    def same(self) -> int:
        """The number of positions with the base's values, bit for bit."""

    @property
    def apart(self) -> tuple[float, float] | None:
        """The base's and the output's mean loss at the other positions; None if no such position has a next token."""

    @property
    def max_abs_difference(self) -> float:
        """The largest absolute difference of two values."""

    @property
    def grown(self) -> GrownLoss | None:
        """The cost of new tokens for old ones; None without new tokens."""

    @property
    def next_token(self) -> tuple[float, float, float, float] | None:
        """KL, top-1 agreement, base loss, output loss; None where no next token is predicted."""
