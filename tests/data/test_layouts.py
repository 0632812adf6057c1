"""Texts and chats as people have them: every layout reads as the same messages, what is missing is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from surgeon.data.chats import Chat, Message
from surgeon.data.documents import Documents
from surgeon.data.encoding import Encoder
from surgeon.data.layouts import columns_of, document_of
from surgeon.data.specs import RowsSpec
from surgeon.errors import BadInput
from surgeon.models.templates import MARKS, TEMPLATES, TemplateName, unknown_marks
from tests.training.texts import add_tokenizer, opened_texts

ASKED, ANSWERED = Message("user", "w1 w2"), Message("assistant", "w3")
SYSTEM = Message("system", "w9")
# What a prompt holds is shown, never trained on.
PROMPT = replace(ASKED, counts=False)
LAYOUTS: dict[str, tuple[dict[str, Any], Chat]] = {
    "messages": (
        {"messages": [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]},
        Chat((ASKED, ANSWERED)),
    ),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "w1 w2"}, {"from": "gpt", "value": "w3"}], "system": "w9"},
        Chat((SYSTEM, ASKED, ANSWERED)),
    ),
    "Alpaca": (
        {"instruction": "w1 w2", "input": "", "output": "w3", "text": "the whole prompt again"},
        Chat((PROMPT, ANSWERED)),
    ),
    "prompt and completion": ({"prompt": "w1 w2", "completion": "w3"}, Chat((PROMPT, ANSWERED))),
    "Gemini": (
        {"contents": [{"role": "user", "parts": [{"text": "w1 w2"}]}, {"role": "model", "parts": [{"text": "w3"}]}]},
        Chat((ASKED, ANSWERED)),
    ),
    "Dolly": ({"instruction": "w1 w2", "context": "", "response": "w3", "category": "x"}, Chat((PROMPT, ANSWERED))),
    "OpenOrca": ({"system_prompt": "w9", "question": "w1 w2", "response": "w3"}, Chat((SYSTEM, PROMPT, ANSWERED))),
    "MetaMath": ({"query": "w1 w2", "response": "w3", "type": "x"}, Chat((PROMPT, ANSWERED))),
    "GSM8K": ({"question": "w1 w2", "answer": "w3"}, Chat((PROMPT, ANSWERED))),
    "input and output": ({"input": "w1 w2", "output": "w3"}, Chat((PROMPT, ANSWERED))),
}


def chats(folder: Path, *entries: Any, name: str = "a.jsonl", key: str | None = None) -> Documents:
    lines = "\n".join(json.dumps(entry) for entry in entries)
    (folder / name).write_text(lines if name.endswith("l") else json.dumps(entries, indent=2), encoding="utf-8")
    return opened_texts(folder / name, field=key, kind="chat")


def test_every_layout_is_recognised(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.json"):
        found = chats(tmp_path, *(entry for entry, _ in LAYOUTS.values()), name=name)
        assert [found.read(number) for number in range(len(found))] == [read for _, read in LAYOUTS.values()]
    for entry, _ in LAYOUTS.values():
        wanted = set(entry) - {"text", "category", "type"}
        assert set(columns_of([*entry, "id"], RowsSpec(kind="chat"), where="table")) == wanted


def test_variants_of_layouts(tmp_path: Path) -> None:
    listed = [{"role": "user", "content": "w1 w2"}]
    found = chats(
        tmp_path,
        {"instruction": "w1", "input": "w2", "output": "w3"},
        {"prompt": listed, "completion": [{"role": "assistant", "content": "w3"}]},
        {"messages": [{"from": "Human", "value": "w1 w2"}, {"from": "GPT", "value": "w3"}]},
    )
    assert found.read(0) == Chat((replace(PROMPT, content="w1\n\nw2"), ANSWERED))
    assert found.read(1) == Chat((PROMPT, ANSWERED))
    assert found.read(2) == Chat((ASKED, ANSWERED))
    own = chats(tmp_path, {"turns": LAYOUTS["messages"][0]["messages"]}, key="turns")
    assert own.read(0) == Chat((ASKED, ANSWERED))


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        (
            {"prompt": "w1"},
            "the question `prompt` has no answer (output, completion, response, answer, solution); it has prompt;",
        ),
        ({"output": "w1"}, "no keys of a chat (messages, conversations, conversation, contents; instruction,"),
        ({"body": "w1"}, "no keys of a chat (messages, conversations, conversation, contents; instruction,"),
        ({"question": "w1", "answer": "w2", "response": "w3"}, "may be read in 2 ways (`question` with `response`,"),
        ({"instruction": "w1", "output": 3}, "`output` is no text (3); make it one"),
        ({"conversations": [[{"from": "human", "value": "w1"}]]}, "message 1 is no object ([{'from': 'human'"),
        ({"messages": [{"content": "w1"}]}, "message 1 has no `role` (nor `from`) that is a text"),
        ({"messages": [{"role": "user", "content": None}]}, "message 1 has no `content` (nor `value`) that is a text"),
        ({"conversations": [{"from": "robot", "value": "w1"}]}, "message 1 is from `robot`, which is none of human,"),
        ({"messages": "[]"}, "`messages` is not a list of messages, or an empty one; write the list itself, not its"),
        ({"conversations": []}, "`conversations` is not a list of messages, or an empty one"),
        ({"prompt": "w1", "completion": ["w2", "w3"]}, "`completion` is no text (['w2', 'w3']); make it one"),
        ({"messages": {"role": "user", "content": "w1 w2"}}, "`messages` is not a list of messages"),
        ({"messages": {"role": ["user"], "content": ["w1", "w2"]}}, "no message of the role `assistant`"),
        ({"conversations": [{"from": "human", "value": "w1"}]}, "no message of the role `assistant`"),
    ],
)
def test_what_is_missing_is_named(entry: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        chats(tmp_path, entry)
    assert str(caught.value).startswith(f"{tmp_path}/a.jsonl:1: ") and told in str(caught.value)


def test_the_kind_is_seen_from_each_row(tmp_path: Path) -> None:
    lines = [{"text": "w1"}, *(entry for entry, _ in LAYOUTS.values() if "text" not in entry)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    found = opened_texts(path)
    read = [chat for entry, chat in LAYOUTS.values() if "text" not in entry]
    assert [found.read(number) for number in range(len(found))] == ["w1", *read]
    for entry in lines[1:]:
        path.write_text(json.dumps(entry), encoding="utf-8")
        with pytest.raises(BadInput, match=r"no key `text`; it has .*; it is a chat: leave `kind: text` out"):
            opened_texts(path, kind="text")
    both = {"text": "w1", "messages": lines[1]["messages"], "frage": "w1 w2", "antwort": "w3"}
    path.write_text(json.dumps(both), encoding="utf-8")
    with pytest.raises(BadInput, match=r"may be read in 2 ways \(`text`, `messages`\); it has text, messages, frage"):
        opened_texts(path)
    own: tuple[tuple[dict[str, Any], Any], ...] = (
        ({"kind": "text"}, "w1"),
        ({"kind": "chat"}, Chat((ASKED, ANSWERED))),
        ({"field": "frage"}, "w1 w2"),
        ({"field": "messages"}, Chat((ASKED, ANSWERED))),
        ({"field": ["frage", "antwort"]}, Chat((PROMPT, ANSWERED))),
    )
    for spec, document in own:
        assert opened_texts(path, **spec).read(0) == document
    with pytest.raises(BadInput, match=r"no key `reply`; it has text, .*; give the source `field: KEY` with one of"):
        opened_texts(path, field=["frage", "reply"])


@pytest.mark.parametrize("value", [["w1", "w2"], {"0": "w1", "1": "w2"}, b"w1", []])
def test_what_holds_no_messages_is_no_chat(value: Any) -> None:
    """Lists of words, pandas' columns, bytes of a table."""
    with pytest.raises(BadInput, match=r"a.json:1: `text` is no text .*; make it one"):
        document_of({"text": value}, RowsSpec(), "a.json:1")


@pytest.mark.parametrize("role", ["assistant", "model", "bot", "gpt", "Assistant", "AI", "chatgpt"])
def test_roles_as_exports_call_them(role: str, tmp_path: Path) -> None:
    chat = [{"role": "human", "content": "w1 w2"}, {"role": role, "content": "w3"}]
    assert chats(tmp_path, {"messages": chat}).read(0) == Chat((ASKED, ANSWERED))
    chat[0]["role"] = "developer"
    assert chats(tmp_path, {"messages": chat}).read(0) == Chat((replace(ASKED, role="developer"), ANSWERED))


def test_json_files_of_texts(tmp_path: Path) -> None:
    texts = ["wörter\n", " ", "w2 ✓", "w3"]
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": text} for text in texts], indent=1, ensure_ascii=False), encoding="utf-8")
    found = opened_texts(path)
    assert [found.read(number) for number in range(len(found))] == [texts[0], *texts[2:]]
    assert found.rows.blank == 1
    for name in ("a.json", "a.jsonl", "a.txt"):
        # Windows' editors begin a file with a mark.
        marked = tmp_path / "marked" / name
        marked.parent.mkdir(exist_ok=True)
        marked.write_text({"a.json": '[{"text": "w1"}]', "a.jsonl": '{"text": "w1"}'}.get(name, "w1"), "utf-8-sig")
        assert opened_texts(marked).read(0) == "w1"
    for content, told in (
        ('{"text": "w1",\n"text": }', "a.json:1: not JSON .*; write one object a line, or a list of objects"),
        ('{\n"text": }', "a.json:1: not JSON .*; write one object a line, or a list of objects"),
        ('\n{\n"text": "w1"}', "a.json: one object of JSON over several lines; write one object a line"),
        ('{ "n": [\n1], "data": [\n{"text": "w1"}]}', "several lines, with a list under `n`: write that list alone"),
        (
            '{\n"version": 1, "data": [\n{"text": "w1"}\n]\n}',
            "a list under `data`: write that list alone",
        ),
        ('[{"text": "w1"},\n{"text" "w2"}]', "a.json:2: not JSON"),
        (
            '[{"text": "w1"},\n{"text": "w2"}',
            "a.json:2: no list of objects .expected `,` or its `]` and end, found the file's end",
        ),
        ('[{"text": "w1"}\n{"text": "w2"}]', "a.json:2: no list of objects .expected `,`"),
        ('[{"text": "w1"},\n', "a.json:2: not JSON"),
        ('[{"text": "w1"},]', "a.json:1: not JSON"),
        (
            '[{"text": "w1"}]\n[{"text": "w2"}]',
            "a.json:2: no list of objects .*; make it one, or write one object a line",
        ),
        ('[{"text": "w1"},\n{"txt": "w2"}]', "a.json:2: no keys of a text"),
    ):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(BadInput, match=told):
            opened_texts(path)


# As the models' own templates write it, by their cards.
WRITTEN: dict[TemplateName, str] = {
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
    "U<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|>",
    "gemma": "<s><start_of_turn>user\nS\n\nU<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n",
    "mistral": "<s>[INST] S\n\nU [/INST] A</s>",
    "phi3": "<|system|>\nS<|end|>\n<|user|>\nU<|end|>\n<|assistant|>\nA<|end|>\n",
    "zephyr": "<|system|>\nS</s>\n<|user|>\nU</s>\n<|assistant|>\nA</s>\n",
    "alpaca": "S\n\n### Instruction:\nU\n\n### Response:\nA</s>\n\n",
}


def test_templates_write_what_their_models_read(tmp_path: Path) -> None:
    tokenizer = Encoder(add_tokenizer(tmp_path), vocabulary=128).tokenizer
    turns = [{"role": role, "content": role[0].upper()} for role in ("system", "user", "assistant", "user")]
    assert WRITTEN.keys() == TEMPLATES.keys() == MARKS.keys() == set(get_args(TemplateName))
    for name, template in TEMPLATES.items():
        whole = tokenizer.render(turns[:3], template=template)
        assert whole == WRITTEN[name]
        assert all(mark in tokenizer.render(turns, template=template, prompt=True) for mark in MARKS[name])
        # What the loss counts begins where the prompt ends, and later turns change nothing.
        prompt = tokenizer.render(turns[:2], template=template, prompt=True)
        assert whole.startswith(prompt) and whole[len(prompt) :].strip().startswith("A")
        assert tokenizer.render(turns, template=template).startswith(whole)


def test_a_template_that_is_given_takes_the_place_of_none(tmp_path: Path) -> None:
    spaced = "{% for m in messages %}<{{ m.role }}> {{ m.content }} </s> {% endfor %}"
    spaced += "{% if add_generation_prompt %}<assistant> {% endif %}"
    encoder = Encoder(add_tokenizer(tmp_path), vocabulary=128, template=spaced)
    ids, counted = encoder.encode(Chat((ASKED, ANSWERED)))
    assert [token for token, count in zip(ids, counted, strict=True) if count] == [13, 2]


@pytest.mark.parametrize("name", MARKS)
def test_a_note_says_where_generation_cannot_stop(name: TemplateName) -> None:
    note = unknown_marks(name, MARKS[name])
    ended = "eos_token" in TEMPLATES[name]
    assert ("generation cannot stop at" in note) is not ended
    assert "cannot stop" not in unknown_marks(name, MARKS[name][:1])
