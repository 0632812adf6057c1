"""Singular values of adapters' gating matrices beside the backbone's (Neutral Residues, Figure 3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.families.anatomy import Anatomy
from surgeon.models.load import stored_dtype
from surgeon.runtime.adapters_rules import ADAPTER
from surgeon.runtime.rules import BRANCH

# A spectrum takes time cubic in the width: in deep models, layers are chosen evenly.
_LAYERS = 8


_GATE = f"{ADAPTER}gate_proj.weight"


@dataclass(frozen=True)
class Spectrum:
    """Singular values over the largest, in falling order: of the adapter's W_g and its layer's own gating matrix."""

    layer: int
    in_branch: bool
    adapter: tuple[float, ...]
    backbone: tuple[float, ...]


def gate_spectra(
    folder: CheckpointFolder, anatomy: Anatomy, *, progress: Callable[[str], None] = lambda line: None
) -> tuple[Spectrum, ...]:
    """Spectra of at most eight adapters, spread evenly over the layers; none where there are no adapters."""
    held = [
        (layer, inner)
        for layer, grafts in enumerate(anatomy.grafted)
        for inner in ("", BRANCH)
        if f"{inner}{_GATE}" in grafts
    ]
    count = min(len(held), _LAYERS)
    chosen = [held[round(nth * (len(held) - 1) / max(1, count - 1))] for nth in range(count)]
    part, rows = _gate_part(anatomy)
    found = []
    for layer, inner in chosen:
        progress(f"singular values of layer {layer}'s gating matrices")
        adapter = _read(folder, anatomy.grafted[layer][f"{inner}{_GATE}"].name)
        own = anatomy.grafted[layer] if inner else anatomy.layers[layer]
        backbone = _read(folder, own[f"{inner}{part}"].name)[rows]
        found.append(Spectrum(layer, bool(inner), _spectrum(adapter), _spectrum(backbone)))
    return tuple(found)


def _gate_part(anatomy: Anatomy) -> tuple[str, slice]:
    """The tensor that holds a layer's gating matrix, and which rows of it are the matrix."""
    for part in anatomy.parts:
        start = 0
        for role, rows in part.blocks:
            if role == "gate" and part.kind == "weight":
                return part.suffix, slice(start, start + rows)
            start += rows
    return "", slice(0)


def _read(folder: CheckpointFolder, name: str) -> Tensor:
    info = folder.tensors[name]
    return torch.frombuffer(folder.read(name), dtype=stored_dtype(info.dtype)).view(info.shape)


def _spectrum(matrix: Tensor) -> tuple[float, ...]:
    """From the Gram matrix of the shorter side, in float64, where squaring loses nothing visible in a picture."""
    wide = matrix.double()
    gram = wide @ wide.T if wide.shape[0] <= wide.shape[1] else wide.T @ wide
    values = torch.linalg.eigvalsh(gram).clamp_min(0).sqrt().flip(0)
    largest = float(values[0])
    return tuple((values / largest).tolist()) if largest > 0 else ()
