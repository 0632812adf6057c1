"""A domain gate is fitted before the first step: a classifier of hidden states, a threshold by held-out text.

Shapes: N prefixes, D hidden size, U units of the classifier.

Prefixes of documents of both domains are told apart by the state that the gate sees of them, Σ (ĥ − c) / (n + k) over
the tokens' normalised hidden states ĥ (`runtime.gate`), c halfway between the domains. The threshold is the lowest at
which the gate, with all its memory, is open on no more than the asked share of held-out original tokens.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from surgeon.checkpoint.working import sync, write_durably
from surgeon.data.packing import Mixture, PackedSequence, SourceStream, batch_of
from surgeon.errors import BadInput

# Files of a work folder: the fitted tensors, and what was measured of them. The second is written last.
GATE_FILE = "gate.safetensors"
FIGURES_FILE = "gate.json"
# Tokens of each domain that are read, fewer where layers must run for it, and prefixes of each that the classifier
# sees, of so many numbers in all.
_TOKENS, _TOKENS_THROUGH_LAYERS = 2**20, 2**18
_PREFIXES = 2**16
# Held-out tokens of each source by which the threshold is chosen, in sequences of so many where the model takes them:
# a gate that stays open errs more on long ones.
_HELD_TOKENS = 2**17
_HELD_LENGTH = 2**10
_NUMBERS = 2**27
# Tokens that go through the model at once.
_AT_ONCE = 2**13
_STEPS = 1500
_BATCH = 2**10
_RATE = 1e-2
_DECAY = 0.3
# Prefixes up to these lengths are measured apart.
LENGTHS = (8, 32, 128, 2**31)
# Below this share of new tokens for which it opens, nothing is gained: refused. Below the second: said.
_USELESS = 0.25
_LITTLE = 0.8


@dataclass(frozen=True)
class GateFigures:
    """How well a fitted gate tells held-out text apart.

    `original` and `new` are the shares of tokens for which it is open, `accuracy` the mean of the shares that it gets
    right; `by_length` has both shares for prefixes of up to so many tokens (the last: of any length). `limit` is the
    share of original tokens that was asked for.
    """

    layer: int
    form: str
    reads: str
    limit: float
    original: float
    new: float
    accuracy: float
    by_length: dict[str, list[float | None]]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return dict(vars(self))


def fit_gate(
    model: Any,
    mixture: Mixture[PackedSequence],
    held: Sequence[Callable[[int, int], list[PackedSequence]]],
    names: Sequence[str],
    *,
    work: Path,
    dtypes: dict[str, torch.dtype],
    seed: int,
    device: str,
    leads: bool,
    say: Callable[[str], None],
) -> GateFigures:
    """Fit the gate of `model`, whose tensors are `names`, and measure it; or take what `work` holds of an earlier call.

    `held` give of each source as many held-out sequences as are asked for, and as long: by so many independent texts
    the threshold is chosen, as one that opens by mistake stays open to its end. `dtypes` are those in which the tensors
    are stored, to which they are rounded.
    Raises BadInput where the two domains cannot be told apart.
    """
    gate, layer = _gate_of(model)
    tensors = {name: model.get_parameter(name) for name in names}
    if (work / FIGURES_FILE).is_file():
        figures = GateFigures(**json.loads((work / FIGURES_FILE).read_text(encoding="utf-8")))
        _take(tensors, safetensors.torch.load_file(work / GATE_FILE))
        return figures
    before = model.training
    model.to(device).eval()
    say("fitting the domain gate")
    fitted = _classifier(gate, *_prefixes(model, layer, mixture, gate.spec, seed), seed)
    rounded = {name: fitted[name.rpartition(".")[2]].to(dtypes[name]) for name in names}
    _take(tensors, rounded)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or _HELD_LENGTH
    length = max(mixture.streams[0].packer.length, min(_HELD_LENGTH, context))
    sequences = [each(max(1, _HELD_TOKENS // length), length) for each in held]
    scored = [_Scored.of(model, layer, of_domain) for of_domain in _by_domain(sequences)]
    threshold = next(name for name in names if name.endswith(".threshold"))
    rounded[threshold] = _threshold(gate, scored[0], dtypes[threshold])
    _take(tensors, rounded)
    _from_the_first(tensors)
    figures = _figures(gate, *scored)
    model.train(before)
    _judge(figures, say)
    if leads:
        safetensors.torch.save_file(
            {name: p.detach().cpu().contiguous() for name, p in tensors.items()}, work / GATE_FILE
        )
        sync(work / GATE_FILE)
        write_durably(work / FIGURES_FILE, json.dumps(figures.to_json()))
    return figures


def _gate_of(model: Any) -> tuple[Any, nn.Module]:
    """The gate, and the layer in which it stands."""
    layer = next(module for module in model.modules() if vars(module).get("decides"))
    return layer.domain_gate, layer


def _take(tensors: dict[str, nn.Parameter], values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in tensors.items():
            parameter.data = values[name].to(parameter.device, parameter.dtype)


def _from_the_first(tensors: dict[str, nn.Parameter]) -> None:
    """Give all processes the first one's values."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        for parameter in tensors.values():
            torch.distributed.broadcast(parameter.data, 0)


def _by_domain(held: Sequence[Sequence[PackedSequence]]) -> list[list[PackedSequence]]:
    """Held-out sequences of the original domain, and those of new ones."""
    every = [sequence for sequences in held for sequence in sequences]
    return [[s for s in every if s.domain == 0], [s for s in every if s.domain > 0]]


def _batches(sequences: Sequence[PackedSequence]) -> list[dict[str, Tensor]]:
    """Sequences of one length together, some at a time."""
    found: list[dict[str, Tensor]] = []
    by_length: dict[int, list[PackedSequence]] = {}
    for sequence in sequences:
        by_length.setdefault(len(sequence.ids), []).append(sequence)
    for length, same in by_length.items():
        count = max(1, _AT_ONCE // length)
        found += [batch_of(same[begin : begin + count], domains=False) for begin in range(0, len(same), count)]
    return found


class _Enough(Exception):
    """The layer that was asked for has run."""


@torch.no_grad()
def _states(model: Any, layer: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """What goes into the layer, B T D, float32; the layers above it do not run."""
    kept: list[Tensor] = []

    def keep(_module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        kept.append(given[0] if given else named["hidden_states"])
        raise _Enough

    handle = layer.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        model(**{key: batch[key].to(model.device) for key in ("input_ids", "position_ids")}, use_cache=False)
    except _Enough:
        pass
    finally:
        handle.remove()
    # Under gradient checkpointing embeddings ask for a gradient, and this is none's to train.
    return kept[0].detach().float()


def _lengths(positions: Tensor) -> Tensor:
    """How many tokens of its document there are up to each token: B T, from positions that begin at 0 anew."""
    places = torch.arange(positions.shape[1]).expand(positions.shape)
    return places - torch.where(positions == 0, places, 0).cummax(dim=1).values + 1


def _once(stream: SourceStream, count: int) -> Iterator[PackedSequence]:
    """Sequences of a source, `count` at most, and as many as are made of one pass of its documents."""
    epoch = stream.epoch
    for _ in range(count):
        yield stream.next()
        if stream.epoch > epoch:
            return


def _prefixes(
    model: Any, layer: nn.Module, mixture: Mixture[PackedSequence], spec: Any, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Of prefixes of training text of both domains Σ ĥ / (n + k), N D, n / (n + k), N, and whether they are new, N."""
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    state = mixture.state()
    drawn = torch.Generator().manual_seed(seed)
    for new in (False, True):
        streams = [stream for stream in mixture.streams if (stream.packer.domain > 0) is new]
        length = streams[0].packer.length
        tokens = _TOKENS_THROUGH_LAYERS if spec.layer else _TOKENS
        count = max(1, tokens // length // len(streams))
        sequences = [sequence for stream in streams for sequence in _once(stream, count)]
        each = max(1, min(_PREFIXES, _NUMBERS // model.config.get_text_config().hidden_size) // len(sequences))
        for batch in _batches(sequences):
            hidden = _states(model, layer, batch).cpu()
            hidden = hidden * torch.rsqrt(hidden.square().mean(dim=-1, keepdim=True) + 1e-6)
            lengths = _lengths(batch["position_ids"])
            sums, counts = hidden, torch.ones_like(lengths)
            prior = 0
            if spec.reads == "prefix_mean":
                total = hidden.double().cumsum(dim=1)
                begin = torch.arange(lengths.shape[1]) - lengths + 1
                outside = (total - hidden).gather(1, begin.unsqueeze(-1).expand_as(total))
                sums, counts, prior = (total - outside).float(), lengths, spec.prior
            # More of the short ones, on which a gate errs.
            weight = lengths.float().rsqrt()
            chosen = torch.multinomial(weight, min(each, weight.shape[1]), generator=drawn)
            rows = torch.arange(len(chosen))[:, None]
            parts = counts + prior
            found.append(
                (
                    (sums / parts.unsqueeze(-1))[rows, chosen].flatten(0, 1),
                    (counts / parts)[rows, chosen].flatten(),
                    torch.full((chosen.numel(),), float(new)),
                )
            )
    mixture.restore(state)
    states, shares, new_ones = (torch.cat(each) for each in zip(*found, strict=True))
    return states, shares, new_ones


def _classifier(gate: Any, states: Tensor, parts: Tensor, new: Tensor, seed: int) -> dict[str, Tensor]:
    """The gate's tensors, the threshold at zero: of an MLP or a line by AdamW on drawn prefixes, float32."""
    middle = (states[new == 1].sum(0) / parts[new == 1].sum() + states[new == 0].sum(0) / parts[new == 0].sum()) / 2
    x = states - parts.unsqueeze(-1) * middle
    spread = x.std(dim=0).clamp(min=1e-6)
    x = x / spread
    drawn = torch.Generator().manual_seed(seed)
    width, linear = x.shape[1], gate.out is None
    units = 1 if linear else gate.weight.shape[0]
    weight = torch.randn(units, width, generator=drawn) / width**0.5
    bias, out, shift = torch.zeros(units), torch.randn(1, units, generator=drawn) / units**0.5, torch.zeros(1)
    trained = [weight, bias, shift] if linear else [weight, bias, out, shift]
    for tensor in trained:
        tensor.requires_grad_(True)
    balance = torch.where(new == 1, len(new) / (2 * new.sum()), len(new) / (2 * (1 - new).sum()))
    optimizer = torch.optim.AdamW(trained, lr=_RATE, weight_decay=_DECAY)
    for step in range(_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = _RATE * (1 - step / _STEPS)
        chosen = torch.randint(len(x), (_BATCH,), generator=drawn)
        state = F.linear(x[chosen], weight)
        score = (state if linear else F.linear(F.relu(state + bias), out)).squeeze(-1) + shift
        loss = F.binary_cross_entropy_with_logits(score, new[chosen], weight=balance[chosen])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    read = weight.detach() / spread
    found = {"weight": read, "offset": -(read @ middle), "threshold": torch.zeros(1)}
    return found if linear else found | {"bias": bias.detach(), "out": out.detach()}


@dataclass
class _Scored:
    """The gate's scores on held-out sequences, each B T, with where documents begin and how long prefixes are."""

    parts: list[tuple[Tensor, Any, Tensor]]

    @classmethod
    def of(cls, model: Any, layer: nn.Module, sequences: Sequence[PackedSequence]) -> _Scored:
        """Scores by the model's own code, from what goes into the layer."""
        gating = sys.modules[type(layer.domain_gate).__module__].Gating
        parts = []
        for batch in _batches(sequences):
            hidden = _states(model, layer, batch)
            positions = batch["position_ids"].to(hidden.device)
            at_work = gating(torch.ones_like(positions, dtype=torch.bool), positions == 0, None)
            at_work.decide(layer.domain_gate, hidden)
            # What a cache would keep of every token.
            at_work.found = {}
            parts.append((at_work.scores, at_work, _lengths(batch["position_ids"])))
        return cls(parts)

    def open(self, gate: Any) -> tuple[Tensor, Tensor]:
        """For every token whether the gate, as it is now, is open, and its prefix's length."""
        on = [at_work.held(gate, scores).flatten().cpu() for scores, at_work, _ in self.parts]
        return torch.cat(on), torch.cat([lengths.flatten() for *_, lengths in self.parts])


def _threshold(gate: Any, original: _Scored, dtype: torch.dtype) -> Tensor:
    """The lowest threshold, in the stored dtype, with which the gate is open on no more than the asked share."""
    every = torch.cat([scores.flatten() for scores, *_ in original.parts]).float().sort().values
    low, high = 0, len(every) - 1
    while low < high:
        at = (low + high) // 2
        gate.threshold.data.fill_(float(_above(every[at], dtype)))
        if float(original.open(gate)[0].double().mean()) <= gate.spec.false_positives:
            high = at
        else:
            low = at + 1
    return _above(every[low], dtype).reshape(1).cpu()


def _above(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The value in a dtype, rounded up."""
    rounded = value.to(dtype)
    if rounded.float() < value:
        rounded = torch.nextafter(rounded, torch.full_like(rounded, torch.inf))
    return rounded


def _figures(gate: Any, original: _Scored, new: _Scored) -> GateFigures:
    shares: list[float] = []
    by_length: dict[str, list[float | None]] = {}
    begins = (0, *LENGTHS)
    for scored in (original, new):
        on, lengths = scored.open(gate)
        shares.append(float(on.double().mean()))
        for begin, end in itertools.pairwise(begins):
            here = on[(lengths > begin) & (lengths <= end)]
            name = f"{begin + 1}-{end}" if end < LENGTHS[-1] else f"{begin + 1}-"
            by_length.setdefault(name, []).append(float(here.double().mean()) if len(here) else None)
    spec = gate.spec
    return GateFigures(
        layer=spec.layer,
        form=spec.form,
        reads=spec.reads,
        limit=spec.false_positives,
        original=shares[0],
        new=shares[1],
        accuracy=(1 - shares[0] + shares[1]) / 2,
        by_length=by_length,
    )


def _judge(figures: GateFigures, say: Callable[[str], None]) -> None:
    """Say how well the gate tells domains apart and what its errors cost; BadInput where nothing would be gained."""
    words = (
        f"the domain gate is open on {figures.new:.1%} of held-out new tokens and {figures.original:.1%} of original"
        f" ones (at most {figures.limit:.1%} asked)"
    )
    if figures.new < _USELESS:
        raise BadInput(
            f"{words}: it cannot tell the two domains apart, and what was added would take part in so few new tokens"
            " that little could be learned; raise `false_positives`, let it read another `layer`, or leave the gate out"
        )
    say(f"{words}: accuracy {figures.accuracy:.1%}")
    for length, (original, new) in figures.by_length.items():
        if original is not None and new is not None:
            say(f"  prefixes of {length} tokens: open on {new:.1%} of new and {original:.1%} of original ones")
    if figures.new < _LITTLE:
        say(f"  the other {1 - figures.new:.1%} of new tokens keep the base's loss, however long this trains")
