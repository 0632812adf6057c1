"""How much memory an execution takes, estimated from its blueprint."""

from __future__ import annotations

from surgeon.blueprint.blueprint import Blueprint
from surgeon.blueprint.recipes import Predicted
from surgeon.blueprint.shards import group_by_layer
from surgeon.checkpoint.folder import MOST_AHEAD

# What a process that only moves bytes takes, interpreter included.
_STREAMING_MEMORY = 90_000_000
_TORCH_MEMORY = 450_000_000


def peak_memory(blueprint: Blueprint, *, runs_twin: bool) -> int:
    """An estimate, in bytes: the interpreter, and the largest working set of a recipe that computes, or a twin's."""
    computed = [output.recipe for output in blueprint.outputs if output.computed]
    if not computed:
        return _STREAMING_MEMORY if blueprint.native and not runs_twin else _TORCH_MEMORY
    # Two sources and a result in float32 and one in the tensor's dtype; transport adds the cost (rows × rows),
    # the lower source after T_in, and the map of the attention output that stays for gate and up.
    largest = max(recipe.working_set for recipe in computed)
    # Maps of whole heads are a number for each pair of heads.
    rows = [c.stop - c.start for c in blueprint.couplings.values() if c.whole_heads is None]
    maps = sorted((4 * n * n for n in rows), reverse=True)
    # One layer's sources, read ahead, and finished tensors that wait to be written.
    new = [[o for o in layer if o.computed] for layer in group_by_layer(blueprint.outputs)]
    ahead = min(2 * max(sum(o.nbytes for o in layer) for layer in new), MOST_AHEAD)
    waiting = ahead + 3 * max(o.nbytes for layer in new for o in layer)
    # U and the network of every module that is predicted are kept from one new layer to the next.
    networks = {r.network: r for r in computed if isinstance(r, Predicted)}
    kept = sum(recipe.network_memory for recipe in networks.values())
    return _TORCH_MEMORY + largest + kept + (2 * maps[0] if maps else 0) + waiting
