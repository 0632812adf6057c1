"""Scoring in three calls: cut texts by a checkpoint's tokenizer, load the model, score it on them.

Torch is imported only when work begins, so that bad arguments are refused at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from surgeon.data.chats import Chat
from surgeon.data.held_out import HeldOut
from surgeon.data.rows import Rows
from surgeon.data.scores import Judged, Scores, Windows

if TYPE_CHECKING:
    from surgeon.data.encoding import Encoder
    from surgeon.manifest.checkpoint import Checkpoint


def written(
    texts: Sequence[HeldOut], checkpoints: Sequence[Checkpoint], *, say: Callable[[str], None] = lambda _line: None
) -> list[HeldOut]:
    """Return the texts without the rows that some checkpoint's tokenizer or chat template refuses.

    Args:
        texts: Texts; each has the option whether bad rows are left out.
        checkpoints: The checkpoints whose tokenizers and chat templates are used.
        say: Receives lines on left-out rows, and on control tokens that were found.

    Returns:
        The texts, in their order.

    Raises:
        BadInput: There is no tokenizer, or no chat template for chats, or a text has such rows and does not leave them
            out; the error names each row.
    """
    for checkpoint in checkpoints:
        texts = [text for text, _ in _written(texts, checkpoint, say)]
    return list(texts)


def _written(
    texts: Sequence[HeldOut], checkpoint: Checkpoint, say: Callable[[str], None] = lambda _line: None
) -> Iterator[tuple[HeldOut, Encoder]]:
    """Yield each text as `written` returns it, with the encoder of its documents."""
    encoder = _encoder(checkpoint)
    for text in texts:
        documents, own = text.documents, encoder.of(text.documents.rows.spec, text.template)
        if len(text) and isinstance(documents.read(int(text.numbers[0])), Chat):
            own.check_chat()
        rows = Rows(documents.rows.spec, own.tokenizer, own.write)
        each = ((number, documents.where(number), partial(documents.read, number)) for number in text.numbers.tolist())
        kept = np.array([*rows.kept(each, documents.shown)], dtype=np.int64)
        for note in rows.notes():
            say(f"source {text.name}: {note}")
        yield replace(text, numbers=kept), own


def cut(texts: Sequence[HeldOut], checkpoint: Checkpoint, *, length: int) -> dict[str, Windows]:
    """Cut texts into windows of at most `length` tokens, by the checkpoint's tokenizer; no window spans two documents.

    Every token but a document's first is predicted once, from the tokens of its window. Returns the windows by text
    name. Raises BadInput where there is no tokenizer, and for a text without a token that counts.
    """
    from surgeon.data.scoring import windows_of

    return {text.name: windows_of(text, own, length) for text, own in _written(texts, checkpoint)}


def pack(
    texts: Sequence[HeldOut],
    checkpoint: Checkpoint,
    *,
    length: int,
    packing: Literal["isolated", "joined"] = "isolated",
    most: int = 64,
) -> dict[str, Windows]:
    """Pack texts into sequences of `length` tokens as training does for its held-out loss.

    Args:
        texts: Texts, whose documents are taken in order.
        checkpoint: The checkpoint whose tokenizer and chat template are used.
        length: Tokens of a sequence.
        packing: Whether attention stays within documents, as in a training config.
        most: The most sequences taken from each text.

    Returns:
        The sequences by the name of the text; none for a text with fewer than two tokens.

    Raises:
        BadInput: There is no tokenizer, or no chat template for chats.
    """
    from surgeon.data.packing import Packer, held_out

    found = {}
    for text, own in _written(texts, checkpoint):
        sequences = held_out(text.documents, list(text.numbers), own, Packer(length, packing, 0), most=most)
        units = [np.full(len(each.ids), number) for number, each in enumerate(sequences)]
        found[text.name] = Windows(sequences, units, np.zeros(len(sequences), dtype=np.int64), 0)
    return found


def score(
    model: Any, windows: Windows, *, batch: int = 8, advance: Callable[[int], None] = lambda _sequences: None
) -> Scores:
    """Score a loaded model on windows (`cut`, `pack`): cross-entropy and greedy accuracy of every token that counts.

    `batch` of the longest sequences are run at a time, more of shorter ones. `advance` receives the number of sequences
    just completed.
    """
    from surgeon.data.scoring import score_sequences

    return score_sequences(
        model,
        windows.sequences,
        micro_batch=batch,
        units=windows.units,
        unit_count=windows.documents,
        advance=advance,
    )


def divergence(
    model: Any,
    base: Any,
    windows: Windows,
    *,
    batch: int = 8,
    advance: Callable[[int], None] = lambda _sequences: None,
) -> Scores:
    """Return scores with KL(base ‖ model) in nats per token instead of the loss.

    A token counts as right where both models guess the same token. Both models are loaded and use the same tokens;
    where a vocabulary grew, only the base's tokens count. `batch` and `advance` are as in `score`.
    """
    from surgeon.data.scoring import score_sequences

    return score_sequences(
        model,
        windows.sequences,
        micro_batch=batch,
        units=windows.units,
        unit_count=windows.documents,
        beside=base,
        advance=advance,
    )


def judge(
    model: Any,
    texts: Sequence[HeldOut],
    checkpoint: Checkpoint,
    *,
    length: int,
    batch: int = 8,
    advance: Callable[[int], None] = lambda _examples: None,
) -> dict[str, Judged]:
    """Evaluate a loaded classification model on labelled texts: cross-entropy and the predicted label of each.

    Args:
        model: The model, as `checkpoint.load()` gives it.
        texts: Texts of the kind `labels`.
        checkpoint: The checkpoint whose tokenizer and labels are used.
        length: Tokens of a text at most; fewer where the model has fewer positions.
        batch: How many texts are run at a time.
        advance: Receives the number of texts just completed.

    Returns:
        The results by the name of the text.

    Raises:
        BadInput: A text has a label that the model does not know.
    """
    from surgeon.data.examples import ExampleEncoder, example_at
    from surgeon.data.scoring import judge_examples
    from surgeon.models.outputs import positions_of

    own, room = _encoder(checkpoint), positions_of(model)
    encoder = ExampleEncoder(
        own.tokenizer,
        checkpoint.config,
        length=length if room is None else min(length, room),
        vocabulary=own.vocabulary,
    )
    examples = {
        text.name: [example_at(text.documents, int(number), encoder, text.name) for number in text.numbers]
        for text in texts
    }
    return {
        name: judge_examples(model, each, micro_batch=batch, pad=encoder.pad, advance=advance)
        for name, each in examples.items()
    }


def _encoder(checkpoint: Checkpoint) -> Encoder:
    """Return the encoder of documents by a checkpoint's tokenizer. Raises BadInput where there is no tokenizer."""
    from surgeon.data.encoding import Encoder

    return Encoder(checkpoint.path, vocabulary=checkpoint.vocabulary or sys.maxsize)
