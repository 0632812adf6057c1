"""A model's answers to prompts, in three calls: encode the prompts, load the model, generate the answers.

Torch is imported only when work begins, so that bad arguments are refused at once.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surgeon.errors import BadInput, printable

if TYPE_CHECKING:
    from surgeon.data.generation import Prompter
    from surgeon.manifest.checkpoint import Checkpoint


@dataclass(frozen=True)
class Answer:
    """An answer: its text, its token ids (without the one that ends it), and whether the model ended it by itself."""

    text: str
    ids: tuple[int, ...]
    ended: bool

    @property
    def tokens(self) -> int:
        """The number of its tokens."""
        return len(self.ids)

    def to_json(self) -> dict[str, Any]:
        """Return plain data: `text`, `tokens`, and `ended`, whether the model ended it by itself."""
        return {"text": self.text, "tokens": self.tokens, "ended": self.ended}


@dataclass(frozen=True)
class EncodedPrompts:
    """Prompts encoded for a checkpoint: the `ids` of each, the `most` tokens of its answer, and what `ends` it.

    `ends` are token ids. With `chat`, each prompt is a user's turn rendered by the chat template, else a text to
    continue.
    """

    ids: tuple[list[int], ...]
    most: tuple[int, ...]
    chat: bool
    ends: frozenset[int]
    prompter: Prompter

    def answer(self, number: int, ids: Sequence[int], *, ended: bool) -> Answer:
        """Return the answer to a prompt, by its number, from the tokens that a model wrote."""
        words = self.prompter.words
        text = words(ids, ended=ended)
        if not self.chat:
            # Decode prompt and answer together: decoding the answer alone may drop the space before its first word.
            prompt = self.ids[number]
            before, whole = words(prompt, ended=True), words([*prompt, *ids], ended=ended)
            text = whole.removeprefix(before) if whole.startswith(before) else text
        return Answer(text, tuple(ids), ended)


def encode_prompts(
    prompts: Sequence[str],
    checkpoint: Checkpoint,
    *,
    tokens: int = 64,
    chat: bool | None = None,
    before: Sequence[Mapping[str, str]] = (),
    prompter: Prompter | None = None,
) -> EncodedPrompts:
    """Encode prompts by a checkpoint's tokenizer: as a user's turn where it has a chat template, else unchanged.

    An answer may have `tokens` tokens, or fewer where the context has no more room. `chat` decides for a checkpoint
    whether prompts are turns; None: where it has a template. `before` are earlier turns, which each prompt follows;
    `prompter` is the checkpoint's, from an earlier call. Raises BadInput where there is no tokenizer, no template
    though `chat` asks for one, and for a prompt without tokens or without room for an answer.
    """
    from surgeon.data.generation import ANSWER, Prompter
    from surgeon.models.tokens import check_ids

    prompter = prompter or Prompter(checkpoint.folder)
    templated = bool(prompter.tokenizer.chat_template)
    if chat and not templated:
        raise BadInput(
            f"{printable(checkpoint.name)}: has no chat template, by which the first model is asked; copy"
            " chat_template.jinja from there"
        )
    chat = templated if chat is None else chat
    ends = prompter.ends | ((prompter.end_of_turn(ANSWER) if chat else None) or set())
    context = checkpoint.context or sys.maxsize
    ids, most = [], []
    for number, prompt in enumerate(prompts, 1):
        text = "".join(turn["content"] for turn in before) + prompt
        encoded = prompter.answering(prompt, before) if chat else prompter.continuing(text)
        called = f"{printable(checkpoint.name)}: prompt {number} ({printable(prompt, 40)})"
        if not encoded:
            raise BadInput(f"{called} has no tokens; give one with words that its tokenizer knows")
        if len(encoded) >= context:
            raise BadInput(
                f"{called} has {len(encoded)} tokens, and its context of {context} has no room for an answer; shorten"
                " it"
            )
        check_ids(encoded, prompter.tokenizer, rows=checkpoint.vocabulary or sys.maxsize)
        ids.append(encoded)
        most.append(min(tokens, context - len(encoded)))
    return EncodedPrompts(tuple(ids), tuple(most), chat, frozenset(ends), prompter)


def answer(
    model: Any,
    prompts: EncodedPrompts,
    *,
    batch: int = 1,
    advance: Callable[[int], None] = lambda _prompts: None,
    streamer: Any = None,
) -> list[Answer]:
    """Let a loaded model answer each prompt (`encode_prompts`) by greedy decoding; return the answers in order.

    `batch` prompts of similar length are run at a time, the shorter ones padded; with 1, as the default is, no padding
    changes an answer. `advance` receives the number of prompts just completed; with one prompt, `streamer.put` receives
    its tokens, and then the answer's, one by one.
    """
    from surgeon.data.generation import continued

    found: dict[int, Answer] = {}
    order = sorted(range(len(prompts.ids)), key=lambda number: (prompts.most[number], len(prompts.ids[number])))
    for most, group in itertools.groupby(order, key=lambda number: prompts.most[number]):
        alike = list(group)
        for begin in range(0, len(alike), batch):
            numbers = alike[begin : begin + batch]
            turns = continued(model, [prompts.ids[n] for n in numbers], set(prompts.ends), most, streamer=streamer)
            for number, turn in zip(numbers, turns, strict=True):
                found[number] = prompts.answer(number, turn.ids, ended=turn.ended)
            advance(len(numbers))
    return [found[number] for number in range(len(prompts.ids))]
