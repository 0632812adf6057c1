"""Loading a checkpoint to run it: silent, offline, strict about missing tensors, weights aligned."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from surgeon.checkpoint.header import FLOAT_DTYPES
from surgeon.errors import BadInput, SurgeonError, printable

# Above the widest vector registers (64 bytes) and what torch's own CPU allocator gives.
ALIGNMENT = 64
CAUSAL = "AutoModelForCausalLM"

LOAD_FAILURES = (
    OSError,
    ValueError,
    KeyError,
    RuntimeError,
    ImportError,
    AttributeError,
    TypeError,
    SafetensorError,
)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bar and no logging from transformers inside; the earlier settings are restored.

    This room checks what it would warn about (missing keys, mismatched shapes) and raises instead.
    """
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """The first line of an exception that came from a library, fit for a terminal."""
    if "trust_remote_code" in str(error):
        return "it has code of its own, which runs only with --trust-remote-code"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return printable(lines[0] if lines else type(error).__name__, limit=300)


def torch_dtype(name: str) -> torch.dtype:
    """The floating torch dtype called `name` ("bfloat16", "float32", …). Raises BadInput for any other name."""
    known = sorted(dtype.torch for dtype in FLOAT_DTYPES.values())
    if name not in known:
        raise BadInput(f"dtype {printable(name)!r} is not known; use auto, {', '.join(known)}")
    return _torch(name)


def stored_dtype(name: str) -> torch.dtype:
    """The torch dtype of a tensor that a checkpoint's header calls `name` ("BF16", …)."""
    return _torch(FLOAT_DTYPES[name].torch)


def _torch(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype), name
    return found


def load_model(
    folder: Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str = "cpu",
    attention: str | None = None,
    trust_remote_code: bool = False,
    failure: type[SurgeonError] = BadInput,
    auto: str = CAUSAL,
) -> Any:
    """The model in `folder` as transformers' class `auto` loads it, in eval mode.

    `attention` is the attention implementation (None: the one transformers chooses). A tensor that is
    missing, unexpected or of another shape raises `failure` (BadInput by default), naming the first: transformers only
    warns, fills in random values and goes on. Weights at unaligned addresses of a mapped
    file are copied to aligned ones, because BLAS kernels may round differently by alignment and two
    files rarely have the same tensor at the same offset. For encoders, whose head may be missing, a tensor without
    a place in the model is not an error (layers are checked by name before), nor is a base model's missing pooler.
    """
    import transformers

    shown = printable(str(folder))
    if not (folder / "config.json").is_file():
        raise BadInput(f"{shown}: no config.json here; expected the folder of a checkpoint")
    wanted = torch_dtype(dtype) if isinstance(dtype, str) and dtype != "auto" else dtype
    options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    if torch.device(device).type != "cpu":
        options["device_map"] = {"": device}
    try:
        with quiet_transformers():
            model, info = getattr(transformers, auto).from_pretrained(
                folder,
                dtype=wanted,
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                **options,
            )
    except LOAD_FAILURES as error:
        raise failure(f"{shown}: cannot be loaded with transformers: {first_line(error)}") from error
    _check_loaded(info, auto, shown, failure)
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and parameter.data_ptr() % ALIGNMENT:
            parameter.data = parameter.data.clone()
    return model.eval()


def _check_loaded(info: dict[str, Any], auto: str, shown: str, failure: type[SurgeonError]) -> None:
    """Raise `failure` naming the first tensor that is missing, unexpected or of another shape."""
    if auto != CAUSAL:
        info["unexpected_keys"] = ()
        info["missing_keys"] = [name for name in info["missing_keys"] if not name.startswith("pooler.dense.")]
    for found, words in (
        (sorted(info["missing_keys"]), "the model has the tensor {}, the checkpoint lacks it"),
        (sorted(info["unexpected_keys"]), "the checkpoint has the tensor {}, the model has no place for it"),
        (
            sorted(key[0] for key in info["mismatched_keys"]),
            "tensor {} has another shape than the config requires",
        ),
    ):
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise failure(f"{shown}: {words.format(printable(found[0]))}{more}")
