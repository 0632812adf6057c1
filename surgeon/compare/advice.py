"""The sentences of a study: what full fine-tuning beats, and which run to take."""

from __future__ import annotations

import math
from collections.abc import Sequence

from surgeon.compare.config.schema import Study
from surgeon.compare.findings import Point, Row
from surgeon.compare.frontier import Pair, height


def first_sentence(rows: Sequence[Row]) -> str:
    """What full fine-tuning beats, which is said before anything else; empty where it beats nothing.

    How many runs it beats on both axes says something also where frontiers have no range in common.
    """
    others = [row for row in rows if row.against is not None and row.best is not None and not row.blended]
    runs, beaten = sum(len(row.points) for row in others), sum(row.beaten for row in others)
    more = [row for row in others if row.verdict == "disagrees"]
    if not others or (not more and 2 * beaten < runs):
        return ""
    words = [f"Full fine-tuning with the same remedy beats {beaten} of {runs} runs of other methods on both losses."]
    if more:
        rest = [row for row in others if row not in more]
        # The shorter list is named; labels have commas of their own.
        named = rest if 0 < len(rest) < len(more) else more
        names = ("all but " if named is rest else "") + "; ".join(row.label for row in named)
        words.append(f"It forgets less at equal new loss than {len(more)} of {len(others)}: {names}.")
    open_ = sum(row.verdict in ("no common range", "range too narrow") for row in others)
    few = sum(row.verdict in ("points its way", "points against it") for row in others)
    words += [f"{open_} have too little in common with it to be judged."] * bool(open_)
    words += [f"For {few} more seeds are needed."] * bool(few)
    return " ".join(words)


def advice_of(study: Study, rows: Sequence[Row], corner: Pair) -> str:
    """The row with the smallest sum of losses, its rate, and what full fine-tuning reaches beside it.

    Nothing before every row has a finished run, as the one that lacks might be the best.
    """
    waiting = [row for row in rows if not row.points]
    if waiting:
        return f"No advice before each of the {len(rows)} rows has a finished run: {len(waiting)} have none."
    ranked = sorted((row for row in rows if row.best is not None), key=lambda row: _sum(row.best))
    if not ranked:
        return "Every run diverged: try lower rates."
    row, point = ranked[0], ranked[0].best
    assert point is not None
    if point.new + point.original >= corner[0] + corner[1]:
        return (
            f"At {study.budget_words} a run nothing is worth it here: every run forgets more than it learns"
            f" (nearest: {row.label}, rate {point.shown_rate}). More text, or a gentler remedy, may help."
        )
    words = (
        f"For this data at this budget ({study.budget_words} a run): {row.label}, rate {point.shown_rate}: new loss"
        f" {corner[0]:.3f} → {point.new:.3f}, original {corner[1]:.3f} → {point.original:.3f}"
    )
    return f"{words}; {_beside(row, point, ranked)}{_sureness(row)}."


def _sum(point: Point | None) -> float:
    return math.inf if point is None else point.sum


def _beside(row: Row, point: Point, ranked: Sequence[Row]) -> str:
    """What full fine-tuning with the same remedy reaches; of full fine-tuning itself, what the best other does."""
    peers = [each for each in ranked if each.remedy == row.remedy]
    if row.kind == "full":
        other = next((each for each in peers if each.kind != "full"), None)
        if other is None or other.best is None:
            return "nothing else was tried with this remedy"
        best = other.best
        return f"the best other is {other.label}, rate {best.shown_rate}: {best.new:.3f}, {best.original:.3f}"
    full = next((each for each in peers if each.kind == "full"), None)
    if full is None:
        return "full fine-tuning with the same remedy has no run to compare with"
    frontier = full.mean_frontier()
    if point.new < frontier[0][0]:
        return (
            f"full fine-tuning never learns as much: its lowest new loss is {frontier[0][0]:.3f}, with original"
            f" {frontier[0][1]:.3f}"
        )
    if point.new > frontier[-1][0]:
        return (
            f"full fine-tuning learns more even at its gentlest: new loss {frontier[-1][0]:.3f}, original"
            f" {frontier[-1][1]:.3f}"
        )
    return f"full fine-tuning reaches original {height(frontier, point.new):.3f} at that new loss"


def _sureness(row: Row) -> str:
    """How far the advice is to be trusted."""
    if row.against is None:
        return "" if len(row.seeds()) > 2 else f" ({_seeds(len(row.seeds()))})"
    found = row.against.difference
    if found is None:
        return " (their frontiers have no new loss in common)"
    if not row.against.enough:
        return f" (their frontiers have {row.against.width:.2f} of new loss in common, too little to be judged)"
    if found.half is None:
        return f" ({_seeds(found.seeds)})"
    words = {"agrees": "forgets less than full fine-tuning", "disagrees": "forgets more than full fine-tuning"}
    said = words.get(row.verdict or "", "not told apart from full fine-tuning")
    return f" ({said}: {found.mean:+.3f} ± {found.half:.3f}, {found.seeds} seeds)"


def _seeds(count: int) -> str:
    return f"{count} seed{'' if count == 1 else 's'}: three are needed to tell methods apart"
