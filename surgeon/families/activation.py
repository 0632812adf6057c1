"""The activation of a layer's FFN where no field of config.json names one: found by watching a twin's FFN run.

An FFN's code may call its activation by a function (LFM2), name it inside another setting (DBRX), or write it out as a
formula (BLOOM). What it calls of torch shows which it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surgeon.common.devices import one_thread
from surgeon.families.silence import some_tokens
from surgeon.families.skeleton import Skeleton

if TYPE_CHECKING:
    from torch import nn


def activation_in(twin: Skeleton, block: nn.Module) -> str:
    """The activation that a block of the twin applies, by its usual name; empty where that is none of those known.

    The twin is of no other use afterwards.
    """
    import torch
    from torch.nn import functional as F
    from torch.overrides import TorchFunctionMode

    called: dict[str, None] = {}
    # ReLU and its square, and the parts of GELU's approximation by tanh, are called by several names.
    squares = (torch.square, torch.pow, torch.Tensor.pow, torch.Tensor.square)
    names: dict[Any, str] = {
        F.silu: "silu",
        torch.relu: "relu",
        F.relu: "relu",
        torch.Tensor.relu: "relu",
        torch.tanh: "tanh",
    }
    names |= dict.fromkeys(squares, "square") | {torch.Tensor.tanh: "tanh"}

    class Watch(TorchFunctionMode):
        """Notes what is called."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is F.gelu:
                called["gelu" if (kwargs or {}).get("approximate", "none") == "none" else "tanh"] = None
            elif func in names:
                called[names[func]] = None
            return func(*args, **(kwargs or {}))

    own = block.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        with Watch():
            return own(*args, **kwargs)

    block.forward = watched
    with torch.no_grad(), one_thread():
        twin.model(input_ids=some_tokens(twin), use_cache=False)
    found = [name for name in ("silu", "gelu", "relu") if name in called]
    if len(found) > 1:
        return ""
    if found == ["relu"]:
        return "relu2" if "square" in called else "relu"
    return found[0] if found else "gelu_pytorch_tanh" if "tanh" in called else ""
