"""Which tensors have a row for each id, found by building the model with more ids, and what a config says of them."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from surgeon.checkpoint.header import TensorInfo
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import Anatomy
from surgeon.families.skeleton import Skeleton, build

VOCABULARY_KEY = "vocab_size"
# Embeddings and heads of layers that predict further tokens.
_OWN_ROWS = re.compile(r"(?:^|\.)(?:embed_tokens|head|lm_head|output)\.(?:weight|bias)$")
# Ids by which a model is built larger to see what grows with its vocabulary.
_MORE_WORDS = 1024


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


def vocabulary_fields(part: Mapping[str, Any], rows: int) -> list[str]:
    """The fields of a text decoder's part of a config that say how many ids there are; Gemma 4 has two."""
    return [VOCABULARY_KEY, *(key for key in part if key.startswith(f"{VOCABULARY_KEY}_") and part[key] == rows)]


def rows_of_ids(config: Mapping[str, Any], skeleton: Skeleton, outer: Mapping[str, str], rows: int) -> dict[str, bool]:
    """The tensors that have a row for each id, by name on disk; True for embeddings of what is read.

    `outer` names the place in memory of each tensor outside the layers. Raises BadInput where something else has such
    rows.
    """
    more = copy.deepcopy(dict(config))
    part = more
    for key in skeleton.path:
        part = part.setdefault(key, {})
    fields = vocabulary_fields(part, rows)
    others = _other_embeddings(skeleton, fields)
    # As many as keep any padding inside the model as it was.
    part.update(dict.fromkeys(fields, rows + _MORE_WORDS))
    after = build(more).model.state_dict(keep_vars=True)
    held = skeleton.model.state_dict(keep_vars=True)
    wider = {
        name for name, value in held.items() if name not in after or tuple(after[name].shape) != tuple(value.shape)
    }
    reads = skeleton.model.get_input_embeddings()
    writes = skeleton.model.get_output_embeddings()
    known = {
        id(value): module is not writes or module is reads
        for module in (writes, *others, reads)
        if module is not None
        for value in module.parameters()
    }
    found: dict[str, bool] = {}
    for name, target in outer.items():
        if target not in wider:
            continue
        wider.discard(target)
        grew = [other - one for one, other in zip(held[target].shape, after[target].shape, strict=False)]
        if id(held[target]) not in known or grew != [_MORE_WORDS, *[0] * (held[target].ndim - 1)]:
            raise BadInput(
                f"{printable(name)}: has a part for each id of the vocabulary and is neither the embedding nor the"
                " output head, so this model's vocabulary cannot change; leave it as it is"
            )
        found[name] = known[id(held[target])]
    # What is tied to the embedding is not stored.
    if left := sorted(wider - set(skeleton.model.all_tied_weights_keys)):
        raise BadInput(
            f"{printable(left[0])}: has a part for each id of the vocabulary and is not stored as surgeon expects;"
            " this model's vocabulary cannot change; leave it as it is"
        )
    return found


def _other_embeddings(skeleton: Skeleton, fields: Sequence[str]) -> list[Any]:
    """The embeddings beside the first by which a decoder reads tokens, as Gemma 4 does for its layers.

    Raises BadInput for one whose size is none of `fields`, which say how many ids there are.
    """
    from torch import nn

    reads = skeleton.model.get_input_embeddings()
    told = skeleton.text.to_dict()
    sizes = {told[key]: key for key in told if "vocab_size" in key and key not in fields}
    sizes |= {told[key]: key for key in fields[1:]}
    found = []
    for name, module in skeleton.model.get_submodule(skeleton.stack.rpartition(".")[0]).named_modules():
        if not isinstance(module, nn.Embedding) or module is reads or module.num_embeddings not in sizes:
            continue
        field = sizes[module.num_embeddings]
        if field not in fields:
            raise BadInput(
                f"{printable(name)}: tokens are read by this embedding too, of {module.num_embeddings} rows"
                f" (`{field}`), and config.json does not say that it has one for each of the {told['vocab_size']} ids;"
                " this model's vocabulary cannot change; leave it as it is"
            )
        found.append(module)
    return found
