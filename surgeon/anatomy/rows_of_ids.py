"""The tensors with one row per token id: the model is built again with more ids, and what grew is compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from surgeon.anatomy.derivation import Derivation, kept
from surgeon.anatomy.family import with_fields
from surgeon.anatomy.growth import part_of
from surgeon.anatomy.skeleton import Skeleton, build
from surgeon.errors import BadInput, printable

VOCABULARY_KEY = "vocab_size"
# The number of ids that are added to see which tensors grow with the vocabulary.
_MORE_WORDS = 1024


def vocabulary_fields(part: Mapping[str, Any], rows: int) -> list[str]:
    """Return the fields of a text decoder's config that hold the number of ids; Gemma 4 has two."""
    return [VOCABULARY_KEY, *(key for key in part if key.startswith(f"{VOCABULARY_KEY}_") and part[key] == rows)]


@kept
def rows_of_ids(base: Derivation, rows: int) -> dict[str, bool]:
    """Return the tensors with one row for each of the vocabulary's `rows`, by name on disk; True for input embeddings.

    Raises BadInput where a tensor other than embeddings and output head grows with the vocabulary.
    """
    seen, skeleton = base.seen, base.seen.skeleton
    fields = vocabulary_fields(part_of(seen.config, skeleton.path), rows)
    others = _other_embeddings(skeleton, fields)
    # A round number of added ids, so that padding inside the model stays the same.
    more = with_fields(seen.config, skeleton.path, dict.fromkeys(fields, rows + _MORE_WORDS))
    changed = skeleton.changes(build(more))
    held = skeleton.model.state_dict(keep_vars=True)
    wider = changed.keys() & held.keys()
    reads = skeleton.model.get_input_embeddings()
    writes = skeleton.model.get_output_embeddings()
    known = {
        id(value): module is not writes or module is reads
        for module in (writes, *others, reads)
        if module is not None
        for value in module.parameters()
    }
    found: dict[str, bool] = {}
    for name, target in seen.names.outer.items():
        if target not in wider:
            continue
        wider.discard(target)
        rows = held[target].shape[0]
        if id(held[target]) not in known or changed[target] != {0: (rows, rows + _MORE_WORDS)}:
            raise BadInput(
                f"{printable(name)}: has a part for each id of the vocabulary and is neither the embedding nor the"
                " output head, so this model's vocabulary cannot change; leave it as it is"
            )
        found[name] = known[id(held[target])]
    # Tensors tied to the embedding are not stored.
    if left := sorted(wider - set(skeleton.model.all_tied_weights_keys)):
        raise BadInput(
            f"{printable(left[0])}: has a part for each id of the vocabulary and is not stored as surgeon expects;"
            " this model's vocabulary cannot change; leave it as it is"
        )
    return found


def _other_embeddings(skeleton: Skeleton, fields: Sequence[str]) -> list[Any]:
    """Return the embeddings other than the first by which a decoder reads tokens, as Gemma 4 does for its layers.

    Raises BadInput for one whose size is in none of `fields`, the fields with the number of ids.
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
