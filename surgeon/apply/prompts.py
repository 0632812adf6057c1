"""Routers from prompts: the mean of what an MLP reads while the base reads prompts of an expert's own topic.

As mergekit's `gate_mode: hidden` does. The base runs once for all prompts, in the memory of one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.errors import BadInput, printable
from surgeon.families.dissect import dissect
from surgeon.models.load import running
from surgeon.models.stream import StreamedModel
from surgeon.models.tokenizer import open_tokenizer
from surgeon.models.tokens import check_ids

_MLP = "mlp"


def read_by_mlps(base: CheckpointFolder, prompts: Sequence[Sequence[str]], *, device: torch.device) -> list[Tensor]:
    """For every layer a row for each list of prompts: the mean input of its MLP over their tokens, float32.

    A token counts once, so longer prompts count more. Raises BadInput for a base without tokenizer, or prompts without
    a token.
    """
    tokenizer, why_not = open_tokenizer(base.path)
    if tokenizer is None:
        raise BadInput(f"{printable(str(base.path))}: {why_not}, and routers are made of prompts; add its files")
    texts = [(number, tokenizer.ids(text, special=True)) for number, listed in enumerate(prompts) for text in listed]
    empty = next((number for number, ids in texts if not ids), None)
    if empty is not None:
        raise BadInput(f"`router`: the prompts of expert {empty} have one without a token; write at least a word")
    rows = dissect(base.config, base.tensors).sizes.vocabulary
    check_ids([token for _, ids in texts for token in ids], tokenizer, rows=rows)
    length = max(len(ids) for _, ids in texts)
    # Padding stands on the right, where causal attention does not look back from.
    padded = torch.zeros(len(texts), length, dtype=torch.long)
    owner = torch.full((len(texts), length), -1)
    for nth, (number, ids) in enumerate(texts):
        padded[nth, : len(ids)] = torch.tensor(ids)
        owner[nth, : len(ids)] = number
    streamed = StreamedModel(base, dtype="float32", device=str(device))
    found: dict[int, Tensor] = {}
    for index, layer in enumerate(streamed.layers):
        layer.get_submodule(_MLP).register_forward_pre_hook(_keeping(found, index, owner, len(prompts)))
    with torch.inference_mode(), running(streamed.module):
        streamed.module(padded.to(device), use_cache=False, logits_to_keep=1)
    return [found[index] for index in range(len(streamed.layers))]


def _keeping(found: dict[int, Tensor], index: int, owner: Tensor, count: int) -> Callable[[Any, tuple[Any, ...]], None]:
    def keep(_module: Any, arguments: tuple[Any, ...]) -> None:
        read = arguments[0].float().cpu()
        # Cloned outside of inference mode's views: the caller computes with it.
        found[index] = torch.stack([read[owner == number].mean(0) for number in range(count)]).clone()

    return keep
