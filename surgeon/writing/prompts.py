"""Router rows from prompts: the mean input of an MLP while the base reads prompts of an expert's own topic.

As in mergekit's `gate_mode: hidden`, the mean over negative prompts is subtracted. The base runs once for all prompts,
in the memory of one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from surgeon.anatomy.dissect import dissect_folder
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.errors import BadInput, printable
from surgeon.grafts.composition import FFN
from surgeon.models.load import running
from surgeon.models.stream import StreamedModel
from surgeon.models.tokenizer import open_tokenizer
from surgeon.models.tokens import check_ids

# The least length of a difference of two means, relative to the longer mean; a shorter one gives no direction.
_LEAST = 1e-4


def read_by_mlps(
    base: CheckpointFolder,
    prompts: Sequence[Sequence[str]],
    against: Sequence[Sequence[str]] = (),
    *,
    device: torch.device,
) -> dict[int, Tensor]:
    """Return, for every layer with an MLP, a row for each list of prompts: its mean input over their tokens, float32.

    Where `against` has a non-empty list for the same expert, the mean over that list's tokens is subtracted. Every
    token counts once, so longer prompts count more. Raises BadInput for a base without tokenizer, prompts without a
    token, and lists whose means are nearly equal.
    """
    negative = [number for number, listed in enumerate(against) if listed]
    means = _means(base, [*prompts, *(against[number] for number in negative)], len(prompts), device=device)
    found = {layer: rows[: len(prompts)].clone() for layer, rows in means.items()}
    for layer, rows in found.items():
        whole = means[layer]
        for nth, number in enumerate(negative, len(prompts)):
            rows[number] -= whole[nth]
            if float(rows[number].norm()) <= _LEAST * float(torch.maximum(whole[number].norm(), whole[nth].norm())):
                raise BadInput(
                    f"`router`: layer {layer} reads the same of the prompts and the negative prompts of expert"
                    f" {number}, so its row would be zero; give others"
                )
    return found


def _means(
    base: CheckpointFolder, prompts: Sequence[Sequence[str]], experts: int, *, device: torch.device
) -> dict[int, Tensor]:
    """Return, for every layer with an MLP, its mean input for each list.

    Lists from number `experts` on are negative ones. Raises BadInput for a base without tokenizer, and for a prompt
    without a token.
    """
    tokenizer, why_not = open_tokenizer(base.path)
    if tokenizer is None:
        raise BadInput(f"{printable(str(base.path))}: {why_not}, and routers are made of prompts; add its files")
    texts = [(number, tokenizer.ids(text, special=True)) for number, listed in enumerate(prompts) for text in listed]
    empty = next((number for number, ids in texts if not ids), None)
    if empty is not None:
        whose = f"the prompts of expert {empty}" if empty < experts else "the negative prompts"
        raise BadInput(f"`router`: {whose} have one without a token; write at least a word")
    anatomy = dissect_folder(base)
    check_ids([token for _, ids in texts for token in ids], tokenizer, rows=anatomy.sizes.vocabulary)
    length = max(len(ids) for _, ids in texts)
    # Padding is on the right, where causal attention cannot see it.
    padded = torch.zeros(len(texts), length, dtype=torch.long)
    owner = torch.full((len(texts), length), -1)
    for nth, (number, ids) in enumerate(texts):
        padded[nth, : len(ids)] = torch.tensor(ids)
        owner[nth, : len(ids)] = number
    streamed = StreamedModel(base, dtype="float32", device=str(device))
    found: dict[int, Tensor] = {}
    for index, layer in enumerate(streamed.layers):
        if (block := anatomy.blocks(index).get(FFN)) is not None:
            layer.get_submodule(block.split()[0]).register_forward_pre_hook(_keeping(found, index, owner, len(prompts)))
    with torch.inference_mode(), running(streamed.module):
        streamed.module(padded.to(device), use_cache=False, logits_to_keep=1)
    return found


def _keeping(found: dict[int, Tensor], index: int, owner: Tensor, count: int) -> Callable[[Any, tuple[Any, ...]], None]:
    """Return a forward pre-hook that stores in `found[index]` the mean input of an MLP for each of `count` lists.

    `owner` gives the list of each token, (texts, tokens); -1 for padding.
    """

    def keep(_module: Any, arguments: tuple[Any, ...]) -> None:
        """Store the means of one call's input."""
        # Some FFNs read one row a token.
        read = arguments[0].float().cpu().view(*owner.shape, -1)
        # Cloned to leave inference mode's tensors: the caller computes with it.
        found[index] = torch.stack([read[owner == number].mean(0) for number in range(count)]).clone()

    return keep
