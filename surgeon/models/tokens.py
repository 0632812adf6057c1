"""Tokens to compare checkpoints on: the user's text or a built-in one, encoded by the checkpoint's tokenizer."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgeon.errors import BadInput, printable
from surgeon.models.load import LOAD_FAILURES, first_line, quiet_transformers

# A folder with none of these has no tokenizer; any other failure to load one gets a message of its own.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)

# Enough characters for the tokens asked for, in any script, without reading all of a large file.
_CHARACTERS_A_TOKEN = 32

PROBE_TEXT = (
    """\
The ferry left the harbour a little after six, when the fog had thinned enough for the pilot to see the
second buoy. There were eleven passengers, two bicycles and a crate of seed potatoes addressed to a school
on the island. Nobody spoke much. A woman in a yellow coat asked the mate whether the bakery would be open,
and he told her that it opened when the flour came, and that the flour was on board. By half past seven the
sun had climbed over the hills, the gulls had found the stern, and the water had turned from grey to green.
""",
    """\
How to replace the filter: 1. Turn the pump off and close both valves. 2. Unscrew the bowl by hand, a quarter
of a turn at a time; if it does not move, use the wrench that came with the kit. 3. Wash the bowl in cold
water. Never use soap. 4. Put the new cartridge in with the arrow pointing down, check that the O-ring (12 mm)
is clean, and tighten the bowl until it stops. If it still drips after 10 minutes, repeat steps 2 to 4.
""",
    """\
Un système d'exploitation partage la mémoire, le processeur et les disques entre plusieurs programmes. Quand
deux d'entre eux veulent écrire dans le même fichier, il faut décider lequel passe le premier ; sinon, ce qui
reste à la fin n'est ni l'un ni l'autre. C'est pourquoi l'on pose un verrou, l'on écrit, puis on le retire.
""",
    """\
Am Abend las der Großvater aus dem alten Atlas vor. Er kannte jede Hauptstadt, jeden Fluss und die Höhe von
mehr Bergen, als wir zählen konnten. „Länder ändern sich“, sagte er und strich mit dem Finger über eine
Grenze, die es längst nicht mehr gab, „aber das Wasser findet immer denselben Weg.“
""",
    """\
El mercado abre los martes y los sábados. Se venden naranjas, aceitunas, pan de maíz, cuchillos y, a veces,
libros usados. ¿Cuánto cuesta este diccionario? Dos monedas; tres, si lleva también el mapa.
""",
    """\
Поезд пришёл на станцию в четыре часа утра. На платформе стоял один человек с чемоданом и собакой. Он
посмотрел на часы, потом на небо, и сказал: «Сегодня будет снег».
""",
    """\
从前有一位老人住在山脚下，他每天清晨都去河边取水。有人问他为什么不搬到城里去，他笑着说：“城里没有这条河。”
図書館は午前九時に開き、午後六時に閉まります。本を借りるには、住所の書いてあるものを持ってきてください。
افتتحت المدرسة الجديدة أبوابها في أول الشهر، وجلس الأطفال تحت الشجرة ينتظرون المعلم.
""",
    """\
def moving_average(values: list[float], width: int) -> list[float]:
    \"\"\"Mean of each run of `width` neighbours; empty when there are fewer than `width` values.\"\"\"
    if width < 1:
        raise ValueError(f"width must be at least 1, not {width}")
    total = sum(values[:width])
    means = [total / width] if len(values) >= width else []
    for old, new in zip(values, values[width:]):
        total += new - old
        means.append(total / width)
    return means


for (int i = 0; i < n; ++i) { sum += a[i] * b[n - 1 - i]; }
SELECT name, COUNT(*) AS orders FROM customers JOIN sales USING (id) GROUP BY name HAVING orders > 3;
{"id": 42, "tags": ["north", "winter"], "price": 19.95, "stock": null, "note": "50 % off until 2031-02-28"}
""",
    """\
If a triangle has sides 5, 12 and 13, then 5² + 12² = 25 + 144 = 169 = 13², so it has a right angle. The area
is ½ · 5 · 12 = 30, and the radius of the inscribed circle is (5 + 12 − 13) / 2 = 2. What is the distance from
the right angle to the longest side? Twice the area divided by 13, which is 60/13 ≈ 4.615.
""",
    """\
"Is this seat taken?" — "It was, until the last stop." He sat down, opened his newspaper and began to read
the weather for a town he had left thirty years ago. Cloudy, it said, with a light wind from the west. It had
always been cloudy there. He turned the page, and the train went into the tunnel.
""",
)


@dataclass(frozen=True)
class TokenBatches:
    """`ids` (windows, window), int64; `source` describes in words where they come from."""

    ids: Tensor
    source: str


def token_batches(
    folder: Path,
    *,
    text: Path | None,
    window: int = 128,
    windows: int | None = 8,
    vocabulary: int,
    seed: int = 0,
) -> TokenBatches:
    """Cut `text`, tokenised by the tokenizer in `folder`, into at most `windows` windows of `window` tokens.

    `text` is UTF-8: .jsonl with a "text" a line, or plain text as one document; None means a built-in probe
    in several languages. Documents are joined with the end-of-sequence token where the tokenizer has one.
    `windows` 0 or None takes all of the text; a last window that is not full is dropped. Without a text and
    without a usable tokenizer the ids are random, seeded by `seed`, below `vocabulary`, and `source` says so.
    Raises BadInput for a text that cannot be read, gives no full window, or has tokens beyond `vocabulary`.
    """
    if window < 2 or vocabulary < 1:
        raise ValueError(f"window must be at least 2 and vocabulary at least 1, not {window} and {vocabulary}")
    limit = window * windows if windows else None
    if text is not None:
        # Read before the tokenizer is loaded, so that a wrong path is reported at once.
        shown = printable(str(text))
        documents = _documents(text, None if limit is None else limit * _CHARACTERS_A_TOKEN)
        tokenizer, why_not = find_tokenizer(folder)
        if tokenizer is None:
            raise BadInput(
                f"{printable(str(folder))}: {why_not}, so {shown} cannot be tokenised; add the tokenizer's files"
            )
        source = shown
    else:
        tokenizer, why_not = find_tokenizer(folder)
        if tokenizer is None:
            made = torch.Generator().manual_seed(seed)
            ids = torch.randint(vocabulary, (windows or 8, window), generator=made)
            return TokenBatches(ids, f"random tokens (seed {seed}), because {why_not}")
        documents, source = iter(PROBE_TEXT), "the built-in probe text (several languages and code)"
    stream = _token_stream(tokenizer, documents)
    tokens = torch.tensor(list(stream if limit is None else islice(stream, limit)), dtype=torch.long)
    full = len(tokens) // window
    if full == 0:
        raise BadInput(f"{source} gives {len(tokens)} tokens, fewer than one window of {window}; use a smaller window")
    ids = tokens[: full * window].view(full, window)
    if int(ids.max()) >= vocabulary:
        raise BadInput(
            f"{printable(str(folder))}: its tokenizer gives token {int(ids.max())}, but the model has only"
            f" {vocabulary} tokens; the tokenizer belongs to another model"
        )
    return TokenBatches(ids, source)


def _token_stream(tokenizer: Any, documents: Iterator[str]) -> Iterator[int]:
    between = False
    for document in documents:
        with quiet_transformers():
            encoded = tokenizer.encode(document, add_special_tokens=False)
        if between and tokenizer.eos_token_id is not None:
            yield tokenizer.eos_token_id
        between = True
        yield from encoded


def find_tokenizer(folder: Path) -> tuple[Any, str]:
    """The tokenizer in `folder`, or None and the reason in words. Never runs code from the folder."""
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None, "there is no tokenizer in the folder"
    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True), ""
    except LOAD_FAILURES as error:
        return None, f"the tokenizer in the folder cannot be loaded ({first_line(error)})"


def _documents(path: Path, characters: int | None) -> Iterator[str]:
    """The documents of a text file; of a plain text at most the first `characters`."""
    shown = printable(str(path))
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise BadInput(f"{shown}: cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        raise BadInput(f"{shown}: not a regular file; expected .jsonl or plain text")
    return _json_lines(path, shown) if path.suffix.lower() == ".jsonl" else _plain(path, shown, characters)


def _plain(path: Path, shown: str, characters: int | None) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            yield file.read(-1 if characters is None else characters)
    except UnicodeDecodeError as error:
        raise BadInput(f"{shown}: not UTF-8 text (byte {error.start}: {error.reason})") from error
    except OSError as error:
        raise BadInput(f"{shown}: cannot be read: {error.strerror}") from error


def _json_lines(path: Path, shown: str) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _text_of(line, f"{shown}, line {number}")
    except OSError as error:
        raise BadInput(f"{shown}: cannot be read: {error.strerror}") from error


def _text_of(line: bytes, where: str) -> str:
    try:
        entry = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadInput(f"{where}: not UTF-8 text") from error
    except (ValueError, RecursionError) as error:
        raise BadInput(f'{where}: not JSON ({first_line(error)}); expected {{"text": "…"}}') from error
    if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
        raise BadInput(f'{where}: no "text" that is a string; expected {{"text": "…"}}')
    found: str = entry["text"]
    return found
