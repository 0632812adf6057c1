"""Which tensors a LoRA adapts, from headers alone: the linear modules of FFN or attention, or modules by name."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Sequence

from surgeon.anatomy.anatomy import Anatomy, within
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.common.installation import lacking
from surgeon.errors import BadInput, printable
from surgeon.grafts.composition import ATTENTION, FFN
from surgeon.manifest.manifest import Manifest
from surgeon.manifest.trainable import TrainableSet, trainable_set
from surgeon.training.config.loading import LoadedConfig

_WEIGHT = ".weight"
_BLOCKS = {"attention": (ATTENTION,), "ffn": (FFN,), "all": (ATTENTION, FFN)}


def lora_set(out: CheckpointFolder, manifest: Manifest | None, loaded: LoadedConfig, anatomy: Anatomy) -> TrainableSet:
    """Return the matrices that the config's LoRA adapts, all of whose values its product changes.

    Args:
        out: the output to train.
        manifest: its manifest; None where there was no surgery.
        loaded: the training config.
        anatomy: the output's parts.

    Raises:
        BadInput: PEFT is not installed, a module is not there, or a block has weights that no linear module holds
            (experts), so that a part of it would stay as it is.
    """
    spec = loaded.config.lora
    assert spec is not None
    where = loaded.where("lora")
    if importlib.util.find_spec("peft") is None:
        raise BadInput(lacking(f"{where}`lora`", "PEFT", "peft"))
    chosen = (
        _of_blocks(anatomy, spec.targets, where) if isinstance(spec.targets, str) else _named(out, spec.targets, where)
    )
    base = trainable_set(out, manifest, "base", anatomy)
    names = tuple(name for name in out.tensors if name in chosen)
    fixed = {name for name in names if name in base.fixed}
    if fixed:
        raise BadInput(
            f"{where}{printable(min(fixed))} holds new rows or columns beside the base's, and a LoRA changes all of it;"
            " name other modules in `lora.targets`"
        )
    title = f"a LoRA of rank {spec.rank} on {len(names)} matrices"
    return TrainableSet(names, (), {}, frozenset(names) & set(base.names), title)


def _of_blocks(anatomy: Anatomy, targets: str, where: str) -> set[str]:
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
                if not within(suffix, block) or len(info.shape) < 2:
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
    """Whether an encoder's tensor is the matrix of a linear module of these blocks.

    Every type calls attention's modules so; what else is linear in a layer is the FFN.
    """
    module = suffix.removesuffix(_WEIGHT)
    if module == suffix or module not in linear:
        return False
    attends = any("attention" in part or "attn" in part for part in module.split("."))
    return targets == "all" or attends == (targets == "attention")


def _named(out: CheckpointFolder, targets: Sequence[str], where: str) -> set[str]:
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
