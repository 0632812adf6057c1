"""How an entry of a data file holds a text, a chat or a labelled text: the layouts that people use, by their keys.

`text`; with a label, `text` (and `text_pair`) and `label`; and of chats: messages (`role` and `content`, as OpenAI and
TRL have it), ShareGPT (`conversations` of `from` and `value`), Alpaca (`instruction`, `input`, `output`), and prompt
with completion (texts, or lists of messages).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surgeon.errors import BadInput, printable

TEXT = "text"
# Of a text with a label: what the label stands under, and a second text.
LABEL, PAIR = "label", "text_pair"
_FIELD = "`field:` of the source names another key"
# Who speaks, as ShareGPT's exports call it.
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}


@dataclass(frozen=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True)
class Labelled:
    """A text, or two, and what it is to be called: a label's name, or its number."""

    text: str
    pair: str | None
    label: str | int


Document = str | tuple[Message, ...] | Labelled


def text_bytes(document: str | tuple[Message, ...]) -> int:
    """UTF-8 bytes of a text, or of all that is said in a chat."""
    said = (document,) if isinstance(document, str) else (message.content for message in document)
    return sum(len(part.encode()) for part in said)


@dataclass(frozen=True)
class Layout:
    """One layout of chats: the keys that an entry must have, those that it may have, and how they become messages."""

    name: str
    needs: tuple[str, ...]
    may: tuple[str, ...]
    messages: Callable[[Mapping[str, Any], str], list[Message]]


def _listed(key: str) -> Callable[[Mapping[str, Any], str], list[Message]]:
    def messages(entry: Mapping[str, Any], where: str) -> list[Message]:
        return _before(entry, where) + _turns(entry[key], f"`{printable(key)}`", where)

    return messages


def _alpaca(entry: Mapping[str, Any], where: str) -> list[Message]:
    """The input, if there is one, follows the instruction after an empty line."""
    asked = _text(entry["instruction"], "instruction", where)
    more = entry.get("input")
    if more is not None and _text(more, "input", where).strip():
        asked = f"{asked}\n\n{more}"
    answer = _text(entry["output"], "output", where)
    return [*_before(entry, where), Message("user", asked), Message("assistant", answer)]


def _completed(entry: Mapping[str, Any], where: str) -> list[Message]:
    messages = _before(entry, where)
    for key, role in (("prompt", "user"), ("completion", "assistant")):
        value = entry[key]
        if isinstance(value, str):
            messages.append(Message(role, checked_text(value, where)))
        else:
            messages += _turns(value, f"`{key}`", where)
    return messages


CHATS = (
    Layout("messages", ("messages",), ("system",), _listed("messages")),
    Layout("ShareGPT", ("conversations",), ("system",), _listed("conversations")),
    Layout("Alpaca", ("instruction", "output"), ("input", "system"), _alpaca),
    Layout("prompt and completion", ("prompt", "completion"), ("system",), _completed),
)


def layout_of(keys: Collection[str], key: str | None) -> Layout | None:
    """The layout of chats whose keys are there; with `key` a list of messages under that one. None: no layout fits."""
    if key is not None:
        return Layout(key, (key,), ("system",), _listed(key)) if key in keys else None
    return next((layout for layout in CHATS if set(layout.needs) <= set(keys)), None)


def columns_of(names: Sequence[str], key: str | None, *, chat: bool, where: str, labels: bool = False) -> list[str]:
    """The columns of a table that hold the documents. Raises BadInput where they are not there."""
    if not chat:
        key = key or TEXT
        if key not in names:
            raise BadInput(f"{printable(where)}: no column `{printable(key)}`; {_instead(names, key)}")
        if labels and LABEL not in names:
            raise BadInput(f"{printable(where)}: no column `{LABEL}`; {_LABEL_MISSING}")
        return [key, *(name for name in (PAIR, LABEL) if labels and name in names)]
    layout = layout_of(names, key)
    if layout is None:
        raise BadInput(f"{printable(where)}: {_no_chat(names, key, 'column')}")
    return [name for name in names if name in (*layout.needs, *layout.may)]


def document_of(entry: Any, where: str, *, key: str | None, chat: bool, labels: bool = False) -> Document:
    """An entry of a file, or a row of a table, as a document. Raises BadInput, which begins with `where`."""
    if not isinstance(entry, Mapping):
        raise BadInput(
            f"{printable(where)}: no key `{printable(key or TEXT)}`, as this is no JSON object; write one a document"
        )
    if not chat:
        key = key or TEXT
        if key not in entry:
            raise BadInput(f"{printable(where)}: no key `{printable(key)}`; {_instead(list(entry), key)}")
        if isinstance(entry[key], str):
            text = checked_text(entry[key], where)
            return _labelled(text, entry, where) if labels else text
        shown = printable(repr(entry[key]), 40)
        raise BadInput(f"{printable(where)}: `{printable(key)}` is {shown}, not a text; {_FIELD}")
    layout = layout_of(entry, key)
    if layout is None:
        raise BadInput(f"{printable(where)}: {_no_chat(list(entry), key, 'key')}")
    messages = layout.messages(entry, where)
    if not any(message.role == "assistant" for message in messages):
        raise BadInput(
            f"{printable(where)}: no message of the role `assistant`, so there is nothing to train on; remove this chat"
        )
    return tuple(messages)


_LABEL_MISSING = "each text of the kind `labels` needs one, a name or a number; add it"


def _labelled(text: str, entry: Mapping[str, Any], where: str) -> Labelled:
    """The text with its label, and the second text where there is one."""
    label, pair = entry.get(LABEL), entry.get(PAIR)
    if label is None:
        raise BadInput(f"{printable(where)}: no key `{LABEL}`; {_LABEL_MISSING}")
    if not isinstance(label, str | int) or isinstance(label, bool) or label == "":
        raise BadInput(
            f"{printable(where)}: `{LABEL}` is {printable(repr(label), 40)}, neither a name nor a whole number; classes"
            " are trained, no amounts: name the class"
        )
    return Labelled(text, None if pair is None else _text(pair, PAIR, where), label)


def _instead(names: Sequence[str], key: str) -> str:
    """What to do where the key of a text is missing: what the keys that are there may be."""
    layout = layout_of(names, None)
    if layout is not None and key == TEXT:
        shown = ", ".join(f"`{name}`" for name in layout.needs)
        return f"it has {shown}, a chat ({layout.name}): write `kind: chat`"
    return _others(names)


def _others(names: Sequence[str]) -> str:
    return f"it has {printable(', '.join(map(str, names)) or 'none')}; `field:` of the source names another one"


def _no_chat(names: Sequence[str], key: str | None, what: str) -> str:
    if key is not None:
        return f"no {what} `{printable(key)}`; {_others(names)}"
    # Of a layout that is there in part, the key that is missing.
    for layout in CHATS:
        missing = [name for name in layout.needs if name not in names]
        if 0 < len(missing) < len(layout.needs):
            there = ", ".join(f"`{name}`" for name in layout.needs if name in names)
            return f"no {what} `{missing[0]}`, which a chat with {there} ({layout.name}) needs; add it"
    known = "; ".join(f"{layout.name}: {', '.join(layout.needs)}" for layout in CHATS)
    return f"no chat ({known}); {_others(names)}"


def _before(entry: Mapping[str, Any], where: str) -> list[Message]:
    """The system's message, where the entry has one beside the turns."""
    system = entry.get("system")
    return [Message("system", _text(system, "system", where))] if system else []


def _turns(value: Any, shown: str, where: str) -> list[Message]:
    if isinstance(value, Mapping) and all(isinstance(column, list) for column in value.values()):
        # A feature `Sequence` of structs of `datasets` is kept as a struct of lists, which are of one length.
        value = [dict(zip(value, turn, strict=True)) for turn in zip(*value.values(), strict=False)]
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise BadInput(f"{printable(where)}: {shown} is not a list of messages; {_FIELD}")
    return [_turn(message, nth, where) for nth, message in enumerate(value, 1)]


def _turn(message: Any, nth: int, where: str) -> Message:
    ours = message if isinstance(message, Mapping) else {}
    role, content = ours.get("role"), ours.get("content")
    if role is None and isinstance(ours.get("from"), str):
        role, content = _SPEAKERS.get(ours["from"].lower()), ours.get("value")
        if role is None:
            raise BadInput(
                f"{printable(where)}: message {nth} is from `{printable(ours['from'])}`, which is none of"
                f" {', '.join(_SPEAKERS)}; rename it"
            )
    if not isinstance(role, str) or not isinstance(content, str):
        raise BadInput(
            f"{printable(where)}: message {nth} has no `role` and `content` that are text (nor `from` and `value`); add"
            " them"
        )
    said = f"{where}, message {nth}"
    return Message(checked_text(role, said), checked_text(content, said))


def _text(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str):
        raise BadInput(f"{printable(where)}: `{key}` is {printable(repr(value), 40)}, not a text; make it one")
    return checked_text(value, where)


def checked_text(text: str, where: str) -> str:
    """The text; BadInput, beginning with `where`, for half of a UTF-16 pair in it, which nothing can encode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadInput(
            f"{printable(where)}: character {error.start + 1} of the text is half of a UTF-16 pair"
            f" ({printable(text[error.start])}), which no tokenizer takes; remove or replace it"
        ) from None
    return text
