"""Embeddings and output head: their tensors with a row for each id, changes of the number of rows, and untying.

A tied head is untied by a copy of the embeddings' matrix and a changed config.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping
from typing import Any

from surgeon.anatomy.anatomy import Anatomy
from surgeon.anatomy.derivation import Derivation, kept
from surgeon.anatomy.names import stored_name, words_of
from surgeon.anatomy.quantised import left_out
from surgeon.anatomy.rows_of_ids import VOCABULARY_KEY, rows_of_ids, vocabulary_fields
from surgeon.anatomy.skeleton import build, wordless_auto
from surgeon.blueprint.draft import Draft
from surgeon.blueprint.recipes import Copy
from surgeon.checkpoint.header import TensorInfo
from surgeon.errors import BadInput, printable

_TIED = "tie_word_embeddings"
# The keys, in `Draft.config_edits`, of the edits that change the number of rows and that untie the head.
_ROWS, _UNTIED = "rows", "untied"
# Embeddings and heads of layers that predict further tokens.
_OWN_ROWS = re.compile(r"(?:^|\.)(?:embed_tokens|head|lm_head|output)\.(?:weight|bias)$")


def vocabulary_tensors(draft: Draft, *, further: Collection[str] = ()) -> dict[str, bool]:
    """Return the tensors outside the layers with a row for each id; the value is True for input embeddings.

    They include a head that an earlier operation of the plan untied. Raises BadInput where they are not known, or where
    other tensors have such rows, except the `further` tensors that the caller changes too.
    """
    anatomy = draft.anatomy
    rows = anatomy.sizes.vocabulary
    found = rows_of_ids(anatomy.derivation, rows)
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
                f"{printable(name)}: {what} has its own vocabulary rows, which surgeon does not change here; remove"
                " it from the checkpoint first"
            )
    heads = head_tensors(anatomy.derivation) if is_untied(draft) else {}
    return found | {name: False for name, source in heads.items() if source in found}


def further_rows(anatomy: Anatomy) -> dict[str, TensorInfo]:
    """Return the embeddings and heads, with a row for each id, of layers that predict further tokens, by name."""
    rows = anatomy.sizes.vocabulary
    return {
        name: info
        for name, info in anatomy.further.items()
        if info.shape[:1] == (rows,) and _OWN_ROWS.search(name) is not None
    }


def stored(draft: Draft, name: str) -> Copy:
    """Return a tensor outside the layers as the base's bytes. Raises BadInput where an operation has changed it."""
    recipe = draft.outer[name].recipe
    if not isinstance(recipe, Copy):
        raise BadInput(f"{printable(name)}: an earlier operation of this plan changed it; apply two plans")
    return recipe


def set_rows(draft: Draft, rows: int) -> None:
    """Set the number of embedding rows in the output's config."""
    draft.config_edits[_ROWS] = lambda config: _with_rows(config, draft.anatomy, rows)


def _with_rows(config: Mapping[str, Any], anatomy: Anatomy, rows: int) -> dict[str, Any]:
    """Return the config with so many ids: in its text part, and in outer parts that had the same number."""
    made = copy.deepcopy(dict(config))
    before = anatomy.sizes.vocabulary
    part = made
    for key in anatomy.derivation.path:
        if part.get(VOCABULARY_KEY) == before:
            part[VOCABULARY_KEY] = rows
        part = part.setdefault(key, {})
    part.update(dict.fromkeys(vocabulary_fields(part, before), rows))
    return made


def has_other_rows(draft: Draft) -> bool:
    """Return whether an operation of the plan changed the number of rows."""
    return _ROWS in draft.config_edits


def untie(draft: Draft) -> dict[str, str]:
    """Give the output head its own tensors, copies of the embeddings; return their names, with the tensor each copies.

    Raises BadInput where the head cannot be untied.
    """
    base = draft.anatomy.derivation
    lacking = head_tensors(base)
    for name, source in lacking.items():
        # The copy includes rows that earlier operations of the plan kept or added.
        draft.set_outer(name, draft.outer[source].recipe)
    draft.config_edits[_UNTIED] = lambda config: untied_config(base, config)
    return lacking


def is_untied(draft: Draft) -> bool:
    """Return whether an operation of the plan untied the head."""
    return _UNTIED in draft.config_edits


@kept
def untied_config(base: Derivation, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config.json for a model whose output head has its own tensors.

    Every part on the way to the text model gets `tie_word_embeddings: false`.
    """
    made = copy.deepcopy(dict(config))
    part = made
    part[_TIED] = False
    for key in base.path:
        part = part.setdefault(key, {})
        part[_TIED] = False
    skeleton = base.seen.skeleton
    return left_out(made, [name.removesuffix(".") for name in words_of(skeleton.model)], skeleton)


@kept
def head_tensors(base: Derivation) -> dict[str, str]:
    """Return the tensors that an untied head needs and the base does not store, each with the tensor it now shares.

    Raises BadInput where the head cannot be untied.
    """
    before = base.seen.skeleton.model
    if (other := wordless_auto(base.seen.config)) is not None:
        raise BadInput(
            f"config.json: its head ({other.removeprefix('AutoModelFor')}) is no LM head, so none is tied to"
            " the embeddings; use the model with its LM head"
        )
    after = build(untied_config(base, base.seen.config)).model
    left = after.all_tied_weights_keys
    pairs = {name: of for name, of in before.all_tied_weights_keys.items() if name not in left}
    words = words_of(before)
    if not any(name.startswith(words) for pair in pairs.items() for name in pair):
        raise BadInput(
            f"config.json: with `{_TIED}: false` transformers still builds this model with a head tied to"
            " something else, or with none, so it cannot have a tensor of its own; leave `untie_embeddings` out"
        )
    stored = {target: name for name, target in base.seen.names.outer.items() if target}
    found: dict[str, str] = {}
    for name, of in pairs.items():
        lacking, held = (name, of) if of in stored else (of, name)
        if lacking not in stored:
            found[stored_name(after, lacking, as_in_memory=stored[held] == held)] = stored[held]
    return found
