"""Tiny checkpoints of any encoder of transformers, laid out on disk as transformers saves the real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surgeon.anatomy.skeleton import BASE, CAUSAL, IMAGE_TEXT, classes_of
from surgeon.anatomy.twin import shrunk, twin_of
from surgeon.grafts.composition import ENCODER_AUTOS

# What some default configs lack, or have too large.
CHANGES: dict[str, dict[str, Any]] = {
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "position_embedding_type": "rotary"},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
}
# Of which a width can be divided by three, or by which norms fit.
HEADS = {"lilt": 3, "esmc": 1}
LAYERS = 3


def encoders() -> list[tuple[str, str]]:
    """Every model type of the installed transformers with heads of encoders and none that generates, and its first one.

    Types with a masked-language head are encoders whatever else there is of them.
    """
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    found: list[tuple[str, str]] = []
    for model_type in MODEL_MAPPING_NAMES:
        autos = [auto for auto in ENCODER_AUTOS if classes_of(model_type, auto)]
        generating = classes_of(model_type, CAUSAL) or classes_of(model_type, IMAGE_TEXT)
        if autos and (autos[0] == ENCODER_AUTOS[0] or not generating):
            found.append((model_type, autos[0]))
    return found


def tiny_encoder_config(model_type: str, auto: str, **changes: Any) -> dict[str, Any]:
    """A small config.json of an encoder type with the head that `auto` finds, or none (AutoModel)."""
    from transformers import CONFIG_MAPPING

    config: dict[str, Any] = CONFIG_MAPPING[model_type](**CHANGES.get(model_type, {})).to_dict()
    if type(config.get("num_hidden_layers")) is int and not config.get("per_layer_config"):
        config["num_hidden_layers"] = LAYERS
    for count in ("n_layers", "layers"):
        if type(config.get(count)) is int:
            config[count] = LAYERS
    if isinstance(config.get("layer_types"), list) and not config.get("per_layer_config"):
        # The last of them, as the first may all be of one kind.
        config["layer_types"] = config["layer_types"][-LAYERS:]
    config |= {"architectures": [*classes_of(model_type, auto)][:1]}
    return shrunk(config | changes, heads_left=HEADS.get(model_type, 2))


def tiny_encoder(
    folder: Path, model_type: str, auto: str = BASE, *, seed: int = 3, dtype: str = "float32", **changes: Any
) -> Path:
    """Save a tiny checkpoint of an encoder type in `folder`, in several shards."""
    import torch

    config = tiny_encoder_config(model_type, auto, **changes)
    model = twin_of(config, seed=seed, heads=HEADS.get(model_type, 2)).model
    for value in (*model.parameters(), *model.buffers()):
        if value.is_floating_point():
            value.data = value.data.to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    model.config.architectures = config["architectures"]
    size = sum(value.nbytes for value in model.state_dict().values())
    model.save_pretrained(folder, max_shard_size=max(size // 3, 1))
    return folder
