"""Text that a model writes by sampling, a batch of documents at a time.

A batch depends only on the settings and its number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.common.schema import BEGIN, TEMPLATE
from surgeon.data.generation import ANSWER, QUESTION, Prompter, Turn, continued
from surgeon.data.packing import generator
from surgeon.data.recalled_text import NearlyNothing, Written
from surgeon.errors import BadInput, printable
from surgeon.models.load import load_model

# A text loops where more than this share of its token runs of this length occurred earlier in it.
LOOP_LENGTH, LOOP_SHARE = 8, 0.3


def loops(ids: Sequence[int]) -> bool:
    """Return whether too many runs of tokens repeat earlier ones; texts shorter than two such runs do not loop."""
    count = len(ids) - LOOP_LENGTH + 1
    if count <= LOOP_LENGTH:
        return False
    different = len({tuple(ids[begin : begin + LOOP_LENGTH]) for begin in range(count)})
    return count - different > LOOP_SHARE * count


class Writer:
    """A model that writes by `settings`; `beginnings` is the content of a file of prompts, one per line, or None."""

    model: Any
    device: str

    def __init__(self, folder: CheckpointFolder, settings: dict[str, Any], beginnings: str | None) -> None:
        """Load the tokenizer. Raises BadInput where the requested prompts cannot be made."""
        self.folder = folder
        self.settings = settings
        shown = printable(str(folder.path))
        self.prompter = Prompter(folder)
        self.tokenizer, self.ends = self.prompter.tokenizer, self.prompter.ends
        begin = self.tokenizer.bos_token_id
        if begin is None:
            begin = _first_number(folder.config.get("bos_token_id"))
        self.begin = begin
        self.prompts: list[list[int]] = [[]]
        if settings["prompts"] == TEMPLATE:
            self.prompts = [self._before_words()]
        elif beginnings is not None:
            self.prompts = [self.prompter.continuing(line) for line in beginnings.splitlines() if line.strip()]
        if begin is not None:
            # A prompt may be empty: a template with no text before the user's words, or a line without tokens.
            self.prompts = [prompt or [begin] for prompt in self.prompts]
        if not all(self.prompts):
            whys = {BEGIN: "", TEMPLATE: "its chat template writes nothing before a user's words, and "}
            raise NearlyNothing(
                f"{shown}: {whys.get(settings['prompts'], 'a beginning has no tokens, and ')}it has no begin-of-text"
                " token to start from; give `prompts`, a text file with a beginning a line"
            )
        longest = max(map(len, self.prompts))
        self.room = settings["length"] - longest
        if self.room < 1:
            raise BadInput(
                f"{shown}: a beginning of {longest} tokens leaves no room in a document of {settings['length']}; use"
                " a larger `length`, or shorter beginnings"
            )

    def load(self, device: str, say: Callable[[str], None]) -> None:
        """Load the model; `write` needs it."""
        self.device = device
        self.model = load_model(self.folder, dtype=self.settings["dtype"], device=device, say=say)

    def write(self, number: int) -> list[Written]:
        """Write the documents of batch `number`; return them, with the facts by which they are filtered."""
        drawn = generator(self.settings["seed"], "recall", number)
        chosen = drawn.integers(len(self.prompts), size=self.settings["batch"])
        seeds = drawn.integers(2**63, size=2)
        prompts = [self.prompts[int(which)] for which in chosen]
        if self.settings["prompts"] == TEMPLATE:
            return self._chats(prompts, seeds)
        turns = self._continued(prompts, self.ends, self.room, int(seeds[0]))
        kept = [[] if self.settings["prompts"] == BEGIN else prompt for prompt in prompts]
        return [self._text(prompt, turn) for prompt, turn in zip(kept, turns, strict=True)]

    def _text(self, prompt: list[int], turn: Turn) -> Written:
        """Return a written document: the text of prompt and continuation, with its facts for the filters."""
        text = self.prompter.words([*prompt, *turn.ids], ended=turn.ended)
        empty = not text.strip() or not self.prompter.words(turn.ids, ended=turn.ended).strip()
        return Written({"text": text}, len(turn.ids), turn.ended, loops(turn.ids), empty)

    def _chats(self, prompts: list[list[int]], seeds: Any) -> list[Written]:
        """Write a question to each prompt, and an answer to each question; return the chats.

        An empty question is answered as `?`, and its chat is marked as empty.
        """
        questions = self._continued(
            prompts, self.ends | self._end_of(QUESTION, "user's"), self.room // 2, int(seeds[0])
        )
        texts = [self.prompter.words(turn.ids, ended=turn.ended).strip() for turn in questions]
        rendered = [self.prompter.answering(question or "?") for question in texts]
        room = max(1, self.settings["length"] - max(map(len, rendered)))
        answers = self._continued(rendered, self.ends | self._end_of(ANSWER, "assistant's"), room, int(seeds[1]))
        found = []
        for question, turn, answer in zip(texts, questions, answers, strict=True):
            said = self.prompter.words(answer.ids, ended=answer.ended).strip()
            entry = [{"role": "user", "content": question}, {"role": "assistant", "content": said}]
            found.append(
                Written(
                    {"messages": entry},
                    len(turn.ids) + len(answer.ids),
                    # A question that was cut off does not count as ended.
                    turn.ended and answer.ended,
                    loops(turn.ids) or loops(answer.ids),
                    not (question and said and turn.ended),
                )
            )
        return found

    def _continued(self, prompts: list[list[int]], ends: set[int], most: int, seed: int) -> list[Turn]:
        """Continue each prompt by the settings: at most `most` tokens, or up to one of `ends`."""
        cuda = [torch.device(self.device)] if self.device.startswith("cuda") else []
        with torch.random.fork_rng(devices=cuda):
            torch.manual_seed(seed)
            return continued(
                self.model,
                prompts,
                ends,
                most,
                do_sample=True,
                temperature=self.settings["temperature"],
                top_p=self.settings["top_p"],
                top_k=0,
            )

    def _before_words(self) -> list[int]:
        """Return the tokens that the template writes before a user's words."""
        if not self.tokenizer.chat_template:
            raise NearlyNothing(
                f"{printable(str(self.folder.path))}: its tokenizer has no chat template to begin with; use `prompts:"
                " begin`, or a file with a beginning a line, or add chat_template.jinja"
            )
        around = self.prompter.around_words(QUESTION)
        if around is None:
            raise self._not_as_they_are()
        return self.tokenizer.ids(around[0], special=False)

    def _not_as_they_are(self) -> NearlyNothing:
        """Return the error for a chat template that does not write a user's words unchanged."""
        return NearlyNothing(
            f"{printable(str(self.folder.path))}: its chat template does not write a user's words as they are, so"
            " there is no bare template; use `prompts: begin`, or a file"
        )

    def _end_of(self, turns: list[dict[str, str]], whose: str) -> set[int]:
        """Return the token with which the template ends the words in these turns, as a set.

        The set is empty where an assistant's turn has no such token and the model's own end tokens suffice. Raises
        NearlyNothing where nothing would end the turn, or the template does not write the words unchanged.
        """
        found = self.prompter.end_of_turn(turns)
        if found is None:
            raise self._not_as_they_are()
        if not found and not (whose == "assistant's" and self.ends):
            raise NearlyNothing(
                f"{printable(str(self.folder.path))}: its chat template ends a {whose} turn by no token of its own; use"
                " `prompts: begin`, or a file"
            )
        return found


def _first_number(given: object) -> int | None:
    """Return the value where it is a whole number; else None."""
    return given if isinstance(given, int) and not isinstance(given, bool) else None
