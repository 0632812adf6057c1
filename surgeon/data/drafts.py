"""How many tokens a forward of the model gives when MTP layers or a head draft: speculative decoding, greedily.

Torch is imported where work begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from surgeon.checkpoint.folder import CheckpointFolder, digests_of
from surgeon.data.scores import Ratio, Windows, ratio
from surgeon.errors import BadInput, printable
from surgeon.manifest.draft_folder import DraftFolder

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


def load_mtp(checkpoint: Checkpoint, model: Any, draft: Path | None = None) -> Any:
    """Return what drafts for a loaded model: transformers' MTP layers of it, or the draft head in the folder `draft`.

    Raises BadInput where it has no MTP layers that transformers reads, and where the head is another model's.
    """
    from surgeon.models import mtp

    if draft is not None:
        return _draft_head(draft, checkpoint.folder, model)
    return mtp.load_mtp(checkpoint.folder, model)


def _draft_head(path: Path, base: CheckpointFolder, model: Any) -> Any:
    """The head in the folder `path`, in the dtype of a loaded `model` of `base`. Raises BadInput as `load_mtp`."""
    import torch

    from surgeon.models.draft_head import DraftHead
    from surgeon.models.load import stored_dtype

    opened = DraftFolder.open(path)
    opened.check_base(base, digests_of(base, base.tensors, lambda _: None))
    head = DraftHead(opened.shape, model)
    with torch.no_grad():
        for name, size in opened.shape.tensors.items():
            value = torch.frombuffer(opened.read(name), dtype=stored_dtype(opened.tensors[name].dtype)).reshape(size)
            if not bool(torch.isfinite(value).all()):
                raise BadInput(f"{printable(str(path))}: {printable(name)} holds NaN or infinity; train the head again")
            head.get_parameter(name).copy_(value)
    return head.eval()


def measure_drafts(model: Any, mtp: Any, windows: Windows) -> Drafts:
    """Have a model write on from the beginnings of at most `DOCUMENTS` documents, with drafts of `mtp` (`load_mtp`).

    Each is given its first `PROMPT` tokens, at most half of what there is, and goes on by `WRITTEN`. Raises BadInput
    where no document has two tokens.
    """
    from surgeon.data.generation import continued
    from surgeon.models.mtp import drafting

    firsts: dict[int, list[int]] = {}
    for sequence, units in zip(windows.sequences, windows.units, strict=True):
        # Longest first, so that a document's first window comes before its others.
        if len(sequence.ids) > 1:
            firsts.setdefault(int(units[0]), sequence.ids)
    prompts = [ids[: min(PROMPT, len(ids) // 2)] for _, ids in sorted(firsts.items())[:DOCUMENTS]]
    if not prompts:
        raise BadInput("no document has two tokens, the first of which would be a prompt; give longer texts")
    written, forwards, same = np.zeros(len(prompts)), np.zeros(len(prompts)), 0
    with drafting(mtp, model), _counted(model) as count:
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
