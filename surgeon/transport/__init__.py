"""Optimal transport between the rows of two weight matrices: cost, solvers, maps that are applied unformed.

Pure functions on tensors; nothing here knows of files, layers or plans.
"""

from __future__ import annotations

from surgeon.transport.problem import Solution, TransportMap, TransportSettings
from surgeon.transport.solving import HalfIdentity, half_identity, solve

__all__ = ["HalfIdentity", "Solution", "TransportMap", "TransportSettings", "half_identity", "solve"]
