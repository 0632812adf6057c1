"""The value of a model's layers on a text: the base is run with some of them taken out, or merged.

Block influence (Men et al. 2024, ShortGPT, equation 1): BI_l = 1 − E cos(x_l, x_{l+1}), where x_l is layer l's input.
Angular distance of n layers (Gromov et al. 2024): arccos(cos(x_l, x_{l+n})) / π. LaCo (Yang et al. 2024): a layer
absorbs the K layers above it, θ_l + Σ_k (θ_{l+k} − θ_l). Means are over all tokens. Weights of one layer at a time are
in memory.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from surgeon.anatomy.twin import stored_buffers
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.common import devices
from surgeon.common.formatting import show_layers
from surgeon.common.library import first_line
from surgeon.common.listener import Listener
from surgeon.errors import BadInput, printable
from surgeon.models.layer_choice import LayersOut, Stack, collapsed
from surgeon.models.load import running
from surgeon.models.stream import StreamedModel
from surgeon.models.tokens import token_batches

# The most logits of one batch of windows.
_MOST_LOGITS = 2**26


@dataclass(frozen=True)
class Choice:
    """The layers to take out, and the loss without them.

    `merged` maps each layer that absorbs others to {layer: factor}. `scores` are the numbers by which layers were
    chosen: per layer, per first layer of a run (`angular`) or per accepted merge (`laco`); empty for listed layers.
    `loss` is in nats per token.
    """

    layers: tuple[int, ...]
    merged: Mapping[int, Mapping[int, int]]
    loss: float
    scores: tuple[float, ...]


class CannotRun(BadInput):
    """An error: a model cannot run without some of its layers, because other layers need what these compute."""


@dataclass
class Run:
    """One pass over the text: the mean loss, and the mean cosine and angle of each pair of states `span` layers apart.

    `states` are the last layer's output, one tensor per batch.
    """

    loss: float = 0.0
    cosines: list[float] = field(default_factory=list)
    angles: list[float] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)

    @property
    def influence(self) -> list[float]:
        """1 − E cos of every layer that ran, bottom up, if the span was one layer."""
        return [1.0 - cosine for cosine in self.cosines]


class Depth:
    """A base and a text on which its layers are measured."""

    def __init__(self, folder: CheckpointFolder, ids: Tensor, kinds: Sequence[object], listener: Listener) -> None:
        self._listener = listener
        self.model = StreamedModel(folder, device=devices.resolve("auto"))
        self.ids, self.kinds = ids, kinds
        self.count = len(self.model.layers)
        self.predictions = ids.numel() - len(ids)
        self.whole: Stack = {layer: {layer: 1} for layer in range(self.count)}
        self._stack = self.whole
        self._watch: Callable[[Tensor], None] = _ignore
        names = {id(module): name for name, module in self.model.module.named_modules()}
        self._names = [names[id(layer)] for layer in self.model.layers]
        for number, layer in enumerate(self.model.layers):
            self._hook(number, layer)
        self.first = self.run(self.whole)
        self.before = self.first.loss
        listener.say(f"the base's loss is {self.before:.4f} nats a token")

    @classmethod
    def of(
        cls,
        base: CheckpointFolder,
        text: Path,
        kinds: Sequence[object],
        *,
        vocabulary: int,
        window: int,
        windows: int,
        listener: Listener,
    ) -> Depth:
        """Tokenise the text by the base's tokenizer. Raises BadInput where it is too short, or the base cannot run."""
        tokens = token_batches(base.path, text=text, window=window, windows=windows, vocabulary=vocabulary)
        if len(tokens.ids) < windows:
            raise BadInput(
                f"{printable(str(text))}: too short to measure layers on, {len(tokens.ids)} of {windows} windows of"
                f" {window} tokens; give a longer text, or a smaller `windows`"
            )
        listener.say(f"measuring layers on {printable(text.name)} ({tokens.ids.numel():,} tokens)")
        return cls(base, tokens.ids, kinds, listener)

    def choose(self, out: LayersOut) -> Choice:
        """Choose the layers to take out, as `out` asks. Raises BadInput where the request cannot be met."""
        if out.layers:
            if not all(layer < self.count for layer in out.layers) or len(set(out.layers)) >= self.count:
                # The draft reports which of them does not exist.
                return Choice((), {}, self.before, ())
            return Choice(out.layers, {}, self.run(self.without(out.layers)).loss, ())
        if out.count >= self.count:
            raise BadInput(f"`count` {out.count} of {self.count} layers: at least one must stay")
        match out.by:
            case "block_influence":
                return self._by_influence(out.count)
            case "angular":
                return self._by_angle(out.count)
            case "loss":
                return self._by_loss(out.count, out.candidates)
            case "laco":
                return self._by_merging(out)

    def costs(self, layers: Iterable[int]) -> dict[int, float]:
        """Return by how much the loss grows without each of these layers.

        Layers without which the model cannot run are left out.
        """
        found: dict[int, float] = {}
        tried = list(layers)
        self._listener.begin("measuring layers", len(tried), "layers")
        for layer in tried:
            with contextlib.suppress(CannotRun):
                found[layer] = self.run(self.without([layer])).loss - self.before
                self._listener.say(f"without layer {layer}: {found[layer]:+.4f}")
            self._listener.advance(1)
        return found

    def without(self, layers: Sequence[int]) -> Stack:
        """Return the stack without these layers."""
        return {layer: made for layer, made in self.whole.items() if layer not in layers}

    def _by_influence(self, count: int) -> Choice:
        """Choose the `count` layers of least block influence."""
        scores = self.first.influence
        gone = tuple(sorted(sorted(range(self.count), key=lambda layer: (scores[layer], layer))[:count]))
        return Choice(gone, {}, self.run(self.without(gone)).loss, tuple(scores))

    def _by_angle(self, count: int) -> Choice:
        """Choose the run of `count` layers with the least angle between its input and output."""
        angles = self.run(self.whole, span=count).angles
        first = min(range(len(angles)), key=lambda layer: (angles[layer], layer))
        gone = tuple(range(first, first + count))
        return Choice(gone, {}, self.run(self.without(gone)).loss, tuple(angles))

    def _by_loss(self, count: int, candidates: int) -> Choice:
        """Choose greedily: at each step try the layers of least influence, and take out the one with the least loss."""
        stack, now = self.whole, self.first
        self._listener.begin("choosing layers", count, "layers")
        for step in range(1, count + 1):
            numbers, influence = list(stack), now.influence
            ranked = sorted(range(len(numbers)), key=lambda place: (influence[place], place))[:candidates]
            tried: list[tuple[Run, Stack]] = []
            for nth, place in enumerate(ranked, start=1):
                left = {layer: made for layer, made in stack.items() if layer != numbers[place]}
                try:
                    tried.append((self.run(left), left))
                except CannotRun:
                    if nth == len(ranked) and not tried:
                        raise
            now, best = min(tried, key=lambda each: each[0].loss)
            (out,) = stack.keys() - best.keys()
            stack = best
            self._listener.say(f"layer {out} goes ({step} of {count}): loss {now.loss:.4f}")
            self._listener.advance(1)
        gone = tuple(layer for layer in self.whole if layer not in stack)
        return Choice(gone, {}, now.loss, tuple(self.first.influence))

    def _by_merging(self, out: LayersOut) -> Choice:
        """Choose by LaCo, Algorithm 1: from the top down, accept merges that keep the last states near the base's."""
        lowest, highest = out.range or (0, self.count - 1)
        if highest >= self.count:
            raise BadInput(f"`range` goes up to layer {highest}; there are {self.count}, 0 to {self.count - 1}")
        if out.merge > highest - lowest:
            above = highest - lowest
            raise BadInput(f"`merge` {out.merge}: above layer {lowest} there are only {above} layers; give fewer")
        stack, loss = self.whole, self.before
        place = highest - out.merge
        found: list[float] = []
        self._listener.begin("merging layers", out.count, "layers")
        while place >= lowest and len(stack) > self.count - out.count:
            numbers = list(stack)
            above = sum(layer <= highest for layer in numbers) - 1 - place
            merge = min(out.merge, above, len(stack) - (self.count - out.count))
            group = numbers[place : place + merge + 1]
            if merge > 0 and len({self.kinds[layer] for layer in group}) == 1:
                tried = collapsed(stack, numbers[place], merge)
                run = self.run(tried)
                near = self._likeness(run)
                kept = near > out.threshold
                words = "merged" if kept else "not merged"
                self._listener.say(f"{show_layers(group)}: likeness {near:.4f}, {words}; loss {run.loss:.4f}")
                if kept:
                    self._listener.advance(merge)
                    stack, loss = tried, run.loss
                    found.append(near)
                    place = min(place - out.interval, len(stack) - 1 - out.merge)
                    continue
            place -= 1
        if len(stack) > self.count - out.count:
            raise BadInput(
                f"laco: only {self.count - len(stack)} of {out.count} layers merge with a likeness above"
                f" {out.threshold:g} (layers of one kind side by side); lower `threshold` or `interval`, or ask for"
                " fewer"
            )
        gone = tuple(layer for layer in self.whole if layer not in stack)
        return Choice(gone, _merged(stack), loss, tuple(found))

    def _likeness(self, run: Run) -> float:
        """Return the mean cosine between the last states of a run and of the base."""
        total = sum(float(_cosine(a, b).sum()) for a, b in zip(self.first.states, run.states, strict=True))
        return total / self.ids.numel()

    def run(self, stack: Stack, span: int = 1) -> Run:
        """Run the layers in `stack` once over the text.

        Raises BadInput where the whole base cannot run, CannotRun where only this stack cannot.
        """
        try:
            return self._run(stack, span)
        except BadInput as error:
            if stack == self.whole:
                raise
            out = show_layers([layer for layer in self.whole if layer not in stack])
            raise CannotRun(
                f"without {out} the model cannot be run, as other layers need what is computed there"
                f" ({first_line(error.__cause__ or error)}); name layers that can go in `layers`"
            ) from error

    def _run(self, stack: Stack, span: int) -> Run:
        """Run a stack over the text; return its loss, and cosines and angles of states `span` layers apart.

        Raises BadInput where the loss is not finite.
        """
        self._stack, found = stack, Run()
        self.model.skipped = {id(layer) for number, layer in enumerate(self.model.layers) if number not in stack}
        cosines, angles = [0.0] * (len(stack) + 1), [0.0] * (len(stack) + 1)
        loss = 0.0
        for ids in torch.split(self.ids, max(1, _MOST_LOGITS // (self.ids.shape[1] * self._vocabulary))):
            recent: deque[Tensor] = deque(maxlen=span + 1)
            place = 0

            def keep(state: Tensor, recent: deque[Tensor] = recent) -> None:
                """Compare a state with the state `span` layers before it, once there is one."""
                nonlocal place
                recent.append(state.detach())
                if len(recent) > span:
                    cosine = _cosine(recent[0], recent[-1])
                    cosines[place] += float(cosine.sum())
                    angles[place] += float(torch.arccos(cosine.clamp(-1, 1)).sum()) / math.pi
                    place += 1

            self._watch = keep
            placed = ids.to(self.model.device)
            with torch.inference_mode(), running(self.model.module):
                logits = self.model.module(input_ids=placed, use_cache=False).logits
            self.model.take_digests()
            found.states.append(recent[-1].cpu())
            predicted = logits[:, :-1].flatten(0, 1).float()
            loss += float(functional.cross_entropy(predicted, placed[:, 1:].flatten(), reduction="sum").double())
        pairs = len(stack) + 1 - span
        found.loss = loss / self.predictions
        found.cosines = [total / self.ids.numel() for total in cosines[:pairs]]
        found.angles = [total / self.ids.numel() for total in angles[:pairs]]
        if not math.isfinite(found.loss):
            raise BadInput("the loss on the text is not finite; is the base whole?")
        return found

    @property
    def _vocabulary(self) -> int:
        """Return the number of rows of the input embeddings."""
        return int(self.model.module.get_input_embeddings().num_embeddings)

    def _hook(self, number: int, layer: nn.Module) -> None:
        """Replace a layer's forward: record states, and pass the input on or use merged weights, as
        `self._stack` defines.
        """
        native, outputs = layer.forward, 0

        def forward(*args: Any, **kwargs: Any) -> Any:
            """Run the layer with the stack's weights for it, or return its input where the stack lacks it."""
            nonlocal outputs
            state = args[0] if args else kwargs["hidden_states"]
            if number not in self._stack:
                return (state, *[None] * (outputs - 1)) if outputs else state
            self._merge(number, layer)
            self._watch(state)
            made = native(*args, **kwargs)
            outputs = len(made) if isinstance(made, tuple) else 0
            if number == max(self._stack):
                self._watch(made[0] if outputs else made)
            return made

        layer.forward = forward

    def _merge(self, number: int, layer: nn.Module) -> None:
        """Give a layer its weights in the current stack: the sum of stored layers times their factors.

        Parameters are replaced only where layers are merged, stored buffers always.
        """
        made_of = self._stack[number]
        # Parameters are read again for each pass. Stored buffers stay in memory, so merged ones must be replaced.
        held: dict[str, Tensor] = dict(stored_buffers(layer))
        if made_of != {number: 1}:
            held |= dict(layer.named_parameters())
        elif not held:
            return
        totals = {name: torch.zeros_like(value, dtype=torch.float32) for name, value in held.items()}
        for other, factor in made_of.items():
            values = self.model.weights([f"{self._names[other]}.{name}" for name in held])
            for name, value in zip(held, values, strict=True):
                totals[name].add_(value, alpha=factor)
        for name, value in held.items():
            value.data = totals[name].to(value.dtype)


def _merged(stack: Stack) -> dict[int, dict[int, int]]:
    """Return the layers of a stack that absorb others, with the factors of all layers in them."""
    return {layer: made for layer, made in stack.items() if made != {layer: 1}}


def _cosine(one: Tensor, other: Tensor) -> Tensor:
    """Return each token's cosine of two states, in float32; 1 where they are equal, also where both are zero."""
    found = functional.cosine_similarity(one.float(), other.float(), dim=-1)
    return found.where((one != other).any(-1), 1.0)


def _ignore(_state: Tensor) -> None:
    """Do nothing: states are not recorded."""
