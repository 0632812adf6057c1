"""The token ids by which the turns of a user are found in a chat, from what the chat template writes around them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from surgeon.data.chats import ASSISTANT
from surgeon.data.encoding import Encoder
from surgeon.errors import BadInput

# (id of the token before, or −1 for any; id of the token, or −1 for none).
Mark = tuple[int, int]
# Words of a question, an answer and another question, which no template has of its own.
_WORDS = {"zqasked": "user", "zqanswered": ASSISTANT, "zqagain": "user"}


@dataclass(frozen=True)
class Turns:
    """What a chat template writes around the words of a user.

    `before` and `after` are the ids between an answer and the next question, and between that question and its answer.
    `marks` are the token after which a question begins, the token with which it ends, and the token with which an
    answer begins. `controls` are the ids of the template's control tokens, which no words contain.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    marks: tuple[Mark, Mark, Mark]
    controls: frozenset[int]

    @classmethod
    def of(cls, encoder: Encoder) -> Turns | None:
        """Return the turns of an encoder's template; None where there is none, or no control token marks its turns."""
        tokenizer, template = encoder.tokenizer, encoder.template
        if not template:
            return None
        try:
            chat = [{"role": role, "content": words} for words, role in _WORDS.items()]
            rest = tokenizer.render(chat, template=template, prompt=True)
        except BadInput:
            return None
        named = (tokenizer.ids(token, special=False) for token in tokenizer.control_tokens(rest))
        controls = frozenset(ids[0] for ids in named if len(ids) == 1)
        parts: list[list[int]] = []
        for words in _WORDS:
            part, _, rest = rest.partition(words)
            parts.append(tokenizer.ids(part, special=False) if part else [])
        (first, answer, before), after = parts, tokenizer.ids(rest, special=False) if rest else []
        begins = _mark((before, first), (answer, after), controls)
        answers = _mark((after, answer), (before, first), controls)
        ends = next((token for token in after if token in controls), -1)
        if begins is None or answers is None:
            return None
        return cls(tuple(before), tuple(after), (begins, (-1, ends if ends in answer else -1), answers), controls)


def _mark(
    inside: tuple[Sequence[int], Sequence[int]],
    outside: tuple[Sequence[int], Sequence[int]],
    controls: frozenset[int],
) -> Mark | None:
    """Return the last control token that stands in both texts `inside` and in neither `outside`.

    Where each control token stands in both kinds of text, return a control token with a neighbour. None: no pair does.
    """
    for width in (1, 2):
        wanted, other, *not_wanted = (
            [ids[begin : begin + width] for begin in range(len(ids) - width + 1)] for ids in (*inside, *outside)
        )
        unwanted = list(itertools.chain.from_iterable(not_wanted))
        for part in reversed(wanted):
            if part in other and part not in unwanted and not controls.isdisjoint(part):
                return (-1, part[0]) if width == 1 else (part[0], part[1])
    return None
