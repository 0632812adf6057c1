"""`surgeon recall`: a model writes text like its training text, for replay where that text is not available.

Pseudo-rehearsal (Robins, 1995); self-synthesised rehearsal of language models (Huang et al., 2024); for models that
answer, both turns from the bare chat template (Magpie, Xu et al., 2024).

The unit of work is a run of `_RUN` times as many documents as are written at a time; a document's number determines
its random numbers. An interrupted recall continues after the last whole run. One that is asked for more tokens writes
its last run again as far as it came. So the text is the same whenever it was interrupted, and a longer one begins with
the shorter one.
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
from surgeon.checkpoint.source import MAX_SIDE_FILE_BYTES
from surgeon.common import devices
from surgeon.common.cache import digest_of
from surgeon.common.checked_yaml import check_given
from surgeon.common.disk_space import writing
from surgeon.common.json_results import plain_fields
from surgeon.common.listener import Listener, Quiet
from surgeon.common.names import check_new_name
from surgeon.common.places import meant
from surgeon.common.schema import BEGIN, TEMPLATE
from surgeon.common.signed import UNSIGNED, check_own, read_signed, write_signed
from surgeon.common.tables import FittedTable
from surgeon.common.work_folders import read_own, sync, working_in, write_durably
from surgeon.data.documents import given_lines
from surgeon.data.layouts import Document, document_of
from surgeon.data.recalled_text import RECORD, Counts, NearlyNothing, TextSoFar, judge, record_of
from surgeon.data.specs import GenerateSpec, RowsSpec
from surgeon.errors import BadInput, printable
from surgeon.models.gguf_file import locate_base
from surgeon.models.templates import template_of

if TYPE_CHECKING:
    from surgeon.data.writing import Writer

# The default longest document: longer documents drift from the model's training text.
LENGTH = 512
# Documents of a run, for each that is written at a time: the last ones of a run are written with rows free.
_RUN = 4
# The first line on speed comes after this many tokens of each document that is written at a time.
_FIRST_TOKENS = 16
# How tokens are drawn by a chat template: at temperature 1, small chat models write nonsense.
_CHATS = {"temperature": 0.7, "top_p": 0.9}
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
            `counts`: documents `written` and `kept`; `tokens` kept, and how many documents were `cut` at the
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
    temperature: float | None = None,
    top_p: float | None = None,
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
    question and an answer, with `"cut": true` where `length` ended it and not the model. The file `to`.recall next to
    it contains the model's digest and all settings. Where `to` exists with fewer tokens, it is continued.

    Args:
        base: The model: a folder (also an output of surgeon) or a Hub id.
        tokens: The least number of tokens to write.
        to: The .jsonl file.
        prompts: The beginning of a document: `begin` (the begin-of-text token), `template` (the bare chat template), or
            a file of prompts, one per line or JSON lines with `prompt`: questions to answer where the model has a chat
            template, else texts to continue; None: the template where there is one.
        temperature: Sampling temperature; None: 0.7 by a chat template, else 1, the model's own distribution.
        top_p: Sample among the likeliest tokens with this share of the probability; None: 0.9 by a chat template, else
            1.
        length: The longest document in tokens; None: 512.
        batch: Documents at a time.
        seed: Seed of all random numbers.
        revision: Branch, tag or commit of a Hub id.
        dtype: auto (the checkpoint's), float32, bfloat16 or float16.
        once: Whether the file may exist already with enough tokens, if the same model wrote it by the same settings,
            here; a signed file next to it proves this.
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
    located = locate_base(str(base), revision=revision, code=trust_remote_code)
    folder = CheckpointFolder.open(located.path, trust_remote_code=trust_remote_code)
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

    A file that exists is continued where the same model wrote it by the same settings. With `once` it may have enough
    tokens already, and a signed file next to it must prove that it was written here. Raises BadInput as `recall` does.
    """
    settings = _settled(folder, spec) | {"seed": seed, "dtype": dtype}
    beside = record_of(target)
    there = os.path.lexists(target)
    noted = _tokens_of(beside) if there else None
    enough = noted is not None and noted >= settings["tokens"]
    if there and not once and (noted is None or enough):
        more = "" if noted is None else f" with {noted:,} tokens; ask for more, and it is continued, or"
        raise BadInput(f"{printable(str(target))}: exists{more or ';'} choose another name, or move it away")
    # Made before the folder is locked: the tokenizer's child process would inherit the lock.
    writer = None if there and (noted is None or enough) else _writer(folder, settings, listener.say)
    # Refuse a bad device or dtype now, before the work folder is made.
    devices.resolve(device)
    if dtype != "auto":
        # This imports torch, so it comes after the checks of the arguments.
        from surgeon.models.load import torch_dtype

        torch_dtype(dtype)
    listener.begin("reading", sum(info.nbytes for info in folder.tensors.values()))
    found = digests_of(folder, folder.tensors, listener.advance)
    tensors = {name: [info.dtype, list(info.shape), found[name]] for name, info in folder.tensors.items()}
    digest = digest_of({"config": folder.config, "tensors": tensors})
    # A longer text begins with the shorter one, so it is the same recall.
    asked = {name: value for name, value in settings.items() if name != "tokens"}
    fingerprint = digest_of({"version": __version__, "digest": digest, "settings": asked})
    made = Recalled(target, shown, digest, settings, Counts(), "", 0, 0.0, None)
    if there:
        made = _there(made, beside)
        if once:
            _check_signed(made, beside, take_over=take_over, say=listener.say)
    if writer is None:
        return made
    place = target.with_name(f".{target.name}.recall")
    kept = f"what was written is kept in {printable(str(place))}: the same command continues"
    with writing(place, kept=kept), working_in(place, target=target, marker=RECORD) as work:
        shorter = (target, made.counts) if there else None
        text = TextSoFar.open(work, fingerprint, shorter, take_over=take_over, say=listener.say)
        made = replace(made, counts=text.counts, resumed_at=text.counts.tokens)
        try:
            made = _written(made, text, writer, device, listener)
        except NearlyNothing:
            if not made.resumed_at:
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
    """Kept documents of the first ones; the number of documents `written`, and the kept documents' tokens.

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
    """Return as many documents as are written at a time, timed; nothing is written to disk.

    Raises BadInput as `recalled` does, and where no document could be kept.
    """
    settings = _settled(folder, spec) | {"seed": seed, "dtype": dtype}
    writer = _writer(folder, settings, say)
    writer.load(devices.resolve(device), say)
    begun = time.perf_counter()
    written = list(writer.write(range(settings["batch"])))
    seconds = time.perf_counter() - begun
    text = TextSoFar.in_memory()
    lines = b""
    for document in written:
        # The text may need only a part of them.
        if text.counts.tokens < settings["tokens"]:
            lines += text.keep(document)
    if not lines:
        raise NearlyNothing.of(text.counts, settings)
    documents = [document_of(json.loads(line), RowsSpec(), str(folder.path)) for line in lines.splitlines()]
    return Sampled(documents, text.counts.written, text.counts.tokens, seconds * text.counts.written / len(written))


def _tokens_of(beside: Path) -> int | None:
    """Return how many tokens the text next to a record has, by the record; None where there is none."""
    try:
        found = json.loads(read_own(beside) or b"")["counts"]["tokens"]
    except (ValueError, TypeError, KeyError):
        return None
    return found if type(found) is int else None


def _there(expected: Recalled, beside: Path) -> Recalled:
    """Return `expected` with the counts of a text that exists. Raises BadInput where another model or call wrote it."""
    try:
        record = json.loads(read_own(beside) or b"")
        made = replace(expected, counts=Counts(**record["counts"]), sha256=record["sha256"])
        # Only the number of tokens may differ, and the name by which the model was called.
        settings = expected.settings | {"tokens": record["settings"]["tokens"]}
        same = record == replace(made, settings=settings).record() | {"base": record["base"]}
        same = same and hashlib.sha256(read_own(expected.path) or b"").hexdigest() == made.sha256
    except (ValueError, TypeError, KeyError):
        same = False
    if not same:
        raise BadInput(
            f"{printable(str(expected.path))}: not what this model writes by these settings; remove it, and it is"
            " written again"
        )
    return made


def _check_signed(made: Recalled, beside: Path, *, take_over: bool, say: Callable[[str], None]) -> None:
    """Raise BadInput where a text was not written by this user in this place, unless `take_over` is set; sign it then.

    `beside` is the record of the text.
    """
    file, digest = _signed_file(made.path), hashlib.sha256(read_own(beside) or b"").hexdigest()
    words = {"again": "have it written again"}
    if not os.path.lexists(file):
        words["unsigned"] = "no signed file beside it says that this user did: a call without --once writes none"
    try:
        signed = read_signed(file)
    except ValueError:
        signed = None
    if signed is None or signed.data != digest:
        signed = UNSIGNED
    holds = f"text that this model wrote, {made.counts.tokens:,} tokens"
    check_own(signed, made.path, holds, take_over=take_over, say=say, **words)
    if not signed.here:
        write_signed(file, digest)


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
    template = template_of(folder) is not None
    prompts = spec.prompts or (TEMPLATE if template else BEGIN)
    settings: dict[str, Any] = spec.model_dump() | {"prompts": prompts, "length": length}
    chats = prompts == TEMPLATE or (template and prompts != BEGIN)
    for name, of_chats in _CHATS.items():
        if settings[name] is None:
            settings[name] = of_chats if chats else 1.0
    if prompts not in (BEGIN, TEMPLATE):
        settings["prompts_sha256"] = digest_of(beginnings(prompts))
    return settings


def beginnings(path: str) -> list[str]:
    """Return the prompts of a file: its lines, or `prompt` of each line where these are JSON objects.

    Raises BadInput where the file cannot be read, or has no prompt.
    """
    given = given_lines(Path(meant(path)), what="file of `prompts`", most=MAX_SIDE_FILE_BYTES)
    lines = [line for line in given if line.strip()]
    if not lines:
        raise BadInput(f"{printable(path)}: no beginnings; write one a line")
    for whole in ("\n".join(lines), lines[0]):
        with suppress(ValueError, RecursionError):
            if isinstance(json.loads(whole), dict | list):
                return [_prompt_in(line, path) for line in lines]
    return lines


def _prompt_in(line: str, path: str) -> str:
    """Return the prompt in a line of JSON. Raises BadInput where it has none."""
    try:
        found = json.loads(line)["prompt"]
        if isinstance(found, str) and found.strip():
            return found
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise BadInput(
        f"{printable(path)}: JSON without a text `prompt` in each line; write one prompt a line, as plain text or as"
        ' {"prompt": …}'
    )


def _writer(folder: CheckpointFolder, settings: dict[str, Any], say: Callable[[str], None]) -> Writer:
    """Return the writer for the settings.

    Raises BadInput where the model cannot start from the requested beginnings.
    """
    prompts = None if settings["prompts"] in (BEGIN, TEMPLATE) else beginnings(settings["prompts"])

    from surgeon.data.writing import Writer

    writer = Writer(folder, settings, prompts)
    if found := writer.tokenizer.control_tokens("\n".join(prompts or [])):
        tokens = f"{found.total():,} control tokens ({printable(', '.join(found), 80)})"
        say(f"{printable(settings['prompts'])}: {tokens} in the beginnings are read as tokens")
    return writer


def _written(made: Recalled, text: TextSoFar, writer: Writer, device: str, listener: Listener) -> Recalled:
    """Write run after run until there are enough tokens; return `made` with the final counts, digest and speed.

    Raises NearlyNothing where almost everything is filtered.
    """
    settings, goal = made.settings, made.settings["tokens"]
    at_once = settings["batch"]
    listener.begin("recalling", goal, "tokens")
    listener.advance(text.counts.tokens)
    begun, sampled = time.perf_counter(), 0
    if text.counts.tokens < goal:
        writer.load(devices.resolve(device), listener.say)
        begun = time.perf_counter()

    def count(tokens: int) -> None:
        """Count sampled tokens; report the speed as soon as it is known."""
        nonlocal sampled
        before, sampled = sampled, sampled + tokens
        if before < _FIRST_TOKENS * at_once <= sampled:
            speed = sampled / (time.perf_counter() - begun)
            left = datetime.timedelta(seconds=round((goal - made.resumed_at) / speed))
            listener.say(f"writing {at_once} documents at a time, {speed:,.0f} tokens/s: {left} if all are kept")

    while text.counts.tokens < goal:
        written = text.counts.written
        first = written - written % (_RUN * at_once)
        lines = b""
        for number, document in enumerate(writer.write(range(first, first + _RUN * at_once), count), first):
            if number < written:
                # It is in the text already, or was filtered: the last run was not needed to its end.
                continue
            before = text.counts.tokens
            lines += text.keep(document)
            judge(text.counts, settings)
            listener.advance(text.counts.tokens - before)
            if 10 * before // goal < 10 * text.counts.tokens // goal:
                speed = sampled / (time.perf_counter() - begun)
                # As many documents are filtered as before. Those that are not complete are not counted.
                left = max(0, goal - text.counts.tokens) / speed * text.counts.written / text.counts.kept
                listener.say(
                    f"recalled {text.counts.tokens:,} of {goal:,} tokens, {speed:,.0f} tokens/s,"
                    f" {datetime.timedelta(seconds=round(left))} left"
                )
            if text.counts.tokens >= goal:
                break
        text.save(lines)
    spent = time.perf_counter() - begun
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
