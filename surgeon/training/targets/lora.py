"""`lora: {…}`: a LoRA over a frozen model (Hu et al., 2022), by PEFT: h = W x + s · B A x, s = alpha / rank.

With DoRA (Liu et al., 2024) the rows of W + s · B A are scaled to trained lengths m, which begin as the lengths of W's
rows.

The adapter has the model's dtype, with float32 masters in the optimizer, like every tensor that trains. PEFT's own
modules compute it, so a saved adapter loads in PEFT unchanged. RUN's weights are W + s · B A, which `merge_adapter`
computes and rounds in the same way. The matrices that a LoRA adapts are found from headers, without torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgeon.anatomy.anatomy import Anatomy
from surgeon.anatomy.shared import within
from surgeon.blueprint.blueprint import Blueprint
from surgeon.blueprint.recipes import Adapted, Copy, Imported, Place, Product
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.header import FLOAT_DTYPES
from surgeon.common.installation import lacking
from surgeon.errors import BadInput, printable
from surgeon.grafts.composition import ATTENTION, FFN
from surgeon.manifest.trainable import TrainableSet, trainable_set
from surgeon.training.config.schema import LoraSpec, TrainConfig
from surgeon.training.targets.target import Target, Values

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from surgeon.training.trainable.trainable_set import TrainedParameters
    from surgeon.writing.compute import Evaluator

# PEFT's default name of an adapter, and the prefix of all parameter names in PEFT's own model class.
_ADAPTER, _PEFT = "default", "base_model.model."
_WEIGHT = ".weight"
# DoRA's m.
_LENGTHS = ".lora_magnitude_vector"
_BLOCKS = {"attention": (ATTENTION,), "ffn": (FFN,), "all": (ATTENTION, FFN)}


class Lora(Target):
    """The product B A, added to some matrices, which publishing merges into them."""

    changes_in_steps = False

    @classmethod
    def named_by(cls, config: TrainConfig) -> bool:
        """Return whether the config has `lora`."""
        return config.lora is not None

    @property
    def spec(self) -> LoraSpec:
        """The config's `lora`."""
        assert self.loaded.config.lora is not None
        return self.loaded.config.lora

    def names(self) -> TrainableSet:
        """Return the matrices that the LoRA adapts; merging changes all values of each.

        Raises BadInput where PEFT is not installed, a named module does not exist, a matrix has new rows or columns
        next to the base's, or a block has weights outside linear modules (experts), which could not be adapted.
        """
        out, where, targets = self.out, self.loaded.where("lora"), self.spec.targets
        if importlib.util.find_spec("peft") is None:
            raise BadInput(lacking(f"{where}`lora`", "PEFT", "peft"))
        chosen = _of_blocks(self.anatomy, targets, where) if isinstance(targets, str) else _named(out, targets, where)
        base = trainable_set(out, self.manifest, "base", self.anatomy)
        names = tuple(name for name in out.tensors if name in chosen)
        if fixed := {name for name in names if name in base.fixed}:
            raise BadInput(
                f"{where}{printable(min(fixed))} holds new rows or columns beside the base's, and a LoRA changes all of"
                " it; name other modules in `lora.targets`"
            )
        title = f"a LoRA of rank {self.spec.rank} on {len(names)} matrices"
        return TrainableSet(names, (), {}, frozenset(names) & {*base.names}, title)

    def attach(self, model: Any, wanted: TrainableSet) -> TrainedParameters:
        """Freeze the model and add the LoRA to its matrices; a classification head trains whole as well.

        Each A is drawn from U(−1/√in, 1/√in) as in PEFT, by (seed, the parameter's name). B is zero, so the model's
        outputs do not change. Raises BadInput where a tensor is no matrix of a linear module, is tied, or is only a
        part of a parameter; where PEFT adapts another module of the same name; and for DoRA on rows of zeros.
        """
        import peft
        from transformers.pytorch_utils import Conv1D

        from surgeon.training.trainable.trainable_set import StoredNames, TrainedParameters, check_set

        modules = _modules(model, [name for name in wanted.names if name not in wanted.beside], self.out.tensors)
        whole = {*StoredNames(model, (*self.out.tensors, *wanted.beside)).in_memory(wanted.beside)}
        config = peft.LoraConfig(
            r=self.spec.rank,
            lora_alpha=self.spec.scale * self.spec.rank,  # type: ignore[arg-type]  # a float is divided as well
            lora_dropout=self.spec.dropout,
            use_dora=self.spec.dora,
            target_modules=list(modules),
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in modules.values()),
        )
        peft.inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
        names: list[str] = []
        for name, parameter in model.named_parameters():
            module, adapts, _ = name.partition(".lora_")
            parameter.requires_grad_(bool(adapts) or name in whole)
            if name in whole:
                # Loaded weights may be mapped from the file.
                parameter.data = parameter.data.clone()
            elif not adapts:
                continue
            elif module not in modules:
                raise BadInput(f"{printable(module)}: PEFT takes it for one of `lora.targets` by its name; name fewer")
            elif _LENGTHS in name and not bool(parameter.all()):
                # m / ‖W‖ would be 0 / 0.
                raise BadInput(
                    f"{printable(module)}: has rows of zeros, as silent layers have, whose length DoRA divides by;"
                    " leave `lora.dora` out, or name other `lora.targets`"
                )
            else:
                _begin(parameter, modules[module].weight.dtype, f"{self.loaded.config.seed}:{name}")
            names.append(name)
        check_set(model, names)
        return TrainedParameters(tuple(names))

    def publish(self, trained: Path, wanted: TrainableSet, called: str) -> Values:
        """Return the stored weights with s · B A merged into them, and the adapter in PEFT's file format."""
        from safetensors.torch import load_file
        from transformers.pytorch_utils import Conv1D

        from surgeon.models.load import stored_dtype
        from surgeon.training.trainable.trainable_set import StoredNames

        out, model, values = self.out, self.blank(), load_file(trained)
        stored = StoredNames(model, out.tensors)
        on_disk = {parameter: name for name in out.tensors if (parameter := stored.alone(name)) is not None}
        tensors: dict[str, Tensor] = {}
        adapter: dict[str, Tensor] = {}
        whole: dict[str, None] = {}
        # Tensors of a classification head, which trains whole.
        for name in [name for name in values if ".lora_" not in name]:
            value = values.pop(name)
            tensors[on_disk[name]] = value.to(stored_dtype(out.tensors[on_disk[name]].dtype))
            adapter[f"{_PEFT}{name}"] = value
            whole.setdefault(name.removeprefix(f"{model.base_model_prefix}.").partition(".")[0])
        bench = _bench_of(out, values)
        turned: dict[str, bool] = {}
        for name, value in values.items():
            module, _, matrix = name.partition(".lora_")
            if _LENGTHS in name:
                # As PEFT saves it, without `.weight`.
                adapter[f"{_PEFT}{module}{_LENGTHS}"] = value
                continue
            adapter[f"{_PEFT}{module}.lora_{matrix[0]}{_WEIGHT}"] = value
            if matrix[0] == "B":
                continue
            turned[module] = isinstance(model.get_submodule(module), Conv1D)
            rest = matrix.removeprefix("A.")
            magnitude = _imported(f"{module}{_LENGTHS}.{rest}", values) if self.spec.dora else None
            up = _imported(f"{module}.lora_B.{rest}", values)
            product = Product(_imported(name, values), up, self.spec.scale, magnitude=magnitude)
            info = out.tensors[on_disk[f"{module}{_WEIGHT}"]]
            adapted = Adapted(Copy.of(info), (product,), info.name, info.dtype, turned=turned[module])
            tensors[info.name] = bench.compute(adapted)
        config = self._config(sorted(turned), called, transposed=any(turned.values()), whole=list(whole))
        return Values(tensors, dict(sorted(adapter.items())), config)

    def _config(self, modules: Sequence[str], called: str, *, transposed: bool, whole: Sequence[str]) -> bytes:
        """Return the adapter_config.json by which PEFT loads RUN/adapter onto the model called `called`.

        `modules` are the adapted modules, `whole` the modules of a classification head. `transposed`: matrices are
        stored as inputs × outputs.
        """
        alpha = self.spec.scale * self.spec.rank
        content = {
            "peft_type": "LORA",
            "task_type": "SEQ_CLS" if whole else "CAUSAL_LM",
            "base_model_name_or_path": called,
            "revision": None,
            "inference_mode": True,
            "r": self.spec.rank,
            "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
            "lora_dropout": self.spec.dropout,
            "use_rslora": False,
            "use_dora": self.spec.dora,
            "target_modules": list(modules),
            "bias": "none",
            "fan_in_fan_out": transposed,
            "init_lora_weights": True,
            "modules_to_save": list(whole) or None,
            "layers_to_transform": None,
            "layers_pattern": None,
        }
        return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def _of_blocks(anatomy: Anatomy, targets: str, where: str) -> set[str]:
    """Return the matrices of linear modules in the layers' FFN, attention, or both.

    Raises BadInput where such a block has matrices outside linear modules, or there is nothing to adapt.
    """
    found: set[str] = set()
    for index, tensors in enumerate(anatomy.layers):
        linear = anatomy.linear(index)
        if anatomy.family.encoder:
            found |= {info.name for suffix, info in tensors.items() if _of_encoder(suffix, linear, targets)}
            continue
        blocks = anatomy.blocks(index)
        for role in _BLOCKS[targets]:
            if (block := blocks.get(role)) is None:
                continue
            for suffix, info in tensors.items():
                if not within(suffix, block.split()) or len(info.shape) < 2:
                    continue
                if suffix.removesuffix(_WEIGHT) not in linear:
                    raise BadInput(
                        f"{where}{printable(info.name)} is in no linear module (experts, say), so `targets: {targets}`"
                        " would adapt a part alone; choose other targets, or name modules: `targets: [NAME, …]`"
                    )
                found.add(info.name)
    if not found:
        raise BadInput(
            f"{where}no layer has linear modules of the kind `{targets}` in places that are known; name them"
        )
    return found


def _of_encoder(suffix: str, linear: Collection[str], targets: str) -> bool:
    """Return whether an encoder's tensor is the matrix of a linear module in the blocks that `targets` names.

    In every encoder type the names of attention modules contain `attention` or `attn`; the other linear modules of a
    layer are the FFN.
    """
    module = suffix.removesuffix(_WEIGHT)
    if module == suffix or module not in linear:
        return False
    attends = any("attention" in part or "attn" in part for part in module.split("."))
    return targets == "all" or attends == (targets == "attention")


def _named(out: CheckpointFolder, targets: Sequence[str], where: str) -> set[str]:
    """Return the matrices of modules whose names end in one of `targets`. Raises BadInput for one without a module."""
    found: set[str] = set()
    for target in targets:
        held = {name for name in out.tensors if f".{name}".endswith(f".{target}{_WEIGHT}")}
        if not held:
            raise BadInput(
                f"{where}no module of {printable(str(out.path))} is called {printable(target)}; `targets` takes names"
                " of linear modules as its tensors have them, such as q_proj"
            )
        found |= held
    return found


def _modules(model: Any, wanted: Sequence[str], base_names: Iterable[str]) -> dict[str, Any]:
    """Return by name the linear modules whose weights these tensors on disk are.

    Raises BadInput for a tensor that is no such weight, or is tied to another one.
    """
    from accelerate.utils import find_tied_parameters
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    from surgeon.training.trainable.trainable_set import StoredNames

    stored = StoredNames(model, (*base_names, *wanted))
    shared = {name for same in find_tied_parameters(model) for name in same}
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


def _begin(parameter: nn.Parameter, dtype: torch.dtype, drawn_by: str) -> None:
    """Set A or B to its values at birth, in the model's dtype, which sharding and the optimizer's masters require.

    DoRA's lengths keep the values that PEFT computed: the lengths of W's rows, as B A is zero.
    """
    import torch

    value = parameter.data if _LENGTHS in drawn_by else torch.zeros(parameter.shape)
    if ".lora_A." in drawn_by:
        seed = int.from_bytes(hashlib.sha256(drawn_by.encode()).digest()[:8], "big") >> 1
        bound = 1 / math.sqrt(parameter.shape[1])
        value.uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))
    parameter.data = value.to(device=parameter.device, dtype=dtype)


def _imported(name: str, values: Mapping[str, Tensor]) -> Imported:
    """Return the recipe that reads a trained tensor of the adapter."""
    value = values[name]
    dtype = next(key for key, of in FLOAT_DTYPES.items() if f"torch.{of.torch}" == str(value.dtype))
    return Imported("adapter", "trained", name, dtype, tuple(value.shape))


def _bench_of(out: CheckpointFolder, values: Mapping[str, Tensor]) -> Evaluator:
    """Return an evaluator of recipes, which reads the output's tensors, and as the adapter's tensors `values`."""
    from surgeon.writing.compute import Evaluator

    class Bench(Evaluator):
        def imported(self, place: Place, name: str, tensor: str) -> Tensor:
            """Return a trained tensor of the adapter."""
            return values[tensor]

    return Bench(Blueprint(0, outputs=(), couplings={}, layers=(), operations=(), config={}), out)
