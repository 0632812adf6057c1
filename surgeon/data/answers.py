"""A model's answers to prompts, in three calls: encode the prompts, load the model, generate the answers.

Torch is imported only when work begins, so that bad arguments are refused at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surgeon.errors import BadInput, printable

if TYPE_CHECKING:
    from surgeon.data.generation import Prompter
    from surgeon.manifest.checkpoint import Checkpoint


@dataclass(frozen=True)
class Answer:
    """An answer: its text, its number of tokens, and whether the model ended it by itself."""

    text: str
    tokens: int
    ended: bool


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


def encode_prompts(prompts: Sequence[str], checkpoint: Checkpoint, *, tokens: int = 64) -> EncodedPrompts:
    """Encode prompts by a checkpoint's tokenizer: as a user's turn where it has a chat template, else unchanged.

    An answer may have `tokens` tokens, or fewer where the context has no more room. Raises BadInput where there is no
    tokenizer, and for a prompt without tokens or without room for an answer.
    """
    from surgeon.data.generation import ANSWER, Prompter
    from surgeon.models.tokens import check_ids

    prompter = Prompter(checkpoint.folder)
    chat = bool(prompter.tokenizer.chat_template)
    ends = prompter.ends | ((prompter.end_of_turn(ANSWER) if chat else None) or set())
    context = checkpoint.context or sys.maxsize
    ids, most = [], []
    for number, prompt in enumerate(prompts, 1):
        encoded = prompter.answering(prompt) if chat else prompter.continuing(prompt)
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
    model: Any, prompts: EncodedPrompts, *, advance: Callable[[int], None] = lambda _prompts: None
) -> list[Answer]:
    """Let a loaded model answer each prompt (`encode_prompts`) by greedy decoding; return the answers in order.

    Prompts are run one by one, so that no padding changes an answer. `advance` receives the number of prompts just
    completed.
    """
    from surgeon.data.generation import continued

    found = []
    for ids, most in zip(prompts.ids, prompts.most, strict=True):
        (turn,) = continued(model, [ids], set(prompts.ends), most)
        words = prompts.prompter.words
        text = words(turn.ids, ended=turn.ended)
        if not prompts.chat:
            # Decode prompt and answer together: decoding the answer alone may drop the space before its first word.
            before, whole = words(ids, ended=True), words([*ids, *turn.ids], ended=turn.ended)
            text = whole.removeprefix(before) if whole.startswith(before) else text
        found.append(Answer(text, len(turn.ids), turn.ended))
        advance(1)
    return found
