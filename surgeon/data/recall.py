"""`surgeon recall`: a model writes text like that it was trained on, to be replayed where that text cannot be had.

Pseudo-rehearsal (Robins, 1995); self-synthesised rehearsal of language models (Huang et al., 2024); for models that
answer, both turns from the bare chat template (Magpie, Xu et al., 2024).

The unit of work is a batch of documents, whose random numbers are those of its number: a run that was cut off goes on
after the last whole batch, and ends as if nothing had happened.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from surgeon._version import __version__
from surgeon.checkpoint.folder import CheckpointFolder, digests_of
from surgeon.checkpoint.hub import locate
from surgeon.checkpoint.source import MAX_SIDE_FILE_BYTES
from surgeon.common import devices
from surgeon.common.disk_space import writing
from surgeon.common.files import read_given
from surgeon.common.json_results import plain_fields
from surgeon.common.listener import Listener, Quiet
from surgeon.common.names import check_new_name
from surgeon.common.schema import BEGIN, TEMPLATE
from surgeon.common.signed import UNSIGNED, check_own, read_signed, write_signed
from surgeon.common.tables import FittedTable
from surgeon.common.work_folders import WorkFolder, read_own, sync, working_in, write_durably
from surgeon.common.yaml import check_given
from surgeon.data.layouts import Document, document_of
from surgeon.data.specs import GenerateSpec
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import is_encoder
from surgeon.models.templates import template_of

if TYPE_CHECKING:
    from surgeon.data.writing import Writer, Written

# The longest document where nothing is said: longer ones drift from what a model has read.
LENGTH = 512
_RECORD, _PART = "run.json", "part.jsonl"
# With fewer documents kept than this share, of this many batches, something is wrong.
_LEAST_KEPT, _JUDGED = 0.05, 4
_MANY_LOST = 0.3


class _NearlyNothing(BadInput):
    """Raised where nearly nothing of what a model writes can be kept."""


@dataclass(frozen=True)
class Counts:
    """What became of the documents that a model wrote; `tokens` are of those that were kept.

    `cut`: of the kept ones, how many reached the longest length before the model ended them.
    """

    batches: int = 0
    written: int = 0
    kept: int = 0
    tokens: int = 0
    cut: int = 0
    loops: int = 0
    duplicates: int = 0
    empty: int = 0


@dataclass(frozen=True)
class Recalled:
    """A file of recalled text: what wrote it, by which settings, and what was filtered.

    `digest` is of the model's config and tensors, `sha256` the file's. The speed is of all tokens that the model
    wrote since this call began, filtered ones too, which was after `resumed_at` kept tokens.
    """

    path: Path
    base: str
    digest: str
    settings: dict[str, Any]
    counts: Counts
    sha256: str
    resumed_at: int
    seconds: float
    tokens_per_second: float | None

    def __repr__(self) -> str:
        kept = self.counts
        return f"Recalled({str(self.path)!r}, {kept.kept:,} documents, {kept.tokens:,} tokens)"

    def record(self) -> dict[str, Any]:
        """The record beside the file: all that does not depend on the day."""
        return {
            "surgeon_recall": 1,
            "version": __version__,
            "base": self.base,
            "digest": self.digest,
            "settings": self.settings,
            "counts": asdict(self.counts),
            "sha256": self.sha256,
        }

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`."""
        return plain_fields(self)


def recall(
    base: str | Path,
    *,
    tokens: int,
    to: str | Path,
    prompts: str | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    length: int | None = None,
    batch: int = 32,
    seed: int = 0,
    revision: str | None = None,
    dtype: str = "auto",
    once: bool = False,
    take_over: bool = False,
    device: str = "auto",
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Recalled:
    """Have the model `base` (a folder, an output of surgeon too, or a Hub id) write at least `tokens` tokens to `to`.

    `to` is a .jsonl file, absent or complete at any moment: a line is `{"text": …}`, or `{"messages": […]}` of a
    question and an answer. Beside it `to`.recall has the model's digest and all settings.

    Args:
        base: The model: a folder, an output of surgeon too, or a Hub id.
        tokens: How many tokens to write at least.
        to: A .jsonl file that is made.
        prompts: What a document begins with: `begin` (the begin-of-text token), `template` (the bare chat template), or
            a text file with a beginning a line; None: the template where there is one.
        temperature: 1: as the model learned.
        top_p: Draw among the likeliest tokens of this share.
        length: The longest document in tokens; None: 512.
        batch: Documents at a time.
        seed: Of all random numbers.
        revision: Branch, tag or commit of a Hub id.
        dtype: auto (the checkpoint's), float32, bfloat16 or float16.
        once: Whether the file may be there already, if the same model wrote it by the same settings, here: a signed
            file beside it says so then.
        take_over: Whether to continue what this user did not begin in this place; the same call always continues its
            own.
        device: auto, cpu, cuda or cuda:N.
        trust_remote_code: Whether the model's own code may run.
        listener: Receives progress and notes.

    Raises:
        BadInput: The model cannot be asked so, or nearly all that it writes is filtered (loops, duplicates, empty).
    """
    target = Path(to)
    if target.suffix != ".jsonl":
        raise BadInput(f"{printable(str(target))}: recalled text is JSON lines; give a name that ends in .jsonl")
    check_new_name(target)
    devices.check(device)
    spec = check_given(
        GenerateSpec,
        tokens=tokens,
        prompts=prompts,
        temperature=temperature,
        top_p=top_p,
        length=length,
        batch=batch,
    )
    located = locate(str(base), revision=revision, code=trust_remote_code)
    folder = CheckpointFolder.open(located.path, trust_remote_code=trust_remote_code)
    if prompts is None:
        spec = spec.model_copy(update={"prompts": TEMPLATE if template_of(folder) else BEGIN})
    return recalled(
        folder,
        spec,
        target,
        shown=str(base),
        seed=seed,
        dtype=dtype,
        device=device,
        listener=listener or Quiet(),
        once=once,
        take_over=take_over,
    )


def recalled(
    folder: CheckpointFolder,
    spec: GenerateSpec,
    target: Path,
    *,
    shown: str,
    seed: int,
    dtype: str,
    device: str,
    listener: Listener,
    once: bool = False,
    take_over: bool = False,
) -> Recalled:
    """Do what `recall` does with an opened model; `shown` is what it is called in the record.

    With `once` the file may be there already, if the same model wrote it by the same settings, here; a signed file
    beside it says so then.
    """
    settings = _settled(folder, spec) | {"seed": seed, "dtype": dtype}
    there = os.path.lexists(target)
    if there and not once:
        raise BadInput(f"{printable(str(target))}: exists; choose another name, or move it away")
    # Before the folder is locked: the tokenizer's process would hold the lock too.
    writer = None if there else _writer(folder, settings)
    # What would be refused once the work folder is there.
    devices.resolve(device)
    if dtype != "auto":
        # Brings torch, for which arguments do not wait.
        from surgeon.models.load import torch_dtype

        torch_dtype(dtype)
    listener.begin("reading", sum(info.nbytes for info in folder.tensors.values()))
    found = digests_of(folder, folder.tensors, listener.advance)
    tensors = {name: [info.dtype, list(info.shape), found[name]] for name, info in folder.tensors.items()}
    digest = _sha256({"config": folder.config, "tensors": tensors})
    fingerprint = _sha256({"version": __version__, "digest": digest, "settings": settings})
    place = target.with_name(f".{target.name}.recall")
    beside = target.with_name(f"{target.name}.recall")
    if writer is None:
        expected = Recalled(target, shown, digest, settings, Counts(), "", 0, 0.0, None)
        return _there(expected, beside, take_over=take_over, say=listener.say)
    kept = f"what was written is kept in {printable(str(place))}: the same command continues"
    with writing(place, kept=kept), working_in(place, target=target, marker=_RECORD) as work:
        part = _Part.open(work, fingerprint, take_over=take_over, say=listener.say)
        made = Recalled(target, shown, digest, settings, part.counts, "", part.counts.tokens, 0.0, None)
        try:
            made = _written(made, part, writer, device, listener)
        except _NearlyNothing:
            # Nothing to go on with: other settings may have the name.
            work.remove(last=_RECORD)
            raise
        record = json.dumps(made.record(), indent=1) + "\n"
        write_durably(beside, record)
        if once:
            write_signed(_signed_file(target), hashlib.sha256(record.encode()).hexdigest())
        work.check_there()
        part.path.rename(target)
        sync(target.parent)
        work.remove(last=_RECORD)
    return made


@dataclass(frozen=True)
class Sampled:
    """Documents of the first batch that were kept; how many were `written`, and the kept ones' tokens.

    `seconds` are those of the writing, without loading the model.
    """

    documents: list[Document]
    written: int
    tokens: int
    seconds: float


def sampled(
    folder: CheckpointFolder,
    spec: GenerateSpec,
    *,
    seed: int,
    dtype: str,
    device: str,
    say: Callable[[str], None],
) -> Sampled:
    """Write the first batch of what `recalled` would write, timed, and nothing of it to disk.

    Raises BadInput as it does, and where no document of the batch could be kept.
    """
    settings = _settled(folder, spec) | {"seed": seed, "dtype": dtype}
    writer = _writer(folder, settings)
    writer.load(devices.resolve(device), say)
    begun = time.perf_counter()
    batch = writer.write(0)
    seconds = time.perf_counter() - begun
    part = _Part(Path(), "", Counts(), hashlib.sha256())
    lines = _kept(part, batch, settings["tokens"]).splitlines()
    if not lines:
        raise _nearly_nothing(part.counts, settings)
    chat, shown = settings["prompts"] == TEMPLATE, printable(str(folder.path))
    documents = [document_of(json.loads(line), shown, key=None, chat=chat) for line in lines]
    # Of the last batch not all may be needed.
    return Sampled(documents, part.counts.written, part.counts.tokens, seconds * part.counts.written / len(batch))


def _there(expected: Recalled, beside: Path, *, take_over: bool, say: Callable[[str], None]) -> Recalled:
    """Return the text that is there already. Raises BadInput where it is not `expected`, or came from elsewhere."""
    try:
        content = read_own(beside) or b""
        record = json.loads(content)
        made = replace(expected, counts=Counts(**record["counts"]), sha256=record["sha256"])
        same = record == made.record() | {"base": record["base"]}
        same = same and hashlib.sha256(read_own(expected.path) or b"").hexdigest() == made.sha256
    except (ValueError, TypeError, KeyError):
        same = False
    if not same:
        raise BadInput(
            f"{printable(str(expected.path))}: not what this model writes by these settings; remove it, and it is"
            " written anew"
        )
    file, digest = _signed_file(expected.path), hashlib.sha256(content).hexdigest()
    try:
        signed = read_signed(file)
    except ValueError:
        signed = None
    if signed is None or signed.data != digest:
        signed = UNSIGNED
    holds = f"text that this model wrote, {expected.settings['tokens']:,} tokens"
    check_own(signed, expected.path, holds, take_over=take_over, say=say, again="have it written anew")
    if not signed.here:
        write_signed(file, digest)
    return made


def _signed_file(target: Path) -> Path:
    return target.with_name(f".{target.name}.signed")


def _settled(folder: CheckpointFolder, spec: GenerateSpec) -> dict[str, Any]:
    """Return all settings that the text depends on. Raises BadInput for what the model cannot do."""
    shown = printable(str(folder.path))
    if is_encoder(folder.config):
        raise BadInput(f"{shown}: an encoder, which writes no text; give a causal language model")
    context = folder.config.get("max_position_embeddings")
    length = spec.length or LENGTH
    if isinstance(context, int):
        if spec.length is not None and length > context:
            raise BadInput(f"{shown}: its context is {context} tokens, and `length` is {length}; use {context} at most")
        length = min(length, context)
    if spec.tokens < length:
        raise BadInput(
            f"{spec.tokens} tokens are fewer than one document of {length}; ask for more, or set a smaller `length`"
        )
    settings: dict[str, Any] = spec.model_dump() | {"length": length}
    if spec.prompts not in (BEGIN, TEMPLATE):
        settings["prompts_sha256"] = hashlib.sha256(_lines(str(spec.prompts)).encode()).hexdigest()
    return settings


def _lines(path: str) -> str:
    """Read a file of prompts. Raises BadInput where it cannot be read, or has none."""
    content = read_given(Path(path), what="file of `prompts`", most=MAX_SIDE_FILE_BYTES)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise BadInput(f"{printable(path)}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    if not text.strip():
        raise BadInput(f"{printable(path)}: no beginnings; write one a line")
    return text


class _Part:
    """The text so far, and a record of it that is written after every batch."""

    def __init__(self, path: Path, fingerprint: str, counts: Counts, digest: Any) -> None:
        self.path = path
        self.fingerprint = fingerprint
        self.counts = counts
        self.digest = digest
        self.seen: set[bytes] = set()

    @classmethod
    def open(cls, work: WorkFolder, fingerprint: str, *, take_over: bool, say: Callable[[str], None]) -> _Part:
        """What is there, without what was cut off.

        Raises BadInput where it is another run's, not what was kept, or, but for `take_over`, came from elsewhere.
        """
        path, file = work.path / _PART, work.path / _RECORD
        try:
            found = read_signed(file)
        except ValueError as error:
            raise _damaged(file, printable(str(error))) from None
        if found is None:
            check_own(None, work.path, "", take_over=take_over, say=say)
            part = cls(path, fingerprint, Counts(), hashlib.sha256())
            # Before the text: a folder with text and no record would be nobody's, where the disk took no more between.
            part._record(0)
            return part
        try:
            record = found.data
            counts = Counts(**record["counts"])
            if not all(type(number) is int for number in (record["bytes"], *asdict(counts).values())):
                raise TypeError("it is no record of a recall")
        except (ValueError, TypeError, KeyError) as error:
            raise _damaged(file, printable(str(error))) from None
        if record["fingerprint"] != fingerprint:
            raise BadInput(
                f"{printable(str(work.path))}: holds text of another recall (model or settings differ); remove it, or"
                " choose another name"
            )
        holds = f"what a model wrote so far, {counts.tokens:,} tokens"
        check_own(found, work.path, holds, take_over=take_over, say=say)
        written = (read_own(path) or b"")[: record["bytes"]]
        digest = hashlib.sha256(written)
        if digest.hexdigest() != record["sha256"]:
            raise _damaged(path, "it is not what was written")
        part = cls(path, fingerprint, counts, digest)
        with path.open("ab") as open_file:
            open_file.truncate(len(written))
        part.seen = {_key(line) for line in written.splitlines()}
        if not found.here:
            part.save(b"")
        return part

    def save(self, lines: bytes) -> None:
        """Add lines, durably, and record that they are there."""
        with self.path.open("ab") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        self.digest.update(lines)
        self._record(size)

    def _record(self, size: int) -> None:
        """Record that so many bytes of text are there."""
        record = {"fingerprint": self.fingerprint, "counts": asdict(self.counts), "bytes": size}
        write_signed(self.path.with_name(_RECORD), record | {"sha256": self.digest.hexdigest()})


def _damaged(file: Path, why: str) -> BadInput:
    return BadInput(f"{printable(str(file))}: damaged or edited ({why}); remove its folder, and the recall begins anew")


def _writer(folder: CheckpointFolder, settings: dict[str, Any]) -> Writer:
    """Make the writer for the settings. Raises BadInput where the model has no such beginnings."""
    lines = None if settings["prompts"] in (BEGIN, TEMPLATE) else _lines(settings["prompts"])

    from surgeon.data.writing import Writer

    return Writer(folder, settings, lines)


def _written(made: Recalled, part: _Part, writer: Writer, device: str, listener: Listener) -> Recalled:
    """Write batch after batch until there is enough."""
    settings, goal = made.settings, made.settings["tokens"]
    listener.begin("recalling", goal, "tokens")
    listener.advance(part.counts.tokens)
    begun, spent, sampled = time.perf_counter(), 0.0, 0
    if part.counts.tokens < goal:
        writer.load(devices.resolve(device), listener.say)
        begun = time.perf_counter()
    while part.counts.tokens < goal:
        before = part.counts
        batch = writer.write(before.batches)
        sampled += sum(each.tokens for each in batch)
        part.save(_kept(part, batch, goal))
        _judge(part.counts, settings)
        listener.advance(part.counts.tokens - before.tokens)
        spent = time.perf_counter() - begun
        if 10 * before.tokens // goal < 10 * part.counts.tokens // goal:
            left = max(0, goal - part.counts.tokens) * spent / max(1, part.counts.tokens - made.resumed_at)
            listener.say(
                f"recalled {part.counts.tokens:,} of {goal:,} tokens, {sampled / spent:,.0f} tokens/s,"
                f" {datetime.timedelta(seconds=round(left))} left"
            )
    lost = part.counts.written - part.counts.kept
    if lost > _MANY_LOST * part.counts.written:
        listener.say(f"{_filtered(part.counts)}; another temperature (now {settings['temperature']:g}) may lose fewer")
    return replace(
        made,
        counts=part.counts,
        sha256=part.digest.hexdigest(),
        seconds=spent,
        tokens_per_second=sampled / spent if sampled else None,
    )


def _kept(part: _Part, batch: list[Written], goal: int) -> bytes:
    """Return the lines of a batch's documents that are kept, up to the first that is enough; counts all of them."""
    found = asdict(part.counts)
    found["batches"] += 1
    lines = b""
    for document in batch:
        if found["tokens"] >= goal:
            break
        found["written"] += 1
        line = json.dumps(document.entry, ensure_ascii=False).encode() + b"\n"
        key = _key(line)
        if document.empty:
            found["empty"] += 1
        elif document.loops:
            found["loops"] += 1
        elif key in part.seen:
            found["duplicates"] += 1
        else:
            part.seen.add(key)
            found["kept"] += 1
            found["tokens"] += document.tokens
            found["cut"] += not document.ended
            lines += line
    part.counts = Counts(**found)
    return lines


def _key(line: bytes) -> bytes:
    """Return the key that equal documents share: the words, whatever their case and the white space between them."""
    return hashlib.sha256(" ".join(line.decode().split()).casefold().encode()).digest()


def _judge(counts: Counts, settings: dict[str, Any]) -> None:
    """Raise BadInput where nearly nothing of what the model writes can be kept."""
    if counts.batches >= _JUDGED and counts.kept < _LEAST_KEPT * counts.written:
        raise _nearly_nothing(counts, settings)


def _nearly_nothing(counts: Counts, settings: dict[str, Any]) -> _NearlyNothing:
    temperature = settings["temperature"]
    other = "a higher one, 1 say" if temperature < 1 else "a lower one, 0.8 say"
    why = "they loop" if counts.loops >= counts.empty + counts.duplicates else "they are empty or the same"
    advice = f"temperature is {temperature:g}: try {other}, or give `prompts`, a file with a beginning a line"
    return _NearlyNothing(f"{_filtered(counts)}, since {why}; {advice}")


def _filtered(counts: Counts) -> str:
    lost = counts.written - counts.kept
    return (
        f"{lost} of {counts.written} documents ({lost / counts.written:.0%}) were filtered: {counts.loops} loop,"
        f" {counts.duplicates} are duplicates, {counts.empty} are empty"
    )


def _sha256(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def recalled_view(made: Recalled) -> RenderableType:
    """Show what was written, and what was filtered."""
    counts = made.counts
    facts = FittedTable(headings=False)
    facts.add_row("documents", f"{counts.kept:,}, of them {counts.cut:,} cut at {made.settings['length']:,} tokens")
    facts.add_row("tokens", f"{counts.tokens:,}")
    facts.add_row(
        "filtered",
        f"{counts.written - counts.kept:,} of {counts.written:,}: {counts.loops:,} loops, {counts.duplicates:,}"
        f" duplicates, {counts.empty:,} empty",
    )
    if made.tokens_per_second:
        facts.add_row("speed", f"{made.tokens_per_second:,.0f} tokens/s")
    facts.add_row("written by", f"{printable(made.base)}, {made.digest}")
    return Group(facts, Text(), Text(f"{printable(str(made.path))} is complete", style="bold green"))
