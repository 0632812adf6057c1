"""Dissecting a checkpoint: which tensor is which part of which layer, checked against the config.

The model that transformers builds from the config is taken apart and probed (checkpoint_anatomy.py). A setting with
which transformers cannot build or run a model is then refused.
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

    `own` is the checkpoint's own code, if it builds the model; the name of the model type then means nothing. Raises
    BadInput naming the first tensor that is missing, unknown or of the wrong shape or dtype.
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
    """Return the anatomy of an opened folder, from `dissect` or another function `by`. Raises BadInput as `by` does.

    Where the folder's own code was not loaded and its tensors fit no class of transformers, the error says that they
    may belong to that code.
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
