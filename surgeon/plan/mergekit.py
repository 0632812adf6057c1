"""A config of mergekit that stacks one model's own layers, taken as the plan that it is."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from surgeon.common.checked_yaml import check_yaml
from surgeon.common.formatting import listed
from surgeon.common.yaml import Place
from surgeon.errors import BadInput, printable
from surgeon.operations.operation import Spec
from surgeon.operations.stack_layers import Slice

MERGEKIT_KEYS = ("merge_method", "slices", "base_model", "experts", "modules", "models")
_HABITS = {
    "parameters": "`insert_layers` with `init: copy`, whose `zero_init` silences copies as `scale` 0 does",
    "tokenizer_source": "left out: the base's tokenizer goes along",
}


class _Source(Spec):
    model: str
    layer_range: Slice


class _Part(Spec):
    sources: Annotated[list[_Source], Field(min_length=1)]


class _Passthrough(Spec):
    slices: Annotated[list[_Part], Field(min_length=1)]
    merge_method: str
    dtype: str | None = None


def of_mergekit(data: dict[str, Any], lines: dict[Place, int], source: str) -> dict[str, Any]:
    """Return the plan that a mergekit config is, and its places in `lines`. Raises BadInput where it merges models."""
    merges = data.get("merge_method") != "passthrough"
    config = None if merges else check_yaml(_Passthrough, data, lines, source, what="mergekit config", habits=_HABITS)
    stacked = [] if config is None else [each for part in config.slices for each in part.sources]
    # What is behind a plus is an adapter.
    models = {name for each in stacked for name in each.model.split("+")}
    if config is None or len(models) != 1 or len(stacked) != len(config.slices):
        raise BadInput(
            f"{printable(source)}: a mergekit config that merges models{' ' if models else ''}{listed(sorted(models))};"
            " surgeon grows one model and merges none, so merge with mergekit, then grow what it wrote"
        )
    lines["operations", 0] = lines["slices",]
    slices = [each.layer_range for each in stacked]
    return {"surgeon": 1, "operations": [{"op": "stack_layers", "slices": slices, "dtype": config.dtype}]}
