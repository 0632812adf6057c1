"""Rows as people have them: the bad ones named at once, control tokens counted, compressed files bounded."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import surgeon
from surgeon.data.documents import Documents
from surgeon.data.encoding import Encoder
from surgeon.data.rows import Rows
from surgeon.data.sources import check_source
from surgeon.data.specs import RowsSpec, TextSpec
from surgeon.errors import BadInput
from tests.training.test_train import base_of, config
from tests.training.texts import json_lines, opened_texts, text

GOOD = json.dumps({"text": "w1"})


def lines(path: Path, rows: list[str]) -> Path:
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def refusal(path: Path, **spec: Any) -> list[str]:
    with pytest.raises(BadInput) as caught:
        opened_texts(path, **spec)
    return str(caught.value).split("\n")


def some_bad(path: Path) -> Path:
    """Of a hundred rows, three: two without a text and one that is no JSON."""
    rows = [GOOD] * 100
    rows[3] = rows[16] = json.dumps({"txt": "w1"})
    rows[89] = "{"
    return lines(path, rows)


def test_all_bad_rows_are_named_at_once(tmp_path: Path) -> None:
    path = some_bad(tmp_path / "a.jsonl")
    unknown, broken = refusal(path)
    assert unknown.startswith(f"{path}:4: no keys of a text (`text`) or a chat (") and "; it has txt;" in unknown
    assert unknown.endswith(
        "(2 of 100 rows: line 4, line 17; to leave them out, give the source `bad_rows: leave_out`)"
    )
    assert broken.startswith(f"{path}:90: not JSON (") and "(1 of 100 rows: line 90;" in broken
    found = opened_texts(path, bad_rows="leave_out")
    assert len(found) == 97 and found.read(3) == "w1"
    assert [*found.rows.notes()] == [
        "3 rows that cannot be used are left out (`bad_rows`): a.jsonl:4, a.jsonl:17, a.jsonl:90"
    ]
    many = opened_texts(lines(path, ["{", GOOD] * 6), bad_rows="leave_out")
    assert [note.partition("`): ")[2] for note in many.rows.notes()] == [
        "a.jsonl:1, a.jsonl:3, a.jsonl:5, a.jsonl:7, a.jsonl:9, …"
    ]
    # Of a list of objects by its lines, too.
    listed = lines(tmp_path / "b.json", ["[", f"{GOOD},", '{"txt": 1},', "3,", f"{GOOD},", GOOD, "]"])
    assert [line.partition("(")[0].strip() for line in refusal(listed)] == [
        f"{listed}:3: no keys of a text",
        f"{listed}:4: no JSON object",
    ]
    assert len(opened_texts(listed, bad_rows="leave_out")) == 3


def test_a_file_of_bad_rows_is_refused_in_few_words(tmp_path: Path) -> None:
    rows = [json.dumps({"text": number}) for number in range(3000)] + [GOOD] * 2999
    (told,) = refusal(lines(tmp_path / "a.jsonl", rows), bad_rows="leave_out")
    assert told.endswith("(3,000 of 5,999 rows: line 1, line 2, line 3, line 4, line 5, …; too many to be left out)")
    assert len(opened_texts(lines(tmp_path / "a.jsonl", [*rows, GOOD]), bad_rows="leave_out")) == 3000
    # However many things are wrong, few are named.
    rows = [json.dumps({"messages": [{"from": "x" * number, "value": "w1"}]}) for number in range(1, 50)]
    told = "\n".join(refusal(lines(tmp_path / "a.jsonl", [*rows, *[GOOD] * 60])))
    assert told.count("\n") == 5 and "(44 of 109 rows, for several reasons: line 6" in told


def test_the_first_look_counts_what_is_bad_and_stops_at_another_kind_of_file(tmp_path: Path) -> None:
    class Named:
        source = tmp_path / "train.yaml"

        def resolve(self, path: str) -> Path:
            return tmp_path / path

    some_bad(tmp_path / "a.jsonl")
    wrong = check_source(TextSpec(name="a", path="a.jsonl"), Named())
    assert ["2 of 100 rows" in why or "1 of 100 rows" in why for _, why in wrong] == [True, True]
    lines(tmp_path / "b.jsonl", ['{"txt": "w1"}'] * 50)
    ((key, why),) = check_source(TextSpec(name="a", path="b.jsonl"), Named())
    assert key == "path" and "(8 of the first 8 rows: line 1, line 2" in why


def test_plain_text_leaves_out_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\n\xe9\ntwo\n" + b"three\n" * 3000)
    (told,) = refusal(tmp_path / "a.txt")
    assert "a.txt:2: not UTF-8 text (byte 0 of the line); save it as UTF-8 (1 of" in told
    found = opened_texts(tmp_path / "a.txt", bad_rows="leave_out")
    assert "".join(str(found.read(number)) for number in range(len(found))) == "one\ntwo\n" + "three\n" * 3000


def test_compressed_files_are_read_as_what_they_hold(tmp_path: Path) -> None:
    texts = [text(9, number) for number in range(40)]
    plain = json_lines(tmp_path / "a.jsonl", texts).read_bytes()
    for name, content in (
        ("b.jsonl.gz", plain),
        ("c.json.gz", json.dumps([{"text": each} for each in texts]).encode()),
        # Whatever the name says of the rest.
        ("d.jsonl", plain),
        ("e.JSONL.GZ", plain),
    ):
        (tmp_path / name).write_bytes(gzip.compress(content))
        found = opened_texts(tmp_path / name)
        assert [found.read(number) for number in reversed(range(40))] == texts[::-1], name
    (tmp_path / "f.jsonl.gz").write_bytes(plain)
    assert len(opened_texts(tmp_path / "f.jsonl.gz")) == 40
    (tmp_path / "g.jsonl.gz").write_bytes(gzip.compress(plain)[:-20])
    assert "g.jsonl.gz: cannot be unpacked in" in refusal(tmp_path / "g.jsonl.gz")[0]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.jsonl", GOOD.encode("utf-16"), "UTF-16; save it as UTF-8"),
        # Of which only the first line is not UTF-8 by itself.
        ("a.txt", "one\ntwo\nthree\n".encode("utf-16"), "UTF-16; save it as UTF-8"),
        ("a.jsonl", b"PK\x03\x04" + GOOD.encode(), "a zip file; unpack it"),
        ("a.jsonl.gz", gzip.compress(gzip.compress(GOOD.encode(), mtime=0), mtime=0), "compressed twice"),
        ("a.txt", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS's pointer"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS's pointer"),
    ],
)
def test_what_is_no_text_whatever_its_name_says(tmp_path: Path, name: str, content: bytes, told: str) -> None:
    (tmp_path / name).write_bytes(content)
    (line,) = refusal(tmp_path / name, bad_rows="leave_out")
    assert line.startswith(f"{tmp_path / name}: {told}")


def test_what_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surgeon.data.documents._SMALL", 1_000_000)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n" * 5_000_000))
    assert "unpacks to more than 1,000,000 bytes, 100 times its size; if you trust it" in refusal(path)[0]


def test_files_and_formats_are_known_by_what_they_hold(tmp_path: Path) -> None:
    (tmp_path / "list.jsonl").write_text(f"[{GOOD}, {GOOD}]", encoding="utf-8")
    lines(tmp_path / "lines.json", [GOOD, GOOD])
    for name in ("list.jsonl", "lines.json"):
        assert len(opened_texts(tmp_path / name)) == 2
    for hidden in (".a.jsonl", "._lines.json", ".ipynb_checkpoints/a.jsonl"):
        (tmp_path / hidden).parent.mkdir(exist_ok=True)
        (tmp_path / hidden).write_bytes(b"\xff\x00")
    assert len(opened_texts(tmp_path)) == 4


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of bytes, with control tokens and one that is added without being one."""
    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(["<think>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", additional_special_tokens=["<|im_end|>"]
    )
    folder = tmp_path_factory.mktemp("bytes")
    fast.save_pretrained(folder)
    return folder


SAID = "a</s>b <|im_end|>\n<think>c</s>"


@pytest.mark.parametrize("how", ["as_text", "as_tokens"])
def test_control_tokens_in_a_text_are_counted_and_read_as_is_said(how: Any, base: Path, tmp_path: Path) -> None:
    oracle = AutoTokenizer.from_pretrained(base)
    encoder = Encoder(base, vocabulary=300)
    rows = Rows(RowsSpec(control_tokens=how), encoder.tokenizer)
    documents = Documents(json_lines(tmp_path / "a.jsonl", [SAID, "x < y", "</s>"]), rows)
    ids, counted = encoder.of(rows.spec).encode(documents.read(0))
    end = oracle.eos_token_id
    wanted = oracle(SAID, split_special_tokens=how == "as_text")["input_ids"]
    assert ids == (wanted if wanted[-1] == end else [*wanted, end]) and all(counted)
    assert ids.count(end) == (1 if how == "as_text" else 2)
    assert oracle.decode(ids).removesuffix("</s>").removesuffix("</s>") == SAID.removesuffix("</s>")
    words, other = ("text", "tokens") if how == "as_text" else ("tokens", "text")
    assert [*rows.notes()] == [
        f"3 `</s>`, 1 `<|im_end|>` in 2 documents are read as {words}; `control_tokens: as_{other}` reads them as"
        f" {other}"
    ]


def test_control_tokens_in_chats_are_bad_rows_unless_they_are_meant(base: Path, tmp_path: Path) -> None:
    encoder = Encoder(base, vocabulary=300)
    chats = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": said}] for said in ("a", "b</s>", "c")]
    path = lines(tmp_path / "a.jsonl", [json.dumps({"messages": chat}) for chat in chats])
    told = (
        r"a.jsonl:2: the tokenizer's control tokens in words \(</s>\).* say `control_tokens: as_tokens` \(1 of 3 rows"
    )
    with pytest.raises(BadInput, match=told):
        Documents(path, Rows(RowsSpec(), encoder.tokenizer))
    assert len(Documents(path, Rows(RowsSpec(bad_rows="leave_out"), encoder.tokenizer))) == 2
    assert len(Documents(path, Rows(RowsSpec(control_tokens="as_tokens"), encoder.tokenizer))) == 3
    # A template writes what stands beside the words, too.
    call = {"name": "find", "arguments": {"name": "b</s>"}}
    for beside in ({"reasoning_content": "b</s>"}, {"tool_calls": [{"type": "function", "function": call}]}):
        lines(path, [json.dumps({"messages": [*chat[:1], chat[1] | beside]}) for chat in chats[::2]])
        with pytest.raises(BadInput, match=r"a.jsonl:1: the tokenizer's control tokens in words \(</s>\)"):
            Documents(path, Rows(RowsSpec(), encoder.tokenizer))


@pytest.mark.parametrize(
    ("template", "bad"),
    [
        # As Gemma's and Mistral's.
        (
            "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
            "{{ raise_exception('Roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}",
            [{"role": "assistant", "content": "d"}],
        ),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            [{"role": "assistant", "tool_calls": [{"function": {"name": "find", "arguments": {}}}]}],
        ),
    ],
)
def test_chats_that_the_template_does_not_write_are_bad_rows(
    template: str, bad: list[Any], base: Path, tmp_path: Path
) -> None:
    """Whatever the first ones are: a run would end where it comes to them."""
    good = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    chats = [good, good, [*good, *bad], good, [*good, *bad]]
    path = lines(tmp_path / "a.jsonl", [json.dumps({"messages": chat}) for chat in chats])
    encoder = Encoder(base, vocabulary=300, template=template)
    with pytest.raises(
        BadInput, match=r"a.jsonl:3: .* chat template .*remove this chat \(2 of 5 rows: line 3, line 5;"
    ):
        Documents(path, Rows(RowsSpec(), encoder.tokenizer, encoder.write))
    assert len(Documents(path, Rows(RowsSpec(bad_rows="leave_out"), encoder.tokenizer, encoder.write))) == 3


def test_roles_that_nothing_names_are_bad_rows(base: Path, tmp_path: Path) -> None:
    """ChatML writes any role; what the template itself names is a role of the model."""
    chat = [{"role": role, "content": "w"} for role in ("developer", "user", "ipython", "assistant")]
    odd = [{"role": "robot", "content": "w"}, *chat]
    path = lines(tmp_path / "a.jsonl", [json.dumps({"messages": each, "system": "w"}) for each in (chat, odd, chat)])
    chatml = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    encoder = Encoder(base, vocabulary=300, template=chatml)
    told = r"a.jsonl:2: message 1 is from `robot`, which is none of human, .*; rename it, or remove this chat \(1 of"
    with pytest.raises(BadInput, match=told):
        Documents(path, Rows(RowsSpec(), encoder.tokenizer, encoder.write))
    encoder = Encoder(base, vocabulary=300, template=chatml + "{% if messages[0].role == 'robot' %}{% endif %}")
    assert len(Documents(path, Rows(RowsSpec(), encoder.tokenizer, encoder.write))) == 3


def test_checkpoints_are_no_texts(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="base: a checkpoint, not a text; give a file or folder of texts"):
        opened_texts(base_of(tmp_path))


def test_chats_whose_answers_are_all_empty_are_bad_rows(tmp_path: Path) -> None:
    """They would teach to end a turn at once; one with words beside empty ones stays."""
    asked, said = {"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}
    empty, called = said | {"content": " \n"}, [{"function": {"name": "find", "arguments": {}}}]
    good = [[asked, said], [asked, empty, asked, said], [asked, empty | {"tool_calls": called}]]
    bad = [[asked, empty], [asked, said | {"weight": 0}, asked, empty]]
    rows = [json.dumps({"messages": chat}) for chat in (*good, *bad)]
    path = lines(tmp_path / "a.jsonl", [*rows, json.dumps({"instruction": "w1", "output": ""})])
    (told,) = refusal(path)
    assert told.startswith(f"{path}:4: every answer of the assistant that counts is empty, so there is nothing to")
    assert "(3 of 6 rows: line 4, line 5, line 6; to leave them out, give the source `bad_rows" in told
    found = opened_texts(path, bad_rows="leave_out")
    assert len(found) == 3 and [*found.rows.notes()] == [
        "3 rows that cannot be used are left out (`bad_rows`): a.jsonl:4, a.jsonl:5, a.jsonl:6"
    ]


def test_log_and_card_say_what_was_left_out(tmp_path: Path) -> None:
    surgeon.apply("neutral-residues", str(base_of(tmp_path)), tmp_path / "out")
    rows = [json.dumps({"text": text(20, number)}) for number in range(30)]
    lines(tmp_path / "fr.jsonl.gz", [])
    (tmp_path / "fr.jsonl.gz").write_bytes(gzip.compress("\n".join([*rows, "{", "3"]).encode()))
    source = {"name": "fr", "path": "fr.jsonl.gz", "share": 1.0, "bad_rows": "leave_out", "validation": 0.1}
    run = config(tmp_path, steps=2, sources=[source])
    surgeon.train(tmp_path / "out", run, tmp_path / "run", device="cpu")
    assert "source fr: 2 rows that cannot be used are left out" in (tmp_path / "run" / "README.md").read_text()
