"""Several models on the same held-out text: each scored, and compared with the first, document by document."""

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
from surgeon.errors import BadInput, printable
from surgeon.evaluation.scores import Scores, difference, ratio, score
from surgeon.evaluation.sources import HeldOut
from surgeon.evaluation.windows import Windows, windows_of
from surgeon.execute import Listener
from surgeon.families import ENCODERS
from surgeon.families.grafted import native_config
from surgeon.manifest import MANIFEST_FILE, Manifest, parse
from surgeon.results import Evaluation, ModelScores, SourceScores
from surgeon.training.encoding import Encoder
from surgeon.verification.loading import load_model, torch_dtype

# The longest window where nothing else is asked for: more costs memory and tells little.
LONGEST = 2048
# Below this an interval is not to be leaned on.
_FEW_DOCUMENTS = 10


@dataclass(frozen=True)
class Candidate:
    """A model that was opened: all but its weights is read and checked."""

    name: str
    folder: CheckpointFolder
    repo_id: str | None
    manifest: Manifest | None
    encoder: Encoder

    @classmethod
    def open(cls, model: str | Path, *, trust_remote_code: bool) -> Candidate:
        """Open a folder, or `user/name` or `user/name@revision` through the Hub's cache. Raises BadInput."""
        name = str(model)
        repo_id, _, revision = (name, "", "") if Path(name).exists() else name.partition("@")
        located = locate(repo_id, revision=revision or None, code=trust_remote_code)
        folder = CheckpointFolder.open(located.path, trust_remote_code=trust_remote_code)
        if native_config(folder.config).get("model_type") in ENCODERS:
            raise BadInput(f"{printable(name)}: an encoder, which foretells no next token; give causal language models")
        manifest = None
        if folder.manifest is not None:
            manifest = parse(folder.manifest, file=str(located.path / MANIFEST_FILE))
        vocabulary = folder.config.get("vocab_size")
        encoder = Encoder(located.path, vocabulary=vocabulary if isinstance(vocabulary, int) else sys.maxsize)
        return cls(name, folder, located.repo_id, manifest, encoder)

    @property
    def context(self) -> int:
        """Positions the model was made for."""
        found = self.folder.config.get("max_position_embeddings")
        return found if isinstance(found, int) else sys.maxsize

    @property
    def ids(self) -> set[str]:
        """What a manifest may call it."""
        return {self.repo_id} if self.repo_id else {self.folder.path.resolve().name}

    def bases(self) -> set[str]:
        """What its manifest calls the checkpoints it came from; the last one's base first of all."""
        if self.manifest is None:
            return set()
        return {self.manifest.base.id, *(ancestor.base for ancestor in self.manifest.lineage)}


def evaluate_models(
    candidates: Sequence[Candidate],
    sources: Sequence[HeldOut],
    *,
    length: int | None,
    batch: int,
    dtype: str,
    device: str,
    trust_remote_code: bool,
    listener: Listener,
) -> Evaluation:
    """Score every model on every source, one model in memory at a time. Raises BadInput."""
    if dtype != "auto":
        torch_dtype(dtype)
    notes: list[str] = []

    def note(line: str) -> None:
        notes.append(line)
        listener.say(line)

    window = _window(candidates, length, note)
    for candidate in candidates:
        _ask_for_base(candidate, candidates, note)
    first = candidates[0]
    cut = [_cut(sources, first, window)]
    _tell_of_data(cut[0], window, note)
    for candidate in candidates[1:]:
        theirs = _cut(sources, candidate, window)
        if all(windows.same_tokens(cut[0][name]) for name, windows in theirs.items()):
            cut.append(cut[0])
            continue
        cut.append(theirs)
        note(
            f"{candidate.name}: its tokens are other ones than {first.name}'s, so losses a token and perplexities"
            " cannot be compared between the two; compare bits per byte"
        )
    rows: list[ModelScores] = []
    reference: dict[str, Scores] | None = None
    for candidate, windows in zip(candidates, cut, strict=True):
        found = _run(candidate, windows, batch, dtype, device, trust_remote_code, listener)
        rows.append(ModelScores(candidate.name, windows is cut[0], _summaries(windows, found, cut[0], reference)))
        reference = reference or found
    return Evaluation(tuple(rows), window, dtype, device, tuple(notes))


def _cut(sources: Sequence[HeldOut], candidate: Candidate, window: int) -> dict[str, Windows]:
    return {held.name: windows_of(held, candidate.encoder, window) for held in sources}


def _window(candidates: Sequence[Candidate], length: int | None, note: Callable[[str], None]) -> int:
    """Tokens in the longest sequence: the same for all models, so that all have the same to go by."""
    narrowest = min(candidates, key=lambda candidate: candidate.context)
    if length is not None and length > narrowest.context:
        note(f"{narrowest.name} has a context of {narrowest.context} tokens: windows of that many, not {length}")
    return min(length or LONGEST, narrowest.context)


def _ask_for_base(candidate: Candidate, candidates: Sequence[Candidate], note: Callable[[str], None]) -> None:
    bases = candidate.bases()
    if candidate.manifest is not None and not any(bases & other.ids for other in candidates if other is not candidate):
        note(
            f"{candidate.name} was made of {candidate.manifest.base.id}, which is not among the models; --base DIR puts"
            " it into the first row"
        )


def _tell_of_data(cut: Mapping[str, Windows], window: int, note: Callable[[str], None]) -> None:
    if long := sum(windows.cut for windows in cut.values()):
        note(f"{long} documents are longer than {window} tokens: cut into windows, each without what stood before it")
    for name, windows in cut.items():
        if (documents := len(windows.nbytes)) < _FEW_DOCUMENTS:
            told = "so its intervals are rough" if documents > 1 else "so there are no intervals"
            note(f"source {name} has {documents} document{'s' if documents > 1 else ''}, {told}")


def _run(
    candidate: Candidate,
    cut: Mapping[str, Windows],
    batch: int,
    dtype: str,
    device: str,
    trust_remote_code: bool,
    listener: Listener,
) -> dict[str, Scores]:
    listener.say(f"loading {candidate.name}")
    model = load_model(
        candidate.folder.path,
        dtype=dtype,
        device=device,
        # Only code that is byte for byte what this version ships runs unasked; anything else was refused at opening.
        trust_remote_code=trust_remote_code or candidate.folder.code == "shipped",
    )
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
    # The next model needs the room.
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
