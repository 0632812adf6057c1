"""Tiny tokenizers of every kind that can grow, and small texts for them, made by `tokenizers` itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ENGLISH = [
    "the cat sat on the mat and looked at the moon",
    "a small boat sails on the sea when the wind is kind",
    "they read the letter again and again before the night",
    "under the table the cat dreams of the sea and of fish",
]
FRENCH = [
    "le chat était assis sur la terrasse et regardait la lumière",
    "la lumière était légère, la terrasse était déserte",
    "après l'été la lumière légère regardait la terrasse déserte",
    "l'été était léger et le chat était déjà sur la terrasse",
]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
TEMPLATE = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"


def write_text(path: Path, documents: list[str], *, times: int = 1) -> Path:
    """JSON lines."""
    path.write_text("".join(json.dumps({"text": each}) + "\n" for each in documents * times), encoding="utf-8")
    return path


def byte_level(
    folder: Path, *, size: int = 300, above: tuple[str, ...] = (), texts: Sequence[str] = ENGLISH * 3, **options: Any
) -> Path:
    """Byte-level BPE of `size` tokens, special ones among them; those of `above` stand behind it, as in Llama 3."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE(**options))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    return _saved(made, folder, above=above)


def sentencepiece_like(folder: Path, *, size: int = 330, texts: Sequence[str] = ENGLISH * 3) -> Path:
    """BPE of characters with a mark for white space and a fallback on bytes, which nothing cuts into words."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers

    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[*SPECIAL, *byte_tokens], show_progress=False, max_token_length=8
    )
    words = (f"▁{word}" for text in texts for word in text.split())
    # Words one by one: no piece reaches across white space, as SentencePiece has it.
    bare = Tokenizer(made.model)
    bare.train_from_iterator(words, trainer)
    data = json.loads(made.to_str())
    data["model"] = json.loads(bare.to_str())["model"]
    data["added_tokens"] = [entry for entry in json.loads(bare.to_str())["added_tokens"] if entry["content"] in SPECIAL]
    return _saved(Tokenizer.from_str(json.dumps(data)), folder)


def word_piece(folder: Path, *, size: int = 90, texts: Sequence[str] = ENGLISH * 3) -> Path:
    """WordPiece, as BERT's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece()
    letters = sorted(set("".join(ENGLISH + FRENCH)) - {" "})
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=letters, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    return _saved(made, folder)


def unigram(folder: Path) -> Path:
    """Unigram, as SentencePiece's default: characters and a few pieces, by made-up scores."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(set("".join(ENGLISH + FRENCH)) - {" "})
    pieces = [(name, 0.0) for name in SPECIAL] + [("▁", -2.0), ("▁the", -3.0), ("▁la", -4.0), ("er", -3.5)]
    pieces += [(letter, -5.0 - number / 100) for number, letter in enumerate(letters)]
    made = Tokenizer(models.Unigram(pieces, unk_id=3))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    return _saved(made, folder)


def _saved(made: Any, folder: Path, *, above: tuple[str, ...] = ()) -> Path:
    from transformers import PreTrainedTokenizerFast

    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    fast = PreTrainedTokenizerFast(tokenizer_object=made, **names)
    if above:
        fast.add_special_tokens({"additional_special_tokens": list(above)})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder
