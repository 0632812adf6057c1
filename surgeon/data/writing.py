"""Text that a model writes, a batch of documents at a time, by transformers' `generate` with a cache.

A batch depends on the settings, its number and nothing else.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.common.schema import BEGIN, TEMPLATE
from surgeon.data.packing import generator
from surgeon.errors import BadInput, printable
from surgeon.models.load import load_model, running
from surgeon.models.tokenizer import open_tokenizer

# Text loops where more than this share of its runs of tokens of this length stood in it before.
LOOP_LENGTH, LOOP_SHARE = 8, 0.3
# What stands for a user's words in a template, to find what is before and behind them.
_WORDS = "\uf8e0words\uf8e0"
_SETTINGS = "generation_config.json"


@dataclass(frozen=True)
class Written:
    """One document as a line of JSON holds it; `tokens` that the model wrote, whether it `ended` by itself."""

    entry: dict[str, Any]
    tokens: int
    ended: bool
    loops: bool
    empty: bool


@dataclass(frozen=True)
class _Turn:
    """Tokens that were written, without the one that ends them, and whether that came."""

    ids: list[int]
    ended: bool


def loops(ids: Sequence[int]) -> bool:
    """Whether too many runs of tokens stood in the text before; texts shorter than two such runs do not loop."""
    count = len(ids) - LOOP_LENGTH + 1
    if count <= LOOP_LENGTH:
        return False
    different = len({tuple(ids[begin : begin + LOOP_LENGTH]) for begin in range(count)})
    return count - different > LOOP_SHARE * count


class Writer:
    """A model that writes by `settings`; `beginnings` are lines of a file of prompts, or None."""

    model: Any
    device: str

    def __init__(self, folder: CheckpointFolder, settings: dict[str, Any], beginnings: str | None) -> None:
        """Load the tokenizer. Raises BadInput where the prompts asked for cannot be made."""
        self.folder = folder
        self.settings = settings
        shown = printable(str(folder.path))
        tokenizer, why_not = open_tokenizer(folder.path)
        if tokenizer is None:
            raise BadInput(f"{shown}: {why_not}; text needs one: copy the model's own tokenizer files here")
        self.tokenizer = tokenizer
        self.special = set(tokenizer.all_special_ids)
        self.ends = self._ends()
        begin = tokenizer.bos_token_id
        if begin is None:
            begin = _first_number(folder.config.get("bos_token_id"))
        self.begin = begin
        self.prompts: list[list[int]] = []
        match settings["prompts"]:
            case "begin":
                if begin is None:
                    raise BadInput(
                        f"{shown}: it has no begin-of-text token to start from; give `prompts`, a text file with a"
                        " beginning a line"
                    )
                self.prompts = [[begin]]
            case "template":
                self.prompts = [self._before_words()]
            case _:
                assert beginnings is not None
                self.prompts = [tokenizer.ids(line) for line in beginnings.splitlines() if line.strip()]
                # Beginnings that the tokenizer closes are opened again.
                self.prompts = [ids[:-1] if ids[-1] in self.ends else ids for ids in self.prompts]
        longest = max(map(len, self.prompts))
        self.room = settings["length"] - longest
        if self.room < 1:
            raise BadInput(
                f"{shown}: a beginning of {longest} tokens leaves no room in a document of {settings['length']}; use"
                " a larger `length`, or shorter beginnings"
            )

    def load(self, device: str, say: Callable[[str], None]) -> None:
        """Load the model, which `write` needs."""
        self.device = device
        self.model = load_model(self.folder, dtype=self.settings["dtype"], device=device, say=say)

    def write(self, number: int) -> list[Written]:
        """Write the documents of batch `number`."""
        drawn = generator(self.settings["seed"], "recall", number)
        chosen = drawn.integers(len(self.prompts), size=self.settings["batch"])
        seeds = drawn.integers(2**63, size=2)
        prompts = [self.prompts[int(which)] for which in chosen]
        if self.settings["prompts"] == TEMPLATE:
            return self._chats(prompts, seeds)
        turns = self._continued(prompts, self.ends, self.room, int(seeds[0]))
        kept = [[] if self.settings["prompts"] == BEGIN else prompt for prompt in prompts]
        return [self._text(prompt, turn) for prompt, turn in zip(kept, turns, strict=True)]

    def _text(self, prompt: list[int], turn: _Turn) -> Written:
        text = self._words([*prompt, *turn.ids], ended=turn.ended)
        empty = not text.strip() or not self._words(turn.ids, ended=turn.ended).strip()
        return Written({"text": text}, len(turn.ids), turn.ended, loops(turn.ids), empty)

    def _chats(self, prompts: list[list[int]], seeds: Any) -> list[Written]:
        """Write a question to each prompt, and an answer to each question that has words."""
        questions = self._continued(prompts, self._user_ends(), self.room // 2, int(seeds[0]))
        texts = [self._words(turn.ids, ended=turn.ended).strip() for turn in questions]
        rendered = [self._answering(question or "?") for question in texts]
        room = max(1, self.settings["length"] - max(map(len, rendered)))
        answers = self._continued(rendered, self.ends | self._assistant_ends(), room, int(seeds[1]))
        found = []
        for question, turn, answer in zip(texts, questions, answers, strict=True):
            said = self._words(answer.ids, ended=answer.ended).strip()
            entry = [{"role": "user", "content": question}, {"role": "assistant", "content": said}]
            found.append(
                Written(
                    {"messages": entry},
                    len(turn.ids) + len(answer.ids),
                    # A question that was cut off is none.
                    turn.ended and answer.ended,
                    loops(turn.ids) or loops(answer.ids),
                    not (question and said and turn.ended),
                )
            )
        return found

    def _words(self, ids: Sequence[int], *, ended: bool) -> str:
        text = self.tokenizer.decode([token for token in ids if token not in self.special])
        # Cut off, it may end within a character.
        return text if ended else text.rstrip("\ufffd")

    def _continued(self, prompts: list[list[int]], ends: set[int], most: int, seed: int) -> list[_Turn]:
        """Continue each prompt: at most `most` tokens, or up to one of `ends`."""
        from transformers import GenerationConfig

        width = max(map(len, prompts))
        pad = next(iter(sorted(ends)), 0)
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=self.device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=self.device)
        how = GenerationConfig(
            do_sample=True,
            temperature=self.settings["temperature"],
            top_p=self.settings["top_p"],
            top_k=0,
            max_new_tokens=most,
            eos_token_id=sorted(ends) or None,
            pad_token_id=pad,
            use_cache=True,
        )
        cuda = [torch.device(self.device)] if self.device.startswith("cuda") else []
        with torch.random.fork_rng(devices=cuda), torch.no_grad(), running(self.model):
            torch.manual_seed(seed)
            made = self.model.generate(ids, attention_mask=mask, generation_config=how)
        turns = []
        for row in made[:, width:].tolist():
            end = next((place for place, token in enumerate(row) if token in ends), None)
            turns.append(_Turn(row if end is None else row[:end], end is not None))
        return turns

    def _ends(self) -> set[int]:
        """Return the tokens that end a text, by tokenizer, config.json and generation_config.json."""
        found: list[object] = [self.tokenizer.eos_token_id]
        configs = [self.folder.config]
        if _SETTINGS in self.folder.side_files:
            with contextlib.suppress(ValueError, RecursionError):
                configs.append(json.loads(self.folder.read_side_file(_SETTINGS)))
        for config in configs:
            given = config.get("eos_token_id") if isinstance(config, dict) else None
            found += given if isinstance(given, list) else [given]
        return {token for token in found if isinstance(token, int) and not isinstance(token, bool)}

    def _rendered(self, turns: list[dict[str, str]]) -> tuple[str, str]:
        """Return what the template writes before and behind somebody's words."""
        if not self.tokenizer.chat_template:
            raise BadInput(
                f"{printable(str(self.folder.path))}: its tokenizer has no chat template to begin with; use `prompts:"
                " begin`, or a file with a beginning a line, or add chat_template.jinja"
            )
        before, found, behind = self.tokenizer.render(turns).rpartition(_WORDS)
        if not found:
            raise BadInput(
                f"{printable(str(self.folder.path))}: its chat template does not write a user's words as they are, so"
                " there is no bare template; use `prompts: begin`, or a file"
            )
        return before, behind

    def _before_words(self) -> list[int]:
        before, _ = self._rendered([{"role": "user", "content": _WORDS}])
        return self.tokenizer.ids(before, special=False)

    def _user_ends(self) -> set[int]:
        return self.ends | self._end_of([{"role": "user", "content": _WORDS}], "user's")

    def _assistant_ends(self) -> set[int]:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _WORDS}]
        return self._end_of(turns, "assistant's")

    def _end_of(self, turns: list[dict[str, str]], whose: str) -> set[int]:
        """Find the token by which the template ends these words."""
        _, behind = self._rendered(turns)
        ids = [token for token in self.tokenizer.ids(behind.lstrip(), special=False)[:1] if token in self.special]
        if not ids and not (whose == "assistant's" and self.ends):
            raise BadInput(
                f"{printable(str(self.folder.path))}: its chat template ends a {whose} turn by no token of its own; use"
                " `prompts: begin`, or a file"
            )
        return set(ids)

    def _answering(self, question: str) -> list[int]:
        return self.tokenizer.ids(
            self.tokenizer.render([{"role": "user", "content": question}], prompt=True), special=False
        )


def _first_number(given: object) -> int | None:
    return given if isinstance(given, int) and not isinstance(given, bool) else None
