"""The worth of each expert of a mixture on a text: the base runs whole, and again without some experts.

REAP (Lasby et al. 2025): S_j is the mean, over the tokens that the router sends to expert j, of g_j(x) · ‖f_j(x)‖, with
the weight g_j that the layer gives to the expert and its output f_j. Frequency: how many tokens are sent to j. Loss:
the growth of the loss without only expert j. The weights of one layer at a time are in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from surgeon.anatomy.mixture import expert_modules
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.common import devices
from surgeon.errors import BadInput, printable
from surgeon.models.load import running
from surgeon.models.stream import StreamedModel
from surgeon.models.tokens import token_batches

By = Literal["reap", "frequency", "loss"]
# The experts that stay, by layer.
Kept = Mapping[int, Sequence[int]]

_MOST_LOGITS = 2**26


@dataclass
class _Block:
    """The experts of one layer in memory.

    `held` lists the tensors with a slice per expert as (owner, key, axis), `counters` the attributes that hold the
    number of experts as (module, name). `kept` and `buffers` are set while some experts are removed.
    """

    layer: nn.Module
    experts: nn.Module
    count: int
    held: list[tuple[nn.Module, str, int]]
    counters: list[tuple[nn.Module, str]]
    kept: Tensor | None = None
    buffers: list[tuple[nn.Module, str, Tensor]] = field(default_factory=list)


class Experts:
    """A base and two parts of a text: the first gives the experts' scores, the second the loss without some."""

    def __init__(
        self,
        base: CheckpointFolder,
        layers: Mapping[int, int],
        text: Path,
        *,
        vocabulary: int,
        window: int,
        windows: int,
    ) -> None:
        """Open the base, and tokenise a text: `windows` windows to judge experts by, and as many held out.

        `layers` maps each layer with experts to their number. Raises BadInput where the text is too short, or the base
        cannot be run.
        """
        ids = token_batches(base.path, text=text, window=window, windows=2 * windows, vocabulary=vocabulary).ids
        if len(ids) < 2 * windows:
            raise BadInput(
                f"{printable(str(text))}: too short to measure experts on, {len(ids)} of {2 * windows} windows of"
                f" {window} tokens; give a longer text, or a smaller `windows`"
            )
        self.model = StreamedModel(base, device=devices.resolve("auto"))
        self._judged, self._measured = ids[:windows], ids[windows:]
        self.predictions = self._measured.numel() - windows
        self._blocks = {layer: _block(self.model.layers[layer], layer, count) for layer, count in layers.items()}
        self.reap = {layer: torch.zeros(count, dtype=torch.float64) for layer, count in layers.items()}
        self.frequency = {layer: torch.zeros(count, dtype=torch.float64) for layer, count in layers.items()}

    def scores(self, by: By) -> dict[int, list[float]]:
        """Return the score of each expert, by layer; by `loss`, the loss on the first windows without it alone."""
        if by == "loss":
            return {
                layer: [self._without(layer, number) for number in range(block.count)]
                for layer, block in self._blocks.items()
            }
        self._judge()
        found = self.reap if by == "reap" else self.frequency
        return {layer: values.tolist() for layer, values in found.items()}

    def loss(self, kept: Kept) -> float:
        """Return the held-out loss, in nats per token, with only the experts `kept` in the layers that it names."""
        with self._only(kept):
            return float(self._losses(self._measured).mean())

    def _without(self, layer: int, number: int) -> float:
        """Return the loss on the first windows without one expert."""
        with self._only({layer: [each for each in range(self._blocks[layer].count) if each != number]}):
            return float(self._losses(self._judged).mean())

    def _judge(self) -> None:
        """Fill `reap` and `frequency` by running the base on the first text."""
        with ExitStack() as hooks:
            for layer, block in self._blocks.items():
                hook = block.experts.register_forward_pre_hook(
                    lambda module, given, named, layer=layer: self._add(layer, module, [*given, *named.values()]),
                    with_kwargs=True,
                )
                hooks.enter_context(hook)
            self._losses(self._judged)
        for layer, total in self.reap.items():
            total.div_(self.frequency[layer].clamp_min(1))

    def _add(self, layer: int, module: nn.Module, given: list[Any]) -> None:
        """Run each expert on only its own tokens, with a weight of one, and add its outputs to the sums.

        `reap` gets norms times router weights, `frequency` gets counts.
        """
        states, index, weights = _given(given, layer)
        for number in torch.unique(index).tolist():
            at = (index == number).nonzero()
            own = states[at[:, 0]]
            alone = torch.full((len(own), 1), number, dtype=index.dtype, device=index.device)
            made = module.forward(own, alone, torch.ones_like(alone, dtype=weights.dtype))
            norms = made.reshape(own.shape).double().norm(dim=-1) * weights[at[:, 0], at[:, 1]].double()
            self.reap[layer][number] += float(norms.sum())
            self.frequency[layer][number] += len(own)

    def _losses(self, ids: Tensor) -> Tensor:
        """Return each window's mean loss. Raises BadInput where the model cannot be run, or a loss is not finite."""
        found: list[Tensor] = []
        vocabulary = int(self.model.module.get_input_embeddings().num_embeddings)
        for batch in torch.split(ids, max(1, _MOST_LOGITS // (ids.shape[1] * vocabulary))):
            placed = batch.to(self.model.device)
            with torch.inference_mode(), running(self.model.module):
                logits = self.model.module(input_ids=placed, use_cache=False).logits
            self.model.take_digests()
            losses = functional.cross_entropy(logits[:, :-1].transpose(1, 2).float(), placed[:, 1:], reduction="none")
            found.append(losses.double().mean(1).cpu())
        losses = torch.cat(found)
        if not bool(losses.isfinite().all()):
            raise BadInput("the loss on the text is not finite; is the base whole?")
        return losses

    @contextmanager
    def _only(self, kept: Kept) -> Iterator[None]:
        """Reduce the layers to the experts `kept` within the context, as in a model with only these experts."""
        blocks = [(self._blocks[layer], torch.tensor(list(numbers))) for layer, numbers in kept.items()]
        handles = []
        for block, numbers in blocks:
            block.kept = numbers
            block.buffers = [(o, key, o._buffers[key]) for o, key, *_ in block.held if key in o._buffers]  # type: ignore[misc]
            handles.append(block.layer.register_forward_pre_hook(lambda _, __, block=block: _cut(block)))
            for module, name in block.counters:
                setattr(module, name, len(numbers))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for block, _ in blocks:
                for owner, key, value in block.buffers:
                    owner._buffers[key] = value
                for module, name in block.counters:
                    setattr(module, name, block.count)


def _cut(block: _Block) -> None:
    """Remove the rows of missing experts from weights that were just read, and from buffers."""
    assert block.kept is not None
    stored = {(id(owner), key): value for owner, key, value in block.buffers}
    for owner, key, axis in block.held:
        value = owner._parameters.get(key)
        whole = stored[id(owner), key] if value is None else value.data
        cut = whole.index_select(axis, block.kept.to(whole.device))
        if value is None:
            owner._buffers[key] = cut
        else:
            owner._parameters[key] = nn.Parameter(cut, requires_grad=False)


def _block(layer: nn.Module, number: int, count: int) -> _Block:
    """Return the experts of a layer in memory. Raises BadInput where they are not in one module."""
    found = expert_modules(layer)
    if len(found) != 1:
        raise BadInput(f"layer {number}: transformers has its experts in {len(found)} modules, which are not measured")
    experts = layer.get_submodule(found[0])
    around = layer.get_submodule(found[0].rpartition(".")[0])
    inside = {id(module) for module in experts.modules()}
    held: list[tuple[nn.Module, str, int]] = []
    for module in around.modules():
        for key, value in (*module._parameters.items(), *module._buffers.items()):
            if value is None:
                continue
            if value.shape[:1] == (count,) and (id(module) in inside or value.is_floating_point()):
                held.append((module, key, 0))
            elif tuple(value.shape) == (1, count):
                held.append((module, key, 1))
    counters = [
        (module, name)
        for module in around.modules()
        for name, value in vars(module).items()
        if "expert" in name and type(value) is int and value == count
    ]
    return _Block(layer, experts, count, held, counters)


def _given(given: list[Any], layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (states, expert numbers, weights) of the tokens, from the inputs of the experts' module.

    Raises BadInput where the inputs have another form.
    """
    tensors = [each for each in given if isinstance(each, Tensor)]
    if len(tensors) == 3:
        states, index, weights = tensors
        if not index.is_floating_point() and index.ndim == 2 and index.shape == weights.shape:
            return states.reshape(-1, states.shape[-1]), index, weights
    raise BadInput(
        f"layer {layer}: its class hands tokens to experts in a way that surgeon does not know, so they are not"
        " measured; list those that go (`experts`)"
    )
