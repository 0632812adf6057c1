"""What the command line and a notebook call: one function a command, typed results (`surgeon.results`), no printing.

growing: preview, apply, merge. proving: verify, diff. learning: train, continual, evaluate. parts: revert, make_delta,
apply_delta, export_slot. sharing: push. telling: inspect, report, routing_report. What they all need is in common.
"""

from __future__ import annotations

from surgeon.api.common import Quiet
from surgeon.api.growing import apply, merge, preview
from surgeon.api.learning import continual, evaluate, train
from surgeon.api.parts import apply_delta, export_slot, make_delta, revert
from surgeon.api.proving import diff, verify
from surgeon.api.sharing import push
from surgeon.api.telling import inspect, report, routing_report
from surgeon.entropies import TransportReport, transport_report
from surgeon.plan.loading import parse_plan
from surgeon.plan.schema import json_schema
from surgeon.results import (
    Applied,
    AppliedDelta,
    Continued,
    Difference,
    Evaluation,
    Exported,
    Inspection,
    MadeDelta,
    Merged,
    Preview,
    Pushed,
    Reported,
    Reverted,
    RoutingReport,
    Trained,
    Verification,
)

__all__ = [
    "Applied",
    "AppliedDelta",
    "Continued",
    "Difference",
    "Evaluation",
    "Exported",
    "Inspection",
    "MadeDelta",
    "Merged",
    "Preview",
    "Pushed",
    "Quiet",
    "Reported",
    "Reverted",
    "RoutingReport",
    "Trained",
    "TransportReport",
    "Verification",
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
