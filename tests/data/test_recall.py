"""`surgeon recall`: what a model writes is its own, the same whenever it is cut off, and without loops and doubles."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import surgeon
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.common.listener import Quiet
from surgeon.data import writing
from surgeon.data.chats import Chat
from surgeon.data.encoding import Encoder
from surgeon.data.generation import Prompter
from surgeon.data.layouts import document_of, said_in
from surgeon.data.recall import recalled, recalled_view
from surgeon.data.recalled_text import Counts, NearlyNothing
from surgeon.data.specs import GenerateSpec, RowsSpec
from surgeon.data.writing import loops
from surgeon.errors import BadInput
from surgeon.models.load import load_model
from tests import tiny
from tests.test_api import check_json
from tests.training.test_train import config, digests
from tests.training.texts import CHAT_TEMPLATE, WORDS, add_tokenizer, corpus, opened_texts

SMALL: dict[str, Any] = {"tokens": 200, "length": 16, "batch": 6, "device": "cpu"}
# More than one run of documents.
LONGER = SMALL | {"tokens": 700}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_tokenizer(tiny.checkpoint(tmp_path_factory.mktemp("recall") / "base", "llama", dtype="float32"))


def interrupted(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_it_writes_documents_that_a_source_reads(base: Path, tmp_path: Path) -> None:
    made = surgeon.recall(base, to=tmp_path / "memory.jsonl", **SMALL)
    documents = opened_texts(tmp_path / "memory.jsonl")
    assert len(documents) == made.counts.kept == len(lines_of(made.path))
    assert 200 <= made.counts.tokens < 216
    assert all(
        set(" ".join(said_in(documents.read(n))).split()) <= {*WORDS, "<unk>", "<user>", "<assistant>", "<system>"}
        for n in range(len(documents))
    )
    record = json.loads((tmp_path / "memory.jsonl.recall").read_text())
    assert record["sha256"] == hashlib.sha256(made.path.read_bytes()).hexdigest() == made.sha256
    assert record["settings"]["prompts"] == "begin"
    assert record["counts"]["written"] == made.counts.kept + sum(
        record["counts"][why] for why in ("loops", "duplicates", "empty")
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["memory.jsonl", "memory.jsonl.recall"]
    check_json(made)
    recalled_view(made)
    # A refusal leaves nothing that the next call would take for another recall.
    with pytest.raises(BadInput, match="dtype 'float17' is not known"):
        surgeon.recall(base, to=tmp_path / "other.jsonl", seed=1, dtype="float17", **SMALL)
    other = surgeon.recall(base, to=tmp_path / "other.jsonl", seed=1, **SMALL)
    assert other.path.read_bytes() != made.path.read_bytes()
    assert other.digest == made.digest


def test_what_is_taken_up_is_what_was_kept(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that was cut off (tests/injection kills one anywhere): by the same settings, and unedited."""
    plain = writing.Writer.write

    def killed(self: writing.Writer, numbers: range, *given: Any) -> Iterator[writing.Written]:
        if numbers.start:
            raise KeyboardInterrupt
        return plain(self, numbers, *given)

    monkeypatch.setattr(writing.Writer, "write", killed)
    with pytest.raises(KeyboardInterrupt):
        surgeon.recall(base, to=tmp_path / "cut.jsonl", **LONGER)
    monkeypatch.undo()
    assert not (tmp_path / "cut.jsonl").exists()
    with pytest.raises(BadInput, match=r"holds text of another recall \(model or settings differ\)"):
        surgeon.recall(base, to=tmp_path / "cut.jsonl", **(LONGER | {"temperature": 0.9}))
    part = tmp_path / ".cut.jsonl.recall" / "part.jsonl"
    kept = part.read_bytes()
    part.write_bytes(kept.replace(b"w", b"v", 1))
    with pytest.raises(BadInput, match="damaged or edited"):
        surgeon.recall(base, to=tmp_path / "cut.jsonl", **LONGER)
    part.write_bytes(kept)
    # Copied, it is not gone on with in silence.
    shutil.copytree(part.parent, tmp_path / "copy" / part.parent.name)
    with pytest.raises(BadInput, match=r"holds what a model wrote so far, \d+ tokens; this user wrote it in another"):
        surgeon.recall(base, to=tmp_path / "copy" / "cut.jsonl", **LONGER)
    assert surgeon.recall(base, to=tmp_path / "copy" / "cut.jsonl", take_over=True, **LONGER).resumed_at > 0
    resumed = surgeon.recall(base, to=tmp_path / "cut.jsonl", **LONGER)
    assert 0 < resumed.resumed_at < 700
    assert resumed.path.read_bytes().startswith(kept)
    whole = surgeon.recall(base, to=tmp_path / "whole.jsonl", **LONGER)
    assert resumed.path.read_bytes() == whole.path.read_bytes()
    assert resumed.counts == whole.counts


def test_more_tokens_continue_the_file(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer text begins with the shorter one, which is moved into it: no token is written for nothing."""
    whole = surgeon.recall(base, to=tmp_path / "whole.jsonl", **LONGER)
    short = surgeon.recall(base, to=tmp_path / "grown.jsonl", **SMALL)
    before = short.path.read_bytes()
    with pytest.raises(BadInput, match=rf"exists with {short.counts.tokens} tokens; ask for more, and it is continued"):
        surgeon.recall(base, to=short.path, **SMALL)
    with pytest.raises(BadInput, match="not what this model writes by these settings"):
        surgeon.recall(base, to=short.path, **(LONGER | {"seed": 3}))
    short.path.write_bytes(before.replace(b"w", b"v", 1))
    with pytest.raises(BadInput, match="not what this model writes by these settings"):
        surgeon.recall(base, to=short.path, **LONGER)
    short.path.write_bytes(before)
    # Killed before the text is moved, and after.
    for home, name in ((Path, "rename"), (writing.Writer, "write")):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(home, name, interrupted)
            surgeon.recall(base, to=short.path, **LONGER)
        assert short.path.exists() is (name == "rename")
    grown = surgeon.recall(base, to=short.path, **LONGER)
    assert grown.resumed_at == short.counts.tokens
    assert whole.path.read_bytes() == grown.path.read_bytes() != before
    assert grown.record() == whole.record()
    assert grown.path.read_bytes().startswith(before)
    assert not list(tmp_path.glob(".*"))


def test_a_cut_document_says_so_and_teaches_no_end(base: Path, tmp_path: Path) -> None:
    made = surgeon.recall(base, to=tmp_path / "memory.jsonl", **SMALL)
    lines, documents = lines_of(made.path), opened_texts(made.path)
    assert {type(line["cut"]) for line in lines} == {bool}
    assert 0 < sum(line["cut"] for line in lines) == made.counts.cut < len(lines)
    encoder = Encoder(base, vocabulary=128)
    for number, line in enumerate(lines):
        ids, counted = encoder.encode(documents.read(number))
        assert (ids[-1] == 2) is not line["cut"]
        assert all(counted) and len(ids) == len(counted)
    # Text that was written before the field was is read as complete.
    (tmp_path / "old.jsonl").write_text("".join(json.dumps({"text": line["text"]}) + "\n" for line in lines))
    old = opened_texts(tmp_path / "old.jsonl")
    assert all(encoder.encode(old.read(number))[0][-1] == 2 for number in range(len(old)))


def test_a_cut_chat_teaches_no_end_of_its_last_turn(tmp_path: Path) -> None:
    encoder = Encoder(add_tokenizer(tmp_path, template=CHAT_TEMPLATE), vocabulary=128)
    whole, cut = (
        document_of(
            {"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 w3"}]} | more,
            RowsSpec(),
            "here",
        )
        for more in ({}, {"cut": True})
    )
    ids, counted = encoder.encode(whole)
    assert (ids[-3:], counted[-3:]) == ([12, 13, 2], [True] * 3)
    assert encoder.encode(cut) == (ids[:-1], counted[:-1])


def test_text_that_somebody_else_put_there_is_not_trained_on(base: Path, tmp_path: Path) -> None:
    """What a run has its model write lies beside it until it is published; digests and all, it could be anybody's."""
    folder, asked = CheckpointFolder.open(base), GenerateSpec(tokens=40, length=16, batch=6, prompts="begin")
    given: dict[str, Any] = {"shown": "base", "seed": 0, "dtype": "auto", "device": "cpu", "listener": Quiet()}
    (tmp_path / "one").mkdir()
    made = recalled(folder, asked, tmp_path / "one" / "memory.jsonl", once=True, **given)
    again = recalled(folder, asked, tmp_path / "one" / "memory.jsonl", once=True, **given)
    assert again.sha256 == made.sha256
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    for name in (".memory.jsonl.signed", None):
        with pytest.raises(
            BadInput, match=r"memory\.jsonl: holds text that this model wrote, .* to have it written again"
        ):
            recalled(folder, asked, tmp_path / "two" / "memory.jsonl", once=True, **given)
        if name:
            (tmp_path / "two" / name).unlink()
    recalled(folder, asked, tmp_path / "two" / "memory.jsonl", once=True, take_over=True, **given)
    # Edited, with the record beside it: what was signed is not that.
    file, beside = tmp_path / "one" / "memory.jsonl", tmp_path / "one" / "memory.jsonl.recall"
    file.write_bytes(file.read_bytes().replace(b"w", b"v", 1))
    beside.write_text(beside.read_text().replace(made.sha256, hashlib.sha256(file.read_bytes()).hexdigest()))
    with pytest.raises(BadInput, match="this user did not write it here"):
        recalled(folder, asked, file, once=True, **given)


def test_it_goes_on_as_the_model_does(base: Path, tmp_path: Path) -> None:
    """Of beginnings of several lengths, drawn from the likeliest token alone: what no cache and no padding gives."""
    beginnings = ["w3", "w7 w8 w9 w60", "w20 w1"]
    (tmp_path / "prompts.txt").write_text("\n".join(beginnings) + "\n\n")
    asked = SMALL | {"tokens": 15, "length": 15, "top_p": 1e-6, "batch": 6}
    made = surgeon.recall(base, to=tmp_path / "memory.jsonl", prompts=str(tmp_path / "prompts.txt"), **asked)
    model = load_model(base)
    expected = {}
    for beginning in beginnings:
        ids = [10 + int(word[1:]) for word in beginning.split()]
        for _ in range(15 - len(ids)):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == 2:
                break
        expected[beginning] = " ".join(WORDS[n - 10] for n in ids if 10 <= n < 110)
    found = [line["text"] for line in lines_of(made.path)]
    assert found
    assert len(found) == len(set(found))
    for text in found:
        assert " ".join(word for word in text.split() if word in WORDS) in expected.values()


def test_a_model_with_a_template_writes_both_turns(tmp_path: Path) -> None:
    base = tiny.checkpoint(tmp_path / "base", "llama", dtype="float32")
    add_tokenizer(base, template=CHAT_TEMPLATE)
    asked = SMALL | {"length": 30, "batch": 24}
    made = surgeon.recall(base, to=tmp_path / "memory.jsonl", **asked)
    assert made.settings["prompts"] == "template"
    chats = opened_texts(made.path, kind="chat")
    for number in range(len(chats)):
        chat = chats.read(number)
        assert isinstance(chat, Chat)
        asks, answers = chat.messages
        assert (asks.role, answers.role) == ("user", "assistant")
        assert asks.content.strip()
        assert answers.content.strip()
        assert "</s>" not in asks.content + answers.content


def test_what_loops() -> None:
    drawn = torch.randint(1000, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    assert not loops(drawn)
    assert loops([5] * 20)
    assert loops([1, 2, 3] * 12)
    assert loops(drawn[:50] + drawn[:7] * 20)
    # A short text, and a line that comes twice in a long one, do not.
    assert not loops([5] * 12)
    assert not loops(drawn + drawn[:30])


def test_a_model_that_only_loops_is_found_out(base: Path, tmp_path: Path) -> None:
    asked = SMALL | {"temperature": 0.01, "batch": 12}
    with pytest.raises(BadInput) as refused:
        surgeon.recall(base, to=tmp_path / "memory.jsonl", **asked)
    said = str(refused.value)
    assert "documents (" in said
    assert "were filtered" in said
    assert "temperature is 0.01: try a higher one, 1 say" in said
    # Nothing is left to go on with, so other settings may have the name.
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_asked_is_refused(base: Path, tmp_path: Path) -> None:
    def refusal(model: Path = base, to: str = "memory.jsonl", **changes: Any) -> str:
        with pytest.raises(BadInput) as refused:
            surgeon.recall(model, to=tmp_path / to, **(SMALL | changes))
        return str(refused.value)

    assert "give a name that ends in .jsonl" in refusal(to="memory.txt")
    assert (
        "12 tokens are fewer than one document of 16; ask for more tokens, or shorter documents (`length`)"
        in refusal(tokens=12)
    )
    assert "its context is 128 tokens, and `length` is 200" in refusal(length=200)
    assert "`temperature` is 0; it takes a number, above 0" in refusal(temperature=0)
    assert refusal(top_p=float("nan"), batch=0).splitlines() == [
        "`top_p` is NaN; it takes a number, above 0 and at most 1",
        "`batch` is 0; it takes a whole number, at least 1 and at most 4,096",
    ]
    assert "cannot read the file of `prompts` (No such file" in refusal(prompts=str(tmp_path / "none.txt"))
    (tmp_path / "blank.txt").write_text("\n \n")
    assert "no beginnings; write one a line" in refusal(prompts=str(tmp_path / "blank.txt"))
    (tmp_path / "long.txt").write_text("w1 " * 30)
    assert "a beginning of 30 tokens leaves no room in a document of 16" in refusal(prompts=str(tmp_path / "long.txt"))
    assert "no chat template" in refusal(prompts="template")
    (tmp_path / "there.jsonl").write_text("")
    assert "exists; choose another name" in refusal(to="there.jsonl")
    encoder = tiny.checkpoint(tmp_path / "encoder", "roberta")
    assert "an encoder, which writes no text" in refusal(encoder)
    bare = add_tokenizer(tiny.checkpoint(tmp_path / "bare", "llama"))
    for names in (("bos_token", "bos_token_id"), ("eos_token", "eos_token_id")):
        # Without a token that begins texts, the one that ends them stands before the first.
        if names[0] == "eos_token":
            assert Prompter(CheckpointFolder.open(bare)).begin == 2
        for name in ("config.json", "tokenizer_config.json"):
            settings = json.loads((bare / name).read_text())
            (bare / name).write_text(json.dumps({key: value for key, value in settings.items() if key not in names}))
    said = refusal(bare)
    assert "it has no begin-of-text token to start from; give `prompts`, a text file with a beginning a line" in said


def test_a_beginning_of_no_tokens_is_the_token_that_begins_a_text(base: Path, tmp_path: Path) -> None:
    """A template may write nothing before a user's words, and a line be of nothing but the token that ends a text."""
    chats = add_tokenizer(
        tiny.checkpoint(tmp_path / "chats", "llama", dtype="float32"),
        template="{% for m in messages %}{{ m.content }} </s> {% endfor %}",
    )
    asked = SMALL | {"tokens": 60, "batch": 24, "temperature": 1.0, "top_p": 1.0}
    made = surgeon.recall(chats, to=tmp_path / "chats.jsonl", **asked)
    assert {line["messages"][0]["role"] for line in lines_of(made.path)} == {"user"}
    (tmp_path / "end.txt").write_text("</s>\n")
    asked = SMALL | {"prompts": str(tmp_path / "end.txt")}
    assert surgeon.recall(base, to=tmp_path / "end.jsonl", **asked).counts.kept
    for name in ("config.json", "tokenizer_config.json"):
        settings = json.loads((chats / name).read_text())
        settings.pop("bos_token_id", None)
        settings.pop("bos_token", None)
        (chats / name).write_text(json.dumps(settings))
    with pytest.raises(BadInput, match="its chat template writes nothing before a user's words, and it has no begin"):
        surgeon.recall(chats, to=tmp_path / "none.jsonl", **SMALL)
    assert not list(tmp_path.glob(".none*"))


def test_a_work_folder_without_text_is_in_nobodys_way(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(self: writing.Writer, *_: Any) -> Iterator[writing.Written]:
        raise KeyboardInterrupt

    monkeypatch.setattr(writing.Writer, "write", killed)
    with pytest.raises(KeyboardInterrupt):
        surgeon.recall(base, to=tmp_path / "cut.jsonl", **SMALL)
    monkeypatch.undo()
    assert surgeon.recall(base, to=tmp_path / "cut.jsonl", **(SMALL | {"temperature": 0.9})).counts.kept
    # Written without `once`, it is not signed, and that is what is said.
    with pytest.raises(BadInput, match=r"no signed file beside it says .*: a call without --once writes none"):
        surgeon.recall(base, to=tmp_path / "cut.jsonl", once=True, **(SMALL | {"temperature": 0.9}))


def test_a_file_of_beginnings_is_plain_text_at_a_path_as_people_write_it(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "begin.txt").write_text("w1 </s> w2\n", encoding="utf-8-sig")
    for number, given in enumerate(("~/begin.txt", "$HOME/begin.txt")):
        listener = Quiet()
        made = surgeon.recall(base, to=tmp_path / f"{number}.jsonl", prompts=given, listener=listener, **SMALL)
        assert all(line["text"].startswith("w1 w2") for line in lines_of(made.path))
        assert f"{given}: 1 control tokens (</s>) in the beginnings are read as tokens" in listener.said
    for rows in ('\n{"text": "w1"}\n{"text": "w2"}\n', '["w1", "w2"]', '[\n  "w1"\n]\n', '{\n  "prompt": "w1"\n}'):
        (tmp_path / "rows.jsonl").write_text(rows)
        with pytest.raises(BadInput, match=r"rows\.jsonl: JSON without a text `prompt` in each line"):
            surgeon.recall(base, to=tmp_path / "rows-of.jsonl", prompts=str(tmp_path / "rows.jsonl"), **SMALL)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "w4 w5"}\n\n{"prompt": "w6\\nw7", "kind": "x"}\n')
    made = surgeon.recall(base, to=tmp_path / "rows-of.jsonl", prompts=str(tmp_path / "rows.jsonl"), **SMALL)
    assert {" ".join(line["text"].split()[:2]) for line in lines_of(made.path)} == {"w4 w5", "w6 w7"}


def test_prompts_are_answered_where_there_is_a_template(tmp_path: Path) -> None:
    base = add_tokenizer(tiny.checkpoint(tmp_path / "base", "llama", dtype="float32"), template=CHAT_TEMPLATE)
    prompts = [f"w{number} w9" for number in range(7)]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    made = surgeon.recall(base, to=tmp_path / "memory.jsonl", prompts=str(tmp_path / "prompts.txt"), **SMALL)
    chats = [line["messages"] for line in lines_of(made.path)]
    asked = [chat[0]["content"] for chat in chats]
    assert {*asked} == {*prompts}
    # Each prompt has an answer before one has two, in an order of the seed's.
    assert max(Counter(asked).values()) - min(Counter(asked).values()) <= 1 + (made.counts.written - made.counts.kept)
    assert asked[:7] != prompts
    assert all(chat[1]["role"] == "assistant" and chat[1]["content"].strip() for chat in chats)
    assert (made.settings["temperature"], made.settings["top_p"]) == (0.7, 0.9)


@pytest.mark.parametrize(
    ("template", "given", "expected"),
    [
        (None, {}, (1.0, 1.0)),
        (CHAT_TEMPLATE, {}, (0.7, 0.9)),
        (CHAT_TEMPLATE, {"temperature": 1.0}, (1.0, 0.9)),
        (CHAT_TEMPLATE, {"prompts": "begin"}, (1.0, 1.0)),
    ],
)
def test_how_tokens_are_drawn_depends_on_the_template(
    tmp_path: Path, template: str | None, given: dict[str, Any], expected: tuple[float, float]
) -> None:
    base = add_tokenizer(tiny.checkpoint(tmp_path / "base", "llama"), template=template)
    made = surgeon.recall(base, to=tmp_path / "memory.jsonl", **(SMALL | {"length": 30, "tokens": 30} | given))
    assert (made.settings["temperature"], made.settings["top_p"]) == expected


def test_plain_text_begins_with_no_token_that_opens_a_turn(tmp_path: Path) -> None:
    """SmolLM2's begin-of-text token opens turns, and its end-of-text token is none by which it begins or ends them."""
    base = add_tokenizer(tiny.checkpoint(tmp_path / "base", "llama"))
    prompter = Prompter(CheckpointFolder.open(base))
    assert prompter.begin == 1
    turns = "{% for m in messages %}<s> {{ m.role }} {{ m.content }} </s> {% endfor %}"
    opens = turns + "{% if add_generation_prompt %}<s> assistant {% endif %}"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        content = (base / name).read_text().replace("<pad>", "<|endoftext|>")
        (base / name).write_text(content)
    (base / "chat_template.jinja").write_text(opens)
    folder = CheckpointFolder.open(base)
    assert Prompter(folder).begin == 0
    settings = {"prompts": "begin", "length": 16, "seed": 0, "batch": 6}
    writer = writing.Writer(folder, settings, None)
    assert writer.prompts == [[0]]
    # Where the model comes to it again, the text has ended.
    assert writer.ends == {0, 2}


def test_the_speed_is_told_before_a_document_is_complete(base: Path, tmp_path: Path) -> None:
    listener = Quiet()
    surgeon.recall(base, to=tmp_path / "memory.jsonl", listener=listener, **(SMALL | {"length": 40}))
    said = [line for line in listener.said if "tokens/s" in line]
    assert said[0].startswith("writing 6 documents at a time, ")
    assert said[1].startswith("recalled ")


def test_a_run_has_its_model_write_a_source(base: Path, tmp_path: Path) -> None:
    """As if it had been recalled before: the same bytes."""
    surgeon.apply("neutral-residues", str(base), tmp_path / "out")
    corpus(tmp_path / "fr.jsonl", seed=1, first=50, count=50)
    asked = {"tokens": 100, "length": 20, "batch": 8}
    surgeon.recall(tmp_path / "out", to=tmp_path / "memory.jsonl", device="cpu", **asked)  # type: ignore[arg-type]
    memory = {"name": "memory", "share": 0.25, "role": "original", "validation": 0}
    new = {"name": "fr", "path": "fr.jsonl", "share": 0.75, "validation": 0}
    found = []
    for name, given in (("before", {"path": "memory.jsonl"}), ("itself", {"generate": asked})):
        path = config(tmp_path, steps=2, sources=[new, memory | given], preserve={"loss": "kl"})
        if name == "itself":
            shown = surgeon.rehearse(tmp_path / "out", path, tmp_path / name, device="cpu")
        trained = surgeon.train(tmp_path / "out", path, tmp_path / name, device="cpu")
        assert trained is not None
        found.append(digests(tmp_path / name))
    assert found[0] == found[1] != digests(tmp_path / "out")
    assert not list(tmp_path.glob(".*"))
    # A dry run saw the documents that were written then, or as many as make one batch of them.
    there = opened_texts(tmp_path / "memory.jsonl")
    source = next(each for each in shown.sources if each.name == "memory")
    assert source.tokens_a_document * source.documents == pytest.approx(100, rel=0.3)
    assert source.documents == pytest.approx(len(there), abs=3)
    assert next("".join(t for t, _ in s.parts) for s in shown.samples if s.source == "memory").split()
    assert shown.before[0].seconds > 0
    assert any("source memory: not written yet; its 100 tokens would take about 0:00:0" in note for note in shown.notes)
    path = config(tmp_path, sources=[new, memory | {"generate": asked, "path": "x.jsonl"}])
    with pytest.raises(BadInput, match="give either `path` or `generate`"):
        surgeon.train(tmp_path / "out", path, tmp_path / "run", device="cpu")
    path = config(tmp_path, sources=[new, memory | {"kind": "text", "generate": asked | {"prompts": "template"}}])
    with pytest.raises(BadInput, match="`prompts: template` makes chats"):
        surgeon.train(tmp_path / "out", path, tmp_path / "run", device="cpu")


@pytest.mark.parametrize(("prompts", "named"), [("template", True), ("begin", False)])
def test_a_model_that_ends_at_once_is_given_other_beginnings(prompts: str, named: bool) -> None:
    """A chat model with the bare template, say: no temperature helps."""
    said = str(NearlyNothing.of(Counts(written=32, empty=32), {"temperature": 1.0, "prompts": prompts}))
    assert "ends at once" in said and "a file with a beginning a line" in said and "temperature" not in said
    assert ("`prompts: begin`" in said) is named
