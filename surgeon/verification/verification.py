"""The result of `surgeon verify`: checks, comparisons of logits, and the verdict, as a value and as text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from surgeon.common.check import Check
from surgeon.common.json_results import plain, plain_fields
from surgeon.common.promises import CONDITION
from surgeon.common.tables import FittedTable
from surgeon.errors import printable

if TYPE_CHECKING:
    from surgeon.models.compare import GrownLoss
    from surgeon.models.compare_streamed import FirstDifference, StreamedComparison
    from surgeon.verification.comparison import Comparison


@dataclass(frozen=True)
class Verification:
    """The result of a verification: whether an output keeps its manifest's promises.

    `checks` are the static checks, `comparisons` the comparisons of logits. `holds` is true when every promise holds;
    where none was made (`promise` none), or the output was `trained` since the surgery, logits may differ. `gated`: a
    domain gate decides which tokens have the base's logits. `tail_alone`: the promise of rounding covers only the
    logits of the base's last V mod 4 tokens; all other logits must be identical.
    """

    promise: str
    checks: list[Check]
    comparisons: list[Comparison] = field(default_factory=list)
    streamed: list[StreamedComparison] = field(default_factory=list)
    tokens: str = ""
    trained: bool = False
    gated: bool = False
    tail_alone: bool = False

    def __repr__(self) -> str:
        checks = f"{sum(check.holds for check in self.checks)} of {len(self.checks)} checks hold"
        return f"Verification(holds={self.holds}, promise {self.promise!r}, identical={self.identical}, {checks})"

    @property
    def identical(self) -> bool | None:
        """Whether all compared logits (and hidden states) were bit-identical; None when none were compared."""
        if not self.comparisons:
            return None
        return self.first_difference is None and all(c.identical for c in self.comparisons)

    @property
    def rounded(self) -> bool | None:
        """Whether all compared logits differ by no more than rounding; None when none were compared."""
        return all(c.rounded for c in self.comparisons) if self.comparisons else None

    @property
    def same_before_tail(self) -> bool:
        """Whether all compared logits, except those of the base's last V mod 4 tokens, were bit-identical."""
        return all(c.same_before_tail for c in self.comparisons)

    @property
    def bounded(self) -> bool | None:
        """Whether new tokens raise the loss on old tokens by no more than promised; None without new tokens."""
        return all(each.kept for each in self.grown.values()) if self.grown else None

    @property
    def grown(self) -> dict[tuple[str, str], GrownLoss]:
        """The cost of new tokens for old ones, by mode and dtype; empty without new tokens."""
        return {(c.mode, c.dtype): c.grown for c in self.comparisons if c.grown is not None}

    @property
    def first_difference(self) -> FirstDifference | None:
        """The first base layer after which hidden states differ, where the comparison went layer by layer."""
        return next((s.first_difference for s in self.streamed if s.first_difference is not None), None)

    @property
    def holds(self) -> bool:
        """Whether every promise of the manifest holds."""
        rounded = self.rounded is not False and (not self.tail_alone or self.same_before_tail)
        same = self.identical is not False or (self.promise == "rounding" and rounded)
        kept = self.promise == "none" or self.trained or (same and self.bounded is not False)
        return kept and all(check.holds for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`.

        Keys:
            `holds`: the verdict (exit 3 where it is false)
            `promise`: the manifest's promise
            `trained`: true if the output was trained since
            `gated`: true if a domain gate decides which tokens have the base's logits
            `checks`: each with `name`, `holds`, `detail`, `note`
            `comparisons`: each with `mode` (`prefill`, `cached decode`; with images also `prefill, image` and `cached
                decode, image`), `dtype`, `tokens`, `identical`, `max_abs_difference`; decoders also `kl`,
                `top1_agreement`, `base_loss`, `out_loss`, `same` (positions with bit-identical logits),
                `same_before_tail` (true if all logits but the base's last V mod 4 tokens' are identical), `apart`
                (base's and output's loss at the other positions, or null), `grown` (new tokens' `added`, `rise`,
                `bound`, `kept`, or null)
            `identical`: true if all comparisons are identical (null: none was made)
            `first_difference`: with `--streamed`, where hidden states begin to differ
            `tail_alone`: true if only the logits of the base's last V mod 4 tokens are promised to rounding, and all
                others exactly
            `tokens`: the source of the tokens
        """
        return plain_fields(self, without=("streamed",)) | {
            "holds": self.holds,
            "identical": self.identical,
            "first_difference": plain(self.first_difference),
        }


def verification_view(verification: Verification) -> RenderableType:
    """Return checks and comparisons, and the verdict in one line."""
    checks = FittedTable(headings=False)
    for check in verification.checks:
        style = "yellow" if check.note else "green" if check.holds else "bold red"
        mark = Text("note" if check.note else "holds" if check.holds else "FAILS", style=style)
        checks.add_row(mark, check.name, check.detail)
    parts: list[RenderableType] = [checks]
    if verification.comparisons:
        parts += [Text(), Text(f"logits on {printable(verification.tokens)}"), _comparisons(verification)]
        parts += _new_tokens(verification)
        parts += _gated_tokens(verification) if verification.gated else []
    difference = verification.first_difference
    if difference is not None:
        parts.append(Text(f"first difference ({difference.mode}): {printable(difference.where)}"))
    return Group(*parts, Text(), verdict(verification))


def verdict(verification: Verification) -> Text:
    """Return the verdict in one line: a broken promise, trained since, not preserving as promised, or exact."""
    if not verification.holds:
        return Text("a promise does not hold", style="bold red")
    if verification.trained:
        logits = "no model ran" if verification.identical is None else "logits are the trained model's"
        return Text(f"trained: every other tensor is the base's, byte for byte ({logits})", style="bold green")
    if verification.promise == "none":
        found = {True: "identical all the same", False: "logits differ", None: "no model ran"}
        return Text(f"not preserving, as promised ({found[verification.identical]})", style="bold yellow")
    if verification.identical is None:
        exact = f"; exact {CONDITION}" if verification.promise == "exact" else ""
        return Text(f"every static promise holds (no model ran{exact})", style="bold green")
    if verification.promise == "rounding" and not verification.identical:
        most = max(c.max_abs_difference for c in verification.comparisons)
        of = " of the base's last V mod 4 tokens" if verification.tail_alone else ""
        return Text(
            f"every promise holds, logits{of} differ by rounding alone (at most {most:.3g})", style="bold green"
        )
    if verification.bounded:
        rise = max(grown.rise for grown in verification.grown.values())
        words = f"every old logit is bit-identical, new tokens cost an old one at most {rise:.4g} nats"
    else:
        words = "every logit is bit-identical"
    return Text(f"exact {CONDITION}, as here: every promise holds, {words}", style="bold green")


def _comparisons(verification: Verification) -> FittedTable:
    """Return a table with a row for each comparison of logits."""
    table = FittedTable("mode", "dtype", names=2)
    for measured in ("tokens", "identical", "max |Δ|", "KL (nats)", "top-1", "base loss", "output loss"):
        table.add_column(measured)
    for c in verification.comparisons:
        table.add_row(
            c.mode,
            c.dtype,
            f"{c.tokens:,}",
            Text("yes", style="green") if c.identical else Text("no", style="yellow"),
            f"{c.max_abs_difference:.3g}",
            *_next_token(c.next_token),
        )
    return table


def _new_tokens(verification: Verification) -> list[RenderableType]:
    """Return lines on what new tokens cost the old ones, and the promised bound; empty without new tokens."""
    return [
        Text(
            f"{mode} ({dtype}): {grown.added:,} new rows raise the loss on an old token by at most"
            f" {grown.rise:.6f} nats; log(1 + k/V) = {grown.bound:.6f}",
            style="" if grown.kept else "bold red",
        )
        for (mode, dtype), grown in verification.grown.items()
    ]


def _gated_tokens(verification: Verification) -> list[RenderableType]:
    """Return lines on how many tokens kept the base's logits by a domain gate, and on the loss of the others."""
    lines: list[RenderableType] = []
    for c in verification.comparisons:
        rest = "" if c.apart is None else f"; on the others the loss is {c.apart[1]:.4f}, the base's {c.apart[0]:.4f}"
        share = f"{c.same:,} of {c.tokens:,} tokens ({c.same / c.tokens:.2%})"
        lines.append(Text(f"domain gate, {c.mode} ({c.dtype}): {share} have the base's logits, bit for bit{rest}"))
    return lines


def _next_token(figures: tuple[float, float, float, float] | None) -> tuple[str, ...]:
    """Return KL, top-1 agreement and both losses as cells; empty cells for an encoder, which predicts no next token."""
    if figures is None:
        return ("",) * 4
    kl, agreement, base_loss, out_loss = figures
    return (f"{kl:.3g}", f"{agreement:.2%}", f"{base_loss:.6f}", f"{out_loss:.6f}")
