"""Known kinds of damage to checkpoints and adapters, and the remedy for each; checked before any other guess."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from surgeon.checkpoint.header import FLOAT_DTYPES, TensorInfo
from surgeon.errors import printable

# The fallback guess in errors about tensors that do not fit.
ANOTHER = "is config.json another model's?"
# Name parts that a wrapper module adds where it was saved instead of the model inside.
_INSIDE = r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
_WRAPPED = re.compile(rf"^(?:module|base_model\.model)\.|{_INSIDE}|(?<=\.)base_layer\.")
# The same for an adapter's tensor names, including the adapter's own name where a model's whole state was saved.
_WRAPPED_IN_ADAPTER = re.compile(
    rf"(?:^|(?<=^base_model\.model\.))module\.|{_INSIDE}|(?<=\.lora_[AB]\.)\w+\.(?=weight$)"
)
_UNMERGED = re.compile(r"\.(?:lora_[AB]|lora_embedding_[AB]|modules_to_save|original_module)\.")
_TAKE_OUT = (
    'in a copy of that folder run `python -c \'import glob, pathlib, safetensors.torch as s; w = "{}";'
    ' [s.save_file({{k.replace(w, ""): v for k, v in s.load_file(f).items()}}, f, {{"format": "pt"}}) for f in'
    ' glob.glob("*.safetensors")]; [p.write_text(p.read_text().replace(w, "")) for p in'
    ' pathlib.Path().glob("*.index.json")]\'`'
)


def damage_of(config: Mapping[str, Any], tensors: Iterable[TensorInfo]) -> str:
    """Return the damage to a base's weights that its headers show, and the remedy; "" where no known damage fits."""
    found = {info.name: info for info in tensors}
    if any(info.dtype == "U32" for info in found.values()):
        return (
            "quantised by MLX; take the model that it was made of, or run `mlx_lm.convert --hf-path BASE --mlx-path NEW"
            " --dequantize`"
        )
    if empty := empty_of(found.values()):
        return empty
    if unmerged := next(filter(_UNMERGED.search, found), None):
        return (
            f"{printable(unmerged)}: a PEFT model, saved with its adapter beside the weights; where it was trained run"
            " `model.merge_and_unload().save_pretrained(NEW)`"
        )
    if (named := next(filter(None, map(_WRAPPED.search, found)), None)) is not None:
        return (
            f"{printable(named.string)}: `{named[0]}` is of what wrapped the model in training (torch.compile, FSDP,"
            f" DDP, DeepSpeed, PEFT) and was saved in its place; {_TAKE_OUT.format(named[0])}"
        )
    parts = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    # With an online method, BitNet for example, transformers quantises at run time.
    left = any(part.get("quantization_config") is not None and "online" not in str(part) for part in parts)
    if left and all(info.dtype in (*FLOAT_DTYPES, "I64") for info in found.values()):
        return "config.json: `quantization_config` is left over: no tensor is quantised; take it out of the file"
    return ""


def empty_of(tensors: Iterable[TensorInfo]) -> str:
    """Return an error line on the first tensor without elements; "" where there is none.

    ZeRO-3 writes such tensors where it does not gather them.
    """
    why = (
        "no numbers in it, as ZeRO-3 leaves tensors where it does not gather them; save again with"
        " `stage3_gather_16bit_weights_on_model_save: true`, or run the checkpoint's zero_to_fp32.py"
    )
    return next((f"{printable(each.name)} ({each.file}): {why}" for each in tensors if 0 in each.shape), "")


def around(names: Iterable[str], known: str, below: str) -> str:
    """Return a hint on the extra part that stored tensor names have compared with the model's names.

    The hint ends with a command that removes the part; where no plain extra part is found, the hint is `ANOTHER`.
    `known` is the beginning of the model's names, `below` the rest of one of them.
    """
    stored = next((name.removesuffix(below) for name in names if name.endswith(f".{below}")), known)
    more = stored.removeprefix(known) if stored.startswith(known) else stored.removesuffix(known)
    # Only word characters, because the text becomes a part of a command to run.
    plain = more != stored and re.fullmatch(r"[\w.]+", more)
    return f"their names have `{more}` more; {_TAKE_OUT.format(more)}" if plain else ANOTHER


def unwrapped(name: str) -> str:
    """Return an adapter tensor's name without the names of wrappers around the model."""
    return _WRAPPED_IN_ADAPTER.sub("", name)


def led_below(files: Iterable[str], wanted: str) -> str:
    """Return a hint where `files` contains `wanted` in other letter case or in subfolders; "" where it does not.

    Among subfolders, the hint names the last checkpoint's.
    """
    names = list(files)
    for name in names:
        if name.lower() == wanted.lower() and name != wanted:
            return f"; rename {printable(name)} to {wanted}"
    below = [name.removesuffix(f"/{wanted}") for name in names if name.endswith(f"/{wanted}")]
    newest = max(below, key=lambda name: (len(name), name), default="")
    return f"; folders below have one: give one of these, as {printable(newest)}" if newest else ""
