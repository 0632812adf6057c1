"""A grown tokenizer on whole corpora: old text by document and by token, round trips, and what loading costs.

`python -m benchmarks.grown_tokenizer BASE --learn FILE… --keep FILE… --old FILE… --new FILE… [--count 32000]
[--how unseen …] [--kinds SIZE] [--to FILE]` learns pieces from `--learn`, with `--keep` to stay as it is; `--old` and
`--new` are held out. Of every text it counts the documents, and the tokens, that are what they were (a token is, where
the grown tokenizer has the same id at the same characters), the tokens before and after, and the documents that
decoding gives back. Loading is processor seconds, the best of seven in turn, of the base, of the grown tokenizer, of a
byte-level BPE that `tokenizers` itself trained on `--keep` and `--learn` to as many tokens and that nobody grew, and of
the base with the same pieces as `added_tokens`: by `AutoTokenizer.from_pretrained`, and `tokenizers`' part of it alone,
`Tokenizer.from_file`.

`--kinds SIZE` does the same for tokenizers of the other kinds, trained here on `--keep` to so many tokens; for
byte-level BPE of that size too. What such a tokenizer does not give back itself (WordPiece cuts white space off) is
no loss by growing: the documents are counted whose decoded text is the base's.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.vocabulary import documents, with_added_tokens

ROUNDS = 7
# Documents whose tokens are held at a time.
AT_ONCE = 256


@dataclass
class Counted:
    """What a growth makes of texts: documents and tokens in all and unchanged, tokens after, documents given back."""

    documents: int = 0
    unchanged: int = 0
    before: int = 0
    kept: int = 0
    after: int = 0
    exact: int = 0
    as_before: int = 0


def checkpoint(folder: Path, rows: int) -> Path:
    """A checkpoint with so many embeddings, of no use but to be grown."""
    from tests import tiny

    return tiny.checkpoint(folder, "llama", num_hidden_layers=1, vocab_size=rows)


def kinds(size: int, texts: list[str], room: Path) -> Iterator[tuple[str, Path, int]]:
    """A base of every other kind: its name, folder and rows."""
    from transformers import AutoTokenizer

    from tests import vocabularies

    made: dict[str, Callable[[Path], Path]] = {
        "byte-level BPE": lambda folder: vocabularies.byte_level(folder, size=size, texts=texts),
        "BPE of characters, bytes as a fallback": lambda folder: vocabularies.sentencepiece_like(
            folder, size=size, texts=texts
        ),
        "WordPiece": lambda folder: vocabularies.word_piece(folder, size=size, texts=texts),
    }
    for name, make in made.items():
        first = make(room / f"tokenizer of {name}")
        rows = len(AutoTokenizer.from_pretrained(first))
        folder = checkpoint(room / name, rows)
        for file in first.iterdir():
            shutil.copy(file, folder / file.name)
        yield f"{name}, {rows} tokens", folder, rows


def grown(base: Path, rows: int, out: Path, how: str, asked: argparse.Namespace) -> int:
    """The tokenizer of `base` with more pieces, in `out`; how many."""
    import surgeon
    from surgeon.edits.vocabulary.grow import grow
    from surgeon.edits.vocabulary.learned import LearnedTokens

    folder = surgeon.open_checkpoint(base).folder
    keep = tuple(asked.keep) if how == "unseen" else ()
    found = grow(folder, LearnedTokens(tuple(asked.learn), asked.count, keep, how), rows=rows)
    copy(folder, out, found.files)
    return len(found.tokens)


def copy(base: Any, out: Path, files: Any) -> None:
    """The side files of a base, those of `files` in their place, and its config.json."""
    out.mkdir()
    shutil.copy(base.path / "config.json", out / "config.json")
    for name in base.side_files:
        (out / name).write_bytes(files.get(name) or base.read_side_file(name))


def counted(before: Any, after: Any, texts: Sequence[str]) -> Counted:
    """What two tokenizers make of texts."""
    made = Counted()
    for begin in range(0, len(texts), AT_ONCE):
        part = list(texts[begin : begin + AT_ONCE])
        pair = [each.backend_tokenizer.encode_batch(part, add_special_tokens=False) for each in (before, after)]
        for text, one, other in zip(part, *pair, strict=True):
            same = one.ids == other.ids
            back = [
                each.decode(ids.ids, clean_up_tokenization_spaces=False)
                for each, ids in ((before, one), (after, other))
            ]
            made.documents += 1
            made.unchanged += same
            made.before += len(one.ids)
            made.after += len(other.ids)
            made.kept += len(one.ids) if same else in_place(one, other)
            made.exact += back[1] == text
            made.as_before += back[1] == back[0]
    return made


def in_place(one: Any, other: Any) -> int:
    """How many tokens of one encoding the other has at the same characters."""
    first, second = (Counter(zip(each.ids, each.offsets, strict=True)) for each in (one, other))
    return (first & second).total()


def stock(base: Path, size: int, texts: list[str], out: Path) -> Path:
    """A byte-level BPE of `size` tokens as `tokenizers` trains it, with the config.json of `base`."""
    from tests import vocabularies

    vocabularies.byte_level(out, size=size, texts=texts)
    shutil.copy(base / "config.json", out / "config.json")
    return out


def loading(folders: Sequence[Path]) -> list[tuple[float, float]]:
    """The fewest processor seconds in which transformers loads each tokenizer, and `tokenizers` its file, in turn."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    ways = (AutoTokenizer.from_pretrained, lambda folder: Tokenizer.from_file(str(folder / "tokenizer.json")))
    best = [[float("inf")] * len(ways) for _ in folders]
    for _ in range(ROUNDS):
        for folder, found in zip(folders, best, strict=True):
            for nth, load in enumerate(ways):
                began = time.process_time()
                load(folder)
                found[nth] = min(found[nth], time.process_time() - began)
    return [(whole, part) for whole, part in best]


def table(shown: str, base: Path, rows: int, asked: argparse.Namespace, room: Path) -> list[str]:
    """One base grown in every way: the lines of its two tables."""
    from transformers import AutoTokenizer

    before = AutoTokenizer.from_pretrained(base)
    texts = {name: documents(getattr(asked, name)) for name in ("keep", "old", "learn", "new")}
    lines = [
        f"## {shown}",
        "",
        "| how | pieces | text | documents | documents unchanged | tokens | tokens unchanged | tokens after |"
        " given back | as before |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    folders, names = [base], ["the base"]
    for how in asked.how:
        out = room / f"{base.name} {how}"
        pieces = grown(base, rows, out, how, asked)
        after = AutoTokenizer.from_pretrained(out)
        for name, held in texts.items():
            made = counted(before, after, held)
            lines.append(
                f"| `{how}` | {pieces} | {name} | {made.documents} | {made.unchanged / made.documents:.4f} |"
                f" {made.before} | {made.kept / made.before:.5f} | {made.after} | {made.exact} | {made.as_before} |"
            )
            print(lines[-1], file=sys.stderr, flush=True)
        folders.append(out)
        names.append(f"`{how}`, {pieces} pieces")
    size = len(AutoTokenizer.from_pretrained(folders[1]))
    folders.append(stock(base, size, texts["keep"] + texts["learn"], room / f"{base.name} stock"))
    names.append(f"never grown, {size} tokens, by `tokenizers`")
    folders.append(with_added_tokens(base, folders[1], room / f"{base.name} added"))
    names.append("the same pieces as `added_tokens`")
    seconds = loading(folders)
    lines += [
        "",
        "| tokenizer | tokenizer.json, MB | loading, processor s | × the base | of it `Tokenizer.from_file` |",
        "|---|---|---|---|---|",
    ]
    for name, folder, (whole, part) in zip(names, folders, seconds, strict=True):
        megabytes = (folder / "tokenizer.json").stat().st_size / 1e6
        lines.append(f"| {name} | {megabytes:.2f} | {whole:.3f} | {whole / seconds[0][0]:.2f} | {part:.3f} |")
    return [*lines, ""]


def main() -> None:
    """Measure, and print or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    for name in ("learn", "keep", "old", "new"):
        parser.add_argument(f"--{name}", type=Path, nargs="+", required=True)
    parser.add_argument("--count", type=int, default=32_000)
    parser.add_argument("--how", nargs="+", default=["unseen"], choices=["unseen", "appended", "non_ascii"])
    parser.add_argument("--kinds", type=int, nargs="*", default=[], metavar="SIZE")
    parser.add_argument("--to", type=Path)
    asked = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    size = sum(path.stat().st_size for name in ("learn", "keep", "old", "new") for path in getattr(asked, name))
    lines = [
        f"# Tokenizers grown by {asked.count} pieces, on {size / 1e6:.0f} MB of text",
        "",
        *(
            f"- {name}: {', '.join(path.name for path in getattr(asked, name))}"
            for name in ("learn", "keep", "old", "new")
        ),
        "",
        f"{platform.machine()}, {os.cpu_count()} cores; processor seconds, the best of {ROUNDS}.",
        "",
    ]
    with tempfile.TemporaryDirectory(prefix="surgeon-tokenizers-") as folder:
        room = Path(folder)
        import surgeon

        rows = surgeon.open_checkpoint(asked.base).vocabulary
        lines += table(f"{asked.base.name}, {rows} tokens", asked.base, rows, asked, room)
        for each in asked.kinds:
            for shown, base, count in kinds(each, documents(asked.keep), room):
                lines += table(shown, base, count, asked, room)
    if asked.to:
        asked.to.write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
