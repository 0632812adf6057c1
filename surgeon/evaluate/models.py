"""Score several models on the same held-out text and compare each with the first, document by document."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.hub import locate
from surgeon.checkpoint.labels import is_classifier
from surgeon.common.listener import Listener
from surgeon.data.encoding import Encoder
from surgeon.data.scoring import Ratio, Scores, Windows, difference, ratio, score, windows_of
from surgeon.data.sources import HeldOut
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import is_encoder
from surgeon.manifest.manifest import MANIFEST_FILE, Manifest
from surgeon.manifest.reading import parse
from surgeon.models.load import load_model, torch_dtype


@dataclass(frozen=True)
class SourceScores:
    """One model on one source: loss in nats a token, bits per byte of UTF-8, accuracy of greedy decoding.

    Each has its 95 % confidence interval, over documents. The differences are to the first model, paired by document
    (None for the first model; the loss difference also where the tokens differ).
    """

    source: str
    documents: int
    tokens: int
    nbytes: int
    loss: Ratio
    perplexity: Ratio
    bits_per_byte: Ratio
    accuracy: Ratio
    loss_difference: Ratio | None
    bits_difference: Ratio | None


@dataclass(frozen=True)
class ModelScores:
    """One model on all sources; `same_tokens` says whether its tokens are the first model's."""

    model: str
    same_tokens: bool
    sources: tuple[SourceScores, ...]


@dataclass(frozen=True)
class Evaluation:
    """Several models on the same held-out text; the others are compared with the first.

    `length` is the most tokens of a window; `notes` are lines that explain the numbers.
    """

    models: tuple[ModelScores, ...]
    length: int
    dtype: str
    device: str
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        shown = "; ".join(
            f"{row.model}: " + ", ".join(f"{found.source} {found.loss.value:.4f}" for found in row.sources[:4])
            for row in self.models[:4]
        )
        return f"Evaluation({len(self.models)} models, {shown})"

    def of(self, model: str, source: str) -> SourceScores:
        """One cell. Raises KeyError where there is none."""
        for row in self.models:
            for found in row.sources:
                if (row.model, found.source) == (model, source):
                    return found
        raise KeyError(f"{model}, {source}")

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`; NaN and infinity are written as strings."""
        ratios = ("loss", "perplexity", "bits_per_byte", "accuracy", "loss_difference", "bits_difference")
        return {
            "length": self.length,
            "dtype": self.dtype,
            "device": self.device,
            "confidence": 0.95,
            "models": [
                {
                    "model": row.model,
                    "same_tokens": row.same_tokens,
                    "sources": {
                        found.source: {
                            "documents": found.documents,
                            "tokens": found.tokens,
                            "bytes": found.nbytes,
                            **{name: as_data(getattr(found, name)) for name in ratios},
                        }
                        for found in row.sources
                    },
                }
                for row in self.models
            ],
            "notes": list(self.notes),
        }


def as_data(found: Ratio | None) -> dict[str, Any] | None:
    """A mean and its interval as JSON data."""
    if found is None:
        return None
    low, high = found.interval or (None, None)
    return {"value": number_of(found.value), "low": number_of(low), "high": number_of(high)}


def number_of(value: float | None) -> float | str | None:
    """A number as JSON data; NaN and infinity as strings."""
    return value if value is None or math.isfinite(value) else str(value)


# The longest window by default: longer ones cost memory and change the numbers little.
LONGEST = 2048

# With fewer documents an interval is too rough to rely on.
_FEW_DOCUMENTS = 10


@dataclass(frozen=True)
class Candidate:
    """An opened model: everything but its weights was read and checked."""

    name: str
    folder: CheckpointFolder
    repo_id: str | None
    manifest: Manifest | None
    encoder: Encoder

    @classmethod
    def open(cls, model: str | Path, *, trust_remote_code: bool) -> Candidate:
        """Open a folder, or `user/name[@revision]` on the Hub. Raises BadInput where it cannot be."""
        name = str(model)
        repo_id, _, revision = (name, "", "") if Path(name).exists() else name.partition("@")
        located = locate(repo_id, revision=revision or None, code=trust_remote_code)
        folder = CheckpointFolder.open(located.path, trust_remote_code=trust_remote_code)
        manifest = None
        if folder.manifest is not None:
            manifest = parse(folder.manifest, file=str(located.path / MANIFEST_FILE))
        encoder = Encoder(located.path, vocabulary=_count(folder.config.get("vocab_size"), least=1))
        return cls(name, folder, located.repo_id, manifest, encoder)

    def check_predicts(self) -> None:
        """BadInput for an encoder, and for a classification model."""
        encoder = is_encoder(self.folder.config)
        if encoder or is_classifier(self.folder.config):
            raise BadInput(
                f"{printable(self.name)}: {'an encoder' if encoder else 'a classifier'}, which predicts no next token;"
                " give causal language models, or classification models and texts with labels (--labels)"
            )

    @property
    def context(self) -> int:
        """Positions the model was made for."""
        return _count(self.folder.config.get("max_position_embeddings"), least=2)

    @property
    def ids(self) -> set[str]:
        """The ids by which a manifest may name it."""
        return {self.repo_id} if self.repo_id else {self.folder.path.resolve().name}

    def bases(self) -> set[str]:
        """The ids of the checkpoints it was made from, from its manifest; the last surgery's base first."""
        if self.manifest is None:
            return set()
        return {self.manifest.base.id, *(ancestor.base.id for ancestor in self.manifest.lineage)}


def _count(found: object, *, least: int) -> int:
    """A number of a config, which may be of any family; no limit where it is none, or too small to be meant."""
    return found if type(found) is int and found >= least else sys.maxsize


def evaluate_models(
    candidates: Sequence[Candidate],
    sources: Sequence[HeldOut],
    *,
    length: int | None,
    batch: int,
    dtype: str,
    device: str,
    listener: Listener,
) -> Evaluation:
    """Score every model on every source, one model in memory at a time. Raises BadInput where one cannot be loaded."""
    if dtype != "auto":
        torch_dtype(dtype)
    notes: list[str] = []

    def note(line: str) -> None:
        notes.append(line)
        listener.say(line)

    for candidate in candidates:
        candidate.check_predicts()
    window = _window(candidates, length, note)
    for candidate in candidates:
        for line in candidate.folder.notes:
            note(f"{candidate.name}: {line}")
        _ask_for_base(candidate, candidates, note)
    first = candidates[0]
    cut = [_cut(sources, first, window)]
    _note_documents(cut[0], window, note)
    for candidate in candidates[1:]:
        theirs = _cut(sources, candidate, window)
        if all(windows.same_tokens(cut[0][name]) for name, windows in theirs.items()):
            cut.append(cut[0])
            continue
        cut.append(theirs)
        note(
            f"{candidate.name}: its tokens differ from {first.name}'s, so losses a token and perplexities"
            " of the two cannot be compared; compare bits per byte"
        )
    rows: list[ModelScores] = []
    reference: dict[str, Scores] | None = None
    for candidate, windows in zip(candidates, cut, strict=True):
        found = _run(candidate, windows, batch, dtype, device, note, listener)
        rows.append(ModelScores(candidate.name, windows is cut[0], _summaries(windows, found, cut[0], reference)))
        reference = reference or found
    return Evaluation(tuple(rows), window, dtype, device, tuple(notes))


def _cut(sources: Sequence[HeldOut], candidate: Candidate, window: int) -> dict[str, Windows]:
    return {held.name: windows_of(held, candidate.encoder, window) for held in sources}


def _window(candidates: Sequence[Candidate], length: int | None, note: Callable[[str], None]) -> int:
    """Tokens in the longest sequence: the same for all models, so that all predict from the same context."""
    narrowest = min(candidates, key=lambda candidate: candidate.context)
    if length is not None and length > narrowest.context:
        note(f"{narrowest.name} has a context of {narrowest.context} tokens: windows of that many, not {length}")
    return min(length or LONGEST, narrowest.context)


def _ask_for_base(candidate: Candidate, candidates: Sequence[Candidate], note: Callable[[str], None]) -> None:
    bases = candidate.bases()
    if candidate.manifest is not None and not any(bases & other.ids for other in candidates if other is not candidate):
        note(
            f"{candidate.name} was made of {candidate.manifest.base.id}, which is not among the models; --base DIR adds"
            " it as the first row"
        )


def _note_documents(cut: Mapping[str, Windows], window: int, note: Callable[[str], None]) -> None:
    if long := sum(windows.cut for windows in cut.values()):
        note(
            f"{long} documents are longer than {window} tokens: they are cut into windows, without the text before each"
        )
    for name, windows in cut.items():
        if (documents := len(windows.nbytes)) < _FEW_DOCUMENTS:
            result = "so its intervals are rough" if documents > 1 else "so there are no intervals"
            note(f"source {name} has {documents} document{'s' if documents > 1 else ''}, {result}")


def _run(
    candidate: Candidate,
    cut: Mapping[str, Windows],
    batch: int,
    dtype: str,
    device: str,
    note: Callable[[str], None],
    listener: Listener,
) -> dict[str, Scores]:
    listener.say(f"loading {candidate.name}")
    model = load_model(candidate.folder, dtype=dtype, device=device, say=note)
    listener.begin(f"scoring {candidate.name}", sum(len(windows.sequences) for windows in cut.values()), "windows")
    found = {
        name: score(
            model,
            windows.sequences,
            micro_batch=batch,
            units=windows.units,
            unit_count=len(windows.nbytes),
            advance=listener.advance,
        )
        for name, windows in cut.items()
    }
    # Free the memory for the next model.
    del model
    gc.collect()
    return found


def _summaries(
    cut: Mapping[str, Windows],
    found: Mapping[str, Scores],
    cut_of_first: Mapping[str, Windows],
    reference: Mapping[str, Scores] | None,
) -> tuple[SourceScores, ...]:
    summaries: list[SourceScores] = []
    for name, scores in found.items():
        windows, bits = cut[name], _bits(scores)
        by_token = by_byte = None
        if reference is not None:
            first = reference[name]
            by_byte = difference(bits, windows.nbytes, _bits(first), cut_of_first[name].nbytes)
            if windows is cut_of_first[name]:
                by_token = difference(scores.nats, scores.tokens, first.nats, first.tokens)
        summaries.append(
            SourceScores(
                source=name,
                documents=len(windows.nbytes),
                tokens=int(scores.tokens.sum()),
                nbytes=int(windows.nbytes.sum()),
                loss=scores.loss_ratio,
                perplexity=scores.perplexity,
                bits_per_byte=ratio(bits, windows.nbytes),
                accuracy=scores.accuracy,
                loss_difference=by_token,
                bits_difference=by_byte,
            )
        )
    return tuple(summaries)


def _bits(scores: Scores) -> NDArray[Any]:
    return np.asarray(scores.nats / math.log(2))
