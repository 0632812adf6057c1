"""What the grown base learns from new text and forgets of old, compared with training all of the base."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from surgeon.common.listener import Listener
from surgeon.data.encoding import Encoder
from surgeon.data.packing import Batches, Mixture, Packer, SourceStream, held_out
from surgeon.data.sources import open_source
from surgeon.demo.base import one_thread, split
from surgeon.models.load import load_model
from surgeon.train.config import LoadedConfig, Settings, load_config, settle
from surgeon.train.optimizer import make_optimizer, make_schedule
from surgeon.train.publishing import Trained
from surgeon.train.train import train
from surgeon.train.trainer import losses_by_source
from surgeon.verify.verify import Verification, verify

KNOWN, NEW = "documentation", "code"
_BATCH, _WINDOW, _RATE = 8, 64, 1e-3
_VALIDATION_SEQUENCES = 64


@dataclass(frozen=True)
class Learning:
    """The results of training the new layers, and of training all of the base on the same sequences at the same rate.

    Losses are held-out, in nats a token, by text (`KNOWN` and `NEW`): `before` of the base, `grown` and `whole` of
    the two after `steps` steps. `numbers` are how many train in each. `verification` compares the grown run with the
    base.
    """

    trained: Trained
    verification: Verification
    steps: int
    tokens: int
    before: dict[str, float]
    grown: dict[str, float]
    whole: dict[str, float]
    numbers: tuple[int, int]
    seconds: tuple[float, float]


def learn(
    base: Path, out: Path, run: Path, *, known: list[str], new: list[str], steps: int, seed: int, listener: Listener
) -> Learning:
    """Train the new layers of `out` on `new` by `surgeon train`, to `run`; train all of `base` too, without saving it.

    `known` are the documents that `base` was made of; only its held-out ones are read, to measure forgetting. Raises
    BadInput, PromiseBroken and WrongSet as `train` and `verify` do.
    """
    config = _write_config(run.parent, known=known, new=new, steps=steps, seed=seed)
    with one_thread():
        trained = train(out, config, run, device="cpu", listener=listener)
        assert trained is not None
        listener.say("training all of the base on the same text for the same number of steps, to compare")
        began = time.monotonic()
        numbers, whole = _train_whole(base, load_config(config), trained.operations, listener)
        seconds = time.monotonic() - began
    return Learning(
        trained=trained,
        verification=verify(base, run, logits=False, listener=listener),
        steps=steps,
        tokens=trained.tokens,
        before={name: losses[0] for name, losses in trained.losses.items()},
        grown={name: losses[1] for name, losses in trained.losses.items()},
        whole=whole,
        numbers=(trained.parameters, numbers),
        seconds=(trained.seconds, seconds),
    )


def _write_config(folder: Path, *, known: list[str], new: list[str], steps: int, seed: int) -> Path:
    """Write texts/ and train.yaml into `folder`, as a user does for `surgeon train`."""
    texts = folder / "texts"
    texts.mkdir()
    to_learn, aside = split(new)
    _json_lines(texts / f"{NEW}.jsonl", to_learn)
    _json_lines(texts / f"{NEW}-held-out.jsonl", aside)
    _json_lines(texts / f"{KNOWN}-held-out.jsonl", split(known)[1])
    path = folder / "train.yaml"
    path.write_text(
        f"""# The known text is not trained on again: its share is 0, and its held-out loss shows what is forgotten.
surgeon_train: 1
steps: {steps}
seed: {seed}
batch: {_BATCH}
length: {_WINDOW}
dtype: float32
optimizer: {{lr: {_RATE}, warmup: 0.05}}
validation_sequences: {_VALIDATION_SEQUENCES}
sources:
  - {{name: {NEW}, path: texts/{NEW}.jsonl, share: 1.0, validation: texts/{NEW}-held-out.jsonl}}
  - name: {KNOWN}
    path: texts/{KNOWN}-held-out.jsonl
    share: 0.0
    role: original
    validation: texts/{KNOWN}-held-out.jsonl
""",
        encoding="utf-8",
    )
    return path


def _json_lines(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def _train_whole(
    base: Path, loaded: LoadedConfig, operations: tuple[str, ...], listener: Listener
) -> tuple[int, dict[str, float]]:
    """Full fine-tuning of `base` by the config: how many numbers train, and the held-out losses at the end."""
    model = load_model(base, dtype="float32")
    settings, _ = settle(loaded, operations, context=model.config.max_position_embeddings, processes=1)
    encoder = Encoder(base, vocabulary=model.config.vocab_size)
    _descend(model, settings, _batches(loaded, settings, encoder), listener)
    validation = {}
    for source in loaded.config.sources:
        documents = open_source(source, loaded).held_out
        assert documents is not None, source.name
        packer = Packer(settings.length, loaded.config.packing, loaded.config.domain_of(source))
        validation[source.name] = held_out(
            documents, range(len(documents)), encoder, packer, most=loaded.config.validation_sequences
        )
    numbers = sum(parameter.numel() for parameter in model.parameters())
    return numbers, losses_by_source(model, validation, micro_batch=settings.micro_batch)


def _batches(loaded: LoadedConfig, settings: Settings, encoder: Encoder) -> Batches:
    """The sequences of `surgeon train`, in its order."""
    config = loaded.config
    streams = []
    for source in config.sources:
        documents = open_source(source, loaded).text
        packer = Packer(settings.length, config.packing, config.domain_of(source))
        every = torch.arange(len(documents)).numpy()
        streams.append(SourceStream(source.name, documents, every, encoder, packer, seed=config.seed))
    mixture = Mixture(streams, [source.share for source in config.sources], seed=config.seed)
    return Batches(mixture, micro_batch=settings.batch, process=0, processes=1, domains=False)


def _descend(model: Any, settings: Settings, batches: Batches, listener: Listener) -> None:
    model.train()
    decayed = {name for name, parameter in model.named_parameters() if parameter.dim() > 1}
    optimizer = make_optimizer(model, settings, decayed=decayed)
    schedule = make_schedule(optimizer, settings)
    listener.begin("training", settings.steps, "steps")
    for _, batch in zip(range(settings.steps), batches, strict=False):
        model(**batch, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        listener.advance(1)
