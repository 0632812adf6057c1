"""Optimal transport between the rows of two weight matrices: cost, solvers, maps that are applied without copies.

Pure functions on tensors: no files, layers or plans here.
"""

from __future__ import annotations

from surgeon.transport.heads import AttentionWeights, HeadMaps, head_maps
from surgeon.transport.maps import HalfIdentity, half_identity, identity
from surgeon.transport.problem import Solution, TransportMap, TransportSettings
from surgeon.transport.solving import solve

__all__ = [
    "AttentionWeights",
    "HalfIdentity",
    "HeadMaps",
    "Solution",
    "TransportMap",
    "TransportSettings",
    "half_identity",
    "head_maps",
    "identity",
    "solve",
]
