"""Tokenizers that grow: by `tokenizers` and transformers, old ids and old text stay, new text gets shorter."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.tokenizer_files import TOKENIZER_FILE, TokenizerJson, without
from surgeon.edits.vocabulary.grow import Grown, grow
from surgeon.edits.vocabulary.learned import How, LearnedTokens, learn_merges
from surgeon.errors import BadInput
from tests import tiny, vocabularies
from tests.vocabularies import ENGLISH, FRENCH, write_text

Made = Callable[[Path], Path]
MIXED = [*ENGLISH, *FRENCH, "Ça alors ! naïve café, 100 % été\n\tlà-bas", "the l'été cat—été", ""]


def base_with(folder: Path, make: Made, *, rows: int) -> Path:
    """A tiny checkpoint with so many rows of embeddings, and the tokenizer that `make` writes."""
    return make(tiny.checkpoint(folder, "llama", num_hidden_layers=1, vocab_size=rows))


def learned(folder: Path, *, count: int = 12, how: How = "unseen") -> LearnedTokens:
    french = write_text(folder / "fr.jsonl", FRENCH, times=5)
    english = write_text(folder / "en.jsonl", ENGLISH)
    return LearnedTokens((french,), count, (english,) if how == "unseen" else (), how)


def written(base: Path, grown: Grown, out: Path) -> Any:
    """The tokenizer that transformers makes of the grown files."""
    out.mkdir()
    for name in CheckpointFolder.open(base).side_files:
        (out / name).write_bytes(grown.files.get(name) or (base / name).read_bytes())
    return AutoTokenizer.from_pretrained(out)


def ids_of(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def ignoring(folder: Path) -> Path:
    return vocabularies.byte_level(folder, ignore_merges=True)


def above(folder: Path) -> Path:
    return vocabularies.byte_level(folder, above=("<|begin|>", "<|end|>"))


# Of every kind: how to make it, and rows of the base, more than tokens where real checkpoints have padded rows.
KINDS: dict[str, tuple[Made, int]] = {
    "byte-level": (vocabularies.byte_level, 300),
    "byte-level, padded rows": (vocabularies.byte_level, 320),
    "byte-level, special tokens above": (above, 304),
    "byte-level, whole words first": (ignoring, 300),
    "sentencepiece-like": (vocabularies.sentencepiece_like, 330),
    "unigram": (vocabularies.unigram, 40),
}


@pytest.mark.parametrize("kind", KINDS)
def test_learned_pieces_leave_old_ids_and_old_text_and_shorten_the_new(kind: str, tmp_path: Path) -> None:
    make, rows = KINDS[kind]
    base = base_with(tmp_path / "base", make, rows=rows)
    grown = grow(CheckpointFolder.open(base), learned(tmp_path), rows=rows)
    old, new = AutoTokenizer.from_pretrained(base), written(base, grown, tmp_path / "out")

    assert 0 < len(grown.tokens) <= 12
    assert [new.convert_tokens_to_ids(token) for token in grown.tokens] == [*range(rows, rows + len(grown.tokens))]
    assert old.get_vocab().items() <= new.get_vocab().items()
    assert (new.all_special_tokens, new.all_special_ids) == (old.all_special_tokens, old.all_special_ids)
    assert new.chat_template == old.chat_template
    before, after = ids_of(old, FRENCH), ids_of(new, FRENCH)
    assert sum(map(len, after)) < 0.9 * sum(map(len, before))
    assert any(number >= rows for ids in after for number in ids)
    assert ids_of(new, ENGLISH) == ids_of(old, ENGLISH)
    # Special tokens are found in text as they were, whatever stands around them.
    assert ids_of(new, ["the</s>cat<s>"]) == ids_of(old, ["the</s>cat<s>"])
    # Every text comes back as far as it did before: WordPiece and Unigram lack characters.
    for text, one, other in zip(MIXED, ids_of(old, MIXED), ids_of(new, MIXED), strict=True):
        assert new.decode(other) == old.decode(one)
        assert "level" not in kind or new.decode(other, clean_up_tokenization_spaces=False) == text
    # What each new token is made of is what the old tokenizer makes of it.
    for token, made_of in zip(grown.tokens, grown.made_of, strict=True):
        spelled = "".join(
            old.convert_ids_to_tokens(made_of)[n].removeprefix("##" if n else "") for n in range(len(made_of))
        )
        assert spelled == token or "<0x" in spelled
    for name, content in grown.files.items():
        assert without(content, grown.inserted[name]) == (base / name).read_bytes()


@pytest.mark.parametrize("kind", ["byte-level, padded rows", "byte-level, special tokens above", "unigram"])
def test_a_grown_tokenizer_is_saved_again_and_takes_more_tokens(kind: str, tmp_path: Path) -> None:
    """As many entries as ids, so that a token that is added later gets the next id, not one that is taken."""
    make, rows = KINDS[kind]
    base = base_with(tmp_path / "base", make, rows=rows)
    grown = grow(CheckpointFolder.open(base), learned(tmp_path, how="appended"), rows=rows)
    new = written(base, grown, tmp_path / "out")
    new.save_pretrained(tmp_path / "again")
    again = AutoTokenizer.from_pretrained(tmp_path / "again")
    assert again.get_vocab() == new.get_vocab() and ids_of(again, MIXED) == ids_of(new, MIXED)
    assert len(new) == rows + len(grown.tokens)
    again.add_tokens(["<|later|>"])
    assert again.convert_tokens_to_ids("<|later|>") == rows + len(grown.tokens)
    # And grows a second time.
    second = grow(CheckpointFolder.open(base_again(tmp_path, rows + 16)), learned(tmp_path), rows=rows + 16)
    assert second.rows == rows + 16 and not set(second.tokens) & set(grown.tokens)


def base_again(folder: Path, rows: int) -> Path:
    made = tiny.checkpoint(folder / "second", "llama", num_hidden_layers=1, vocab_size=rows)
    for file in (folder / "out").iterdir():
        (made / file.name).write_bytes(file.read_bytes())
    return made


def naive_merges(words: list[tuple[list[int], int]], count: int, first: int) -> list[tuple[int, int]]:
    """Algorithm 1 of Sennrich et al. (2016), counting everything anew for every merge."""
    found: list[tuple[int, int]] = []
    while len(found) < count:
        counts: Counter[tuple[int, int]] = Counter()
        for ids, often in words:
            for pair in pairwise(ids):
                counts[pair] += often
        if not counts or max(counts.values()) < 2:
            break
        pair = min(counts, key=lambda pair: (-counts[pair], pair))
        words = [(replaced(ids, pair, first + len(found)), often) for ids, often in words]
        found.append(pair)
    return found


def replaced(ids: list[int], pair: tuple[int, int], new: int) -> list[int]:
    made: list[int] = []
    at = 0
    while at < len(ids):
        here = tuple(ids[at : at + 2]) == pair
        made.append(new if here else ids[at])
        at += 2 if here else 1
    return made


@pytest.mark.parametrize("seed", range(20))
def test_the_learner_is_byte_pair_encoding(seed: int) -> None:
    drawn = random.Random(seed)
    words = [([drawn.randrange(4) for _ in range(drawn.randrange(1, 9))], drawn.randrange(1, 5)) for _ in range(30)]
    found = learn_merges(words, 12, first=4, joined=lambda *_: True)
    assert found == naive_merges([([*ids], often) for ids, often in words], 12, 4)


def test_merges_act_behind_the_old_ones(tmp_path: Path) -> None:
    """What `tokenizers` makes of French is the old segmentation with the new merges carried out on it, in order."""
    base = base_with(tmp_path / "base", vocabularies.byte_level, rows=300)
    grown = grow(CheckpointFolder.open(base), learned(tmp_path, how="appended"), rows=300)
    old = Tokenizer.from_file(str(base / TOKENIZER_FILE))
    new = Tokenizer.from_str(grown.files[TOKENIZER_FILE].decode())
    model = json.loads(grown.files[TOKENIZER_FILE])["model"]
    merges = model["merges"][len(TokenizerJson.parse((base / TOKENIZER_FILE).read_bytes()).model["merges"]) :]
    names = {number: content for content, number in model["vocab"].items()}
    for text in MIXED:
        # Word by word: nothing joins across white space.
        for word, _ in old.pre_tokenizer.pre_tokenize_str(text):
            ids = [token.id for token in old.model.tokenize(word)]
            for nth, merge in enumerate(merges):
                here = [(a, b) for a, b in pairwise(ids) if [names[a], names[b]] == merge]
                ids = replaced(ids, here[0], 300 + nth) if here else ids
            assert [token.id for token in new.model.tokenize(word)] == ids


def test_what_the_ways_promise_and_what_is_measured(tmp_path: Path) -> None:
    base = base_with(tmp_path / "base", vocabularies.byte_level, rows=300)
    other = write_text(tmp_path / "other.jsonl", ["the boat", "la terrasse"])
    found = {}
    for how in ("unseen", "appended"):
        grown = grow(CheckpointFolder.open(base), learned(tmp_path, how=how), rows=300, measure=[other])
        new = written(base, grown, tmp_path / how)
        assert {text.use for text in grown.measured} == {"learned from", "measured"} | (
            {"kept"} if how == "unseen" else set()
        )
        old = AutoTokenizer.from_pretrained(base)
        for text in grown.measured:
            documents = FRENCH * 5 if text.use == "learned from" else ENGLISH if text.use == "kept" else None
            documents = documents or ["the boat", "la terrasse"]
            before, after = ids_of(old, documents), ids_of(new, documents)
            assert (text.documents, text.words) == (len(documents), sum(len(d.split()) for d in documents))
            assert (text.before, text.after) == (sum(map(len, before)), sum(map(len, after)))
            assert text.unchanged == sum(a == b for a, b in zip(before, after, strict=True))
        found[how] = ids_of(new, ENGLISH) == ids_of(old, ENGLISH)
    assert found == {"unseen": True, "appended": False}


@pytest.mark.parametrize("make", [vocabularies.byte_level, vocabularies.sentencepiece_like])
def test_words_asked_for_are_one_token_each(make: Made, tmp_path: Path) -> None:
    """Where they stand in a text: also with a tokenizer that puts a mark of its own before every text."""
    base = base_with(tmp_path / "base", make, rows=340)
    # The last one is on the way to the first, or has a part of it.
    words = [" légère", " lumière", " terrasse", " fishes", " légè"]
    grown = grow(CheckpointFolder.open(base), words, rows=340)
    new = written(base, grown, tmp_path / "out")
    for text in words:
        ids = ids_of(new, [f"the {text.strip()}"])[0]
        assert ids[0] < 340 <= ids[-1] and len(ids) == 2, text
        assert new.decode(ids) == f"the {text.strip()}"


def test_sections_for_batches_say_nothing_of_a_text(tmp_path: Path) -> None:
    """A tokenizer.json that was saved for training may cut and pad every text to one length."""
    found = []
    for padded in (False, True):
        base = base_with(tmp_path / f"base{padded}", vocabularies.byte_level, rows=300)
        if padded:
            made = Tokenizer.from_file(str(base / TOKENIZER_FILE))
            made.enable_padding(length=32, pad_token="<pad>")
            made.enable_truncation(8)
            made.save(str(base / TOKENIZER_FILE))
        assert grow(CheckpointFolder.open(base), ["lumière"], rows=300).tokens[-1] == "lumiÃ¨re"
        found.append(grow(CheckpointFolder.open(base), learned(tmp_path), rows=300).measured)
    assert found[0] == found[1]


@pytest.mark.parametrize("make", [vocabularies.byte_level, vocabularies.sentencepiece_like])
def test_words_begin_and_end_at_special_tokens(make: Made, tmp_path: Path) -> None:
    """Text of chats has them in it, and what stands beside one is cut as if the text began or ended there."""
    base = base_with(tmp_path / "base", make, rows=340)
    chats = ["<s>gogo</s><s>gogogo</s>", "the cat</s>gugu"]
    keep = write_text(tmp_path / "keep.jsonl", chats)
    learn = write_text(tmp_path / "learn.jsonl", ["gogo gugu gagigo", "gagugi gigi"], times=5)
    grown = grow(CheckpointFolder.open(base), LearnedTokens((learn,), 30, (keep,), "unseen"), rows=340)
    old, new = AutoTokenizer.from_pretrained(base), written(base, grown, tmp_path / "out")
    assert grown.tokens and ids_of(new, chats) == ids_of(old, chats)
    assert next(text for text in grown.measured if text.use == "kept").unchanged == 2


def test_a_unigram_that_falls_back_on_bytes_gets_characters_that_leave_old_text(tmp_path: Path) -> None:
    base = base_with(tmp_path / "base", vocabularies.unigram, rows=320)
    data = json.loads((base / TOKENIZER_FILE).read_text())
    pieces = [entry for entry in data["model"]["vocab"] if entry[0] != "é"]
    data["model"] |= {"byte_fallback": True, "vocab": pieces + [[f"<0x{byte:02X}>", -20.0] for byte in range(256)]}
    data["decoder"] = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, data["decoder"]]}
    (base / TOKENIZER_FILE).write_text(json.dumps(data))
    old = AutoTokenizer.from_pretrained(base)
    new = written(base, grow(CheckpointFolder.open(base), ["été"], rows=320), tmp_path / "out")
    assert len(ids_of(new, ["été"])[0]) == 1
    assert ids_of(new, ENGLISH) == ids_of(old, ENGLISH)
    # No score of 0, which would beat every word that the character stands in.
    scores = dict(json.loads((tmp_path / "out" / TOKENIZER_FILE).read_text())["model"]["vocab"])
    assert scores["é"] == -20.0 and scores["▁été"] < 0


REFUSED: dict[str, tuple[list[str], str]] = {
    "there already": (["the"], "already a token"),
    "two there already": (
        ["xylem", "the", "cat"],
        r"'the'\): already a token \('the', id \d+\), and so are 2 \('cat'\); leave these 2 out",
    ),
    "a special token": (["</s>"], "already a token"),
    "twice": (["lune", "soleil", "lune"], "`tokens` 2 .'lune'.: given before, as .* of `tokens` 0; leave it out"),
    "too long": (["é" * 600], "1200 characters as the vocabulary writes it"),
    "empty": ([" "], "empty"),
    "two words": (["New York"], "cuts it into"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_words_that_cannot_be_tokens(case: str, tmp_path: Path) -> None:
    words, reason = REFUSED[case]
    base = base_with(tmp_path / "base", vocabularies.byte_level, rows=300)
    with pytest.raises(BadInput, match=reason):
        grow(CheckpointFolder.open(base), words, rows=300)


def test_tokenizers_that_cannot_grow(tmp_path: Path) -> None:
    def refused(edit: Callable[[dict[str, Any]], object], rows: int = 300) -> str:
        base = base_with(tmp_path / str(len(list(tmp_path.iterdir()))), vocabularies.byte_level, rows=rows)
        data = json.loads((base / TOKENIZER_FILE).read_text())
        edit(data)
        (base / TOKENIZER_FILE).write_text(json.dumps(data))
        with pytest.raises(BadInput) as told:
            grow(CheckpointFolder.open(base), ["lumière"], rows=rows)
        assert "\n" not in str(told.value)
        return str(told.value)

    assert "has only 299 rows" in refused(lambda data: None, rows=299).replace("the embedding has", "has")
    assert "WordLevel" in refused(lambda data: data["model"].update(type="WordLevel"))
    assert "dropout" in refused(lambda data: data["model"].update(dropout=0.1))
    assert "no `model`" in refused(lambda data: data.pop("model"))
    bare = tiny.checkpoint(tmp_path / "bare", "llama", num_hidden_layers=1)
    for made_of, way in ((None, "copy the tokenizer's files here from"), ("vocab.txt", "save the tokenizer with")):
        if made_of:
            (bare / made_of).write_text("a")
        with pytest.raises(BadInput, match=rf"no tokenizer\.json, and .*; {way}"):
            grow(CheckpointFolder.open(bare), ["lumière"], rows=128)
    nothing = write_text(tmp_path / "none.jsonl", ["the"])
    base = base_with(tmp_path / "base", vocabularies.byte_level, rows=300)
    with pytest.raises(BadInput, match="nothing to add"):
        grow(CheckpointFolder.open(base), LearnedTokens((nothing,), 4, (nothing,), "unseen"), rows=300)


def test_a_word_piece_gets_no_pieces(tmp_path: Path) -> None:
    base = base_with(tmp_path / "base", vocabularies.word_piece, rows=96)
    with pytest.raises(BadInput, match="surgeon adds no pieces to a WordPiece; list tokens in `added`"):
        grow(CheckpointFolder.open(base), ["lune"], rows=96)


def test_bytes_are_known_by_what_cuts_texts_too(tmp_path: Path) -> None:
    """A file without a decoder is of bytes by its pre-tokenizer."""
    base = base_with(tmp_path / "base", vocabularies.byte_level, rows=300)
    data = json.loads((base / TOKENIZER_FILE).read_text()) | {"decoder": None}
    assert TokenizerJson.parse(json.dumps(data).encode()).byte_level


def test_files_beside_tokenizer_json_grow_with_it(tmp_path: Path) -> None:
    """vocab.json and merges.txt, which a tokenizer without tokenizer.json is made of, in GPT-2's layout."""
    base = base_with(tmp_path / "base", vocabularies.byte_level, rows=300)
    model = json.loads((base / TOKENIZER_FILE).read_text())["model"]
    (base / "vocab.json").write_text(json.dumps(model["vocab"], ensure_ascii=False))
    (base / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(merge) for merge in model["merges"]))
    grown = grow(CheckpointFolder.open(base), learned(tmp_path), rows=300)
    after = json.loads(grown.files[TOKENIZER_FILE])["model"]
    assert json.loads(grown.files["vocab.json"]) == after["vocab"]
    assert grown.files["merges.txt"].decode().splitlines()[1:] == [" ".join(merge) for merge in after["merges"]]
    for name, content in grown.files.items():
        assert without(content, grown.inserted[name]) == (base / name).read_bytes()
