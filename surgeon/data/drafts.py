"""How many tokens a forward of the model gives when its MTP layers draft: speculative decoding, greedily.

Torch is imported where work begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from surgeon.data.scores import Ratio, Windows, ratio
from surgeon.errors import BadInput

if TYPE_CHECKING:
    from surgeon.manifest.checkpoint import Checkpoint

# Tokens that a document gives as a prompt, tokens that the model writes then, and documents of a text at most.
PROMPT, WRITTEN, DOCUMENTS = 32, 64, 50


@dataclass(frozen=True)
class Drafts:
    """A model's speculative decoding on one text.

    `tokens_a_forward` counts the model's own forwards, the prompt's included, with an interval over documents; 1: no
    draft was ever right. `same` of the `documents` have the tokens that the model writes without drafts; others differ
    by rounding, as a forward over several tokens sums in another order.
    """

    tokens_a_forward: Ratio
    documents: int
    same: int


def load_mtp(checkpoint: Checkpoint, model: Any) -> Any:
    """Return transformers' MTP layers of a loaded model. Raises BadInput where it has none that transformers reads."""
    from surgeon.models import mtp

    return mtp.load_mtp(checkpoint.folder, model)


def measure_drafts(model: Any, mtp: Any, windows: Windows) -> Drafts:
    """Have a model write on from the beginnings of at most `DOCUMENTS` documents, with its MTP layers' drafts.

    Each is given its first `PROMPT` tokens, at most half of what there is, and goes on by `WRITTEN`. Raises BadInput
    where no document has two tokens.
    """
    from surgeon.data.generation import continued
    from surgeon.models.load import already_read

    firsts: dict[int, list[int]] = {}
    for sequence, units in zip(windows.sequences, windows.units, strict=True):
        # Longest first, so that a document's first window comes before its others.
        if len(sequence.ids) > 1:
            firsts.setdefault(int(units[0]), sequence.ids)
    prompts = [ids[: min(PROMPT, len(ids) // 2)] for _, ids in sorted(firsts.items())[:DOCUMENTS]]
    if not prompts:
        raise BadInput("no document has two tokens, the first of which would be a prompt; give longer texts")
    written, forwards, same = np.zeros(len(prompts)), np.zeros(len(prompts)), 0
    with already_read(mtp), _counted(model) as count:
        for number, prompt in enumerate(prompts):
            (plain,) = continued(model, [prompt], set(), WRITTEN)
            count[0] = 0
            (drafted,) = continued(model, [prompt], set(), WRITTEN, use_mtp=True)
            written[number], forwards[number] = len(drafted.ids), count[0]
            same += drafted.ids == plain.ids
    return Drafts(ratio(written, forwards), len(prompts), same)


@contextlib.contextmanager
def _counted(model: Any) -> Iterator[list[int]]:
    """Yield a list of one number: the forwards of the model inside."""
    count = [0]

    def add(*_: Any) -> None:
        count[0] += 1

    handle = model.register_forward_pre_hook(add)
    try:
        yield count
    finally:
        handle.remove()
