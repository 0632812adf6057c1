"""Tiny checkpoints stored in FP8 blocks or in MXFP4, laid out as the real ones are."""

from __future__ import annotations

import atexit
import functools
import json
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
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


def pack(values: Tensor, bits: int) -> Tensor:
    """Whole numbers (rows × columns) as compressed-tensors packs them: `bits` each, end to end, in words of 32."""
    rows, columns = values.shape
    stored = (values + (1 << bits - 1)).numpy().astype("<i8")[..., None] >> np.arange(bits) & 1
    words = -(-columns * bits // 32)
    single = np.zeros((rows, words * 32), dtype=np.uint8)
    single[:, : columns * bits] = stored.reshape(rows, -1)
    return torch.from_numpy(np.packbits(single, axis=1, bitorder="little").view("<i4").copy())


@dataclass(frozen=True)
class Coded:
    """A way in which compressed-tensors stores a matrix, and numbers made up for it."""

    format: str = "pack-quantized"
    bits: int = 4
    type: str = "int"
    symmetric: bool = True
    strategy: str = "group"
    size: int = 16
    ordered: bool = False
    scales: str = "bfloat16"

    @property
    def weights(self) -> dict[str, Any]:
        """What config.json says of it."""
        told = {"num_bits": self.bits, "type": self.type, "symmetric": self.symmetric, "strategy": self.strategy}
        group, block = {"group": (self.size, None), "channel": (-1, None), "block": (None, [self.size, self.size])}.get(
            self.strategy, (None, None)
        )
        return told | {"dynamic": False, "group_size": group} | ({"block_structure": block} if block else {})

    def _drawn(self, name: str, shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Numbers, scales, zero points and the block of each column."""
        (rows, columns), size = shape, self.size
        heights, widths = {"tensor": shape, "channel": (1, columns), "group": (1, size)}.get(
            self.strategy, (size, size)
        )
        grid = (-(-rows // heights), -(-columns // widths))
        draw = torch.Generator().manual_seed(len(name))
        low, high = -(1 << self.bits - 1), 1 << self.bits - 1
        numbers = torch.randint(low, high, shape, generator=draw)
        scales = (torch.rand(grid, generator=draw) / 16 / high).to(getattr(torch, self.scales))
        zeros = None if self.symmetric else torch.randint(low, high, grid, generator=draw)
        order = torch.randperm(columns, generator=draw) if self.ordered else torch.arange(columns)
        return numbers, scales, zeros, order // widths

    def plain(self, name: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """(q − z) · s in float64, rounded to the scales' dtype as the library does, and to the model's."""
        numbers, scales, zeros, order = self._drawn(name, shape)
        rows = torch.arange(shape[0]) // -(-shape[0] // scales.shape[0])
        if self.type == "float":
            numbers = (numbers / 2).to(torch.float8_e4m3fn)
        whole = numbers.double() - (0 if zeros is None else zeros[rows][:, order])
        return (whole * scales.double()[rows][:, order]).to(scales.dtype).to(dtype)

    def quantise(self, name: str, value: Tensor) -> dict[str, Tensor]:
        """The stored tensors of a matrix."""
        module = name.removesuffix(".weight")
        numbers, scales, zeros, order = self._drawn(name, (value.shape[0], value.shape[1]))
        single = self.strategy == "tensor"
        held = {f"{module}.weight_scale": scales.reshape(1) if single else scales}
        if self.format == "pack-quantized":
            held |= {f"{module}.weight_packed": pack(numbers, self.bits)}
            held |= {f"{module}.weight_shape": torch.tensor(value.shape)}
        else:
            whole = self.type == "int"
            held[name] = numbers.to(torch.int8) if whole else (numbers / 2).to(torch.float8_e4m3fn)
        if zeros is not None:
            packed = self.format == "pack-quantized" and self.strategy in ("group", "channel")
            zeros = pack(zeros.T, self.bits).T.contiguous() if packed else zeros.to(torch.int8)
            held[f"{module}.weight_zero_point"] = zeros.reshape(1) if single else zeros
        if self.ordered:
            held[f"{module}.weight_g_idx"] = order.to(torch.int32)
        return held


def compressed(folder: Path, *coded: Coded, skipped: tuple[str, ...] = ("lm_head",), **told: Any) -> Path:
    """Store a checkpoint's linear modules in its place as compressed-tensors does, attention apart."""
    groups = {
        f"group_{number}": {
            "targets": ["Linear"] if number == len(coded) - 1 else ["re:.*self_attn.*"],
            "weights": each.weights,
            "input_activations": None,
            "output_activations": None,
            "format": each.format,
        }
        for number, each in enumerate(coded)
    }
    for shard in sorted(folder.glob("*.safetensors")):
        held: dict[str, Tensor] = {}
        for name, value in load_file(shard).items():
            linear = value.ndim == 2 and "_proj" in name
            each = coded[0] if "self_attn" in name else coded[-1]
            held |= each.quantise(name, value) if linear else {name: value}
        save_file(held, shard, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        from safetensors import safe_open

        places = {}
        for shard in folder.glob("*.safetensors"):
            with safe_open(shard, "pt") as opened:
                places |= dict.fromkeys(opened.keys(), shard.name)
        index.write_text(json.dumps(json.loads(index.read_text()) | {"weight_map": places}))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": coded[0].format,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(skipped),
        **told,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
