from __future__ import annotations

from pathlib import Path

import pytest

from surgeon.errors import BadInput
from surgeon.lab.learning import base
from surgeon.lab.learning.base import documentation, split

LONG = "This sentence is there to be longer than the least length of a documentation string: {}."


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_documentation_strings_in_the_order_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_LEAST_CHARACTERS", 1)
    # Parsed, never run: the module would leave the test run.
    write(tmp_path / "b.py", f'"""{LONG.format("b")}"""\nraise SystemExit\n')
    write(
        tmp_path / "a" / "c.py",
        f'class C:\n    """{LONG.format("C")}"""\n    async def f(self):\n        """{LONG.format("f")}\n\n'
        f'        Indented."""\n\ndef g():\n    """Short."""\n\ndef h():\n    """{LONG.format("C")}"""\n',
    )
    write(tmp_path / "pydoc_data" / "topics.py", f"topics = {{'x': {LONG.format('topic')!r}}}\n")
    for left_out in ("test/d.py", "a/tests/d.py", "site-packages/d.py", "test_d.py"):
        write(tmp_path / left_out, f'"""{LONG.format("never")}"""\n')
    write(tmp_path / "old.py", f'"""{LONG.format("old")}"""\nprint "Python 2"\n')
    assert documentation(tmp_path) == [
        LONG.format("C"),
        LONG.format("f") + "\n\nIndented.",
        LONG.format("b"),
        LONG.format("topic"),
    ]


def test_a_python_without_sources_is_told(tmp_path: Path) -> None:
    write(tmp_path / "a.py", f'"""{LONG.format("a")}"""\n')
    with pytest.raises(BadInput, match="too little documentation"):
        documentation(tmp_path)


def test_what_is_held_out_is_not_trained_on() -> None:
    documents = [f"document {number}" for number in range(100)]
    trained_on, held_out = split(documents)
    assert len(held_out) == 5 and not set(held_out) & set(trained_on)
    assert sorted([*trained_on, *held_out]) == sorted(documents)
