"""Quantised bases: their tensors and scales, how transformers loads them, and which modules are not quantised.

Formats: FP8 blocks, MXFP4, and those of compressed-tensors (compressed.py).

Weights keep their stored bytes. transformers reports, with shapes only, what a quantised tensor becomes when it is
loaded dequantised. Zero is stored as zero bytes in these formats, whatever the scale.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from surgeon.anatomy.compressed import BESIDE, PACK, WEIGHT, packs_of
from surgeon.anatomy.family import OWN_CONFIG, Packed
from surgeon.anatomy.skeleton import Skeleton
from surgeon.checkpoint.damages import ANOTHER
from surgeon.checkpoint.header import FLOAT_DTYPES, QUANTISED_DTYPES, TensorInfo
from surgeon.checkpoint.weights import COMPRESSED, QUANTISATION, quantisation
from surgeon.common.library import LOAD_FAILURES, first_line
from surgeon.common.patterns import Matcher
from surgeon.errors import BadInput, printable

# Suffixes of the scales of quantised tensors, by method.
_SCALES = {"fp8": ("_scale_inv", "activation_scale"), "mxfp4": ("_scales",), COMPRESSED: BESIDE}
# The dtypes of quantised tensors, by method.
_STORED = {"fp8": ("F8_E4M3", "I8"), "mxfp4": ("U8",)}
_SCALE_DTYPES = (*FLOAT_DTYPES, "F8_E8M0", "U8")
# MXFP4: 32 numbers of four bits share an exponent.
_BLOCK_BYTES = 16
_FOUR_BITS_BLOCK = 32
_SKIPPED = ("modules_to_not_convert", "ignored_layers")


def is_scale(config: Mapping[str, Any], suffix: str) -> bool:
    """Return whether a tensor of this name holds scales (or the like) of a quantised tensor."""
    settings = quantisation(config)
    return settings is not None and suffix.endswith(_SCALES[settings["quant_method"]])


def quantizer_of(config: Mapping[str, Any]) -> Any:
    """Return transformers' quantizer for loading a config.json's weights dequantised, as shapes; None if not needed.

    Raises BadInput where transformers cannot make one from the config's settings.
    """
    settings = quantisation(config)
    if settings is None or settings["quant_method"] == COMPRESSED:
        return None
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
    from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
    from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

    fp8 = settings["quant_method"] == "fp8"
    kind, told = (FineGrainedFP8HfQuantizer, FineGrainedFP8Config) if fp8 else (Mxfp4HfQuantizer, Mxfp4Config)
    try:
        made = kind(told(**{**settings, "dequantize": True}), pre_quantized=True)
    except LOAD_FAILURES as error:
        raise BadInput(f"config.json: `{QUANTISATION}` cannot be read ({first_line(error)}); {OWN_CONFIG}") from error
    if fp8:
        shapes = _shapes()
        made.get_load_operations = lambda: {"dequantize": shapes}
    return made


def _shapes() -> type[Any]:
    """Return transformers' dequantisation class for FP8, changed to compute only shapes.

    transformers' own class wants blocks of one size; in checkpoints the last blocks may be smaller.
    """
    import torch
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    class Shapes(Fp8Dequantize):  # type: ignore[misc]
        def _dequantize_one(self, quantized: Any, scales: Any, output_dtype: Any = None) -> Any:
            """Return a tensor of the dequantised shape, with no values in it."""
            # Two numbers of four bits in a byte.
            wide = 2 if quantized.dtype == torch.int8 else 1
            shape = (*quantized.shape[:-1], quantized.shape[-1] * wide)
            return torch.empty(shape, dtype=output_dtype or torch.bfloat16, device=quantized.device)

    return Shapes


def check_stored(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
    """Raise BadInput for a quantised tensor without its scales, or of a dtype that the config's method does not use."""
    settings = quantisation(config)
    if settings is None:
        return
    method = settings["quant_method"]
    if method == COMPRESSED:
        # `packs_of` has its own checks.
        return
    for name, info in tensors.items():
        if is_scale(config, name):
            fits = info.dtype in _SCALE_DTYPES
        elif info.dtype in _STORED[method]:
            scales = tensors.get(f"{name}_scale_inv" if method == "fp8" else name.removesuffix("blocks") + "scales")
            wanted = grid_of(info, settings)
            if scales is None:
                raise BadInput(f"{printable(name)} ({info.file}): {info.dtype}, yet no scales beside it; {ANOTHER}")
            if wanted is None or (scales.shape != wanted and not scales.numel == math.prod(wanted) == 1):
                raise BadInput(
                    f"{printable(scales.name)} ({scales.file}): shape {list(scales.shape)}, not the scales of a tensor"
                    f" of {list(info.shape)}{'' if wanted is None else f' ({list(wanted)})'}; {ANOTHER}"
                )
            continue
        else:
            fits = info.dtype in (*FLOAT_DTYPES, "I64")
        if not fits:
            raise BadInput(
                f"{printable(name)} ({info.file}): dtype {info.dtype}, which {method} has no such tensor of; {ANOTHER}"
            )


def grid_of(info: TensorInfo, settings: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the shape of the scales of a quantised tensor, one per block; None where it has no such blocks.

    Raises BadInput where `weight_block_size` is not two sizes.
    """
    if settings["quant_method"] == "mxfp4":
        packed = info.name.endswith("_blocks") and info.shape[-1:] == (_BLOCK_BYTES,)
        return info.shape[:-1] if packed else None
    block = [1, _FOUR_BITS_BLOCK // 2] if info.dtype == "I8" else settings.get("weight_block_size", [128, 128])
    if block is None:
        return (1,)
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise BadInput(
            f"config.json: `{QUANTISATION}.weight_block_size` is {printable(str(block), 60)}, not two sizes;"
            f" {OWN_CONFIG}"
        )
    if len(info.shape) < 2:
        return None
    sizes = zip(info.shape[-2:], block, strict=True)
    return (*info.shape[:-2], *(-(-size // of) for size, of in sizes))


def skips(config: Mapping[str, Any], skeleton: Skeleton) -> list[tuple[str, ...]]:
    """Return, for each layer, its modules that the config excludes from quantisation, by their names in the layer."""
    settings = quantisation(config)
    layers = skeleton.layers
    if settings is None:
        return [()] * len(layers)
    from transformers.conversion_mapping import get_model_conversion_mapping

    renamings = get_model_conversion_mapping(skeleton.model)
    key, given = _listed(settings)
    listed = []
    for name in given:
        # transformers renames them like this before it compares them with names of modules.
        renamed = f"{name}."
        for renaming in renamings:
            renamed, _ = renaming.rename_source_key(renamed)
        listed += [name, renamed.removesuffix(".")]
    matcher = Matcher(f"config.json: `{QUANTISATION}.{key}`")

    def named(module: str) -> bool:
        """Return whether the config's list excludes a module from quantisation."""
        # Like transformers' `should_convert_module`: an entry matches a module, a module around it, or the end of its
        # name.
        edges = {at for at in range(len(module) + 1) if module[at - 1 : at] == "." or module[at : at + 1] in (".", "")}
        return any(module.endswith(each) or edges & matcher.ends(each, module) for each in listed)

    return [
        tuple(name for name, _ in layer.named_modules() if name and named(f"{skeleton.stack}.{index}.{name}"))
        for index, layer in enumerate(layers)
    ]


def _listed(settings: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return (the config field that lists modules excluded from quantisation, this list). Raises BadInput."""
    key = next((key for key in _SKIPPED if settings.get(key) is not None), _SKIPPED[0])
    found = settings.get(key) or []
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise BadInput(f"config.json: `{QUANTISATION}.{key}` is not a list of names of modules; {OWN_CONFIG}")
    return key, found


def renumbered(
    config: Mapping[str, Any], grown: Mapping[str, Any], order: Sequence[int], stems: Sequence[str]
) -> dict[str, Any]:
    """Return the grown config with the excluded modules of base layer `order[n]` listed under the new number `n`.

    `stems` are the texts that may precede a layer's number (`model.layers.`), on disk and in memory.
    """
    made, settings = dict(grown), quantisation(config)
    if settings is None:
        return made
    key, listed = _listed(settings)
    if listed:
        names = [name for each in listed for name in _moved(each, order, stems)]
        made[QUANTISATION] = {**settings, key: list(dict.fromkeys(names))}
    return made


def _moved(name: str, order: Sequence[int], stems: Sequence[str]) -> Iterator[str]:
    """Yield the names that the excluded module `name` gets in the grown model.

    There may be several, or none. A name outside the layers is yielded unchanged.
    """
    found = re.fullmatch(r"((?:.*\.)?\w+\.)(0|[1-9]\d{0,8})((?:\..*)?)", name, re.DOTALL)
    before = found[1].replace("\\", "") if found is not None else ""
    # Names may leave out the outermost words: transformers takes `layers.3.mlp` for the end of a name as well.
    if found is None or not any(stem == before or stem.endswith(f".{before}") for stem in stems):
        yield name
        return
    old, count = int(found[2]), max(order) + 1
    # Layers above the stack stay above it.
    new = [old - count + len(order)] if old >= count else [n for n, source in enumerate(order) if source == old]
    for number in new:
        yield f"{found[1]}{number}{found[3]}"


def packed_of(
    config: Mapping[str, Any], stored: Mapping[str, tuple[str, ...]], tensors: Mapping[str, TensorInfo]
) -> dict[str, Packed]:
    """Return the quantised tensors of a layer, by suffix, with what they are in full precision.

    `stored` maps suffixes on disk to names in memory. Empty where a tensor's dtype is not understood.
    """
    settings = quantisation(config)
    found: dict[str, Packed] = {}
    if settings is not None and settings["quant_method"] == COMPRESSED:
        suffix_of = {tensors[suffix].name: suffix for suffix in stored}
        for name, pack in packs_of(config, {tensors[suffix].name: tensors[suffix] for suffix in stored}).items():
            plain = suffix_of[name].removesuffix(PACK).removesuffix(WEIGHT) + WEIGHT
            module = stored[suffix_of[name]][0].rpartition(".")[0]
            found[suffix_of[name]] = Packed(suffix_of[pack.scales], plain, pack.shape, pack.code.block, module)
        return found
    for suffix, targets in stored.items() if settings is not None else ():
        info = tensors[suffix]
        if is_scale(config, suffix) or info.dtype not in QUANTISED_DTYPES or not targets:
            continue
        module = targets[0].rpartition(".")[0]
        if info.dtype == "F8_E4M3":
            rows, columns = (settings or {}).get("weight_block_size", [128, 128]) or (1, 1)
            found[suffix] = Packed(f"{suffix}_scale_inv", suffix, info.shape, (rows, columns), module)
        elif info.dtype == "U8":
            plain = suffix.removesuffix("_blocks")
            *outer, rows, groups, _ = info.shape
            shape = (*outer, groups * _BLOCK_BYTES * 2, rows)
            found[suffix] = Packed(f"{plain}_scales", plain, shape, None, module)
        else:
            return {}
    return found


def left_out(config: Mapping[str, Any], modules: Sequence[str], skeleton: Skeleton) -> dict[str, Any]:
    """Return the config with further modules excluded from quantisation."""
    made, settings = dict(config), quantisation(config)
    if settings is None or not modules:
        return made
    from transformers.quantizers.base import get_keys_to_not_convert

    key, listed = _listed(settings)
    if settings.get(key) is None:
        # The list that transformers uses where the config has none.
        listed = sorted(get_keys_to_not_convert(skeleton.model))
    made[QUANTISATION] = {**settings, key: list(dict.fromkeys([*listed, *modules]))}
    return made
