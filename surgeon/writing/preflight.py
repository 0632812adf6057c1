"""The check before a byte is written: the shipped code, built without weights, must need exactly these tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from surgeon.anatomy.anatomy import layer_of, of_graft
from surgeon.anatomy.names import made_of
from surgeon.anatomy.quantised import is_scale, quantizer_of
from surgeon.blueprint.blueprint import Output
from surgeon.checkpoint.header import FLOAT_DTYPES
from surgeon.common.library import LOAD_FAILURES, first_line, quiet_transformers
from surgeon.errors import BadInput, printable
from surgeon.grafts.bundle import import_bundle
from surgeon.grafts.composition import composition_of
from surgeon.models.load import shipped_config
from surgeon.runtime.states_rules import BANK

_OWN = "get the base's own config.json"


def check_skeleton(config: dict[str, Any], stored: Sequence[Output]) -> None:
    """Build the grafted model on the meta device and compare its tensors' names and shapes with the outputs `stored`.

    So planner and code cannot diverge. Raises BadInput naming the first tensor that only one side has, or that has
    different shapes.
    """
    model = _build(config)
    native = composition_of(config)
    assert native is not None
    plain = {out.name for out in stored if out.recipe.dtype in FLOAT_DTYPES and not is_scale(config, out.name)}
    made = made_of(model, sorted(plain))
    if packed := [output.name for output in stored if output.name not in plain]:
        made |= made_of(model, packed, quantizer_of(config))
    held = model.state_dict(keep_vars=True)
    wanted = {name: tuple(value.shape) for name, value in held.items()}
    for output in stored:
        told, shape = made[output.name], tuple(output.recipe.shape)
        if not output.new and not (of_graft(output.name) or BANK in output.name):
            continue
        for name in told.names:
            if name not in wanted:
                raise BadInput(
                    f"{printable(output.name)}: the plan makes this tensor, the shipped code has no place for it"
                    if output.new
                    else f"{printable(output.name)}: config.json's `surgery` has no place for this tensor; {_OWN}"
                )
            if not told.converted and wanted[name] != shape:
                raise BadInput(
                    f"{printable(output.name)}: the plan makes it of shape {list(shape)}, the shipped code needs"
                    f" {list(wanted[name])}"
                    if output.new
                    else f"{printable(output.name)}: shape {list(shape)}, config.json's `surgery` requires"
                    f" {list(wanted[name])}; {_OWN}"
                )
    planned = {name for told in made.values() for name in told.names} | set(model.all_tied_weights_keys)
    if native.encoder:
        # An encoder may lack its head and an unused pooler, so only tensors of its layers are compared.
        above = f"{model.base_model_prefix}."
        wanted = {name: shape for name, shape in wanted.items() if _of_layers(name, above)}
    if lacking := [name for name in wanted if name not in planned]:
        raise BadInput(f"{lacking[0]}: the shipped code needs this tensor, the plan does not make it")


def _of_layers(name: str, base: str) -> bool:
    """Return whether a tensor belongs to a layer, or to the control states; `base` is the base model's prefix."""
    return layer_of(name) is not None or name.removeprefix(base).startswith(BANK)


def _build(config: dict[str, Any]) -> Any:
    """Return the grafted model on the meta device.

    Raises BadInput where the shipped code cannot build it from the config.
    """
    kind = getattr(import_bundle(config), config["architectures"][0])
    try:
        with quiet_transformers(), torch.device("meta"):
            return kind(shipped_config(kind, config))
    except LOAD_FAILURES as error:
        raise BadInput(f"config.json: the grafted model cannot be built from it: {first_line(error)}") from error
