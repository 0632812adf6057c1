"""Documents, tokens, sequences: what is refused, what a seed determines, what resuming gives back."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from surgeon.common.distributed import Ranks
from surgeon.data import packing
from surgeon.data.chats import Chat, Message
from surgeon.data.documents import PIECE, Documents
from surgeon.data.encoding import Encoder
from surgeon.data.packing import (
    IGNORED_LABEL,
    Mixture,
    Packer,
    Packing,
    SourceStream,
    batch_of,
    batches,
    held_out,
    split,
)
from surgeon.errors import BadInput
from tests import tiny
from tests.training.texts import CHAT_TEMPLATE, add_tokenizer, corpus, json_lines, opened_texts, text


@pytest.fixture
def encoder(tmp_path: Path) -> Encoder:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    return Encoder(add_tokenizer(folder, template=CHAT_TEMPLATE), vocabulary=128)


def stream(documents: Documents, encoder: Encoder, **options: Any) -> SourceStream:
    settings = {"name": "a", "length": 16, "packing": "isolated", "domain": 1, "seed": 0} | options
    numbers, _ = split(documents, 0.0, name="a")
    packer = Packer(settings["length"], settings["packing"], settings["domain"])
    return SourceStream(settings["name"], documents, numbers, settings["seed"], encoder, packer)


@pytest.mark.parametrize(
    "line, told",
    [
        (b'{"text": "a"', ":2: not JSON (Expecting ',' delimiter"),
        (b'{"txt": "a"}', ":2: no keys of a text (`text`) or a chat (messages,"),
        (b'["a"]', ":2: no JSON object (['a']); write one a document"),
        (b'{"text": 5}', ":2: `text` is no text (5)"),
        (b'{"text": "\xff"}', ":2: not UTF-8 text (byte 10 of the line)"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_trained(tmp_path: Path, line: bytes, told: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "w1"}\n' + line + b"\n")
    with pytest.raises(BadInput) as caught:
        opened_texts(path)
    assert str(caught.value).startswith(f"{path}{told}")


@pytest.mark.parametrize(
    "messages, told",
    [
        ([], "not a list of messages"),
        ([{"role": "user"}], "message 1 has no `content` \\(nor `value`\\) that is a text \\(nothing\\)"),
        ([{"role": "user", "content": "w1"}], "no message of the role `assistant`"),
    ],
)
def test_a_bad_chat_is_named_by_line(tmp_path: Path, messages: Any, told: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n", encoding="utf-8")
    with pytest.raises(BadInput, match=f"a.jsonl:1: .*{told}"):
        opened_texts(path, kind="chat")


def test_sources_that_are_no_sources(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_bytes(b"\n\n")
    (tmp_path / "blank.txt").write_bytes(b" \n")
    (tmp_path / "a.csv").write_bytes(b"a")
    (tmp_path / "latin.txt").write_bytes(b"ok\n\xe9\n")
    (tmp_path / "folder").mkdir()
    for name, told in (
        ("empty.jsonl", "no document with text"),
        ("blank.txt", "no document with text"),
        ("a.csv", "ends in none of .jsonl, .json, .txt, .parquet"),
        ("latin.txt", "latin.txt:2: not UTF-8 text"),
        ("folder", "no .jsonl, .json, .txt, .parquet in this folder"),
        ("absent", "no such file or folder"),
    ):
        with pytest.raises(BadInput, match=told):
            opened_texts(tmp_path / name)


def test_texts_come_back_whole(tmp_path: Path) -> None:
    lines = [f"Zeile {n} – ü\n" for n in range(2000)]
    (tmp_path / "a.txt").write_text("".join(lines), encoding="utf-8")
    found = opened_texts(tmp_path / "a.txt")
    pieces = [found.read(n) for n in range(len(found))]
    assert "".join(pieces) == "".join(lines)  # type: ignore[arg-type]
    assert len(pieces) > 2
    assert all(isinstance(piece, str) and len(piece.encode()) >= PIECE for piece in pieces[:-1])
    texts = [text(9, n) for n in range(5)]
    json_lines(tmp_path / "b.jsonl", [texts[0], " ", *texts[1:]])
    rows = opened_texts(tmp_path / "b.jsonl")
    assert [rows.read(n) for n in range(len(rows))] == texts
    assert rows.rows.blank == 1
    both = opened_texts(tmp_path)
    assert len(both) == len(pieces) + 5


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [text(9, n) for n in range(11)]
    chats = [[{"role": "user", "content": "w1"}, {"role": "assistant", "content": f"w{n}"}] for n in range(11)]
    table = arrow.table({"text": texts, "messages": chats})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    found = opened_texts(tmp_path / "a.parquet", kind="text")
    assert [found.read(n) for n in (10, *range(10))] == [texts[10], *texts[:10]]
    assert [*found.rows.sizes] == [len(each) for each in texts]
    chat = opened_texts(tmp_path / "a.parquet", kind="chat")
    assert chat.read(3) == Chat((Message("user", "w1"), Message("assistant", "w3")))
    with pytest.raises(BadInput, match="no key `body`; it has text, messages"):
        opened_texts(tmp_path / "a.parquet", field="body")


@pytest.mark.parametrize("how", ["isolated", "joined"])
def test_every_token_of_a_pass_is_used_once(tmp_path: Path, encoder: Encoder, how: Packing) -> None:
    documents = opened_texts(corpus(tmp_path / "a.jsonl"))
    source = stream(documents, encoder, packing=how)
    expected = sorted(token for n in range(len(documents)) for token in encoder.encode(documents.read(n))[0])
    found: list[int] = []
    while source.epoch == 0:
        sequence = source.next()
        assert len(sequence.ids) == len(sequence.labels) == len(sequence.positions) == 16
        found += sequence.ids
        ends = [at + 1 for at, token in enumerate(sequence.ids) if token == 2 and at < 15]
        if how == "isolated":
            assert [at for at, position in enumerate(sequence.positions) if position == 0] == [0, *ends]
            assert all(sequence.labels[at] == IGNORED_LABEL for at in ends)
        else:
            assert sequence.positions == list(range(16))
            assert sequence.labels == sequence.ids
    in_order = [token for n in range(len(documents)) for token in encoder.encode(documents.read(n))[0]]
    assert found[: len(in_order)] != in_order  # shuffled
    assert all(found.count(token) >= expected.count(token) for token in set(expected))


class Words:
    """An encoder that keeps a document's words apart from every other document's, and counts what it encodes."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def encode(self, document: str) -> tuple[list[int], list[bool]]:
        self.calls[document] += 1
        ids = [int(word) for word in document.split()]
        return ids, [True] * len(ids)


def of_words(tmp_path: Path, lengths: list[int]) -> Documents:
    """Documents of so many tokens; token n of document d is 1000 d + n."""
    texts = [" ".join(str(1000 * number + n) for n in range(count)) for number, count in enumerate(lengths)]
    return opened_texts(json_lines(tmp_path / "words.jsonl", texts))


def test_a_run_shorter_than_a_pass_sees_many_documents(tmp_path: Path) -> None:
    """A window is drawn, not a document: long documents fill no step, and their windows are not cut."""
    documents = of_words(tmp_path, [160] * 20)
    source = stream(documents, Words(), length=16)  # type: ignore[arg-type]
    begins = [source.next().ids[0] for _ in range(60)]
    assert len({begin // 1000 for begin in begins}) >= 18
    # The next window of the same document follows about as seldom as chance has it.
    assert sum(after == before + 16 for before, after in itertools.pairwise(begins)) <= 2
    assert all(begin % 16 == 1000 * (begin // 1000) % 16 for begin in begins)
    assert {source.next().ids[0] for _ in range(140)} | {*begins} == {
        1000 * number + 16 * window for number in range(20) for window in range(10)
    }


@pytest.mark.parametrize("group", [100, 2**25])
def test_a_pass_has_every_token_once_and_encodes_every_document_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    monkeypatch.setattr(packing, "_SHUFFLED_BYTES", group)
    lengths = [3, 100, 16, 1, 47, 32, 5, 15, 17, 200]
    documents, words = of_words(tmp_path, lengths), Words()
    source = stream(documents, words, length=16)  # type: ignore[arg-type]
    found: list[int] = []
    while source.epoch == 0:
        found += source.next().ids
    expected = [1000 * number + n for number, count in enumerate(lengths) for n in range(count)]
    # The last sequence is of the next pass in part or whole; then the ends of documents may still wait.
    assert len(found[:-16]) == len({*found[:-16]})
    assert {*found} <= {*expected}
    assert len({*found}) >= len(expected) - sum(lengths) % 16
    assert max(Counter(words.calls).values()) <= 2
    assert sum(words.calls.values()) <= len(lengths) + 1
    # The bytes of what is drawn are the documents', wherever they are cut.
    drawn = list(itertools.islice(source.lengths(), sum(-(-count // 16) for count in lengths)))
    assert sum(count for count, _ in drawn) == sum(lengths)
    assert sum(nbytes for _, nbytes in drawn) == pytest.approx(sum(documents.rows.sizes))


def test_what_waits_in_a_sequence_is_there_on_resuming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two sequences the ends of documents may wait in one that is not full, also of an earlier group."""
    monkeypatch.setattr(packing, "_SHUFFLED_BYTES", 100)
    documents = of_words(tmp_path, [3, 100, 16, 1, 47, 32, 5, 15, 17, 200])
    whole = stream(documents, Words(), length=16)  # type: ignore[arg-type]
    states, expected = [], []
    for _ in range(60):
        states.append(json.loads(json.dumps(whole.state())))
        expected.append(whole.next())
    assert max(map(len, states)) > 5
    resumed = stream(documents, Words(), length=16)  # type: ignore[arg-type]
    for begin, state in enumerate(states):
        resumed.restore(state)
        assert [resumed.next() for _ in expected[begin : begin + 8]] == expected[begin : begin + 8]


def mixture(documents: Documents, encoder: Encoder, *, seed: int = 0) -> Mixture:
    streams = [stream(documents, encoder, name=name, seed=seed, domain=n) for n, name in enumerate("ab")]
    return Mixture(streams, [0.9, 0.1], seed=seed)


def test_the_order_is_the_seeds_and_resumes_anywhere(tmp_path: Path, encoder: Encoder) -> None:
    documents = opened_texts(corpus(tmp_path / "a.jsonl", documents=12))
    whole, same, other = (mixture(documents, encoder, seed=seed) for seed in (1, 1, 2))
    expected = [whole.next() for _ in range(100)]
    assert [same.next() for _ in range(100)] == expected
    assert [other.next() for _ in range(100)] != expected
    assert whole.taken == [90, 10]
    first = mixture(documents, encoder, seed=1)
    for stop in (0, 1, 37, 64):
        while sum(first.taken) < stop:
            first.next()
        second = mixture(documents, encoder, seed=1)
        second.restore(json.loads(json.dumps(first.state())))
        assert [second.next() for _ in range(100 - stop)] == expected[stop:]


def test_processes_share_out_what_one_would_see(tmp_path: Path, encoder: Encoder) -> None:
    documents = opened_texts(corpus(tmp_path / "a.jsonl"))
    alone = batches(mixture(documents, encoder), batch_of, micro_batch=4, ranks=Ranks())
    two = [batches(mixture(documents, encoder), batch_of, micro_batch=2, ranks=Ranks(rank, 2)) for rank in range(2)]
    for _ in range(5):
        one, halves = next(alone), [next(each) for each in two]
        for key, value in one.items():
            assert torch.equal(value, torch.cat([half[key] for half in halves])), key


def test_held_out_documents_are_never_trained_on_whatever_the_seed(tmp_path: Path, encoder: Encoder) -> None:
    documents = opened_texts(corpus(tmp_path / "a.jsonl"))
    kept, held = split(documents, 0.1, name="a")
    assert len(held) == 6
    assert sorted([*kept, *held]) == list(range(60))
    found = held_out(documents, held, encoder, Packer(16, "isolated", 0), most=5)
    assert len(found) == 5
    short = held_out(documents, held[:1], encoder, Packer(64, "isolated", 0), most=5)
    assert len(short) == 1
    assert len(short[0].ids) < 64
    json_lines(tmp_path / "one.jsonl", ["w1"])
    with pytest.raises(BadInput, match="has one document, so none can be held out"):
        split(opened_texts(tmp_path / "one.jsonl"), 0.1, name="one")


def test_loss_is_on_the_assistants_words_alone(tmp_path: Path) -> None:
    messages = (
        Message("system", "w1"),
        Message("user", "w2 w3"),
        Message("assistant", "w4 w5"),
        Message("user", "w6"),
        Message("assistant", "w7"),
    )
    marked = (
        "{% for m in messages %}<{{ m.role }}> {% if m.role == 'assistant' %}{% generation %}{{ m.content }} </s> "
        "{% endgeneration %}{% else %}{{ m.content }} </s> {% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant> {% endif %}"
    )
    for number, template in enumerate((CHAT_TEMPLATE, marked)):
        folder = tmp_path / str(number)
        folder.mkdir()
        ids, counted = Encoder(add_tokenizer(folder, template=template), vocabulary=128).encode(Chat(messages))
        assert [token for token, count in zip(ids, counted, strict=True) if count] == [14, 15, 2, 17, 2]
        assert len(ids) == 17


def test_templates_and_tokenizers_that_cannot_serve(tmp_path: Path) -> None:
    forgetful = (
        "{% for m in messages %}{% if loop.last %}{{ m.content }} {% else %}{{ m.content[:2] }} {% endif %}{% endfor %}"
    )
    folder = add_tokenizer(tmp_path, template=forgetful)
    chat = Chat(tuple(Message(role, word) for role, word in (("user", "w1"), ("assistant", "w2 w2"), ("user", "w3"))))
    with pytest.raises(BadInput, match="changes earlier turns once later"):
        Encoder(folder, vocabulary=128).encode(chat)
    with pytest.raises(BadInput, match="gives 'w99' the id 109, the model's embedding has only 100 rows"):
        Encoder(folder, vocabulary=100).encode("w99")
    (tmp_path / "none").mkdir()
    with pytest.raises(BadInput, match="no tokenizer that can be loaded"):
        Encoder(tmp_path / "none", vocabulary=100)
    (tmp_path / "plain").mkdir()
    with pytest.raises(BadInput, match="has no chat template"):
        Encoder(add_tokenizer(tmp_path / "plain"), vocabulary=128).check_chat()


def test_a_source_without_anything_to_learn_ends(tmp_path: Path, encoder: Encoder) -> None:
    class Silent:
        def encode(self, document: object) -> tuple[list[int], list[bool]]:
            return [5, 6], [False, False]

    documents = opened_texts(json_lines(tmp_path / "a.jsonl", ["w1", "w2"]))
    with pytest.raises(BadInput, match="the loss counts none of its tokens"):
        stream(documents, Silent()).next()  # type: ignore[arg-type]
    assert len(stream(documents, encoder, length=64).next().ids) == 64


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral", "qwen2"])
def test_isolated_documents_do_not_see_each_other(
    tmp_path: Path, encoder: Encoder, family: str, attention: str
) -> None:
    """Which implementations keep packed documents apart: a sequence gives each document what it gives alone."""
    model = tiny.model(family)
    model.set_attn_implementation(attention)
    documents = opened_texts(corpus(tmp_path / "a.jsonl"))
    batch = batch_of([stream(documents, encoder, length=48).next()], domains=False)
    positions = batch["position_ids"][0].tolist()
    starts = [at for at, position in enumerate(positions) if position == 0]
    assert len(starts) > 1
    with torch.no_grad():
        packed = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        joined = model(batch["input_ids"], use_cache=False).logits
        for begin, end in zip(starts, [*starts[1:], 48], strict=True):
            alone = model(batch["input_ids"][:, begin:end], use_cache=False).logits
            torch.testing.assert_close(packed[:, begin:end], alone, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(packed, joined, atol=1e-3)
