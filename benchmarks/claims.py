"""Every figure of README and docs about learning and forgetting, worked out anew from the committed records.

    python -m benchmarks.claims

Results of studies from their runs (runs.jsonl.gz); tables that pages quote from results; and the sentences below, each
by what it says. A line for each that holds, and for each that does not; exit 1 where one does not.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import real_model, remedies  # noqa: E402
from surgeon.lab.studies.frontier import NARROW, NARROW_SHARE, interval  # noqa: E402
from tests import quoted  # noqa: E402
from tests.studies import RESULTS, STUDIES, findings_of  # noqa: E402

# A sentence that has to be worked out: it says how much is learned or forgotten, or over what range.
_TELLS = re.compile(r"(?=.*(?:forg[eo]t|nats|bits of it|bits a byte))(?=.*\d\.\d)")
_BLOCK = re.compile(r"^```.*?^```$|<!-- figures: .*?<!-- end of figures -->|^\|.*?$", re.S | re.M)
OPERATIONS = "docs/reference/operations"


class Sentence(NamedTuple):
    """A sentence of a page, its figures as groups, and what these are by the records; True: it has none, and holds."""

    page: str
    says: str
    figures: Callable[[], tuple[str, ...] | bool]


def of_demo() -> dict[str, tuple[float, float]]:
    """What README's table of the demo says of each way: the change of the French loss, and KL on answers."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"^(all weights.*?|new layers.*?) +[\d.e-]+ +([-+]\d\.\d+) \[.*?\] +(\d\.\d+) \[", page, re.M)
    assert len(found) == 4
    return {words: (float(french), float(kl)) for words, french, kl in found}


def fused_move_less() -> bool:
    """Whether at equal French fused layers move a chat model's answers less than full fine-tuning, by the interval."""
    found = interval(real_model.differences(real_model.rows(), "opt-deus", real_model.REMEDY))
    return found is not None and found.half is not None and found.mean + found.half < 0


def others_move() -> bool:
    """Whether the one seed of four other ways says what the page says of it, by more than 0.005 nats a token."""
    ways = ("neutral-residues", "llama-pro", "mixture-of-control", "lora")
    seeds = [real_model.differences(real_model.rows(), way, real_model.REMEDY) for way in ways]
    assert all(len(each) == 1 for each in seeds)
    residues, copied, control, lora = (each[0] for each in seeds)
    return max(residues, copied) < -0.005 and control > 0.005 and abs(lora) < 0.005


def gate_keeps() -> bool:
    """Whether a gate kept nearly every answer to the letter."""
    row = next(row for row in real_model.rows() if row["run"]["method"] == "gate")
    return bool(0.98 <= row["kept"]["same"]["value"] < 1)


FULL, FULL_KEPT, LAYERS_KEPT = "all weights", "all weights, with replay + KL", "new layers, with replay + KL"
GATE = "new layers behind a gate"


def row_of(base: str, method: str, remedy: str = "replayed") -> dict[str, Any]:
    """A row of a base's study of all methods."""
    found = findings_of(f"frontier_{base}").to_json()["rows"]
    return next(row for row in found if (row["method"], row["remedy"]) == (method, remedy))


def widest(base: str, *methods: str) -> float:
    """The widest range of new losses that one of the methods has in common with full fine-tuning."""
    return max(row_of(base, method)["width"] or 0.0 for method in methods)


def includes_zero(row: dict[str, Any]) -> bool:
    """Whether the interval of its difference to full fine-tuning does; one of several seeds."""
    found = row["against_full"]
    return found is not None and found["half"] is not None and abs(found["mean"]) <= found["half"]


def remedies_of(*keys: str) -> Iterator[float]:
    """The means of a figure of recalled text beside another kind of text, of every method on both bases."""
    for base in quoted.BASES:
        for row in findings_of(f"frontier_{base}").to_json()["remedies"]:
            yield from (row[key]["mean"] for key in keys)


def full_learns_most(base: str) -> bool:
    """Whether no run of another method has a lower new loss than the lowest of full fine-tuning."""
    points = [
        (row["kind"], p["new"]) for row in findings_of(f"frontier_{base}").to_json()["rows"] for p in row["points"]
    ]
    return min((float(new), kind) for kind, new in points)[1] == "full"


def least_of_surgeries(base: str) -> bool:
    """Whether of the surgeries tried with both remedies `lerp-mse` learned least, and its best run kept most."""
    rows = [row_of(base, name) for name in ("lerp-mse", "nr", "ot", "vanilla", "copy")]
    kept = [row["best"]["original"] for row in rows]
    learned = [min(float(point["new"]) for point in row["points"]) for row in rows]
    return kept[0] == min(kept) and learned[0] == max(learned)


def remedied(with_: str, beside: str = "recalled", *methods: str) -> list[dict[str, Any]]:
    """A remedy beside another, of each of the methods (all: none given) on each base."""
    rows = [row for base in remedies.BASES for row in remedies.found_in(base)["remedies"]]
    return [r for r in rows if (r["with"], r["beside"]) == (with_, beside) and (not methods or r["method"] in methods)]


def parts_of(with_: str, beside: str = "recalled", *methods: str) -> list[tuple[float, float]]:
    """What part of what another remedy forgets a remedy does, on each base: the mean, and the interval's upper end."""
    shares = [row["share"] for row in remedied(with_, beside, *(methods or ("full",)))]
    return [(share["mean"], share["mean"] + share["half"]) for share in shares if share and share["half"] is not None]


def more_is_not_told_apart() -> bool:
    """Whether on both bases more recalled text may forget as much as the default does."""
    return all(row["verdict"] == "not told apart" for row in remedied("more"))


def judged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those with a range that is wide enough."""
    return [row for row in rows if row["verdict"] not in ("range too narrow", "no common range")]


def blends_do_it() -> bool:
    """Whether blends of what is not full fine-tuning forget so much on the second base."""
    of_second = remedies.found_in(remedies.BASES[1])["remedies"]
    rows = [row for row in judged(of_second) if row["with"] == "recalled, blended" and row["method"] != "full"]
    return len(rows) == 4 and all(0.48 <= row["share"]["mean"] <= 0.62 for row in rows)


def the_only_less() -> bool:
    """Whether one remedy of one method forgets less after Holm's correction, on the second base."""
    every = [(base, row) for base in remedies.BASES for row in remedies.found_in(base)["remedies"]]
    less = [(base, row["method"], row["with"]) for base, row in every if row["verdict"] == "agrees"]
    return less == [(remedies.BASES[1], "lora", "both, blended")]


def with_other_text() -> bool:
    """Whether with German as new text *both* forgets two fifths of what *recalled* does, and of code none is judged."""
    rows = {study: remedies.found_in(study)["remedies"] for study in remedies.STUDIES if study not in remedies.BASES}
    german, code = (
        next(row for row in rows[f"{remedies.BASES[0]}_{text}"] if (row["with"], row["beside"]) == ("both", "recalled"))
        for text in ("german", "code")
    )
    near = abs(german["share"]["mean"] - 2 / 5) < 0.05
    return near and (german["verdict"], code["verdict"]) == ("agrees", "range too narrow")


def half_and_two_thirds() -> bool:
    """Whether `both` forgets about so much of what `recalled` does on the two bases, and its blends less."""
    both, blended = parts_of("both"), parts_of("both, blended")
    near = all(abs(part - due) < 0.05 for (part, _), due in zip(both, (1 / 2, 2 / 3), strict=True))
    return near and all(less < part for (part, _), (less, _) in zip(both, blended, strict=True))


def above(value: float, *, step: float = 0.1) -> str:
    """The next step above a value, for what a page says is `less than` it."""
    return f"{step * (int(value / step) + 1):.1f}"


def learns_most_on_both() -> bool:
    return all(full_learns_most(base) for base in quoted.BASES)


def lora_forgets_more() -> bool:
    return full_learns_most("en-qwen3-4m") and row_of("en-qwen3-4m", "lora")["verdict"] == "disagrees"


EVIDENCE = "docs/explanation/evidence.md"
LAYERS = ("ot", "copy", "average", "random", "llama-pro")
SENTENCES = (
    Sentence(EVIDENCE, "fused layers moved the model's answers less", fused_move_less),
    Sentence(EVIDENCE, "Neutral Residues and copied layers moved them less too, LoRA about as much", others_move),
    Sentence(EVIDENCE, "behind a gate, without the remedy, kept nearly every answer to the letter", gate_keeps),
    Sentence("README.md", r"three seeds at equal French\].* fused layers move answers less", fused_move_less),
    Sentence("README.md", r"Behind the gate \(.*\), every answer is the base's", lambda: of_demo()[GATE][1] == 0),
    Sentence(
        f"{OPERATIONS}/layers.md",
        r"on the 8M base the two meet over less than (\S+) nats of it",
        lambda: (above(widest("en-llama-8m", *LAYERS)),),
    ),
    Sentence(
        f"{OPERATIONS}/layers.md",
        "and on the other base the intervals include 0",
        lambda: all(includes_zero(row_of("en-qwen3-4m", name)) for name in LAYERS),
    ),
    Sentence(
        f"{OPERATIONS}/branches.md",
        "and on the other three seeds were too few",
        lambda: row_of("en-qwen3-4m", "nr")["verdict"] == "points its way",
    ),
    Sentence(
        f"{OPERATIONS}/branches.md",
        "forgot and learned least of five surgeries on one base, and learned almost nothing on the other",
        lambda: least_of_surgeries("en-llama-8m") and row_of("en-qwen3-4m", "lerp-mse")["area"] is None,
    ),
    *(
        Sentence(f"{OPERATIONS}/{page}.md", r"[Ff]ull fine-tuning learned most", learns_most_on_both)
        for page in ("layers", "branches")
    ),
    Sentence(
        EVIDENCE, "On the second base it learns most too, and forgets less than LoRA on the FFN", lora_forgets_more
    ),
    Sentence(
        EVIDENCE,
        "recalled text with the KL term forgets less than half of what replay of another kind of English forgets",
        lambda: all(share < 0.5 for share in remedies_of("share")),
    ),
    Sentence(
        EVIDENCE,
        "On average, no method's lowest new loss is higher with it",
        lambda: all(reach <= 0 for reach in remedies_of("reach")),
    ),
    Sentence(
        EVIDENCE,
        r"\*both\* forgets half of what \*recalled\* does on the first base, two thirds on the second, and blends take",
        half_and_two_thirds,
    ),
    Sentence(
        EVIDENCE,
        r"Of the other methods, blends of \*recalled\* forget half to three fifths of what it does on the second base",
        blends_do_it,
    ),
    Sentence(
        EVIDENCE,
        r"There LoRA with \*both\*, blended, has the only \*less\* that Holm's correction leaves",
        the_only_less,
    ),
    Sentence(
        EVIDENCE,
        r"On German, full fine-tuning has a \*less\*: \*both\* forgets two fifths of what \*recalled\* does",
        with_other_text,
    ),
    Sentence(
        EVIDENCE,
        r"\*More\* is not told apart from \*recalled\* on either base, so the default stays",
        more_is_not_told_apart,
    ),
    Sentence(
        EVIDENCE,
        "that it is half or less, as intervals reach beyond",
        lambda: all(end > 0.5 for _, end in [*parts_of("both"), *parts_of("both, blended")]),
    ),
    Sentence(
        "docs/how-to/remembering.md",
        r"both together forgot less than the teacher alone",
        lambda: all(part < 1 for part, _ in parts_of("both")),
    ),
    Sentence(
        f"{OPERATIONS}/branches.md",
        r"on one base the two meet over less than (\S+) nats of it",
        lambda: (above(widest("en-llama-8m", "nr")),),
    ),
    Sentence(
        "docs/how-to/comparing.md",
        r"a range in common of at least (\S+) nats a token and (\S+) % of what full",
        lambda: (f"{NARROW:g}", f"{100 * NARROW_SHARE:g}"),
    ),
)


def checked() -> Iterator[tuple[str, str]]:
    """Yield everything that is worked out, with what is wrong with it (empty: nothing)."""
    for study in STUDIES:
        path = RESULTS / study / "results.json"
        same = findings_of(study).to_json() == json.loads(path.read_text(encoding="utf-8"))
        yield str(path.relative_to(ROOT)), "" if same else "its runs say something else (python -m tests.studies)"
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        name = str(page.relative_to(ROOT))
        if quoted.MARKED.search(text):
            yield name, "" if quoted.filled(text) == text else "tables differ from results (python -m tests.quoted)"
        for line in untold(name, text):
            yield name, f"no record is named for: {line}"
    for sentence in SENTENCES:
        yield sentence.page, wrong_in(sentence)
    same = (RESULTS / "remedies.md").read_text(encoding="utf-8") == remedies.page()
    yield "benchmarks/results/remedies.md", "" if same else "not the results' (python -m benchmarks.remedies page)"


def untold(name: str, text: str) -> list[str]:
    """Return the lines that give such figures and are none of SENTENCES; tables and blocks of code aside."""
    known = [re.compile(sentence.says) for sentence in SENTENCES if sentence.page == name]
    lines = _BLOCK.sub("", text).splitlines()
    return [line for line in lines if _TELLS.search(line) and not any(each.search(line) for each in known)]


def wrong_in(sentence: Sentence) -> str:
    """Return what is wrong with a sentence; empty where its figures are the records'."""
    found = re.findall(sentence.says, (ROOT / sentence.page).read_text(encoding="utf-8"), re.M)
    if len(found) != 1:
        return f"the sentence stands there {len(found)} times: {sentence.says}"
    due = sentence.figures()
    if isinstance(due, bool):
        return "" if due else f"the records say otherwise: {sentence.says}"
    given = found[0] if isinstance(found[0], tuple) else (found[0],)
    return "" if given == due else f"says {', '.join(given)}, the records {', '.join(due)}: {sentence.says}"


def main() -> int:
    every = list(checked())
    for name, wrong in every:
        print(f"{'no' if wrong else 'yes'}  {name}{': ' if wrong else ''}{wrong}")
    return int(any(wrong for _, wrong in every))


if __name__ == "__main__":
    sys.exit(main())
