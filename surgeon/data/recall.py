"""`surgeon recall`: a model writes text like its training text, for replay where that text is not available.

Pseudo-rehearsal (Robins, 1995); self-synthesised rehearsal of language models (Huang et al., 2024); for models that
answer, both turns from the bare chat template (Magpie, Xu et al., 2024).

The unit of work is a batch of documents; its number determines its random numbers. So an interrupted run continues
after the last whole batch, and ends with the same text as a run without interruption.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from surgeon._version import __version__
from surgeon.anatomy.grafted_config import is_encoder
from surgeon.anatomy.limits import context_of
from surgeon.checkpoint.folder import CheckpointFolder, digests_of
from surgeon.checkpoint.hub import locate
from surgeon.checkpoint.source import MAX_SIDE_FILE_BYTES
from surgeon.common import devices
from surgeon.common.checked_yaml import check_given
from surgeon.common.disk_space import writing
from surgeon.common.files import read_given
from surgeon.common.json_results import plain_fields
from surgeon.common.listener import Listener, Quiet
from surgeon.common.names import check_new_name
from surgeon.common.places import meant
from surgeon.common.schema import BEGIN, TEMPLATE
from surgeon.common.signed import UNSIGNED, check_own, read_signed, write_signed
from surgeon.common.tables import FittedTable
from surgeon.common.work_folders import read_own, sync, working_in, write_durably
from surgeon.data.layouts import Document, document_of
from surgeon.data.recalled_text import RECORD, Counts, NearlyNothing, TextSoFar, judge
from surgeon.data.specs import GenerateSpec, RowsSpec
from surgeon.errors import BadInput, printable
from surgeon.models.templates import template_of

if TYPE_CHECKING:
    from surgeon.data.writing import Writer

# The default longest document: longer documents drift from the model's training text.
LENGTH = 512
# Where a larger share of documents than this is filtered, the user gets advice.
_MANY_LOST = 0.3


@dataclass(frozen=True)
class Recalled:
    """A file of recalled text: the model that wrote it, the settings, and the counts of filtered documents.

    `digest` covers the model's config and tensors, `sha256` the file. The speed counts all tokens that the model wrote
    since this call began, filtered ones included; at that time `resumed_at` tokens were kept already.
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
        """Return the record for the file next to the text: every field that does not depend on time."""
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
        """Return plain data for `--json`.

        Keys:
            `path`: the file
            `base`, `digest`: the model that wrote it, and the digest of the model's config and tensors
            `settings`: `tokens`, `prompts`, `temperature`, `top_p`, `length`, `batch`, `seed`, `dtype`
            `counts`: `batches`; documents `written` and `kept`; `tokens` kept, and how many documents were `cut` at the
                longest length; filtered out: `loops`, `duplicates`, `empty`
            `sha256`: the file's digest
            `seconds`, `tokens_per_second`: of this call, filtered text included
            `resumed_at`: the tokens that were kept already when this call began
        """
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
    """Let the model `base` (a folder, also an output of surgeon, or a Hub id) write at least `tokens` tokens to `to`.

    `to` is a .jsonl file, absent or complete at any moment: a line is `{"text": …}`, or `{"messages": […]}` of a
    question and an answer. The file `to`.recall next to it contains the model's digest and all settings.

    Args:
        base: The model: a folder (also an output of surgeon) or a Hub id.
        tokens: The least number of tokens to write.
        to: The new .jsonl file.
        prompts: The beginning of a document: `begin` (the begin-of-text token), `template` (the bare chat template), or
            a text file with one beginning per line; None: the template where there is one.
        temperature: Sampling temperature; 1: the model's own distribution.
        top_p: Sample among the likeliest tokens with this share of the probability.
        length: The longest document in tokens; None: 512.
        batch: Documents at a time.
        seed: Seed of all random numbers.
        revision: Branch, tag or commit of a Hub id.
        dtype: auto (the checkpoint's), float32, bfloat16 or float16.
        once: Whether the file may exist already, if the same model wrote it by the same settings, here; a signed file
            next to it proves this.
        take_over: Whether to continue a recall that this user did not begin in this place; a call always continues its
            own.
        device: auto, cpu, cuda or cuda:N.
        trust_remote_code: Whether the model's own code may run.
        listener: Receives progress and notes.

    Raises:
        BadInput: The model cannot write so, or nearly all of its text is filtered (loops, duplicates, empty).
    """
    target = Path(to)
    if target.suffix != ".jsonl":
        raise BadInput(f"{printable(str(target))}: recalled text is JSON lines; give a name that ends in .jsonl")
    check_new_name(target)
    devices.check(device)
    spec = check_given(
        GenerateSpec, tokens=tokens, prompts=prompts, temperature=temperature, top_p=top_p, length=length, batch=batch
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
    """Do the work of `recall` with an opened model; `shown` is the model's name in the record.

    With `once` the file may exist already, if the same model wrote it by the same settings, here; a signed file next to
    it proves this. Then nothing is written again. Raises BadInput as `recall` does.
    """
    settings = _settled(folder, spec) | {"seed": seed, "dtype": dtype}
    there = os.path.lexists(target)
    if there and not once:
        raise BadInput(f"{printable(str(target))}: exists; choose another name, or move it away")
    # Made before the folder is locked: the tokenizer's child process would inherit the lock.
    writer = None if there else _writer(folder, settings, listener.say)
    # Refuse a bad device or dtype now, before the work folder is made.
    devices.resolve(device)
    if dtype != "auto":
        # This imports torch, so it comes after the checks of the arguments.
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
    with writing(place, kept=kept), working_in(place, target=target, marker=RECORD) as work:
        text = TextSoFar.open(work, fingerprint, take_over=take_over, say=listener.say)
        made = Recalled(target, shown, digest, settings, text.counts, "", text.counts.tokens, 0.0, None)
        try:
            made = _written(made, text, writer, device, listener)
        except NearlyNothing:
            # There is nothing to continue: free the name for other settings.
            work.remove(last=RECORD)
            raise
        record = json.dumps(made.record(), indent=1) + "\n"
        write_durably(beside, record)
        if once:
            write_signed(_signed_file(target), hashlib.sha256(record.encode()).hexdigest())
        work.check_there()
        text.path.rename(target)
        sync(target.parent)
        work.remove(last=RECORD)
    return made


@dataclass(frozen=True)
class Sampled:
    """Kept documents of the first batch; the number of documents `written`, and the kept documents' tokens.

    `seconds` is the time of writing, without loading the model.
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
    """Return the first batch that `recalled` would write, timed; nothing is written to disk.

    Raises BadInput as `recalled` does, and where no document of the batch could be kept.
    """
    settings = _settled(folder, spec) | {"seed": seed, "dtype": dtype}
    writer = _writer(folder, settings, say)
    writer.load(devices.resolve(device), say)
    begun = time.perf_counter()
    batch = writer.write(0)
    seconds = time.perf_counter() - begun
    text = TextSoFar.in_memory()
    lines = text.keep(batch, settings["tokens"]).splitlines()
    if not lines:
        raise NearlyNothing.of(text.counts, settings)
    documents = [document_of(json.loads(line), RowsSpec(), str(folder.path)) for line in lines]
    # The text may need only a part of the batch.
    return Sampled(documents, text.counts.written, text.counts.tokens, seconds * text.counts.written / len(batch))


def _there(expected: Recalled, beside: Path, *, take_over: bool, say: Callable[[str], None]) -> Recalled:
    """Return the result for a text that exists already.

    Raises BadInput where it is not `expected`, or, without `take_over`, was not written by this user in this place.
    """
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
            " written again"
        )
    file, digest = _signed_file(expected.path), hashlib.sha256(content).hexdigest()
    words = {"again": "have it written again"}
    if not os.path.lexists(file):
        words["unsigned"] = "no signed file beside it says that this user did: a call without --once writes none"
    try:
        signed = read_signed(file)
    except ValueError:
        signed = None
    if signed is None or signed.data != digest:
        signed = UNSIGNED
    holds = f"text that this model wrote, {expected.settings['tokens']:,} tokens"
    check_own(signed, expected.path, holds, take_over=take_over, say=say, **words)
    if not signed.here:
        write_signed(file, digest)
    return made


def _signed_file(target: Path) -> Path:
    """Return the path of the signed file that proves who wrote the text `target`."""
    return target.with_name(f".{target.name}.signed")


def _settled(folder: CheckpointFolder, spec: GenerateSpec) -> dict[str, Any]:
    """Return all settings that determine the text. Raises BadInput for settings that the model cannot follow."""
    shown = printable(str(folder.path))
    if is_encoder(folder.config):
        raise BadInput(f"{shown}: an encoder, which writes no text; give a causal language model")
    context = context_of(folder.config)
    length = spec.length or LENGTH
    if context is not None:
        if spec.length is not None and length > context:
            raise BadInput(f"{shown}: its context is {context} tokens, and `length` is {length}; use {context} at most")
        length = min(length, context)
    if spec.tokens < length:
        raise BadInput(
            f"{spec.tokens} tokens are fewer than one document of {length}; ask for more tokens, or shorter documents"
            " (`length`)"
        )
    settings: dict[str, Any] = spec.model_dump() | {"length": length}
    if spec.prompts not in (BEGIN, TEMPLATE):
        settings["prompts_sha256"] = hashlib.sha256(beginnings(str(spec.prompts)).encode()).hexdigest()
    return settings


def beginnings(path: str) -> str:
    """Return the text of a file of prompts. Raises BadInput where it cannot be read, has no prompt, or is JSON."""
    content = read_given(Path(meant(path)), what="file of `prompts`", most=MAX_SIDE_FILE_BYTES)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{printable(path)}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    if not text.strip():
        raise BadInput(f"{printable(path)}: no beginnings; write one a line")
    for whole in (text, text.strip().splitlines()[0]):
        with suppress(ValueError, RecursionError):
            if isinstance(json.loads(whole), dict | list):
                raise BadInput(f"{printable(path)}: JSON; beginnings are plain text, one a line")
    return text


def _writer(folder: CheckpointFolder, settings: dict[str, Any], say: Callable[[str], None]) -> Writer:
    """Return the writer for the settings.

    Raises BadInput where the model cannot start from the requested beginnings.
    """
    lines = None if settings["prompts"] in (BEGIN, TEMPLATE) else beginnings(settings["prompts"])

    from surgeon.data.writing import Writer

    writer = Writer(folder, settings, lines)
    if found := writer.tokenizer.control_tokens(lines or ""):
        tokens = f"{found.total():,} control tokens ({printable(', '.join(found), 80)})"
        say(f"{printable(settings['prompts'])}: {tokens} in the beginnings are read as tokens")
    return writer


def _written(made: Recalled, text: TextSoFar, writer: Writer, device: str, listener: Listener) -> Recalled:
    """Write batch after batch until there are enough tokens; return `made` with the final counts, digest and speed.

    Raises NearlyNothing where almost everything is filtered.
    """
    settings, goal = made.settings, made.settings["tokens"]
    listener.begin("recalling", goal, "tokens")
    listener.advance(text.counts.tokens)
    begun, spent, sampled = time.perf_counter(), 0.0, 0
    if text.counts.tokens < goal:
        writer.load(devices.resolve(device), listener.say)
        begun = time.perf_counter()
    while text.counts.tokens < goal:
        before = text.counts
        batch = writer.write(before.batches)
        sampled += sum(each.tokens for each in batch)
        text.save(text.keep(batch, goal))
        judge(text.counts, settings)
        listener.advance(text.counts.tokens - before.tokens)
        spent = time.perf_counter() - begun
        if 10 * before.tokens // goal < 10 * text.counts.tokens // goal:
            left = max(0, goal - text.counts.tokens) * spent / max(1, text.counts.tokens - made.resumed_at)
            listener.say(
                f"recalled {text.counts.tokens:,} of {goal:,} tokens, {sampled / spent:,.0f} tokens/s,"
                f" {datetime.timedelta(seconds=round(left))} left"
            )
    lost = text.counts.written - text.counts.kept
    if lost > _MANY_LOST * text.counts.written:
        listener.say(f"{text.counts.filtered}; another temperature (now {settings['temperature']:g}) may lose fewer")
    return replace(
        made,
        counts=text.counts,
        sha256=text.digest.hexdigest(),
        seconds=spent,
        tokens_per_second=sampled / spent if sampled else None,
    )


def _sha256(data: Any) -> str:
    """Return the hex sha256 of JSON data with sorted keys."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def recalled_view(made: Recalled) -> RenderableType:
    """Return a table of what was written, and what was filtered."""
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
