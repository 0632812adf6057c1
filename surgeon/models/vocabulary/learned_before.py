"""Pieces that were learned before: what a preview learned `apply` need not learn again.

An entry of the cache counts for the same tokenizer, texts, settings and versions alone, and only where this user's
surgeon wrote it: it carries a code (HMAC-SHA256) by the user's own key.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Mapping
from importlib import metadata

from surgeon._version import __version__
from surgeon.checkpoint.tokenizer_files import NewToken
from surgeon.common.cache import cache_folder, read_entry, write_entry
from surgeon.common.own_key import own_key
from surgeon.models.vocabulary.growing import New
from surgeon.models.vocabulary.learned import LearnedTokens
from surgeon.models.vocabulary.texts import digest_of

# Raised whenever the same settings learn something else.
_FORMAT = 1
_KIND = "learned_tokens"
_LIBRARIES = ("transformers", "tokenizers")


def learned_once(
    files: Mapping[str, bytes], rows: int, wanted: LearnedTokens, learn: Callable[[], New]
) -> tuple[New, bool]:
    """Return the pieces that `learn` learns, and whether they were learned before.

    Args:
        files: the base's side files, by name.
        rows: the model's rows of embeddings.
        wanted: what is to be learned.
        learn: learns it.
    """
    folder = cache_folder(_KIND)
    if folder is None:
        return learn(), False
    key = _key(files, rows, wanted)
    if (content := read_entry(folder, key)) is not None:
        code, _, body = content.partition(b"\n")
        if hmac.compare_digest(code, _code(key, body)):
            return _read(body), True
    new = learn()
    body = _written(new)
    write_entry(folder, key, _code(key, body) + b"\n" + body)
    return new, False


def _key(files: Mapping[str, bytes], rows: int, wanted: LearnedTokens) -> str:
    """Return what the pieces depend on, as one digest."""
    given = {
        "format": _FORMAT,
        "versions": [__version__, *(metadata.version(name) for name in _LIBRARIES)],
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in sorted(files.items())},
        "rows": rows,
        "how": wanted.how,
        "count": wanted.count,
        "learn": [digest_of([path]) for path in wanted.learn],
        "keep": [digest_of([path]) for path in wanted.keep],
    }
    return hashlib.sha256(json.dumps(given).encode()).hexdigest()


def _code(key: str, body: bytes) -> bytes:
    return hmac.new(own_key().secret, f"{_KIND} {key}\n".encode() + body, "sha256").hexdigest().encode()


def _written(new: New) -> bytes:
    tokens = zip(new.tokens, new.made_of, strict=True)
    return json.dumps([[token.content, token.merge, token.score, made_of] for token, made_of in tokens]).encode()


def _read(body: bytes) -> New:
    new = New()
    for content, merge, score, made_of in json.loads(body):
        new.add(NewToken(content, None if merge is None else (merge[0], merge[1]), score), tuple(made_of))
    return new
