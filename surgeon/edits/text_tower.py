"""The text tower of an image-text model as a causal model of its own: which class of transformers holds it.

The causal classes of transformers are tried: first the class of the tower's own type, then those with the most similar
names. A class holds the tower where its tensors equal the tower's, by name and shape, and its twin gives the logits of
the image-text model's twin, bit for bit: with a cache and without.
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from surgeon.anatomy.derivation import Derivation, kept
from surgeon.anatomy.growth import part_of
from surgeon.anatomy.names import Names, made_of, words_of
from surgeon.anatomy.running import agree
from surgeon.anatomy.skeleton import CAUSAL, Skeleton, build, classes_of
from surgeon.anatomy.twin import shrunk, twin_of_small
from surgeon.checkpoint.weights import QUANTISATION
from surgeon.common.devices import one_thread
from surgeon.common.library import LOAD_FAILURES, config_of, passed_over, quiet_transformers
from surgeon.errors import BadInput, printable

TIED = "tie_word_embeddings"
# Keys of the whole model's config that also apply to its text.
_OF_ALL = ("transformers_version", "bos_token_id", "eos_token_id", "pad_token_id")
# For these keys the whole model's value is used, even where the text's part has another one.
_DTYPES = ("dtype", "torch_dtype")
# Rotary settings for positions in an image; text has one number for each position.
_OF_IMAGES = "mrope"
_ROTARY = ("rope_parameters", "rope_scaling", "rope_theta")


@kept
def text_model(base: Derivation) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (config, names): the config.json of the text tower's causal model, and the new names of its tensors.

    `names` maps present names to new ones, without the tensors of other towers. Raises BadInput where there is no
    separate text tower, or no causal class of transformers holds it.
    """
    seen = base.seen
    config, skeleton = seen.config, seen.skeleton
    _check_tower(config, skeleton)
    told = json.dumps(config, sort_keys=True)
    made = _config_for(_causal_type(told, seen.derived.heads), config, skeleton)
    built = build(made)
    if built.shapes != (shapes := _tower(skeleton, _decoder(built))):
        odd = next((name for name, shape in shapes.items() if built.shapes.get(name) != shape), "")
        raise BadInput(
            f"{printable(odd)}: {made['architectures'][0]} holds a twin of this text tower, and not the tower itself;"
            " is config.json its own?"
        )
    return made, _renamed(skeleton, seen.names, built)


def _check_tower(config: Mapping[str, Any], skeleton: Skeleton) -> None:
    """Raise BadInput where there is no image tower, the model is quantised, or text layers attend to images."""
    shown = printable(str(config.get("model_type")))
    if not skeleton.path:
        raise BadInput(
            f"the base is a text model ({shown}) already, with no other tower to leave behind; leave `extract_text` out"
        )
    if config.get(QUANTISATION) is not None:
        raise BadInput(
            f"config.json: the model is quantised, by settings that name its modules; extract the text of the"
            f" full-precision {shown}, and quantise the output"
        )
    decoder = skeleton.stack.rpartition(".")[0]
    crossed = [name for name, _ in skeleton.model.get_submodule(decoder).named_modules() if name.endswith("cross_attn")]
    if crossed:
        raise BadInput(
            f"{printable(crossed[0])} (and {len(crossed) - 1} more) attend to images inside the text tower of this"
            f" {shown}, and no text model has such layers; use the model as it is"
        )


def _decoder(skeleton: Skeleton) -> str:
    """Return the prefix of the text decoder's tensors in memory."""
    return f"{skeleton.stack.rpartition('.')[0]}."


def _place(name: str, skeleton: Skeleton, prefix: str) -> str | None:
    """Return a tower tensor's name in a causal model whose decoder has the prefix `prefix`; None for other tensors."""
    decoder = _decoder(skeleton)
    if name.startswith(decoder):
        return prefix + name.removeprefix(decoder)
    head = next((words for words in words_of(skeleton.model) if name.startswith(words)), None)
    return None if head is None else f"lm_head.{name.removeprefix(head)}"


def _tower(skeleton: Skeleton, prefix: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tower's tensors by their names in a causal model with the decoder prefix `prefix`."""
    places = ((_place(name, skeleton, prefix), shape) for name, shape in skeleton.shapes.items())
    return {place: shape for place, shape in places if place is not None}


@lru_cache(maxsize=8)
def _causal_type(told: str, heads: int) -> str:
    """Return the model type of the causal class that holds the text tower of a config.json (JSON text `told`).

    Raises BadInput where no class holds it.
    """
    small = shrunk(json.loads(told), heads_left=heads)
    base = twin_of_small(small, seed=_SEED)
    alike: list[str] = []
    for model_type in _types_like(str(base.text.model_type)):
        try:
            made = _config_for(model_type, small, base)
            built = build(made)
            if built.path or built.shapes != _tower(base, _decoder(built)):
                continue
            if _computes_the_same(base, made):
                return model_type
            alike.append(model_type)
        except (BadInput, *LOAD_FAILURES):
            continue
    tower = printable(str(base.text.model_type))
    why = f"{alike[0]} has its tensors, and on a twin gives other logits" if alike else "none has its tensors"
    raise BadInput(
        f"no causal class of the installed transformers holds the text tower ({tower}) of this model: {why}; use the"
        " model as it is"
    )


_SEED, _OTHER_SEED = 3, 7


def _types_like(tower: str) -> Iterator[str]:
    """Yield the model types with a causal class: the tower's own, then by similarity of names."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    words = tower.replace("_text", "").replace("_model", "")

    def likeness(model_type: str) -> tuple[bool, float]:
        """Return the sort key of a model type: the tower's own type first, then the most similar names."""
        return model_type != tower, -difflib.SequenceMatcher(None, words, model_type).ratio()

    yield from sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, key=likeness)


def _config_for(model_type: str, config: Mapping[str, Any], skeleton: Skeleton) -> dict[str, Any]:
    """Return the config.json of a causal model of this type with the settings of the image-text model's tower."""
    from transformers import CONFIG_MAPPING

    part = part_of(config, skeleton.path)
    told = skeleton.text.to_dict()
    made = copy.deepcopy(part)
    if model_type != skeleton.text.model_type:
        # State the defaults of the tower's class wherever the other class has other defaults.
        made = {key: value for key, value in made.items() if key not in _ROTARY}
        made |= {key: _for_text(told[key]) for key in _ROTARY if told.get(key) is not None}
        with quiet_transformers():
            other = config_of({**made, "model_type": model_type}, CONFIG_MAPPING[model_type]).to_dict()
        made |= {
            key: told[key]
            for key, value in other.items()
            if key in told
            and key not in (*part, *_ROTARY, *_OF_ALL, *_DTYPES, "model_type", "architectures")
            and told[key] != value
        }
    made |= {key: config[key] for key in _OF_ALL if key not in made and config.get(key) is not None}
    if dtypes := {key: config[key] for key in _DTYPES if config.get(key) is not None}:
        made = {key: value for key, value in made.items() if key not in _DTYPES} | dtypes
    tied = any(name.startswith(words_of(skeleton.model)) for name in skeleton.model.all_tied_weights_keys)
    return made | {
        "model_type": model_type,
        "architectures": list(classes_of(model_type, CAUSAL)[:1]),
        TIED: tied,
    }


def _for_text(rotary: Any) -> Any:
    """Return rotary settings without the settings for positions in an image, at any depth."""
    if not isinstance(rotary, Mapping):
        return rotary
    return {key: _for_text(value) for key, value in rotary.items() if not key.startswith(_OF_IMAGES)}


def _computes_the_same(base: Skeleton, config: Mapping[str, Any]) -> bool:
    """Return whether a causal config's twin, given the weights of the image-text twin, gives the same logits."""
    import torch

    result = twin_of_small(config, seed=_OTHER_SEED)
    held = base.model.state_dict()
    places = {_place(name, base, _decoder(result)): name for name in held}
    with torch.no_grad(), one_thread():
        for name, value in result.model.state_dict().items():
            value.copy_(held[places[name]])
        result.model.tie_weights()
        return agree(base, result, rounding=0.0)


def _renamed(skeleton: Skeleton, names: Names, built: Skeleton) -> dict[str, str]:
    """Return the tower's tensors on disk with their names in the causal model `built`; other tensors are left out.

    Raises BadInput where transformers would read a tensor differently under its new name.
    """
    prefix, stem = _decoder(built), f"{built.stack}."
    found: dict[str, str] = {}
    places: dict[str, tuple[str, ...]] = {name: (place,) for name, place in names.outer.items() if place}
    for index, layer in enumerate(names.layers):
        for suffix, targets in layer.items():
            found[f"{names.stem}{index}.{suffix}"] = f"{stem}{index}.{suffix}"
            places[f"{names.stem}{index}.{suffix}"] = tuple(f"{skeleton.stack}.{index}.{t}" for t in targets)
    for index, suffixes in names.beyond.items():
        found |= {f"{names.stem}{index}.{suffix}": f"{stem}{index}.{suffix}" for suffix in suffixes}
    ignored = passed_over(built.model)
    for name, place in names.outer.items():
        other = _place(place, skeleton, prefix) if place else None
        if other is not None:
            found[name] = other
        elif not place and ignored(name):
            # Layers that predict further tokens, which no class of transformers runs here.
            found[name] = name
    covered = {_place(place, skeleton, prefix) for held in places.values() for place in held}
    lacking = sorted(built.shapes.keys() - covered - built.model.all_tied_weights_keys.keys())
    if lacking:
        raise BadInput(
            f"{printable(lacking[0])}: no shard has this tensor, and the text model needs it; save the model with its"
            " language head, and operate on that"
        )
    made = made_of(built.model, found.values())
    before = made_of(skeleton.model, found)
    for name, other in found.items():
        targets = tuple(_place(target, skeleton, prefix) or "" for target in places.get(name, ()))
        same = (made[other].names, made[other].operations) == (targets, before[name].operations)
        if targets and not same:
            raise BadInput(
                f"{printable(name)}: a {printable(str(built.model.config.model_type))} stores it in another layout, and"
                f" would not read these bytes as {printable(other)}; load the text model with transformers, and save it"
            )
    return found
