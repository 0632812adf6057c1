"""Comparing two models that return no logits over the vocabulary: their heads' outputs, with padding.

These are encoders, and decoders with a head for labels or answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgeon.anatomy.grafted_config import is_encoder
from surgeon.anatomy.skeleton import BASE, encoder_auto, wordless_auto
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.errors import BadInput, PromiseBroken
from surgeon.grafts.composition import ENCODER_AUTOS, composition_of
from surgeon.models.compare import ROUNDING
from surgeon.models.load import load_model, opened, running

WHOLE = "whole sequences"
# The number of windows in one batch.
_TOGETHER = 4
# The fields that heads return, or a model without a head.
_OUTPUTS = ("logits", "prediction_logits", "start_logits", "last_hidden_state")


@dataclass(frozen=True)
class OutputComparison:
    """The result of comparing the outputs of `base` and `out` over the same tokens.

    `output` is `logits` (for a head for answers `start_logits`), or `last_hidden_state` where there is no head.
    `tokens`: positions that are not padding. `identical`: torch.equal on every value; padding counts only where the
    output is one vector per sequence. `largest` is the largest absolute value of the base.
    """

    mode: str
    dtype: str
    output: str
    tokens: int
    identical: bool
    max_abs_difference: float
    largest: float

    @property
    def rounded(self) -> bool:
        """Whether outputs differ by no more than rounding explains between two computations of one function."""
        return self.identical or self.max_abs_difference <= ROUNDING[self.dtype] * self.largest

    @property
    def same_before_tail(self) -> bool:
        """Whether outputs are identical: such outputs have no last vocabulary rows to leave out."""
        return self.identical

    @property
    def same(self) -> int:
        """The number of positions with the base's values: all or 0, because they are not counted one by one."""
        return self.tokens if self.identical else 0

    @property
    def apart(self) -> None:
        """None: no next token is predicted."""
        return None

    @property
    def grown(self) -> None:
        """None: such a head has no rows for added tokens."""
        return None

    @property
    def next_token(self) -> None:
        """None: no next token is predicted."""
        return None


def auto_class(config: Mapping[str, Any]) -> str:
    """Return the auto class of a checkpoint, by the head that its config names; AutoModel where it names none."""
    native = composition_of(config)
    if native is not None:
        named = str(next(iter(config.get("architectures") or ()), ""))
        return next((auto for auto in ENCODER_AUTOS if native.class_of(auto) == named), BASE)
    return encoder_auto(config) or wordless_auto(config) or BASE


def compare_outputs(
    base: CheckpointFolder | Path,
    out: CheckpointFolder | Path,
    ids: Tensor,
    *,
    auto: str,
    dtype: str = "auto",
    device: str = "cpu",
) -> OutputComparison:
    """Load `base` and `out` whole and compare their outputs. The last third of every second window is padding.

    Args:
        base: the checkpoint before surgery.
        out: the checkpoint after it.
        ids: tokens, (windows, window).
        auto: transformers' auto class.
        dtype: the dtype that both compute in.
        device: where both run.

    Raises:
        BadInput: the base cannot be loaded or has fewer positions than a window.
        PromiseBroken: the output cannot be loaded.
    """
    base = opened(base)
    base_model = load_encoder(base, dtype=dtype, device=device, auto=auto)
    config = base_model.config
    check_window(base_model, ids.shape[1])
    out_model = load_encoder(
        out,
        dtype=base_model.dtype,
        device=device,
        attention=config._attn_implementation,
        failure=PromiseBroken,
        auto=auto,
    )
    mask, together = torch.ones_like(ids), _TOGETHER
    if config.pad_token_id is None and not is_encoder(base.config):
        # Without a padding token a decoder's classifier finds the last token only in a batch of one row without
        # padding.
        together = 1
    else:
        mask[1::2, ids.shape[1] - ids.shape[1] // 3 :] = 0
        ids = torch.where(mask.bool(), ids, config.pad_token_id or 0)
    name, identical, difference, largest = "", True, 0.0, 0.0
    batches = (torch.split(values.to(device), together) for values in (ids, mask))
    for ids_BT, mask_BT in zip(*batches, strict=True):
        name, first, second = _both(base_model, out_model, ids_BT, mask_BT)
        identical = identical and torch.equal(first, second)
        difference = max(difference, float((first.float() - second.float()).abs().nan_to_num(nan=torch.inf).max()))
        largest = max(largest, float(first.float().abs().max()))
    return OutputComparison(WHOLE, _plain(base_model.dtype), name, int(mask.sum()), identical, difference, largest)


def _both(base: Any, out: Any, ids_BT: Tensor, mask_BT: Tensor) -> tuple[str, Tensor, Tensor]:
    """Run two models on the same tokens; return the name of their head's output, and the values of each.

    Raises BadInput where the base's values are NaN, PromiseBroken where the output's have another shape.
    """
    outputs = []
    for model in (base, out):
        with torch.inference_mode(), running(model):
            outputs.append(model(input_ids=ids_BT, attention_mask=mask_BT))
    name = next(key for key in _OUTPUTS if key in outputs[0])
    first, second = (_compared(_whole(output, name), mask_BT) for output in outputs)
    if first.isnan().any():
        raise BadInput(
            f"the base computes NaN {name} in {_plain(base.dtype)}, so there is no function to preserve; try another"
            " dtype"
        )
    if first.shape != second.shape:
        raise PromiseBroken(
            f"the output gives {name} of shape {list(second.shape)}, the base {list(first.shape)}; they must agree"
        )
    return name, first, second


def _whole(output: Any, name: str) -> Tensor:
    """Return the values called `name` in an output; for a head for answers, their start and end logits."""
    values: Tensor = output[name]
    return torch.stack((values, output["end_logits"]), dim=-1) if name == "start_logits" else values


def _compared(values: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the values at positions without padding; all values where the output is one vector per sequence."""
    return values[mask_BT.bool()] if values.shape[:2] == mask_BT.shape and values.dim() == 3 else values


def load_encoder(folder: CheckpointFolder | Path, **options: Any) -> Any:
    """Load a model as `load_model` does, with all weights in one dtype.

    transformers keeps two biases of DeBERTa in float32, with which it then fails. Raises BadInput, or the given
    `failure`, as `load_model` does.
    """
    model = load_model(folder, **options)
    return model.to(model.dtype)


def positions_of(model: Any) -> int | None:
    """Return how many tokens the encoder has positions for; None where nothing limits them."""
    # RoBERTa and similar models count positions from the number after the padding index.
    counted = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    padding = next((index for module in counted if (index := getattr(module, "padding_idx", None)) is not None), -1)
    room = getattr(model.config, "max_position_embeddings", None)
    return room - padding - 1 if isinstance(room, int) else None


def check_window(model: Any, window: int) -> None:
    """Raise BadInput where a window of tokens is longer than the encoder's positions."""
    room = positions_of(model)
    if room is not None and window > room:
        raise BadInput(
            f"config.json: the base has {room} positions, a window has {window} tokens; use a smaller window"
        )


def _plain(dtype: torch.dtype) -> str:
    """Return a dtype's name without `torch.`."""
    return str(dtype).removeprefix("torch.")
