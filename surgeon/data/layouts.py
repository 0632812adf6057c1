"""Layouts of data files: the keys under which an entry holds a text, a chat or a labelled text.

`text`; with a label, `text` (and `text_pair`) and `label`; and of chats: messages (`role` and `content`, as OpenAI and
TRL have it), ShareGPT (`conversations` of `from` and `value`), Alpaca (`instruction`, `input`, `output`), and prompt
with completion (texts, or lists of messages).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from surgeon.data.chats import ASSISTANT, Chat, Message, checked_text, tools_of, turn_of
from surgeon.errors import BadInput, printable

TEXT = "text"
# Of a text with a label: what the label stands under, and a second text.
LABEL, PAIR = "label", "text_pair"
_SYSTEM, _TOOLS = "system", "tools"
# Answers of which one is preferred: those of DPO and its kin, which need another loss.
_PREFERRED = ("chosen", "rejected")
_PREFERENCES = (
    "`chosen` and `rejected` are preferences, which the output learns from through TRL's DPOTrainer"
    " (docs/how-to/other-trainers.md); here, leave one answer of the two as a chat"
)
_FIELD = "`field:` of the source names another key"


@dataclass(frozen=True)
class Labelled:
    """A text, or two, and what it is to be called: a label's name, or its number."""

    text: str
    pair: str | None
    label: str | int


Document = str | Chat | Labelled


def text_bytes(document: str | Chat) -> int:
    """Count the UTF-8 bytes of a text, or of all that is said in a chat."""
    said = (document,) if isinstance(document, str) else (message.content for message in document.messages)
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
    """Make messages of Alpaca's keys; the input, if there is one, follows the instruction after an empty line."""
    question = _text(entry["instruction"], "instruction", where)
    more = entry.get("input")
    if more is not None and _text(more, "input", where).strip():
        question = f"{question}\n\n{more}"
    answer = _text(entry["output"], "output", where)
    return [*_before(entry, where), *_history(entry, where), Message("user", question), Message(ASSISTANT, answer)]


def _history(entry: Mapping[str, Any], where: str) -> list[Message]:
    """Make messages of the turns before, which LLaMA-Factory keeps as pairs of question and answer."""
    pairs = entry.get("history") or []
    if not isinstance(pairs, Sequence) or not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in pairs):
        raise BadInput(
            f"{printable(where)}: `history` is not a list of pairs of texts, asked and answered; make it one"
        )
    return [
        Message(role, _text(said, "history", where))
        for pair in pairs
        for role, said in zip(("user", ASSISTANT), pair, strict=True)
    ]


def _completed(entry: Mapping[str, Any], where: str) -> list[Message]:
    """Make messages of prompt and completion; the assistant's words in the prompt do not count, as in TRL."""
    prompt, answered = (
        [Message(role, checked_text(entry[key], where))]
        if isinstance(entry[key], str)
        else _turns(entry[key], f"`{key}`", where)
        for key, role in (("prompt", "user"), ("completion", ASSISTANT))
    )
    return [*_before(entry, where), *(replace(message, counts=False) for message in prompt), *answered]


CHATS = (
    Layout("messages", ("messages",), (_SYSTEM, _TOOLS), _listed("messages")),
    Layout("ShareGPT", ("conversations",), (_SYSTEM, _TOOLS), _listed("conversations")),
    Layout("Alpaca", ("instruction", "output"), ("input", "history", _SYSTEM), _alpaca),
    Layout("prompt and completion", ("prompt", "completion"), (_SYSTEM, _TOOLS), _completed),
)


def layout_of(keys: Collection[str], key: str | None) -> Layout | None:
    """Find the layout of chats whose keys are there; with `key` a list of messages under it. None: none fits."""
    if key is not None:
        return Layout(key, (key,), (_SYSTEM, _TOOLS), _listed(key)) if key in keys else None
    return next((layout for layout in CHATS if set(layout.needs) <= set(keys)), None)


def columns_of(names: Sequence[str], key: str | None, *, chat: bool, where: str, labels: bool = False) -> list[str]:
    """Find the columns of a table that hold the documents. Raises BadInput where they are not there."""
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
    """Make a document of an entry of a file, or a row of a table. Raises BadInput, which begins with `where`."""
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
    if not any(message.role == ASSISTANT for message in messages):
        raise BadInput(
            f"{printable(where)}: no message of the role `assistant`, so there is nothing to train on; remove this chat"
        )
    if not any(message.answers for message in messages):
        raise BadInput(
            f"{printable(where)}: every message of the role `assistant` is left out of the loss (`weight`, `train`), so"
            " there is nothing to train on; remove this chat"
        )
    return Chat(tuple(messages), tools_of(entry.get(_TOOLS), where) if _TOOLS in layout.may else ())


_LABEL_MISSING = "each text of the kind `labels` needs one, a name or a number; add it"


def _labelled(text: str, entry: Mapping[str, Any], where: str) -> Labelled:
    """Make a labelled text, with a second text where there is one."""
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
    """Say what to do where the key of a text is missing, by the keys that are there."""
    layout = layout_of(names, None)
    if layout is not None and key == TEXT:
        shown = ", ".join(f"`{name}`" for name in layout.needs)
        return f"it has {shown}, a chat ({layout.name}): write `kind: chat`"
    return _others(names)


def _others(names: Sequence[str]) -> str:
    if all(name in names for name in _PREFERRED):
        return _PREFERENCES
    return f"it has {printable(', '.join(map(str, names)) or 'none')}; `field:` of the source names another one"


def _no_chat(names: Sequence[str], key: str | None, what: str) -> str:
    if key is not None:
        return f"no {what} `{printable(key)}`; {_others(names)}"
    if all(name in names for name in _PREFERRED):
        return _PREFERENCES
    # Of a layout that is there in part, the key that is missing.
    for layout in CHATS:
        missing = [name for name in layout.needs if name not in names]
        if 0 < len(missing) < len(layout.needs):
            there = ", ".join(f"`{name}`" for name in layout.needs if name in names)
            return f"no {what} `{missing[0]}`, which a chat with {there} ({layout.name}) needs; add it"
    known = "; ".join(f"{layout.name}: {', '.join(layout.needs)}" for layout in CHATS)
    return f"no chat ({known}); {_others(names)}"


def _before(entry: Mapping[str, Any], where: str) -> list[Message]:
    """Return the system's message, where the entry has one beside the turns."""
    system = entry.get(_SYSTEM)
    return [Message("system", _text(system, _SYSTEM, where))] if system else []


def _turns(value: Any, shown: str, where: str) -> list[Message]:
    if isinstance(value, Mapping) and all(isinstance(column, list) for column in value.values()):
        # A feature `Sequence` of structs of `datasets` is kept as a struct of lists, which are of one length.
        value = [dict(zip(value, turn, strict=True)) for turn in zip(*value.values(), strict=False)]
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise BadInput(f"{printable(where)}: {shown} is not a list of messages; {_FIELD}")
    return [turn_of(message, nth, where) for nth, message in enumerate(value, 1)]


def _text(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str):
        raise BadInput(f"{printable(where)}: `{key}` is {printable(repr(value), 40)}, not a text; make it one")
    return checked_text(value, where)
