"""A second base, of another family than the first one and with a tokenizer of its own, trained here in minutes.

    python benchmarks/second_base.py --text FILE … --to DIR [--family gemma2] [--steps 2000]

Builds a small untrained model of the family (post-norms and alternating windows in gemma2, norms of queries and keys
in qwen3; tied embeddings in both), trains a byte-level BPE on the texts, and then the model on them by `surgeon train`
with `what: all`; the last line is the held-out loss before and after. The texts are files that `surgeon train` takes.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import yaml  # noqa: E402

import surgeon  # noqa: E402

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
VOCABULARY = 4096
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "initializer_range": 0.04,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 256, "query_pre_attn_scalar": 32},
    "qwen3": {},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--family", choices=list(FAMILIES), default="gemma2")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=16, help="sequences a step")
    parser.add_argument("--length", type=int, default=128, help="tokens a sequence")
    parser.add_argument("--rate", type=float, default=2e-3)
    asked = parser.parse_args()
    untrained = asked.to.with_name(f"{asked.to.name}-untrained")
    build(asked.family, asked.text, untrained)
    config = asked.to.with_name(f"{asked.to.name}.yaml")
    size = sum(file.stat().st_size for file in asked.text)
    sources = [
        {"name": file.name.replace(".", "_"), "path": str(file.absolute()), "share": file.stat().st_size / size}
        for file in asked.text
    ]
    training = {
        "surgeon_train": 1,
        "what": "all",
        "steps": asked.steps,
        "batch": asked.batch,
        "length": asked.length,
        "dtype": "bfloat16",
        "optimizer": {"lr": asked.rate, "min_lr": asked.rate / 20, "warmup": 0.05, "betas": [0.9, 0.95]},
        "sources": sources,
    }
    config.write_text(yaml.safe_dump(training, sort_keys=False), encoding="utf-8")
    with surgeon.ProgressListener() as listener:
        trained = surgeon.train(untrained, config, asked.to, listener=listener)
    assert trained is not None
    shutil.rmtree(untrained)
    # A base like any other: what it was before it was trained is nobody's teacher.
    for name in ("surgery.json", "README.md"):
        (asked.to / name).unlink()
    print(", ".join(f"{name} {before:.3f} → {after:.3f}" for name, (before, after) in trained.losses.items()))


def build(family: str, texts: list[Path], folder: Path) -> None:
    """An untrained model of the family in bfloat16, with a tokenizer of its own; nothing where it is there already."""
    if folder.exists():
        return
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = tokenizer_of(texts)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **COMMON, **FAMILIES[family], **ids)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="4MB")
    tokenizer.save_pretrained(folder)
    print(f"{family}: {sum(parameter.numel() for parameter in model.parameters()):,} parameters")


def tokenizer_of(texts: list[Path]) -> Any:
    """A byte-level BPE trained on the documents; every document begins with BOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[BOS, EOS, PAD], initial_alphabet=alphabet, show_progress=False
    )
    corpora = [text.documents for text in surgeon.open_texts({f"text-{n}": file for n, file in enumerate(texts)})]
    made.train_from_iterator((str(corpus.read(n)) for corpus in corpora for n in range(len(corpus))), trainer)
    begins = [(BOS, made.token_to_id(BOS))]
    made.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=begins)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token=BOS, eos_token=EOS, pad_token=PAD)


if __name__ == "__main__":
    main()
