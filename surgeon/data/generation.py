"""Text that a model generates: prompts as tokens, the tokens that end it, and transformers' `generate` with a cache.

Only what is given here decides how tokens are chosen and when it ends: a checkpoint's own generation settings, which
may sample, search or go on for long, are left out, but for the tokens that end a text.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from surgeon.anatomy.limits import vocabulary_of
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.strict_json import json_object
from surgeon.errors import BadInput, printable
from surgeon.models.load import running
from surgeon.models.tokenizer import open_tokenizer

# What stands for somebody's words in a template, to find what is before and behind them; a user's, an assistant's.
_WORDS = "\uf8e0words\uf8e0"
QUESTION = [{"role": "user", "content": _WORDS}]
ANSWER = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _WORDS}]
_SETTINGS = "generation_config.json"


@dataclass(frozen=True)
class Turn:
    """Tokens that were written, without the one that ends them, and whether that came."""

    ids: list[int]
    ended: bool


class Prompter:
    """The tokenizer and chat template of a checkpoint, as generation needs them.

    `ends` are the model's tokens that end a text, by tokenizer, config.json and generation_config.json.
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

    def continuing(self, beginning: str) -> list[int]:
        """Return the tokens of a text to go on with: the token by which a tokenizer closes a text is left out."""
        ids = self.tokenizer.ids(beginning)
        return ids[:-1] if ids and ids[-1] in self.ends else ids

    def answering(self, question: str) -> list[int]:
        """Return the tokens of a user's turn, up to where the answer begins."""
        written = self.tokenizer.render([{"role": "user", "content": question}], prompt=True)
        return self.tokenizer.ids(written, special=False)

    def words(self, ids: Sequence[int], *, ended: bool) -> str:
        """Return the text of tokens, special ones left out."""
        text = self.tokenizer.decode([token for token in ids if token not in self.special])
        # Cut off, it may end within a character.
        return text if ended else text.rstrip("\ufffd")

    def around_words(self, turns: list[dict[str, str]]) -> tuple[str, str] | None:
        """Return what the template writes before and behind the words in `QUESTION` or `ANSWER`.

        None where it does not write them as they are.
        """
        before, found, behind = self.tokenizer.render(turns).rpartition(_WORDS)
        return (before, behind) if found else None

    def end_of_turn(self, turns: list[dict[str, str]]) -> set[int] | None:
        """Return the special token by which the template ends those words; an empty set where there is none.

        None where it does not write them as they are.
        """
        around = self.around_words(turns)
        if around is None:
            return None
        return {token for token in self.tokenizer.ids(around[1].lstrip(), special=False)[:1] if token in self.special}

    def _ends(self) -> set[int]:
        found: list[object] = [self.tokenizer.eos_token_id]
        configs = [self.folder.config]
        if _SETTINGS in self.folder.side_files:
            configs.append(json_object(self.folder.read_side_file(_SETTINGS)))
        for config in configs:
            given = config.get("eos_token_id")
            found += given if isinstance(given, list) else [given]
        # No other id can be generated, or stand for padding: -1 means none.
        rows = vocabulary_of(self.folder.config) or sys.maxsize
        return {token for token in found if type(token) is int and 0 <= token < rows}


def continued(model: Any, prompts: Sequence[Sequence[int]], ends: set[int], most: int, **how: Any) -> list[Turn]:
    """Continue each prompt by at most `most` tokens, or up to one of `ends`.

    Args:
        model: A loaded model.
        prompts: Token ids, padded to one batch.
        ends: Tokens that end what is written.
        most: The most tokens that are written.
        how: Fields of transformers' GenerationConfig; without any, the likeliest token is taken each time.

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
    # transformers fills what is not set here with the model's own settings, which config.json may have.
    model.generation_config = config
    with torch.no_grad(), running(model):
        made = model.generate(ids, attention_mask=mask, generation_config=config)
    turns = []
    for row in made[:, width:].tolist():
        end = next((place for place, token in enumerate(row) if token in ends), None)
        turns.append(Turn(row if end is None else row[:end], end is not None))
    return turns
