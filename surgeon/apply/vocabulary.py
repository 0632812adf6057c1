"""What a plan adds to the base's tokenizer: known before the blueprint is drawn, and written beside the weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.source import MAX_SIDE_FILE_BYTES
from surgeon.checkpoint.tokenizer_files import GrownVocabulary
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import Anatomy
from surgeon.operations.operation import Operation


@dataclass(frozen=True)
class Vocabularies:
    """The growths of a plan's operations, by their numbers, and the tokenizer files that the output has by them."""

    facts: Mapping[int, GrownVocabulary] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)


def vocabularies_of(
    operations: Sequence[Operation], source: str, base: CheckpointFolder, anatomy: Anatomy
) -> Vocabularies:
    """What `operations` add to the tokenizer of `base`; `source` is the plan's file, where its paths start.

    Raises BadInput.
    """
    asked = [(number, operation.new_tokens) for number, operation in enumerate(operations)]
    wanted = [(number, tokens) for number, tokens in asked if tokens is not None]
    if not wanted or anatomy.family.encoder:
        # Why an encoder's does not grow, the draft says.
        return Vocabularies()
    number, tokens = wanted[0]
    # Of a second one the draft says why it is refused.
    from surgeon.models.vocabulary.grow import grow
    from surgeon.models.vocabulary.learned import LearnedTokens
    from surgeon.models.vocabulary.requested_words import Listed

    folder = Path(source).parent
    learned = LearnedTokens(_paths(folder, tokens.learn), tokens.count, _paths(folder, tokens.keep), tokens.how)
    rows, measure = anatomy.sizes.vocabulary, _paths(folder, tokens.measure)
    if tokens.learn:
        grown = grow(base, learned, rows=rows, measure=measure)
    elif tokens.file is not None:
        path = _there(folder / tokens.file)
        lines = _lines(path)
        listed = Listed(printable(str(path)), tuple(lines))
        grown = grow(base, tuple(lines.values()), rows=rows, measure=measure, listed=listed)
    else:
        if not tokens.words:
            raise BadInput("`tokens`: empty, so there is nothing to add; name at least one word")
        grown = grow(base, tokens.words, rows=rows, measure=measure)
    return Vocabularies({number: grown.facts}, grown.files)


def _paths(folder: Path, names: Iterable[str]) -> tuple[Path, ...]:
    return tuple(_there(folder / name) for name in names)


def _there(path: Path) -> Path:
    if not path.is_file():
        raise BadInput(f"{printable(str(path))}: no such text, which `grow_vocabulary` asks for; check the path")
    return path


def _lines(path: Path) -> dict[int, str]:
    """The words of a file that has one a line, by the numbers of their lines. Raises BadInput."""
    shown = printable(str(path))
    if path.stat().st_size > MAX_SIDE_FILE_BYTES:
        raise BadInput(f"{shown}: more than {MAX_SIDE_FILE_BYTES:,} bytes of tokens; is this the right file?")
    try:
        # Some editors put a byte order mark before the first word.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise BadInput(f"{shown}: not UTF-8 (byte {error.start}: {error.reason}); save it as UTF-8") from None
    words = {number: line for number, line in enumerate(lines, start=1) if line.strip()}
    if not words:
        raise BadInput(f"{shown}: empty, so there is nothing to add; write at least one word, one a line")
    return words
