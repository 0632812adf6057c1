"""Before a byte is written: the shipped code, built without weights, must want exactly the tensors of the blueprint."""

from __future__ import annotations

from typing import Any

import torch

from surgeon.blueprint.draft import Blueprint
from surgeon.checkpoint.header import FLOAT_DTYPES
from surgeon.common.library import LOAD_FAILURES, first_line, passed_over, quiet_transformers
from surgeon.errors import BadInput, printable
from surgeon.families import ENCODERS
from surgeon.families.anatomy import OLD_NORMS, layer_of
from surgeon.families.names import made_of
from surgeon.families.quantised import is_scale, quantizer_of
from surgeon.models.load import is_idle, shipped_config
from surgeon.runtime.bundle import import_bundle
from surgeon.runtime.composition import Composition
from surgeon.runtime.known import native_of
from surgeon.runtime.natives import PREFIX
from surgeon.runtime.states_rules import BANK


def check_skeleton(blueprint: Blueprint) -> None:
    """Build the grafted model on the meta device and compare names and shapes, so that planner and code cannot drift.

    Raises BadInput naming the first tensor that one of them has and the other lacks, or has in another shape.
    """
    model = _build(blueprint.config)
    native = native_of(blueprint.config)
    if isinstance(native, Composition):
        _check_converted(blueprint, model, encoder=native.encoder)
        return
    wanted = {name: tuple(value.shape) for name, value in model.state_dict(keep_vars=True).items()}
    planned = {output.name: tuple(output.recipe.shape) for output in blueprint.outputs}
    if blueprint.config["model_type"].removeprefix(PREFIX) in ENCODERS:
        # Heads come and go on encoders, and a pooler nothing reads: surgery touches neither.
        base = f"{model.base_model_prefix}."
        wanted, planned = ({n: s for n, s in held.items() if _of_layers(n, base)} for held in (wanted, planned))
        # By the names of the base model, which a checkpoint of it alone may have or not.
        wanted, planned = ({_present(n, base): s for n, s in held.items()} for held in (wanted, planned))
    # A checkpoint saved without its head lacks the base model's prefix on every name, which transformers adds.
    if planned and not wanted.keys() & planned.keys():
        planned = {f"{model.base_model_prefix}.{name}": shape for name, shape in planned.items()}
    tied = set(model.all_tied_weights_keys)
    ignored = passed_over(model)
    for name, shape in wanted.items():
        if name not in planned:
            if name not in tied:
                raise BadInput(f"{name}: the shipped code needs this tensor, the plan does not make it")
        elif planned[name] != shape:
            raise BadInput(
                f"{name}: the plan makes it of shape {list(planned[name])}, the shipped code needs {list(shape)}"
            )
    copied = {output.name for output in blueprint.outputs if not output.new}
    copied |= {f"{model.base_model_prefix}.{name}" for name in copied}
    for name in planned:
        # What the base has no place for either may stay, and old buffers, which transformers passes over.
        if name in copied and is_idle(name):
            continue
        if name not in wanted and not ignored(name):
            raise BadInput(f"{printable(name)}: the plan makes this tensor, the shipped code has no place for it")


def _check_converted(blueprint: Blueprint, model: Any, *, encoder: bool) -> None:
    """The same of a derived model type, whose tensors transformers may make of several that are stored."""
    config, stored = blueprint.config, blueprint.outputs
    plain = {out.name for out in stored if out.recipe.dtype in FLOAT_DTYPES and not is_scale(config, out.name)}
    made = made_of(model, sorted(plain))
    if packed := [output.name for output in stored if output.name not in plain]:
        made |= made_of(model, packed, quantizer_of(config))
    held = model.state_dict(keep_vars=True)
    wanted = {name: tuple(value.shape) for name, value in held.items()}
    for output in blueprint.outputs:
        told, shape = made[output.name], tuple(output.recipe.shape)
        for name in told.names if output.new else ():
            if name not in wanted:
                raise BadInput(
                    f"{printable(output.name)}: the plan makes this tensor, the shipped code has no place for it"
                )
            if not told.converted and wanted[name] != shape:
                raise BadInput(
                    f"{printable(output.name)}: the plan makes it of shape {list(shape)}, the shipped code needs"
                    f" {list(wanted[name])}"
                )
    planned = {name for told in made.values() for name in told.names} | set(model.all_tied_weights_keys)
    if encoder:
        # Heads come and go, and a pooler nothing reads.
        above = f"{model.base_model_prefix}."
        wanted = {name: shape for name, shape in wanted.items() if _of_layers(name, above)}
    if lacking := [name for name in wanted if name not in planned]:
        raise BadInput(f"{lacking[0]}: the shipped code needs this tensor, the plan does not make it")


def _of_layers(name: str, base: str) -> bool:
    return layer_of(name) is not None or name.removeprefix(base).startswith(BANK)


def _present(name: str, base: str) -> str:
    """Without the base model's prefix, and as norms' parts are called today."""
    present = name.removeprefix(base)
    for old, new in OLD_NORMS.items():
        present = present.removesuffix(old) + new if present.endswith(old) else present
    return present


def _build(config: dict[str, Any]) -> Any:
    kind = getattr(import_bundle(config), config["architectures"][0])
    try:
        with quiet_transformers(), torch.device("meta"):
            return kind(shipped_config(kind, config))
    except LOAD_FAILURES as error:
        raise BadInput(f"config.json: the grafted model cannot be built from it: {first_line(error)}") from error
