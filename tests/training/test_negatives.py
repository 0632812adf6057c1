"""What a gate stays closed for beside its sources: a sample of kinds of text, without the new text's own kind."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from surgeon.data.encoding import Encoder
from surgeon.data.packing import Packer, SourceStream
from surgeon.training import negatives
from surgeon.training.negatives import Negatives, kinds_of_text
from tests.training.test_train import base_of
from tests.training.texts import opened_texts


def test_the_sample_says_its_licence_and_has_kinds_to_fit_on_and_to_hold_out() -> None:
    first, *lines = (files("surgeon.training") / "kinds_of_text.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(first).keys() == {"licence"} and "public domain" in first and "CC0" in first
    kinds = kinds_of_text()
    assert sum(map(len, kinds.values())) == len(lines) and min(map(len, kinds.values())) >= 2
    assert sum(len(kind) == 2 for kind in kinds) >= 20 and sum(kind.startswith("en-") for kind in kinds) >= 20


@pytest.mark.parametrize("new", ["de", "ru", "fr", "addresses"])
def test_the_new_texts_own_kind_is_left_out(new: str) -> None:
    """By all passages but its last, beside as much English: the language itself, no English, no other script.

    What stands in every text is no kind of its own.
    """
    kinds = kinds_of_text()
    *known, last = kinds[new]
    text = "\n".join(known)
    english = "\n".join(texts[0] for kind, texts in kinds.items() if kind.startswith("en-"))[: len(text)]
    others = {kind: texts[1:] for kind, texts in kinds.items()} | {new: [last]}
    found = negatives._like_new(others, english, text)
    assert (new in found) is (new != "addresses") and not {"zh", "hi", "fi", "code-c", "en-news", "en-legal"} & {*found}
    assert not negatives._like_new(others, english, english)


def test_of_languages_those_of_the_original_text_count() -> None:
    """By other passages than those that are looked for; English text has no other language, and code has none."""
    kinds = kinds_of_text()
    known = {kind: texts[0::2] for kind, texts in kinds.items()}
    codes = negatives.languages()
    assert len(codes) >= 20 and {"de", "zh"} <= {*codes} and "en" not in codes
    for code in ("de", "nl", "es", "ca", "cs", "zh"):
        assert negatives._languages_of(known, "\n".join(kinds[code][1::2])) == [code]
    english = "\n".join(texts[1] for kind, texts in kinds.items() if kind.startswith(("en-", "code-")))
    assert not {*negatives._languages_of(known, english)} & {*codes}
    assert {*negatives._languages_of(known, "\n".join([english, *kinds["fi"][1::2] * 2]))} & {*codes} == {"fi"}


def test_what_the_tokenizer_cannot_read_is_left_out_and_the_rest_is_parted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passages to fit on stand apart, those held out follow each other; a kind of unknown words is named."""
    base_of(tmp_path)
    encoder = Encoder(tmp_path / "base", vocabulary=10**6)
    streams = []
    for domain, words in enumerate(("w20 w21 w22 w23", "w60 w61 w62 w63")):
        path = tmp_path / f"{domain}.jsonl"
        path.write_text("".join(json.dumps({"text": words}) + "\n" for _ in range(40)))
        packer = Packer(8, "isolated", domain)
        streams.append(SourceStream(str(domain), opened_texts(path), np.arange(40), 0, encoder, packer))
    passages = {
        "read": ["w20 w21 w22", "w23 w24 w25", "w26 w27 w28"],
        "de": ["w21 w22"],
        "own": ["w60 w61"],
        "unread": ["Zürich Ω", "Ω"],
    }
    monkeypatch.setattr(negatives, "kinds_of_text", lambda: passages)
    recalled = [f"w{number} w{number + 1}" for number in range(20, 28)]
    assert Negatives.beside(streams, 8, 16, recalled, []).left_out["de"] == "not in `keep_for_gate`"
    found = Negatives.beside(streams, 8, 16, recalled, ["de"])
    assert found.left_out == {"own": "of the new text's own kind", "unread": "not in the vocabulary"}
    first, second, third = (encoder.encode(text)[0] for text in passages["read"])
    assert [token for sequence in found.fitted["(kinds)"] for token in sequence.ids] == first + third
    assert found.fitted["(kinds)"][0].positions[len(first)] == 0
    assert [(each.ids, each.positions) for each in found.held["(kinds)"]] == [(second, list(range(len(second))))]
    # Other languages count by themselves; of one passage nothing is left to hold out.
    assert [each.ids for each in found.fitted["(languages)"]] == [encoder.encode("w21 w22")[0]]
    assert found.held.keys() == {"(kinds)", "(recalled)"}
    # Of what the base wrote each fourth document is held out, and stands apart.
    (held,) = found.held["(recalled)"]
    assert held.ids == [token for text in (recalled[3], recalled[7]) for token in encoder.encode(text)[0]]
    assert held.positions.count(0) == 2
