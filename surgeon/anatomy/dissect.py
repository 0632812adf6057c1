"""Dissect a checkpoint: which tensor is which part of which layer, checked against the config.

What transformers builds of the config is taken apart and probed (checkpoint_anatomy.py); a setting that transformers
cannot build or run a model with is refused then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from surgeon.anatomy.anatomy import Anatomy
from surgeon.anatomy.grafted_config import is_grafted, native_config
from surgeon.checkpoint.damages import ANOTHER
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.header import TensorInfo
from surgeon.checkpoint.own_code import OwnCode
from surgeon.errors import BadInput, printable, said_of


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
    # Imports torch and transformers.
    from surgeon.anatomy.checkpoint_anatomy import anatomy_of

    return anatomy_of(native, tensors, own, carries_grafts=is_grafted(config))


def dissect_folder(folder: CheckpointFolder, by: Callable[..., Anatomy] = dissect) -> Anatomy:
    """`dissect` of an opened folder, or what `by` knows of it. Raises BadInput as that does.

    Where the folder's own code was left out and tensors fit no class of transformers, the code may be what they are of.
    """
    try:
        with said_of(folder.source.shown):
            return by(folder.config, folder.tensors, folder.own)
    except BadInput as error:
        why = str(error)
        if not folder.model_code or not why.endswith(ANOTHER):
            raise
        raise BadInput(
            f"{why.removesuffix(ANOTHER)}this folder's own code ({folder.model_code}) was left out, as transformers has"
            f" {printable(str(folder.config['model_type']))}, and these tensors may be of that code; read it, then pass"
            " `--trust-remote-code`"
        ) from error
