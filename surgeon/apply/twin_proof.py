"""The proof of a blueprint on a twin: what it makes of a tiny model of the base's config computes what that computes.

Every tensor of the output is made as the blueprint says, by its own name, of a twin's tensors: what is copied is the
twin's, constants are the blueprint's, and all that is computed or drawn is random. The classes are those that will
load the output. So wrong names, roles, places, per-layer settings and silent tensors show before a byte is written.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgeon.blueprint.blueprint import Blueprint
from surgeon.blueprint.recipes import HEAD_BLOCK, Constant, Copy, Joined, KeptRows, Means, Recipe
from surgeon.checkpoint.header import TensorInfo
from surgeon.checkpoint.pieces import Span
from surgeon.checkpoint.weights import SINGLE_FILE
from surgeon.common.devices import one_thread
from surgeon.common.library import LOAD_FAILURES, first_line, quiet_transformers
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import OLD_NORMS, Anatomy
from surgeon.families.grafted_config import is_grafted, native_config
from surgeon.families.grafting import check_grafts, with_grafts
from surgeon.families.names import as_loaded, made_of, under_base
from surgeon.families.proof import agree, check_same, run_cached, run_prefill
from surgeon.families.silence import some_tokens
from surgeon.families.skeleton import Skeleton
from surgeon.families.twin import twin_of
from surgeon.families.vocabulary import with_vocabulary

if TYPE_CHECKING:
    from torch import Generator, Tensor

# As few as a model's code can run with.
_HEADS = (2, 4, 8, 3, 1)
SEEDS = 3, 7
# Ids of a twin before its vocabulary grows, and the most that it grows by.
_WORDS, _MORE_WORDS = 240, 16
_EXPERT = re.compile(r"\.experts\.[0-9]+\.")
# Of a graft, a multiple of what kernels take at once.
_NEURONS = 64


def prove_blueprint(blueprint: Blueprint, anatomy: Anatomy, config: Mapping[str, Any]) -> None:
    """Carry a blueprint that promises to be exact out on a twin of the base's `config`, and compare.

    Logits of whole sequences and of cached decoding must be equal bit for bit; with grafts in bfloat16 too, and a step
    of training must reach them. Raises BadInput where they are not, or a tensor's name is not the model's.
    """
    import torch

    before, after = dict(config), dict(blueprint.config)
    words = min(anatomy.sizes.vocabulary, _WORDS)
    if blueprint.new_rows:
        before = with_vocabulary(before, anatomy, words)
        after = with_vocabulary(after, anatomy, words + min(len(blueprint.new_rows), _MORE_WORDS))
    if blueprint.kept_tokens is not None:
        before = with_vocabulary(before, anatomy, words)
        after = with_vocabulary(after, anatomy, len(_staying(words)))
    if "head_dim" in after and "head_dim" not in before:
        # A class that states it, as the output's does, is shrunk otherwise than one that does not.
        before["head_dim"] = after["head_dim"]
    with one_thread():
        heads, base = running_twin(before)
        result = _twin(after, heads, SEEDS[1])
        with torch.no_grad():
            if is_grafted(before):
                _train(base, native_config(before), heads)
            _silence(base, blueprint, anatomy)
            if not blueprint.converted:
                _fill(result, base, blueprint, tensors_of(anatomy))
            else:
                _fill_converted(result, base, blueprint, tensors_of(anatomy))
        # An encoder that gets a head puts out something else.
        if base.encoder and (blueprint.native or after.get("architectures") != before.get("architectures")):
            _check_encoded(base, result)
        elif blueprint.new_rows:
            _check_old_words(base, result, words)
        elif blueprint.kept_tokens is not None:
            _check_kept_words(base, result, words)
        elif blueprint.native:
            layers = blueprint.layers
            try:
                check_same(base, result, [each.like for each in layers], [each.base is not None for each in layers])
            except BadInput:
                # A class that fuses other projections multiplies matrices of other widths, which on a model as small as
                # a twin kernels sum in another order; `verify` compares the bits of the real ones.
                if not blueprint.converted or not agree(base, result):
                    raise
        else:
            check_grafts(base, result)


def prove_rows(anatomy: Anatomy, config: Mapping[str, Any], more: int) -> None:
    """Give a twin of a derived type `more` ids, or (0) take some from it, and compare the logits of the others.

    Raises BadInput where they differ, or something else than embeddings and output head has another shape then.
    """
    import torch

    native, words = native_config(config), min(anatomy.sizes.vocabulary, _WORDS)
    before = with_vocabulary(native, anatomy, words)
    kept = list(range(words)) if more else _staying(words)
    after = with_vocabulary(native, anatomy, len(kept) + min(more, _MORE_WORDS))
    with one_thread():
        heads, base = running_twin(before)
        result = _twin(after, heads, SEEDS[1])
        held = base.model.state_dict()
        for name, value in result.model.state_dict().items():
            old = held[name]
            if old.shape != value.shape and (not old.ndim or old.shape[1:] != value.shape[1:]):
                raise BadInput(f"{printable(name)}: has another shape in a model of other ids; these cannot change")
            with torch.no_grad():
                (value[: len(kept)] if old.shape != value.shape else value).copy_(
                    old[kept] if old.shape != value.shape else old
                )
        if more:
            _check_old_words(base, result, words)
        else:
            _check_kept_words(base, result, words)


def running_twin(config: Mapping[str, Any]) -> tuple[int, Skeleton]:
    """A twin that runs, and how many heads it has. Raises BadInput where none of these numbers will do."""
    import torch

    failed: Exception | None = None
    for heads in _HEADS:
        try:
            twin = _twin(config, heads, SEEDS[0])
            with torch.no_grad():
                twin.model(input_ids=some_tokens(twin))
            return heads, twin
        except LOAD_FAILURES as error:
            failed = failed or error
    assert failed is not None
    raise BadInput(f"a twin of this model cannot be run ({first_line(failed)}), so nothing can be proven of it")


def _twin(config: Mapping[str, Any], heads: int, seed: int) -> Skeleton:
    """A twin of a config.json, with grafts or without."""
    if not is_grafted(config):
        return twin_of(config, seed=seed, heads=heads)
    trunk = twin_of(native_config(config), seed=seed, heads=heads)
    return replace(trunk, model=with_grafts(trunk, _with_small_grafts(config), heads))


def _with_small_grafts(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with grafts of few neurons: a share of a large model's FFN is many times a twin's width."""
    surgery = {
        key: [
            entry | {"size": min(entry["size"], _NEURONS)} if isinstance(entry.get("size"), int) else entry
            for entry in entries
        ]
        if isinstance(entries, list) and all(isinstance(entry, Mapping) for entry in entries)
        else entries
        for key, entries in config["surgery"].items()
    }
    return {**config, "surgery": surgery}


def _train(base: Skeleton, trunk: Mapping[str, Any], heads: int) -> None:
    """Give matrices of a base's own grafts values that training may have left: newborn, they would hide much."""
    import torch

    native = twin_of(trunk, seed=SEEDS[0], heads=heads).model.state_dict().keys()
    draws = torch.Generator().manual_seed(SEEDS[0])
    for name, value in base.model.named_parameters():
        if name not in native and value.ndim > 1:
            value.copy_(torch.randn(value.shape, generator=draws) * value.shape[-1] ** -0.5)


def _silence(base: Skeleton, blueprint: Blueprint, anatomy: Anatomy) -> None:
    """Give layers of the twin that the plan takes out, as they are silent, what silences them."""
    held = base.model.state_dict()
    for layer in (layer for dropped in blueprint.dropped.values() for layer in dropped):
        for suffix, value in anatomy.kinds[anatomy.kind_of[layer]].silence.items():
            place = place_in(anatomy.layer_name(layer, suffix), held, base)
            if place is not None:
                held[place].fill_(value)


def _fill(result: Skeleton, base: Skeleton, blueprint: Blueprint, stored: Mapping[str, TensorInfo]) -> None:
    """Make every tensor of the output's twin as the blueprint says; `stored` are the base's tensors.

    Raises BadInput for a tensor of the plan that the model has no place for, and one of the model that the plan lacks.
    """
    import torch

    draws = torch.Generator().manual_seed(SEEDS[1])
    held, wanted = base.model.state_dict(), result.model.state_dict()
    made: set[str] = set()
    for output in blueprint.outputs:
        place = place_in(output.name, wanted, result)
        if place is None:
            if output.new and _is_of_layer(output.name, result):
                raise BadInput(
                    f"{printable(output.name)}: the plan makes this tensor, transformers' class has no place for it"
                )
            continue
        value = value_of(output.recipe, base, held, stored, wanted[place], draws)
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


def tensors_of(anatomy: Anatomy) -> dict[str, TensorInfo]:
    """The base's tensors by name."""
    held = [anatomy.outer, anatomy.bank, *anatomy.layers, *anatomy.grafted, *anatomy.beyond]
    return {info.name: info for tensors in held for info in tensors.values()}


def _fill_converted(result: Skeleton, base: Skeleton, blueprint: Blueprint, stored: Mapping[str, TensorInfo]) -> None:
    """The same of an output of another class, for which transformers converts what is stored.

    Raises BadInput where a tensor of the plan is none of the checkpoint's, or the other way round.
    """
    import torch

    draws = torch.Generator().manual_seed(SEEDS[1])
    held, wanted = saved(base), saved(result)
    made: dict[str, Tensor] = {}
    for output in blueprint.outputs:
        place = place_in(output.name, wanted, result)
        if place is not None:
            made[place] = value_of(output.recipe, base, held, stored, wanted[place], draws)
        elif output.new and place_in(_of_first_expert(output.name), wanted, result) is None:
            raise BadInput(
                f"{printable(output.name)}: the plan makes this tensor, transformers' class has no place for it"
            )
    if lacking := sorted(wanted.keys() - made):
        raise BadInput(f"{printable(lacking[0])}: transformers' class needs this tensor, the plan does not make it")
    load_into(result, made)


def load_into(twin: Skeleton, stored: Mapping[str, Tensor]) -> None:
    """Give a twin all these tensors, by names on disk, as transformers loads them; ties are tied again."""
    model, tied = twin.model, set(twin.model.all_tied_weights_keys)
    parameters = {name: value for name, value in model.named_parameters() if name not in tied}
    for name, value in as_loaded(model, stored, parameters).items():
        parameters[name].copy_(value)
    buffers = dict(model.named_buffers())
    for name, found in made_of(model, stored).items():
        if not found.converted and found.names[0] in buffers:
            buffers[found.names[0]].copy_(stored[name])
    model.tie_weights()


def _of_first_expert(name: str) -> str:
    """The name of the same tensor of the first expert: a twin has fewer than the plan may make."""
    return _EXPERT.sub(".experts.0.", name)


def saved(twin: Skeleton) -> dict[str, Tensor]:
    """A twin's tensors by their names on disk, as transformers writes them."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory(prefix="surgeon-twin-") as folder, quiet_transformers():
        twin.model.save_pretrained(folder)
        return dict(load_file(Path(folder) / SINGLE_FILE))


def value_of(
    recipe: Recipe,
    base: Skeleton,
    held: Mapping[str, Tensor],
    stored: Mapping[str, TensorInfo],
    like: Tensor,
    draws: Generator,
) -> Tensor:
    """What a recipe makes of a twin's tensors; random where it computes, as nothing exact may depend on that."""
    import torch

    match recipe:
        case KeptRows(tensor=tensor):
            rows = held_tensor(tensor, base, held)
            return rows[_staying(len(rows))]
        case Copy(source=str(source)):
            return held_tensor(source, base, held)
        case Copy(spans) if recipe.trains is False or all(span.nbytes == stored[span.tensor].nbytes for span in spans):
            parts = [_share(span, held_tensor(span.tensor, base, held), stored[span.tensor]) for span in spans]
            # Experts are as wide in every twin, whatever share of its FFN is theirs; theirs train, and may be any.
            if recipe.trains is False or sum(part.numel() for part in parts) == like.numel():
                return torch.cat(parts, dim=1).reshape(like.shape)
        case Constant(tuple(values)) if like.numel() == len(values):
            return torch.tensor(values, dtype=like.dtype).reshape(like.shape)
        case Constant(value) if not isinstance(value, tuple):
            return torch.full_like(like, value)
        case Joined(parts=(_, Means(of), *_)):
            old = value_of(of, base, held, stored, like, draws)
            more = torch.randn((like.shape[0] - old.shape[0], *old.shape[1:]), generator=draws)
            return torch.cat([old, more * old.std()])
    noise = torch.randn(like.shape, generator=draws)
    return (0.5 + 0.1 * noise if like.ndim < 2 else noise * like.shape[-1] ** -0.5).to(like.dtype)


def held_tensor(source: str, base: Skeleton, held: Mapping[str, Tensor]) -> Tensor:
    """The twin's tensor that stands for the base's of this name."""
    place = place_in(source, held, base)
    if place is None:
        raise BadInput(f"{printable(source)}: transformers' class has no place for this tensor of the base")
    return held[place]


def _share(span: Span, twins: Tensor, info: TensorInfo) -> Tensor:
    """The same share of the twin's tensor as `span` is of the base's, which `info` describes: a row for each run.

    One run is of whole rows, one behind the other. Runs of every row, or of every group of rows, are a part of one
    axis: the columns of a matrix that belong to a layer, say.
    """
    each, end = info.nbytes // span.count, span.offset + span.length
    for axis, size in enumerate(twins.shape):
        bounds = [divmod(edge * size, each) for edge in (span.offset, end)]
        parts = math.prod(info.shape[:axis]) == span.count and span.step in (0, each) and end <= each
        if parts and not any(rest for _, rest in bounds):
            (first, _), (stop, _) = bounds
            return twins.narrow(axis, first, stop - first).reshape(math.prod(twins.shape[:axis]), -1)
    raise BadInput(
        f"{printable(span.tensor)}: bytes {span.offset} to {end} of it, {span.count} times, are no whole rows or"
        " columns of a twin, so nothing can be proven of them"
    )


def place_in(name: str, held: Mapping[str, Tensor], twin: Skeleton) -> str | None:
    """What the model calls a tensor: checkpoints of a base model alone lack its prefix, and old ones have old words."""
    old = next((old for old in OLD_NORMS if name.endswith(f".{old}")), None)
    present = name if old is None else name.removesuffix(old) + OLD_NORMS[old]
    prefix = f"{twin.model.base_model_prefix}."
    tried = (present, f"{prefix}{present}", present.removeprefix(prefix))
    found = next((each for each in tried if each in held), None)
    other = under_base(twin.model, present) if found is None else present
    return other if other in held and found is None else found


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


def _staying(words: int) -> list[int]:
    """The ids of a twin that stay where some go: as many as leave no logit alone at the end (`HEAD_BLOCK`)."""
    kept = [number for number in range(words) if number % 3]
    return kept[: len(kept) - len(kept) % HEAD_BLOCK]


def _check_kept_words(base: Skeleton, result: Skeleton, words: int) -> None:
    """Raise BadInput where the logits of the tokens that stayed differ, on texts of such tokens."""
    import torch

    kept = torch.tensor(_staying(words))
    tokens = some_tokens(result)
    with torch.no_grad():
        for what, run in (("", run_prefill), (" with a cache", run_cached)):
            if not torch.equal(run(base, kept[tokens])[..., kept], run(result, tokens)):
                raise BadInput(f"on a twin of this model the logits of tokens that stay{what} are not the base's")


def _check_old_words(base: Skeleton, result: Skeleton, words: int) -> None:
    """Raise BadInput where the logits of the tokens that there were differ."""
    import torch

    tokens = some_tokens(base)
    with torch.no_grad():
        for what, run in (("", run_prefill), (" with a cache", run_cached)):
            if not torch.equal(run(base, tokens), run(result, tokens)[..., :words]):
                raise BadInput(f"on a twin of this model the logits of old tokens{what} are not the base's")
