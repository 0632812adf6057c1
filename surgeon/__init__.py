"""surgeon: grow a pretrained language model by a plan, and prove that nothing was lost.

    import surgeon
    surgeon.apply("plan.yaml", "base-model", "out")

mirrors the command line, one function a command; `surgeon.api` has the types of their results. Progress is shown where
a listener is given (`with surgeon.ProgressListener() as listener`), errors for the user are `SurgeonError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_API = (
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
)

if TYPE_CHECKING:
    from surgeon.api import (
        apply,
        apply_delta,
        continual,
        diff,
        evaluate,
        export_slot,
        inspect,
        json_schema,
        make_delta,
        merge,
        parse_plan,
        preview,
        push,
        report,
        revert,
        routing_report,
        train,
        transport_report,
        verify,
    )
    from surgeon.errors import BadInput, PromiseBroken, SurgeonError
    from surgeon.progress import ProgressListener

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
    # Loaded at first use, so that `surgeon --help` does not wait for pydantic.
    if name in _API:
        from surgeon import api

        return getattr(api, name)
    if name == "ProgressListener":
        from surgeon.progress import ProgressListener

        return ProgressListener
    if name in ("BadInput", "PromiseBroken", "SurgeonError"):
        from surgeon import errors

        return getattr(errors, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
