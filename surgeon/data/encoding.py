"""Conversion of documents to tokens, and the choice of tokens that the loss counts.

In a chat, the loss counts the assistant's words, to the end of the turn. They are found by the first possible of three
ways: the template's own `{% generation %}` blocks; the text that each answer adds, where the text up to it is a prefix
of the whole chat; the positions of the answers, found by marks around their words.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from surgeon.data.chats import ASSISTANT, Chat, check_roles
from surgeon.data.layouts import CutText, Document, Labelled
from surgeon.data.specs import RowsSpec
from surgeon.errors import BadInput, printable
from surgeon.models.templates import no_template
from surgeon.models.tokenizer import Tokenizer, open_tokenizer
from surgeon.models.tokens import check_ids

# Marks are characters of Unicode's last private plane, which texts do not contain. Answer n has these plus 2n.
_BEGIN, _END = 0x100000, 0x100001
_MARK = re.compile("[\U00100000-\U0010fffd]")
_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_MOST_MESSAGES = 32_000
# A truncated special token: `<|im_`, `[/IN`.
_OPEN_MARK = re.compile(r"[<\[][^<>\[\]\s]*\Z")

# Token ids, and for each whether the loss counts it.
Encoded = tuple[list[int], list[bool]]
# Begin and end (exclusive) of a part of a text, in characters.
Span = tuple[int, int]


class Written:
    """A chat rendered by a template. Raises BadInput where the template refuses it, or leaves something out."""

    def __init__(self, tokenizer: Tokenizer, template: str, chat: Chat) -> None:
        """Render `chat` in the first form of a turn (`_FORMS`) of which the template leaves nothing out.

        Raises BadInput where the template refuses every form, or leaves out tools, calls or all answers' words, and
        for a role that is neither usual nor named by the template.
        """
        check_roles(chat.messages, template)
        self.tokenizer = tokenizer
        self.template = template
        self.chat = chat
        self._turns = [message.turn() for message in chat.messages]
        self._answers = [nth for nth, message in enumerate(chat.messages) if message.role == ASSISTANT]
        words = [word for nth in self._answers for word in re.findall(r"\w+", chat.messages[nth].content)[-1:]]
        refused: list[BadInput] = []
        for self._form in _FORMS:
            try:
                self.text = self._render(self._turns)
            except BadInput as error:
                refused.append(error)
                continue
            lacking = [name for name in chat.names() if name not in self.text]
            if not any(word in self.text for word in words):
                lacking += words
            if not lacking:
                return
        if len(refused) == len(_FORMS):
            raise refused[0]
        raise BadInput(
            f"{printable(str(tokenizer.folder))}: its chat template does not write tools, calls or what the assistant"
            f" says ({printable(lacking[0], 40)} is not in what it makes of a chat); use one that does, or leave out"
            " `tools` and these chats"
        )

    def counted(self) -> Encoded | None:
        """Return token ids, and whether the loss counts each; None where the assistant's words cannot be located."""
        return self._by_blocks() if self.has_blocks else self._by_beginnings() or self._by_places()

    @property
    def has_blocks(self) -> bool:
        """Whether the template itself marks the assistant's words with `{% generation %}` blocks."""
        return _GENERATION.search(self.template) is not None

    def _by_blocks(self) -> Encoded | None:
        """Count tokens by the template's own blocks, whose ends are marked in the text and removed again.

        The mask by transformers is wrong where a block ends in a character that no token covers: it then runs to the
        end of the chat. Returns None where some answers do not count and there is not one block for each answer.
        """
        # Replace each block by another block, so that the template trims the white space around it in the same way.
        marking = _GENERATION.sub(
            lambda tag: f"{{%{tag[1]} if true %}}{chr(_END if tag[2] else _BEGIN)}{{% endif {tag[3]}%}}", self.template
        )
        text, marks = _unmarked(self._render(self._turns, template=marking))
        spans = [
            (begin, end)
            for (first, begin), (second, end) in zip(marks[::2], marks[1::2], strict=False)
            if (first, second) == (_BEGIN, _END)
        ]
        if text != self.text or 2 * len(spans) != len(marks):
            return None
        answers = [self.chat.messages[nth] for nth in self._answers]
        if not all(answer.counts for answer in answers):
            if len(spans) != len(answers):
                return None
            spans = [span for span, answer in zip(spans, answers, strict=True) if answer.counts]
        return self._within(text, spans)

    def _by_beginnings(self) -> Encoded | None:
        """Count the tokens that each answer adds to its prompt; None where a later turn changes the text before it."""
        whole = self._ids(self.text)
        counted = [False] * len(whole)
        for nth in self._answers:
            if not self.chat.messages[nth].counts:
                continue
            if nth == 0:
                # An empty list of turns has no prompt, and text before the words need not belong to the answer.
                return None
            try:
                before = self._ids(self._render(self._turns[:nth], prompt=True))
                upto = self._ids(self._render(self._turns[: nth + 1]))
            except BadInput:
                # A template may require later turns, such as an answer to every call.
                return None
            if whole[: len(before)] != before or whole[: len(upto)] != upto:
                return None
            counted[len(before) : len(upto)] = [True] * (len(upto) - len(before))
        return whole, counted

    def _by_places(self) -> Encoded | None:
        """Count the tokens from the end of each answer's prompt to the end of its turn, located by the answer's words.

        Returns None where words are missing, or marks around them change the rendered text.
        """
        if not self.tokenizer.is_fast or len(self._turns) > _MOST_MESSAGES:
            return None
        spans = self._words()
        if spans is None:
            return None
        found: list[Span] = []
        last = 0
        for (begin, end), nth in zip(spans, self._answers, strict=True):
            # The prompt may end in text (`<think>`) with which only some answers begin: then try shorter openings.
            for opening in _beginnings(self._opening(nth)):
                place = self.text.rfind(opening, last, begin) if opening.strip() else -1
                if place >= 0:
                    begin = place + len(opening)
                    break
            # Where another turn follows, the turn's ending may be incomplete.
            end += next(len(ending) for ending in _beginnings(self._ending(nth)) if self.text.startswith(ending, end))
            if self.chat.messages[nth].counts:
                found.append((begin, end))
            last = end
        return self._within(self.text, found)

    def _words(self) -> list[Span] | None:
        """Locate each answer's words in the text; a template may strip white space around them."""
        for strip in (str, str.strip, str.rstrip, str.lstrip):
            text, marks = _unmarked(self._render(self._marked(self._turns, strip)))
            first = dict(reversed(marks))
            if text == self.text and len(first) == 2 * len(self._answers):
                return [(first[_BEGIN + 2 * nth], first[_END + 2 * nth]) for nth in self._answers]
        return None

    def _opening(self, nth: int) -> str:
        """Return the text that a prompt adds to the turns before answer `nth`; "" where it changes them or fails."""
        try:
            before = self._render(self._turns[:nth])
            prompt = self._render(self._turns[:nth], prompt=True)
        except BadInput:
            return ""
        return prompt.removeprefix(before) if prompt.startswith(before) else ""

    def _ending(self, nth: int) -> str:
        """Return the text that follows the words of answer `nth` as the last turn; "" where it cannot be the last."""
        try:
            marked = self._render(self._marked(self._turns[: nth + 1], str.strip))
        except BadInput:
            return ""
        return marked.rpartition(chr(_END + 2 * nth))[2]

    def _marked(self, turns: Sequence[dict[str, Any]], strip: Callable[[str], str]) -> list[dict[str, Any]]:
        """Return the turns with marks around each answer's words, after `strip` is applied to the words."""
        return [_with_marks(turn, nth, strip) if turn["role"] == ASSISTANT else turn for nth, turn in enumerate(turns)]

    def _within(self, text: str, spans: Sequence[Span]) -> Encoded:
        """Return the tokens of a text, and whether each has a character in one of the spans."""
        ids, offsets = self.tokenizer.offsets(text, special=False)
        return ids, [any(begin < min(end, last) and first < end for first, last in spans) for begin, end in offsets]

    def _ids(self, text: str) -> list[int]:
        """Return the token ids of a rendered text, without special tokens added."""
        return self.tokenizer.ids(text, special=False) if text else []

    def _render(self, turns: Sequence[dict[str, Any]], *, template: str | None = None, prompt: bool = False) -> str:
        """Return the text that the template makes of the turns; "" without turns.

        With `prompt`, the text ends where an assistant's answer would begin. `template` replaces the chat's template.
        """
        if not turns:
            return ""
        turns = [self._form(turn) for turn in turns]
        return self.tokenizer.render(turns, template=template or self.template, prompt=prompt, tools=self.chat.tools)


def _with_marks(turn: dict[str, Any], nth: int, strip: Callable[[str], str]) -> dict[str, Any]:
    """Return answer `nth` with marks around its words; if it has only calls, around the names of its calls."""
    begin, end = chr(_BEGIN + 2 * nth), chr(_END + 2 * nth)
    if turn["content"].strip() or "tool_calls" not in turn:
        return turn | {"content": begin + strip(turn["content"]) + end}
    last = len(turn["tool_calls"]) - 1

    def marked(which: int, function: dict[str, Any]) -> dict[str, Any]:
        """Return a call's function with marks in its name: before the first call's name, and after the last call's."""
        name = function["name"]
        return function | {"name": f"{begin if which == 0 else ''}{name}{end if which == last else ''}"}

    return _with_calls(turn, marked)


def _with_calls(turn: dict[str, Any], change: Callable[[int, dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """Return the turn with `change` applied to the function of each of its calls."""
    if "tool_calls" not in turn:
        return turn
    calls = [call | {"function": change(nth, call["function"])} for nth, call in enumerate(turn["tool_calls"])]
    return turn | {"tool_calls": calls}


def _arguments_as_text(_: int, function: dict[str, Any]) -> dict[str, Any]:
    """Return a call's function with its arguments as JSON text."""
    return function | {"arguments": json.dumps(function.get("arguments", {}), ensure_ascii=False)}


# Forms of a turn that templates accept, tried in this order: the usual one; a call's arguments as text (DeepSeek-V3);
# content as a list of parts (templates of vision models, which drop plain text or fail on it).
_FORMS = (
    lambda turn: turn,
    lambda turn: _with_calls(turn, _arguments_as_text),
    lambda turn: turn | {"content": [{"type": "text", "text": turn["content"]}]},
)


def _beginnings(text: str) -> Iterator[str]:
    """Yield the text and its prefixes, from longest to empty; none ends within a special token or a word."""
    yield text
    for length in range(len(text) - 1, -1, -1):
        within_a_word = length and text[length - 1].isalnum() and text[length].isalnum()
        if not within_a_word and not _OPEN_MARK.search(text[:length]):
            yield text[:length]


def _unmarked(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Return the text without marks, and each mark with its position."""
    # A position counts no marks: subtract the number of marks before it.
    marks = [(ord(match[0]), match.start() - nth) for nth, match in enumerate(_MARK.finditer(text))]
    return _MARK.sub("", text), marks


class Encoder:
    """An encoder of documents by a checkpoint's tokenizer. `vocabulary` is the model's: larger token ids are refused.

    `template` is the chat template: the given one, else the checkpoint's own (None: it has none). `as_text`: control
    tokens in a text are read as ordinary text.
    """

    def __init__(self, folder: Path, *, vocabulary: int, template: str | None = None) -> None:
        """Load the folder's tokenizer without running code of the folder. Raises BadInput where none can be loaded."""
        self.folder = folder
        self.vocabulary = vocabulary
        found, why_not = open_tokenizer(folder)
        if found is None:
            raise BadInput(
                f"{printable(str(folder))}: no tokenizer that can be loaded ({why_not}); texts need one: copy the"
                " model's own tokenizer files here"
            )
        self.tokenizer = found
        self.template = template or found.chat_template
        self.as_text = True

    def of(self, spec: RowsSpec, template: str | None = None) -> Encoder:
        """Return an encoder for a source's documents; `template` renders chats where there is no other template."""
        other = copy.copy(self)
        other.template, other.as_text = self.template or template, spec.as_text
        return other

    @property
    def write(self) -> Callable[[Chat], Encoded] | None:
        """The function that renders chats; it raises BadInput for a refused chat. None without a template."""
        return self._chat if self.template else None

    def check_chat(self) -> None:
        """Raise BadInput where there is no chat template."""
        if not self.template:
            raise BadInput(no_template(self.folder))

    def encode(self, document: Document) -> Encoded:
        """Return token ids, and for each whether the loss counts it. A text ends with the end-of-sequence token.

        A document that is not complete has no end: a cut chat's tokens end with the last message's words. Raises
        BadInput for a token id beyond the embedding's rows, for a chat template that refuses the chat or cannot be
        masked, and where template or tokenizer exceed a limit of time or memory.
        """
        assert not isinstance(document, Labelled), "an ExampleEncoder's"
        if isinstance(document, str | CutText):
            ids, counted = self._text(document)
        else:
            ids, counted = self._chat(document)
        check_ids(ids, self.tokenizer, rows=self.vocabulary)
        return ids, counted

    def _text(self, text: str | CutText) -> Encoded:
        """Return the tokens of a text, all counted, with the end-of-sequence token where the text is complete."""
        if isinstance(text, str):
            ids = self._ended(self.tokenizer.ids(text, as_text=self.as_text))
        else:
            ids = self.tokenizer.ids(text.text, as_text=self.as_text)
            # A tokenizer may itself close a text.
            ids = ids[:-1] if ids[-1:] == [self.tokenizer.eos_token_id] else ids
        return ids, [True] * len(ids)

    def _ended(self, ids: list[int]) -> list[int]:
        """Return ids with the end-of-sequence token at the end, added where it is missing and the tokenizer has one."""
        end = self.tokenizer.eos_token_id
        return [*ids, end] if end is not None and (not ids or ids[-1] != end) else ids

    def _chat(self, chat: Chat) -> Encoded:
        """Return the template's tokens; the loss counts the assistant's words, to the end of the turn.

        Some templates write nothing after the last answer (GLM-4's), which would not teach where to stop. Then the
        end-of-sequence token is appended and counted, as after a text.
        """
        self.check_chat()
        assert self.template is not None
        written = Written(self.tokenizer, self.template, chat)
        found = written.counted()
        if found is not None:
            ids, counted = found
            last = chat.messages[-1]
            before, words, _ = written.text.rpartition(last.content.rstrip())
            if chat.cut and words:
                # The last tokens may be others where the end follows.
                alone = self.tokenizer.ids(before + words, special=False)
                pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids, alone, strict=False))
                same = len(list(pairs))
                return ids[:same], counted[:same]
            if last.answers and last.content.strip() and written.text.rstrip().endswith(last.content.rstrip()):
                ids = self._ended(ids)
            return ids, [*counted, *[True] * (len(ids) - len(counted))]
        shown = printable(str(self.folder))
        if written.has_blocks:
            raise BadInput(
                f"{shown}: its chat template's `{{% generation %}}` blocks are not one for each answer, so that those"
                " which do not count (`weight`, `train`) are not known; leave these chats out"
            )
        raise BadInput(
            f"{shown}: its chat template changes earlier turns once later ones follow, so that the assistant's words"
            " are not found in what it writes; put `{% generation %}` blocks around them"
        )
