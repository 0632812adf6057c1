"""The config.json of a model with grafts, and that of its trunk, the model without grafts.

A checkpoint that carries grafts is read as its native trunk: its `model_type` is `upcycled_<family>`, its
`config.surgery` lists which grafts are where, and its `num_hidden_layers` counts trunk and branches (a branch is
numbered like a layer after the trunk, so that caches are allocated for it).

Some models that also read images are published with their text settings at the top level (flat), which transformers
reads as `text_config`. In a config that has both forms only the nested one would be read, so surgery writes the whole
config in the nested form.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from surgeon.anatomy.family import MOST_LAYERS
from surgeon.checkpoint.weights import QUANTISATION
from surgeon.errors import BadInput, printable
from surgeon.grafts.checks import check_surgery
from surgeon.grafts.composition import PREFIX, Composition, composition_of, short_name, upcycled
from surgeon.grafts.registry import GRAFTS, kinds
from surgeon.runtime.spread import for_each_layer

TEXT = "text_config"
# The types whose flat and nested form transformers reads; a test compares this list with transformers.
FLAT = frozenset({"fuyu", "glm5_next", "paddleocr_vl", "qwen2_5_vl", "qwen2_vl"})
# Fields that apply to the whole model at the top level: those of every config, of images and sounds, and of the code.
_WHOLE = frozenset(
    {
        *("architectures", "auto_map", "dtype", "id2label", "is_encoder_decoder", "label2id", "model_type"),
        *("num_channels", "output_hidden_states", "problem_type", "return_dict", "tie_word_embeddings", "torch_dtype"),
        *("transformers_version", "chunk_size_feed_forward", QUANTISATION),
    }
)
_BESIDE = re.compile(r"(image|video|vision|audio|patch)_.*|.*_config|_.*")
# The defaults of the flat form that differ from those of the nested form.
_LEFT_OUT: dict[str, dict[str, Any]] = {"fuyu": {"partial_rotary_factor": 0.5}}


def nested(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with its text settings in `text_config`; unchanged where it is nested or has no such
    settings.
    """
    kind = config.get("model_type")
    moved = [key for key in config if key not in _WHOLE and not _BESIDE.fullmatch(key)]
    if kind not in FLAT or config.get(TEXT) is not None or not moved:
        return dict(config)
    text = {**_LEFT_OUT.get(str(kind), {}), **{key: config[key] for key in moved}}
    return {**{key: value for key, value in config.items() if key not in moved}, TEXT: text}


def is_grafted(config: Mapping[str, Any]) -> bool:
    """Return whether a config belongs to a checkpoint with grafts."""
    return str(config.get("model_type", "")).startswith(PREFIX)


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Return whether a config's model reads a sequence in both directions. Raises BadInput as `native_config`."""
    from surgeon.anatomy.skeleton import encoder_auto

    return encoder_auto(native_config(config)) is not None


def native_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the trunk: native model type, no surgery, per-layer lists without entries for branches.

    A native config is returned as a copy, with its text settings in `text_config` where transformers also reads them
    there. Raises BadInput where `surgery` does not fit the rest.
    """
    native = copy.deepcopy(nested(config))
    if not is_grafted(config):
        return native
    return _trunk_config(native)


def _trunk_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the trunk; the `anatomy` field lists the fields whose values differ there."""
    told = config.get("anatomy")
    changed = told.get("trunk") if isinstance(told, Mapping) else None
    composition = composition_of(config)
    if composition is None or not isinstance(changed, Mapping):
        raise BadInput("config.json: `anatomy` cannot be read; get the output's own config.json")
    _check_branches(config, composition)
    for key in ("surgery", "anatomy", "auto_map"):
        config.pop(key, None)
    config["model_type"] = str(config["model_type"]).removeprefix(PREFIX)
    for path, value in changed.items():
        *above, key = path.split("/")
        part: Any = config
        for step in above:
            part = part.get(step) if isinstance(part, dict) else None
        if not isinstance(part, dict) or not isinstance(value, list) or len(value) > 1 or key == "model_type":
            raise BadInput(
                f"config.json: `anatomy` says of `{printable(str(path))}` what cannot be read; get the output's own"
                " config.json"
            )
        # An existing field keeps its place in the order.
        if value:
            part[key] = value[0]
        else:
            part.pop(key, None)
    return config


def _check_branches(config: Mapping[str, Any], composition: Composition) -> None:
    """Raise BadInput for a `surgery` that cannot be read. The number of layers is checked when they are built."""
    surgery: Any = config.get("surgery")
    trunk = surgery.get("trunk_layers") if isinstance(surgery, Mapping) else None
    if type(trunk) is not int or not 0 < trunk <= MOST_LAYERS:
        raise BadInput(
            "config.json: a model type of surgeon's, yet no `surgery` with `trunk_layers` in it; get the output's own"
            " config.json"
        )
    text: Any = config
    for step in composition.path:
        text = text.get(step) if isinstance(text, Mapping) else None
    said = text if isinstance(text, Mapping) else {}
    types = said.get("layer_types")
    try:
        spread = for_each_layer(surgery)
        twins = sum(len(spread.get(kind.key) or ()) for kind in kinds().values() if kind.branching)
        stated = SimpleNamespace(
            num_hidden_layers=trunk + twins,
            surgery=surgery,
            layer_types=types if isinstance(types, list) else None,
            encoder=composition.encoder,
            grafts=GRAFTS.values(),
        )
        check_surgery(stated)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadInput(
            f"config.json: `surgery` cannot be read: {printable(str(error))}; get the output's own config.json"
        ) from None


def head_with_grafts(composition: Composition, trunk: Mapping[str, Any]) -> str:
    """Return the native class of the head that a model with grafts gets, for the trunk's config `trunk`.

    Raises BadInput where the config names a head that has no upcycled class.
    """
    named = [str(name) for name in trunk.get("architectures") or ()]
    head = short_name(composition.head)
    known = (head, *(short_name(each.native) for each in composition.heads), short_name(composition.model))
    # Compared without case: PhiMoE's own config.json spells its class as no class of transformers is spelled.
    written = {name.casefold() for name in named}
    found = next((name for name in known if name.casefold() in written), None)
    if composition.encoder:
        # The head, if it has an upcycled class; else the base model, and the head's tensors are copied along.
        return found or short_name(composition.model)
    if not named:
        return head
    if found is None and len(named) == 1:
        # A name that transformers does not know (InternLM3ForCausalLM for a Llama): the model type gives the class,
        # this the head.
        _, kind, of = named[0].rpartition("For")
        found = next((name for name in known if kind and name.endswith(kind + of)), None)
    if found is None or len(named) > 1:
        raise BadInput(
            f"config.json: `architectures` is {printable(repr(named))}; grafts are made for"
            f" {', '.join(dict.fromkeys(known))}: if the weights are of one of these, write it alone"
        )
    return found


def config_with_grafts(
    composition: Composition, head: str, trunk: Mapping[str, Any], made: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the config of a model with grafts; `made` is the config with branches as layers, `trunk` without them."""
    config = {
        **made,
        "model_type": PREFIX + composition.model_type,
        "architectures": [upcycled(head)],
        "auto_map": composition.auto_map,
    }
    # An `auto_map` that names only a tokenizer does not describe the trunk's model.
    unlike = {"model_type", "auto_map"}
    one, other = ({key: value for key, value in each.items() if key not in unlike} for each in (trunk, config))
    return config | {"anatomy": composition.to_json() | {"trunk": changed_fields(one, other)}}


def changed_fields(trunk: Mapping[str, Any], grafted: Mapping[str, Any], above: str = "") -> dict[str, list[Any]]:
    """Return the fields of `trunk` that differ in `grafted`, by path, with the trunk's value in a list.

    The list is empty for a field that the trunk does not have.
    """
    changed: dict[str, list[Any]] = {}
    for key in dict.fromkeys((*trunk, *grafted)):
        one, other = trunk.get(key), grafted.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            changed |= changed_fields(one, other, f"{above}{key}/")
        elif key not in trunk or key not in grafted or one != other:
            changed[f"{above}{key}"] = [one] if key in trunk else []
    return changed
