"""Sampling of many texts by one model: where a text ends, the next one takes its row, so none waits for the longest.

Shapes: B rows, T tokens in the cache, V vocabulary.

A row's keys and values stand at the right end of the cache, so rows of different lengths are masked at the left. This
needs a cache of nothing but keys and values. Models with other caches (sliding windows, states, what grafts keep) write
as many texts as there are rows, and then the next ones, by transformers' `generate`.

Each text has its own random numbers. But low bits of a row's logits may depend on the other rows, so the same text
comes again only for the same texts in the same order.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import DynamicCache, DynamicLayer

from surgeon.anatomy.running import cache_argument
from surgeon.data.generation import Turn, continued
from surgeon.models.load import running
from surgeon.runtime.graft import cache_in

_T = TypeVar("_T")
# The likeliest tokens among which the nucleus is looked for first; a whole vocabulary is slow to sort.
_LIKELIEST = 256
# New texts are begun where at least this part of the rows is free: each beginning is a forward of its own.
_FREE = 1 / 8


@dataclass(frozen=True)
class Asked:
    """Tokens to continue, the token ids that end the continuation, and the most tokens that it has."""

    prompt: Sequence[int]
    ends: set[int]
    most: int


# A text in the making: it asks for continuations one after the other, receives each, and returns what it became.
Making = Generator[Asked, Turn, _T]


@dataclass(eq=False)
class _Row(Generic[_T]):
    """A text that is being written: its number, what it asks for, and the tokens so far, of which the last did not run.

    `length` is the number of its tokens in the cache.
    """

    number: int
    making: Making[_T]
    drawn: np.random.Generator
    asked: Asked
    length: int = 0
    ids: list[int] = field(default_factory=list)


class Decoder:
    """A loaded model that samples `rows` texts at a time."""

    def __init__(self, model: Any, *, rows: int, temperature: float, top_p: float) -> None:
        """Store the settings. Raises BadInput where the model cannot be run."""
        self.model = model
        self.rows = rows
        self.temperature = temperature
        self.top_p = top_p
        takes = inspect.signature(type(model).forward).parameters.keys()
        self.refills = {"attention_mask", "position_ids"} <= takes and _caches_tokens_alone(model)

    def write(
        self, texts: Iterable[tuple[Making[_T], np.random.Generator]], advance: Callable[[int], None]
    ) -> Iterator[_T]:
        """Write texts and yield them in their order; `advance` receives the number of tokens just sampled.

        Args:
            texts: the texts, each with its random numbers.
            advance: is called often, before the first text is complete.

        Raises:
            BadInput: the model cannot be run, or its logits are not numbers.
        """
        found: dict[int, _T] = {}
        done = 0
        for number, text in (self._refilled if self.refills else self._in_waves)(texts, advance):
            found[number] = text
            while done in found:
                yield found.pop(done)
                done += 1

    def _refilled(
        self, texts: Iterable[tuple[Making[_T], np.random.Generator]], advance: Callable[[int], None]
    ) -> Iterator[tuple[int, _T]]:
        """Yield (number, text) as texts end, each row being filled again."""
        coming = (_Row(number, making, drawn, next(making)) for number, (making, drawn) in enumerate(texts))
        rows: list[_Row[_T]] = []
        again: list[_Row[_T]] = []
        cache: DynamicCache | None = None
        while True:
            new: list[_Row[_T]] = []
            if not rows or self.rows - len(rows) >= max(1, _FREE * self.rows):
                # Texts that ask again come before those that were not begun.
                new = [*again, *itertools.islice(coming, self.rows - len(rows) - len(again))]
                again = []
            if not rows and not new:
                return
            with torch.no_grad(), running(self.model):
                logits = [] if cache is None else [self._step(rows, cache)]
                if new:
                    begun, first = self._begin(new)
                    cache = begun if cache is None else _joined(cache, begun)
                    logits.append(first)
                rows += new
                tokens = self._draw(torch.cat(logits), [row.drawn.random() for row in rows])
            advance(len(rows))
            going, left = [], []
            for place, (row, token) in enumerate(zip(rows, tokens, strict=True)):
                ended = token in row.asked.ends
                if not ended:
                    row.ids.append(token)
                if not ended and len(row.ids) < row.asked.most:
                    going.append(row)
                    left.append(place)
                    continue
                try:
                    row.asked, row.ids = row.making.send(Turn(row.ids, ended)), []
                    again.append(row)
                except StopIteration as end:
                    yield row.number, end.value
            if len(going) < len(rows):
                rows = going
                cache = _kept(cache, left, max(row.length for row in rows)) if rows else None

    def _step(self, rows: Sequence[_Row[_T]], cache: DynamicCache) -> Tensor:
        """Run each row's last token; return the logits of the next one, B V."""
        device = self.model.device
        lengths = torch.tensor([row.length for row in rows], device=device)[:, None]
        width = int(lengths.max()) + 1
        mask = torch.arange(width, device=device) >= width - 1 - lengths
        ids = torch.tensor([[row.ids[-1]] for row in rows], device=device)
        for row in rows:
            row.length += 1
        output = self.model(
            input_ids=ids,
            attention_mask=mask.long(),
            position_ids=lengths,
            use_cache=True,
            **{cache_argument(self.model): cache},
        )
        found: Tensor = output.logits[:, -1]
        return found

    def _begin(self, rows: Sequence[_Row[_T]]) -> tuple[DynamicCache, Tensor]:
        """Run the prompts of new rows; return their cache, and the logits of the next token, B V."""
        device = self.model.device
        for row in rows:
            row.length = len(row.asked.prompt)
        width = max(row.length for row in rows)
        ids = torch.tensor([[0] * (width - row.length) + [*row.asked.prompt] for row in rows], device=device)
        lengths = torch.tensor([row.length for row in rows], device=device)[:, None]
        places = torch.arange(width, device=device) - (width - lengths)
        output = self.model(
            input_ids=ids, attention_mask=(places >= 0).long(), position_ids=places.clamp(min=0), use_cache=True
        )
        return cache_in(output), output.logits[:, -1]

    def _draw(self, logits: Tensor, numbers: Sequence[float]) -> list[int]:
        """Draw a token for each row of logits (B V), by its number in [0, 1): by inversion within the nucleus."""
        probabilities = torch.softmax(logits.float() / self.temperature, dim=-1)
        if bool(probabilities.isnan().any()):
            raise ValueError("probabilities are `nan`")
        count = min(_LIKELIEST, probabilities.shape[-1])
        while True:
            likeliest, tokens = probabilities.topk(count, dim=-1)
            upto = likeliest.double().cumsum(dim=-1)
            if count == probabilities.shape[-1] or bool((upto[:, -1] >= self.top_p).all()):
                break
            count = min(8 * count, probabilities.shape[-1])
        # The nucleus ends with the first token up to which the share is reached.
        last = (upto < self.top_p).sum(dim=-1, keepdim=True).clamp(max=count - 1)
        wanted = torch.tensor(numbers, dtype=torch.float64, device=upto.device)[:, None] * upto.gather(1, last)
        chosen = torch.searchsorted(upto, wanted, right=True).minimum(last)
        found: list[int] = tokens.gather(1, chosen)[:, 0].tolist()
        return found

    def _in_waves(
        self, texts: Iterable[tuple[Making[_T], np.random.Generator]], advance: Callable[[int], None]
    ) -> Iterator[tuple[int, _T]]:
        """Yield (number, text): as many texts as there are rows, then the next ones."""
        coming = enumerate(texts)
        while wave := list(itertools.islice(coming, self.rows)):
            seed = int(wave[0][1][1].integers(2**63))
            asking = [(number, making, next(making)) for number, (making, _) in wave]
            cuda = [self.model.device] if self.model.device.type == "cuda" else []
            with torch.random.fork_rng(devices=cuda):
                torch.manual_seed(seed)
                while asking:
                    # Texts of one kind ask for the same ends, and for different lengths.
                    turns = continued(
                        self.model,
                        [asked.prompt for _, _, asked in asking],
                        set.union(*(asked.ends for _, _, asked in asking)),
                        max(asked.most for _, _, asked in asking),
                        do_sample=True,
                        temperature=self.temperature,
                        top_p=self.top_p,
                        top_k=0,
                    )
                    advance(sum(len(turn.ids) for turn in turns))
                    still = []
                    for (number, making, asked), turn in zip(asking, turns, strict=True):
                        cut = Turn(turn.ids[: asked.most], turn.ended and len(turn.ids) < asked.most)
                        try:
                            still.append((number, making, making.send(cut)))
                        except StopIteration as end:
                            yield number, end.value
                    asking = still


def _caches_tokens_alone(model: Any) -> bool:
    """Return whether a model caches nothing but keys and values of all tokens."""
    with torch.no_grad(), running(model):
        ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        cache = cache_in(model(input_ids=ids, attention_mask=ids + 1, position_ids=ids, use_cache=True))
    plain = DynamicLayer()
    plain.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))
    layers = getattr(cache, "layers", [])
    # A graft may keep more in an entry, under names of its own.
    return type(cache) is DynamicCache and all(
        type(layer) is DynamicLayer and vars(layer).keys() <= vars(plain).keys() for layer in layers
    )


def _joined(cache: DynamicCache, new: DynamicCache) -> DynamicCache:
    """Append the rows of `new` to a cache, and return it; shorter rows are padded at the left."""
    for layer, other in zip(cache.layers, new.layers, strict=True):
        width = max(layer.keys.shape[-2], other.keys.shape[-2])
        for name in ("keys", "values"):
            both = (getattr(layer, name), getattr(other, name))
            setattr(layer, name, torch.cat([F.pad(each, (0, 0, width - each.shape[-2], 0)) for each in both]))
    return cache


def _kept(cache: DynamicCache | None, rows: Sequence[int], width: int) -> DynamicCache:
    """Keep the rows of a cache with these numbers, and their last `width` tokens; return it."""
    assert cache is not None
    for layer in cache.layers:
        for name in ("keys", "values"):
            every = getattr(layer, name)
            setattr(layer, name, every[list(rows), :, every.shape[-2] - width :])
    return cache
