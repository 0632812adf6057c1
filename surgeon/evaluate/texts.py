"""Score several models on the same held-out text and compare each with the first, document by document; ask them.

Classification models are judged on the same labelled texts, text by text.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from surgeon import (
    Answer,
    Checkpoint,
    EncodedPrompts,
    HeldOut,
    Judged,
    Scores,
    Windows,
    answer,
    cut,
    divergence,
    encode_prompts,
    judge,
    score,
    written,
)
from surgeon.common.listener import Listener
from surgeon.errors import BadInput, printable
from surgeon.evaluate.results import Evaluation, LabelScores, ModelScores, SourceScores

# The longest window by default: longer ones cost memory and change the numbers little.
LONGEST = 2048

# With fewer documents an interval is too rough to rely on.
_FEW_DOCUMENTS = 10


def check_predicts(model: Checkpoint) -> None:
    """Raise BadInput for an encoder, and for a classification model."""
    if model.is_encoder or model.is_classifier:
        raise BadInput(
            f"{printable(model.name)}: {'an encoder' if model.is_encoder else 'a classifier'}, which predicts no next"
            " token; give causal language models, or classification models and texts with labels (--labels)"
        )


def evaluate_texts(
    models: Sequence[Checkpoint],
    texts: Sequence[HeldOut],
    *,
    prompts: Sequence[str],
    answer_tokens: int,
    kl: bool,
    length: int | None,
    batch: int,
    dtype: str,
    device: str,
    listener: Listener,
) -> Evaluation[SourceScores]:
    """Score every model on every text and have it answer every prompt, one model in memory at a time.

    Either may be empty. Raises BadInput where a model cannot be loaded, or a prompt leaves no room for an answer.
    """
    notes: list[str] = []

    def note(line: str) -> None:
        notes.append(line)
        listener.say(line)

    for model in models:
        check_predicts(model)
    window = _window(models, length, note) if texts else None
    for model in models:
        for line in model.notes:
            note(f"{model.name}: {line}")
        _ask_for_base(model, models, note)
    texts = written(texts, models, say=note) if texts else []
    asked = [_encoded(prompts, model, answer_tokens, note) if prompts else None for model in models]
    windows = [{} for _ in models] if window is None else _cut(texts, models, window, note)
    rows: list[ModelScores[SourceScores]] = []
    reference: dict[str, Scores] | None = None
    for model, own, encoded in zip(models, windows, asked, strict=True):
        found, answers = _run(model, own, encoded, batch, dtype, device, note, listener)
        same = own is windows[0] if texts else None
        summaries = _summaries(own, found, windows[0], reference)
        rows.append(ModelScores(model.name, same, summaries, tuple(answers)))
        reference = reference or found
    if kl:
        rows[1:] = _with_kl(models, rows[1:], windows[0], batch, dtype, device, listener)
    return Evaluation(tuple(rows), window, dtype, device, tuple(notes), tuple(prompts))


def _with_kl(
    models: Sequence[Checkpoint],
    rows: Sequence[ModelScores[SourceScores]],
    cut_texts: Mapping[str, Windows],
    batch: int,
    dtype: str,
    device: str,
    listener: Listener,
) -> list[ModelScores[SourceScores]]:
    """Return the rows with KL(first ‖ model), where both have the same tokens."""
    first, found = models[0].load(dtype=dtype, device=device), []
    for row, checkpoint in zip(rows, models[1:], strict=True):
        sources = row.sources
        if row.same_tokens:
            listener.begin(f"KL of {checkpoint.name}", sum(map(len, cut_texts.values())), "windows")
            model = checkpoint.load(dtype=dtype, device=device)
            how: dict[str, Any] = {"batch": batch, "advance": listener.advance}
            sources = tuple(
                replace(each, apart=divergence(model, first, cut_texts[each.source], **how).loss_ratio)
                for each in sources
            )
            del model
            gc.collect()
        found.append(replace(row, sources=sources))
    return found


def _encoded(prompts: Sequence[str], model: Checkpoint, tokens: int, note: Callable[[str], None]) -> EncodedPrompts:
    """Return the prompts as the model reads them, and note which answers its context cuts."""
    encoded = encode_prompts(prompts, model, tokens=tokens)
    for number, most in enumerate(encoded.most, 1):
        if most < tokens:
            note(f"{model.name}: its context of {model.context} leaves {most} tokens for the answer to prompt {number}")
    return encoded


def _cut(
    texts: Sequence[HeldOut], models: Sequence[Checkpoint], window: int, note: Callable[[str], None]
) -> list[dict[str, Windows]]:
    """Return the windows of each model: the first one's own where the tokens are the same."""
    first = models[0]
    windows = [cut(texts, first, length=window)]
    _note_documents(windows[0], window, note)
    for model in models[1:]:
        theirs = cut(texts, model, length=window)
        if all(each.same_tokens(windows[0][name]) for name, each in theirs.items()):
            windows.append(windows[0])
            continue
        windows.append(theirs)
        note(
            f"{model.name}: its tokens differ from {first.name}'s, so losses a token and perplexities"
            " of the two cannot be compared; compare bits per byte"
        )
    return windows


def narrowest_of(models: Sequence[Checkpoint]) -> Checkpoint:
    """Return the model with the smallest context."""
    return min(models, key=lambda model: model.context or sys.maxsize)


def _window(models: Sequence[Checkpoint], length: int | None, note: Callable[[str], None]) -> int:
    """Tokens in the longest sequence: the same for all models, so that all predict from the same context."""
    narrowest = narrowest_of(models)
    context = narrowest.context or sys.maxsize
    if length is not None and length > context:
        note(f"{narrowest.name} has a context of {context} tokens: windows of that many, not {length}")
    return min(length or LONGEST, context)


def _ask_for_base(model: Checkpoint, models: Sequence[Checkpoint], note: Callable[[str], None]) -> None:
    if model.manifest is not None and not any(other.id in model.base_ids for other in models if other is not model):
        note(
            f"{model.name} was made of {model.manifest.base.id}, which is not among the models; --base DIR adds"
            " it as the first row"
        )


def _note_documents(cut_texts: Mapping[str, Windows], window: int, note: Callable[[str], None]) -> None:
    if long := sum(windows.cut for windows in cut_texts.values()):
        note(
            f"{long} documents are longer than {window} tokens: they are cut into windows, without the text before each"
        )
    for name, windows in cut_texts.items():
        if (documents := windows.documents) < _FEW_DOCUMENTS:
            result = "so its intervals are rough" if documents > 1 else "so there are no intervals"
            note(f"source {printable(name)} has {documents} document{'s' if documents > 1 else ''}, {result}")


def _run(
    checkpoint: Checkpoint,
    cut_texts: Mapping[str, Windows],
    prompts: EncodedPrompts | None,
    batch: int,
    dtype: str,
    device: str,
    note: Callable[[str], None],
    listener: Listener,
) -> tuple[dict[str, Scores], list[Answer]]:
    listener.say(f"loading {checkpoint.name}")
    model = checkpoint.load(dtype=dtype, device=device, say=note)
    if cut_texts:
        listener.begin(f"scoring {checkpoint.name}", sum(map(len, cut_texts.values())), "windows")
    found = {name: score(model, windows, batch=batch, advance=listener.advance) for name, windows in cut_texts.items()}
    answers: list[Answer] = []
    if prompts is not None:
        listener.begin(f"asking {checkpoint.name}", len(prompts.ids), "prompts")
        answers = answer(model, prompts, advance=listener.advance)
    # Free the memory for the next model.
    del model
    gc.collect()
    return found, answers


def _summaries(
    cut_texts: Mapping[str, Windows],
    found: Mapping[str, Scores],
    cut_of_first: Mapping[str, Windows],
    reference: Mapping[str, Scores] | None,
) -> tuple[SourceScores, ...]:
    summaries: list[SourceScores] = []
    for name, scores in found.items():
        windows, by_token, by_byte = cut_texts[name], None, None
        if reference is not None:
            by_byte = scores.bits_difference(windows, reference[name], cut_of_first[name])
            if windows is cut_of_first[name]:
                by_token = scores.loss_difference(reference[name])
        summaries.append(
            SourceScores(
                source=name,
                documents=windows.documents,
                tokens=int(scores.tokens.sum()),
                nbytes=int(windows.nbytes.sum()),
                loss=scores.loss_ratio,
                perplexity=scores.perplexity,
                bits_per_byte=scores.bits_per_byte(windows),
                accuracy=scores.accuracy,
                loss_difference=by_token,
                bits_difference=by_byte,
            )
        )
    return tuple(summaries)


def evaluate_labels(
    models: Sequence[Checkpoint],
    texts: Sequence[HeldOut],
    *,
    length: int | None,
    batch: int,
    dtype: str,
    device: str,
    listener: Listener,
) -> Evaluation[LabelScores]:
    """Judge every model on every source, one model in memory at a time.

    Texts are cut at `length` tokens (None: the smallest context, at most 2048). Raises BadInput where a model is no
    classifier, has other labels than the texts or than the first model, or cannot be loaded.
    """
    notes: list[str] = []

    def note(line: str) -> None:
        notes.append(line)
        listener.say(line)

    for model in models:
        for line in model.notes:
            note(f"{model.name}: {line}")
        if not model.is_classifier:
            raise BadInput(
                f"{printable(model.name)}: no classification model, and the data has labels; evaluate models with a"
                " head for labels (`ForSequenceClassification`) together, others on text"
            )
    window = min(length or LONGEST, narrowest_of(models).context or sys.maxsize)
    rows: list[ModelScores[LabelScores]] = []
    first: dict[str, Judged] = {}
    known: tuple[str, ...] = ()
    for model in models:
        known = known or model.labels
        if model.labels != known:
            raise BadInput(
                f"{printable(model.name)}: its labels ({printable(', '.join(model.labels))}) are not those of"
                f" {printable(models[0].name)} ({printable(', '.join(known))}); evaluate them one by one"
            )
        found = _judged(model, window, texts, batch, dtype, device, note, listener)
        scores = tuple(_scores(name, each, first.get(name)) for name, each in found.items())
        rows.append(ModelScores(model.name, None, scores))
        first = first or found
    return Evaluation(tuple(rows), window, dtype, device, tuple(notes))


def _judged(
    checkpoint: Checkpoint,
    window: int,
    texts: Sequence[HeldOut],
    batch: int,
    dtype: str,
    device: str,
    note: Callable[[str], None],
    listener: Listener,
) -> dict[str, Judged]:
    listener.say(f"loading {checkpoint.name}")
    model = checkpoint.load(dtype=dtype, device=device, say=note)
    listener.begin(f"judging {checkpoint.name}", sum(map(len, texts)), "texts")
    found = judge(model, texts, checkpoint, length=window, batch=batch, advance=listener.advance)
    # Free the memory for the next model.
    del model
    gc.collect()
    return found


def _scores(name: str, found: Judged, first: Judged | None) -> LabelScores:
    return LabelScores(
        source=name,
        examples=len(found.nats),
        loss=found.loss,
        accuracy=found.accuracy,
        f1=found.f1,
        matthews=found.matthews,
        accuracy_difference=None if first is None else found.accuracy_difference(first),
    )
