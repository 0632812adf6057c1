"""The classification head of an encoder: its tensors, and their values before any training.

They are read from transformers' own class, built without weights; nothing is listed by model type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surgeon.anatomy.skeleton import build, classes_of
from surgeon.errors import BadInput, printable
from surgeon.runtime.births import Birth, Fill, Normal

CLASSIFIER = "AutoModelForSequenceClassification"
# For the heads of some types, a module of the base model reads the stack's output.
_POOLER = "pooler."
_DEFAULT_STD = 0.02


@dataclass(frozen=True)
class Head:
    """A classification head: the initial values of every tensor, by name on disk.

    `prefix` begins the names of the base model's tensors.
    """

    births: Mapping[str, Birth]
    prefix: str

    def idle(self, names: Iterable[str]) -> set[str]:
        """Return a checkpoint's tensors that belong to other heads, which a classification model does not run."""
        return {
            name
            for name in names
            if name not in self.births
            and (not name.startswith(self.prefix) or name.removeprefix(self.prefix).startswith(_POOLER))
        }


def labelled(config: Mapping[str, Any], labels: Sequence[str]) -> dict[str, Any]:
    """Return an encoder's config.json with a classification head for these labels.

    Raises BadInput where transformers has none for its type.
    """
    model_type = config.get("model_type")
    named = classes_of(model_type, CLASSIFIER)
    if not named:
        raise BadInput(
            f"config.json: transformers has no classification head for {printable(str(model_type))}; use an encoder"
            " that has one (`ForSequenceClassification`)"
        )
    without = ("num_labels", "problem_type")
    return {key: value for key, value in config.items() if key not in without} | {
        "architectures": [named[0]],
        "id2label": {str(number): name for number, name in enumerate(labels)},
        "label2id": {name: number for number, name in enumerate(labels)},
    }


def head_of(config: Mapping[str, Any], names: Iterable[str]) -> Head:
    """Return the classification head that a config.json names; `names` are the checkpoint's tensors.

    Matrices are drawn from a normal distribution with the config's `initializer_range`, biases are zero, norms one:
    transformers' usual initial values. Raises BadInput where transformers cannot build the model.
    """
    from torch import nn

    model = build(config).model
    std = config.get("initializer_range")
    std = float(std) if isinstance(std, int | float) and 0 < std < 1 else _DEFAULT_STD
    base = f"{model.base_model_prefix}."
    prefix = base if any(name.startswith(base) for name in names) else ""
    births: dict[str, Birth] = {}
    for path, module in model.named_modules():
        for own, value in module.named_parameters(recurse=False):
            name = f"{path}.{own}".removeprefix(".")
            inside = name.removeprefix(base)
            if name != inside and not inside.startswith(_POOLER):
                continue
            stored = name if name == inside else f"{prefix}{inside}"
            shape = tuple(value.shape)
            if len(shape) > 1:
                births[stored] = Normal(shape, std)
            else:
                linear = isinstance(module, nn.Linear)
                births[stored] = Fill(shape, 1.0 if own == "weight" and not linear else 0.0)
    return Head(births, prefix)
