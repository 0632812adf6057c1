"""The fit of a domain gate before the first step: a classifier of hidden states, and a threshold by held-out text.

Shapes: N tokens, D hidden size, U units of the classifier.

The evidence of a token is log p(h | new) / p(h | original), of its normalised hidden state h. A classifier of single
tokens (`runtime.gate`) learns it, from equally many tokens of every source of a domain. The sum over a prefix is the
statistic of a likelihood-ratio test of the whole document (Wald 1945), as far as tokens are independent. The threshold
is the lowest one at which the gate, with its memory, is open on at most a given share of the held-out tokens of each
original source. Under Page's test a gate can close again; there the limit counts every token that follows an opening
in its document, because such a token no longer has the base's bits. A sample of many kinds of text (`negatives`) and
text that the base itself wrote are original sources too.

Where the tokenizer has a chat template whose control tokens show the turns, the gate learns them. Then pieces of the
same held-out text, each written as a user's turn, give the threshold for turns: the lowest one at which it opens for
at most that share of the pieces of each original source.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from surgeon.common.formatting import listed
from surgeon.common.work_folders import write_durably
from surgeon.data.layouts import Document
from surgeon.data.packing import IGNORED_LABEL, Mixture, PackedSequence, Packer, batch_of, one_pass
from surgeon.data.turns import Turns
from surgeon.errors import BadInput, printable
from surgeon.training.negatives import NAMES, Negatives, kinds_of_text
from surgeon.training.run import Run
from surgeon.training.saved.checkpoints import RunRecord

# Files of a work folder: the fitted tensors, and the gate's figures. They are used again only while their digests are
# those that the run's record has.
GATE_FILE = "gate.safetensors"
FIGURES_FILE = "gate.json"
# Tokens of each domain that are read (fewer where layers must run to compute their states), and how many numbers of
# these states are in memory at a time.
_TOKENS, _TOKENS_THROUGH_LAYERS = 2**20, 2**18
_NUMBERS = 2**28
# Held-out tokens of each source by which the threshold is chosen, and the length of their sequences where the model
# allows it: a gate that stays open makes more errors on long sequences.
_HELD_TOKENS = 2**17
_HELD_LENGTH = 2**10
# Tokens that go through the model at once.
_AT_ONCE = 2**13
_STEPS = 1500
_BATCH = 2**11
_RATE = 1e-2
_DECAY = 0.1
# Under Page's test, the nats that are subtracted from the evidence of every token. So tokens that show nothing of their
# domain count against new text: an open gate closes on them, and a closed gate does not open.
_AGAINST = 0.25
# The evidence of new text, in nats, that a turn of a user needs at least, unless the plan's `opens` is less. A turn is
# read as a whole, and closes at a stretch of original text, so that it needs less than a document.
_TURN_OPENS = 7.0
# Lengths in tokens of the pieces of text that serve as turns of a user, and how many tokens of each source are cut.
_TURN_LENGTHS = (4, 6, 8, 12, 16, 24, 32, 48)
_TURN_TOKENS = 2**15
# Ends of the ranges of prefix lengths that are measured separately.
LENGTHS = (8, 32, 128, 2**31)
# Shares of new tokens on which the gate is open: below the first nothing is gained, which is an error; below the second
# the user is warned.
_USELESS = 0.25
_LITTLE = 0.8


@dataclass(frozen=True)
class GateFigures:
    """How well a fitted gate separates held-out text of the original domain from new text.

    `original` and `new` are the shares of the domains' tokens on which the gate is open. `accuracy` is the mean of the
    two shares that it decides correctly. `by_length` maps ranges of prefix lengths in tokens to [original, new] (the
    last range has no upper end). `by_source` maps each source to its share. `limit` is the largest share that the plan
    allows each original source. In chats only the tokens that the loss counts are counted.
    """

    layer: int
    form: str
    reads: str
    limit: float
    original: float
    new: float
    accuracy: float
    by_length: dict[str, list[float | None]]
    by_source: dict[str, float]
    # By original source: the share of tokens that keep the base's bits, 1 − `_Scored.lost`.
    kept: dict[str, float]
    # By new source: the median of the tokens after which it opens, over the documents in which it does.
    opens_after: dict[str, int]
    # By source: the share of its pieces, each a user's turn, whose answer it opens for; empty where turns are not read.
    turns: dict[str, float]


def fit_gate(model: Any, run: Run, dtypes: Mapping[str, torch.dtype], recalled: Sequence[Document]) -> None:
    """Fit the gate of `model` and measure it, or load the values that an earlier call left in the work folder.

    The threshold is chosen on many independent texts, because a gate that opens by mistake stays open to the end of its
    text.

    Args:
        model: the model, whose gate is fitted in place.
        run: the run; the gate is fitted on its sources and measured on their held-out text.
        dtypes: the stored dtype of each of the gate's tensors, by its name in the gate; values are rounded to it.
        recalled: documents that the base wrote; they count as original text.

    Raises:
        BadInput: the gate cannot separate the two domains.
    """
    gate, _ = _gate_of(model)
    mixture, work, say = run.data.mixture, run.work, run.say
    record = RunRecord.read(work)
    if record is not None and record.has_kept(work, GATE_FILE, FIGURES_FILE):
        _take(gate, safetensors.torch.load_file(work / GATE_FILE))
        return
    before = model.training
    model.to(run.device).eval()
    say("fitting the domain gate")
    length = mixture.streams[0].packer.length
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    held_length = max(length, min(_HELD_LENGTH, context or _HELD_LENGTH))
    drawn = {name: draw(max(1, _HELD_TOKENS // held_length), held_length) for name, draw in run.data.held.items()}
    negatives = Negatives.beside(mixture.streams, length, held_length, recalled, run.loaded.config.keep_for_gate)
    _tell(negatives, say)
    turns = Turns.of(mixture.streams[0].encoder) if gate.spec.turns else None
    figures = _fitted(model, run, negatives, drawn, dtypes, turns)
    if run.ranks.size > 1:
        # All processes take the first one's values.
        for name in dtypes:
            torch.distributed.broadcast(getattr(gate, name), 0)
    model.train(before)
    _judge(figures, say)
    if run.ranks.leads:
        fitted = {name: getattr(gate, name).cpu().contiguous() for name in dtypes}
        (work / GATE_FILE).unlink(missing_ok=True)
        safetensors.torch.save_file(fitted, work / GATE_FILE)
        write_durably(work / FIGURES_FILE, json.dumps(vars(figures)))
        if record is not None:
            record.keep(work, GATE_FILE, FIGURES_FILE)


def _fitted(
    model: Any,
    run: Run,
    negatives: Negatives,
    held: Mapping[str, Sequence[PackedSequence]],
    dtypes: Mapping[str, torch.dtype],
    turns: Turns | None,
) -> GateFigures:
    """Fit the classifier on the run's text, choose the threshold on held-out text, and return the gate's figures.

    Args:
        model: the model, whose gate's tensors are overwritten.
        run: the run, whose sources are the text to fit on.
        negatives: more original sources, both to fit on and to choose the threshold by.
        held: held-out sequences of every source.
        dtypes: the stored dtypes of the gate's tensors, by their names in the gate.
        turns: how turns of a user are found in chats; None: they are not read.
    """
    gate, layer = _gate_of(model)
    tokens = _TOKENS_THROUGH_LAYERS if gate.spec.layer else _TOKENS
    fitted = _classifier(gate, _parts(model, layer, run.data.mixture, negatives.fitted, tokens), run.loaded.config.seed)
    fitted |= {"turns": torch.zeros(3, 2, 3) if turns is None else _digits(turns), "turn_threshold": torch.zeros(1)}
    every = {**held, **negatives.held}
    cut = {name: _as_turns(each, turns) for name, each in every.items() if turns is not None}

    def judged(against: float, least: float) -> GateFigures:
        """Subtract `against` nats from each token's evidence, set a threshold of at least `least` nats, and measure."""
        values = fitted | {"offset": fitted["offset"] - against}
        rounded = {name: values[name].to(dtype) for name, dtype in dtypes.items()}
        _take(gate, rounded)
        original, new = _scored_by_domain(model, layer, every)
        rounded["threshold"] = _threshold(gate, list(original.values()), dtypes["threshold"], least)
        asked = _scored_by_domain(model, layer, cut)
        if turns is not None:
            lowest = max(each.turn_threshold(gate) for each in asked[0].values())
            turn = torch.tensor([max(lowest, min(least, _TURN_OPENS), 0.0)])
            rounded["turn_threshold"] = _above(turn, dtypes["turn_threshold"])
        _take(gate, rounded)
        return _figures(gate, original, new, asked[0] | asked[1])

    if gate.spec.reads != "cusum":
        return judged(0.0, -math.inf)
    figures = judged(_AGAINST, gate.spec.opens)
    if figures.new >= _USELESS or gate.spec.opens <= 0:
        return figures
    run.say(
        f"  with {gate.spec.opens:g} nats of evidence it opens on {figures.new:.1%} of held-out new tokens, so it opens"
        " with as little as `false_positives` allows: these texts are short, or tokens show little of their domain"
    )
    return judged(0.0, -math.inf)


def _digits(turns: Turns) -> Tensor:
    """Return the gate's tensor `turns`, 3 2 3: each id of the marks, plus 1, in three digits to base 256."""
    ids = torch.tensor(turns.marks) + 1
    return torch.stack([ids // 65536, ids // 256 % 256, ids % 256], dim=-1).float()


def _as_turns(sequences: Sequence[PackedSequence], turns: Turns) -> list[PackedSequence]:
    """Cut sequences into pieces of `_TURN_LENGTHS`, and write each as a user's turn and the beginning of its answer.

    Every piece is a document, of which only the last token has a label: there the gate has decided.
    """
    if not sequences:
        return []
    longest = max(_TURN_LENGTHS) + len(turns.before) + len(turns.after)
    packer = Packer(max(longest, len(sequences[0].ids)), "isolated", sequences[0].domain)
    found: list[PackedSequence] = []
    lengths = itertools.cycle(_TURN_LENGTHS)
    left = _TURN_TOKENS
    for sequence in sequences:
        for control, run in itertools.groupby(sequence.ids, turns.controls.__contains__):
            words = [] if control else list(run)
            while len(words) >= min(_TURN_LENGTHS) and left > 0:
                length = next(lengths)
                ids = [*turns.before, *words[:length], *turns.after]
                words, left = words[length:], left - length
                if packer.room < len(ids):
                    found.append(packer.take())
                packer.add((ids, [*[False] * (len(ids) - 1), True]), 0)
    return [*found, packer.take()] if packer.sequence.ids else found


def _gate_of(model: Any) -> tuple[Any, nn.Module]:
    """Return (the domain gate, the layer that contains it)."""
    layer = next(module for module in model.modules() if vars(module).get("decides"))
    return layer.domain_gate, layer


def _take(gate: Any, values: Mapping[str, Tensor]) -> None:
    """Overwrite the gate's tensors with the `values` of the same names, on their devices and in their dtypes."""
    for name, value in values.items():
        tensor = getattr(gate, name)
        tensor.data = value.to(tensor.device, tensor.dtype)


def _tell(negatives: Negatives, say: Callable[[str], None]) -> None:
    """Report which kinds of text are left out of the negatives, and why."""
    for why in dict.fromkeys(negatives.left_out.values()):
        kinds = ", ".join(kind for kind, reason in negatives.left_out.items() if reason == why)
        say(f"  of the {len(kinds_of_text())} kinds of text that it must stay closed for are left out, {why}: {kinds}")


def _scored_by_domain(
    model: Any, layer: nn.Module, held: Mapping[str, Sequence[PackedSequence]]
) -> list[dict[str, _Scored]]:
    """Score the held-out text of every source; return two dictionaries by source: the original ones, the new ones."""
    found: list[dict[str, _Scored]] = [{}, {}]
    for name, sequences in held.items():
        if sequences:
            # Index 0 (False): original text; 1 (True): new text.
            found[sequences[0].domain > 0][name] = _Scored.of(model, layer, sequences)
    return found


def _batches(sequences: Sequence[PackedSequence]) -> list[dict[str, Tensor]]:
    """Return batches of sequences of equal length, of about `_AT_ONCE` tokens at most."""
    found: list[dict[str, Tensor]] = []
    by_length: dict[int, list[PackedSequence]] = {}
    for sequence in sequences:
        by_length.setdefault(len(sequence.ids), []).append(sequence)
    for length, same in by_length.items():
        count = max(1, _AT_ONCE // length)
        found += [batch_of(same[begin : begin + count], domains=False) for begin in range(0, len(same), count)]
    return found


class _Enough(Exception):
    """The signal that ends a forward at the layer whose inputs are needed."""


@torch.no_grad()
def _states(model: Any, layer: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the inputs of the layer, B T D, float32; the layers above it do not run."""
    kept: list[Tensor] = []

    def keep(_module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Store the layer's input, and end the forward."""
        kept.append(given[0] if given else named["hidden_states"])
        raise _Enough

    handle = layer.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        model(**{key: batch[key].to(model.device) for key in ("input_ids", "position_ids")}, use_cache=False)
    except _Enough:
        pass
    finally:
        handle.remove()
    # Gradient checkpointing makes the embeddings require a gradient, which is not needed here. The model may run all
    # sequences as one row.
    return kept[0].detach().float().reshape(*batch["input_ids"].shape, -1)


def _lengths(positions: Tensor) -> Tensor:
    """Return the length of each token's prefix in its document, B T; `positions` (B T) is 0 where a document begins."""
    places = torch.arange(positions.shape[1]).expand(positions.shape)
    return places - torch.where(positions == 0, places, 0).cummax(dim=1).values + 1


# For every source: the states of its tokens, N D, and whether the source is new text.
_States = list[tuple[Tensor, bool]]


def _parts(
    model: Any,
    layer: nn.Module,
    mixture: Mixture[PackedSequence],
    negatives: Mapping[str, list[PackedSequence]],
    tokens: int,
) -> list[Callable[[], _States]]:
    """Return functions that each compute one part of the states to fit on: about `tokens` of each domain in all parts.

    There are as many parts as memory requires. `negatives` are more original sources. Every part has tokens of each
    source; a source that is shorter than others repeats.
    """
    before = mixture.state()
    read: list[tuple[list[PackedSequence], int, bool]] = []
    most = _NUMBERS // 2 // model.config.get_text_config().hidden_size
    for new in (False, True):
        streams = [stream for stream in mixture.streams if (stream.packer.domain > 0) is new]
        length = streams[0].packer.length
        count, at_once = (max(1, each // length // len(streams)) for each in (tokens, min(most, tokens)))
        read += [(list(one_pass(stream, count)), at_once, new) for stream in streams]
        if not new:
            read += [(sequences, at_once, new) for sequences in negatives.values()]
    mixture.restore(before)

    def part(number: int) -> _States:
        """Compute the states of part `number`; a source that is exhausted begins again."""
        found: _States = []
        for sequences, at_once, new in read:
            here = range(number * at_once, number * at_once + min(at_once, len(sequences)))
            batches = _batches([sequences[nth % len(sequences)] for nth in here])
            states = [_normalised(_states(model, layer, batch)).flatten(0, 1) for batch in batches]
            found.append((torch.cat(states), new))
        return found

    return [partial(part, nth) for nth in range(max(-(-len(sequences) // at_once) for sequences, at_once, _ in read))]


def _normalised(hidden: Tensor) -> Tensor:
    """Divide states by their root mean square, as the gate does; return them in half precision on the CPU."""
    return (hidden * torch.rsqrt(hidden.square().mean(dim=-1, keepdim=True) + 1e-6)).half().cpu()


def _classifier(gate: Any, parts: Sequence[Callable[[], _States]], seed: int) -> dict[str, Tensor]:
    """Train the classifier (an MLP or a linear map) by AdamW; return the gate's tensors, with a threshold of 0.

    Every batch has equally many tokens of each source of a domain.
    """
    drawn = torch.Generator().manual_seed(seed)
    units, width = gate.weight.shape
    weight, offset = torch.randn(units, width, generator=drawn) / width**0.5, torch.zeros(1)
    trained = {"weight": weight, "offset": offset}
    if gate.out is not None:
        trained |= {"bias": torch.zeros(units), "out": torch.randn(1, units, generator=drawn) / units**0.5}
    for tensor in trained.values():
        tensor.requires_grad_(True)
    optimizer = torch.optim.AdamW(list(trained.values()), lr=_RATE, weight_decay=_DECAY)
    each = max(1, _STEPS // len(parts))
    for nth, part in enumerate(parts):
        states = part()
        sources = [sum(other is new for _, other in states) for _, new in states]
        counts = [max(1, _BATCH // 2 // beside) for beside in sources]
        asked = torch.cat([torch.full((count,), float(new)) for count, (_, new) in zip(counts, states, strict=True)])
        for step in range(nth * each, (nth + 1) * each):
            for group in optimizer.param_groups:
                group["lr"] = _RATE * (1 - step / (each * len(parts)))
            rows = [
                of[torch.randint(len(of), (n,), generator=drawn)] for (of, _), n in zip(states, counts, strict=True)
            ]
            score = F.linear(torch.cat(rows).float(), weight, trained.get("bias", offset))
            if gate.out is not None:
                score = F.linear(F.relu(score), trained["out"], offset)
            # Each domain has half of the weight, however many sources it has.
            halves = torch.where(asked == 1, asked.sum(), len(asked) - asked.sum()) * 2
            loss = F.binary_cross_entropy_with_logits(score.squeeze(-1), asked, weight=1 / halves, reduction="sum")
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return {name: tensor.detach() for name, tensor in trained.items()} | {"threshold": torch.zeros(1)}


@dataclass
class _Scored:
    """The gate's evidence on held-out sequences.

    Each part is a batch: its evidence (B T 1), its `Gating`, which has where documents begin, the lengths of prefixes
    (B T), and which tokens the loss counts (B T), with the first ones of documents.
    """

    parts: list[tuple[Tensor, Any, Tensor, Tensor]]

    @classmethod
    def of(cls, model: Any, layer: nn.Module, sequences: Sequence[PackedSequence]) -> _Scored:
        """Compute the evidence by the model's own code, from the inputs of the gate's layer."""
        gating = sys.modules[type(layer.domain_gate).__module__].Gating
        parts = []
        for batch in _batches(sequences):
            hidden = _states(model, layer, batch)
            positions = batch["position_ids"].to(hidden.device)
            ids = batch["input_ids"].to(hidden.device)
            at_work = gating(torch.ones_like(positions, dtype=torch.bool), positions == 0, None, ids=ids)
            at_work.decide(layer.domain_gate, hidden)
            counts = batch["labels"] != IGNORED_LABEL
            parts.append((at_work.evidence, at_work, _lengths(batch["position_ids"]), counts))
        return cls(parts)

    def lost(self, gate: Any) -> float:
        """Return the share of tokens that need not have the base's bits.

        Under Page's test these are the tokens at which the gate is open, or was open earlier in their document. Under
        the other readings they are the tokens at which it is open, as such a gate closes at a single token.
        """
        if gate.spec.reads != "cusum":
            return float(self.open(gate)[0].double().mean())
        return float(torch.cat([each.flatten() for each in self._opened(gate)]).double().mean())

    def scores(self, gate: Any) -> Tensor:
        """Return for every token the number that the gate compares with its threshold."""
        return torch.cat([scores(gate, at_work, evidence).flatten() for evidence, at_work, *_ in self.parts])

    def open(self, gate: Any) -> tuple[Tensor, Tensor]:
        """Return (whether the gate with its present tensors is open, length of the prefix) for every counted token."""
        on = [(at_work.states(gate, each)[..., 2] > 0).cpu()[counts] for each, at_work, _, counts in self.parts]
        return torch.cat(on), torch.cat([lengths[counts] for *_, lengths, counts in self.parts])

    def opens_after(self, gate: Any) -> int | None:
        """Return the median length of prefixes at which the gate opens first in a document; None: it opens in none."""
        found = []
        for opened, (*_, lengths, _counts) in zip(self._opened(gate), self.parts, strict=True):
            before = F.pad(opened[:, :-1], (1, 0)) & (lengths > 1)
            found.append(lengths[opened & ~before])
        every = torch.cat(found)
        return int(every.median()) if len(every) else None

    def _opened(self, gate: Any) -> list[Tensor]:
        """Return for each part where the gate is open, or was open earlier in the document, B T on the CPU."""
        return [at_work.held(at_work.states(gate, each)[..., 2] > 0, None).cpu() for each, at_work, *_ in self.parts]

    def turn_threshold(self, gate: Any) -> float:
        """Return the lowest threshold, in nats, that opens at most `false_positives` of turns; −∞: any does.

        The only labels are those of the tokens at which turns are decided.
        """
        last = torch.cat([at_work.states(gate, each).cpu()[counts] for each, at_work, _, counts in self.parts])
        sums = last[last[:, 1] <= gate.closes, 0].sort(descending=True).values
        allowed = int(gate.spec.false_positives * len(last))
        return float(sums[allowed]) / 2**16 if allowed < len(sums) else -math.inf


def scores(gate: Any, at_work: Any, evidence: Tensor) -> Tensor:
    """Return the numbers (B T) that a gate compares with its threshold, from evidence (B T 1).

    Under Page's test this is the sum that opens a gate, as if it had been closed all the time.
    """
    sums: Tensor = at_work.sums(gate, evidence)
    tokens = 1 if gate.spec.reads == "cusum" else (sums[..., 1] + gate.prior).clamp(min=1)
    return sums[..., 0].float() / 2**16 / tokens


def _threshold(gate: Any, original: Sequence[_Scored], dtype: torch.dtype, least: float = -math.inf) -> Tensor:
    """Return the lowest threshold, in the stored dtype, at which no original source loses more tokens than allowed.

    It is at least `least`, because evidence is less reliable on kinds of text that no source has. The search overwrites
    the gate's own threshold.
    """
    every = torch.cat([each.scores(gate) for each in original]).float().sort().values
    low, high = 0, len(every) - 1
    while low < high:
        at = (low + high) // 2
        gate.threshold.data.fill_(float(_above(every[at], dtype)))
        if max(each.lost(gate) for each in original) <= gate.spec.false_positives:
            high = at
        else:
            low = at + 1
    return _above(every[low].clamp(min=least), dtype).reshape(1).cpu()


def _above(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a value to a dtype, rounded up."""
    rounded = value.to(dtype)
    if rounded.float() < value:
        rounded = torch.nextafter(rounded, torch.full_like(rounded, torch.inf))
    return rounded


def _figures(
    gate: Any, original: Mapping[str, _Scored], new: Mapping[str, _Scored], turns: Mapping[str, _Scored]
) -> GateFigures:
    """Measure on held-out text of both domains how often the gate is open, and return the figures."""
    by_source: dict[str, float] = {}
    shares: list[float] = []
    by_length: dict[str, list[float | None]] = {}
    begins = (0, *LENGTHS)
    # The figures are about the user's own text, without the negatives.
    given = {name: scored for name, scored in original.items() if name not in NAMES}
    for sources in (given, new):
        found = [scored.open(gate) for scored in sources.values()]
        by_source |= {name: float(on.double().mean()) for name, (on, _) in zip(sources, found, strict=True)}
        on, lengths = (torch.cat(each) for each in zip(*found, strict=True))
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
        by_source=by_source,
        kept={name: 1 - scored.lost(gate) for name, scored in original.items()},
        opens_after={name: after for name, scored in new.items() if (after := scored.opens_after(gate)) is not None},
        turns={name: float(scored.open(gate)[0].double().mean()) for name, scored in turns.items()},
    )


def _judge(figures: GateFigures, say: Callable[[str], None]) -> None:
    """Report how well the gate separates the domains and what its errors cost.

    Raises BadInput where it is open on too few new tokens for anything to be learned.
    """
    words = (
        f"the domain gate is open on {figures.new:.1%} of held-out new tokens and {figures.original:.1%} of original"
        f" ones (at most {figures.limit:.1%} of each source allowed)"
    )
    if figures.new < _USELESS:
        raise BadInput(
            f"{words}: it cannot tell the two domains apart, and what was added would take part in so few new tokens"
            " that little could be learned; keep fewer languages (`keep_for_gate`), raise `false_positives`, let it"
            " read another `layer`, or leave the gate out"
        )
    say(f"{words}: accuracy {figures.accuracy:.1%}")
    for length, (original, new) in figures.by_length.items():
        if original is not None and new is not None:
            say(f"  prefixes of {length} tokens: open on {new:.1%} of new and {original:.1%} of original ones")
    after = [f"{count} tokens of {name}" for name, count in figures.opens_after.items()]
    say(f"  it opens after about {listed(after)}")
    if figures.turns:
        shares = ", ".join(f"{printable(name)} {share:.1%}" for name, share in figures.turns.items())
        say(f"  in a chat each turn of the user decides for its answer: of turns of 4 to 48 tokens open on {shares}")
    if len(figures.by_source) > 2:
        shares = ", ".join(f"{printable(name)} {share:.1%}" for name, share in figures.by_source.items())
        say(f"  by source: open on {shares}")
    kept = ", ".join(f"{printable(name)} {share:.1%}" for name, share in figures.kept.items())
    say(f"  from the beginning of each document the base's bits are kept on {kept}")
    if len(figures.kept.keys() - {*NAMES}) == 1:
        say(
            "  one original source: other kinds of text keep the base less often (in a test three kinds of English kept"
            " its bits on 90, 91 and 100% of tokens); give each kind a source"
        )
    if figures.new < _LITTLE:
        say(f"  the other {1 - figures.new:.1%} of new tokens keep the base's loss, however long this trains")
