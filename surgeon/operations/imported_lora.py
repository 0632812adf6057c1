"""A PEFT adapter sorted into the draft's layers: the modules it adapts, their rank and scale, and its tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from surgeon.anatomy.anatomy import layer_of
from surgeon.blueprint.draft import Draft
from surgeon.blueprint.recipes import Imported, Recipe
from surgeon.checkpoint.damages import unwrapped
from surgeon.checkpoint.header import FLOAT_DTYPES
from surgeon.checkpoint.peft_folder import Adapter, AdapterFolder, AdapterTensor
from surgeon.common.json_results import plain_fields
from surgeon.common.schema import Many
from surgeon.errors import BadInput, printable
from surgeon.operations.operation import OneOf, Spec
from surgeon.operations.prepare import Facts
from surgeon.runtime.experts_rules import slot_name

_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight", re.DOTALL)
# Conversions of dtypes that lose nothing.
_WIDENING = {("F16", "F32"), ("BF16", "F32"), ("F16", "F64"), ("BF16", "F64"), ("F32", "F64")}
# Settings of adapters that are more than B A at linear modules, and why a slot cannot hold them.
_REASONS = {
    "bias": "biases were trained beside the LoRA",
    "use_dora": "DoRA rescales the base's weights, and a LoRA slot cannot",
    "lora_bias": "a slot has no bias",
    "modules_to_save": "whole modules were trained beside the LoRA, and a slot holds a LoRA alone",
    "trainable_token_indices": "embeddings were trained beside the LoRA",
    "layer_replication": "it is for a base with repeated layers",
    "target_parameters": "it adapts parameters that are not linear modules",
    "alora_invocation_tokens": "it is active only after certain tokens",
}


def check_slot(adapter: AdapterFolder) -> None:
    """Raise BadInput for an adapter whose settings do not fit a slot."""
    adapter.check_settings((), _REASONS, "such an adapter does not fit a slot: import another, or `merge_adapter`")


@dataclass(frozen=True)
class ImportedModule:
    """One adapted module of a layer: path within the layer, rank, scale, and the adapter's names of A and B."""

    target: str
    rank: int
    scale: float
    down: str
    up: str


class TensorEntry(Spec):
    """One tensor of an adapter: its dtype, its shape and the digest of its bytes."""

    dtype: Annotated[str, OneOf(lambda: FLOAT_DTYPES)]
    shape: list[Many]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class AdapterFacts(Facts):
    """A PEFT adapter that the plan imports, without its weights: everything that drawing the plan again needs."""

    id: str
    revision: str | None
    alpha: float
    rslora: bool
    dropout: Annotated[float, Field(ge=0, lt=1)]
    alpha_pattern: dict[str, float]
    tensors: dict[str, TensorEntry]

    @classmethod
    def of(cls, adapter: Adapter) -> AdapterFacts:
        """Return the facts of an opened adapter."""
        return cls(**plain_fields(adapter))

    @property
    def adapter(self) -> Adapter:
        """Return the adapter that the facts describe."""
        tensors = {
            name: AdapterTensor(known.dtype, tuple(known.shape), known.sha256) for name, known in self.tensors.items()
        }
        own = self.model_dump(include={"id", "revision", "alpha", "rslora", "dropout", "alpha_pattern"})
        return Adapter(**own, tensors=tensors)


def imported_modules(draft: Draft, name: str, adapter: Adapter) -> dict[int, tuple[ImportedModule, ...]]:
    """Return the modules that the adapter `name` of the plan adapts, by the draft's layers, in the layer's order.

    The adapter's layer numbers are the base's; layers that the plan inserted before are not adapted. Raises BadInput
    where a tensor fits no module of the base.
    """
    homes = {layer.base: index for index, layer in enumerate(draft.layers) if layer.base is not None}
    pairs: dict[tuple[int, str], dict[str, str]] = {}
    paths: dict[tuple[int, str], str] = {}
    for tensor in adapter.tensors:
        module, matrix = _split(name, tensor)
        layer, target = _place(name, module, draft, homes)
        if matrix in pairs.setdefault((layer, target), {}):
            raise BadInput(f"{printable(name)}: layer {layer}'s {target} is adapted twice")
        pairs[layer, target][matrix] = tensor
        paths[layer, target] = module
    if not pairs:
        raise BadInput(f"{printable(name)}: the adapter holds no tensors")
    shapes = {layer: draft.linear(homes[layer]) for layer, _ in pairs}
    order = {layer: list(modules) for layer, modules in shapes.items()}
    found: dict[int, list[ImportedModule]] = {}
    for layer, target in sorted(pairs, key=lambda key: (key[0], order[key[0]].index(key[1]))):
        down, up = _pair(name, pairs[layer, target])
        rank = _rank(name, adapter.tensors, down, up, shapes[layer][target])
        scale = adapter.scale(paths[layer, target], rank)
        found.setdefault(homes[layer], []).append(ImportedModule(target, rank, scale, down, up))
    return {index: tuple(modules) for index, modules in found.items()}


def slot_entry(modules: Sequence[ImportedModule], *, slot: int, group: int, dropout: float) -> dict[str, Any]:
    """Return the slot's entry in `config.surgery`: rank and scale of the first module, and the ones that differ."""
    first = modules[0]
    entry: dict[str, Any] = {
        "slot": slot,
        "rank": first.rank,
        "targets": [module.target for module in modules],
        "scale": first.scale,
        "dropout": dropout,
        "group": group,
    }
    if ranks := {module.target: module.rank for module in modules if module.rank != first.rank}:
        entry["ranks"] = ranks
    if scales := {module.target: module.scale for module in modules if module.scale != first.scale}:
        entry["scales"] = scales
    return entry


def slot_tensors(
    adapter: Adapter, name: str, modules: Sequence[ImportedModule], *, slot: int, dtype: str
) -> dict[str, Recipe]:
    """Return the recipes of the slot's tensors in one layer, by suffix; `name` is the plan's name of the adapter."""
    tensors = adapter.tensors
    return {
        f"{slot_name(module.target, slot)}.lora_{matrix}": Imported(
            "adapter", name, source, dtype, tensors[source].shape
        )
        for module in modules
        for matrix, source in (("A", module.down), ("B", module.up))
    }


def rounding(adapter: Adapter, dtypes: Sequence[str]) -> str:
    """Describe what is lost in the base's dtypes: `F32 values are rounded to BF16`; empty for nothing."""
    stored = sorted({tensor.dtype for tensor in adapter.tensors.values()})
    lossy = [(a, b) for a in stored for b in sorted(set(dtypes)) if a != b and (a, b) not in _WIDENING]
    return ", ".join(f"{a} values are rounded to {b}" for a, b in lossy)


def _split(name: str, tensor: str) -> tuple[str, str]:
    """Return (module, matrix) from a tensor's name: the path of the adapted module, and "A" or "B". Raises BadInput."""
    found = _TENSOR.fullmatch(unwrapped(tensor))
    if found is None:
        raise BadInput(
            f"{printable(name)}: tensor {printable(tensor)} is no A or B of a LoRA at a linear module; only such"
            " adapters fit a slot"
        )
    return found["module"], found["matrix"]


def _place(name: str, module: str, draft: Draft, homes: Mapping[int, int]) -> tuple[int, str]:
    """Return (layer, target): the base's layer that a module lies in, and the module's path within the layer.

    Raises BadInput where the draft has no such linear module in a layer.
    """
    layers, place = len(homes), layer_of(module)
    if place is None:
        raise BadInput(
            f"{printable(name)}: the adapter adapts {printable(module)}, which stands outside the decoder layers;"
            " a slot stands in them: train it without that module"
        )
    _, layer, target = place
    if layer >= layers:
        raise BadInput(
            f"{printable(name)}: the adapter adapts layer {layer}, the model has {layers} layers (0-{layers - 1}); it"
            " is for another base"
        )
    shapes = draft.linear(homes[layer])
    if target not in shapes:
        raise BadInput(
            f"{printable(name)}: the adapter adapts {printable(target)}, no linear module of a layer here that runs on"
            f" all of the layer's tokens and on no others; there are {', '.join(shapes)}: it is for another base"
        )
    return layer, target


def _pair(name: str, found: Mapping[str, str]) -> tuple[str, str]:
    """Return (A, B): the names of a module's tensors. Raises BadInput where one is missing."""
    for there, absent in (("A", "B"), ("B", "A")):
        if absent not in found:
            raise BadInput(
                f"{printable(name)}: {printable(found[there])} has no lora_{absent} beside it; was the file cut?"
            )
    return found["A"], found["B"]


def _rank(name: str, tensors: Mapping[str, AdapterTensor], down: str, up: str, shape: tuple[int, ...]) -> int:
    """Return the rank of both matrices. Raises BadInput where they do not fit the module's rows and columns."""
    rows, columns = shape
    a, b = tensors[down].shape, tensors[up].shape
    for tensor, found, fits, want in (
        (down, a, len(a) == 2 and a[0] >= 1 and a[1] == columns, f"[rank, {columns}]"),
        (up, b, len(b) == 2 and b[0] == rows, f"[{rows}, rank]"),
    ):
        if not fits:
            raise BadInput(
                f"{printable(name)}: {printable(tensor)} has shape {list(found)}, the model's module calls for {want}:"
                " the adapter is for another base"
            )
    if a[0] != b[1]:
        raise BadInput(
            f"{printable(name)}: {printable(down)} has shape {list(a)} and {printable(up)} {list(b)}: ranks differ"
        )
    return a[0]
