"""OpT-DeUS's Algorithm 1 in numpy float64 with POT's solver, written from the paper and not from surgeon.

Works on the weights of one pair of layers given as dictionaries of module name → float64 array. The modules
of fused tensors must be split by the caller.
"""

from __future__ import annotations

import numpy as np
import ot
from scipy.spatial.distance import cdist

Weights = dict[str, np.ndarray]


def transport(first: np.ndarray, second: np.ndarray, *, reg: float, solver: str) -> np.ndarray:
    """Lines 3, 4 and 7: uniform marginals, Euclidean cost between rows, Sinkhorn-Knopp (or exact)."""
    n, m = len(first), len(second)
    alpha, beta = np.full(n, 1 / n), np.full(m, 1 / m)
    cost = cdist(first, second)
    if solver == "emd":
        return ot.emd(alpha, beta, cost)
    return ot.sinkhorn(alpha, beta, cost, reg, method="sinkhorn_log", numItermax=100_000, stopThr=1e-13)


def fuse(
    first: Weights,
    second: Weights,
    *,
    reg: float = 0.06,
    solver: str = "sinkhorn",
    marginal: bool = True,
    flow: str = "opt_deus",
    cost_first: bool = False,
) -> Weights:
    """Table 1 and Algorithm 1, module by module, without the zeroing of line 11.

    Keys: q, k, v, o, gate, up, down (matrices, rows are neurons), each optionally with a bias `q_bias`, …;
    norms: pre_attn, pre_mlp, post_attn, post_mlp, q_norm, k_norm. A module may be missing, but for o. `marginal`
    multiplies every map by its number of rows (the public code does not). `cost_first`: line 4
    before line 6, as printed.
    """
    maps: dict[str, np.ndarray] = {}

    def scaled(name: str) -> np.ndarray:
        return maps[name] * (len(maps[name]) if marginal else 1.0)

    def half(name: str) -> np.ndarray:
        return 0.5 * (scaled(name) + np.eye(len(maps[name])))

    inputs = {
        "q": None,
        "k": None,
        "v": None,
        "o": "q" if flow in ("vanilla_output", "vanilla") else None,
        "gate": "o",
        "up": "o",
        "down": None,
    }
    fused: Weights = {}
    for name, source in inputs.items():
        if name not in first:
            continue
        aligned = first[name]
        if source is not None:
            mlp_vanilla = name in ("gate", "up") and flow in ("vanilla_mlp", "vanilla")
            aligned = aligned @ (half(source) if mlp_vanilla else scaled(source))
        maps[name] = transport(first[name] if cost_first else aligned, second[name], reg=reg, solver=solver)
        fused[name] = 0.5 * (scaled(name).T @ aligned + second[name])
        if f"{name}_bias" in first:
            fused[f"{name}_bias"] = 0.5 * (scaled(name).T @ first[f"{name}_bias"] + second[f"{name}_bias"])

    def vector(name: str, matrix: np.ndarray | None) -> None:
        if name in first:
            aligned = first[name] if matrix is None else matrix.T @ first[name]
            fused[name] = 0.5 * (aligned + second[name])

    vector("pre_attn", None)
    vector("pre_mlp", half("o"))
    vector("post_attn", scaled("o"))
    vector("post_mlp", scaled("down") if "down" in maps else None)
    for norm, module in (("q_norm", "q"), ("k_norm", "k")):
        if norm in first:
            vector(norm, scaled(module) if len(first[norm]) == len(maps[module]) else None)
    return fused


def fuse_experts(
    first: Weights,
    second: Weights,
    partners: list[int],
    t_o: np.ndarray,
    *,
    reg: float = 0.06,
    solver: str = "sinkhorn",
) -> Weights:
    """Experts of two layers, stacked: gate, up (experts, neurons, width), down (experts, width, neurons), any biases.

    Expert e of the second layer is fused with expert `partners[e]` of the first, as an MLP is (Table 1, scaled by the
    marginals): gate and up after T_in = `t_o`, down after none. What is of the router (`router`, `router_…`) has its
    rows in the order of `partners`; the router's matrix reads what gate reads.
    """
    fused: Weights = {}
    for name in ("gate", "up", "down"):
        aligned = first[name][partners] if name == "down" else first[name][partners] @ t_o
        maps = [
            len(upper) * transport(lower, upper, reg=reg, solver=solver)
            for lower, upper in zip(aligned, second[name], strict=True)
        ]
        turned = [scaled.T @ lower for scaled, lower in zip(maps, aligned, strict=True)]
        fused[name] = 0.5 * (np.stack(turned) + second[name])
        if f"{name}_bias" in first:
            moved = [scaled.T @ lower for scaled, lower in zip(maps, first[f"{name}_bias"][partners], strict=True)]
            fused[f"{name}_bias"] = 0.5 * (np.stack(moved) + second[f"{name}_bias"])
    for name in first:
        if name.startswith("router"):
            aligned = first[name] @ t_o if name == "router" else first[name]
            fused[name] = 0.5 * (aligned[partners] + second[name])
    return fused
