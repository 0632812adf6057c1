"""Which tensors have a row for each id, and what a config says of them."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping
from typing import Any

from surgeon.anatomy.anatomy import Anatomy
from surgeon.anatomy.rows_of_ids import VOCABULARY_KEY, vocabulary_fields
from surgeon.checkpoint.header import TensorInfo
from surgeon.errors import BadInput, printable

# Embeddings and heads of layers that predict further tokens.
_OWN_ROWS = re.compile(r"(?:^|\.)(?:embed_tokens|head|lm_head|output)\.(?:weight|bias)$")


def vocabulary_tensors(anatomy: Anatomy, *, further: Collection[str] = ()) -> dict[str, bool]:
    """The tensors outside the layers with a row for each id; True where rows are embeddings of what is read.

    Raises BadInput where they are not known, or something else than embeddings and output head has such rows: but for
    those `further` tensors that the caller changes too.
    """
    rows = anatomy.sizes.vocabulary
    found = anatomy.derivation.vocabulary_tensors(rows)
    odd = next((name for name in found if anatomy.outer[name].shape[0] != rows), None)
    if odd is not None or True not in found.values():
        shape = list(anatomy.outer[odd].shape) if odd else []
        raise BadInput(
            f"{printable(odd)}: {shape}, with other rows than the {rows} of the vocabulary, so these cannot change;"
            " leave the vocabulary as it is"
            if odd
            else "config.json: no embedding with a row for each id is found here, so the vocabulary cannot change;"
            " leave it as it is"
        )
    idle = {name: anatomy.outer[name] for name in anatomy.idle}
    for name, info in (anatomy.further | idle).items():
        if info.shape[:1] == (rows,) and name not in further:
            what = "a layer that predicts further tokens" if name in anatomy.further else "a tensor that nothing reads"
            raise BadInput(
                f"{printable(name)}: {what} has rows for the vocabulary of its own, which surgeon does not change"
                " here; take it out of the checkpoint first"
            )
    return found


def further_rows(anatomy: Anatomy) -> dict[str, TensorInfo]:
    """The embeddings and heads of layers that predict further tokens, with a row for each id, by name."""
    rows = anatomy.sizes.vocabulary
    return {
        name: info
        for name, info in anatomy.further.items()
        if info.shape[:1] == (rows,) and _OWN_ROWS.search(name) is not None
    }


def with_vocabulary(config: Mapping[str, Any], anatomy: Anatomy, rows: int) -> dict[str, Any]:
    """The config with so many ids, in the text decoder's part of it and, where it says the same, at its top."""
    made = copy.deepcopy(dict(config))
    before = anatomy.sizes.vocabulary
    part = made
    for key in anatomy.derivation.path:
        if part.get(VOCABULARY_KEY) == before:
            part[VOCABULARY_KEY] = rows
        part = part.setdefault(key, {})
    part.update(dict.fromkeys(vocabulary_fields(part, before), rows))
    return made
