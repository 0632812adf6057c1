"""Score several models on the same held-out text, compare each with the first by document, and collect answers.

Classification models are scored on the same labelled texts, and compared by text.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from surgeon import (
    Answer,
    BaseAnswers,
    Checkpoint,
    EncodedPrompts,
    HeldOut,
    Judged,
    Prompts,
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
from surgeon.common.library import why_nan
from surgeon.common.listener import Listener
from surgeon.errors import BadInput, printable
from surgeon.lab.evaluation.results import CellT, Evaluation, LabelScores, ModelScores, SourceScores

# The longest window by default: longer ones cost memory and change the numbers little.
LONGEST = 2048

# With fewer documents, or prompts, an interval is too rough to rely on.
_FEW_DOCUMENTS = 10


@dataclass
class How:
    """How models are run, with notes that explain the numbers; `length` is tokens in a window (None: default)."""

    length: int | None
    batch: int
    dtype: str
    device: str
    listener: Listener
    notes: list[str] = field(default_factory=list)

    def note(self, line: str) -> None:
        """Store a note and report it to the listener."""
        self.notes.append(line)
        self.listener.say(line)

    def load(self, checkpoint: Checkpoint) -> Any:
        """Return the loaded model of a checkpoint."""
        self.listener.say(f"loading {checkpoint.name}")
        return checkpoint.load(dtype=self.dtype, device=self.device, say=self.note)

    def of(
        self, rows: Sequence[ModelScores[CellT]], window: int | None, prompts: Sequence[str] = ()
    ) -> Evaluation[CellT]:
        """Return an evaluation with these rows, and with these settings and notes."""
        return Evaluation(tuple(rows), window, self.dtype, self.device, tuple(self.notes), tuple(prompts))


def check_predicts(model: Checkpoint) -> None:
    """Raise BadInput for an encoder or a classification model."""
    if model.is_encoder or model.is_classifier:
        raise BadInput(
            f"{printable(model.name)}: {'an encoder' if model.is_encoder else 'a classifier'}, which predicts no next"
            " token; give causal language models, or classification models and texts with labels (--labels)"
        )


def evaluate_texts(
    models: Sequence[Checkpoint],
    texts: Sequence[HeldOut],
    how: How,
    *,
    prompts: Sequence[str],
    answer_tokens: int,
    kl: bool,
    asked: Prompts | None,
) -> Evaluation[SourceScores]:
    """Score every model on every text, and let it answer every prompt; a model is loaded once.

    One is in memory at a time, beside the first where others are compared with it by KL or by answers.

    `texts` or `prompts` may be empty. With prompts `asked`, every model's answers are also compared with the first's.
    Raises BadInput where a model cannot be loaded, or a prompt leaves no room for an answer.
    """
    for model in models:
        check_predicts(model)
    window = _window(models, how) if texts else None
    for model in models:
        for line in model.notes:
            how.note(f"{model.name}: {line}")
    texts = written(texts, models, say=how.note) if texts else []
    encodings = [_encoded(prompts, model, answer_tokens, how) if prompts else None for model in models]
    asked_for = [None for _ in models] if asked is None else asked.encoded(models)
    if asked is not None and (given := len(asked.prompts)) < _FEW_DOCUMENTS:
        how.note(f"answers to {given} prompts are compared, so their intervals are rough, or there are none")
    windows = [{} for _ in models] if window is None else _cut(texts, models, window, how)
    rows: list[ModelScores[SourceScores]] = []
    reference: dict[str, Scores] | None = None
    first: Any = None
    key: BaseAnswers | None = None
    for checkpoint, own, encoded, questions in zip(models, windows, encodings, asked_for, strict=True):
        model = how.load(checkpoint)
        found, answers = _run(checkpoint, model, own, encoded, how)
        # Models with the first model's tokens share its windows.
        same = own is windows[0] if texts else None
        summaries = _summaries(own, found, windows[0], reference)
        kept = None
        if reference is None:
            first = model if kl else None
            if asked is not None:
                by: dict[str, Any] = {"dtype": how.dtype, "device": how.device, "listener": how.listener}
                key = BaseAnswers.of(checkpoint, asked, encoded=questions, loaded=model, **by)
        else:
            if kl and same:
                summaries = _with_kl(checkpoint, model, first, summaries, own, how)
            if key is not None and questions is not None:
                kept = key.kept(checkpoint, model, questions)
        rows.append(ModelScores(checkpoint.name, same, summaries, tuple(answers), kept))
        reference = reference or found
        # Free the memory for the next model.
        del model
        gc.collect()
    return how.of(rows, window, prompts)


def _with_kl(
    checkpoint: Checkpoint,
    model: Any,
    first: Any,
    summaries: Sequence[SourceScores],
    cut_texts: Mapping[str, Windows],
    how: How,
) -> tuple[SourceScores, ...]:
    """Return a loaded model's scores with KL(first ‖ model) added; both models have the same tokens."""
    how.listener.begin(f"KL of {checkpoint.name}", sum(map(len, cut_texts.values())), "windows")
    by: dict[str, Any] = {"batch": how.batch, "advance": how.listener.advance}
    return tuple(
        replace(each, apart=divergence(model, first, cut_texts[each.source], **by).loss_ratio) for each in summaries
    )


def _encoded(prompts: Sequence[str], model: Checkpoint, tokens: int, how: How) -> EncodedPrompts:
    """Return the prompts as the model's tokens, and note which answers its context shortens."""
    encoded = encode_prompts(prompts, model, tokens=tokens)
    for number, most in enumerate(encoded.most, 1):
        if most < tokens:
            how.note(
                f"{model.name}: its context of {model.context} leaves {most} tokens for the answer to prompt {number}"
            )
    return encoded


def _cut(texts: Sequence[HeldOut], models: Sequence[Checkpoint], window: int, how: How) -> list[dict[str, Windows]]:
    """Return the windows of each model; models with the first model's tokens share its windows."""
    first = models[0]
    windows = [cut(texts, first, length=window)]
    _note_documents(windows[0], window, how)
    for model in models[1:]:
        theirs = cut(texts, model, length=window)
        if all(each.same_tokens(windows[0][name]) for name, each in theirs.items()):
            windows.append(windows[0])
            continue
        windows.append(theirs)
        how.note(
            f"{model.name}: its tokens differ from {first.name}'s, so losses a token and perplexities"
            " of the two cannot be compared; compare bits per byte"
        )
    return windows


def narrowest_of(models: Sequence[Checkpoint]) -> Checkpoint:
    """Return the model with the smallest context."""
    return min(models, key=lambda model: model.context or sys.maxsize)


def _window(models: Sequence[Checkpoint], how: How) -> int:
    """Return the tokens in the longest window, equal for all models, so that all predict from the same context."""
    narrowest = narrowest_of(models)
    context = narrowest.context or sys.maxsize
    if how.length is not None and how.length > context:
        how.note(f"{narrowest.name} has a context of {context} tokens: windows of that many, not {how.length}")
    return min(how.length or LONGEST, context)


def _note_documents(cut_texts: Mapping[str, Windows], window: int, how: How) -> None:
    """Note how many documents are cut, and which sources have too few documents for good intervals."""
    if long := sum(windows.cut for windows in cut_texts.values()):
        how.note(
            f"{long} documents are longer than {window} tokens: they are cut into windows, without the text before each"
        )
    for name, windows in cut_texts.items():
        if (documents := windows.documents) < _FEW_DOCUMENTS:
            result = "so its intervals are rough" if documents > 1 else "so there are no intervals"
            how.note(f"source {printable(name)} has {documents} document{'s' if documents > 1 else ''}, {result}")


def _run(
    checkpoint: Checkpoint,
    model: Any,
    cut_texts: Mapping[str, Windows],
    prompts: EncodedPrompts | None,
    how: How,
) -> tuple[dict[str, Scores], list[Answer]]:
    """Score a loaded model and collect its answers; return (scores by source, answers)."""
    listener = how.listener
    if cut_texts:
        listener.begin(f"scoring {checkpoint.name}", sum(map(len, cut_texts.values())), "windows")
    found = {
        name: score(model, windows, batch=how.batch, advance=listener.advance) for name, windows in cut_texts.items()
    }
    if any(math.isnan(each.loss) for each in found.values()):
        how.note(f"{checkpoint.name}: {why_nan(model)}")
    answers: list[Answer] = []
    if prompts is not None:
        listener.begin(f"asking {checkpoint.name}", len(prompts.ids), "prompts")
        answers = answer(model, prompts, advance=listener.advance)
    return found, answers


def _summaries(
    cut_texts: Mapping[str, Windows],
    found: Mapping[str, Scores],
    cut_of_first: Mapping[str, Windows],
    reference: Mapping[str, Scores] | None,
) -> tuple[SourceScores, ...]:
    """Return one model's scores on each source, with differences from the first model.

    `found` are the model's scores, `reference` the first model's (None: this is the first model).
    """
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
    how: How,
) -> Evaluation[LabelScores]:
    """Score every model on every labelled source; one model is in memory at a time.

    Texts are cut at `how.length` tokens (None: the smallest context, at most 2048). Raises BadInput where a model is no
    classifier, has other labels than the texts or than the first model, or cannot be loaded.
    """
    for model in models:
        for line in model.notes:
            how.note(f"{model.name}: {line}")
        if not model.is_classifier:
            raise BadInput(
                f"{printable(model.name)}: no classification model, and the data has labels; evaluate models with a"
                " head for labels (`ForSequenceClassification`) together, others on text"
            )
    window = min(how.length or LONGEST, narrowest_of(models).context or sys.maxsize)
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
        found = _judged(model, window, texts, how)
        scores = tuple(_scores(name, each, first.get(name)) for name, each in found.items())
        rows.append(ModelScores(model.name, None, scores))
        first = first or found
    return how.of(rows, window)


def _judged(
    checkpoint: Checkpoint,
    window: int,
    texts: Sequence[HeldOut],
    how: How,
) -> dict[str, Judged]:
    """Load a classifier; return its results on every labelled source, by name. Its memory is free afterwards."""
    model = how.load(checkpoint)
    how.listener.begin(f"judging {checkpoint.name}", sum(map(len, texts)), "texts")
    found = judge(model, texts, checkpoint, length=window, batch=how.batch, advance=how.listener.advance)
    if any(math.isnan(each.loss.value) for each in found.values()):
        how.note(f"{checkpoint.name}: {why_nan(model)}")
    # Free the memory for the next model.
    del model
    gc.collect()
    return found


def _scores(name: str, found: Judged, first: Judged | None) -> LabelScores:
    """Return a classifier's scores on one source; `first` are the first model's results (None: this is the first)."""
    return LabelScores(
        source=name,
        examples=len(found.nats),
        loss=found.loss,
        accuracy=found.accuracy,
        f1=found.f1,
        matthews=found.matthews,
        accuracy_difference=None if first is None else found.accuracy_difference(first),
    )
