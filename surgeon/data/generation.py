"""Text generation: prompts as tokens, the tokens that end a text, and transformers' `generate` with a cache.

Only the arguments here decide how tokens are chosen and when generation ends. A checkpoint's own generation settings,
which may sample, search or continue for long, are ignored, except for the tokens that end a text.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from surgeon.anatomy.limits import vocabulary_of
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.strict_json import json_object
from surgeon.errors import BadInput, printable
from surgeon.models.load import running
from surgeon.models.tokenizer import open_tokenizer

# A placeholder for a speaker's words, to find the template's text before and after them: a user's, an assistant's.
_WORDS = "\uf8e0words\uf8e0"
QUESTION = [{"role": "user", "content": _WORDS}]
ANSWER = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _WORDS}]
_SETTINGS = "generation_config.json"


@dataclass(frozen=True)
class Turn:
    """Generated tokens, without the token that ends them, and whether that token came."""

    ids: list[int]
    ended: bool


class Prompter:
    """A checkpoint's tokenizer and chat template, as generation needs them.

    `ends` are the token ids that end a text, by tokenizer, config.json and generation_config.json.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        """Load the tokenizer. Raises BadInput where there is none."""
        self.folder = folder
        tokenizer, why_not = open_tokenizer(folder.path)
        if tokenizer is None:
            shown = printable(str(folder.path))
            raise BadInput(f"{shown}: {why_not}; text needs one: copy the model's own tokenizer files here")
        self.tokenizer = tokenizer
        self.special = set(tokenizer.all_special_ids)
        self.ends = self._ends()

    @property
    def begin(self) -> int | None:
        """The token with which a plain text begins; None where the tokenizer and the config have none.

        It is the begin-of-text token, or where there is none, or it opens the turns of a chat (SmolLM2's), a token that
        ends texts and no turns.
        """
        begin, end = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if begin is None:
            given = self.folder.config.get("bos_token_id")
            begin = given if type(given) is int else None
        chat = self._chat()
        if begin is not None and chat.count(begin) <= 1:
            return begin
        named = [token for token in sorted(self.special) if _ends_texts(self.tokenizer.decode([token]))]
        return next((token for token in [end, *named] if token is not None and token not in chat), begin)

    def _chat(self) -> list[int]:
        """Return the tokens of a question and an answer; none without a template, or where it refuses them."""
        if not self.tokenizer.chat_template:
            return []
        try:
            return self.tokenizer.ids(self.tokenizer.render(ANSWER), special=False)
        except BadInput:
            return []

    def continuing(self, beginning: str) -> list[int]:
        """Return the tokens of a text to continue, without the token with which a tokenizer closes a text."""
        ids = self.tokenizer.ids(beginning)
        return ids[:-1] if ids and ids[-1] in self.ends else ids

    def answering(self, question: str, before: Sequence[Mapping[str, str]] = ()) -> list[int]:
        """Return the tokens of a user's turn, after the turns `before`, up to where the answer begins."""
        written = self.tokenizer.render([*before, {"role": "user", "content": question}], prompt=True)
        return self.tokenizer.ids(written, special=False)

    def words(self, ids: Sequence[int], *, ended: bool) -> str:
        """Return the text of tokens, without special tokens."""
        text = self.tokenizer.decode([token for token in ids if token not in self.special])
        # A text that was cut off may end within a character.
        return text if ended else text.rstrip("\ufffd")

    def around_words(self, turns: list[dict[str, str]]) -> tuple[str, str] | None:
        """Return the template's text before and after the words in `QUESTION` or `ANSWER`.

        None where the template does not write the words unchanged.
        """
        before, found, behind = self.tokenizer.render(turns).rpartition(_WORDS)
        return (before, behind) if found else None

    def end_of_turn(self, turns: list[dict[str, str]]) -> set[int] | None:
        """Return the special token with which the template ends the words, as a set; an empty set where there is none.

        None where the template does not write the words unchanged.
        """
        around = self.around_words(turns)
        if around is None:
            return None
        return {token for token in self.tokenizer.ids(around[1].lstrip(), special=False)[:1] if token in self.special}

    def _ends(self) -> set[int]:
        """Return the token ids that end a text, by tokenizer and both configs; ids that are no rows are ignored."""
        found: list[object] = [self.tokenizer.eos_token_id]
        configs = [self.folder.config]
        if _SETTINGS in self.folder.side_files:
            configs.append(json_object(self.folder.read_side_file(_SETTINGS)))
        for config in configs:
            given = config.get("eos_token_id")
            found += given if isinstance(given, list) else [given]
        # Other ids can be neither generated nor used as padding; -1 means none.
        rows = vocabulary_of(self.folder.config) or sys.maxsize
        return {token for token in found if type(token) is int and 0 <= token < rows}


def _ends_texts(name: str) -> bool:
    """Return whether a special token is named as one that ends texts: `<|endoftext|>`, `<|end_of_text|>`, `<eos>`."""
    return "".join(filter(str.isalpha, name)).casefold() in ("endoftext", "eos")


def continued(
    model: Any, prompts: Sequence[Sequence[int]], ends: set[int], most: int, *, streamer: Any = None, **how: Any
) -> list[Turn]:
    """Continue each prompt by at most `most` tokens, or up to one of `ends`; return the continuations in order.

    The model's own generation settings (`generation_config`) are replaced.

    Args:
        model: A loaded model.
        prompts: Token ids, which are padded to one batch.
        ends: Token ids that end a generated text.
        most: The most tokens to generate.
        streamer: An object whose `put` receives the tokens as they are generated, the prompt's first; for one prompt.
        how: Fields of transformers' GenerationConfig; without any, decoding is greedy.

    Raises:
        BadInput: The model cannot be run.
    """
    from transformers import GenerationConfig

    width = max(map(len, prompts))
    pad = next(iter(sorted(ends)), 0)
    ids = torch.tensor([[pad] * (width - len(prompt)) + [*prompt] for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    config = GenerationConfig(
        **{"do_sample": False, "num_beams": 1, **how},
        max_new_tokens=most,
        eos_token_id=sorted(ends) or None,
        pad_token_id=pad,
        use_cache=True,
    )
    # Else transformers would fill unset fields from the model's own settings, which config.json may contain.
    model.generation_config = config
    with torch.no_grad(), running(model):
        made = model.generate(ids, attention_mask=mask, generation_config=config, streamer=streamer)
    turns = []
    for row in made[:, width:].tolist():
        end = next((place for place, token in enumerate(row) if token in ends), None)
        turns.append(Turn(row if end is None else row[:end], end is not None))
    return turns
