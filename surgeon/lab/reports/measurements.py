"""Measurements of an output's weights and states: singular values of adapters, and distances of control branches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from surgeon.anatomy.anatomy import Anatomy
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.common.listener import Listener
from surgeon.models.load import load_model, stored_dtype
from surgeon.models.tokenizer import open_tokenizer
from surgeon.runtime.adapters_rules import ADAPTER
from surgeon.runtime.rules import BRANCH

# The most layers with a spectrum, whose time is cubic in the width; layers are chosen evenly.
_LAYERS = 8
_GATE = f"{ADAPTER}gate_proj.weight"

# Table 6 of the paper, one row per category (family relations repeat the first row); each pair becomes a sentence.
PAIRS = (
    "king:queen, man:woman, actor:actress, waiter:waitress, uncle:aunt, nephew:niece",
    "swim:swam, fly:flew, see:saw, go:went, walking:walked, swimming:swam",
    "Paris:France, Tokyo:Japan, Brasilia:Brazil, Ottawa:Canada",
    "Russia:ruble, Japan:yen, United States:dollar, United Kingdom:pound",
    "dog:dogs, cat:cats, mouse:mice, goose:geese, child:children, person:people",
    "good:better, cold:colder",
    "Apple:iPhone, Microsoft:Windows",
    "Spain:Spanish, Italy:Italian",
    "tree:forest, building:city",
)


@dataclass(frozen=True)
class Spectrum:
    """Singular values divided by the largest, descending: of an adapter's W_g and of its layer's own gating matrix."""

    layer: int
    in_branch: bool
    adapter: tuple[float, ...]
    backbone: tuple[float, ...]


@dataclass(frozen=True)
class Alignment:
    """How far the two branches of one layer's control block agree, by the last token's states over all sentences.

    `cosine` and `distance` (Euclidean) are means between the branches; `norm` is the mean length of the pre-trained
    states. `points` contains (pre-trained x, y, expanded x, y) for each sentence, on the two main axes of this layer's
    states.
    """

    layer: int
    cosine: float
    distance: float
    norm: float
    points: tuple[tuple[float, float, float, float], ...]


@dataclass(frozen=True)
class Probing:
    """The alignments by layer; or, in `missing`, the reason why there are none."""

    layers: tuple[Alignment, ...]
    sentences: tuple[str, ...]
    missing: str = ""


def gate_spectra(folder: CheckpointFolder, anatomy: Anatomy, listener: Listener) -> tuple[Spectrum, ...]:
    """Return spectra of at most eight adapters, spread evenly over the layers (Neutral Residues, Figure 3)."""
    adapters = [
        (layer, inner)
        for layer, grafts in enumerate(anatomy.grafted)
        for inner in ("", BRANCH)
        if f"{inner}{_GATE}" in grafts
    ]
    count = min(len(adapters), _LAYERS)
    chosen = [adapters[round(nth * (len(adapters) - 1) / max(1, count - 1))] for nth in range(count)]
    found = []
    if chosen:
        listener.begin("singular values of gating matrices", len(chosen), "layers")
    for layer, inner in chosen:
        part, rows = _gate_part(anatomy, layer)
        adapter = _read(folder, anatomy.grafted[layer][f"{inner}{_GATE}"].name)
        own = anatomy.grafted[layer] if inner else anatomy.layers[layer]
        # A layer with experts has no single gating matrix.
        backbone = _spectrum(_read(folder, own[f"{inner}{part}"].name)[rows]) if part else ()
        found.append(Spectrum(layer, bool(inner), _spectrum(adapter), backbone))
        listener.advance(1)
    return tuple(found)


def _gate_part(anatomy: Anatomy, layer: int) -> tuple[str, slice]:
    """Return (suffix of the tensor with a layer's gating matrix, its rows there); an empty suffix: there is none."""
    for part in anatomy.kinds[anatomy.kind_of[layer]].parts:
        start = 0
        for role, rows in part.blocks:
            if role == "gate" and part.kind == "weight":
                return part.suffix, slice(start, start + rows)
            start += rows
    return "", slice(0)


def _read(folder: CheckpointFolder, name: str) -> Tensor:
    """Return a stored tensor, in its stored dtype."""
    info = folder.tensors[name]
    return torch.frombuffer(folder.read(name), dtype=stored_dtype(info.dtype)).view(info.shape)


def _spectrum(matrix: Tensor) -> tuple[float, ...]:
    """Return the singular values divided by the largest; empty for a zero matrix.

    They come from the Gram matrix of the shorter side in float64, where squaring loses nothing visible in a picture.
    """
    wide = matrix.double()
    gram = wide @ wide.T if wide.shape[0] <= wide.shape[1] else wide.T @ wide
    values = torch.linalg.eigvalsh(gram).clamp_min(0).sqrt().flip(0)
    largest = float(values[0])
    return tuple((values / largest).tolist()) if largest > 0 else ()


def sentences() -> tuple[str, ...]:
    """Return the probe sentences."""
    pairs = (pair.partition(":") for row in PAIRS for pair in row.split(", "))
    return tuple(f"{first} is to {second}" for first, _, second in pairs)


def branch_alignment(folder: CheckpointFolder, device: str, listener: Listener) -> Probing:
    """Run the probe sentences through the checkpoint, and compare the branches of its control blocks.

    Source: Control LLM, appendix B, Figures 3 and 8. Raises BadInput where the checkpoint cannot be loaded.
    """
    probes = sentences()
    tokenizer, why_not = open_tokenizer(folder.path)
    if tokenizer is None:
        return Probing((), probes, f"the probe sentences were not run: {why_not}")
    ids = [tokenizer.ids(sentence) for sentence in probes]
    model = load_model(folder, device=device, say=listener.say)
    if any(not row or max(row) >= model.get_input_embeddings().weight.shape[0] for row in ids):
        return Probing((), probes, "the probe sentences were not run: the tokenizer is not this model's")
    listener.say("comparing the branches of control blocks on probe sentences")
    listener.begin("probe sentences", len(ids), "sentences")
    heard: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for name, layer in model.named_modules():
        # Find layers by number, because model types name their list of layers differently.
        number = name.rpartition(".")[2]
        if number.isdecimal() and getattr(layer, "interpolator", None) is not None:
            layer.interpolator.register_forward_hook(_recorder(heard.setdefault(int(number), [])))
    with torch.inference_mode():
        for row in ids:
            model(torch.tensor([row], device=device), use_cache=False, logits_to_keep=1)
            listener.advance(1)
    return Probing(tuple(_alignment(layer, states) for layer, states in heard.items()), probes)


def _recorder(states: list[tuple[Tensor, Tensor]]) -> Callable[..., None]:
    """Return a forward hook for an interpolator that appends the last token's states of both branches to `states`."""

    def record(_module: Any, inputs: tuple[Tensor, ...], _result: Any) -> None:
        """Append (pre-trained state, expanded state) of the last token."""
        _, pretrained, expanded = inputs
        states.append((pretrained[0, -1].double().cpu(), expanded[0, -1].double().cpu()))

    return record


def _alignment(layer: int, states: list[tuple[Tensor, Tensor]]) -> Alignment:
    """Compute a layer's alignment from the (pre-trained, expanded) states of all sentences."""
    pretrained = torch.stack([p for p, _ in states])
    expanded = torch.stack([e for _, e in states])
    both = torch.cat((pretrained, expanded))
    # Two principal components; where the branches agree, their points coincide.
    _, _, axes = torch.linalg.svd(both - both.mean(0), full_matrices=False)
    flat = (both - both.mean(0)) @ axes[:2].T
    half = len(states)
    return Alignment(
        layer=layer,
        cosine=float(functional.cosine_similarity(pretrained, expanded, dim=-1).mean()),
        distance=float((expanded - pretrained).norm(dim=-1).mean()),
        norm=float(pretrained.norm(dim=-1).mean()),
        points=tuple((*map(float, flat[i]), *map(float, flat[half + i])) for i in range(half)),  # type: ignore[misc]
    )
