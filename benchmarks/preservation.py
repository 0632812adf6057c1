"""Every shipped plan on a real base: promise, bit-identity and perplexity, before and after.

    python benchmarks/preservation.py --base DIR --text FILE [--windows 0] [--plans NAME … | --missing]

Applies each plan to the base and verifies the output in the checkpoint's dtype and in float32 (prefill and cached
decode on windows of the text; 0 windows: all of it). Plans that operate on a grafted model are given the output of
another plan (`FOLLOWS`); what the base cannot take (plans for encoders, say) is a row with the reason. Results go to
benchmarks/results/preservation.md, row by row; with `--plans`, rows of other plans stay as they are. `--missing` are
the plans without a row, and those that were refused when theirs was made.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import surgeon
from surgeon.errors import BadInput

RESULTS = Path(__file__).resolve().parent / "results"
# Plans, and the points of sweeps.
PLANS = surgeon.shipped_plans()
# Plans that operate on what another has grown.
FOLLOWS = {
    "control-llm/merge": "control-llm/lerp8-mse-0-star",
    "pmoe/next-task": "pmoe",
    "pmoe/next-task-paper": "pmoe",
    "fold-adapters": "neutral-residues/adapters",
    "recipes/experts-slots": "recipes/experts",
}
COLUMNS = (
    "plan",
    "layers",
    "promise",
    "dtype",
    "prefill",
    "cached decode",
    "perplexity base",
    "perplexity output",
    "verdict",
)


def rows(plan: str, base: Path, text: Path, windows: int) -> list[list[str]]:
    """One row a dtype."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        if (earlier := FOLLOWS.get(plan)) is not None:
            surgeon.apply(earlier, str(base), Path(folder) / "before")
            base = Path(folder) / "before"
        try:
            applied = surgeon.apply(plan, str(base), out)
        except BadInput as error:
            return [[plan, "", "refused", *[""] * 5, str(error).splitlines()[0].rpartition("): ")[2].replace("|", "/")]]
        verified = surgeon.verify(base, out, text=text, window=256, windows=windows, dtypes=("auto", "float32"))
    assert verified.holds, f"{plan}: a promise does not hold"
    found = []
    for dtype in dict.fromkeys(c.dtype for c in verified.comparisons):
        modes = {c.mode: c for c in verified.comparisons if c.dtype == dtype}
        prefill = modes["prefill"]
        exact = all(c.identical for c in modes.values())
        weaker = "to rounding, as promised" if applied.manifest.promise == "rounding" else "not preserving, as promised"
        verdict = "exact" if exact else weaker
        found.append(
            [
                plan,
                str(len(applied.manifest.layers)),
                applied.manifest.promise,
                dtype,
                *("identical" if modes[m].identical else f"max Δ {modes[m].max_abs_difference:.3g}" for m in modes),
                repr(math.exp(prefill.base_loss)),
                repr(math.exp(prefill.out_loss)),
                verdict,
            ]
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=0)
    parser.add_argument("--plans", nargs="*", default=PLANS)
    parser.add_argument("--missing", action="store_true", help="plans without a row, or with one that says refused")
    arguments = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    windows = "the whole text" if arguments.windows == 0 else f"{arguments.windows} windows of 256 tokens"
    title = f"# Every shipped plan on {arguments.base.name}, {arguments.text.name}, {windows}"
    lines = [title, "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    page = RESULTS / "preservation.md"
    kept = page.read_text(encoding="utf-8").splitlines() if page.exists() else []
    found: dict[str, list[str]] = {}
    # Rows of other bases or texts are no part of this table.
    for line in kept if kept[:1] == [title] and (arguments.missing or arguments.plans != PLANS) else ():
        name = line.strip("| ").partition(" | ")[0]
        if name in PLANS:
            found.setdefault(name, []).append(line)
    if arguments.missing:
        refused = {name for name, of_plan in found.items() if any("| refused |" in line for line in of_plan)}
        arguments.plans = [name for name in PLANS if name not in found or name in refused]
    for plan in arguments.plans:
        made = rows(plan, arguments.base, arguments.text, arguments.windows)
        found[plan] = [f"| {' | '.join(row)} |" for row in made]
        print(found[plan][-1], flush=True)
        table = [line for name in PLANS for line in found.get(name, ())]
        page.write_text("\n".join([*lines, *table, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
