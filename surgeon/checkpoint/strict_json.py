"""A parser for untrusted JSON: size, depth and digits are limited before parsing, and repeated keys are refused.

Python's parser recurses once for each nesting level and reads integers of any length. Anybody can write a checkpoint's
header, index or config, so the parser's cost is limited first.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import math
import re
from collections.abc import Iterator
from typing import Any, Never

from surgeon.errors import BadInput, printable

MAX_BYTES = 100_000_000
MAX_DEPTH = 64
MAX_DIGITS = 64
# The most commas and opening brackets: the memory of the parsed value grows with their number. A safetensors header has
# about ten for each tensor, an index one.
MAX_ITEMS = 1_500_000
_QUOTES_PER_ITEM = 4

# A string token, or the rest of the file after an unclosed quote. Possessive, so matching takes one pass and no stack.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)', re.DOTALL)
_LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (MAX_DIGITS + 1))
# Python reads -0 as an integer, other parsers as a float: one reader would check a value that another does not use.
_MINUS_ZERO = re.compile(rb"-0(?![0-9.eE])")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_BRACES_AS_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def with_tagged_floats(value: Any) -> Any:
    """Replace each infinity by `{"__float__": "Infinity"}`, and NaN likewise, as transformers writes configs.

    JSON has neither value, and transformers reads both forms.
    """
    if isinstance(value, dict):
        return {key: with_tagged_floats(each) for key, each in value.items()}
    if isinstance(value, list):
        return [with_tagged_floats(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    return value


def parse_json_strict(
    data: bytes,
    *,
    file: str,
    max_bytes: int = MAX_BYTES,
    max_depth: int = MAX_DEPTH,
    max_items: int = MAX_ITEMS,
    constants: bool = False,
) -> Any:
    """Return the value of a UTF-8 JSON document; errors call the document `file`.

    With `constants`, NaN and Infinity are accepted: a loss may be NaN, and a config's limit infinite. Raises BadInput
    for JSON that is too large or too deep, for text that is not JSON or not UTF-8, for a number that a float cannot
    represent, for a key that occurs twice, and for half of a UTF-16 pair.
    """
    shown = printable(file)
    if len(data) > max_bytes:
        raise BadInput(f"{shown}: {len(data):,} bytes of JSON, at most {max_bytes:,} are read; is this the right file?")
    if data.startswith(codecs.BOM_UTF8):
        raise BadInput(f"{shown}: begins with a byte order mark, which JSON does not allow; save it as UTF-8 without")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{shown}: not UTF-8 at byte {error.start}; is the file damaged, or saved in another encoding?"
        ) from None
    _check_cost(data, shown, max_depth=max_depth, max_items=max_items)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Return the pairs of a JSON object as a dict. Raises BadInput for a repeated key."""
        found = dict(pairs)
        if len(found) < len(pairs):
            repeated = printable(_first_repeated(pairs))
            raise BadInput(f"{shown}: the key {repeated!r} occurs twice in one object; remove one of them")
        return found

    def refuse(constant: str) -> Never:
        """Raise BadInput for NaN or Infinity."""
        raise BadInput(f"{shown}: {constant} is not JSON, and not a number to compute with; write a finite number")

    def finite(digits: str) -> float:
        """Return a JSON number as a float. Raises BadInput where it overflows to infinity."""
        value = float(digits)
        if math.isinf(value):
            raise BadInput(f"{shown}: {digits} is more than a float can hold; write a finite number")
        return value

    try:
        value = json.loads(
            text,
            object_pairs_hook=unique,
            parse_constant=None if constants else refuse,
            parse_float=finite,
        )
    except json.JSONDecodeError as error:
        raise BadInput(
            f"{shown}: not valid JSON: {error.msg} (line {error.lineno}, column {error.colno}); download it again, or"
            " undo the last edit"
        ) from None
    if _SURROGATE.search(data):
        _refuse_half_characters(value, shown)
    return value


def json_object(content: bytes) -> dict[str, Any]:
    """Return the object in a JSON file of minor importance; an empty dict where there is no object."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


@contextlib.contextmanager
def shaped(file: str) -> Iterator[None]:
    """Convert the errors that wrongly shaped or encoded content of `file` causes in the block to BadInput."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise BadInput(
            f"{printable(file)}: not what a file of this name holds ({printable(str(error), 80)}); get the model's own"
        ) from error


def count_items(data: bytes) -> int:
    """Count the commas and opening brackets outside of strings; the parsed value's memory grows with their number."""
    bare = _STRING.sub(b"", data) if b'"' in data else data
    return bare.count(b",") + bare.count(b"[") + bare.count(b"{")


def _check_cost(data: bytes, shown: str, *, max_depth: int, max_items: int) -> None:
    """Raise BadInput for JSON text that is too costly to parse, or that parsers read differently.

    These are too many strings or values, too long numbers, minus zero, and too deep or unbalanced brackets.
    """
    # Counted first, because taking strings out costs memory for each of them.
    if data.count(b'"') > _QUOTES_PER_ITEM * max_items + 2:
        raise BadInput(f"{shown}: more than {2 * max_items:,} strings; this is not a checkpoint's file: get it again")
    bare = _STRING.sub(b"", data)
    if count_items(bare) > max_items:
        raise BadInput(f"{shown}: more than {max_items:,} values; this is not a checkpoint's file: get it again")
    if _LONG_NUMBER.search(bare):
        raise BadInput(f"{shown}: a number of more than {MAX_DIGITS} digits; is the file damaged?")
    if _MINUS_ZERO.search(bare):
        raise BadInput(f"{shown}: minus zero, which parsers read differently; write 0")
    brackets = bare.translate(_BRACES_AS_BRACKETS, delete=_NO_BRACKETS)
    # Each pass takes away the innermost pairs, so the number of passes is the depth.
    for _ in range(max_depth):
        if not brackets:
            return
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise BadInput(
            f"{shown}: brackets that are not closed, or nested more than {max_depth} deep; is the file damaged?"
        )


def _first_repeated(pairs: list[tuple[str, Any]]) -> str:
    """Return the first key that occurs a second time."""
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            return key
        seen.add(key)
    raise AssertionError("no key is repeated")


def _refuse_half_characters(value: Any, shown: str) -> None:
    """Raise BadInput where a string of a parsed value contains an unpaired UTF-16 surrogate."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise BadInput(
            f"{shown}: a string holds half of a UTF-16 pair, which no encoding can write; remove it"
        ) from None
