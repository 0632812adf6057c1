"""Comparing two checkpoints layer by layer, in the memory of a layer of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.errors import PromiseBroken
from surgeon.models.compare import (
    NO_ROWS,
    LogitComparison,
    Tally,
    decoded_steps,
    logits_of_both,
    modes_of,
    trim_logits,
)
from surgeon.models.load import attention_of
from surgeon.models.stream import StreamedModel


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
    batch_size: int = 4,
    new: range = NO_ROWS,
    kept: Sequence[int] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[StreamedComparison]:
    """Compare `base` and `out` on `ids` (windows, window), one layer of each in memory at a time.

    The result has one comparison per dtype. `layer_of_base[i]` is the index in `out` of the base's layer i. Where layer
    i was taken out, it is the index of the layer below it (-1: none), whose output must then equal layer i's. Each
    pass of a batch of `batch_size` windows reads the checkpoints once: prefill, cached prefill, and every decoded
    token. Where tokens were taken out, `ids` are positions in `kept`, the base's ids of the tokens that stay
    (`trim_logits`). `progress(done, total)` counts decoder layers run. Memory: a layer's tensors, activations, caches,
    and the logits of a batch of each model. Raises BadInput where the base cannot be built from its shards,
    PromiseBroken where the output cannot, ValueError for an invalid `layer_of_base`.
    """
    steps = decoded_steps(ids, decode_tokens)
    batches = [batch.to(device) for batch in torch.split(ids, batch_size)]
    passes = len(dtypes) * len(batches) * (steps + len(modes_of(steps)))
    done = 0

    def count(_module: Any, _args: Any, _result: Any) -> None:
        """Count one more layer, and report the count."""
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, passes * sum(len(model.layers) for model in models))

    found = []
    for dtype in dtypes:
        models = _both(base, out, dtype, device, new)
        depths = [len(model.layers) for model in models]
        if len(layer_of_base) != depths[0] or not all(-1 <= layer < depths[1] for layer in layer_of_base):
            raise ValueError(f"layer_of_base must give {depths[0]} layers of the output's {depths[1]}")
        if kept is not None:
            trim_logits(models[0].module, models[1].module, kept)
        for layer in (*models[0].layers, *models[1].layers):
            layer.register_forward_hook(count)
        found.append(_compared(models, batches, steps, layer_of_base, new))
    return found


def _both(
    base: CheckpointFolder, out: CheckpointFolder, dtype: str, device: str, new: range
) -> tuple[StreamedModel, StreamedModel]:
    """Build both models without weights, the output in the base's dtype."""
    before = StreamedModel(base, dtype=dtype, device=device)
    config = before.module.config.get_text_config()
    after = StreamedModel(
        out,
        dtype=before.dtype,
        device=device,
        attention=attention_of(before.module),
        failure=PromiseBroken,
        more=max(0, new.stop - config.vocab_size),
    )
    # In a widened residual stream the first part is the base's stream.
    after.digest_width = getattr(config, "hidden_size", None)
    return before, after


def _compared(
    models: tuple[StreamedModel, StreamedModel],
    batches: Sequence[Tensor],
    steps: int,
    layer_of_base: Sequence[int],
    new: range,
) -> StreamedComparison:
    """Compare both models' logits, and the digests of their hidden states, in every mode."""
    base, out = models
    dtype, depth = str(base.dtype).removeprefix("torch."), len(base.layers)
    logits: list[LogitComparison] = []
    apart: list[FirstDifference] = []
    for mode in modes_of(steps):
        tally = Tally(mode, dtype, new)
        for batch_BT in batches:
            with torch.inference_mode():
                for found in logits_of_both(base.module, out.module, batch_BT, mode, steps):
                    tally.add(*found)
                    first = _first_difference(mode, base.take_digests(), out.take_digests(), layer_of_base)
                    apart += [first] if first is not None else []
        logits.append(tally.result())
    apart = apart or [
        FirstDifference(
            mode=mode.mode,
            where="the final norm or the output head",
            base_layer=None,
            out_layer=None,
            suspects=tuple(range(layer_of_base[-1] + 1, len(out.layers))),
        )
        for mode in logits
        if not mode.identical
    ]
    first = min(apart, key=lambda difference: _depth_of(difference, depth), default=None)
    return StreamedComparison(tuple(logits), first, depth)


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
