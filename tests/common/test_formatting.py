"""Numbers and names in messages: three digits that read as one would say them, and nouns in their number."""

from __future__ import annotations

import pytest

from surgeon.common.formatting import count, counted, layers_have, size


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0, "0 B"), (999, "999 B"), (999_400, "999 kB"), (999_900, "1 MB"), (1_000_000, "1 MB"), (999_950_000, "1 GB")],
)
def test_a_size_never_reads_1e3(number: int, shown: str) -> None:
    assert size(number) == shown


def test_numbers_and_nouns_agree() -> None:
    assert count(999_900) == "999,900 (1M)"
    assert [counted(number, "document") for number in (0, 1, 2_000)] == ["0 documents", "1 document", "2,000 documents"]
    assert [layers_have([3]), layers_have([0, 1, 4])] == ["layer 3 has", "layers 0-1, 4 have"]
