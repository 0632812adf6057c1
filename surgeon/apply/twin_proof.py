"""The proof of a blueprint on a twin: what it makes of a tiny model of the base's config computes what that computes.

Every tensor of the output is made as the blueprint says, by its own name, of a twin's tensors: what is copied is the
twin's, constants are the blueprint's, and all that is computed or drawn is random. The classes are those that will
load the output. So wrong names, roles, places, per-layer settings and silent tensors show before a byte is written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from surgeon.blueprint.draft import Blueprint
from surgeon.blueprint.recipes import Constant, Copy, Extended, Joined, Listed, Recipe
from surgeon.common.library import LOAD_FAILURES, first_line
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import OLD_NORMS, Anatomy, is_grafted, native_config
from surgeon.families.grafting import check_grafts, with_grafts
from surgeon.families.proof import check_same, run_cached, run_prefill
from surgeon.families.silence import some_tokens
from surgeon.families.skeleton import Skeleton
from surgeon.families.twin import one_thread, twin_of

if TYPE_CHECKING:
    from torch import Generator, Tensor

# As few as a model's code can run with.
_HEADS = (2, 4, 8, 3, 1)
_SEED, _NEW_SEED = 3, 7
# Ids of a twin before its vocabulary grows, and the most that it grows by.
_WORDS, _MORE_WORDS = 240, 16


def prove(blueprint: Blueprint, anatomy: Anatomy, config: Mapping[str, Any]) -> None:
    """Carry a blueprint that promises to be exact out on a twin of the base's `config`, and compare.

    Logits of whole sequences and of cached decoding must be equal bit for bit; with grafts in bfloat16 too, and a step
    of training must reach them. Raises BadInput where they are not, or a tensor's name is not the model's.
    """
    import torch

    before, after = dict(config), dict(blueprint.config)
    if blueprint.more_rows:
        before["vocab_size"] = min(anatomy.sizes.vocabulary, _WORDS)
        after["vocab_size"] = before["vocab_size"] + min(blueprint.more_rows, _MORE_WORDS)
    with one_thread():
        heads = _running_heads(before)
        base, result = _twin(before, heads, _SEED), _twin(after, heads, _NEW_SEED)
        with torch.no_grad():
            _silence(base, blueprint, anatomy)
            _fill(result, base, blueprint)
        if base.encoder and blueprint.native:
            _check_encoded(base, result)
        elif blueprint.more_rows:
            _check_old_words(base, result, before["vocab_size"])
        elif blueprint.native:
            layers = blueprint.layers
            check_same(base, result, [each.like for each in layers], [each.base is not None for each in layers])
        else:
            check_grafts(base, result)


def _running_heads(config: Mapping[str, Any]) -> int:
    """With how many heads a twin runs. Raises BadInput where it runs with none of these numbers."""
    import torch

    failed: Exception | None = None
    for heads in _HEADS:
        try:
            twin = _twin(config, heads, _SEED)
            with torch.no_grad():
                twin.model(input_ids=some_tokens(twin))
            return heads
        except LOAD_FAILURES as error:
            failed = failed or error
    assert failed is not None
    raise BadInput(f"a twin of this model cannot be run ({first_line(failed)}), so nothing can be proven of it")


def _twin(config: Mapping[str, Any], heads: int, seed: int) -> Skeleton:
    """A twin of a config.json, with grafts or without."""
    if not is_grafted(config):
        return twin_of(config, seed=seed, heads=heads)
    trunk = twin_of(native_config(config), seed=seed, heads=heads)
    return replace(trunk, model=with_grafts(trunk, config, heads))


def _silence(base: Skeleton, blueprint: Blueprint, anatomy: Anatomy) -> None:
    """Give layers of the twin that the plan takes out, as they are silent, what silences them."""
    held = base.model.state_dict()
    for layer in (layer for dropped in blueprint.dropped.values() for layer in dropped):
        for suffix, value in anatomy.kinds[anatomy.kind_of[layer]].silence.items():
            place = _place(anatomy.layer_name(layer, suffix), held, base)
            if place is not None:
                held[place].fill_(value)


def _fill(result: Skeleton, base: Skeleton, blueprint: Blueprint) -> None:
    """Make every tensor of the output's twin as the blueprint says.

    Raises BadInput for a tensor of the plan that the model has no place for, and one of the model that the plan lacks.
    """
    import torch

    draws = torch.Generator().manual_seed(_NEW_SEED)
    held, wanted = base.model.state_dict(), result.model.state_dict()
    made: set[str] = set()
    for output in blueprint.outputs:
        place = _place(output.name, wanted, result)
        if place is None:
            if output.new and _is_of_layer(output.name, result):
                raise BadInput(
                    f"{printable(output.name)}: the plan makes this tensor, transformers' class has no place for it"
                )
            continue
        value = _value(output.recipe, base, held, wanted[place], draws)
        if value.shape != wanted[place].shape:
            raise BadInput(
                f"{printable(output.name)}: on a twin the plan makes it of shape {list(value.shape)}, transformers'"
                f" class needs {list(wanted[place].shape)}"
            )
        wanted[place].copy_(value)
        made.add(place)
    for name in wanted.keys() - made - set(result.model.all_tied_weights_keys):
        if _is_of_layer(name, result):
            raise BadInput(f"{printable(name)}: transformers' class needs this tensor, the plan does not make it")
        # What no checkpoint of this base holds, as a head that it was saved without, is the same in both.
        if name in held and held[name].shape == wanted[name].shape:
            wanted[name].copy_(held[name])
    result.model.tie_weights()


def _value(recipe: Recipe, base: Skeleton, held: Mapping[str, Tensor], like: Tensor, draws: Generator) -> Tensor:
    """What a recipe makes of a twin's tensors; random where it computes, as nothing exact may depend on that."""
    import torch

    match recipe:
        case Copy(source) if (place := _place(source, held, base)) is not None:
            return held[place]
        case Joined() if (whole := recipe.whole) is not None:
            return _value(whole, base, held, like, draws)
        case Constant(value):
            return torch.full_like(like, value)
        case Listed(values) if like.numel() == len(values):
            return torch.tensor(values, dtype=like.dtype).reshape(like.shape)
        case Extended(of):
            old = _value(of, base, held, like, draws)
            more = torch.randn((like.shape[0] - old.shape[0], *old.shape[1:]), generator=draws)
            return torch.cat([old, more * old.std()])
    noise = torch.randn(like.shape, generator=draws)
    return (0.5 + 0.1 * noise if like.ndim < 2 else noise * like.shape[-1] ** -0.5).to(like.dtype)


def _place(name: str, held: Mapping[str, Tensor], twin: Skeleton) -> str | None:
    """What the model calls a tensor: checkpoints of a base model alone lack its prefix, and old ones have old words."""
    old = next((old for old in OLD_NORMS if name.endswith(f".{old}")), None)
    present = name if old is None else name.removesuffix(old) + OLD_NORMS[old]
    prefix = f"{twin.model.base_model_prefix}."
    tried = (present, f"{prefix}{present}", present.removeprefix(prefix))
    return next((each for each in tried if each in held), None)


def _is_of_layer(name: str, twin: Skeleton) -> bool:
    prefix = f"{twin.model.base_model_prefix}."
    return f"{prefix}{name.removeprefix(prefix)}".startswith((f"{twin.stack}.", f"{prefix}{twin.stack}."))


def _check_encoded(base: Skeleton, result: Skeleton) -> None:
    """Raise BadInput where two encoders, of which the heads may differ, make other states of a padded text."""
    import torch

    tokens = torch.cat([some_tokens(base), some_tokens(base, seed=2)])
    mask = torch.ones_like(tokens)
    mask[1, -4:] = 0
    with torch.no_grad():
        one, other = (each.model.base_model(input_ids=tokens, attention_mask=mask)[0] for each in (base, result))
    if not torch.equal(one[mask.bool()], other[mask.bool()]):
        raise BadInput("on a twin of this model the states of tokens are not the base's")


def _check_old_words(base: Skeleton, result: Skeleton, words: int) -> None:
    """Raise BadInput where the logits of the tokens that there were differ."""
    import torch

    tokens = some_tokens(base)
    with torch.no_grad():
        for what, run in (("", run_prefill), (" with a cache", run_cached)):
            if not torch.equal(run(base, tokens), run(result, tokens)[..., :words]):
                raise BadInput(f"on a twin of this model the logits of old tokens{what} are not the base's")
