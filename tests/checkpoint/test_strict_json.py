"""Hostile JSON costs little and is refused in one line; honest JSON is what Python's parser says."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surgeon.checkpoint.strict_json import MAX_DEPTH, MAX_DIGITS, parse_json_strict
from surgeon.errors import BadInput

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def refused(data: bytes, **options: int | bool) -> str:
    with pytest.raises(BadInput) as caught:
        parse_json_strict(data, file="some.json", **options)
    message = str(caught.value)
    assert message.startswith("some.json: ")
    assert "\n" not in message
    return message


@settings(max_examples=200)
@given(value=VALUES, ascii_only=st.booleans(), indent=st.sampled_from([None, 2]))
def test_honest_json_comes_back(value: object, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert parse_json_strict(text.encode("utf-8", "strict"), file="some.json", constants=True) == value


@settings(max_examples=300)
@given(st.binary(max_size=60) | st.text('{}[]",:\\u09dDeE+- ntf', max_size=60).map(str.encode))
def test_anything_else_is_bad_input(data: bytes) -> None:
    try:
        value = parse_json_strict(data, file="some.json")
    except BadInput as error:
        assert "\n" not in str(error)
    else:
        assert repr(value) == repr(json.loads(data.decode("utf-8")))


@pytest.mark.parametrize(
    "data", [b"[" * 1_000_000, b'{"a":' * 500_000, b"[" * 500_000 + b"]" * 500_000, b"]" * 1_000_000]
)
def test_depth_never_reaches_the_parser(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("the recursive parser was reached"))
    assert "nested more than" in refused(data)


def test_depth_is_counted_exactly_and_not_in_strings() -> None:
    at_most = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    parse_json_strict(at_most.encode(), file="some.json")
    refused(f"[{at_most}]".encode())
    assert parse_json_strict(b'["' + b"[" * 500 + b'", "\\"[[["]', file="some.json", max_depth=1) == ["[" * 500, '"[[[']


def test_long_numbers_never_reach_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = "9" * MAX_DIGITS
    assert parse_json_strict(longest.encode(), file="some.json") == int(longest)
    assert parse_json_strict(json.dumps(longest * 3).encode(), file="some.json") == longest * 3
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("the parser was reached"))
    for data in (b"1" * 1_000_000, b"[0." + b"1" * 1000 + b"]", b'{"a": 1e' + b"9" * 100 + b"}"):
        assert "digits" in refused(data)


def test_unclosed_strings_take_one_pass() -> None:
    """A scanner that starts again at every quote would take the square of this."""
    assert "not valid JSON" in refused(b'"' + b'\\"' * 2_000_000)


def test_counts_of_values_are_capped() -> None:
    assert "values" in refused(b"[" + b"[]," * 1000 + b"[]]", max_items=1000)
    assert "bytes" in refused(b"[1, 2, 3]", max_bytes=8)


def test_keys_stand_once() -> None:
    assert "'lr' occurs twice" in refused(b'{"a": [{"lr": 1, "b": 2, "lr": 1}]}')
    assert "twice" in refused(b'{"ab": 1, "\\u0061b": 2}')


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not valid JSON"),
        (b'{"a": 1,}', "line 1, column"),
        (b"{'a': 1}", "not valid JSON"),
        (b"[{]}", "not valid JSON"),
        (b"[-0]", "minus zero"),
        (b'\xef\xbb\xbf{"a": 1}', "byte order mark, which JSON does not allow; save it as UTF-8 without"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
        (b"\x1f\x8b[{", "not UTF-8 at byte 1"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8 at byte 0"),
        (b'["\\ud800"]', "half of a UTF-16 pair"),
        (b'{"\\udc00x": 1}', "half of a UTF-16 pair"),
    ],
)
def test_what_is_not_json(data: bytes, words: str) -> None:
    assert words in refused(data)


def test_pairs_of_surrogates_are_characters() -> None:
    assert parse_json_strict(b'"\\ud83d\\ude00"', file="some.json") == "\N{GRINNING FACE}"


def test_constants_where_they_are_admitted() -> None:
    assert parse_json_strict(b"[Infinity]", file="some.json", constants=True) == [math.inf]
    for constant in (b"NaN", b"Infinity", b"-Infinity"):
        assert "is not JSON, and not a number to compute with; write a finite number" in refused(b"[%s]" % constant)
    # To Python this is infinity too.
    for data in (b"[1e999]", b"[-1.5E+400]"):
        assert "more than a float can hold; write a finite number" in refused(data, constants=True)


def test_names_are_escaped() -> None:
    with pytest.raises(BadInput) as caught:
        parse_json_strict(b'{"\\u001b[31m": 1, "\\u001b[31m": 2}', file="a\nb.json")
    assert "\x1b" not in str(caught.value)
    assert "\n" not in str(caught.value)
