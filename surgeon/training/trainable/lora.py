"""A LoRA over a frozen model (Hu et al., 2022), by PEFT: h = W x + s · B A x, s = alpha / rank.

With DoRA (Liu et al., 2024) the rows of W + s · B A get lengths m of their own, which begin as those of W's.

The adapter's values have the model's dtype, with float32 masters in the optimizer, as everything that trains. PEFT's
own modules compute it, so what is saved loads in PEFT as it was; RUN's weights are W + s · B A, as `merge_adapter`
computes and rounds it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from surgeon.blueprint.blueprint import Blueprint
from surgeon.blueprint.recipes import Adapted, Copy, Imported, Place, Product
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.header import FLOAT_DTYPES
from surgeon.errors import BadInput, printable
from surgeon.models.load import stored_dtype
from surgeon.training.config.schema import LoraSpec
from surgeon.training.trainable.trainable_set import StoredNames
from surgeon.writing.compute import Evaluator

# What PEFT calls an adapter where nobody names it, and how its own model class begins all names.
_ADAPTER, _PEFT = "default", "base_model.model."
_WEIGHT = ".weight"
# DoRA's m.
_LENGTHS = ".lora_magnitude_vector"


def attach(
    model: Any,
    spec: LoraSpec,
    wanted: Iterable[str],
    *,
    beside: Iterable[str] = (),
    base_names: Iterable[str],
    seed: int,
) -> list[str]:
    """Freeze the model, put a LoRA at some of its matrices, and return the names of what trains, in the model's order.

    Each A is drawn by (seed, its module's name), U(−1/√in, 1/√in) as in PEFT; B is zero, so the model computes what it
    did.

    Args:
        model: the model.
        spec: the config's LoRA.
        wanted: the matrices, by their names on disk.
        beside: tensors that train whole (a classification head's), by their names on disk.
        base_names: all tensors of the checkpoint.
        seed: of the config.

    Raises:
        BadInput: a tensor is no matrix of a linear module, or makes up a parameter with others.
    """
    import peft

    beside = list(beside)
    modules = _modules(model, [name for name in wanted if name not in beside], base_names)
    whole = {*StoredNames(model, dict.fromkeys((*base_names, *beside))).in_memory(beside)}
    config = peft.LoraConfig(
        r=spec.rank,
        lora_alpha=spec.scale * spec.rank,  # type: ignore[arg-type]  # a float is divided as well
        lora_dropout=spec.dropout,
        use_dora=spec.dora,
        target_modules=list(modules),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in modules.values()),
    )
    peft.inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
    names: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name or name in whole)
        if name in whole:
            # Loaded weights may be mapped from the file.
            parameter.data = parameter.data.clone()
            names.append(name)
        elif ".lora_" in name:
            module = name.partition(".lora_")[0]
            if module not in modules:
                raise BadInput(f"{printable(module)}: PEFT takes it for one of `lora.targets` by its name; name fewer")
            names.append(name)
            _begin(parameter, modules[module].weight.dtype, f"{seed}:{name}")
    return names


def _modules(model: Any, wanted: Sequence[str], base_names: Iterable[str]) -> dict[str, Any]:
    """The linear modules whose weights these tensors on disk are."""
    stored = StoredNames(model, dict.fromkeys((*base_names, *wanted)))
    shared = _shared(model)
    found: dict[str, Any] = {}
    for name in wanted:
        parameter = stored.alone(name)
        module = None if parameter is None else model.get_submodule(parameter.removesuffix(_WEIGHT))
        if parameter is None or not isinstance(module, nn.Linear | Conv1D):
            what = "several tensors make it up" if parameter is None else type(module).__name__
            raise BadInput(
                f"{printable(name)}: no matrix of a linear module ({what}), so no LoRA goes there; name other modules"
                " in `lora.targets`"
            )
        if parameter in shared:
            raise BadInput(
                f"{printable(name)}: tied to another weight, which merging a LoRA would change too; leave it out of"
                " `lora.targets`"
            )
        found[parameter.removesuffix(_WEIGHT)] = module
    return found


def _shared(model: nn.Module) -> set[str]:
    """Names of parameters that have another name too."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name for same in names.values() if len(same) > 1 for name in same}


@torch.no_grad()
def _begin(parameter: nn.Parameter, dtype: torch.dtype, drawn_by: str) -> None:
    """A's or B's values at birth, in the model's dtype, which sharding and the optimizer's masters ask for.

    DoRA's lengths are PEFT's own: those of W's rows, as B is zero for both.
    """
    value = parameter.data if _LENGTHS in drawn_by else torch.zeros(parameter.shape)
    if ".lora_A." in drawn_by:
        seed = int.from_bytes(hashlib.sha256(drawn_by.encode()).digest()[:8], "big") >> 1
        bound = 1 / math.sqrt(parameter.shape[1])
        value.uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))
    parameter.data = value.to(device=parameter.device, dtype=dtype)


@dataclass(frozen=True)
class Merged:
    """A trained LoRA: the weights with it, by their names on disk, and the adapter's own tensors, by PEFT's names.

    `transposed`: its matrices are stored inputs by outputs. `whole` are the modules that trained whole beside it.
    """

    tensors: dict[str, Tensor]
    adapter: dict[str, Tensor]
    transposed: bool
    whole: tuple[str, ...] = ()


class _Bench(Evaluator):
    """What recipes compute with: an output's tensors, and trained values in the place of an adapter's."""

    def __init__(self, out: CheckpointFolder, values: Mapping[str, Tensor]) -> None:
        super().__init__(Blueprint(0, outputs=(), couplings={}, layers=(), operations=(), config={}), out)
        self._values = values

    def imported(self, place: Place, name: str, tensor: str) -> Tensor:
        """A trained value."""
        return self._values[tensor]


def _trained(name: str, values: Mapping[str, Tensor]) -> Imported:
    value = values[name]
    dtype = next(key for key, of in FLOAT_DTYPES.items() if f"torch.{of.torch}" == str(value.dtype))
    return Imported("adapter", "trained", name, dtype, tuple(value.shape))


def merged(out: CheckpointFolder, trained: Path, spec: LoraSpec, model: Any) -> Merged:
    """Return the stored weights with s · B A merged into them.

    Args:
        out: the output that was trained.
        trained: the checkpoint's file of trained values.
        spec: the config's LoRA.
        model: `out`'s own, without weights.
    """
    values = load_file(trained)
    stored = StoredNames(model, out.tensors)
    on_disk = {parameter: name for name in out.tensors if (parameter := stored.alone(name)) is not None}
    tensors: dict[str, Tensor] = {}
    adapter: dict[str, Tensor] = {}
    whole: dict[str, None] = {}
    # A classification head's, whole.
    for name in [name for name in values if ".lora_" not in name]:
        value = values.pop(name)
        tensors[on_disk[name]] = value.to(stored_dtype(out.tensors[on_disk[name]].dtype))
        adapter[f"{_PEFT}{name}"] = value
        whole.setdefault(name.removeprefix(f"{model.base_model_prefix}.").partition(".")[0])
    bench = _Bench(out, values)
    for name in [name for name in values if _LENGTHS in name]:
        # As PEFT saves it, without `.weight`.
        adapter[f"{_PEFT}{name.partition(_LENGTHS)[0]}{_LENGTHS}"] = values[name]
    for name, down in values.items():
        if _LENGTHS in name:
            continue
        module, a, rest = name.partition(".lora_A.")
        matrix = "A" if a else "B"
        adapter[f"{_PEFT}{module if a else name.partition('.lora_B.')[0]}.lora_{matrix}{_WEIGHT}"] = down
        if not a:
            continue
        disk = on_disk[f"{module}{_WEIGHT}"]
        up = _trained(f"{module}.lora_B.{rest}", values)
        lengths = f"{module}{_LENGTHS}.{rest}"
        magnitude = _trained(lengths, values) if spec.dora else None
        product = Product(_trained(name, values), up, spec.scale, magnitude=magnitude)
        info = out.tensors[disk]
        turned = isinstance(model.get_submodule(module), Conv1D)
        tensors[disk] = bench.compute(Adapted(Copy.of(info), (product,), disk, info.dtype, turned=turned))
    bench.close()
    modules = {name.partition(".lora_")[0] for name in values}
    transposed = any(isinstance(model.get_submodule(module), Conv1D) for module in modules)
    return Merged(tensors, dict(sorted(adapter.items())), transposed, tuple(whole))


def write_adapter(adapter: Mapping[str, Tensor], file: Path) -> None:
    """Write the adapter's tensors as PEFT names them."""
    file.unlink(missing_ok=True)
    save_file(dict(adapter), file, metadata={"format": "pt"})


def adapter_config(
    spec: LoraSpec, adapter: Iterable[str], base: str, *, transposed: bool, whole: Sequence[str] = ()
) -> bytes:
    """Return the adapter_config.json for PeftModel.from_pretrained(base, RUN/adapter).

    Args:
        spec: the config's LoRA.
        adapter: the adapter's tensors.
        base: what the adapter's config calls the model.
        transposed: whether matrices are stored inputs by outputs.
        whole: a classification head's modules.
    """
    modules = sorted({name.removeprefix(_PEFT).partition(".lora_")[0] for name in adapter if ".lora_" in name})
    alpha = spec.scale * spec.rank
    content = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if whole else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": None,
        "inference_mode": True,
        "r": spec.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": spec.dropout,
        "use_rslora": False,
        "use_dora": spec.dora,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "init_lora_weights": True,
        "modules_to_save": list(whole) or None,
        "layers_to_transform": None,
        "layers_pattern": None,
    }
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
