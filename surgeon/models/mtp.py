"""Layers that predict further tokens (MTP), as transformers reads, runs and names them.

transformers (`MtpModel`) builds them with the classes of the main model's own layers, shares its embeddings and head,
and finds their tensors by patterns of its classes. Some patterns have a layer's number in them (61 in DeepSeek-V3), so
layers that a surgery moved are not found; here their own numbers are added.

Shapes: B sequences of T tokens, D the hidden size. Depth k predicts the token k + 2 places on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.weights import quantisation
from surgeon.common.library import LOAD_FAILURES, first_line
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import places_of
from surgeon.models.draft_head import DraftHead
from surgeon.models.load import already_read, read_mtp


def load_mtp(folder: CheckpointFolder, model: Any) -> Any:
    """transformers' `MtpModel` of a loaded `model` of `folder`, in eval mode, on its device and in its dtype.

    Embeddings, head and rotary positions are the model's own modules. Raises BadInput where there are no MTP layers, or
    transformers reads none of this model.
    """
    kind = _checked(folder, model)
    try:
        return read_mtp(folder, model, kind)
    except LOAD_FAILURES as error:
        raise _unread(folder, error) from error


def build_mtp(folder: CheckpointFolder, model: Any) -> Any:
    """The same without weights, of a `model` on the meta device. Raises BadInput as `load_mtp`."""
    from accelerate import init_empty_weights

    kind = _checked(folder, model)
    try:
        with init_empty_weights(include_buffers=False):
            return kind(model, model.config.get_text_config().num_mtp_layers).eval()
    except LOAD_FAILURES as error:
        raise _unread(folder, error) from error


def _checked(folder: CheckpointFolder, model: Any) -> Any:
    """transformers' class, once `model` knows the numbers of its MTP layers. Raises BadInput."""
    shown, config = printable(str(folder.path)), model.config.get_text_config()
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError:
        raise BadInput(
            "transformers: this version runs no MTP layers (`generate(use_mtp=True)`); use 5.23 or newer"
        ) from None
    if not getattr(config, "num_mtp_layers", None):
        raise BadInput(
            f"{shown}: config.json has no `num_mtp_layers` (or `num_nextn_predict_layers`) that transformers reads for"
            f" a {printable(str(config.model_type))}, so it runs no MTP layers of it"
        )
    if quantisation(folder.config) is not None:
        raise BadInput(f"{shown}: quantised, and transformers reads MTP layers in full precision; use `dequantise`")
    above = sorted({index for _, index, _ in places_of(folder.tensors).values() if index >= _trunk(model)})
    if above and _trunk(model) != config.num_hidden_layers:
        raise BadInput(
            f"{shown}: transformers looks for MTP layers from layer {config.num_hidden_layers} on, where a branch is"
            f" counted, and they are stored from {above[0]} on; merge the branches first (`merge_branches`)"
        )
    own = [*(model._keys_to_ignore_on_load_unexpected or ())]
    model._keys_to_ignore_on_load_unexpected = [*own, *(rf"(^|\.)layers\.{index}\." for index in above)]
    return MtpModel


def _trunk(model: Any) -> int:
    """The layers of the main model, without branches."""
    count: int = (
        model.surgery.trunk_layers if hasattr(model, "surgery") else model.config.get_text_config().num_hidden_layers
    )
    return count


def _unread(folder: CheckpointFolder, error: BaseException) -> BadInput:
    return BadInput(f"{printable(str(folder.path))}: transformers cannot read its MTP layers ({first_line(error)})")


def drafting(mtp: Any, model: Any) -> contextlib.AbstractContextManager[None]:
    """Inside, `model.generate(use_mtp=True)` takes the drafts of `mtp`: MTP layers that were read, or a draft head."""
    return mtp.drafting(model) if isinstance(mtp, DraftHead) else already_read(mtp)


def draft_states(mtp: Any, hidden: Tensor, ids: Tensor, positions: Tensor) -> Iterator[Tensor]:
    """What the head reads to draft, for each depth k: B × T-1-k × D; place t there is about token t + k + 2.

    Args:
        mtp: transformers' `MtpModel`.
        hidden: the main model's last hidden states, B T D.
        ids: the tokens, B T; depth k at place t is given token t + k + 1.
        positions: their positions, B T, which begin anew with each document that is to be kept apart.
    """
    for depth in range(mtp.num_mtp_layers):
        count = ids.shape[1] - 1 - depth
        places = positions[:, :count] + 1 + depth
        hidden = mtp.forward_layer(depth, hidden[:, :count], places, None, input_ids=ids[:, 1 + depth :])
        yield hidden
