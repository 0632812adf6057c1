"""A measurement before the first step of whether packed documents see each other, for any model and any attention.

Shapes: B sequences of T tokens, D hidden size, N chosen tokens.

A micro-batch of documents is run twice. In the second run every second document has other tokens; positions and lengths
are the same. In a model that isolates documents the states of the unchanged documents do not change: by no bit where
every token is computed separately, by rounding where tokens are grouped (mixtures of experts). As a reference, the
change without isolation is measured on the same documents with positions that do not restart (`packing: joined`). The
packer, collation, shape, dtype, attention implementation and mode are the same as in training.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from surgeon.data.packing import Packer, Packing, batch_of
from surgeon.errors import BadInput, printable
from surgeon.training.processes.sharding import let_go
from surgeon.training.steps.by_document import by_document
from surgeon.training.steps.packed import builds_no_mask

# The largest relative change of a token's states that counts as rounding, by dtype; and the largest fraction of the
# change without isolation that does.
_ROUNDING = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
_OF_A_LEAK = 0.1
# Sequences of the probe, the documents in a sequence on average, and the most tokens of a document.
_ROWS, _DOCUMENTS, _LONGEST = 2, 8, 512
_SEED = 0


@dataclass(frozen=True)
class Isolation:
    """Relative changes of a document's states, ‖Δh‖ / ‖h‖, where only the tokens of other documents change.

    `training` and `evaluation` are the changes in these modes (None: evaluation runs the same code as training).
    `without_grafts` is the larger one of both with grafts off (None: nothing leaked, or there are no grafts).
    `leaking` is the change without isolation. `alone` compares a packed document with the same document in a row of its
    own, in evaluation. A change up to `tolerance` is rounding.
    """

    dtype: str
    training: float
    evaluation: float | None
    without_grafts: float | None
    leaking: float
    alone: float
    tolerance: float

    @property
    def change(self) -> float:
        """The larger one of the changes in training and evaluation."""
        return max(self.training, self.evaluation or 0.0)

    @property
    def isolates(self) -> bool:
        """Return whether documents do not see each other."""
        return self.change <= self.tolerance

    @property
    def by_grafts(self) -> bool:
        """Return whether only grafts let documents see each other, which by definition read more than one document."""
        return not self.isolates and self.without_grafts is not None and self.without_grafts <= self.tolerance

    @property
    def shown(self) -> str:
        """The result in words, with the figures."""
        changed = self.change if self.without_grafts is None else self.without_grafts
        # A model that counts positions itself does this.
        shifted = ": its positions do not start at 0 again" if self.alone > _OF_A_LEAK * self.leaking else ""
        return (
            f"measured: other neighbours change a document's states by {_number(changed)}, without isolation by"
            f" {self.leaking:.2g}; packing changes them by {_number(self.alone)}{shifted}; up to {self.tolerance:.2g}"
            f" is rounding ({self.dtype})"
        )


def _number(value: float) -> str:
    """Return a relative change as text."""
    return f"{value:.2g}" if value else "0 (no bit)"


def probe(model: Any, *, length: int, micro_batch: int, packing: Packing, ids: Sequence[int]) -> Isolation:
    """Measure whether `model` keeps documents apart that are packed into one sequence; all processes call this.

    Parameters that are zero, as in grafts at birth, have random values meanwhile, so no path in the model is silent.

    Args:
        model: the model, on its device.
        length: tokens of a sequence.
        micro_batch: sequences that run together.
        packing: how documents are packed.
        ids: tokens from which documents are drawn at random.

    Raises:
        BadInput: the model's states are not finite.
    """
    rows = min(micro_batch, _ROWS)
    packed, joined = (_Documents(length, rows, each, torch.tensor(ids)) for each in (packing, "joined"))
    with _without_zeros(model), torch.no_grad():
        training = packed.changed(model, packed.kept)
        # In evaluation mode, as dropout would make them differ from a document run alone.
        sure = _states(model, packed.batch(0), training=False)
        if not bool(torch.isfinite(sure).all()):
            raise BadInput(
                f"{printable(str(model.config.name_or_path))}: random tokens give the model states that are no finite"
                " numbers, so nothing can be measured or trained; look at its weights, or say `dtype: float32`"
            )
        alone = _apart_from_alone(model, packed, sure)
        evaluation = None
        if hasattr(model, "surgery") or builds_no_mask(model):
            # Evaluation runs other code than training.
            evaluation = packed.change(sure, _states(model, packed.batch(1), training=False), packed.kept)
        leaking = joined.changed(model, packed.preceded)
        tolerance = min(_ROUNDING.get(model.dtype, _ROUNDING[torch.float32]), _OF_A_LEAK * leaking)
        without = None
        if max(training, evaluation or 0.0) > tolerance and hasattr(model, "grafts"):
            with model.grafts(enabled=False):
                without = max(packed.changed(model, packed.kept, training=mode) for mode in (True, False))
    let_go(model)
    dtype = str(model.dtype).removeprefix("torch.")
    return Isolation(dtype, training, evaluation, without, leaking, alone, tolerance)


class _Documents:
    """Documents of random tokens, packed into `rows` sequences by training's packer.

    Documents with odd numbers have the same tokens in every variant. `document` and `place` (B T) are each token's
    document and its place in it. `kept` (B T, bool) marks the tokens of odd documents, and `preceded` the kept tokens
    whose document is not the first one of its row.
    """

    def __init__(self, length: int, rows: int, packing: Packing, ids: Tensor) -> None:
        """Lay out documents in `rows` sequences of `length` tokens; `ids` are the tokens that texts are drawn from."""
        self.length, self.packing, self.ids = length, packing, ids
        self.rows = [_lengths(length, row) for row in range(rows)]
        every = torch.tensor([each for row in self.rows for each in row])
        shape = (rows, length)
        self.document = torch.repeat_interleave(torch.arange(len(every)), every).view(shape)
        self.place = torch.cat([torch.arange(each) for each in every.tolist()]).view(shape)
        self.kept = self.document % 2 == 1
        self.preceded = self.kept & (self.document != self.document[:, :1])

    def texts(self, variant: int) -> list[list[int]]:
        """Return the token ids of the documents; documents with even numbers have other tokens in every variant."""
        found = []
        for number, length in enumerate(each for row in self.rows for each in row):
            drawn = torch.Generator().manual_seed(2 * number + (variant if number % 2 == 0 else 0))
            found.append(self.ids[torch.randint(len(self.ids), (length,), generator=drawn)].tolist())
        return found

    def batch(self, variant: int) -> dict[str, Tensor]:
        """Return the batch of a variant, packed and collated as in training."""
        texts = iter(self.texts(variant))
        sequences = []
        for number, row in enumerate(self.rows):
            # A domain gate is open in training on text of another domain than 0.
            packer = Packer(self.length, self.packing, 1 - number % 2)
            for _ in row:
                _add(packer, next(texts))
            sequences.append(packer.take())
        return batch_of(sequences)

    def alone(self, number: int) -> dict[str, Tensor]:
        """Return a batch with one document in a row of its own."""
        text = self.texts(0)[number]
        row = int((self.document == number).any(dim=1).nonzero())
        packer = Packer(len(text), self.packing, 1 - row % 2)
        _add(packer, text)
        return batch_of([packer.take()])

    def changed(self, model: Any, chosen: Tensor, *, training: bool = True) -> float:
        """Run both variants, and return how much the states of the tokens `chosen` change between them."""
        first, second = (_states(model, self.batch(variant), training=training) for variant in (0, 1))
        return self.change(first, second, chosen)

    def change(self, first: Tensor, second: Tensor, chosen: Tensor) -> float:
        """Return the relative change between two states (B T D) at the tokens `chosen`.

        It is the largest median, over the tokens of a document or over the tokens at one place in all documents. A leak
        changes a whole document, or the beginning of all; rounding may send a single token to another expert.
        """
        here = chosen.to(first.device)
        changes = relative(first[here], second[here])
        if not bool(changes.any()):
            return 0.0
        medians = [
            changes[group == each].median()
            for group in (self.document[chosen], self.place[chosen])
            for each in torch.unique(group)
        ]
        return float(torch.stack(medians).nan_to_num(math.inf).max())


def _lengths(length: int, row: int) -> list[int]:
    """Return the lengths of the documents of a sequence; there are at least two."""
    drawn = torch.Generator().manual_seed(_SEED + row)
    longest = max(1, min(_LONGEST, 2 * length // _DOCUMENTS))
    found: list[int] = []
    while left := length - sum(found):
        wanted = int(torch.randint(longest, (1,), generator=drawn)) + 1
        found.append(min(wanted, left if found else left - 1))
    return found


def _add(packer: Packer, text: list[int]) -> None:
    """Add a whole document to the packer; the loss counts all of its tokens."""
    packer.add((text, [True] * len(text)), 0)


def relative(first: Tensor, second: Tensor) -> Tensor:
    """Return ‖first − second‖ / ‖first‖ of every token, N, in float32 on the CPU; both are N D."""
    first, second = first.float(), second.float()
    scale = first.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    found: Tensor = (first - second).norm(dim=-1) / scale
    return found.cpu()


def _apart_from_alone(model: Any, packed: _Documents, states: Tensor) -> float:
    """Return how far a packed document is from the same document in a row of its own: the median over its tokens.

    The document is the longest one that is not the first of its row.
    """
    numbers = packed.document[packed.preceded]
    number = int(numbers.mode().values) if len(numbers) else 1
    here = (packed.document == number).to(states.device)
    return float(relative(_states(model, packed.alone(number), training=False)[0], states[here]).median())


def _states(model: Any, batch: dict[str, Tensor], *, training: bool) -> Tensor:
    """Run a batch without a cache; return the inputs of the head, B T D (the logits where the model has no head).

    `training` chooses the mode, and whether grafts receive labels and domains; the mode is restored afterwards.
    """
    kept: list[Tensor] = []
    given = {name: tensor.to(model.device) for name, tensor in batch.items()}
    if not (training and hasattr(model, "surgery")):
        # Grafts read labels and domains in training; what some models make of labels needs their head.
        given = {name: given[name] for name in ("input_ids", "position_ids")}
    before = model.training
    model.train(training)
    devices = [model.device] if model.device.type == "cuda" else []
    try:
        with (
            torch.random.fork_rng(devices),
            _headless(model, kept),
            by_document() if training else contextlib.nullcontext(),
        ):
            # The seed of dropout.
            torch.manual_seed(_SEED)
            output = model(**given, use_cache=False)
    finally:
        model.train(before)
    found: Tensor = kept[0] if kept else output.logits
    return found.reshape(*batch["input_ids"].shape, -1)


@contextlib.contextmanager
def _headless(model: Any, kept: list[Tensor]) -> Iterator[None]:
    """Make forwards compute neither logits nor a loss within the context; append the inputs of the head to `kept`."""
    head, plain = model.get_output_embeddings(), model.loss_function

    def keep(hidden: Tensor) -> Tensor:
        """Store the head's input, and return it in place of logits."""
        kept.append(hidden)
        return hidden

    if head is not None:
        head.forward = keep
    model.loss_function = lambda logits, *_, **__: logits.new_zeros(())
    try:
        yield
    finally:
        model.loss_function = plain
        if head is not None:
            del head.forward


@contextlib.contextmanager
def _without_zeros(model: nn.Module) -> Iterator[None]:
    """Give parameters whose bits are all zero random values within the context, as large as trained matrices have."""
    changed: list[Tensor] = []
    try:
        for number, parameter in enumerate(model.parameters()):
            # Where weights are sharded, this process's shard.
            own: Any = parameter.data
            own = own.to_local() if hasattr(own, "to_local") else own
            if own.dtype not in _ROUNDING or own.numel() == 0 or bool(own.any()) or bool(own.signbit().any()):
                continue
            drawn = torch.Generator(device=own.device).manual_seed(number)
            own.normal_(std=own.shape[-1] ** -0.5 if own.dim() > 1 else 0.1, generator=drawn)
            changed.append(own)
        yield
    finally:
        for own in changed:
            own.zero_()
