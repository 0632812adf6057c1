"""How much of its base's answers a model keeps. The base's own greedy answers are the key, so no labels are needed.

Losses on text do not show what a user misses: a model may predict kept text as well as before, and answer otherwise.
"""

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType

from surgeon._version import __version__
from surgeon.common import devices
from surgeon.common.cache import cache_folder, digest_of, read_entry, write_entry
from surgeon.common.json_results import plain
from surgeon.common.listener import Listener, Quiet
from surgeon.common.places import meant
from surgeon.common.tables import FittedTable
from surgeon.data.answers import Answer, EncodedPrompts, answer, encode_prompts
from surgeon.data.documents import given_lines
from surgeon.data.packing import IGNORED_LABEL, PackedSequence
from surgeon.data.scored import divergence
from surgeon.data.scores import Ratio, Scores, Windows, ratio
from surgeon.errors import BadInput, printable
from surgeon.manifest.checkpoint import Checkpoint

# Shipped prompts, by name their files: those by which answers are compared, and others, which a base answers
# where a run replays its answers, or a share of it is chosen by them.
SHIPPED, INSTRUCTIONS = "shipped", "instructions"
SHIPPED_PROMPTS = {SHIPPED: "prompts.jsonl", INSTRUCTIONS: "instructions.jsonl"}
_MOST_BYTES = 16_000_000
_MOST_PROMPTS = 10_000
# Prompts that a model answers at a time, and answers in one forward pass.
_ASKED, _BATCH = 32, 8
# The kind of the cache's entries.
_KIND = "answers"


@dataclass(frozen=True)
class Prompts:
    """Prompts by which a model is compared with its base.

    `expected` has, for each, strings of which a right answer contains one, whatever their case; none: nobody judges it.
    """

    name: str
    prompts: tuple[str, ...]
    expected: tuple[tuple[str, ...], ...]

    def encoded(self, models: Sequence[Checkpoint], *, tokens: int = 48) -> list[EncodedPrompts]:
        """Return the prompts as each model's tokens, asked as the first one is; answers have up to `tokens` tokens.

        Raises BadInput as `encode_prompts` does.
        """
        first = encode_prompts(self.prompts, models[0], tokens=tokens)
        others = [encode_prompts(self.prompts, model, tokens=tokens, chat=first.chat) for model in models[1:]]
        return [first, *others]


@dataclass(frozen=True)
class KeptAnswers:
    """A model's answers beside its base's, prompt by prompt; means have 95 % confidence intervals over prompts.

    Prompts that the base answers with nothing are left out, `silent` is their number.

    Args:
        prompts: the prompts that count.
        base_answers: the base's answers to them.
        answers: the model's.
        apart: KL(base ‖ model) on the base's answers, by prompt; None where the models' tokens differ.
        expected: the strings of which a right answer contains one, by prompt.
        silent: how many prompts were left out.
    """

    prompts: tuple[str, ...]
    base_answers: tuple[Answer, ...]
    answers: tuple[Answer, ...]
    apart: Scores | None
    expected: tuple[tuple[str, ...], ...]
    silent: int = 0

    @property
    def kl(self) -> Ratio | None:
        """KL(base ‖ model) in nats a token of the base's answers and of their ends; None where tokens differ."""
        return None if self.apart is None else self.apart.loss_ratio.map(lambda value: max(0.0, value))

    @property
    def prefix(self) -> Ratio:
        """The mean share of the base's answer, in characters, before the first difference."""
        return _mean([_prefix(base, own) for base, own in self._pairs])

    @property
    def same(self) -> Ratio:
        """The share of answers that are the base's to the letter."""
        return _mean([float(base.text == own.text and base.ended == own.ended) for base, own in self._pairs])

    @property
    def right(self) -> tuple[Ratio, Ratio] | None:
        """The shares of answers with an expected string, the base's and the model's; None where none is expected."""
        judged = [number for number, expected in enumerate(self.expected) if expected]
        if not judged:
            return None
        base, own = (
            _mean([float(_is_right(answers[number].text, self.expected[number])) for number in judged])
            for answers in (self.base_answers, self.answers)
        )
        return base, own

    @property
    def _pairs(self) -> list[tuple[Answer, Answer]]:
        """The base's answer and the model's, by prompt."""
        return list(zip(self.base_answers, self.answers, strict=True))

    def to_json(self) -> dict[str, Any]:
        """Return plain data.

        Keys:
            `prompts`, `silent`: how many count, and how many the base answers with nothing
            `kl`: KL(base ‖ model) in nats a token of the base's answers, or null where tokens differ
            `prefix`, `same`: shares of an answer before the first difference, and of answers that are the base's
            `right`, `right_of_base`: shares of answers with an expected string, or null
        """
        of_base, own = self.right or (None, None)
        found = {"kl": self.kl, "prefix": self.prefix, "same": self.same, "right": own, "right_of_base": of_base}
        return {"prompts": len(self.prompts), "silent": self.silent, **plain(found)}


def kept_table(kept: Sequence[tuple[str, KeptAnswers]]) -> RenderableType:
    """Return a table of what models keep of their base's answers, a row for each (name, what it keeps)."""
    first = kept[0][1]
    table = FittedTable(f"{len(first.prompts)} answers")
    for column in ("KL a token", "before the first difference", "the same"):
        table.add_column(column)
    right = any(each.right for _, each in kept)
    if right:
        table.add_column("right (the base)")
    for name, each in kept:
        figures = ["other tokens" if each.kl is None else _figure(each.kl, ".4f")]
        figures += [_figure(each.prefix, ".0%"), _figure(each.same, ".0%")]
        if right:
            shares = each.right
            figures.append("" if shares is None else f"{shares[1].value:.0%} ({shares[0].value:.0%})")
        table.add_row(printable(name), *figures)
    return table


def _figure(found: Ratio, form: str) -> str:
    """Return a mean with its interval, as `0.031 [0.027, 0.035]`."""
    if found.interval is None:
        return f"{found.value:{form}}"
    return f"{found.value:{form}} [{found.interval[0]:{form}}, {found.interval[1]:{form}}]"


def _mean(values: Sequence[float]) -> Ratio:
    """Return the mean of a share for each prompt, with its interval, which ends at 0 and 1."""
    return ratio(np.array(values), np.ones(len(values))).map(lambda share: min(1.0, max(0.0, share)))


def _prefix(base: Answer, own: Answer) -> float:
    """Return the share of the base's answer, in characters, before the first difference."""
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(base.text, own.text, strict=False))
    return len(list(alike)) / len(base.text)


def _is_right(text: str, expected: Sequence[str]) -> bool:
    """Return whether an answer contains one of the expected strings, whatever their case."""
    return any(each.casefold() in text.casefold() for each in expected)


def read_prompts(given: str | Path) -> Prompts:
    """Read prompts: a file, or `shipped` or `instructions` for surgeon's own, which have no prompt in common.

    A file has one prompt a line, or with the ending `.jsonl` one object a line: `prompt`, and where answers can be
    judged `expected`, a string or a list of strings of which a right answer contains one.

    Raises:
        BadInput: The file cannot be read, a line is wrong, or there is no prompt.
    """
    ours = SHIPPED_PROMPTS.get(str(given))
    path = Path(meant(str(given)) if ours is None else str(files("surgeon.data") / ours))
    shown = printable(str(path)) if ours is None else str(given)
    as_rows = path.name.endswith(".jsonl")
    found = [
        _row(line, f"{shown}, line {number}") if as_rows else (line.strip(), ())
        for number, line in enumerate(given_lines(path, what="prompts", most=_MOST_BYTES), 1)
        if line.strip()
    ]
    if not found:
        raise BadInput(f"{shown}: has no prompt; write one a line")
    if len(found) > _MOST_PROMPTS:
        raise BadInput(f"{shown}: has {len(found):,} prompts; give at most {_MOST_PROMPTS:,}")
    prompts, expected = zip(*found, strict=True)
    return Prompts(shown, prompts, expected)


def _row(line: str, where: str) -> tuple[str, tuple[str, ...]]:
    """Return the prompt in a line of JSON, and what a right answer contains. Raises BadInput for a wrong line."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise BadInput(f'{where}: no JSON object; write {{"prompt": "…"}}, or give a text file with a prompt a line')
    prompt, expected = row.get("prompt"), row.get("expected", [])
    if not isinstance(prompt, str) or not prompt.strip():
        raise BadInput(f"{where}: `prompt` is missing or no text; give one")
    strings = [expected] if isinstance(expected, str) else expected
    if not isinstance(strings, list) or not all(isinstance(each, str) and each for each in strings):
        raise BadInput(f"{where}: `expected` is neither a text nor a list of texts; use one of them")
    return prompt, tuple(strings)


def kept_answers(
    base: Checkpoint,
    models: Sequence[Checkpoint],
    prompts: Prompts,
    *,
    tokens: int = 48,
    dtype: str = "auto",
    device: str = "auto",
    listener: Listener | None = None,
) -> list[KeptAnswers]:
    """Let models answer prompts as their base is asked, and compare their answers with its own.

    The base's greedy answers are the key. Two models are in memory at a time. Answers of unchanged models are kept in
    the user's cache.

    Args:
        base: The model whose answers are to be kept.
        models: Models grown or trained from it.
        prompts: What they are asked; turns of a chat where the base has a template.
        tokens: The most tokens of an answer.
        dtype: auto (the checkpoint's), float32, bfloat16 or float16.
        device: auto, cpu, cuda or cuda:N.
        listener: Receives progress.

    Returns:
        What each model keeps, in their order.

    Raises:
        BadInput: A model cannot be run or asked, a prompt is too long, or the base answers each with nothing.
    """
    first, *others = prompts.encoded([base, *models], tokens=tokens)
    key = BaseAnswers.of(base, prompts, encoded=first, dtype=dtype, device=device, listener=listener)
    found = []
    for model, asked in zip(models, others, strict=True):
        loaded = model.load(dtype=dtype, device=key.device)
        found.append(key.kept(model, loaded, asked))
        # Free the memory for the next model.
        del loaded
        gc.collect()
    return found


@dataclass(frozen=True)
class BaseAnswers:
    """A base's greedy answers to prompts, and the base itself, loaded: the key by which models are compared with it.

    `counted` are the numbers of the prompts that it answers with words, `windows` its answers as sequences.
    """

    prompts: Prompts
    encoded: EncodedPrompts
    answers: Sequence[Answer]
    counted: Sequence[int]
    windows: Windows
    model: Any
    dtype: str
    device: str
    listener: Listener

    @classmethod
    def of(
        cls,
        base: Checkpoint,
        prompts: Prompts,
        *,
        encoded: EncodedPrompts | None = None,
        loaded: Any = None,
        dtype: str = "auto",
        device: str = "auto",
        listener: Listener | None = None,
    ) -> Self:
        """Let a base answer; other arguments and errors are those of `kept_answers`.

        Args:
            base: The base.
            prompts: What it is asked.
            encoded: The prompts as its tokens; None: they are encoded here.
            loaded: The base, where it is in memory; None: it is loaded here.
            dtype: As loaded, or to load it in.
            device: Where it is, or is loaded.
            listener: Receives progress.
        """
        listener, device = listener or Quiet(), devices.resolve(device)
        encoded = encoded or prompts.encoded([base])[0]
        model = base.load(dtype=dtype, device=device) if loaded is None else loaded
        answers = _answers(base, model, encoded, dtype, listener)
        counted = [number for number, each in enumerate(answers) if each.text.strip()]
        if not counted:
            raise BadInput(
                f"{printable(base.name)}: answers every prompt of {prompts.name} with nothing, so there is nothing to"
                " keep; give prompts that it answers"
            )
        windows = _windows(encoded, answers, counted)
        return cls(prompts, encoded, answers, counted, windows, model, dtype, device, listener)

    def apart(self, model: Checkpoint, loaded: Any) -> Scores:
        """Return KL(base ‖ model) on the base's answers, in nats a token, by prompt; `model` has the base's tokens."""
        self.listener.begin(f"KL of {model.name}", len(self.windows), "answers")
        return divergence(loaded, self.model, self.windows, batch=_BATCH, advance=self.listener.advance)

    def kept(self, model: Checkpoint, loaded: Any, asked: EncodedPrompts) -> KeptAnswers:
        """Let a loaded model answer, `asked` as the base is, and return how much of the base's answers it keeps."""
        theirs = _answers(model, loaded, asked, self.dtype, self.listener)
        apart = self.apart(model, loaded) if asked.ids == self.encoded.ids else None
        return KeptAnswers(
            prompts=tuple(self.prompts.prompts[number] for number in self.counted),
            base_answers=tuple(self.answers[number] for number in self.counted),
            answers=tuple(theirs[number] for number in self.counted),
            apart=apart,
            expected=tuple(self.prompts.expected[number] for number in self.counted),
            silent=len(self.answers) - len(self.counted),
        )


def _windows(encoded: EncodedPrompts, answers: Sequence[Answer], counted: Sequence[int]) -> Windows:
    """Return the base's answers as sequences, longest first, in which every answer's tokens and its end count.

    KL is measured at the positions that predict them, so any token can stand for the end.
    """
    end = [min(encoded.ends)] if encoded.ends else []
    pieces: list[tuple[PackedSequence, NDArray[np.int64]]] = []
    for place, number in enumerate(counted):
        prompt, written = encoded.ids[number], [*answers[number].ids, *(end if answers[number].ended else [])]
        ids = [*prompt, *written]
        labels = [IGNORED_LABEL] * len(prompt) + written
        pieces.append((PackedSequence(ids, labels, list(range(len(ids))), 0), np.full(len(ids), place)))
    nbytes = np.array([len(answers[number].text.encode()) for number in counted], dtype=np.int64)
    return Windows.of(pieces, nbytes)


def _answers(
    checkpoint: Checkpoint, model: Any, encoded: EncodedPrompts, dtype: str, listener: Listener
) -> list[Answer]:
    """Return a loaded model's answers; those of a model that is unchanged are in the user's cache.

    Twenty runs of a study ask their base once: on a CPU, 120 answers of a model of 135M parameters take a minute.
    """
    folder, key = cache_folder(_KIND), _key(checkpoint, model, encoded, dtype)
    content = None if folder is None else read_entry(folder, key)
    if content is not None:
        return [encoded.answer(number, ids, ended=ended) for number, (ids, ended) in enumerate(json.loads(content))]
    listener.begin(f"asking {checkpoint.name}", len(encoded.ids), "prompts")
    answers = answer(model, encoded, batch=_ASKED, advance=listener.advance)
    if folder is not None:
        write_entry(folder, key, json.dumps([[each.ids, each.ended] for each in answers]).encode())
    return answers


def _key(checkpoint: Checkpoint, model: Any, encoded: EncodedPrompts, dtype: str) -> str:
    """Return the name of a model's answers in the cache: a digest of all that decides them."""
    told: Mapping[str, Any] = {
        "tensors": checkpoint.digests(),
        "files": checkpoint.side_digests(),
        "ids": encoded.ids,
        "most": encoded.most,
        "ends": sorted(encoded.ends),
        "run": [dtype, str(model.device), __version__, version("torch"), version("transformers")],
    }
    return digest_of(told)
