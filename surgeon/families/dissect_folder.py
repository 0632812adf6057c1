"""Dissect an opened folder, whose own code may be what its tensors are of."""

from __future__ import annotations

from collections.abc import Callable

from surgeon.checkpoint.damages import ANOTHER
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import Anatomy
from surgeon.families.dissect import dissect


def dissect_folder(folder: CheckpointFolder, by: Callable[..., Anatomy] = dissect) -> Anatomy:
    """`dissect` of an opened folder, or what `by` knows of it. Raises BadInput as that does.

    Where the folder's own code was left out and tensors fit no class of transformers, the code may be what they are of.
    """
    try:
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
