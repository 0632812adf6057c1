"""Other models that a plan takes tensors from: found, opened, and checked against the base."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from surgeon.blueprint.draft import Blueprint
from surgeon.blueprint.recipes import Imported
from surgeon.checkpoint.folder import CheckpointFolder, digests_of
from surgeon.checkpoint.header import FLOAT_DTYPES
from surgeon.checkpoint.hub import locate, remote_folder
from surgeon.checkpoint.source import MAX_SIDE_FILE_BYTES
from surgeon.checkpoint.strict_json import parse_json_strict
from surgeon.checkpoint.tokenizer_files import TOKENIZER_FILE
from surgeon.common.json_results import same_json
from surgeon.errors import BadInput, printable
from surgeon.manifest.manifest import ModelEntry
from surgeon.plan.plan import LoadedPlan

_MOST_ITEMS = 10_000_000
# What a layer's MLP computes by, beside its weights, and what shows a model of another shape.
_SAME = (
    *("model_type", "hidden_act", "hidden_activation", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads"),
)


def models_of_plan(loaded: LoadedPlan, *, weights: bool) -> dict[str, CheckpointFolder]:
    """The models that the plan takes tensors from, opened, by their names in it: a folder, seen from the plan's, or a
    Hub id with or without `@revision`. Without `weights` those of the Hub are known by their headers alone.
    """
    opened: dict[str, CheckpointFolder] = {}
    for name in (name for operation in loaded.plan.operations for name in operation.models):
        beside = Path(loaded.source).parent / name
        if beside.exists() or Path(name).exists():
            opened[name] = CheckpointFolder.open(beside if beside.exists() else Path(name))
            continue
        repo_id, _, revision = name.partition("@")
        if weights:
            opened[name] = CheckpointFolder.open(locate(repo_id, revision=revision or None).path)
        else:
            opened[name] = remote_folder(repo_id, revision or None)
    return opened


def tensors_taken(blueprint: Blueprint) -> dict[str, dict[str, Imported]]:
    """The tensors that a blueprint takes from each other model, by name, each with one recipe that takes it."""
    found: dict[str, dict[str, Imported]] = {}
    for recipe in blueprint.recipes():
        if isinstance(recipe, Imported) and recipe.place == "model":
            found.setdefault(recipe.name, {})[recipe.tensor] = recipe
    return found


def check_models(blueprint: Blueprint, base: CheckpointFolder, models: Mapping[str, CheckpointFolder]) -> None:
    """Raise BadInput for a model that is not of the base's architecture, or whose tokenizer has other ids."""
    for name, tensors in tensors_taken(blueprint).items():
        model, shown = models[name], printable(name)
        for key in _SAME:
            one, other = base.config.get(key), model.config.get(key)
            if one != other:
                raise BadInput(
                    f"{shown}: `{key}` is {printable(repr(other), 60)}, the base's {printable(repr(one), 60)}; experts"
                    " must be fine-tunes of the base's own architecture"
                )
        for tensor in tensors:
            there, here = model.tensors.get(tensor), base.tensors[tensor]
            found = "none" if there is None else f"{there.dtype} {list(there.shape)}"
            if there is None or there.shape != here.shape or there.dtype not in FLOAT_DTYPES:
                raise BadInput(
                    f"{shown}: {printable(tensor)} is {found}, the base's {here.dtype} {list(here.shape)}; experts must"
                    " be fine-tunes of the base's own architecture, in full precision"
                )
        one, other = _vocabulary(base), _vocabulary(model)
        if one is not None and other is not None and not same_json(one, other):
            raise BadInput(
                f"{shown}: its {TOKENIZER_FILE} has another vocabulary than the base's; give a fine-tune of it"
            )


def _vocabulary(folder: CheckpointFolder) -> object:
    """The pieces of its tokenizer; nothing where it has none of this kind, which then says nothing."""
    if TOKENIZER_FILE not in folder.side_files:
        return None
    content = folder.read_side_file(TOKENIZER_FILE)
    data = parse_json_strict(content, file=TOKENIZER_FILE, max_bytes=MAX_SIDE_FILE_BYTES, max_items=_MOST_ITEMS)
    model = data.get("model") if isinstance(data, dict) else None
    return model.get("vocab") if isinstance(model, dict) else None


def entries_of(blueprint: Blueprint, models: Mapping[str, CheckpointFolder]) -> dict[str, ModelEntry]:
    """What the manifest says of the models: how they are called, and one digest of the tensors that were taken."""
    found: dict[str, ModelEntry] = {}
    for name, tensors in tensors_taken(blueprint).items():
        models[name].check_unchanged()
        digests = digests_of(models[name], tensors, lambda _: None)
        digest = hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
        found[name] = ModelEntry(id=models[name].path.resolve().name, sha256=digest)
    return found
