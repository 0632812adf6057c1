"""What chats hold beside their words, and where the loss is: against the masks that TRL's own templates give."""

from __future__ import annotations

import importlib.util
import json
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from surgeon.data.chats import Chat, Message
from surgeon.data.encoding import Encoder
from surgeon.data.layouts import document_of
from surgeon.data.specs import RowsSpec
from surgeon.errors import BadInput

ASKED = {"role": "user", "content": "Where is the file?"}
ANSWERED = {"role": "assistant", "content": "In the folder."}
FUNCTION = {"name": "find_file", "arguments": {"name": "notes"}}
CALL = {"id": "call_abc1", "type": "function", "function": FUNCTION}
TOOL = {"name": "find_file", "parameters": {"type": "object", "properties": {"name": {"type": "string"}}}}
ENTRIES: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [ASKED, ANSWERED]},
    "three turns": {
        "messages": [ASKED, ANSWERED, ASKED, {"role": "assistant", "content": "The first. "}, ASKED, ANSWERED]
    },
    "a system": {"messages": [{"role": "system", "content": "Be short."}, ASKED, ANSWERED, ASKED, ANSWERED]},
    "tools": {
        "tools": [{"type": "function", "function": TOOL | {"description": "Finds"}}],
        "messages": [
            ASKED,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_abc1", "name": "find_file", "content": "/home"},
            {"role": "assistant", "content": "In /home."},
            ASKED,
            ANSWERED,
        ],
    },
    "thoughts": {
        "messages": [
            ASKED,
            {"role": "assistant", "content": "In /home.", "reasoning_content": "There perhaps."},
            ASKED,
            ANSWERED | {"reasoning_content": "Hm."},
        ]
    },
}


def chat(entry: dict[str, Any]) -> Chat:
    read = document_of(entry, RowsSpec(kind="chat"), "a.jsonl:1")
    assert isinstance(read, Chat)
    return read


def called(*, name: str = "find_file", arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("message", "read"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "a "}, "b"]}, Message("user", "a b")),
        (ANSWERED | {"weight": 0}, Message("assistant", "In the folder.", counts=False)),
        (ANSWERED | {"weight": 1, "train": None}, Message("assistant", "In the folder.")),
        (ANSWERED | {"train": False}, Message("assistant", "In the folder.", counts=False)),
        ({"from": "gpt", "value": "a", "training": False}, Message("assistant", "a", counts=False)),
        ({"from": "observation", "value": "a"}, Message("tool", "a")),
        (
            {"from": "function_call", "value": json.dumps(FUNCTION)},
            Message("assistant", "", more={"tool_calls": [called(arguments={"name": "notes"})]}),
        ),
        (
            {"from": " Function_call ", "value": json.dumps(FUNCTION)},
            Message("assistant", "", more={"tool_calls": [called(arguments={"name": "notes"})]}),
        ),
        (
            {"role": "assistant", "tool_calls": [called(arguments='{"a": 1}') | {"id": "x", "index": 0}]},
            Message("assistant", "", more={"tool_calls": [{"id": "x"} | called(arguments={"a": 1})]}),
        ),
        # What tables fill up, so that all rows have the same keys.
        (
            {"role": "assistant", "content": "a", "name": None, "tool_calls": [called(arguments={"a": 1, "b": None})]},
            Message("assistant", "a", more={"tool_calls": [called(arguments={"a": 1})]}),
        ),
        (ANSWERED | {"tool_calls": None}, Message("assistant", "In the folder.")),
    ],
)
def test_what_a_message_holds(message: dict[str, Any], read: Message) -> None:
    assert chat({"messages": [ASKED, message, ANSWERED]}).messages[1] == read


def test_tools_and_history() -> None:
    asked = Message("user", "Where is the file?")
    for tools in ([TOOL], json.dumps([TOOL])):
        assert chat({"messages": [ASKED, ANSWERED], "tools": tools}).tools == (TOOL,)
    assert not chat({"messages": [ASKED, ANSWERED], "tools": ""}).tools
    read = chat({"instruction": "c", "output": "d", "history": [["a", "b"]], "system": "s"})
    assert [message.content for message in read.messages] == ["s", "a", "b", "c", "d"]
    # What the assistant says in a prompt is shown, not trained on.
    prompted = chat({"prompt": [ASKED, ANSWERED, ASKED], "completion": [ANSWERED]})
    assert prompted.messages[0].content == asked.content
    assert [message.answers for message in prompted.messages] == [False, False, False, True]


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({"messages": [ASKED, ANSWERED | {"weight": 0.5}]}, "message 2 has `weight` 0.5; a message is trained on (1)"),
        ({"messages": [ASKED, ANSWERED | {"role": "robot"}]}, "a.jsonl:1: message 2 is from `robot`, which is none of"),
        ({"messages": [ASKED, ANSWERED | {"weight": 0}]}, "every message of the role `assistant` is left out"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "message 1 has a part of the type 'image'"),
        ({"messages": [{"role": "assistant", "content": None}]}, "message 1 has no `content`"),
        ({"messages": [ANSWERED | {"tool_calls": [{"function": {}}]}]}, "`tool_calls` is not a list of calls"),
        ({"messages": [ANSWERED | {"tool_calls": [called(arguments="{")]}]}, "`arguments` of find_file is not JSON"),
        (
            {"messages": [ANSWERED | {"tool_calls": [called(arguments=json.loads("[" * 300 + "]" * 300))]}]},
            "nested more",
        ),
        ({"messages": [ANSWERED | {"thinking": "\ud800"}]}, "half of a UTF-16 pair"),
        ({"conversations": [{"from": "function_call", "value": "find"}]}, "a call is not JSON"),
        ({"messages": [ASKED, ANSWERED], "tools": "x"}, "`tools`: the list is not JSON"),
        ({"messages": [ASKED, ANSWERED], "tools": [{"kind": "x"}]}, "`tools` is not a list of objects with a `name`"),
        ({"instruction": "a", "output": "b", "history": ["a"]}, "`history` is not a list of pairs of texts"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "TRL's DPOTrainer (docs/how-to/training.md)"),
    ],
)
def test_what_cannot_be_read_is_named(entry: dict[str, Any], told: str) -> None:
    with pytest.raises(BadInput) as caught:
        chat(entry)
    assert str(caught.value).startswith(("a.jsonl:1: ", "a.jsonl:1, message 1: "))
    assert told in str(caught.value)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of bytes: what is counted is seen to the character."""
    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("bytes")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def encoder(base: Path) -> Encoder:
    return Encoder(base, vocabulary=300)


def runs(ids: list[int], counted: list[Any], decode: Any) -> list[str]:
    """The texts that are counted, one after another."""
    groups = groupby(zip(ids, counted, strict=True), key=lambda pair: bool(pair[1]))
    return [decode([token for token, _ in group]) for counts, group in groups if counts]


# Each with a twin of `{% generation %}` blocks. Not those that begin a turn within a turn or end earlier ones with
# another token (gpt-oss, the diffusing Gemma), nor such as do not write texts.
TWINS = [
    *("cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "gemma", "gemma3", "lfm2", "lfm2_v2", "llama3"),
    *("muse_glimmer", "nemotron_3_nano", "nemotron_3_5_lightning", "phi3", "phi3_5", "qwen2_5", "qwen2_5_vl"),
    *("qwen3_8", "qwen3_instruct_2507", "qwen3_vl"),
]


@pytest.mark.parametrize("name", TWINS)
def test_the_loss_is_where_trl_has_it(name: str, base: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its masks only what a prompt ends in is left out, which a model is given."""
    trl = importlib.util.find_spec("trl")
    assert trl is not None
    assert trl.origin is not None
    templates = Path(trl.origin).parent / "chat_templates"
    monkeypatch.setattr(encoder, "template", (templates / f"{name}.jinja").read_text())
    plain = AutoTokenizer.from_pretrained(base)
    compared = 0
    for entry in ENTRIES.values():
        read = chat(entry)
        turns, tools = [message.turn() for message in read.messages], list(read.tools) or None
        try:
            theirs = plain.apply_chat_template(
                turns,
                tools,
                chat_template=(templates / f"{name}_training.jinja").read_text(),
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
        except jinja2.TemplateError:
            continue
        try:
            ids, counted = encoder.encode(read)
        except BadInput as refused:
            assert "does not write tools, calls or" in str(refused) or "fails on a text" in str(refused)
            continue
        if theirs["input_ids"] != ids:
            continue
        ours = runs(ids, counted, plain.decode)
        for our, their in zip(ours, runs(ids, theirs["assistant_masks"], plain.decode), strict=True):
            assert their.endswith(our)
            assert re.fullmatch(r"\s*(<[^\s<>]*>(assistant)?\s*)*", their.removesuffix(our)), their
        compared += 1
    assert compared >= 3


def test_answers_that_do_not_count(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """By each of the three ways, one answer of three: by what is added, by blocks, by marks."""
    added = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    added += "{% if add_generation_prompt %}<assistant>{% endif %}"
    # A line's break behind a block, which jinja cuts as transformers has it.
    blocks = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}\n{{ m.content }}</s>"
        "{%- endgeneration %}\n{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    )
    changing = (
        "{% for m in messages %}<{{ m.role }}>{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}"
        "{{ m.content | trim }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    answers = [{"role": "assistant", "content": word} for word in ("one", "two ", "three")]
    answers[1]["weight"] = 0  # type: ignore[assignment]
    read = chat({"messages": [turn for answer in answers for turn in (ASKED, answer)]})
    for template, last in ((added, "three</s>"), (blocks, "three</s>"), (changing, "<think></think>three</s>")):
        monkeypatch.setattr(encoder, "template", template)
        ids, counted = encoder.encode(read)
        assert runs(ids, counted, encoder.tokenizer.decode) == ["one</s>", last]
        assert encoder.tokenizer.decode(ids) == encoder.tokenizer.render(
            [message.turn() for message in read.messages], template=template
        )


def test_a_chat_that_the_assistant_begins(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a template writes before the first words, a system message of its own, say, is not the assistant's."""
    greeting = {"role": "assistant", "content": "Hello."}
    template = (
        "{% if messages[0].role != 'system' %}<system>You help.</s>{% endif %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    monkeypatch.setattr(encoder, "template", template)
    ids, counted = encoder.encode(chat({"messages": [greeting, ASKED, ANSWERED]}))
    assert runs(ids, counted, encoder.tokenizer.decode) == ["Hello.</s>", "In the folder.</s>"]


# As those of Idefics and SmolVLM, which write no words of a text, and of LLaVA, which fail on it.
@pytest.mark.parametrize("part", ["{% if p.type == 'text' %}{{ p.text }}{% endif %}", "{{ p['type'] and p.text }}"])
def test_a_template_that_reads_parts(part: str, encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}PART{% endfor %}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    ).replace("PART", part)
    monkeypatch.setattr(encoder, "template", template)
    ids, counted = encoder.encode(chat({"messages": [ASKED, ANSWERED]}))
    assert encoder.tokenizer.decode(ids) == "<user>Where is the file?</s><assistant>In the folder.</s>"
    assert runs(ids, counted, encoder.tokenizer.decode) == ["In the folder.</s>"]


def test_a_template_that_drops_the_answers(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "template", "{% for m in messages %}<{{ m.role }}>{{ m.said }}</s>{% endfor %}")
    with pytest.raises(
        BadInput, match=r"its chat template does not write .* what the assistant says \(folder is not in"
    ):
        encoder.encode(chat({"messages": [ASKED, ANSWERED]}))


@pytest.mark.parametrize("behind", ["", "\n"])
def test_a_template_that_writes_nothing_behind_an_answer(
    behind: str, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As GLM-4's: the next turn ends an answer, and where none comes the end of the text does."""
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}BEHIND{% endfor %}".replace("BEHIND", behind)
    prompt = "{% if add_generation_prompt %}<assistant>{% endif %}"
    monkeypatch.setattr(encoder, "template", turns + prompt)
    ids, counted = encoder.encode(chat({"messages": [ASKED, ANSWERED, ASKED, ANSWERED]}))
    assert encoder.tokenizer.decode(ids).endswith("</s>")
    assert counted[-1]
    ids, counted = encoder.encode(chat({"messages": [ASKED, ANSWERED, ASKED, ANSWERED | {"weight": 0}]}))
    assert not encoder.tokenizer.decode(ids).endswith("</s>")
    assert not counted[-1]


def test_a_template_that_wants_what_comes_later(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """No chat ends in a call here, so what ends one is not known: it counts from its prompt to the last name."""
    wants = (
        "{% if messages[-1].tool_calls %}{{ raise_exception('a call without an answer') }}{% endif %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or () %}[{{ c.function.name }}]"
        "{% endfor %}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    monkeypatch.setattr(encoder, "template", wants)
    ids, counted = encoder.encode(chat({"messages": ENTRIES["tools"]["messages"]}))
    assert runs(ids, counted, encoder.tokenizer.decode) == ["[find_file", "In /home.</s>", "In the folder.</s>"]


def test_a_template_that_does_not_write_tools(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "template", "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}")
    with pytest.raises(BadInput, match=r"does not write tools, calls or .* \(find_file is not in what it makes"):
        encoder.encode(chat(ENTRIES["tools"]))
