"""The page of a study: what full fine-tuning beats, the advice, frontiers, tables, claims, what is still missing."""

from __future__ import annotations

from collections.abc import Mapping

from surgeon.common.formatting import count
from surgeon.common.page.document import document, facts
from surgeon.common.page.markup import Child, Markup, el, figure, folded, section, table
from surgeon.compare.findings import Findings
from surgeon.compare.frontier import Interval
from surgeon.compare.panels import panels_of
from surgeon.compare.verdicts import NARROW, NARROW_SHARE

# What verdicts on "forgets less" say of a row.
_FORGETS = {
    "agrees": "less",
    "disagrees": "more",
    "points its way": "points to less",
    "points against it": "points to more",
}


_BLENDS = " `blended`: runs, and each blended with what it began with, which costs no training."
# Where runs are chosen by other documents than those that are reported.
_CHOSEN = (
    " Rates, and the runs that a frontier joins, were chosen by losses on other held-out documents than those that are"
    " reported."
)


def render(found: Findings) -> str:
    """The page as HTML."""
    new, original = found.start
    budget = found.budget
    runs = sum(row.runs for row in found.rows)
    state = f"incomplete: {len(found.missing)} rows lack runs" if found.missing else "complete"
    top: list[Child] = [
        el("h1", f"Learning without forgetting on {found.base}"),
        el("p", f"{runs} finished runs by `surgeon compare`; losses in {found.unit}, on held-out text", class_="soft"),
        *([el("p", found.first, class_="warn")] if found.first else []),
        el("p", found.advice),
        facts(
            [
                ("base, new text", f"{new:.4f}", None),
                ("base, original text", f"{original:.4f}", None),
                *_text(budget),
                ("steps", f"{_steps(found)} of {budget['batch']} × {budget['length']}", None),
                ("seeds", str(budget["seeds"]), "warn" if budget["seeds"] < 3 else None),
                ("study", state, "warn" if found.missing else "good"),
            ]
        ),
    ]
    sections = {
        "frontiers": ("Frontiers", _frontiers(found)),
        "methods": ("Methods", _methods(found)),
        "remedies": ("Remedies", _remedies(found)),
        "claims": ("Claims", _claims(found)),
        "runs": ("Runs", _runs(found)),
        "missing": ("Still to be made", _missing(found)),
        "how": ("How it is compared", _how(found)),
    }
    return document(f"{found.base}: surgeon's comparison", "comparison", top, sections)


def _text(budget: Mapping[str, int]) -> list[tuple[str, str, None]]:
    """How much text a run has, as a fact."""
    unit = "bytes" if "bytes" in budget else "tokens"
    return [(f"{unit} a run", f"{budget[unit]:,}", None)]


def _steps(found: Findings) -> str:
    """The steps of a run: one number, or from the fewest to the most where runs have equal bytes."""
    made = sorted({row.steps for row in found.rows if row.steps} or {found.budget.get("steps", 0)})
    return f"{made[0]:,}" if len(made) == 1 else f"{made[0]:,} to {made[-1]:,}"


def _equal(budget: Mapping[str, int]) -> str:
    return f", as many as have {budget['bytes']:,} bytes of new text," if "bytes" in budget else ""


def _frontiers(found: Findings) -> Markup | None:
    """A panel for each method, the remedies in one, full fine-tuning in grey in each."""
    drawn = panels_of(found)
    if drawn is None:
        return None
    charts = [
        figure(drawn.figure(panel, f"frontier-{nth}"), el("strong", panel.title))
        for nth, panel in enumerate(drawn.panels)
    ]
    return section(
        "frontiers",
        "Frontiers",
        el(
            "p",
            "Learned is how far the loss on new text fell, forgotten how far the loss on original text rose: lower"
            " right is better. Each point is a finished run at one rate, seeds in the mean. Lines join the points that"
            " no other run of the method beats on both axes; faint points are beaten. Grey is full fine-tuning. Thin"
            " crosses are 95 % intervals over at least three seeds. A triangle at the rim points to a value beyond it."
            " Methods with the smallest area come first." + (_BLENDS if any(row.blended for row in found.rows) else ""),
        ),
        el("div", *charts, class_="panels"),
    )


def _methods(found: Findings) -> Markup:
    rows = [
        (
            row.label,
            count(row.trained) if row.trained else "",
            "" if row.best is None else row.best.shown_rate,
            "no run yet" if row.best is None else f"{row.best.new:.4f}",
            "" if row.best is None else f"{row.best.original:.4f}",
            "" if row.best is None or row.best.kl is None else f"{row.best.kl:.4f}",
            _words(row.against and row.against.difference, signed=True),
            "" if row.shared is None else f"{row.shared[0]:.3f} to {row.shared[1]:.3f}",
            "" if row.verdict is None else _FORGETS.get(row.verdict, row.verdict),
            "" if row.against is None else f"{row.beaten} of {len(row.points)}",
            _words(row.area),
            str(len(row.seeds())),
        )
        for row in found.rows
    ]
    return section(
        "methods",
        "Methods",
        table(
            "Each method's run with the smallest sum of both losses, and its frontier beside full fine-tuning's",
            (
                "method",
                "numbers trained",
                "rate",
                "new",
                "original",
                "KL on new",
                "forgets beside full",
                "at new loss",
                "so it forgets",
                "runs beaten",
                "area",
                "seeds",
            ),
            rows,
            numbers=(1, 2, 3, 4, 5, 6, 7, 9, 10, 11),
        ),
        el(
            "p",
            "`forgets beside full` is the mean difference in original loss at equal new loss to full fine-tuning with"
            " the same remedy, over the new losses that both reach; negative: it forgets less. `runs beaten`: full"
            " fine-tuning with the same seed has a run with both losses lower. `area` lies between the"
            " frontier and the base's corner, over the new losses that every row reaches; smaller is better. A row"
            " that learns less than a tenth of what the best one does has none. `KL on new` is KL(base ‖ run) on new"
            " text, in nats a token; arXiv 2509.04259 found that it predicts forgetting.",
            class_="soft",
        ),
        *(el("p", note, class_="warn") for note in found.notes),
    )


def _remedies(found: Findings) -> Markup | None:
    if not found.remedies:
        return None
    rows = [
        (
            each.label,
            each.with_,
            each.beside,
            *(_words(one) for one in each.forgets),
            _words(each.share),
            _words(each.apart, signed=True),
            "" if each.documents is None else "{:+.4f} to {:+.4f}".format(*each.documents),
            _words(each.reach, signed=True),
            "" if each.width is None else f"{each.width:.3f}",
            "" if each.reach is None else str(each.reach.seeds),
            _FORGETS.get(each.verdict, each.verdict),
        )
        for each in found.remedies
    ]
    return section(
        "remedies",
        "Remedies",
        table(
            "Each method with one remedy beside itself with another",
            (
                "method",
                "with",
                "beside",
                "forgets",
                "beside it",
                "part",
                "difference",
                "over documents",
                "lowest new",
                "width",
                "seeds",
                "so it forgets",
            ),
            rows,
            numbers=range(3, 11),
        ),
        el(
            "p",
            "`forgets` is original loss above the base's at equal new loss, in the mean over the new losses that both"
            " reach; `part` is the first's share of the second's. `lowest new` is the difference of the lowest new"
            " losses: negative, it learns more at its most. `width` is the range of new losses that both reach."
            " `over documents`: the difference's 95 % interval over documents (bootstrap), where they are kept.",
            class_="soft",
        ),
    )


def _claims(found: Findings) -> Markup | None:
    if not found.claims:
        return None
    rows = [
        (
            judged.claim.paper,
            judged.claim.says,
            judged.claim.on,
            judged.remedy,
            _words(judged.apart.difference, signed=True),
            "" if judged.apart.width is None else f"{judged.apart.width:.3f}",
            "" if judged.apart.difference is None else str(judged.apart.difference.seeds),
            judged.verdict,
        )
        for judged in found.claims
    ]
    return section(
        "claims",
        "What papers say",
        table(
            "Claims and what these frontiers say",
            ("paper", "claim", "on", "remedy", "difference", "width", "seeds", "here"),
            rows,
            numbers=(4, 5, 6),
            words=(1,),
        ),
        el(
            "p",
            "forgets: original loss at equal new loss; learns: new loss at equal original loss. Negative is for the"
            " claim. `width` is the range of the other loss that both reach. Agrees and disagrees: the range has at"
            f" least {NARROW:g} nats a token and {NARROW_SHARE:.0%} of what full fine-tuning covers, and the difference"
            " over at least three seeds is not 0 at 5 %, with Holm's correction for all differences on this page.",
            class_="soft",
        ),
    )


def _runs(found: Findings) -> Markup | None:
    rows = [
        (
            row.label,
            point.shown_rate,
            str(point.seed),
            "diverged" if point.diverged else f"{point.new:.4f}",
            "" if point.diverged else f"{point.original:.4f}",
        )
        for row in found.rows
        for point in row.points
        if not row.blended or point.share != 1.0
    ]
    if not rows:
        return None
    every = table("Every finished run", ("method", "rate", "seed", "new", "original"), rows, numbers=(1, 2, 3, 4))
    return section("runs", "Runs", folded(f"All {sum(row.runs for row in found.rows)} runs", every))


def _missing(found: Findings) -> Markup | None:
    if not found.missing:
        return None
    lines_of = el("ul", *(el("li", line) for line in found.missing), class_="plain")
    return section("missing", "Still to be made", el("p", "The same command makes these."), lines_of)


def _how(found: Findings) -> Markup:
    texts = found.texts
    budget = found.budget
    return section(
        "how",
        "How it is compared",
        el(
            "p",
            f"Every run trains for {_steps(found)} steps of {budget['batch']} × {budget['length']} tokens"
            f"{_equal(budget)} with its own peak rate: warm-up over 5 % of the steps, then a cosine down to a tenth,"
            " unless the study says otherwise. Rates are extended upwards while the highest learns most, and downwards"
            " while the lowest has the smallest sum of both losses. Only runs whose schedule ended are compared.",
        ),
        el(
            "p",
            f"New text: {', '.join(texts['new'])}. Original text: {', '.join(texts['original'])}. A loss is the mean"
            " over these texts of the mean loss a token on documents that no run trained on."
            + (_CHOSEN if any(point.chosen for row in found.rows for point in row.points) else ""),
        ),
    )


def _words(found: Interval | None, *, signed: bool = False) -> str:
    if found is None:
        return ""
    words = f"{found.mean:+.4f}" if signed else f"{found.mean:.4f}"
    return words if found.half is None else f"{words} ± {found.half:.4f}"
