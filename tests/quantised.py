"""Tiny checkpoints stored in FP8 blocks or in MXFP4, laid out as the real ones are."""

from __future__ import annotations

import atexit
import functools
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.decoders import tiny_decoder

# The sixteen values of four bits: sign, two bits of exponent, one of fraction.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_LARGEST = 448.0


def fp8_blocks(weight: Tensor, block: int = 128) -> tuple[Tensor, Tensor]:
    """A matrix as F8_E4M3 and the F32 scale of each of its blocks, the last ones smaller where it does not divide."""
    rows, columns = (-(-size // block) for size in weight.shape)
    padded = torch.zeros(rows * block, columns * block)
    padded[: weight.shape[0], : weight.shape[1]] = weight.float()
    tiles = padded.reshape(rows, block, columns, block)
    scales = tiles.abs().amax(dim=(1, 3)).clamp_min(1e-12) / _LARGEST
    whole = (tiles / scales[:, None, :, None]).reshape(padded.shape)
    return whole[: weight.shape[0], : weight.shape[1]].to(torch.float8_e4m3fn).contiguous(), scales


def mxfp4_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Experts' matrices (experts, in, out) as bytes of two values and an exponent for 32 of them, along the input."""
    rows = weight.float().transpose(1, 2)
    tiles = rows.reshape(*rows.shape[:2], -1, 32)
    exponents = torch.floor(torch.log2(tiles.abs().amax(-1).clamp_min(1e-12))) - 2
    scaled = tiles / torch.exp2(exponents)[..., None]
    codes = (scaled[..., None] - torch.tensor(E2M1)).abs().argmin(-1).to(torch.uint8)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).contiguous(), (exponents + 127).to(torch.uint8)


def _fp8(name: str, value: Tensor) -> dict[str, Tensor]:
    if value.ndim != 2 or not re.search(r"(_proj\w*|_proj_with_mqa)\.weight$", name):
        return {name: value}
    weight, scales = fp8_blocks(value)
    return {name: weight, f"{name}_scale_inv": scales}


def _mxfp4(name: str, value: Tensor) -> dict[str, Tensor]:
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: value}
    blocks, scales = mxfp4_blocks(value)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


METHODS = {
    "fp8": (_fp8, {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}),
    "mxfp4": (_mxfp4, {}),
}


def tiny_quantised(
    folder: Path, model_type: str, method: str, *, skipped: list[str] | None = None, **changes: Any
) -> Path:
    """Save a tiny checkpoint of a model type in bfloat16, its projections (experts' alone for MXFP4) quantised."""
    shutil.copytree(_made(model_type, method, json.dumps([skipped, changes])), folder, dirs_exist_ok=True)
    return folder


@functools.cache
def _made(model_type: str, method: str, asked: str) -> Path:
    skipped, changes = json.loads(asked)
    folder = Path(tempfile.mkdtemp(prefix=f"surgeon-quantised-{model_type}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return quantised(tiny_decoder(folder, model_type, dtype="bfloat16", **changes), method, skipped=skipped)


def quantised(folder: Path, method: str, *, skipped: list[str] | None = None) -> Path:
    """Quantise a checkpoint in its place."""
    quantise, settings = METHODS[method]
    places: dict[str, str] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        held: dict[str, Tensor] = {}
        for name, value in load_file(shard).items():
            left = any(name.startswith(f"{module}.") for module in skipped or ())
            held |= {name: value} if left else quantise(name, value)
        save_file(held, shard, metadata={"format": "pt"})
        places |= dict.fromkeys(held, shard.name)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        index.write_text(json.dumps(json.loads(index.read_text()) | {"weight_map": places}))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, **settings, "modules_to_not_convert": skipped}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
