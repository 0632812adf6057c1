"""Names of MTP layers' tensors: on disk, and in transformers' `MtpModel`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from surgeon.families.names import Made
from surgeon.train.trainable.stored import StoredNames

# What transformers calls the decoder layer inside of an MTP layer.
_BLOCK = re.compile(r"layers\.(\d+)\.mtp_block\.(.+)", re.DOTALL)


def mtp_names(mtp: Any, model: Any, names: Iterable[str]) -> StoredNames:
    """Names on disk of MTP layers and in `mtp`, which stands beside `model`; of `names` those that it reads."""
    found = mtp.get_mtp_weights_regex(model)
    ours = [name for name in names if found.search(name) is not None]
    stored = StoredNames(
        mtp,
        ours,
        lambda _, apart: _made(apart, mtp, model),
        lambda tensors: _reverted(tensors, stored, model),
    )
    return stored


def _made(names: Iterable[str], mtp: Any, model: Any) -> dict[str, Made]:
    """What transformers makes of tensors on disk: by conversions of MTP layers, then by those of the main model."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = mtp.get_weight_conversions(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    found, held = {}, mtp.state_dict(keep_vars=True)
    for name in names:
        target, pattern = rename_source_key(name, renamings, converters, mtp.base_model_prefix, held)
        first, *others = [""] if pattern is None else of_pattern[pattern].target_patterns
        found[name] = Made((target, *(target.replace(first, other) for other in others)), pattern is not None)
    return found


def _reverted(tensors: Mapping[str, Tensor], stored: StoredNames, model: Any) -> dict[str, Tensor]:
    """Tensors of MTP blocks as they are stored: converted as those of the main model's layers, which are of one class.

    transformers' own way back gives wrong names: several of theirs on disk are one in memory.
    """
    from transformers.core_model_loading import revert_weight_conversion

    layers = model.get_decoder().layers
    stack = next(name for name, module in model.named_modules() if module is layers)
    made: dict[str, Tensor] = {}
    for name, value in tensors.items():
        found = _BLOCK.fullmatch(name)
        assert found is not None, name
        for other, each in revert_weight_conversion(model, {f"{stack}.0.{found[2]}": value}).items():
            suffix = re.split(r"\blayers\.0\.", other, maxsplit=1)[-1]
            made[next((s for s in stored.sources(name) if s.endswith(f".{suffix}")), other)] = each
    return made
