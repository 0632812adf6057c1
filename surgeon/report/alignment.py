"""How far a control block's two branches are apart, layer by layer (Control LLM, appendix B, Figures 3 and 8)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.models.load import load_model
from surgeon.models.tokens import find_tokenizer

# Table 6 of the paper, one row a category (family relations repeat the first); each pair becomes a sentence.
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
class Alignment:
    """The last token's states of both branches of one layer, over all sentences.

    `cosine` and `distance` (Euclidean) are means between the branches; `norm` is the pre-trained states' mean length.
    `points` are (pre-trained x, y, expanded x, y), a sentence each, on the two main axes of this layer's states.
    """

    layer: int
    cosine: float
    distance: float
    norm: float
    points: tuple[tuple[float, float, float, float], ...]


@dataclass(frozen=True)
class Probing:
    """Alignments by layer, or, in `missing`, why there are none."""

    layers: tuple[Alignment, ...]
    sentences: tuple[str, ...]
    missing: str = ""


def sentences() -> tuple[str, ...]:
    """The probe sentences."""
    pairs = (pair.partition(":") for row in PAIRS for pair in row.split(", "))
    return tuple(f"{first} is to {second}" for first, _, second in pairs)


def branch_alignment(
    folder: CheckpointFolder,
    *,
    device: str = "cpu",
    trust_remote_code: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> Probing:
    """Run the probe sentences through the checkpoint and compare the branches of its control blocks.

    Raises BadInput where the checkpoint cannot be loaded.
    """
    probes = sentences()
    tokenizer, why_not = find_tokenizer(folder.path)
    if tokenizer is None:
        return Probing((), probes, f"the probe sentences were not run: {why_not}")
    ids = [tokenizer(sentence)["input_ids"] for sentence in probes]
    vocabulary = folder.config.get("vocab_size", 0)
    if any(not row or max(row) >= vocabulary for row in ids):
        return Probing((), probes, "the probe sentences were not run: the tokenizer is not this model's")
    progress("comparing the branches of control blocks on probe sentences")
    model = load_model(folder.path, device=device, trust_remote_code=trust_remote_code or folder.code == "shipped")
    heard: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for index, layer in enumerate(model.base_model.layers):
        if getattr(layer, "interpolator", None) is not None:
            layer.interpolator.register_forward_hook(_recorder(heard.setdefault(index, [])))
    with torch.inference_mode():
        for row in ids:
            model(torch.tensor([row], device=device), use_cache=False, logits_to_keep=1)
    return Probing(tuple(_alignment(layer, states) for layer, states in heard.items()), probes)


def _recorder(states: list[tuple[Tensor, Tensor]]) -> Callable[..., None]:
    def record(_module: Any, inputs: tuple[Tensor, ...], _result: Any) -> None:
        _, pretrained, expanded = inputs
        states.append((pretrained[0, -1].double().cpu(), expanded[0, -1].double().cpu()))

    return record


def _alignment(layer: int, states: list[tuple[Tensor, Tensor]]) -> Alignment:
    pretrained = torch.stack([p for p, _ in states])
    expanded = torch.stack([e for _, e in states])
    both = torch.cat((pretrained, expanded))
    # Principal components in two dimensions; where the branches agree, their points lie on each other.
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
