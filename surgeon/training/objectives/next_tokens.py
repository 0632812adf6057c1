"""Texts and chats: a language model learns to predict the next token of documents, packed into sequences of one length.

Packed documents do not attend to each other, unless the config says so; this is measured before the first step.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from surgeon.common.distributed import Ranks, summed
from surgeon.common.library import first_line
from surgeon.data.documents import Corpus
from surgeon.data.packing import IGNORED_LABEL, PackedSequence, Packer, SourceStream, batch_of, held_out
from surgeon.data.recalled_text import record_of
from surgeon.data.specs import SourceSpec
from surgeon.errors import BadInput, printable
from surgeon.training.config.schema import taught_alone
from surgeon.training.run import SHOWN_TOKENS, Case, Look, Objective, Prepared, Run, Sample

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from surgeon.data.encoding import Encoded, Encoder
    from surgeon.training.losses.cross_entropy import FusedHead

# How many runs of counted or uncounted tokens of a sample are shown.
_RUNS = 8
# Losses of the runtime that are means over the tokens of some domains: original text, or that of tasks.
_ORIGINAL, _TASKS = "local_l1_loss", "router_loss"


class NextTokens(Objective):
    """The objective of texts and chats: the mean cross-entropy of the next tokens that count."""

    packs = True

    def check(self, case: Case) -> None:
        """Raise BadInput for an encoder."""
        family = case.anatomy.family
        if family.encoder:
            raise BadInput(
                f"{printable(str(case.out.path))}: an encoder ({family.model_type}), which predicts no next token;"
                " train it on labelled texts (`kind: labels`), or on your task with transformers' Trainer after"
                " `model.freeze_base()`"
            )

    def stream(
        self, source: SourceSpec, documents: Corpus, numbers: NDArray[np.int64], prepared: Prepared, encoder: Encoder
    ) -> SourceStream:
        """Return the stream of a source's packed sequences to train on."""
        config = prepared.loaded.config
        written = source.generate is not None or (
            source.repo_id is None and record_of(prepared.loaded.resolve(source.path)).is_file()
        )
        alone = taught_alone(config, source, written=written)
        packer = Packer(prepared.settings.length, config.packing, config.domain_of(source), alone=alone)
        return SourceStream(source.name, documents, numbers, config.seed, encoder.of(source), packer)

    def held_out(
        self, stream: SourceStream, documents: Corpus, numbers: Sequence[int], most: int, length: int
    ) -> list[PackedSequence]:
        """Return at most `most` packed sequences of held-out documents."""
        packer = Packer(length, stream.packer.packing, stream.packer.domain)
        return held_out(documents, numbers, stream.encoder, packer, most=most)

    def look(self, stream: SourceStream, numbers: Sequence[int]) -> Look:
        """Count the tokens of some documents, and the share of them that the loss counts."""
        encoded = [stream.encoder.encode(stream.documents.read(number)) for number in numbers]
        tokens = sum(len(ids) for ids, _ in encoded)
        counted = sum(sum(counts) for _, counts in encoded) / tokens if tokens else 0.0
        return Look(tokens, counted, Sample(stream.name, _parts(encoded[0], stream.encoder)))

    def load(self, run: Run, **options: Any) -> Any:
        """Load a causal language model."""
        from surgeon.models.load import load_model

        return load_model(run.out, **options)

    def isolate(self, run: Run, model: Any) -> None:
        """Make every forward keep packed documents apart: by masks, or as one row where attention takes no mask."""
        from surgeon.training.steps.packed import builds_no_mask, give_masks_positions, run_in_one_row

        if run.loaded.config.packing == "joined":
            return
        if builds_no_mask(model):
            run_in_one_row(model)
        else:
            give_masks_positions(model)

    def check_isolation(self, run: Run, model: Any) -> None:
        """Measure on random tokens whether packed documents see each other (`isolation`)."""
        import torch

        from surgeon.training.isolation import probe
        from surgeon.training.steps.packed import implementation_of

        config, settings = run.loaded.config, run.settings
        how = f"({printable(implementation_of(model))}), {settings.length} tokens a sequence"
        if config.packing == "joined":
            run.say("packing: documents joined, attention across them")
            return
        special = {*run.data.mixture.streams[0].encoder.tokenizer.all_special_ids}
        ids = [token for token in range(model.config.get_text_config().vocab_size) if token not in special]
        try:
            found = probe(
                model,
                length=settings.length,
                micro_batch=settings.micro_batch,
                packing=config.packing,
                ids=ids,
            )
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, ImportError, NameError) as error:
            raise BadInput(
                f"{run.loaded.where('attention')}the model does not run on packed documents with the attention {how}:"
                f" {first_line(error)}; say another `attention`, or another `dtype`"
            ) from error
        if not (found.isolates or found.by_grafts):
            raise BadInput(
                f"{run.loaded.where('packing')}packed documents see each other under the attention {how}:"
                f" {found.shown}. Say `packing: joined`, so that they are meant to, or another `attention`: flash"
                " attention also hands boundaries to layers that carry a state, for which they need kernels of their"
                " own"
            )
        run.say("packing: documents isolated (checked)")
        if found.by_grafts:
            run.say(
                "what was added reads more than one document, as its operation says: with it a document's states change"
                f" by {found.change:.2g} where other documents change"
            )

    def fused_head(self, run: Run, model: Any) -> FusedHead | None:
        """Return the head for the config's `cross_entropy`; None for torch's where no remedy reads the head's input."""
        from surgeon.training.losses.cross_entropy import FusedHead, choose

        vocabulary = int(model.config.get_text_config().vocab_size)
        tokens = run.settings.micro_batch * run.settings.length
        kind = choose(run.loaded.config.cross_entropy, tokens=tokens, vocabulary=vocabulary)
        if kind == "torch":
            return FusedHead(model, kind) if any(remedy.reads_head for remedy in run.remedies) else None
        return FusedHead(model, kind)

    def batch(self, run: Run, sequences: Sequence[PackedSequence]) -> dict[str, Tensor]:
        """Stack packed sequences, with their domains."""
        return batch_of(sequences)

    def shares(self, batches: Sequence[Mapping[str, Tensor]], device: torch.device) -> list[dict[str, float]]:
        """Return the factors of losses that are means over the tokens of some domains.

        A micro-batch's share of these tokens differs from its share of the labels, by which the runtime scales.
        """
        # Batches are on the host still; what is moved to a device and read back would wait for the step before.
        counts = [_counts(batch) for batch in batches]
        labels, *wholes = summed(np.sum(counts, axis=0), Ranks.of_environment().size, device).tolist()
        return [
            {
                name: own / whole / (own_labels / labels)
                for name, own, whole in zip((_ORIGINAL, _TASKS), owns, wholes, strict=True)
                if whole
            }
            for own_labels, *owns in counts
        ]

    def judged(self, run: Run, model: Any, held: Sequence[PackedSequence]) -> dict[str, float]:
        """Return the mean cross-entropy of the labels that count (`data.scoring.score_sequences`)."""
        from surgeon.data.scoring import score_sequences

        found = score_sequences(model, held, micro_batch=run.settings.micro_batch, ranks=run.ranks)
        return {"loss": found.loss}


def _parts(encoded: Encoded, encoder: Encoder) -> tuple[tuple[str, bool], ...]:
    """Return (text, whether the loss counts it) for each of the first runs of tokens; long runs lose their middle."""
    runs = itertools.groupby(zip(*encoded, strict=True), key=lambda pair: pair[1])
    parts = [([token for token, _ in run], counts) for counts, run in itertools.islice(runs, _RUNS)]
    each = SHOWN_TOKENS // len(parts)

    def text(ids: list[int]) -> str:
        """Decode token ids; of a run longer than `each` tokens only the beginning and the end."""
        decode = encoder.tokenizer.decode
        return decode(ids) if len(ids) <= each else f"{decode(ids[: each - each // 3])} … {decode(ids[-(each // 3) :])}"

    return tuple((text(ids), counts) for ids, counts in parts)


def _counts(batch: Mapping[str, Tensor]) -> tuple[int, int, int]:
    """Return a micro-batch's counts of (labels, tokens of original text, tokens of tasks or new text)."""
    labels = int((batch["labels"][..., 1:] != IGNORED_LABEL).sum())
    original = int((batch["domain_ids"] == 0).sum()) * batch["input_ids"].shape[1]
    return labels, original, batch["input_ids"].numel() - original
