"""The rows of a text: which of them contain a document, and how many do not, counted by fault."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgeon.data.chats import Chat
from surgeon.data.layouts import CutText, Document, bytes_of, said_in
from surgeon.data.specs import RowsSpec
from surgeon.errors import BadInput, bad_input, printable

if TYPE_CHECKING:
    from surgeon.models.tokenizer import Tokenizer

# How many kinds of bad rows an error names, and how many places of each.
_KINDS, _PLACES, _OTHERS = 5, 5, ", for several reasons"
# The variable parts of an error: numbers, the found value, and the advice. The rest is its kind.
_NOT_THE_KIND = re.compile(r"\d+|[(;].*", re.DOTALL)
# A row's place, its name in errors, and a function that reads it.
Row = tuple[Any, str, Callable[[], Document]]


class Rows:
    """A counter of one source's rows that are no documents, and of control tokens in its documents.

    `blank` counts documents without words, `left_out` bad rows that were left out. `sizes` has the UTF-8 bytes of each
    document's texts, by its number.
    """

    def __init__(
        self, spec: RowsSpec, tokenizer: Tokenizer | None = None, write: Callable[[Chat], object] | None = None
    ) -> None:
        """Store the options: control tokens of `tokenizer` are counted; `write` raises BadInput for chats to refuse."""
        self.spec = spec
        self.blank = self.left_out = 0
        self._left: list[str] = []
        self.sizes = array("q")
        self._tokenizer = tokenizer
        self._write = write
        self._written: set[int] = set()
        self._found: Counter[str] = Counter()
        self._with_tokens = 0

    def notes(self) -> Iterator[str]:
        """Yield lines on what is left out, and on control tokens in the text."""
        if self.blank:
            yield f"{self.blank} blank documents are left out"
        if self.left_out:
            places = ", ".join([*self._left, "…"][: self.left_out])
            yield f"{self.left_out} rows that cannot be used are left out (`bad_rows`): {places}"
        if self._found:
            counted = ", ".join(f"{count:,} `{printable(token, 40)}`" for token, count in self._found.most_common(5))
            how, other = ("text", "tokens") if self.spec.as_text else ("tokens", "text")
            yield (
                f"{counted} in {self._with_tokens:,} documents are read as {how}; `control_tokens: as_{other}` reads"
                f" them as {other}"
            )

    def kept(self, rows: Iterable[Row], shown: str, most: int | None = None) -> Iterator[Any]:
        """Yield the places of rows of the file `shown` that contain a document with words.

        With `most`, at most this many rows are read, unless some of them are bad. Raises BadInput that names all bad
        rows, one line per kind, where they may not be left out, or are more than half.
        """
        # For each kind, the first error and the first places.
        bad: dict[str, tuple[BadInput, list[str]]] = {}
        counts: Counter[str] = Counter()
        leave_out = self.spec.bad_rows == "leave_out"
        total, wrong, first = 0, 0, ""
        for place, where, read in rows:
            # If all rows so far are bad, it is another kind of file and need not be read to its end.
            if total == most and (wrong == 0 or (wrong == total and not leave_out)):
                first = "the first "
                break
            total += 1
            try:
                document = read()
                has_words = self._look(document, where)
            except BadInput as error:
                kind = _NOT_THE_KIND.sub("", str(error).removeprefix(printable(where)))
                kind = kind if kind in bad or len(bad) < _KINDS else _OTHERS
                wrong += 1
                if len(self._left) < _PLACES:
                    self._left.append(printable(Path(where).name))
                counts[kind] += 1
                _, places = bad.setdefault(kind, (error, []))
                if len(places) < _PLACES:
                    places.append(where.removeprefix(shown).replace(":", " line ").strip(", /"))
                continue
            self.blank += not has_words
            if has_words:
                self.sizes.append(bytes_of(document))
                yield place
        few = 2 * wrong <= total
        if wrong and not (leave_out and few):
            do = "to leave them out, give the source `bad_rows: leave_out`" if few else "too many to be left out"
            raise bad_input(
                [
                    f"{error} ({counts[kind]:,} of {first}{total:,} rows{_OTHERS * (kind == _OTHERS)}:"
                    f" {', '.join(places)}{', …' * (counts[kind] > len(places))}; {do})"
                    for kind, (error, places) in bad.items()
                ]
            )
        self.left_out += wrong

    def _look(self, document: Document, where: str) -> bool:
        """Count a document's control tokens; return whether it has a word (a chat always counts as having one).

        Raises BadInput where control tokens are in words that a template writes, or the template refuses the chat.
        """
        texts = said_in(document)
        if self._tokenizer is not None:
            # A template also writes tools, calls and thoughts.
            beside = [document.tools, *(each.more for each in document.messages)] if isinstance(document, Chat) else []
            found = self._tokenizer.control_tokens("\n".join([*texts, *map(str, beside)]))
            if found and self.spec.as_text and not isinstance(document, str | CutText):
                raise BadInput(
                    f"{printable(where)}: the tokenizer's control tokens in words ({printable(', '.join(found), 80)}),"
                    " which a template or a pair is written with; remove them, or say `control_tokens: as_tokens`"
                )
            self._found += found
            self._with_tokens += bool(found)
            if isinstance(document, Chat) and self._write:
                # Templates refuse orders of roles, or calls, whatever the words: so one chat of each shape is rendered.
                turns = ((each.role, each.counts, bool(each.content.strip()), *each.more) for each in document.messages)
                shape = hash((bool(document.tools), *turns))
                if shape not in self._written:
                    try:
                        self._write(document)
                    except BadInput as error:
                        do = ", or" if "; " in str(error) else ";"
                        raise BadInput(f"{printable(where)}: {error}{do} remove this chat") from None
                    self._written.add(shape)
        return isinstance(document, Chat) or any(text.strip() for text in texts)
