"""The records as a table, a plot of the frontier and a comparison with the papers: benchmarks/results/evidence.md."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from claims import CLAIMS, Claim
from methods import METHODS, PLANNED, SHARES, leader
from records import RESULTS, Records
from scipy import stats

PICTURE = "evidence.png"
# Of the plot, in nats: how far from the middle an end is one of many, and the height of a label.
CROWD, LINE = 0.3, 0.021
Record = dict[str, Any]


class Finals:
    """The full-length runs: by method and share of replay, one a seed."""

    def __init__(self, records: Records) -> None:
        every = list(records.by_key.values())
        self.steps = max((record["steps"] for record in every), default=0)
        self.sweeps = [record for record in every if record["steps"] < self.steps]
        self.of: dict[tuple[str, float], dict[int, Record]] = {}
        for record in every:
            if record["steps"] == self.steps:
                self.of.setdefault((record["method"], record["p"]), {})[record["seed"]] = record
        self.every = every


def write(records: Records) -> None:
    """Make the page and its picture anew."""
    finals = Finals(records)
    if not finals.of:
        print("no full-length run is done yet: nothing to report")
        return
    lines = [*_head(finals), *_start(finals)]
    for share in SHARES:
        lines += _table(finals, share)
    lines += _inits(finals)
    for share in SHARES:
        lines += _claims(finals, share)
    lines += _sweeps(finals)
    _plot(finals, RESULTS / PICTURE)
    (RESULTS / "evidence.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _head(finals: Finals) -> list[str]:
    one = next(iter(next(iter(finals.of.values())).values()))
    machines = sorted({record["machine"] for record in finals.every if "machine" in record})
    runs = sum(len(seeds) for seeds in finals.of.values())
    left = Counter(
        f"p = {share:g}, seed {seed}"
        for method, share, seed in PLANNED
        if seed not in finals.of.get((method, share), {})
    )
    to_make = "; ".join(f"{where}: {count}" for where, count in left.items())
    told = (
        f" **{left.total()} of {len(PLANNED)} planned full runs are still to be made** ({to_make}); the command goes on"
    )
    return [
        "# Learning French, forgetting English",
        "",
        "`python benchmarks/evidence` on an 8M Llama trained on English manual pages. Every run: the model in bfloat16"
        f" with float32 masters, AdamW (0.9, 0.95), {finals.steps} steps of {one['batch']} × {one['length']} tokens,"
        " 5 % warm-up, cosine to a tenth, gradient norm at most 1, documents packed without attention across them."
        " French from four sources by their size; p is the share of rough English stand-in (`en_office`). The rate of"
        " each family is the best sum of both losses in the sweep below.",
        "",
        "French: mean loss a token (nats) over held-out text of the four sources. English: held-out `en_man`, what the"
        " base was trained on, never seen in training. ± is the 95 % interval of the mean over seeds (Student's t);"
        " without ±, fewer than three seeds. Seeds draw the order of the text and every number that a plan draws, and"
        " shift all rows together: rows with different numbers of seeds are compared by the paired differences below.",
        "",
        f"{runs} full runs and {len(finals.sweeps)} of the sweep; {'; '.join(machines)}."
        + (f"{told} with them." if left else ""),
        "",
        f"![English loss against French loss](./{PICTURE})",
        "",
    ]


def _start(finals: Finals) -> list[str]:
    starts = {(record["curve"][0]["en"], record["curve"][0]["fr"]) for record in finals.every}
    if len(starts) > 1:
        raise SystemExit(f"not every run starts at the base's losses: {sorted(starts)}")
    english, french = next(iter(starts))
    return [
        f"At step 0 every one of the {len(finals.every)} runs has the base's losses, equal to the last bit: English"
        f" {english:.4f}, French {french:.4f}.",
        "",
    ]


def _table(finals: Finals, share: float) -> list[str]:
    rows = []
    for method in METHODS:
        seeds = finals.of.get((method.name, share), {})
        if seeds:
            ends = [record["curve"][-1] for record in seeds.values()]
            one = next(iter(seeds.values()))
            start = one["curve"][0]
            forgotten = float(np.mean([end["en"] - start["en"] for end in ends]))
            learned = float(np.mean([start["fr"] - end["fr"] for end in ends]))
            rows.append(
                f"| {method.label} | {one['trainable'] / 1e6:.2f} | {one['rate']:g} | {len(seeds)} |"
                f" {_mean([end['fr'] for end in ends])} | {_mean([end['en'] for end in ends])} |"
                f" {forgotten:+.2f} | {forgotten / learned:.2f} |"
            )
    if not rows:
        return []
    return [
        f"## p = {share:g}",
        "",
        "| trained | numbers, M | rate | seeds | French | English | forgotten | forgotten ÷ learned |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        *rows,
        "",
    ]


def _inits(finals: Finals) -> list[str]:
    lines = []
    for share in SHARES:
        fused = finals.of.get(("ot", share), {})
        ranked = []
        for method in METHODS:
            runs = finals.of.get((method.name, share), {})
            if method.family == "insert" and runs and fused:
                mean = float(np.mean([record["curve"][-1]["fr"] for record in runs.values()]))
                both = [seed for seed in runs if seed in fused]
                beside = [runs[seed]["curve"][-1]["fr"] - fused[seed]["curve"][-1]["fr"] for seed in both]
                forgets = [runs[seed]["curve"][-1]["en"] - fused[seed]["curve"][-1]["en"] for seed in both]
                told = ("0", "0") if method.name == "ot" else (_mean(beside, signed=True), _mean(forgets, signed=True))
                ranked.append((mean, f"| {method.label} | {mean:.3f} | {told[0]} | {told[1]} | {len(runs)} |"))
        if len(ranked) > 1:
            lines += [
                f"## New layers by their start, p = {share:g}",
                "",
                "Best French first; differences to the fused ones are paired by seed.",
                "",
                "| start | French | French − fused's | English − fused's | seeds |",
                "|---|---:|---:|---:|---:|",
                *(line for _, line in sorted(ranked)),
                "",
            ]
    return lines


def _claims(finals: Finals, share: float) -> list[str]:
    judged = [(claim, row) for claim in CLAIMS if (row := _claim(finals, claim, share)) is not None]
    if not judged:
        return []
    rows = [row for _, row in judged]
    against = [claim for claim, row in judged if "disagrees" in row or "against" in row]
    tried = [f"- {claim.says}: {claim.tried}" for claim in against if claim.tried]
    return [
        f"## The papers' rankings and ours, p = {share:g}",
        "",
        "`forgets`: difference in English loss at equal French loss, read off the two curves where the one that learned"
        " less ends (the other is then in the middle of its run, at a higher rate). `learns`: difference in French loss"
        " at the end. Negative is for the paper. `English at the end` is the difference where both have ended, whatever"
        " French they have learned. Pairs share seed and text; the interval is Student's t over seeds.",
        "",
        "| paper | claim | measured | difference | English at the end | seeds | ours |",
        "|---|---|---|---:|---:|---:|---|",
        *rows,
        "",
        f"Agree: {_count(rows, '**agrees**')}. Disagree: {_count(rows, '**disagrees**')}. Not told apart:"
        f" {_count(rows, 'not told apart')}. Too few seeds for an interval: {_count(rows, 'points')}, of which"
        f" {_count(rows, 'points its way')} point the paper's way.",
        "",
        *(["What was tried where a result goes against a paper:", "", *tried, ""] if tried else []),
    ]


def _count(rows: Sequence[str], verdict: str) -> int:
    return sum(f"| {verdict}" in row for row in rows)


def _claim(finals: Finals, claim: Claim, share: float) -> str | None:
    better = finals.of.get((claim.better, share), {})
    worse = finals.of.get((claim.worse, share), {})
    seeds = sorted(set(better) & set(worse))
    if not seeds:
        return None
    if claim.on == "learns":
        found = [better[seed]["curve"][-1]["fr"] - worse[seed]["curve"][-1]["fr"] for seed in seeds]
    else:
        found = [forgetting_apart(better[seed]["curve"], worse[seed]["curve"]) for seed in seeds]
    mean, half = interval(found)
    if half is None:
        verdict = "points its way, one seed" if mean < 0 else "points against it, one seed"
        verdict = verdict.replace("one seed", f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''}")
    elif abs(mean) <= half:
        verdict = "not told apart"
    else:
        verdict = "**agrees**" if mean < 0 else "**disagrees**"
    difference = _mean(found, signed=True)
    ends = [better[seed]["curve"][-1]["en"] - worse[seed]["curve"][-1]["en"] for seed in seeds]
    at_end = _mean(ends, signed=True) if claim.on == "forgets" else ""
    return f"| {claim.paper} | {claim.says} | {claim.on} | {difference} | {at_end} | {len(seeds)} | {verdict} |"


def forgetting_apart(first: Sequence[Record], second: Sequence[Record]) -> float:
    """English loss of `first` minus that of `second` where French loss is equal: where the worse of them ends."""
    level = max(first[-1]["fr"], second[-1]["fr"])
    return english_at(first, level) - english_at(second, level)


def english_at(curve: Sequence[Record], french: float) -> float:
    """English loss where the curve first comes down to a French loss, linear between its points."""
    for earlier, later in itertools.pairwise(curve):
        if later["fr"] <= french:
            done = (earlier["fr"] - french) / (earlier["fr"] - later["fr"])
            return float(earlier["en"] + done * (later["en"] - earlier["en"]))
    return float(curve[-1]["en"])


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean, and half of its 95 % interval by Student's t; None for fewer than three values."""
    mean = float(np.mean(values))
    if len(values) < 3:
        return mean, None
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
    return mean, float(half)


def _mean(values: Sequence[float], *, signed: bool = False) -> str:
    mean, half = interval(values)
    told = f"{mean:+.3f}" if signed else f"{mean:.3f}"
    return told if half is None else f"{told} ± {half:.3f}"


def _sweeps(finals: Finals) -> list[str]:
    steps = max((record["steps"] for record in finals.sweeps), default=0)
    rows = []
    for record in sorted(finals.sweeps, key=lambda r: ([m.name for m in METHODS].index(r["method"]), r["rate"])):
        end = record["curve"][-1]
        rows.append(
            f"| {leader_label(record['method'])} | {record['rate']:g} | {end['fr']:.3f} | {end['en']:.3f} |"
            f" {end['fr'] + end['en']:.3f} |"
        )
    return [
        "## Sweep of the rates",
        "",
        f"{steps} steps, p = 0.1, one seed; the first method of a family sets the rate of all of it.",
        "",
        "| trained | rate | French | English | sum |",
        "|---|---:|---:|---:|---:|",
        *rows,
    ]


def leader_label(name: str) -> str:
    """What the table calls a method that was swept."""
    return next(leader(method.family).label for method in METHODS if method.name == name)


def _plot(finals: Finals, file: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    families = list(dict.fromkeys(method.family for method in METHODS))
    colours = dict(zip(families, (*matplotlib.colormaps["tab20"].colors[::2], (0, 0, 0)), strict=False))
    figure, panels = pyplot.subplots(1, 2, figsize=(15, 7), sharey=True, layout="constrained")
    for panel, share in zip(panels, SHARES, strict=True):
        ends: dict[str, tuple[float, float]] = {}
        for method in METHODS:
            seeds = finals.of.get((method.name, share), {})
            if not seeds:
                continue
            curves = list(seeds.values())
            french = np.mean([[point["fr"] for point in record["curve"]] for record in curves], axis=0)
            english = np.mean([[point["en"] for point in record["curve"]] for record in curves], axis=0)
            panel.plot(
                french[1:],
                english[1:],
                color=colours[method.family],
                alpha=0.8 if method.headline else 0.35,
                linewidth=1.5 if method.headline else 0.8,
                zorder=2,
            )
            panel.scatter(french[-1], english[-1], s=28, color=colours[method.family], zorder=3)
            ends[method.name] = (float(french[-1]), float(english[-1]))
        _label(panel, ends)
        start = next(iter(next(iter(finals.of.values())).values()))["curve"][0]
        panel.axhline(start["en"], color="grey", linewidth=0.8, linestyle=":")
        panel.invert_xaxis()
        panel.set_title(f"p = {share:g}: French learned to the right, English forgotten upwards")
        panel.set_xlabel("French held-out loss (nats a token)")
    panels[0].set_ylabel("English held-out loss (nats a token; dotted: the base)")
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def _label(panel: Any, ends: dict[str, tuple[float, float]]) -> None:
    """Names beside the curves' ends; where these lie close together, in a column to their right with a line to each."""
    middle = float(np.median([french for french, _ in ends.values()]))
    crowd = sorted((name for name in ends if abs(ends[name][0] - middle) < CROWD), key=lambda name: ends[name][1])
    column = min(ends[name][0] for name in crowd) - 0.08
    # Heights at least a line apart, as near to the ends as that allows: pushed upwards, then moved down together.
    heights: list[float] = []
    for name in crowd:
        heights.append(max(ends[name][1], heights[-1] + LINE if heights else -math.inf))
    shift = float(np.mean([height - ends[name][1] for name, height in zip(crowd, heights, strict=True)]))
    at = {name: (column, height - shift) for name, height in zip(crowd, heights, strict=True)}
    for name, end in ends.items():
        if name in at:
            arrow = {"arrowstyle": "-", "color": "grey", "linewidth": 0.4}
            panel.annotate(name, end, xytext=at[name], fontsize=8, va="center", arrowprops=arrow)
        else:
            panel.annotate(name, end, xytext=(4, 3), textcoords="offset points", fontsize=8)
