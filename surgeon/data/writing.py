"""Text that a model writes by sampling.

A document has a number, which determines its prompt and its random numbers. Documents are written in runs of
consecutive numbers (`Writer.write`); the same run gives the same documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.common.schema import BEGIN, TEMPLATE
from surgeon.data.decoding import Asked, Decoder, Making
from surgeon.data.generation import ANSWER, QUESTION, Prompter, Turn
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
    """A model that writes by `settings`; `prompts` are those of a file, or None.

    With a chat template the model answers the prompts, or writes questions too; else it continues them.
    """

    def __init__(self, folder: CheckpointFolder, settings: dict[str, Any], prompts: Sequence[str] | None) -> None:
        """Load the tokenizer. Raises BadInput where the requested prompts cannot be made."""
        self.folder = folder
        self.settings = settings
        shown = printable(str(folder.path))
        self.prompter = Prompter(folder)
        self.tokenizer = self.prompter.tokenizer
        self.asks = list(prompts or [])
        self.chats = settings["prompts"] == TEMPLATE or bool(self.asks and self.tokenizer.chat_template)
        self.begin = self.prompter.begin
        self.ends = self.prompter.ends | ({self.begin} if self.begin is not None and not self.chats else set())
        self.prompts: list[list[int]] = [[]]
        if settings["prompts"] == TEMPLATE:
            self.prompts = [self._before_words()]
            self.ends_of_question = self.ends | self._end_of(QUESTION, "user's")
        elif self.asks:
            encode = self.prompter.answering if self.chats else self.prompter.continuing
            self.prompts = [encode(each) for each in self.asks]
        if self.chats:
            self.ends_of_answer = self.ends | self._end_of(ANSWER, "assistant's")
        if self.begin is not None:
            # A prompt may be empty: a template with no text before the user's words, or a line without tokens.
            self.prompts = [prompt or [self.begin] for prompt in self.prompts]
        if not all(self.prompts):
            whys = {BEGIN: "", TEMPLATE: "its chat template writes nothing before a user's words, and "}
            raise NearlyNothing(
                f"{shown}: {whys.get(settings['prompts'], 'a beginning has no tokens, and ')}it has no begin-of-text"
                " token to start from; give `prompts`, a text file with a beginning a line"
            )
        longest = max(map(len, self.prompts))
        if settings["length"] <= longest:
            raise BadInput(
                f"{shown}: a beginning of {longest} tokens leaves no room in a document of {settings['length']}; use"
                " a larger `length`, or shorter beginnings"
            )

    def load(self, device: str, say: Callable[[str], None]) -> None:
        """Load the model; `write` needs it."""
        settings = self.settings
        model = load_model(self.folder, dtype=settings["dtype"], device=device, say=say)
        self.decoder = Decoder(
            model, rows=settings["batch"], temperature=settings["temperature"], top_p=settings["top_p"]
        )

    def write(self, numbers: range, advance: Callable[[int], None] = lambda _tokens: None) -> Iterator[Written]:
        """Write the documents with these numbers; yield them in order, with the facts by which they are filtered.

        `advance` receives the number of tokens just sampled, also of documents that are not complete.
        """
        seed = self.settings["seed"]
        kind = self._text if not self.chats else self._answer if self.asks else self._chat
        texts = ((kind(self._which(number)), generator(seed, "recall", number)) for number in numbers)
        return self.decoder.write(texts, advance)

    def _which(self, number: int) -> int:
        """Return which prompt document `number` has: every pass through the prompts has another order."""
        turn, place = divmod(number, len(self.prompts))
        return int(generator(self.settings["seed"], "prompts", turn).permutation(len(self.prompts))[place])

    def _text(self, which: int) -> Making[Written]:
        """Write a text from its beginning."""
        prompt = self.prompts[which]
        turn = yield Asked(prompt, self.ends, self.settings["length"] - len(prompt))
        kept = prompt if self.asks else []
        text = self.prompter.words([*kept, *turn.ids], ended=turn.ended)
        empty = not text.strip() or not self.prompter.words(turn.ids, ended=turn.ended).strip()
        return Written({"text": text}, len(turn.ids), turn.ended, loops(turn.ids), empty)

    def _chat(self, which: int) -> Making[Written]:
        """Write a question, and the answer to it; a question that is empty or cut is not answered."""
        prompt, length = self.prompts[which], self.settings["length"]
        asked = yield Asked(prompt, self.ends_of_question, max(1, (length - len(prompt)) // 2))
        question = self.prompter.words(asked.ids, ended=asked.ended).strip()
        if not question or not asked.ended or loops(asked.ids):
            return _chat(question, "", asked, Turn([], False))
        rendered = self.prompter.answering(question)
        answer = yield Asked(rendered, self.ends_of_answer, max(1, length - len(rendered)))
        return _chat(question, self.prompter.words(answer.ids, ended=answer.ended).strip(), asked, answer)

    def _answer(self, which: int) -> Making[Written]:
        """Write the answer to a prompt."""
        prompt = self.prompts[which]
        answer = yield Asked(prompt, self.ends_of_answer, self.settings["length"] - len(prompt))
        said = self.prompter.words(answer.ids, ended=answer.ended).strip()
        return _chat(self.asks[which], said, Turn([], True), answer)

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


def _chat(question: str, answer: str, asked: Turn, answered: Turn) -> Written:
    """Return a chat of a question and its answer, with the facts by which it is filtered."""
    entry = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Written(
        {"messages": entry},
        len(asked.ids) + len(answered.ids),
        answered.ended,
        loops(asked.ids) or loops(answered.ids),
        not (question and answer),
    )
