"""surgeon: grow a pretrained language model by a plan, and prove that nothing was lost.

    import surgeon
    surgeon.apply("plan.yaml", "base-model", "out")

mirrors the command line; see `surgeon.api` for every function and result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_API = (
    "apply",
    "diff",
    "export_slot",
    "inspect",
    "json_schema",
    "merge",
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
        diff,
        export_slot,
        inspect,
        json_schema,
        merge,
        preview,
        report,
        revert,
        routing_report,
        train,
        transport_report,
        verify,
    )

__all__ = [
    "__version__",
    "apply",
    "diff",
    "export_slot",
    "inspect",
    "json_schema",
    "merge",
    "preview",
    "push",
    "report",
    "revert",
    "routing_report",
    "train",
    "transport_report",
    "verify",
]


def __getattr__(name: str) -> Any:
    # Loaded at first use, so that `surgeon --help` does not wait for pydantic.
    if name in _API:
        from surgeon import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
