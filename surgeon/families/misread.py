"""Fields of a config.json that transformers reads as something else, because another field says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from surgeon.common.library import LOAD_FAILURES
from surgeon.errors import printable

# What describes no model, or is read for each layer.
_NOT_READ = frozenset({"architectures", "auto_map", "model_type", "transformers_version"})
_MOST = 60


def read_otherwise(config: Mapping[str, Any], made: Any, path: Sequence[str]) -> str:
    """What of a config.json the object that transformers made of it has otherwise, in words; nothing where nothing is.

    The text's part stands at `path`. Values that fill in for none, switch something off or spell the same in new words
    are no other values.
    """
    # JSON has no infinity.
    parts: list[tuple[str, Any, Any]] = [("", made._decode_special_floats(dict(config)), made)]
    for key in path:
        name, part, read = parts[-1]
        inner = part.get(key)
        parts.append((f"{name}{key}.", inner if isinstance(inner, Mapping) else {}, getattr(read, key, None)))
    found = [each for name, part, read in parts for each in _of_part(name, part, read)]
    more = f", and {len(found) - 1} more so" if found[1:] else ""
    return (
        f"config.json: {found[0]}{more}, as another field overrules it: surgery follows transformers" if found else ""
    )


def _of_part(name: str, part: Mapping[str, Any], made: Any) -> Iterator[str]:
    for key, value in part.items():
        if key in _NOT_READ or key.startswith("_") or isinstance(value, Mapping):
            continue
        try:
            read = getattr(made, key)
        except LOAD_FAILURES:
            # No field of this class, or one that differs from layer to layer.
            continue
        if not _same(value, read):
            yield f"transformers reads `{name}{printable(key)}` as {_shown(read)}, not {_shown(value)}"


def _same(value: Any, read: Any) -> bool:
    if value is None or not read or isinstance(read, Mapping) or type(read).__module__ == "torch":
        return value is None or not read or isinstance(read, Mapping) or str(read) == f"torch.{value}"
    if isinstance(read, tuple | list) and isinstance(value, list):
        pairs = set(zip(map(str, value), map(str, read), strict=False))
        words = all(isinstance(each, str) for each in (*value, *read))
        renamed = words and len(pairs) == len({old for old, _ in pairs}) == len({new for _, new in pairs})
        return len(value) == len(read) and (list(read) == value or renamed)
    return bool(value == read)


def _shown(value: Any) -> str:
    return printable(str(value), _MOST)
