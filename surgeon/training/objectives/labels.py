"""Texts with labels: an encoder's classification head learns to predict the label of a text; a sequence is one text.

The head trains in addition to every target. An encoder without a head gets one before the run (`new_head`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from surgeon.anatomy.grafted_config import native_config
from surgeon.anatomy.heads import CLASSIFIER, head_of
from surgeon.checkpoint.labels import is_classifier, label_names
from surgeon.common.listener import Listener
from surgeon.data.documents import Corpus
from surgeon.data.specs import SourceSpec
from surgeon.errors import BadInput, printable
from surgeon.manifest.trainable import TrainableSet, trainable_set
from surgeon.training.run import SHOWN_TOKENS, Case, Look, Objective, Prepared, Run, Sample, TrainingData

if TYPE_CHECKING:
    from torch import Tensor

    from surgeon.data.encoding import Encoder
    from surgeon.data.examples import Example, ExampleStream
    from surgeon.training.targets.target import Target


class Labels(Objective):
    """The objective of texts with labels: the mean cross-entropy of the labels."""

    packs = False
    auto = CLASSIFIER

    def check(self, case: Case) -> None:
        """Raise BadInput for a decoder, and for a head with fewer than two labels or other labels than the config's."""
        out, loaded, family = case.out, case.loaded, case.anatomy.family
        shown = printable(str(out.path))
        if not family.encoder:
            raise BadInput(
                f"{loaded.where('sources', 0, 'kind')}`kind: labels` trains the classification head of an encoder, and"
                f" {shown} is a decoder ({family.model_type}); have it write the labels: `kind: chat` with the label as"
                " the assistant's answer"
            )
        if not is_classifier(out.config):
            # `new_head.headed` makes one.
            return
        labels, asked = label_names(out.config), loaded.config.labels
        if len(labels) < 2:
            raise BadInput(
                f"{shown}: config.json: `id2label` names {len(labels)} labels, and a text is to get one of two at"
                " least; take a base without the head, and training makes one for your labels"
            )
        if asked is not None and asked not in (list(labels), len(labels)):
            raise BadInput(
                f"{loaded.where('labels')}`labels` is for an encoder without a classification head, and {shown} has one"
                f" for {printable(', '.join(labels), 300)}; leave it out, or take a base without the head"
            )

    def trained(self, target: Target, wanted: TrainableSet) -> TrainableSet:
        """Add the classification head of the output to `wanted`, where it has one.

        A part of another head (for masked words) that the model does not run is left out. Raises BadInput where
        transformers cannot build the model.
        """
        out, anatomy = target.out, target.anatomy
        if not (anatomy.family.encoder and is_classifier(out.config)):
            return wanted
        head = head_of(native_config(out.config), out.tensors)
        idle = head.idle(anatomy.outer)
        more = head.births.keys() & out.tensors.keys()
        names = tuple(name for name in out.tensors if name in more or (name in wanted.names and name not in idle))
        of_base = {*trainable_set(out, target.manifest, "base", anatomy).names} & more
        title = f"{wanted.shown} and the classification head" if wanted.names else "the classification head"
        return replace(
            wanted,
            names=names,
            of_base=frozenset((wanted.of_base - idle) | of_base),
            title=wanted.title if more <= {*wanted.names} else title,
            beside=tuple(name for name in names if name in more),
        )

    def ready(
        self, prepared: Prepared, folder: Path | None, *, trust_remote_code: bool, listener: Listener
    ) -> contextlib.AbstractContextManager[Prepared]:
        """Return a context in which an encoder without a classification head has one for the config's labels."""
        if is_classifier(prepared.out.config):
            return contextlib.nullcontext(prepared)

        from surgeon.training.new_head import headed

        return headed(prepared, folder, trust_remote_code=trust_remote_code, listener=listener)

    def stream(
        self, source: SourceSpec, documents: Corpus, numbers: NDArray[np.int64], prepared: Prepared, encoder: Encoder
    ) -> ExampleStream:
        """Return the stream of a source's examples to train on."""
        from surgeon.data.examples import ExampleEncoder, ExampleStream

        length, vocabulary = prepared.settings.length, prepared.anatomy.sizes.vocabulary
        examples = ExampleEncoder(encoder.tokenizer, prepared.out.config, length=length, vocabulary=vocabulary)
        return ExampleStream(source.name, documents, numbers, prepared.loaded.config.seed, examples)

    def held_out(
        self, stream: ExampleStream, documents: Corpus, numbers: Sequence[int], most: int, length: int
    ) -> list[Example]:
        """Return at most `most` held-out examples; their length is the stream's."""
        from surgeon.data.examples import example_at

        return [example_at(documents, number, stream.encoder, stream.name) for number in numbers[:most]]

    def check_data(self, data: TrainingData, where: str) -> None:
        """Note which labels no text has. Raises BadInput where all texts have the same label."""
        streams: list[ExampleStream] = data.mixture.streams
        seen = {number for stream in streams for number in stream.labels}
        names = streams[0].encoder.labels
        if len(seen) < 2:
            raise BadInput(
                f"{where}: every text has the label {printable(names[min(seen)])!r}; there is nothing to tell apart:"
                " add texts with others"
            )
        if unused := [name for number, name in enumerate(names) if number not in seen]:
            data.notes.append(f"no text has the label {', '.join(printable(name, 40) for name in unused[:20])}")

    def look(self, stream: ExampleStream, numbers: Sequence[int]) -> Look:
        """Count the tokens of some documents, and the labels of the whole source."""
        encoder, most = stream.encoder, len(numbers)
        examples = self.held_out(stream, stream.documents, numbers, most, encoder.length)
        text = encoder.tokenizer.decode(examples[0].ids[:SHOWN_TOKENS])
        return Look(
            sum(len(example.ids) for example in examples),
            0.0,
            Sample(stream.name, ((text, False),), encoder.labels[examples[0].label]),
            {encoder.labels[number]: stream.labels[number] for number in sorted(stream.labels)},
        )

    def load(self, run: Run, **options: Any) -> Any:
        """Load an encoder with its head. Raises BadInput where it has fewer positions than an example has tokens."""
        from surgeon.models.outputs import check_window, load_encoder

        model = load_encoder(run.out, auto=self.auto, **options)
        check_window(model, run.settings.length)
        return model

    def batch(self, run: Run, sequences: Sequence[Example]) -> dict[str, Tensor]:
        """Stack examples, padded to the longest one."""
        from surgeon.data.examples import batch_of_examples

        return batch_of_examples(sequences, pad=_pad_of(run))

    def judged(self, run: Run, model: Any, held: Sequence[Example]) -> dict[str, float]:
        """Return the mean cross-entropy of held-out examples, and the head's scores (`data.scoring.judge_examples`)."""
        from surgeon.data.scoring import judge_examples

        found = judge_examples(
            model,
            held,
            micro_batch=run.settings.micro_batch,
            pad=_pad_of(run),
            ranks=run.ranks,
        )
        return found.figures()


def _pad_of(run: Run) -> int:
    """Return the id of the token that pads a batch of examples."""
    pad: int = run.data.mixture.streams[0].encoder.pad
    return pad
