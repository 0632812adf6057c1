"""Other models that tensors are taken from: each must be a fine-tune of the base."""

from __future__ import annotations

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.source import MAX_SIDE_FILE_BYTES
from surgeon.checkpoint.strict_json import parse_json_strict
from surgeon.checkpoint.tokenizer_files import TOKENIZER_FILE
from surgeon.common.json_results import same_json
from surgeon.errors import BadInput, printable

_MOST_ITEMS = 10_000_000
# What a layer's MLP computes by, beside its weights, and what shows a model of another shape.
_SAME = (
    *("model_type", "hidden_act", "hidden_activation", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads"),
)


def check_fine_tune(name: str, model: CheckpointFolder, base: CheckpointFolder) -> None:
    """Raise BadInput where the model that the plan calls `name` has another architecture or vocabulary than the base.

    That its tensors are the base's by name and shape is checked of those that are taken, once the plan is drawn.
    """
    shown = printable(name)
    for key in _SAME:
        one, other = base.config.get(key), model.config.get(key)
        if one != other:
            raise BadInput(
                f"{shown}: `{key}` is {printable(repr(other), 60)}, the base's {printable(repr(one), 60)}; experts"
                " must be fine-tunes of the base's own architecture"
            )
    one, other = _vocabulary(base), _vocabulary(model)
    if one is not None and other is not None and not same_json(one, other):
        raise BadInput(f"{shown}: its {TOKENIZER_FILE} has another vocabulary than the base's; give a fine-tune of it")


def _vocabulary(folder: CheckpointFolder) -> object:
    """The pieces of its tokenizer; nothing where it has none of this kind, which then says nothing."""
    if TOKENIZER_FILE not in folder.side_files:
        return None
    content = folder.read_side_file(TOKENIZER_FILE)
    data = parse_json_strict(content, file=TOKENIZER_FILE, max_bytes=MAX_SIDE_FILE_BYTES, max_items=_MOST_ITEMS)
    model = data.get("model") if isinstance(data, dict) else None
    return model.get("vocab") if isinstance(model, dict) else None
