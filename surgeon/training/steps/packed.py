"""Wrappers that keep packed documents apart in every forward: in one row where attention takes no mask, else by masks.

Shapes: B sequences of T tokens, V vocabulary.

Flash attention takes no mask. transformers passes it the boundaries of documents (`cu_seq_lens_q` and the like), or
finds them where positions restart at 0, but only in a batch of one row (`_is_packed_sequence`). With several rows
transformers runs ordinary attention over whole rows, and documents see each other. So here the rows are joined to one,
1 × B·T, and every forward receives the boundaries; its logits are returned as B T V.

Elsewhere transformers keeps packed documents apart by a mask that it makes from `position_ids`, which a model's forward
must pass on (`create_causal_mask(position_ids=…)`). Falcon, GPT-OSS, OPT, Bloom and others (transformers 5.23) do not,
so their documents see each other. Here the functions that make masks receive the positions of the forward.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import create_causal_mask

from surgeon.data.packing import IGNORED_LABEL
from surgeon.runtime.graft import cache_in

# transformers' own implementations that take a mask.
_MASKED = ("eager", "sdpa", "flex_attention")


def implementation_of(model: Any) -> str:
    """Return the name of the attention implementation of a model's text layers."""
    return getattr(model.config.get_text_config(), "_attn_implementation", None) or "eager"


def builds_no_mask(model: Any) -> bool:
    """Return whether transformers makes no mask from restarting positions, under the model's attention implementation.

    This is so for every flash attention, kernels of the Hub, and implementations registered without a mask function.
    """
    # These always make masks. They are not tried out, because flex attention would compile its mask.
    if implementation_of(model) in _MASKED:
        return False
    positions = torch.tensor([[0, 1, 0, 1]], device=model.device)
    embedded = torch.zeros(1, 4, 1, dtype=model.dtype, device=model.device)
    # No mask and no cache, as positional arguments: their names differ between versions of transformers.
    return create_causal_mask(model.config.get_text_config(), embedded, None, None, position_ids=positions) is None


def run_in_one_row(model: Any) -> None:
    """Replace the forward of `model` by one that runs rows with position ids (B T) as one row."""
    plain = model.forward
    parameters = inspect.signature(plain).parameters.values()
    takes_more = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)

    @functools.wraps(plain)
    def forward(*args: Any, **given: Any) -> Any:
        """Run rows as one row where they have position ids, and neither a mask nor a cache; else as before."""
        positions = given.get("position_ids")
        apart = given.get("attention_mask") is not None or cache_in(given) is not None
        if args or apart or positions is None or positions.dim() != 2:
            return plain(*args, **given)
        # Columns of a row are none of the one row's.
        columns = given.pop("logits_to_keep", 0)
        row = _one_row(given, positions)
        if takes_more and (model.training or not hasattr(model, "surgery")):
            # Outside training, grafts that read a sequence reject boundaries; transformers finds them by the positions.
            row |= _boundaries(positions)
        output = plain(**row)
        logits = output.logits.reshape(*positions.shape, -1)
        output.logits = logits[:, columns] if isinstance(columns, Tensor) else logits[:, -columns:]
        return output

    model.forward = forward


def _one_row(given: dict[str, Any], positions: Tensor) -> dict[str, Any]:
    """Return the inputs of B rows (B T, or B T D) as inputs of one row; `domain_ids` (B) are repeated per token."""
    row = dict(given)
    for name, value in given.items():
        if not isinstance(value, Tensor):
            continue
        if name == "domain_ids" and value.dim() == 1:
            row[name] = value.repeat_interleave(positions.shape[1])[None]
        elif value.shape[:2] == positions.shape:
            if name == "labels":
                # The first token of a row is not predicted from the row before.
                value = value.clone()
                value[:, 0] = IGNORED_LABEL
            row[name] = value.flatten(0, 1)[None]
    return row


def _boundaries(positions: Tensor) -> dict[str, Any]:
    """Return the arguments that give attention the boundaries; a document begins at position 0 or with a row."""
    begins = positions == 0
    begins[:, 0] = True
    flat = begins.flatten()
    ends = torch.tensor([flat.numel()], device=flat.device)
    lengths = torch.cat([flat.nonzero().flatten(), ends]).to(torch.int32)
    longest = int(lengths.diff().max())
    return {
        "cu_seq_lens_q": lengths,
        "cu_seq_lens_k": lengths,
        "max_length_q": longest,
        "max_length_k": longest,
        # For layers that carry a state along the row.
        "seq_idx": (flat.cumsum(0) - 1).to(torch.int32)[None],
    }


# transformers' functions that make masks.
_MAKERS = ("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask")


def give_masks_positions(model: Any) -> None:
    """Replace the forward of `model` by one whose masks are made from its position ids (B T).

    Nothing is replaced where no module of the model's code makes such masks.
    """
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    modules = [sys.modules[name] for name in sorted({kind.__module__ for kind in kinds}) if name in sys.modules]
    modules = [module for module in modules if module is not masking_utils and _places(module)]
    if not modules:
        return
    plain = model.forward

    @functools.wraps(plain)
    def forward(*args: Any, **given: Any) -> Any:
        """Run with masks made from the position ids (B T); without them, or with a cache, as before."""
        positions = given.get("position_ids")
        if positions is None or positions.dim() != 2 or cache_in(given) is not None:
            return plain(*args, **given)
        with _given(modules, positions):
            return plain(*args, **given)

    model.forward = forward


def _places(module: ModuleType) -> list[str]:
    """Return which of transformers' mask-making functions a module of a model's code has imported."""
    return [name for name in _MAKERS if getattr(module, name, None) is getattr(masking_utils, name)]


@contextlib.contextmanager
def _given(modules: Sequence[ModuleType], positions: Tensor) -> Iterator[None]:
    """Make the mask functions that `modules` imported use `positions` within the context."""
    with contextlib.ExitStack() as back:
        for module in modules:
            for name in _places(module):
                plain = getattr(module, name)
                back.callback(setattr, module, name, plain)
                setattr(module, name, _with_positions(plain, positions))
        yield


def _with_positions(make: Callable[..., Any], positions: Tensor) -> Callable[..., Any]:
    """Return `make`, changed to use `positions` in calls that have no positions, no mask and no cache."""

    @functools.wraps(make)
    def made(*args: Any, **named: Any) -> Any:
        """Make a mask, from `positions` where the call has nothing that determines the mask."""
        mask = named.get("attention_mask")
        if len(args) < 3 and named.get("position_ids") is None and cache_in(named) is None:
            # A mask that leaves nothing out is one that the model itself made, so it counts as none.
            if isinstance(mask, Tensor) and mask.dim() == 2 and bool(mask.all()):
                mask = None
            if mask is None:
                named |= {"attention_mask": None, "position_ids": positions}
        return make(*args, **named)

    return made
