"""surgeon: grow a pretrained language model by a plan, and prove that nothing was lost.

    import surgeon
    surgeon.apply("plan.yaml", "base-model", "out")

mirrors the command line, one function a command; the function and its result are in the command's room. Progress is
shown where a listener is given (`with surgeon.ProgressListener() as listener`), errors for the user are `SurgeonError`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from surgeon._version import __version__

if TYPE_CHECKING:
    from surgeon.apply.apply import apply
    from surgeon.apply.preview import preview
    from surgeon.common.listener import ProgressListener
    from surgeon.continual.continual import continual
    from surgeon.errors import BadInput, PromiseBroken, SurgeonError
    from surgeon.evaluate.evaluate import evaluate
    from surgeon.plan.plan import json_schema, parse_plan
    from surgeon.report.inspect import inspect
    from surgeon.report.report import report
    from surgeon.report.routing import routing_report
    from surgeon.report.transport import transport_report
    from surgeon.rework.apply_delta import apply_delta
    from surgeon.rework.make_delta import make_delta
    from surgeon.rework.merge import merge
    from surgeon.rework.revert import revert
    from surgeon.share.export_slot import export_slot
    from surgeon.share.push import push
    from surgeon.train.train import train
    from surgeon.verify.diff import diff
    from surgeon.verify.verify import verify

# What `import surgeon` offers, and the module that defines it; loaded at first use, so that `surgeon --help` does not
# wait for pydantic.
_HOMES = {
    "BadInput": "errors",
    "ProgressListener": "common.listener",
    "PromiseBroken": "errors",
    "SurgeonError": "errors",
    "apply": "apply.apply",
    "apply_delta": "rework.apply_delta",
    "continual": "continual.continual",
    "diff": "verify.diff",
    "evaluate": "evaluate.evaluate",
    "export_slot": "share.export_slot",
    "inspect": "report.inspect",
    "json_schema": "plan.plan",
    "make_delta": "rework.make_delta",
    "merge": "rework.merge",
    "parse_plan": "plan.plan",
    "preview": "apply.preview",
    "push": "share.push",
    "report": "report.report",
    "revert": "rework.revert",
    "routing_report": "report.routing",
    "train": "train.train",
    "transport_report": "report.transport",
    "verify": "verify.verify",
}

__all__ = [
    "BadInput",
    "ProgressListener",
    "PromiseBroken",
    "SurgeonError",
    "__version__",
    "apply",
    "apply_delta",
    "continual",
    "diff",
    "evaluate",
    "export_slot",
    "inspect",
    "json_schema",
    "make_delta",
    "merge",
    "parse_plan",
    "preview",
    "push",
    "report",
    "revert",
    "routing_report",
    "train",
    "transport_report",
    "verify",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


class _Package(ModuleType):
    """`surgeon.apply` is the function, whether or not the room `surgeon/apply/` was imported before.

    The import system binds every subpackage to its parent under its name; rooms are named after their command.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
