"""Where the tensors of blocks that layers share stand in a model of other layers: found on twins.

A block may hold tensors for each layer that runs it, numbered in it (adapters of Zamba 2): with more layers they are
others, and have other numbers. Which of a block's tensors a layer computes with, its gradients show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from surgeon.common.devices import one_thread
from surgeon.errors import BadInput, printable
from surgeon.families.shared import shared_in, within
from surgeon.families.silence import captured
from surgeon.families.skeleton import Skeleton
from surgeon.families.twin import twin_of

# By its name in a grown model: the tensor's name in the model before, and the layers that compute with it.
Places = dict[str, tuple[str, tuple[int, ...]]]


def shared_places(
    config: Mapping[str, Any],
    grown: Mapping[str, Any],
    order: Sequence[int],
    outer: Mapping[str, str],
    stem: str,
    *,
    heads: int,
) -> Places:
    """The tensors of shared blocks in a model of the config `grown`, by name on disk, and what each is in the base.

    Layer `n` is as layer `order[n]` of the base, whose tensors outside the layers `outer` are, by name on disk, by the
    name in memory; layers are stored as `{stem}{i}.…`. Raises BadInput where a block is not stored once, under the
    model's own names, or what layers use cannot be told.
    """
    base = twin_of(config, heads=heads)
    found = places_between(base, twin_of(grown, heads=heads), order)
    stack = f"{base.stack}."
    named = {target: name for name, target in outer.items() if target.startswith(stack)}
    blocks = shared_in(base)
    owners = {str(owner) for owner in blocks.owner} if blocks is not None else set()
    odd = [
        name
        for target, name in named.items()
        if name != stem + target.removeprefix(stack) or target.removeprefix(stack).partition(".")[0] not in owners
    ]
    odd += [source for source, _ in found.values() if source not in named]
    if odd:
        raise BadInput(
            f"{printable(odd[0])}: a block that several layers run is not stored once, under the name that it has in"
            " the lowest of them, so other layers cannot be described; save the model with transformers once, or use"
            " operations that leave the layers as they are"
        )
    return {stem + name.removeprefix(stack): (named[source], users) for name, (source, users) in sorted(found.items())}


def places_between(base: Skeleton, result: Skeleton, order: Sequence[int]) -> Places:
    """The same of two twins, by names in memory: layer `n` of the second is as layer `order[n]` of the first.

    Empty where no layers share a block. Raises BadInput where the twins' blocks do not correspond.
    """
    shared = shared_in(base)
    if shared is None:
        return {}
    found = shared_in(result, shared.paths)
    before, after = _used(base, shared.paths), _used(result, shared.paths)
    sizes, larger = (_shapes(each) for each in (base, result))
    places: dict[str, tuple[str, list[int]]] = {}
    for index, source in enumerate(order):
        owner, old = found.owner[index] if found is not None else None, shared.owner[source]
        if owner is None or old is None:
            continue
        pairs = list(zip(before[source], after[index], strict=False))
        whole = [(f"{result.stack}.{owner}.{new}", f"{base.stack}.{old}.{was}") for was, new in pairs]
        fits = len(before[source]) == len(after[index]) and all(larger[one] == sizes[two] for one, two in whole)
        for name, was in whole:
            held, users = places.setdefault(name, (was, []))
            users.append(index)
            fits = fits and held == was
        if not fits:
            raise BadInput(
                f"on twins layer {index} computes with other tensors of a shared block than layer {source} of the base"
                " does, so the layers of this model cannot change; use operations that leave them as they are"
            )
    return {name: (was, tuple(users)) for name, (was, users) in places.items()}


def _shapes(twin: Skeleton) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in twin.model.state_dict().items()}


def _used(twin: Skeleton, paths: Sequence[str]) -> dict[int, list[str]]:
    """Of each layer that has a block at `paths`, the block's tensors that its output depends on, in their order."""
    import torch

    held = {
        index: {name: value for name, value in layer.named_parameters(remove_duplicate=False) if within(name, paths)}
        for index, layer in enumerate(twin.layers)
    }
    runs = captured(twin, [index for index, tensors in held.items() if tensors])
    used: dict[int, list[str]] = {}
    for index, run in runs.items():
        draws = torch.Generator().manual_seed(0)
        with one_thread(), torch.enable_grad():
            output = run.output()
            (output * torch.randn(output.shape, generator=draws)).sum().backward()
        used[index] = [n for n, value in held[index].items() if value.grad is not None and bool(value.grad.any())]
        for parameter in twin.model.parameters():
            parameter.grad = None
    return used
