"""A new language learned with tokens of its own and without, at equal text: bytes, not tokens; bits a byte.

    python -m benchmarks.grown_learning BASE RESULTS --learn FILE… --keep FILE… --new FILE… --original FILE…
        --replayed FILE… [--count 2000] [--bytes 400000] [--seeds 1] [--minutes N] [--jobs N]

`surgeon compare` of full fine-tuning and of copied layers (zero-init, of which alone what is new trains), each on the
base's tokens and on `--count` pieces more, learned from `--learn` such that text like `--keep` stays as it is. Every
run has `--bytes` bytes of new text, so those with longer tokens make fewer steps. A tenth of the sequences is
`--replayed` text; `--original` is measured alone. The same command goes on where it was cut off (`--minutes`). RESULTS
is a folder; the page beside it is by `benchmarks.frontier`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import yaml

import surgeon
from benchmarks.frontier import page

_LAYERS = {"op": "insert_layers", "where": "top_half", "init": {"kind": "copy"}, "zero_init": True}
_RATES = {"full": [1e-4, 3e-4, 1e-3, 3e-3], "layers": [3e-4, 1e-3, 3e-3, 1e-2]}


def plans(asked: argparse.Namespace, room: Path) -> None:
    """The plans, in `room`; texts lie beside them under their own names, so that a plan's text is the same anywhere."""
    for file in {*asked.learn, *asked.keep}:
        (room / file.name).symlink_to(file.resolve())
    learned = {"learn": names(asked.learn), "count": asked.count, "keep": names(asked.keep)}
    words = {"op": "grow_vocabulary", "tokens": learned}
    for name, operations in {"words": [words], "layers": [_LAYERS], "words-layers": [words, _LAYERS]}.items():
        content = yaml.safe_dump({"surgeon": 1, "operations": operations}, sort_keys=False)
        (room / f"{name}.yaml").write_text(content, encoding="utf-8")


def names(files: list[Path]) -> list[str]:
    """As a plan in the folder of `plans` calls them."""
    return [file.name for file in files]


def study(asked: argparse.Namespace) -> dict[str, Any]:
    """What is compared."""
    pieces = f"{asked.count:,} pieces"
    return {
        "surgeon_study": 1,
        "bytes": asked.bytes,
        "batch": 2,
        "length": 128,
        "seeds": asked.seeds,
        "documents": 12,
        "peers": False,
        "train": {"attention": "eager"},
        "remedies": [{"name": "replayed", "replay": {"source": "text", "share": 0.1}}],
        "methods": [
            {"name": "full", "label": "full fine-tuning", "full": True, "rates": _RATES["full"]},
            {
                "name": "full-words",
                "label": f"full fine-tuning, {pieces}",
                "plan": "words.yaml",
                "full": True,
                "rates": _RATES["full"],
            },
            {"name": "layers", "label": "copied layers", "plan": "layers.yaml", "rates": _RATES["layers"]},
            {
                "name": "layers-words",
                "label": f"copied layers, {pieces}",
                "plan": "words-layers.yaml",
                "rates": _RATES["layers"],
            },
        ],
        "claims": [
            {"says": f"{words} with {pieces} {says}", "better": f"{name}-words", "worse": name, "on": on}
            for name, words in (("full", "full fine-tuning"), ("layers", "copied layers"))
            for on, says in (("learns", "learns more"), ("forgets", "forgets less"))
        ],
    }


def main() -> None:
    """Compare, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("results", type=Path)
    for name in ("learn", "keep", "new", "original", "replayed"):
        parser.add_argument(f"--{name}", type=Path, nargs="+", required=True)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--bytes", type=int, default=400_000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--jobs", type=int)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="surgeon-study-") as folder:
        room = Path(folder)
        plans(asked, room)
        (room / "study.yaml").write_text(yaml.safe_dump(study(asked), sort_keys=False), encoding="utf-8")
        texts = {key: getattr(asked, key) for key in ("new", "original", "replayed")}
        told = surgeon.compare(
            room / "study.yaml", asked.base, asked.results, minutes=asked.minutes, jobs=asked.jobs, **texts
        )
    print(told.findings.advice)
    found = json.loads((told.path / "results.json").read_text(encoding="utf-8"))
    told.path.with_name(f"{told.path.name}.md").write_text(page(found, told.path.name), encoding="utf-8")


if __name__ == "__main__":
    main()
