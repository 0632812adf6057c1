"""Packed documents in models whose code does not hand positions to its masks.

transformers keeps packed documents apart by a mask that it makes of `position_ids`; a model's forward must pass them on
(`create_causal_mask(position_ids=…)`). Falcon, GPT-OSS, OPT, Bloom and others (5.23) do not, so their documents see
each other. Here the functions that make masks get the positions of the forward that calls them.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor
from transformers import masking_utils

from surgeon.runtime.graft import cache_in

_MAKERS = ("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask")


def give_masks_positions(model: Any) -> None:
    """Have the masks of every forward of `model` on rows with position ids (B T) made of these, from now on."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    modules = [sys.modules[name] for name in sorted({kind.__module__ for kind in kinds}) if name in sys.modules]
    modules = [module for module in modules if module is not masking_utils and _places(module)]
    if not modules:
        return
    plain = model.forward

    @functools.wraps(plain)
    def forward(*args: Any, **given: Any) -> Any:
        positions = given.get("position_ids")
        if positions is None or positions.dim() != 2 or cache_in(given) is not None:
            return plain(*args, **given)
        with _given(modules, positions):
            return plain(*args, **given)

    model.forward = forward


def _places(module: ModuleType) -> list[str]:
    """Which of transformers' functions that make masks a module of a model's code has."""
    return [name for name in _MAKERS if getattr(module, name, None) is getattr(masking_utils, name)]


@contextlib.contextmanager
def _given(modules: Sequence[ModuleType], positions: Tensor) -> Iterator[None]:
    with contextlib.ExitStack() as back:
        for module in modules:
            for name in _places(module):
                plain = getattr(module, name)
                back.callback(setattr, module, name, plain)
                setattr(module, name, _with_positions(plain, positions))
        yield


def _with_positions(make: Callable[..., Any], positions: Tensor) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **named: Any) -> Any:
        mask = named.get("attention_mask")
        if len(args) < 3 and named.get("position_ids") is None and cache_in(named) is None:
            # Where the model itself makes a mask that leaves nothing out, none was given to it.
            if isinstance(mask, Tensor) and mask.dim() == 2 and bool(mask.all()):
                mask = None
            if mask is None:
                named |= {"attention_mask": None, "position_ids": positions}
        return make(*args, **named)

    return made
