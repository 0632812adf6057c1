"""Comparing two checkpoints layer by layer, in the memory of a few matrices, each of which is read once.

All forwards of a batch run side by side (lockstep.py): of both models, in every dtype, with and without a cache. A
decoded token uses, layer by layer, the cache that the token before it filled when it ran just ahead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from surgeon.anatomy.running import cache_argument
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.errors import PromiseBroken
from surgeon.models import lockstep
from surgeon.models.compare import (
    CACHED_DECODE,
    NO_ROWS,
    PREFILL,
    LogitComparison,
    Tally,
    cached,
    decoded,
    decoded_steps,
    decoded_targets,
    next_tokens,
    prefilled,
    takes_dynamic_cache,
    trim_logits,
)
from surgeon.models.load import attention_of, running
from surgeon.models.stored_matrix import multiply
from surgeon.models.stream import StreamedModel

# The most bytes of one model's logits at a time, if there are several windows.
_LOGIT_BYTES = 32 * 1024 * 1024
# Grafts that store more than keys and values in a cache, by their key in config.surgery.
_KEEP_MORE = ("domain_gate", "mixture")

# For each forward its logits, and digests of the hidden states.
_Passes = list[tuple[Tensor, list[bytes]]]
# One function to run for base and one for output, and the function that gets both results.
_TwoForwards = tuple[Sequence[Callable[[], _Passes]], Callable[[_Passes, _Passes], None]]


@dataclass(frozen=True)
class FirstDifference:
    """The place where the two functions begin to differ.

    `base_layer`: the first base layer after which the hidden states differ; None where the input of the first layer
    differs already (the embeddings), or where every layer agrees and only the logits differ. `suspects`: the layers of
    the output that ran since the last point where both agreed.
    """

    mode: str
    where: str
    base_layer: int | None
    out_layer: int | None
    suspects: tuple[int, ...]


@dataclass(frozen=True)
class StreamedComparison:
    """The result of a comparison in one dtype.

    `logits` has one comparison per mode; `first_difference` is None where everything agrees.
    """

    logits: tuple[LogitComparison, ...]
    first_difference: FirstDifference | None
    layers_compared: int

    @property
    def identical(self) -> bool:
        """Whether every compared hidden state and every logit is equal."""
        return self.first_difference is None and all(mode.identical for mode in self.logits)


def compare_streamed(
    base: CheckpointFolder,
    out: CheckpointFolder,
    ids: Tensor,
    *,
    dtypes: Sequence[str] = ("auto",),
    device: str = "cpu",
    layer_of_base: Sequence[int],
    decode_tokens: int = 4,
    batch_size: int = 8,
    new: range = NO_ROWS,
    kept: Sequence[int] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[StreamedComparison]:
    """Compare `base` and `out` on `ids` (windows, window), one block of weights in memory at a time.

    The result has one comparison per dtype. `layer_of_base[i]` is the index in `out` of the base's layer i. Where layer
    i was taken out, it is the index of the layer below it (-1: none), whose output must then equal layer i's. Each
    batch of `batch_size` windows reads both checkpoints once, for all dtypes, prefill, cached prefill and every decoded
    token. Where a cache holds more than keys and values (state spaces, some grafts), it reads them once more for each
    of the `decode_tokens`. The output head is read once for as many windows as there is memory for their logits. Where
    tokens were taken out, `ids` are positions in `kept`, the base's ids of the tokens that stay (`trim_logits`).
    `progress(done, total)` counts decoder layers run. Memory: a block of a matrix of each model, a layer's tensors
    other than matrices of linear modules (experts in one tensor, norms) in every dtype, activations, caches, and the
    logits of a few windows. Raises BadInput where the base cannot be built from its shards, PromiseBroken where the
    output cannot.
    """
    steps = decoded_steps(ids, decode_tokens)
    with lockstep.returned_memory():
        pairs = [_Pair.of(base, out, dtype, device, layer_of_base, new, steps) for dtype in dtypes]
        if kept is not None:
            for before, after in (pair.models for pair in pairs):
                trim_logits(before.module, after.module, kept)
        batches = [batch.to(device) for batch in torch.split(ids, batch_size)]
        if progress is not None:
            _count_layers(pairs, sum(pair.layers_run(batch) for pair in pairs for batch in batches), progress)
        for batch in batches:
            _run([each for pair in pairs for each in pair.forwards(batch)])
        return [pair.result() for pair in pairs]


def _run(pairs: Sequence[_TwoForwards]) -> None:
    """Run all pairs of forwards (base, output) side by side; call each pair's function with its two results."""
    forwards = [
        lockstep.Forward(works[side], side=side, pair=nth) for side in (0, 1) for nth, (works, _) in enumerate(pairs)
    ]
    lockstep.run(forwards, multiply, lambda done: pairs[done[0].pair][1](*(forward.result for forward in done)))


class _Pair:
    """Base and output in one dtype, and the results so far. Raises ValueError for an invalid `layer_of_base`."""

    def __init__(
        self, base: StreamedModel, out: StreamedModel, layer_of_base: Sequence[int], new: range, steps: int
    ) -> None:
        self.models, self._layer_of_base, self._steps = (base, out), layer_of_base, steps
        self._depth = len(base.layers)
        if len(layer_of_base) != self._depth or not all(-1 <= i < len(out.layers) for i in layer_of_base):
            raise ValueError(f"layer_of_base must give {self._depth} layers of the output's {len(out.layers)}")
        dtype = str(base.dtype).removeprefix("torch.")
        modes = (PREFILL, CACHED_DECODE) if steps else (PREFILL,)
        self._tallies = {mode: Tally(mode, dtype, new) for mode in modes}
        self._found: list[FirstDifference] = []

    @classmethod
    def of(
        cls,
        base: CheckpointFolder,
        out: CheckpointFolder,
        dtype: str,
        device: str,
        layer_of_base: Sequence[int],
        new: range,
        steps: int,
    ) -> _Pair:
        """Build both models without weights, the output in the base's dtype."""
        before = StreamedModel(base, dtype=dtype, device=device, by_matrix=True)
        after = StreamedModel(
            out,
            dtype=before.dtype,
            device=device,
            attention=attention_of(before.module),
            failure=PromiseBroken,
            more=max(0, new.stop - before.module.config.get_text_config().vocab_size),
            by_matrix=True,
        )
        # In a widened residual stream the first part is the base's stream.
        after.digest_width = getattr(before.module.config.get_text_config(), "hidden_size", None)
        return cls(before, after, layer_of_base, new, steps)

    def parts(self, ids_BT: Tensor) -> list[Tensor]:
        """Split a batch into groups of windows whose logits fit into memory."""
        base = self.models[0]
        vocabulary = getattr(base.module.config.get_text_config(), "vocab_size", 1)
        row = ids_BT.shape[1] * max(1, vocabulary) * base.dtype.itemsize
        return list(torch.split(ids_BT, max(1, _LOGIT_BYTES // row)))

    def layers_run(self, ids_BT: Tensor) -> int:
        """Return how many decoder layers of both models all forwards of a batch run."""
        forwards = len(self.parts(ids_BT)) + (1 + self._steps if self._steps else 0)
        return forwards * sum(len(model.layers) for model in self.models)

    def forwards(self, ids_BT: Tensor) -> Iterator[_TwoForwards]:
        """Yield ([the base's forward, the output's forward], the function that gets the results of both)."""
        for part in self.parts(ids_BT):
            yield (
                [partial(_each, model, [partial(prefilled, model.module, part)]) for model in self.models],
                partial(self._compare, PREFILL, [next_tokens(part)]),
            )
        if not self._steps:
            return
        targets = list(decoded_targets(ids_BT, self._steps))
        caches = [_caches(model, ids_BT.shape[1] - self._steps, self._steps) for model in self.models]
        if not all(caches):
            yield (
                [partial(_one_by_one, model, ids_BT, self._steps) for model in self.models],
                partial(self._compare, CACHED_DECODE, targets),
            )
            return
        pieces = [ids_BT[:, : -self._steps], *torch.split(ids_BT[:, -self._steps :], 1, dim=1)]
        taken = [cache_argument(model.module) for model in self.models]
        for nth, piece in enumerate(pieces):
            yield (
                [
                    partial(_each, model, [partial(cached, model.module, piece, {name: of_model[nth]})])
                    for model, name, of_model in zip(self.models, taken, caches, strict=True)
                ],
                partial(self._compare, CACHED_DECODE, targets[nth : nth + 1]),
            )

    def _compare(self, mode: str, targets: list[Tensor], base: _Passes, out: _Passes) -> None:
        """Add both models' results in one mode to its tally; record where their digests first differ."""
        for (base_BTV, before), (out_BTV, after), targets_BT in zip(base, out, targets, strict=True):
            self._tallies[mode].add(base_BTV, out_BTV, targets_BT)
            apart = _first_difference(mode, before, after, self._layer_of_base)
            self._found += [apart] if apart is not None else []

    def result(self) -> StreamedComparison:
        """Return the comparison, once everything was compared."""
        logits = tuple(tally.result() for tally in self._tallies.values())
        found = self._found or [
            FirstDifference(
                mode=mode.mode,
                where="the final norm or the output head",
                base_layer=None,
                out_layer=None,
                suspects=tuple(range(self._layer_of_base[-1] + 1, len(self.models[1].layers))),
            )
            for mode in logits
            if not mode.identical
        ]
        first = min(found, key=lambda apart: _depth_of(apart, self._depth), default=None)
        return StreamedComparison(logits, first, self._depth)


def _each(model: StreamedModel, forwards: Sequence[Callable[[], Tensor]]) -> _Passes:
    """Run each forward through the whole model; return (logits, digests) of each."""
    return [(forward(), model.take_digests()) for forward in forwards]


def _one_by_one(model: StreamedModel, ids_BT: Tensor, steps: int) -> _Passes:
    """Run prefill, then each decoded token, through the whole model; return (logits, digests) of each."""
    return [(logits_B1V, model.take_digests()) for logits_B1V in decoded(model.module, ids_BT, steps)]


def _caches(model: StreamedModel, prefix: int, steps: int) -> list[Any]:
    """Return a cache for the prefix and for each decoded token; empty where caches cannot be passed on by layer."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    class Handed(DynamicCache):  # type: ignore[misc]
        """The cache of one token, as long as all earlier ones.

        When a layer runs, it takes over this layer's content from the cache before.
        """

        def __init__(self, before: Any, seen: int) -> None:
            super().__init__(config=model.module.config)
            filler = torch.zeros(1, 1, seen, 1, device=model.device)
            for layer in self.layers:
                layer.update(filler, filler)
            self._before, self._seen = before, seen
            self._taken: set[int] = set()

        def update(
            self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            """Append keys and values to the layer's content, which the first call takes over from the cache before."""
            keys: Tensor
            values: Tensor
            if layer_idx in self._taken:
                keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
                return keys, values
            before = self._before.layers[layer_idx]
            assert before.get_seq_length() == self._seen, "the token before has not run this layer"
            self._taken.add(layer_idx)
            self.layers[layer_idx] = copy.copy(before)
            keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            # Earlier caches become views, so that numbers are in memory once. A full sliding window has dropped the
            # first positions of earlier caches, so only the last one can be a view.
            whole = keys.shape[-2] == self._seen + key_states.shape[-2]
            cache = self._before
            while cache is not None:
                layer = cache.layers[layer_idx]
                length = layer.keys.shape[-2]
                layer.keys, layer.values = keys[..., :length, :], values[..., :length, :]
                cache = getattr(cache, "_before", None) if whole else None
            return keys, values

    surgery = model.folder.config.get("surgery") if model.folder.classes == "shipped" else None
    if model.folder.classes == "own" or (isinstance(surgery, Mapping) and any(map(surgery.get, _KEEP_MORE))):
        return []
    if not takes_dynamic_cache(model.module):
        return []
    with running(model.module):
        found: list[Any] = [DynamicCache(config=model.module.config)]
        if not found[0].layers or {type(layer) for layer in found[0].layers} - {
            DynamicLayer,
            DynamicSlidingWindowLayer,
        }:
            return []
        for step in range(steps):
            found.append(Handed(found[-1], prefix + step))
    return found


def _depth_of(apart: FirstDifference, depth: int) -> int:
    """Return the base layer of a difference, for sorting: −1 for the embeddings, `depth` for only the logits."""
    if apart.base_layer is not None:
        return apart.base_layer
    return -1 if apart.where == "the embeddings" else depth


def _first_difference(
    mode: str, base: Sequence[bytes], out: Sequence[bytes], layer_of_base: Sequence[int]
) -> FirstDifference | None:
    """Return where the digests of base and output first differ; None where they agree.

    Digests are those of the first layer's input, then of each layer's output, in order.
    """
    if base[0] != out[0]:
        return FirstDifference(mode=mode, where="the embeddings", base_layer=None, out_layer=None, suspects=())
    agreed = -1
    for layer, image in enumerate(layer_of_base):
        if base[1 + layer] != out[1 + image]:
            return FirstDifference(
                mode=mode,
                where=f"layer {layer} of the base (layer {image} of the output)",
                base_layer=layer,
                out_layer=image,
                suspects=tuple(range(agreed + 1, image + 1)),
            )
        agreed = image
    return None


def _count_layers(pairs: Sequence[_Pair], total: int, progress: Callable[[int, int], None]) -> None:
    """Have every decoder layer of all models report to `progress(done, total)` when it has run."""
    done = 0

    def count(_module: Any, _args: Any, _result: Any) -> None:
        """Count one more layer, and report the count."""
        nonlocal done
        done += 1
        progress(done, total)

    for pair in pairs:
        for model in pair.models:
            for layer in model.layers:
                layer.register_forward_hook(count)
