"""The proof of a depth growth on a twin: before and after it, the logits must be the same, bit for bit.

Everything is as it will be (order, config, what is silent) but sizes and weights; new layers hold random values where
they are not silenced. Prefill and cached generation are compared, and what an image adds to single layers. What depends
on a layer's number in the model's own code, and no setting shows, is found here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from surgeon.common.devices import one_thread
from surgeon.common.library import LOAD_FAILURES, first_line
from surgeon.errors import BadInput
from surgeon.families.family import OWN_CONFIG
from surgeon.families.shared_places import places_between
from surgeon.families.silence import some_tokens
from surgeon.families.skeleton import Skeleton
from surgeon.families.twin import stored_buffers, twin_of

if TYPE_CHECKING:
    from torch import Tensor

_NEW_SEED = 7
# What models call what they keep for later tokens, argument and output; from transformers 5.24 on nearly all `cache`.
_CACHES = ("cache", "past_key_values", "cache_params", "state")
# Of the largest logit: what sums in another order may change in float32.
_ROUNDING = 1e-5


def layer_axis(before: tuple[int, ...], after: tuple[int, ...], old: int, new: int) -> int | None:
    """The axis along which a tensor holds a part for each layer; None where its shapes tell of no such axis."""
    if len(before) != len(after):
        return None
    differing = [axis for axis, (one, other) in enumerate(zip(before, after, strict=True)) if one != other]
    if len(differing) != 1:
        return None
    axis = differing[0]
    fits = before[axis] % old == 0 and after[axis] % new == 0 and before[axis] // old == after[axis] // new
    return axis if fits else None


def prove(
    config: Mapping[str, Any],
    grown: Mapping[str, Any],
    order: Sequence[int],
    kept: Sequence[bool],
    silenced: Sequence[Mapping[str, float]],
    silent: Mapping[int, Mapping[str, float]],
    *,
    heads: int,
) -> None:
    """Grow a twin with so many heads and compare it with the one before.

    Layer `n` of the result is layer `order[n]` of the base where `kept[n]`, else a new one like it in which the tensors
    `silenced[n]` (names in the layer) have these values. Layers of the base that are `silent` have theirs before.
    Raises BadInput where a logit differs.
    """
    import torch

    base, result = twin_of(config, heads=heads), twin_of(grown, seed=_NEW_SEED, heads=heads)
    with torch.no_grad():
        for index, values in silent.items():
            held = dict(base.layers[index].named_parameters()) | stored_buffers(base.layers[index])
            for name, value in values.items():
                held[name].fill_(value)
    _fill(base, result, order, kept, silenced)
    check_same(base, result, order, kept)


def check_same(base: Skeleton, result: Skeleton, order: Sequence[int], kept: Sequence[bool]) -> None:
    """Compare the logits of a twin with those of the one that it grew out of; order and kept are as in `prove`.

    Raises BadInput where one differs.
    """
    import torch

    tokens = some_tokens(base)
    with torch.no_grad(), one_thread():
        for what, run in (("", run_prefill), (" with a cache", run_cached)):
            try:
                one, other = run(base, tokens), run(result, tokens)
            except LOAD_FAILURES as error:
                raise BadInput(
                    f"config.json: a twin of this model cannot be run{what} ({first_line(error)}); {OWN_CONFIG}"
                ) from error
            if not torch.equal(one, other):
                first = _first_apart(base, result, order, kept, tokens)
                raise BadInput(
                    f"on a twin of this model the logits{what} are not the base's: layer {first} of the output does not"
                    " get what it got before; choose other places, or `zero_init: false` to go without the promise"
                )
        before, after = (_hidden_with_image(twin, tokens) for twin in (base, result))
        if before is not None and after is not None and not torch.equal(before, after):
            raise BadInput(
                "this model adds features of images to its lowest layers, by their numbers: with an image the output"
                " would not be the base; choose places above those layers, or `zero_init: false` to go without the"
                " promise"
            )


def agree(base: Skeleton, result: Skeleton) -> bool:
    """Whether two models' logits differ by no more than sums in another order do, with and without a cache."""
    import torch

    tokens = some_tokens(base)
    with torch.no_grad():
        for run in (run_prefill, run_cached):
            one, other = run(base, tokens), run(result, tokens)
            if float((one - other).abs().max()) > _ROUNDING * float(one.abs().max()):
                return False
    return True


def check_runs(config: Mapping[str, Any], grown: Mapping[str, Any], *, heads: int) -> None:
    """Raise BadInput where a twin of `config` runs, and one of `grown`, which has other layers, does not.

    A layer may compute what others need, and a cache may need one layer of a kind, which no setting shows.
    """
    import torch

    with torch.no_grad(), one_thread():
        base, result = twin_of(config, heads=heads), twin_of(grown, heads=heads)
        for run in (run_prefill, run_cached):
            failure = _failure(run, result)
            if failure and not _failure(run, base):
                raise BadInput(
                    f"transformers cannot run this model ({failure}), as it needs something of these layers; leave one"
                    " of them in, or take out others"
                )


def _failure(run: Callable[[Skeleton, Tensor], Tensor], twin: Skeleton) -> str:
    """Why a twin cannot be run; empty where it can."""
    try:
        run(twin, some_tokens(twin))
    except LOAD_FAILURES as error:
        return first_line(error)
    return ""


def _fill(
    base: Skeleton,
    result: Skeleton,
    order: Sequence[int],
    kept: Sequence[bool],
    silenced: Sequence[Mapping[str, float]],
) -> None:
    """Give the grown twin the weights of the other; what is new keeps its own, but for what is silenced."""
    import torch

    held, shared = base.model.state_dict(), places_between(base, result, order)
    below = f"{base.stack}."
    tied = {name for name in result.model.all_tied_weights_keys if shared and name.startswith(below)}
    with torch.no_grad():
        for name, value in result.model.state_dict().items():
            if name in tied:
                continue
            if name in shared:
                value.copy_(held[shared[name][0]])
                continue
            if not name.startswith(below):
                source = held[name]
                if source.shape != value.shape:
                    source = _stretched(source, tuple(value.shape), order, len(base.layers))
                value.copy_(source)
                continue
            index, _, suffix = name.removeprefix(below).partition(".")
            n = int(index)
            if kept[n]:
                value.copy_(held[f"{below}{order[n]}.{suffix}"])
            elif suffix in silenced[n]:
                value.fill_(silenced[n][suffix])


def _stretched(value: Tensor, shape: tuple[int, ...], order: Sequence[int], count: int) -> Tensor:
    import torch

    axis = layer_axis(tuple(value.shape), shape, count, len(order))
    assert axis is not None, (value.shape, shape)
    parts = value.chunk(count, dim=axis)
    return torch.cat([parts[source] for source in order], dim=axis)


def run_prefill(twin: Skeleton, tokens: Tensor) -> Tensor:
    """Logits of whole sequences."""
    logits: Tensor = twin.model(input_ids=tokens, use_cache=False).logits
    return logits


def cache_argument(model: Any) -> str:
    """Return the name by which a model takes what was kept of earlier tokens."""
    taken = inspect.signature(getattr(model, "forward", model)).parameters
    return next((name for name in _CACHES if name in taken), "past_key_values")


def cache_of(output: Mapping[str, Any]) -> Any:
    """Return what a model's output keeps for later tokens: a cache, or what RWKV and xLSTM have in its place."""
    from surgeon.runtime.graft import cache_in

    held = dict(output.items())
    found = cache_in(held)
    return next((held[name] for name in _CACHES if held.get(name) is not None), None) if found is None else found


def run_cached(twin: Skeleton, tokens: Tensor) -> Tensor:
    """Logits of a sequence read in two parts, the second by what the first left behind, word by word."""
    import torch

    head = tokens.shape[1] - 2
    told = twin.model(input_ids=tokens[:, :head], use_cache=True)
    found: list[Tensor] = [told.logits]
    name, cache = cache_argument(twin.model), cache_of(told)
    if cache is None:
        return found[0]
    for at in range(head, tokens.shape[1]):
        told = twin.model(input_ids=tokens[:, at : at + 1], use_cache=True, **{name: cache})
        cache = cache_of(told)
        found.append(told.logits)
    return torch.cat(found, dim=1)


def _hidden_with_image(twin: Skeleton, tokens: Tensor) -> Tensor | None:
    """What the text decoder makes of a text and an image's features that go into several layers (DeepStack).

    None where the decoder takes no such features. They are random: what counts is which layer gets which.
    """
    import torch

    decoder = twin.model.get_submodule(twin.stack.rpartition(".")[0])
    taken = inspect.signature(decoder.forward).parameters
    draws = torch.Generator().manual_seed(2)
    where = torch.zeros(tokens.shape, dtype=torch.bool)
    where[:, 2:6] = True

    def features(count: int) -> list[Tensor]:
        return [torch.randn(int(where.sum()), twin.text.hidden_size, generator=draws) for _ in range(count)]

    fields = twin.model.config.to_dict()
    given: dict[str, Any]
    if "deepstack_visual_embeds" in taken:
        given = {"deepstack_visual_embeds": features(len(_found(fields, "deepstack_visual_indexes") or ()))}
    elif "deepstack_features" in taken:
        numbers = [layer for _, layer in _found(fields, "deepstack_layer_map") or ()]
        given = {"deepstack_features": dict(zip(numbers, features(len(numbers)), strict=True))}
    else:
        return None
    masks = {"visual_pos_masks": where, "vision_mask": where[..., None]}
    given |= {name: mask for name, mask in masks.items() if name in taken}
    embedded = twin.model.get_input_embeddings()(tokens)
    try:
        hidden: Tensor = decoder(inputs_embeds=embedded, use_cache=False, **given).last_hidden_state
    except LOAD_FAILURES as error:
        raise BadInput(
            f"config.json: a twin of this model cannot be run with an image ({first_line(error)}); {OWN_CONFIG}"
        ) from error
    return hidden


def _found(fields: Mapping[str, Any], key: str) -> Any:
    """A field of a config, in whichever part of it."""
    if fields.get(key):
        return fields[key]
    parts = (value for value in fields.values() if isinstance(value, Mapping))
    return next((found for part in parts if (found := _found(part, key))), None)


def _first_apart(base: Skeleton, result: Skeleton, order: Sequence[int], kept: Sequence[bool], tokens: Tensor) -> int:
    """The first kept layer of the output whose input differs from what it gets in the base."""
    import torch

    seen: list[dict[int, Tensor]] = []
    for twin in (base, result):
        inputs: dict[int, Tensor] = {}
        hooks = [
            layer.register_forward_pre_hook(_keeping(index, inputs), with_kwargs=True)
            for index, layer in enumerate(twin.layers)
        ]
        run_prefill(twin, tokens)
        for hook in hooks:
            hook.remove()
        seen.append(inputs)
    for index, (source, own) in enumerate(zip(order, kept, strict=True)):
        if own and source in seen[0] and index in seen[1] and not torch.equal(seen[0][source], seen[1][index]):
            return index
    return len(order) - 1


def _keeping(index: int, inputs: dict[int, Tensor]) -> Callable[..., None]:
    """A hook that keeps what layer `index` gets."""

    def hook(_layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.setdefault(index, (args[0] if args else kwargs["hidden_states"]).clone())

    return hook
