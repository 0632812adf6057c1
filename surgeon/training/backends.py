"""The attention implementations and trackers that a config can name, and the packages they need; none is imported.

transformers has the same lists, behind an import of torch.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import AfterValidator

from surgeon.common.formatting import did_you_mean
from surgeon.errors import printable

# The Python modules that a backend needs: one module of each group.
Needs = tuple[tuple[str, ...], ...]

ATTENTION: Mapping[str, Needs] = {
    "eager": (),
    "sdpa": (),
    "flex_attention": (),
    "flash_attention_2": (("flash_attn", "kernels"),),
    "flash_attention_3": (("flash_attn_interface", "kernels"),),
    "flash_attention_4": (("flash_attn", "kernels"),),
}
# `kernels-community/flash-attn2`, say: transformers fetches it from the Hub.
_OF_THE_HUB: Needs = (("kernels",),)

TRACKERS: Mapping[str, Needs] = {
    "azure_ml": (("azureml",),),
    "clearml": (("clearml",),),
    "codecarbon": (("codecarbon",),),
    "comet_ml": (("comet_ml",),),
    "dagshub": (("dagshub",), ("mlflow",)),
    "dvclive": (("dvclive",),),
    "flyte": (("flytekit",),),
    # Needs only the environment that it runs in.
    "kubeflow": (),
    "mlflow": (("mlflow",),),
    "neptune": (("neptune",),),
    "swanlab": (("swanlab",),),
    "tensorboard": (("tensorboard", "tensorboardX"),),
    "trackio": (("trackio",),),
    "wandb": (("wandb",),),
}


def _known_attention(given: str) -> str:
    """Return `given`, the name of an attention implementation.

    Raises ValueError unless transformers has it, it is registered there, or it contains `/` (a kernel of the Hub).
    """
    if "/" in given or given in ATTENTION or given in _registered():
        return given
    raise ValueError(f"`attention` is {printable(given)}{did_you_mean(given, list(ATTENTION))}")


def _registered() -> Iterable[str]:
    """Return the names of the attention functions registered in transformers; empty where it is not imported."""
    models = sys.modules.get("transformers.modeling_utils")
    return () if models is None else models.ALL_ATTENTION_FUNCTIONS.valid_keys()


def _known_tracker(given: str) -> str:
    """Return `given`, the name of a tracker. Raises ValueError for a tracker that transformers does not have."""
    if given not in TRACKERS:
        raise ValueError(f"{printable(given)}: no tracker of that name{did_you_mean(given, list(TRACKERS))}")
    return given


AttentionName = Annotated[str, AfterValidator(_known_attention)]
TrackerName = Annotated[str, AfterValidator(_known_tracker)]


def missing_for_attention(name: str | None) -> str:
    """Return a sentence about packages that `attention` needs and that are not installed; empty: none is missing."""
    needs = () if name is None else ATTENTION.get(name, _OF_THE_HUB if "/" in name else ())
    if lacking := _lacking(needs):
        return f"`attention` is {printable(str(name))}, which needs {lacking}; install it, or use sdpa"
    return ""


def missing_for_tracker(name: str) -> str:
    """Return a sentence about the packages that a tracker needs and that are not installed; empty: none is missing."""
    if lacking := _lacking(TRACKERS[name]):
        return f"`report_to`: {name} needs {lacking}; install it, or leave {name} out"
    return ""


def _lacking(needs: Needs) -> str:
    """Describe the first group of modules with none installed; return an empty string where every group has one."""
    for group in needs:
        if not any(importlib.util.find_spec(module) for module in group):
            which = " or ".join(group)
            return (
                f"the Python module {which}, which is not installed"
                if len(group) == 1
                else (f"one of the Python modules {which}, and none is installed")
            )
    return ""
