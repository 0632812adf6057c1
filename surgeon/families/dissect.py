"""Dissect a checkpoint: which tensor is which part of which layer, checked against the config.

What transformers builds of the config is taken apart and probed (checkpoint_anatomy.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surgeon.checkpoint.header import TensorInfo
from surgeon.checkpoint.own_code import OwnCode
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import Anatomy
from surgeon.families.decoders import USUAL_DECODERS, USUAL_ENCODERS
from surgeon.families.grafted_config import is_grafted, native_config
from surgeon.families.settings import check_settings, check_sizes


def dissect(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], own: OwnCode | None = None) -> Anatomy:
    """Sort the tensors of a checkpoint into layers and the rest, and check every shape against the config.

    `own` is the code that its model is built of where it brings some: what a model type is called says nothing then.
    Raises BadInput naming the first tensor that is missing, unknown or of the wrong shape or dtype.
    """
    own = own if own is not None and own.builds_models else None
    if not isinstance(config.get("model_type"), str):
        found = (
            f"is {printable(repr(config['model_type']), 60)}, not a name" if "model_type" in config else "is missing"
        )
        raise BadInput(f"config.json: `model_type` {found}; is this a transformers checkpoint?")
    native = native_config(config)
    if own is None and native["model_type"] in (*USUAL_DECODERS, *USUAL_ENCODERS):
        check_sizes(native)
        check_settings(native)
    # Imports torch and transformers.
    from surgeon.families.checkpoint_anatomy import anatomy_of

    return anatomy_of(native, tensors, own, carries_grafts=is_grafted(config))
