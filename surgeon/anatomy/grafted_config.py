"""The config.json of a model with grafts, and that of the trunk beneath it.

A checkpoint that carries grafts is read as its native trunk: its `model_type` is `upcycled_<family>`, its
`config.surgery` says which grafts stand where, and its `num_hidden_layers` counts trunk and branches (a branch is a
layer of the tail, so that caches are allocated for it).

Some models that read images too are published with their text settings at the top, which transformers takes for those
of `text_config`. A config that has both forms would be read by the nested one alone, so what surgery changes is written
in that form, all of it.
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
# The types of which transformers reads both forms; a test compares them with it.
FLAT = frozenset({"fuyu", "glm5_next", "paddleocr_vl", "qwen2_5_vl", "qwen2_vl"})
# What is the whole model's wherever it stands: fields of every config, of images and sounds, and of the code.
_WHOLE = frozenset(
    {
        *("architectures", "auto_map", "dtype", "id2label", "is_encoder_decoder", "label2id", "model_type"),
        *("num_channels", "output_hidden_states", "problem_type", "return_dict", "tie_word_embeddings", "torch_dtype"),
        *("transformers_version", "chunk_size_feed_forward", QUANTISATION),
    }
)
_BESIDE = re.compile(r"(image|video|vision|audio|patch)_.*|.*_config|_.*")
# What transformers takes for left out in the flat form, where that is another value than in the nested one.
_LEFT_OUT: dict[str, dict[str, Any]] = {"fuyu": {"partial_rotary_factor": 0.5}}


def nested(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with its text settings in `text_config`; as it is where they stand there, or it has none."""
    kind = config.get("model_type")
    moved = [key for key in config if key not in _WHOLE and not _BESIDE.fullmatch(key)]
    if kind not in FLAT or config.get(TEXT) is not None or not moved:
        return dict(config)
    text = {**_LEFT_OUT.get(str(kind), {}), **{key: config[key] for key in moved}}
    return {**{key: value for key, value in config.items() if key not in moved}, TEXT: text}


def is_grafted(config: Mapping[str, Any]) -> bool:
    """Whether a config is of a checkpoint with grafts."""
    return str(config.get("model_type", "")).startswith(PREFIX)


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether a config is of a model that reads a sequence in both directions. Raises BadInput as `native_config`."""
    from surgeon.anatomy.skeleton import encoder_auto

    return encoder_auto(native_config(config)) is not None


def native_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the trunk alone: native model type, no surgery, per-layer lists without the branches' tail.

    A native config comes back as it is (a copy), its text settings in a part of their own where transformers reads them
    so too. BadInput where `surgery` does not fit the rest.
    """
    native = copy.deepcopy(nested(config))
    if not is_grafted(config):
        return native
    return _trunk_config(native)


def _trunk_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the trunk alone: its `anatomy` says what reads otherwise there."""
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
        # A field that stays has its place.
        if value:
            part[key] = value[0]
        else:
            part.pop(key, None)
    return config


def _check_branches(config: Mapping[str, Any], composition: Composition) -> None:
    """Raise BadInput for a `surgery` that cannot be read. How many layers there are is checked by building them."""
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
    """The head that a model of the config `trunk` has once it has grafts, by its class without them.

    Raises BadInput where the config names one for which there are no upcycled classes.
    """
    named = [str(name) for name in trunk.get("architectures") or ()]
    head = short_name(composition.head)
    known = (head, *(short_name(each.native) for each in composition.heads), short_name(composition.model))
    # As the model type says, whatever the case: PhiMoE's own config.json spells it as no class of transformers is.
    written = {name.casefold() for name in named}
    found = next((name for name in known if name.casefold() in written), None)
    if composition.encoder:
        # By a head that has an upcycled class, or none: the base model's then, with the head carried along.
        return found or short_name(composition.model)
    if not named:
        return head
    if found is None and len(named) == 1:
        # A maker's own name (InternLM3ForCausalLM, a Llama to transformers): the type says the class, this its head.
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
    """The config `made` of all layers, branches among them, as that of a model with grafts; `trunk` is without them."""
    config = {
        **made,
        "model_type": PREFIX + composition.model_type,
        "architectures": [upcycled(head)],
        "auto_map": composition.auto_map,
    }
    # An `auto_map` of a tokenizer alone is no part of the trunk's model.
    unlike = {"model_type", "auto_map"}
    one, other = ({key: value for key, value in each.items() if key not in unlike} for each in (trunk, config))
    return config | {"anatomy": composition.to_json() | {"trunk": changed_fields(one, other)}}


def changed_fields(trunk: Mapping[str, Any], grafted: Mapping[str, Any], above: str = "") -> dict[str, list[Any]]:
    """The fields of `trunk` that read otherwise in `grafted`, by path: their value in a list, an empty one for none."""
    changed: dict[str, list[Any]] = {}
    for key in dict.fromkeys((*trunk, *grafted)):
        one, other = trunk.get(key), grafted.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            changed |= changed_fields(one, other, f"{above}{key}/")
        elif key not in trunk or key not in grafted or one != other:
            changed[f"{above}{key}"] = [one] if key in trunk else []
    return changed
