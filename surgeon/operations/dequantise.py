"""`dequantise`: the numbers that quantised tensors stand for, in bfloat16.

transformers multiplies a number of FP8 (in blocks) or of four bits (MXFP4) by its scale when it loads such a model in
full precision. Here the products are stored, each rounded once, and config.json no longer says that they are quantised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft, Outer
from surgeon.blueprint.recipes import Copy, Dequantised, Recipe
from surgeon.checkpoint.header import QUANTISED_DTYPES, TensorInfo
from surgeon.checkpoint.weights import QUANTISATION, quantisation
from surgeon.errors import BadInput, printable
from surgeon.families.quantised import is_scale, packed_of
from surgeon.operations.operation import Operation, Paper, TrainingDefaults

# What transformers makes of the numbers, and what they are stored in.
_DTYPE, _STORED = "bfloat16", "BF16"


class Dequantise(Operation):
    """The numbers that quantised tensors stand for, in bfloat16, as transformers computes them."""

    papers: ClassVar[tuple[Paper, ...]] = (
        Paper(
            "rouhani2023microscaling",
            "Rouhani, Bita Darvish and Zhao, Ritchie and More, Ankit and Hall, Mathew and others",
            "Microscaling Data Formats for Deep Learning",
            2023,
            "2310.10537",
        ),
    )
    training: ClassVar[TrainingDefaults] = TrainingDefaults(
        "ours, no paper's: nothing is new, so nothing trains", lr=1e-5
    )

    op: Literal["dequantise"]

    def edit(self, draft: Draft, facts: None) -> OperationRecord:
        """Put products in the place of quantised tensors and their scales, in layers, outside and above them."""
        settings = _check(draft)
        config, number, made = draft.config, draft.number, 0
        for index, layer in enumerate(draft.layers):
            draft.open(index)
            computed = [suffix for suffix, recipe in layer.tensors.items() if isinstance(recipe, Dequantised)]
            layer.rewritten |= dict.fromkeys(computed, number)
            made += len(computed)
        outside = _opened(config, draft.anatomy.outer)
        above = [_opened(config, tensors) for tensors in draft.anatomy.beyond]
        draft.outer, *draft.beyond = (
            {name: Outer(recipe, number if isinstance(recipe, Dequantised) else None) for name, recipe in each.items()}
            for each in (outside, *above)
        )
        made += sum(isinstance(recipe, Dequantised) for each in (outside, *above) for recipe in each.values())
        _check_all(draft)
        draft.converted = {key: value for key, value in config.items() if key != QUANTISATION}
        method = "MXFP4" if settings["quant_method"] == "mxfp4" else "FP8"
        return OperationRecord(
            op=self.op,
            matched=f"{made:,} {method} tensors become {_DTYPE}, without scales",
            claim=Claim(
                "exact", f"its numbers are those that transformers dequantises to {_DTYPE}, and so are its logits"
            ),
            trains="new",
        )


def _check(draft: Draft) -> Mapping[str, Any]:
    """The base's settings. Raises BadInput where there is nothing to dequantise, or another operation is in the way."""
    if draft.records:
        raise BadInput("a model is dequantised by a plan of its own: apply the operations before it first")
    settings = quantisation(draft.config)
    if settings is None:
        raise BadInput(f"config.json: no `{QUANTISATION}`, so nothing is quantised here; leave `dequantise` out")
    if draft.bank is not None or any(layer.grafts for layer in draft.layers):
        raise BadInput("the model carries grafts beside quantised layers; dequantise its base and graft onto that")
    parts = [draft.config, *(part for part in draft.config.values() if isinstance(part, Mapping))]
    for found in (part.get(key) for part in parts for key in ("dtype", "torch_dtype")):
        if found not in (None, _DTYPE):
            raise BadInput(
                f"config.json: dtype {printable(str(found), 40)}: surgeon dequantises to {_DTYPE} alone, in which such"
                " models are published; is config.json another model's?"
            )
    return settings


def _opened(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, Recipe]:
    """Tensors that are in no layer of the stack, by name; quantised ones as numbers, without scales."""
    packed = packed_of(config, {name: (name,) for name in tensors}, tensors)
    made: dict[str, Recipe] = {}
    for name, info in tensors.items():
        if (found := packed.get(name)) is not None:
            weight, scales = Copy.of(info), Copy.of(tensors[found.scales])
            made[found.suffix] = Dequantised(weight, scales, found.block, _STORED, found.shape)
        elif not is_scale(config, name):
            made[name] = Copy.of(info)
    return made


def _check_all(draft: Draft) -> None:
    """Raise BadInput where a tensor is quantised still."""
    held = [recipe for layer in draft.layers for recipe in layer.tensors.values()]
    held += [each.recipe for tensors in (draft.outer, *draft.beyond) for each in tensors.values()]
    for recipe in held:
        if isinstance(recipe, Copy) and recipe.dtype in QUANTISED_DTYPES:
            raise BadInput(
                f"{printable(recipe.source or 'a tensor')}: {recipe.dtype}, which surgeon moves as bytes but does not"
                " dequantise (two numbers of four bits in a byte of an FP8 checkpoint)"
            )
