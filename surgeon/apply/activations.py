"""What modules of a base put out on a text, in the memory of one layer: the support of `support: activations`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgeon.blueprint.recipes import TextSupport
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.errors import BadInput, printable
from surgeon.families.dissect import dissect_folder
from surgeon.models.load import running
from surgeon.models.stream import StreamedModel
from surgeon.models.tokens import token_batches

# More would save reading the base again, and cost memory for attention.
_WINDOWS_AT_ONCE = 16


def activations(
    base: CheckpointFolder, weights: Iterable[str], support: TextSupport, *, text: Path, device: torch.device
) -> dict[str, Tensor]:
    """For each named weight of a linear module, the module's outputs on the text: (rows, samples), float32, on the CPU.

    The support of `support: activations` (Singh and Jaggi, 2020): two neurons correspond where they fire alike, not
    where their weights lie close. The base runs once, in the memory of one layer (verification's streamed model).

    Samples are the text's first tokens in windows of `support.window`. Raises BadInput for a text that cannot be
    read or gives too few tokens, and for a base without tokenizer.
    """
    windows = -(-support.samples // support.window)
    vocabulary = dissect_folder(base).sizes.vocabulary
    tokens = token_batches(base.path, text=text, window=support.window, windows=windows, vocabulary=vocabulary)
    if tokens.ids.numel() < support.samples:
        raise BadInput(
            f"{printable(str(text))} gives {tokens.ids.numel()} tokens in windows of {support.window}, `samples` asks"
            f" for {support.samples}"
        )
    streamed = StreamedModel(base, dtype="float32", device=str(device))
    named = {stored: name for name, all_of_it in streamed.stored_as.items() for stored in all_of_it}
    kept: dict[str, list[Tensor]] = {weight: [] for weight in weights}
    for weight in kept:
        module = streamed.module.get_submodule(named[weight].removesuffix(".weight"))
        module.register_forward_hook(_keeping(kept[weight]))
    with torch.inference_mode():
        for ids in torch.split(tokens.ids, _WINDOWS_AT_ONCE):
            with running(streamed.module):
                streamed.module(ids.to(device), use_cache=False, logits_to_keep=1)
    return {weight: torch.cat(parts)[: support.samples].T.contiguous() for weight, parts in kept.items()}


def _keeping(parts: list[Tensor]) -> Callable[[Any, Any, Tensor], None]:
    def keep(_module: Any, _arguments: Any, output: Tensor) -> None:
        # Cloned outside of inference mode's views: the caller computes with it.
        parts.append(output.flatten(0, -2).float().cpu().clone())

    return keep
