"""The base that benchmarks of training share: a random Llama, a tokenizer of its words, and texts of them."""

from __future__ import annotations

from pathlib import Path

WORDS = 8192


def make_base(
    folder: Path,
    *,
    width: int,
    inner: int,
    layers: int,
    heads: int,
    groups: int,
    tied: bool,
    documents: int,
    length: int,
    dtype: str = "float32",
) -> None:
    """The model with its tokenizer in `folder`, and beside it `text.txt`: so many documents of so many words.

    `inner` is the width within a feed-forward layer, `groups` the number of key-value heads.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number for number in range(3, WORDS)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    drawn = torch.randint(3, WORDS, (documents, length), generator=torch.Generator().manual_seed(1)).tolist()
    (folder.parent / "text.txt").write_text("\n\n".join(" ".join(f"w{n}" for n in row) for row in drawn))
