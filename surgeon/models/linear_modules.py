"""The linear modules of a decoder's attention and FFN, by the names that a LoRA takes as targets."""

from __future__ import annotations

from surgeon.families.anatomy import Anatomy
from surgeon.runtime.composition import ATTENTION, FFN

_WEIGHT = ".weight"


def linear_modules(anatomy: Anatomy) -> tuple[list[str], str]:
    """Return what a LoRA can adapt of attention and FFN, as names for `targets`, and a matrix that it cannot.

    Names are paths within a layer, in the layers' order. The second is empty where `targets: all` would do. FFNs are
    left out where one has experts, with which PEFT confuses the modules beside them.
    """
    linear: dict[str, dict[str, None]] = {role: {} for role in (ATTENTION, FFN)}
    others: dict[str, dict[str, str]] = {role: {} for role in (ATTENTION, FFN)}
    for index, tensors in enumerate(anatomy.layers):
        modules = anatomy.linear(index)
        for role, block in anatomy.blocks(index).items():
            for suffix, info in tensors.items():
                path = suffix.removesuffix(_WEIGHT)
                if suffix.startswith(f"{block}.") and len(info.shape) > 1 and role in linear:
                    if path in modules:
                        linear[role][path] = None
                    else:
                        others[role].setdefault(path, info.name)
    other = next((name for found in others.values() for name in found.values()), "")
    whole = [role for role, found in others.items() if not any("experts" in path.split(".") for path in found)]
    return [path for role in whole for path in linear[role]], other
