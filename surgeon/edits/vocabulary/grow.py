"""Growing a tokenizer: which tokens to add, the new files, and how texts are tokenised afterwards.

Learned pieces of a BPE are added as merges after all old ones. By default only pairs are joined that never occur in the
tokenisation of a text that must stay as it is: then every word of that text is cut as before. The pieces are not
`added_tokens`, which are matched before words are cut and are decoded literally, so that accents would come out as the
characters of their bytes. Only a plan's `special` and `added` tokens are `added_tokens`.

A Unigram weighs all pieces of a word at once and keeps no such promise: the change is measured. A WordPiece, which no
decoder of note has, gets added tokens alone.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.tokenizer_files import TOKENIZER_FILE, Places, TokenizerJson, grown_files
from surgeon.common.listener import Listener, Quiet
from surgeon.edits.vocabulary.growing import Old, check_ids
from surgeon.edits.vocabulary.learned import LearnedTokens, learned
from surgeon.edits.vocabulary.requested_words import Listed, check_new, check_words, marked_once, requested_tokens
from surgeon.edits.vocabulary.texts import measured_text, named
from surgeon.errors import BadInput
from surgeon.models.tokenizer import Tokenizer, open_tokenizer
from surgeon.models.view import TOKENIZER_FILES
from surgeon.operations.prepare import TextCounts

_OF_THE_PLAN = Listed()
_NONE_ADDED: Mapping[str, bool] = {}


@dataclass(frozen=True)
class Grown:
    """A grown vocabulary: the facts that repeating the plan needs, the new files by name, and the new tokens.

    `rows` is the number of the base's embedding rows that tokens use, so the first new id. `made_of` lists for each new
    token the old ids into which the old tokenizer cuts it. `inserted` are the bytes inserted into tokenizer files;
    `how` describes how pairs were chosen. `tokens` are the contents of the vocabulary's new tokens in the order of
    their ids.
    """

    kind: str
    how: str
    rows: int
    made_of: tuple[tuple[int, ...], ...]
    inserted: Mapping[str, Places]
    measured: tuple[TextCounts, ...]
    files: Mapping[str, bytes]
    tokens: tuple[str, ...]


def grow(
    base: CheckpointFolder,
    wanted: Sequence[str] | LearnedTokens,
    *,
    rows: int,
    added: Mapping[str, bool] = _NONE_ADDED,
    measure: Sequence[Path] = (),
    listed: Listed = _OF_THE_PLAN,
    listener: Listener | None = None,
) -> Grown:
    """Grow the tokenizer in `base` by the tokens of `wanted`.

    Args:
        base: the checkpoint.
        wanted: the tokens of the plan.
        rows: the model's rows of embeddings.
        added: tokens that are matched before a text is cut, and whether each is special. With some, new ids begin at
            the first that is free.
        measure: texts on which the change is measured, in addition to the texts of `wanted`.
        listed: which file or plan lists the words.
        listener: receives the progress.

    Raises:
        BadInput: the base has no tokenizer.json, more tokens than rows, or a kind that cannot grow; or a token cannot
            be added.
    """
    files, read = tokenizer_json(base)
    old = Old(read, base.source.shown, rows)
    if wanted and read.kind == "WordPiece":
        raise BadInput(f"{TOKENIZER_FILE}: surgeon adds no pieces to a WordPiece; list tokens in `added`")
    with opened_files(files, base) as tokenizer:
        old.ask(tokenizer)
        marks = Listed(key="`special`, `added`")
        if added:
            check_new(old, [(mark, [mark], []) for mark in added], tokenizer, marks)
            rows = max(old.taken.values()) + 1
            if max(read.ids) >= rows:
                raise BadInput(
                    f"{old.shown}: {TOKENIZER_FILE} has the id {max(read.ids)}, and transformers none above"
                    f" {rows - 1}; save it with this version of transformers once, and operate on that"
                )
            old.rows = rows + len(added)
            old.taken |= {mark: number for number, mark in enumerate(added, rows)}
        if isinstance(wanted, LearnedTokens):
            new = learned(old, tokenizer, wanted, listener or Quiet())
            texts = [("learned from", wanted.learn), ("kept", wanted.keep), ("measured", tuple(measure))]
            how = f"pairs that never occur in {named(wanted.keep)}"
            if wanted.how == "appended":
                how = "every pair, behind the old merges"
        else:
            wanted = marked_once(tokenizer, wanted)
            new = requested_tokens(old, tokenizer, wanted, listed)
            texts, how = [("measured", tuple(measure))], "as listed"
        made_of = (*tokenizer.many([*added]), *new.made_of)
        grown, inserted = grown_files(files, old.taken, old.rows, new.tokens, added)
        with opened_files(files | grown, base) as after:
            ids = old.taken | {token.content: number for number, token in enumerate(new.tokens, old.rows)}
            check_ids(old, ids, {content: n for content, n in after.vocabulary().items() if content in ids})
            check_words([*added], after, rows, marks)
            if not isinstance(wanted, LearnedTokens):
                check_words(wanted, after, old.rows, listed)
            measured = tuple(measured_text(use, paths, tokenizer, after) for use, paths in texts if paths)
    return Grown(
        kind=read.shown,
        how=how,
        rows=rows,
        made_of=tuple(map(tuple, made_of)),
        inserted=inserted,
        measured=measured,
        files=grown,
        tokens=tuple(token.content for token in new.tokens),
    )


def tokenizer_json(base: CheckpointFolder) -> tuple[dict[str, bytes], TokenizerJson]:
    """Return (files, tokenizer): the side files of `base` by name, and its parsed tokenizer.json.

    Raises BadInput where it has none of a known kind.
    """
    if TOKENIZER_FILE not in base.side_files:
        way = "copy the tokenizer's files here from the model that this one was made of"
        if any(name in TOKENIZER_FILES for name in base.side_files if not name.endswith("_config.json")):
            save = "`AutoTokenizer.from_pretrained(BASE).save_pretrained(BASE)`"
            way = f"save the tokenizer with transformers once ({save})"
        raise BadInput(f"{base.source.shown}: no {TOKENIZER_FILE}, and a vocabulary changes in it; {way}")
    files = {name: base.read_side_file(name) for name in base.side_files}
    return files, TokenizerJson.parse(files[TOKENIZER_FILE])


@contextlib.contextmanager
def opened_files(files: Mapping[str, bytes], base: CheckpointFolder) -> Iterator[Tokenizer]:
    """Open side files as a tokenizer of transformers. Raises BadInput where there is none, or only a slow one."""
    with tempfile.TemporaryDirectory(prefix="surgeon-tokenizer-") as room:
        folder = Path(room) / "tokenizer"
        folder.mkdir()
        for name, content in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        hint = base.source.small("config.json", max_bytes=1 << 24)
        (folder / "config.json").write_bytes(hint)
        tokenizer, why_not = open_tokenizer(folder)
        if tokenizer is None or not tokenizer.is_fast:
            why = (why_not or f"it is not made of {TOKENIZER_FILE}").replace(str(folder), base.source.shown)
            raise BadInput(f"{base.source.shown}: its vocabulary cannot change: {why}")
        yield tokenizer
