"""Layouts of data files: the keys of an entry that contain a text, a chat or a labelled text.

A text is under `text`; a labelled text has `text` (and `text_pair`) and `label`. Chats are lists of messages (OpenAI's
and TRL's with `role` and `content`, ShareGPT's with `from` and `value`), or pairs of question and answer, as in Alpaca,
Dolly and TRL (texts, or lists of messages). `cut: true` says that a text, or a chat's last message, is not complete.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from surgeon.data.chats import ASSISTANT, Chat, Message, check_roles, checked_text, tools_of, turn_of
from surgeon.data.specs import RowsSpec
from surgeon.errors import BadInput, printable

TEXT = "text"
# Keys of a labelled text: the label, and a second text.
LABEL, PAIR = "label", "text_pair"
# Key of a text or chat that `surgeon recall` wrote: whether it was cut at the longest length.
CUT = "cut"
# Keys of a chat: lists of messages (the first that exists is used); questions; answers; unambiguous pairs of question
# and answer, which are preferred; keys that may accompany them.
_LISTS = ("messages", "conversations", "conversation", "contents")
_ASKS = ("instruction", "prompt", "question", "query", "problem", "input")
_ANSWERS = ("output", "completion", "response", "answer", "solution")
_USUAL = (("instruction", "output"), ("prompt", "completion"))
_MORE, _HISTORY = ("input", "context"), "history"
_SYSTEM, _TOOLS = ("system", "system_prompt"), "tools"
_BESIDE = (*_SYSTEM, _TOOLS, CUT)
# Pairs of preferred and rejected answers, for DPO and similar methods, which need another loss.
_PREFERRED = ("chosen", "rejected")
_PREFERENCES = (
    "`chosen` and `rejected` are preferences, which the output learns from through TRL's DPOTrainer"
    " (docs/how-to/training.md); here, leave one answer of the two as a chat"
)
_FIELD = "give the source `field: KEY`"


@dataclass(frozen=True)
class Labelled:
    """A text, or two texts, and its label: a name, or a number."""

    text: str
    pair: str | None
    label: str | int


@dataclass(frozen=True)
class CutText:
    """A text that is not complete, so that nothing teaches its end."""

    text: str


Document = str | CutText | Chat | Labelled


def said_in(document: Document) -> list[str]:
    """Return the texts of a document: a text, two texts, or the contents of a chat's messages."""
    if isinstance(document, Chat):
        return [message.content for message in document.messages]
    if isinstance(document, Labelled):
        return [document.text, document.pair or ""]
    return [document if isinstance(document, str) else document.text]


def bytes_of(document: Document) -> int:
    """Return the UTF-8 bytes of a document's texts."""
    return sum(len(text.encode()) for text in said_in(document))


@dataclass(frozen=True)
class Layout:
    """The keys that contain a document, keys that may accompany them, and a function that reads the document."""

    needs: tuple[str, ...]
    may: tuple[str, ...]
    read: Callable[[Mapping[str, Any], str], Document]


def _said(key: str, spec: RowsSpec) -> Layout:
    """Return the layout of a text under `key`: with a label for the kind `labels`; without a kind, also of messages."""

    def read(entry: Mapping[str, Any], where: str) -> Document:
        """Return the text, labelled text or chat under the key. Raises BadInput (prefix `where`) for anything else."""
        if spec.kind is None and _has_messages(entry[key]):
            return _listed(key).read(entry, where)
        text = _text(entry[key], key, where)
        if spec.kind == "labels":
            return _labelled(text, entry, where)
        return CutText(text) if entry.get(CUT) is True else text

    return Layout((key,), {"labels": (PAIR, LABEL), None: _BESIDE}.get(spec.kind, (CUT,)), read)


def _listed(key: str) -> Layout:
    """Return the layout of a chat whose messages are a list under `key`."""

    def read(entry: Mapping[str, Any], where: str) -> Chat:
        """Return the chat under the key. Raises BadInput (prefix `where`) for anything else."""
        return _chat(entry, _turns(entry[key], f"`{printable(key)}`", where), where)

    return Layout((key,), _BESIDE, read)


def _answered(asks: str, answers: str, more: Sequence[str] = ()) -> Layout:
    """Return the layout of a question and an answer: texts, or lists of messages.

    The question's messages never count, as in TRL. The value under a `more` key (Alpaca's `input`) is appended to the
    question after an empty line. Earlier turns are under `history`.
    """

    def read(entry: Mapping[str, Any], where: str) -> Chat:
        """Return a chat of earlier turns, the question and the answer.

        Raises BadInput (prefix `where`) for anything else.
        """
        asked, answered = entry[asks], entry[answers]
        if isinstance(asked, str):
            beside = [_text(entry[key], key, where) for key in more if key != asks and entry.get(key) is not None]
            asked = "\n\n".join([asked, *(text for text in beside if text.strip())])
        before, after = (
            _turns(said, f"`{printable(key)}`", where)
            if _has_messages(said)
            else [Message(role, _text(said, key, where))]
            for said, key, role in ((asked, asks, "user"), (answered, answers, ASSISTANT))
        )
        before = [replace(message, counts=False) for message in before]
        return _chat(entry, [*_history(entry, where), *before, *after], where)

    return Layout((asks, answers), (*more, _HISTORY, *_BESIDE), read)


def _history(entry: Mapping[str, Any], where: str) -> list[Message]:
    """Return earlier turns as messages; LLaMA-Factory stores them as pairs of question and answer."""
    pairs = entry.get(_HISTORY) or []
    if not isinstance(pairs, Sequence) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise BadInput(
            f"{printable(where)}: `history` is not a list of pairs of texts, asked and answered; make it one"
        )
    return [
        Message(role, _text(said, _HISTORY, where))
        for pair in pairs
        for role, said in zip(("user", ASSISTANT), pair, strict=True)
    ]


def _chat(entry: Mapping[str, Any], turns: Sequence[Message], where: str) -> Chat:
    """Return a chat of turns and the entry's system text and tools. Raises BadInput where the loss counts nothing."""
    messages = [
        *(Message("system", _text(entry[key], key, where)) for key in _SYSTEM if entry.get(key)),
        *turns,
    ]
    answers = [message for message in messages if message.answers]
    if not any(message.says for message in answers):
        why = "no message of the role `assistant`"
        if not any(message.role == ASSISTANT for message in messages):
            try:
                check_roles(messages)
            except BadInput as error:
                raise BadInput(f"{printable(where)}: {error}") from None
        if answers:
            why = "every answer of the assistant that counts is empty"
        elif any(message.role == ASSISTANT for message in messages):
            why = "every message of the role `assistant` is left out of the loss (`weight`, `train`)"
        raise BadInput(f"{printable(where)}: {why}, so there is nothing to train on; remove this chat")
    return Chat(tuple(messages), tools_of(entry.get(_TOOLS), where), entry.get(CUT) is True)


def _layouts_of(names: Collection[str], spec: RowsSpec) -> list[Layout]:
    """Return the layouts that fit rows with these keys: the requested one, or all that fit."""
    if isinstance(spec.field, list):
        return [_answered(*spec.field)] if {*spec.field} <= {*names} else []
    if spec.field is not None:
        if spec.field not in names:
            return []
        return [_listed(spec.field) if spec.kind == "chat" else _said(spec.field, spec)]
    found = [_said(TEXT, spec)] if TEXT in names and spec.kind != "chat" else []
    return found + (_chats_of(names) if spec.kind in (None, "chat") else [])


def _chats_of(names: Collection[str]) -> list[Layout]:
    """Return the layouts of chats that fit these keys: a list of messages, else the usual pair, else all pairs."""
    listed = [_listed(key) for key in _LISTS if key in names]
    asks = [key for key in _ASKS if key in names]
    # `input` and `context` are questions only where no other question key exists.
    pairs = [
        (key, answer) for key in asks if asks == [key] or key not in _MORE for answer in _ANSWERS if answer in names
    ]
    usual = [pair for pair in _USUAL if pair in pairs]
    # A `prompt` contains the whole question, so further keys are not appended.
    return listed[:1] or [_answered(*pair, () if pair[0] == "prompt" else _MORE) for pair in usual[:1] or pairs]


def layout_of(names: Collection[str], spec: RowsSpec, where: str) -> Layout:
    """Return the layout for rows with these keys. Raises BadInput where none fits, or more than one."""
    found = _layouts_of(names, spec)
    if len(found) == 1:
        return found[0]
    there = f"it has {printable(', '.join(map(str, names)) or 'none')}"
    if found:
        ways = ", ".join(" with ".join(f"`{key}`" for key in layout.needs) for layout in found)
        raise BadInput(
            f"{printable(where)}: may be read in {len(found)} ways ({ways}); {there}; say which: `kind` (text or chat),"
            " or `field: KEY` or `field: [QUESTION, ANSWER]`, of the source"
        )
    if all(name in names for name in _PREFERRED):
        raise BadInput(f"{printable(where)}: {_PREFERENCES}")
    asked = [spec.field] if isinstance(spec.field, str) else spec.field or []
    wanted = next((key for key in asked if key not in names), TEXT if spec.kind in ("text", "labels") else None)
    if wanted is not None:
        chat = not asked and spec.kind == "text" and _chats_of(names)
        do = "it is a chat: leave `kind: text` out" if chat else f"{_FIELD} with one of these"
        raise BadInput(f"{printable(where)}: no key `{printable(wanted)}`; {there}; {do}")
    if question := next((key for key in _ASKS if key in names), None):
        raise BadInput(
            f"{printable(where)}: the question `{question}` has no answer ({', '.join(_ANSWERS)}); {there}; add it,"
            f" or {_FIELD} of a text or `field: [QUESTION, ANSWER]`"
        )
    text = "" if spec.kind == "chat" else f"a text (`{TEXT}`) or "
    raise BadInput(
        f"{printable(where)}: no keys of {text}a chat ({', '.join(_LISTS)}; {', '.join(_ASKS)} with"
        f" {', '.join(_ANSWERS)}); {there}; {_FIELD} or `field: [QUESTION, ANSWER]` with such ones"
    )


def columns_of(names: Sequence[str], spec: RowsSpec, where: str) -> list[str]:
    """Return the columns of a table that contain the documents. Raises BadInput as `layout_of` does."""
    layout = layout_of(names, spec, where)
    return [name for name in names if name in (*layout.needs, *layout.may)]


def document_of(entry: Any, spec: RowsSpec, where: str) -> Document:
    """Return the document in an entry of a file, or in a row of a table.

    Raises BadInput (prefix `where`) where it contains none, or could be read in several ways.
    """
    if not isinstance(entry, Mapping):
        raise BadInput(f"{printable(where)}: no JSON object ({printable(repr(entry), 40)}); write one a document")
    return layout_of(entry, spec, where).read(entry, where)


def _labelled(text: str, entry: Mapping[str, Any], where: str) -> Labelled:
    """Return a labelled text, with a second text where the entry has one."""
    label, pair = entry.get(LABEL), entry.get(PAIR)
    if label is None:
        raise BadInput(
            f"{printable(where)}: no key `{LABEL}`; a text of the kind `labels` needs one, a name or a number; add it"
        )
    if not isinstance(label, str | int) or isinstance(label, bool) or label == "":
        raise BadInput(
            f"{printable(where)}: `{LABEL}` is neither a name nor a whole number ({printable(repr(label), 40)});"
            " labels are classes, not amounts: give the class a name"
        )
    return Labelled(text, None if pair is None else _text(pair, PAIR, where), label)


def _turns(value: Any, shown: str, where: str) -> list[Message]:
    """Return the messages in a list. Raises BadInput (prefix `where`, with the name `shown`) for anything else."""
    if isinstance(value, Mapping) and _has_messages(value):
        # `datasets` stores a `Sequence` of structs as a struct of lists of equal length.
        value = [dict(zip(value, turn, strict=True)) for turn in zip(*value.values(), strict=False)]
    if not isinstance(value, list) or not value:
        way = "write the list itself, not its text" if isinstance(value, str) else f"{_FIELD} with another key"
        raise BadInput(f"{printable(where)}: {shown} is not a list of messages, or an empty one; {way}")
    return [turn_of(message, nth, where) for nth, message in enumerate(value, 1)]


def _text(value: Any, key: str, where: str) -> str:
    """Return the text under `key` unchanged. Raises BadInput (prefix `where`) for anything but a valid text."""
    if not isinstance(value, str):
        raise BadInput(
            f"{printable(where)}: `{printable(key)}` is no text ({printable(repr(value), 40)}); make it one, or"
            f" {_FIELD} with another key"
        )
    return checked_text(value, where)


def _has_messages(value: Any) -> bool:
    """Return whether a value is a list of objects, or the columns of such a list."""
    if isinstance(value, Mapping):
        return all(isinstance(column, list) for column in value.values())
    return isinstance(value, list) and any(isinstance(part, Mapping) for part in value)
