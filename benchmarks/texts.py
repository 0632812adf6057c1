"""Text of kinds that corpora may lack, of what a machine has: German, and code.

    python -m benchmarks.texts german|code CORPORA

writes CORPORA/KIND.train.jsonl and KIND.val.jsonl, a document of about `LONG` characters a line: `german` are
translations of programs' messages (/usr/share/locale/de), `code` is Python's standard library. A tenth is held out, of
code whole modules. Both differ from one machine to the next; a study keeps their digests.
"""

from __future__ import annotations

import argparse
import gettext
import json
import random
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

TRANSLATED = Path("/usr/share/locale/de/LC_MESSAGES")
# Characters of a document of messages, and from which on a message is a sentence.
LONG, SENTENCE = 1200, 40


def german() -> Iterator[list[str]]:
    """Documents of messages of one program after the other; none twice, no names of countries, languages, keyboards."""
    known: set[str] = set()
    for path in sorted(TRANSLATED.glob("*.mo")):
        if path.name.startswith(("iso_", "xkeyboard")):
            continue
        try:
            with path.open("rb") as file:
                said = [text for _, text in _messages(file) if len(text) >= SENTENCE and text not in known]
        except UnicodeDecodeError:
            # An old catalogue does not say how it is coded.
            continue
        known.update(said)
        yield from ([document] for document in _documents(said))


def _documents(pieces: Iterable[str]) -> Iterator[str]:
    """Pieces one after the other, as many in a document as make it `LONG`; what is left over goes."""
    document = ""
    for piece in pieces:
        document += piece.rstrip() + "\n"
        if len(document) >= LONG:
            yield document
            document = ""


def _messages(file: object) -> list[tuple[str, str]]:
    catalogue = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined, arg-type]
    return sorted((key, text) for key, text in catalogue.items() if isinstance(key, str) and key)


def code() -> Iterator[list[str]]:
    """The documents of each module at the top of Python's standard library and in its packages, tests left out."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        if not {"test", "tests", "idle_test", "site-packages", "lib2to3"} & set(path.relative_to(library).parts):
            yield list(_documents(path.read_text(encoding="utf-8", errors="replace").splitlines()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("german", "code"))
    parser.add_argument("corpora", type=Path)
    asked = parser.parse_args()
    sources = list({"german": german, "code": code}[asked.kind]())
    random.Random(0).shuffle(sources)
    asked.corpora.mkdir(parents=True, exist_ok=True)
    for part, chosen in (("val", sources[::10]), ("train", [each for n, each in enumerate(sources) if n % 10])):
        documents = [text for each in chosen for text in each]
        random.Random(0).shuffle(documents)
        lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents]
        (asked.corpora / f"{asked.kind}.{part}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{part}: {len(documents):,} documents, {sum(map(len, documents)):,} characters")


if __name__ == "__main__":
    main()
