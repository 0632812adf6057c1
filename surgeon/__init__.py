"""surgeon: grow a pretrained language model by a plan, and prove that nothing was lost.

    import surgeon
    surgeon.apply("plan.yaml", "base-model", "out")

mirrors the command line, one function a command; the function and its result are in the command's room. Progress is
shown where a listener is given (`with surgeon.ProgressListener() as listener`), errors for the user are `SurgeonError`.
"""

import os
import sys

# `python -m surgeon…` has the working directory first on its path, and this file is the first of surgeon's that runs:
# a `typing.py` that lies there is not what is imported below. So nothing is imported above, not even `__future__`.
if sys.argv[:1] == ["-m"] and sys.path[:1] in ([""], [os.getcwd()]):  # noqa: PTH109
    del sys.path[0]

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from surgeon._version import __version__ as __version__

if TYPE_CHECKING:
    from surgeon.apply.apply import apply as apply
    from surgeon.apply.preview import preview as preview
    from surgeon.common.listener import ProgressListener as ProgressListener
    from surgeon.compare.compare import compare as compare
    from surgeon.continual.continual import continual as continual
    from surgeon.data.recall import recall as recall
    from surgeon.errors import BadInput as BadInput
    from surgeon.errors import PromiseBroken as PromiseBroken
    from surgeon.errors import SurgeonError as SurgeonError
    from surgeon.evaluate.evaluate import evaluate as evaluate
    from surgeon.plan.plan import json_schema as json_schema
    from surgeon.plan.plan import parse_plan as parse_plan
    from surgeon.report.families import families as families
    from surgeon.report.inspect import inspect as inspect
    from surgeon.report.report import report as report
    from surgeon.report.routing import routing_report as routing_report
    from surgeon.report.transport import transport_report as transport_report
    from surgeon.rework.apply_delta import apply_delta as apply_delta
    from surgeon.rework.make_delta import make_delta as make_delta
    from surgeon.rework.merge import merge as merge
    from surgeon.rework.revert import revert as revert
    from surgeon.share.export_slot import export_slot as export_slot
    from surgeon.share.gguf_pattern import gguf_pattern as gguf_pattern
    from surgeon.share.push import push as push
    from surgeon.train.train import rehearse as rehearse
    from surgeon.train.train import train as train
    from surgeon.verify.diff import diff as diff
    from surgeon.verify.verify import verify as verify

# What `import surgeon` offers, and the module that defines it; loaded at first use, so that `surgeon --help` does not
# wait for pydantic.
_HOMES = {
    "BadInput": "errors",
    "ProgressListener": "common.listener",
    "PromiseBroken": "errors",
    "SurgeonError": "errors",
    "apply": "apply.apply",
    "apply_delta": "rework.apply_delta",
    "compare": "compare.compare",
    "continual": "continual.continual",
    "diff": "verify.diff",
    "evaluate": "evaluate.evaluate",
    "export_slot": "share.export_slot",
    "families": "report.families",
    "gguf_pattern": "share.gguf_pattern",
    "inspect": "report.inspect",
    "json_schema": "plan.plan",
    "make_delta": "rework.make_delta",
    "merge": "rework.merge",
    "parse_plan": "plan.plan",
    "preview": "apply.preview",
    "push": "share.push",
    "recall": "data.recall",
    "rehearse": "train.train",
    "report": "report.report",
    "revert": "rework.revert",
    "routing_report": "report.routing",
    "train": "train.train",
    "transport_report": "report.transport",
    "verify": "verify.verify",
}

__all__ = sorted([*_HOMES, "__version__"])


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
