"""A tokenizer of the tiny models' 128 tokens, and small texts to train them on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from surgeon.data.documents import Documents
from surgeon.data.rows import Rows
from surgeon.data.specs import RowsSpec

WORDS = [f"w{n}" for n in range(100)]
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def add_tokenizer(folder: Path, *, template: str | None = None) -> Path:
    """Words w0 … w99 are tokens 10 … 109; beginning 1, end 2, unknown 3."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "<user>": 4, "<assistant>": 5, "<system>": 6}
    vocabulary |= {word: 10 + n for n, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


def text(words: int, seed: int, *, first: int = 0, count: int = 100) -> str:
    """Random words, each followed most often by its neighbour, so that there is something to learn."""
    drawn = random.Random(seed)
    numbers = [drawn.randrange(count)]
    while len(numbers) < words:
        numbers.append((numbers[-1] + 1) % count if drawn.random() < 0.9 else drawn.randrange(count))
    return " ".join(WORDS[first + number] for number in numbers)


def opened_texts(path: Path, **spec: Any) -> Documents:
    """The documents of a file or folder, read as a source's keys say."""
    return Documents(path, Rows(RowsSpec(**spec)))


def json_lines(path: Path, texts: list[str], *, key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: each}) + "\n" for each in texts), encoding="utf-8")
    return path


def corpus(path: Path, *, documents: int = 60, seed: int = 0, first: int = 0, count: int = 100) -> Path:
    """A file of documents of 5 to 40 words."""
    drawn = random.Random(seed)
    texts = [text(drawn.randrange(5, 40), seed * 1000 + n, first=first, count=count) for n in range(documents)]
    return json_lines(path, texts)
