"""How tokens can be added to a tokenizer, and what each way makes of old and new text.

`python -m benchmarks.vocabulary BASE --learn FILE… --keep FILE… --new FILE… --old FILE… [--count N …] [--to FILE]`
learns N pieces from the texts of `--learn` in each way. `--old` and `--new` are held out: of the first it counts the
documents that tokenise as before, of the second tokens a word. Each growth of merges is applied to BASE and verified:
the largest rise of the loss on an old token at any position of `--old`, beside log(1 + k/V). `added_tokens`, which
surgeon never uses, gets the same pieces as the default way. Texts are UTF-8, .jsonl with a "text" a line, or plain.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WAYS = ("unseen", "appended")
_TO_WORDS = {
    "unseen": "merges whose pair never occurs in `keep` (default)",
    "appended": "merges behind the old ones",
    "added_tokens": "`added_tokens`, the default's pieces",
}


@dataclass(frozen=True)
class Row:
    """One way and one count: documents of old text unchanged, tokens a word of new text, and what verify measured."""

    way: str
    count: int
    unchanged: float
    fertility: float
    wrong: int
    loading: float
    rise: float | None
    bound: float | None
    seconds: float


def documents(paths: Sequence[Path]) -> list[str]:
    """The documents of texts."""
    from surgeon.models.tokens import documents_of

    return [text for path in paths for text in documents_of(path)]


def measured(
    way: str, count: int, folder: Path, before: Any, old: list[str], new: list[str], **proof: float | None
) -> Row:
    """What transformers' tokenizer in `folder` makes of held-out texts, `before` being the base's."""
    from transformers import AutoTokenizer

    began = time.perf_counter()
    after = AutoTokenizer.from_pretrained(folder)
    loading = time.perf_counter() - began
    same = [encoded(before, text) == encoded(after, text) for text in old]
    found = [encoded(after, text) for text in new]
    wrong = sum(
        after.decode(ids, clean_up_tokenization_spaces=False) != text for ids, text in zip(found, new, strict=True)
    )
    words = sum(len(text.split()) for text in new)
    return Row(
        way,
        count,
        sum(same) / len(same),
        sum(map(len, found)) / words,
        wrong,
        loading,
        proof.get("rise"),
        proof.get("bound"),
        proof.get("seconds") or 0.0,
    )


def encoded(tokenizer: Any, text: str) -> list[int]:
    """Its tokens, without those that the tokenizer adds of its own."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def grown(way: str, count: int, base: Path, out: Path, asked: argparse.Namespace) -> dict[str, float | None]:
    """Apply the growth to `out` and verify it on old text; the rise, the bound, and the seconds of applying."""
    import surgeon

    tokens = {"learn": paths(asked.learn), "count": count, "how": way}
    tokens |= {"keep": paths(asked.keep)} if way == "unseen" else {}
    plan = out.with_suffix(".yaml")
    plan.write_text(json.dumps({"surgeon": 1, "operations": [{"op": "grow_vocabulary", "tokens": tokens}]}))
    began = time.perf_counter()
    surgeon.apply(plan, base, out, device="cpu")
    seconds = time.perf_counter() - began
    proof = surgeon.verify(base, out, text=asked.old[0], device="cpu", windows=8, window=256)
    assert proof.holds and proof.identical, proof
    worst = max(proof.grown.values(), key=lambda each: each.rise)
    return {"rise": worst.rise, "bound": worst.bound, "seconds": seconds}


def paths(given: Sequence[Path]) -> list[str]:
    """As a plan that lies elsewhere names them."""
    return [str(path.resolve()) for path in given]


def with_added_tokens(base: Path, like: Path, out: Path) -> Path:
    """The base's tokenizer with the pieces of the grown one in `like` as `added_tokens`, as text writes them."""
    from transformers import AutoTokenizer

    tokenizer, other = (AutoTokenizer.from_pretrained(folder) for folder in (base, like))
    old = tokenizer.get_vocab()
    pieces = sorted(number for token, number in other.get_vocab().items() if token not in old)
    texts = [other.decode([number]) for number in pieces]
    # Halves of characters are no text.
    tokenizer.add_tokens([text for text in texts if "\ufffd" not in text and not text.startswith("<|unused_")])
    tokenizer.save_pretrained(out)
    return out


def rows(asked: argparse.Namespace) -> list[Row]:
    """Every way at every count."""
    from transformers import AutoTokenizer

    old, new = documents(asked.old), documents(asked.new)
    before = AutoTokenizer.from_pretrained(asked.base)
    found = [measured("as it was", 0, asked.base, before, old, new)]
    with tempfile.TemporaryDirectory(prefix="surgeon-vocabulary-") as room:
        for count in asked.count:
            for way in WAYS:
                out = Path(room) / f"{way}-{count}"
                proof = grown(way, count, asked.base, out, asked)
                found.append(measured(way, count, out, before, old, new, **proof))
                print(found[-1], file=sys.stderr, flush=True)
            added = with_added_tokens(asked.base, Path(room) / f"unseen-{count}", Path(room) / f"added-{count}")
            found.append(measured("added_tokens", count, added, before, old, new))
            for way in WAYS:
                shutil.rmtree(Path(room) / f"{way}-{count}")
    return found


def table(asked: argparse.Namespace, found: Sequence[Row]) -> str:
    """The results as Markdown."""
    where = f"{platform.machine()}, {os.cpu_count()} cores"
    names = {key: ", ".join(path.name for path in getattr(asked, key)) for key in ("learn", "keep", "old", "new")}
    lines = [
        f"# Growing the vocabulary of {asked.base.name} ({where}, load {os.getloadavg()[0]:.1f})",
        "",
        f"Learned from {names['learn']}; to be kept: {names['keep']}. Held out: old text {names['old']}, new text"
        f" {names['new']}. The rise is the largest, over all positions of old text, of the loss on an old token, in"
        " nats.",
        "",
        "| k | how | old documents unchanged | new text, tokens a word | new documents decoded wrongly | loading (s) |"
        " rise | log(1 + k/V) | apply (s) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        proof = f"{row.rise:.4f} | {row.bound:.4f} | {row.seconds:.1f}" if row.rise is not None else " | | "
        lines.append(
            f"| {row.count} | {_TO_WORDS.get(row.way, row.way)} | {row.unchanged:.3f} | {row.fertility:.3f} |"
            f" {row.wrong} | {row.loading:.2f} | {proof} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    for name in ("learn", "keep", "old", "new"):
        parser.add_argument(f"--{name}", type=Path, nargs="+", required=True)
    parser.add_argument("--count", type=int, nargs="+", default=[500, 2000])
    parser.add_argument("--to", type=Path)
    asked = parser.parse_args()
    told = table(asked, rows(asked))
    if asked.to:
        asked.to.write_text(told, encoding="utf-8")
    print(told)


if __name__ == "__main__":
    main()
