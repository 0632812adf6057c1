"""Chats: turns of messages with further fields, in the formats of OpenAI, TRL and ShareGPT."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from surgeon.errors import BadInput, printable

ASSISTANT = "assistant"
# Fields of a message, apart from its text, that chat templates read.
_PASSED = ("name", "tool_calls", "tool_call_id", "reasoning_content", "thinking")
# Fields that an assistant's message may have instead of text.
_INSTEAD_OF_WORDS = ("tool_calls", "reasoning_content", "thinking")
# Keys of a message's speaker and text, in the formats of OpenAI, ShareGPT and Gemini.
_ROLES, _CONTENTS = ("role", "from"), ("content", "value", "parts")
_CALLS = "function_call"
# The roles that templates know, each with the names of its speaker in exported chats.
_NAMES_BY_ROLE = {
    "user": "human user prompter",
    ASSISTANT: f"gpt chatgpt bing bard model bot assistant ai {_CALLS}",
    "system": "system",
    "tool": "tool function observation function_response",
    "developer": "developer",
    "ipython": "ipython",
}
_SPEAKERS = {name: role for role, names in _NAMES_BY_ROLE.items() for name in names.split()}
# The deepest nesting of data passed to templates; JSON schemas of real tools have about a dozen levels.
_DEPTH = 100


@dataclass(frozen=True)
class Message:
    """One turn of a chat; `more` are further fields that a template may read.

    The loss counts it where the assistant says it and `counts` is true. `number` is its place in its list, from 1.
    """

    role: str
    content: str
    counts: bool = True
    more: Mapping[str, Any] = field(default_factory=dict)
    number: int = field(default=0, compare=False)

    @property
    def answers(self) -> bool:
        """Whether the loss counts the message."""
        return self.role == ASSISTANT and self.counts

    @property
    def says(self) -> bool:
        """Whether the message has text, or an assistant's calls or thoughts."""
        return bool(self.content.strip()) or any(key in self.more for key in _INSTEAD_OF_WORDS)

    def turn(self) -> dict[str, Any]:
        """Return the message in the form that chat templates accept."""
        return {"role": self.role, "content": self.content, **self.more}


@dataclass(frozen=True)
class Chat:
    """The messages of a chat, and descriptions (JSON schemas) of the tools that the assistant may call.

    `cut`: the last message is not complete, so that nothing teaches its end.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    cut: bool = False

    def names(self) -> Iterator[str]:
        """Yield the names of its tools, and of the tools called in it."""
        for tool in self.tools:
            yield from _name(tool)
        for message in self.messages:
            for call in message.more.get("tool_calls", ()):
                yield from _name(call)


def turn_of(value: Any, nth: int, where: str) -> Message:
    """Return message number `nth` of the chat at `where`. Raises BadInput where it is unreadable or not text."""
    shown = f"{printable(where)}: message {nth}"
    if not isinstance(value, Mapping):
        raise BadInput(f"{shown} is no object ({printable(repr(value), 40)}); write it with `role` and `content`")
    speaker, content = (
        next((value[key] for key in keys if value.get(key) is not None), None) for keys in (_ROLES, _CONTENTS)
    )
    if not isinstance(speaker, str):
        raise BadInput(f"{shown} has no `role` (nor `from`) that is a text; say who speaks")
    role = _SPEAKERS.get(speaker.strip().lower(), speaker)
    # Under `role` a template may know other names, which are checked where it is known.
    if role not in _SPEAKERS.values() and "role" not in value:
        raise BadInput(f"{printable(where)}: {_unknown(nth, speaker)}; rename it")
    more = {key: value[key] for key in _PASSED if value.get(key) not in (None, [], "")}
    if speaker.strip().lower() == _CALLS:
        more["tool_calls"], content = _json(content, "a call", shown), None
    elif value.get(_CALLS):
        # OpenAI's earlier format, with a single call.
        more["tool_calls"] = value[_CALLS]
    if "tool_calls" in more:
        more["tool_calls"] = _calls(more["tool_calls"], shown)
    if isinstance(content, list | tuple):
        content = _joined(content, shown)
    if content is None and role == ASSISTANT and any(key in more for key in _INSTEAD_OF_WORDS):
        content = ""
    if not isinstance(content, str):
        said = "nothing" if content is None else printable(repr(content), 40)
        raise BadInput(f"{shown} has no `content` (nor `value`) that is a text ({said}); add it, or remove this chat")
    said = f"{where}, message {nth}"
    counts = _counts(value, shown)
    return Message(checked_text(role, said), checked_text(content, said), counts, _plain(more, said), nth)


def _unknown(nth: int, speaker: str) -> str:
    """Return the error text for a speaker that is not known."""
    return f"message {nth} is from `{printable(speaker)}`, which is none of {', '.join(_SPEAKERS)}"


def check_roles(messages: Sequence[Message], template: str = "") -> None:
    """Raise BadInput for a role that is no usual one, unless the template has it in quotation marks."""
    for each in messages:
        named = any(f"{mark}{each.role}{mark}" in template for mark in ("'", '"'))
        if each.role not in _SPEAKERS.values() and not named:
            raise BadInput(f"{_unknown(each.number, each.role)}; rename it")


def tools_of(value: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    """Return tools, read from a list of objects, or from a text that contains such a list as JSON; empty for None.

    Raises BadInput for anything else.
    """
    shown = f"{printable(where)}: `tools`"
    if isinstance(value, str):
        value = _json(value, "the list", shown) if value.strip() else None
    if value is None:
        return ()
    if not isinstance(value, Sequence) or not all(isinstance(tool, Mapping) and any(_name(tool)) for tool in value):
        raise BadInput(f"{shown} is not a list of objects with a `name` or a `function`; write it as JSON schemas")
    return tuple(_plain(tool, f"{where}: `tools`") for tool in value)


def _name(described: Mapping[str, Any]) -> Iterator[str]:
    """Yield the name of a tool or call, if it has one."""
    function = described.get("function")
    name = (function if isinstance(function, Mapping) else described).get("name")
    if isinstance(name, str):
        yield name


def _calls(value: Any, shown: str) -> list[dict[str, Any]]:
    """Return calls in the form that templates read: `function` with `name` and `arguments`, an object, not text.

    Raises BadInput where a call has no name, or arguments that are not JSON.
    """
    calls = [value] if isinstance(value, Mapping) else value
    if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) and any(_name(call)) for call in calls):
        raise BadInput(f"{shown}: `tool_calls` is not a list of calls with a `name` and `arguments`; write them so")
    found = []
    for call in calls:
        function = call.get("function")
        function = dict(function if isinstance(function, Mapping) else call)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _json(arguments, f"`arguments` of {function['name']}", shown) if arguments else {}
        function["arguments"] = arguments
        rest = {key: call[key] for key in ("id",) if call.get(key) is not None}
        found.append({**rest, "type": "function", "function": function})
    return found


def _plain(value: Any, where: str, depth: int = _DEPTH) -> Any:
    """Return JSON data for a template, without keys whose value is null, which tables add to make all rows alike.

    Raises BadInput (prefix `where`) for text that cannot be encoded, and for data nested too deep.
    """
    if isinstance(value, str):
        return checked_text(value, where)
    if not isinstance(value, Mapping | list | tuple):
        return value
    if not depth:
        raise BadInput(
            f"{printable(where)}: nested more than {_DEPTH} deep, which no template writes; remove this chat"
        )
    if isinstance(value, Mapping):
        return {
            checked_text(str(key), where): _plain(inner, where, depth - 1)
            for key, inner in value.items()
            if inner is not None
        }
    return [_plain(inner, where, depth - 1) for inner in value]


def _json(value: Any, what: str, shown: str) -> Any:
    """Return a text parsed as JSON; return a value that is no text unchanged.

    Raises BadInput (prefix `shown`, with the name `what`) for a text that is not JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{shown}: {printable(what)} is not JSON ({printable(str(error))}); correct it") from None


def _joined(parts: Sequence[Any], shown: str) -> str:
    """Return the parts of a content joined to one text.

    Raises BadInput (prefix `shown`) for a part that is not text.
    """
    texts = []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        text = part if isinstance(part, str) else part.get("text") if kind == "text" else None
        if not isinstance(text, str):
            what = f"of the type {printable(repr(kind), 40)}" if kind not in (None, "text") else "without `text`"
            raise BadInput(f"{shown} has a part {what}; surgeon trains on text: leave out this chat, or the part")
        texts.append(text)
    return "".join(texts)


def _counts(message: Mapping[str, Any], shown: str) -> bool:
    """Return whether the loss may count a message: OpenAI's `weight`, axolotl's `train` or `training`, each 0 or 1.

    Without these keys it may. Raises BadInput (prefix `shown`) for another value.
    """
    for key in ("weight", "train", "training"):
        if (value := message.get(key)) is None:
            continue
        if value not in (0, 1):
            raise BadInput(
                f"{shown} has `{key}` {printable(repr(value), 40)}; a message is trained on (1) or not (0): write one"
            )
        if not value:
            return False
    return True


def checked_text(text: str, where: str) -> str:
    """Return the text. Raises BadInput (prefix `where`) for half of a UTF-16 pair, which no encoding can represent."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadInput(
            f"{printable(where)}: character {error.start + 1} of the text is half of a UTF-16 pair"
            f" ({printable(text[error.start])}), which no tokenizer takes; remove or replace it"
        ) from None
    return text
