"""A small real base, trained offline on the documentation of Python's standard library."""

from __future__ import annotations

import ast
import math
import sysconfig
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgeon.common.devices import one_thread
from surgeon.common.library import quiet_transformers
from surgeon.common.listener import Listener
from surgeon.errors import BadInput, printable

VOCABULARY = 2048
BOS, EOS, PAD = "<s>", "</s>", "<pad>"

# Measured on one core of a current server; `seconds` times this constant is the number of steps.
STEPS_A_SECOND = 12.0
_BATCH, _WINDOW = 8, 64
_PEAK_RATE, _FINAL_RATE, _WARMUP_STEPS = 3e-3, 6e-5, 20
_WIDTH = 192
_VALIDATION_WINDOWS = 64
_HELD_OUT = 20
_SHARD_SIZE = "2MB"

# Folders without prose, and folders with code that does not belong to the library.
_LEFT_OUT = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)
_SHORTEST = 80
# With less text a model of the demo's size memorises the documents instead of learning the language.
_LEAST_CHARACTERS = 200_000
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_DOCUMENTED = (ast.Module, *_DEFINITIONS)
# Every tenth module: some hundred thousand characters, several times what the demo trains on.
_MODULES_APART = 10


@dataclass(frozen=True)
class DemoBase:
    """The trained base. Losses are next-token cross-entropies in nats, in the stored dtype.

    `validation_loss` is the loss on documents that were not trained on, `validation_loss_before` the loss of the
    untrained weights on these documents.
    """

    folder: Path
    parameters: int
    tokens_trained: int
    validation_loss_before: float
    validation_loss: float
    seconds: float


def make_base(folder: Path, documents: list[str], *, seconds: float, seed: int, listener: Listener) -> DemoBase:
    """Train a small Llama on this Python's documentation, and save it to `folder` as a bf16 checkpoint.

    `documents` come from `documentation()`; `split` decides which are held out. `seconds` is about the training time on
    one ordinary core. It sets the number of steps and is no deadline, so that the same seed gives the same base. The
    folder gets several shards, config, generation config and tokenizer. `listener` receives the finished steps.
    """
    began = time.monotonic()
    tokenizer = _tokenizer(documents)
    trained_on, held_out = split(documents)
    validation, stream = _tokens(tokenizer, held_out), _tokens(tokenizer, trained_on)
    windows = validation[: _VALIDATION_WINDOWS * _WINDOW].view(-1, _WINDOW)
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _untrained(tokenizer)
        before = _loss(model, windows)
        _start_from_neighbours(model, stream)
        steps = max(1, round(seconds * STEPS_A_SECOND))
        listener.begin("training", steps, "steps")
        _train(model, stream, steps=steps, seed=seed, listener=listener)
        model.to(torch.bfloat16).eval()
        after = _loss(model, windows)
    with quiet_transformers():
        model.save_pretrained(folder, max_shard_size=_SHARD_SIZE)
        tokenizer.save_pretrained(folder)
    parameters = sum(value.numel() for value in model.parameters())
    return DemoBase(
        folder=folder,
        parameters=parameters,
        tokens_trained=steps * _BATCH * _WINDOW,
        validation_loss_before=before,
        validation_loss=after,
        seconds=time.monotonic() - began,
    )


def split(documents: list[str]) -> tuple[list[str], list[str]]:
    """Return (documents to train on, held-out documents); every twentieth document is held out."""
    return [text for index, text in enumerate(documents) if index % _HELD_OUT], documents[::_HELD_OUT]


def _tokenizer(documents: list[str]) -> Any:
    """Return a byte-level BPE tokenizer trained on `documents`; it begins every document with BOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(documents, trainer)
    made.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, made.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token=BOS, eos_token=EOS, pad_token=PAD)


def _tokens(tokenizer: Any, documents: list[str]) -> Tensor:
    """Return all documents as one row of token ids, each document between BOS and EOS."""
    rows = tokenizer(documents)["input_ids"]
    return torch.tensor([token for row in rows for token in (*row, tokenizer.eos_token_id)], dtype=torch.long)


def _untrained(tokenizer: Any) -> Any:
    """Return a small Llama with random weights for the tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=_WIDTH,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        # Matrices start at full scale, not at the usual 0.02, because training has two hundred times fewer steps.
        initializer_range=_WIDTH**-0.5,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


@torch.no_grad()
def _start_from_neighbours(model: Any, stream: Tensor) -> None:
    """Initialise the untrained model from the statistics of neighbouring tokens; its blocks add nothing yet.

    Embedding E and head H of width d are the best rank-d factors of log P(next | previous), with each row centred and
    weighted by how often its token occurs. Training then only has to learn what needs context. Validation loss after
    400 steps of a slightly wider model: 3.95 nats from these factors, 4.26 from random factors, 5.1 from the usual
    initialisation.
    """
    vocabulary = model.config.vocab_size
    counts = torch.bincount(stream[:-1] * vocabulary + stream[1:], minlength=vocabulary**2)
    counts_PN = counts.view(vocabulary, vocabulary).float()
    # Smooth with 50 pseudo-counts of the plain frequencies, which dominate the rows of rare tokens.
    plain_N = (counts_PN.sum(0) + 0.5) / (counts_PN.sum() + 0.5 * vocabulary)
    seen_P1 = counts_PN.sum(1, keepdim=True)
    log_PN = ((counts_PN + 50 * plain_N) / (seen_P1 + 50)).log()
    log_PN -= log_PN.mean(1, keepdim=True)
    share_P1 = (seen_P1 + 1) / (seen_P1 + 1).sum()
    left, strengths, right_ND = torch.svd_lowrank(log_PN * share_P1.sqrt(), q=model.config.hidden_size, niter=4)
    embedding_PD = left * strengths / share_P1.sqrt()
    # The final norm removes the lengths of embeddings, so the head is multiplied by the mean length.
    lengths_P1 = embedding_PD.square().mean(1, keepdim=True).sqrt()
    model.model.embed_tokens.weight.copy_(0.5 * embedding_PD / lengths_P1.mean())
    model.lm_head.weight.copy_(right_ND * (lengths_P1 * share_P1).sum())
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()


def _train(model: Any, stream: Tensor, *, steps: int, seed: int, listener: Listener) -> None:
    """Train by AdamW on random windows of `stream`, with linear warm-up, then cosine decay."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=_PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    made = torch.Generator().manual_seed(seed)
    # Each epoch uses every window once, at another offset.
    order: list[int] = []
    model.train()
    for step in range(steps):
        while len(order) < _BATCH:
            offset = int(torch.randint(_WINDOW, (), generator=made))
            starts = torch.arange(offset, len(stream) - _WINDOW, _WINDOW)
            order += starts[torch.randperm(len(starts), generator=made)].tolist()
        batch, order = order[:_BATCH], order[_BATCH:]
        ids_BT = torch.stack([stream[start : start + _WINDOW] for start in batch])
        for group in optimizer.param_groups:
            group["lr"] = _rate(step, steps)
        loss = model(input_ids=ids_BT, labels=ids_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        listener.advance(1)


def _rate(step: int, steps: int) -> float:
    """Return the learning rate at a step: linear warm-up times cosine decay."""
    warmup = min(1.0, (step + 1) / _WARMUP_STEPS)
    return warmup * (_FINAL_RATE + (_PEAK_RATE - _FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * step / steps)))


@torch.inference_mode()
def _loss(model: Any, windows: Tensor) -> float:
    """Return the mean next-token cross-entropy on the windows, in nats."""
    model.eval()
    return float(model(input_ids=windows, labels=windows).loss)


def documentation(library: Path | None = None) -> list[str]:
    """Return the distinct docstrings of a Python library, in the order of its sorted files.

    `library` is the folder of sources; None means this Python's standard library. The chapters of the language
    reference that `help()` shows are included. Sources are parsed, never imported or run. Raises BadInput where there
    is too little text, as in a Python that was installed without sources.
    """
    root = _root(library)
    found: dict[str, None] = {}
    for path in _sources(root):
        chapters = path.relative_to(root).parts == ("pydoc_data", "topics.py")
        found.update(dict.fromkeys(_texts(path, chapters=chapters)))
    if sum(map(len, found)) < _LEAST_CHARACTERS:
        raise BadInput(
            f"{printable(str(root))}: too little documentation text to make a base from"
            " (is this Python installed without its sources?); use a base of your own instead"
        )
    return list(found)


def code(library: Path | None = None) -> list[str]:
    """Return the distinct top-level functions and classes of every tenth module, without comments and docstrings.

    `library` is as in `documentation`; the two results share no text.
    """
    found: dict[str, None] = {}
    for path in _sources(_root(library))[::_MODULES_APART]:
        tree = _parsed(path)
        if tree is None:
            continue
        for node in tree.body:
            if isinstance(node, _DEFINITIONS):
                found[ast.unparse(_Undocumented().visit(node))] = None
    return [text for text in found if len(text) >= _SHORTEST]


class _Undocumented(ast.NodeTransformer):
    """A transformer of syntax trees that removes docstrings."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Remove the docstrings of a definition and of the definitions inside it."""
        super().generic_visit(node)
        if isinstance(node, _DEFINITIONS) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return node


def _root(library: Path | None) -> Path:
    """Return the folder of the library; by default this Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"]) if library is None else library


def _sources(root: Path) -> list[Path]:
    """Return the library's own source files, sorted."""
    found = []
    for path in sorted(root.rglob("*.py")):
        inner = path.relative_to(root)
        if _LEFT_OUT.isdisjoint(inner.parts[:-1]) and not inner.name.startswith("test_"):
            found.append(path)
    return found


def _parsed(path: Path) -> ast.Module | None:
    """Return the syntax tree of a file; None where it cannot be read or parsed."""
    try:
        with warnings.catch_warnings():
            # Hide warnings about old escapes in other people's source from our user.
            warnings.simplefilter("ignore")
            return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        # Some installations have templates and files for other versions among the sources.
        return None


def _texts(path: Path, *, chapters: bool) -> list[str]:
    """Return a file's docstrings, without short ones; with `chapters` its string constants instead."""
    tree = _parsed(path)
    if tree is None:
        return []
    if chapters:
        strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        texts = [value.strip() for value in strings if isinstance(value, str)]
    else:
        nodes = [node for node in ast.walk(tree) if isinstance(node, _DOCUMENTED)]
        texts = [(ast.get_docstring(node) or "").strip() for node in nodes]
    return [text for text in texts if len(text) >= _SHORTEST]
