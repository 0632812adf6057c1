"""A checkpoint's tokenizer, chat template and processor, in a process of its own with limits of time and memory.

Both are programs that a base brings: a template loops as long as it likes and makes strings as long as it likes, and
the regular expressions of a tokenizer.json may backtrack for ever, in code that no signal interrupts. So they run in a
child, whose timer the kernel keeps and whose memory is bounded; what comes back is numbers and text. So does what
makes pixels of a picture, as its settings ask for any size.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import struct
import warnings
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never

import safetensors.torch
from torch import Tensor

from surgeon.common.library import first_line
from surgeon.errors import BadInput, printable
from surgeon.models.load import find_processor, find_tokenizer
from surgeon.models.pictures import with_picture
from surgeon.models.view import PROCESSOR_FILES, TOKENIZER_FILES

# Seconds of computing for one text, or one rendering of one chat, and characters that take one second more: honest
# tokenizers do a million.
SECONDS = 60.0
_CHARACTERS_A_SECOND = 100_000
# Bytes beyond what the process has when it begins, and for each character more.
MEMORY = 4 << 30
_MEMORY_A_CHARACTER = 256
# Bytes of the longest answer: more than any context, and for each character more.
_LONGEST = 256 << 20
_LONGEST_A_CHARACTER = 16

_HEAD = struct.Struct("<cQ")
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")


class Tokenizer:
    """The tokenizer or processor of a folder, which `load` loads in the child; `why_not` says why there is none.

    Every method raises BadInput, in one line that names the file, where a limit was reached, the process ended, or the
    template or tokenizer refuses what it is given.
    """

    def __init__(self, folder: Path, load: Callable[[Path], tuple[Any, str]]) -> None:
        self.folder = folder
        self._pid, self._requests, self._answers = _forked(lambda: load(folder))
        self._status = 0
        self._end = weakref.finalize(self, _end, os.getpid(), self._pid, self._requests, self._answers)
        facts, self.why_not = self._ask("facts")
        self.eos_token_id: int | None = facts["eos_token_id"]
        self.unk_token_id: int | None = facts["unk_token_id"]
        self.bos_token_id: int | None = facts["bos_token_id"]
        self.all_special_ids: list[int] = facts["all_special_ids"]
        self.is_fast: bool = facts["is_fast"]
        self.chat_template: str | None = facts["chat_template"]
        self._control_tokens: set[str] = {*facts["control_tokens"]}

    def control_tokens(self, text: str) -> Counter[str]:
        """Count the control tokens that stand in a text."""
        lengths = sorted({len(token) for token in self._control_tokens}, reverse=True)
        found: Counter[str] = Counter()
        for first in {token[0] for token in self._control_tokens}:
            for rest in text.split(first)[1:]:
                ahead = (first + rest[: length - 1] for length in lengths)
                found.update([token for token in ahead if token in self._control_tokens][:1])
        return found

    def ids(self, text: str, *, special: bool = True, as_text: bool = False) -> list[int]:
        """The tokens of a text; with `special`, those that the tokenizer adds of its own at begin and end.

        With `as_text` control tokens that stand in the text are read as any other text.
        """
        found: list[int] = self._ask("ids", text, special, as_text and bool(self.control_tokens(text)))
        return found

    def offsets(self, text: str, *, special: bool = True) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens of a text, and the characters that each covers. Only where `is_fast`."""
        flat: list[int] = self._ask("offsets", text, special)
        count = len(flat) // 3
        return flat[:count], list(zip(flat[count : 2 * count], flat[2 * count :], strict=True))

    def example(self, text: str, pair: str | None, most: int) -> tuple[list[int], list[int]]:
        """The tokens of a text, or of two as the tokenizer joins them, and to which each token belongs (0 or 1).

        At most `most`, the longer text cut first; special tokens are the tokenizer's own.
        """
        flat: list[int] = self._ask("example", text, pair, most)
        return flat[: len(flat) // 2], flat[len(flat) // 2 :]

    def many(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of many texts, without those that the tokenizer adds of its own. Only where `is_fast`."""
        return _cut(self._ask("many", list(texts)))

    def words(self, texts: Sequence[str]) -> dict[str, int]:
        """Count the pieces that texts are cut into before the model sees them, as its vocabulary writes them.

        Only where `is_fast`.
        """
        found: dict[str, int] = self._ask("words", list(texts))
        return found

    def cut(self, texts: Sequence[str]) -> list[list[str]]:
        """Cut each text as it is cut before the model sees it, as `words` writes it. Only where `is_fast`."""
        found: list[list[str]] = self._ask("cut", list(texts))
        return found

    def pieces(self, words: Sequence[str]) -> list[list[int]]:
        """The tokens that the model makes of words as `words` gives them. Only where `is_fast`."""
        return _cut(self._ask("pieces", list(words)))

    def vocabulary(self) -> dict[str, int]:
        """Every token, added ones among them, as the vocabulary writes it, and its id."""
        found: dict[str, int] = self._ask("vocabulary")
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens."""
        found: str = self._ask("decode", list(ids))
        return found

    def render(
        self,
        turns: Sequence[Mapping[str, Any]],
        *,
        template: str | None = None,
        prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Write a chat as the template does.

        Args:
            turns: its messages.
            template: None: the tokenizer's own.
            prompt: whether to write up to where an answer begins.
            tools: those that the assistant may call, each as a JSON schema.
        """
        found: str = self._ask("render", list(turns), template or self.chat_template, prompt, list(tools) or None)
        return found

    def with_picture(self) -> dict[str, Tensor]:
        """Return a model's inputs for a prompt with a picture. Only of a processor."""
        found: dict[str, Tensor] = self._ask("picture")
        return found

    def _ask(self, method: str, *arguments: Any) -> Any:
        request = json.dumps([method, *arguments]).encode()
        try:
            _write(self._requests, struct.pack("<Q", len(request)) + request)
            kind, length = _HEAD.unpack(_read(self._answers, _HEAD.size))
            if length > _longest(len(request)):
                raise BrokenPipeError
            answer = _read(self._answers, length)
        except OSError:
            self._ended(method)
        if kind == b"i":
            return array("I", answer).tolist()
        if kind == b"t":
            return safetensors.torch.load(answer)
        said = json.loads(answer)
        if kind == b"e":
            raise BadInput(f"{self._file(method)}: {said}")
        return said

    def _ended(self, method: str) -> Never:
        """Say why the child is gone; it stays gone."""
        if self._end.detach() is not None:
            self._status = _end(os.getpid(), self._pid, self._requests, self._answers)
            self._requests = self._answers = -1
        number = os.WTERMSIG(self._status) if os.WIFSIGNALED(self._status) else 0
        if number == signal.SIGPROF:
            why = f"was stopped after {SECONDS:g} seconds of computing on one text"
        else:
            why = (
                f"ended its process ({signal.Signals(number).name if number else 'it exited'}), short of memory perhaps"
            )
        raise BadInput(f"{self._file(method)}: {_what(method)} {why}; {_ADVICE}")

    def _file(self, method: str) -> str:
        """The file that a method's trouble comes from."""
        names = {"render": _TEMPLATE_FILES, "picture": PROCESSOR_FILES}.get(method, TOKENIZER_FILES)
        name = next((name for name in names if (self.folder / name).is_file()), names[-1])
        return printable(str(self.folder / name))


_ADVICE = "no honest one does that: look at the file, or take the original model's"


def open_tokenizer(folder: Path) -> tuple[Tokenizer | None, str]:
    """The tokenizer in `folder`, or None and the reason in words. Never runs code from the folder.

    Raises BadInput for one that reaches a limit while it is loaded.
    """
    # Here, so that no child has to import it for itself.
    import transformers.models.auto.tokenization_auto
    import transformers.tokenization_utils_tokenizers  # noqa: F401

    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None, "there is no tokenizer in the folder"
    found = Tokenizer(folder, find_tokenizer)
    return (None, found.why_not) if found.why_not else (found, "")


def open_processor(folder: Path) -> tuple[Tokenizer | None, str]:
    """The processor of images and text in `folder`, or None and the reason in words. Never runs code from the folder.

    Raises BadInput for one that reaches a limit while it is loaded.
    """
    # Here, so that no child has to import it for itself.
    import transformers.models.auto.processing_auto  # noqa: F401

    found = Tokenizer(folder, find_processor)
    return (None, found.why_not) if found.why_not else (found, "")


def _cut(flat: list[int]) -> list[list[int]]:
    """Lists that came as their number, their lengths, and their members one after the other."""
    count, found = flat[0], []
    at = 1 + count
    for length in flat[1:at]:
        found.append(flat[at : at + length])
        at += length
    return found


def _joined(lists: Sequence[Sequence[int]]) -> bytes:
    flat = array("I", [len(lists), *(len(each) for each in lists)])
    for each in lists:
        flat.extend(each)
    return flat.tobytes()


# A word as SentencePiece writes it, with the mark that stands for the white space before it.
_MARKED = re.compile("▁*[^▁]+|▁+")


def _words(backend: Any, text: str) -> list[str]:
    """Return what the model of a fast tokenizer is given; where nothing cuts a text, its words by their marks."""
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    cut = [text] if backend.pre_tokenizer is None else [w for w, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    return [word for whole in cut for word in (_MARKED.findall(whole) if "▁" in whole[1:] else [whole])]


_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class _Added:
    """The added tokens of a tokenizer by their contents, at which texts are cut before anything else is done to them.

    `first` finds their first characters; `lengths` are theirs, the longest first.
    """

    tokens: dict[str, Any]
    first: re.Pattern[str] | None
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, backend: Any) -> _Added:
        tokens = {token.content: token for token in backend.get_added_tokens_decoder().values() if token.content}
        first = "".join(re.escape(each) for each in sorted({content[0] for content in tokens}))
        lengths = sorted({len(content) for content in tokens}, reverse=True)
        return cls(tokens, re.compile(f"[{first}]") if first else None, tuple(lengths))

    def words(self, backend: Any, text: str) -> Iterator[str]:
        """The words of a text between added tokens."""
        for nth, part in enumerate(self._parts(text)):
            words = _words(backend, part) if part else []
            yield from words
            if nth and words and words[0].startswith("▁") and not part[0].isspace() and len(words[0]) > 1:
                # Some tokenizers put a mark before the first part alone, others before each.
                yield words[0][1:]

    def _parts(self, text: str) -> list[str]:
        found: list[str] = []
        begin = at = 0
        while self.first is not None and (match := self.first.search(text, at)):
            at = match.start()
            content = next((text[at : at + n] for n in self.lengths if text[at : at + n] in self.tokens), None)
            if content is None:
                at += 1
                continue
            found.append(text[begin:at].rstrip() if self.tokens[content].lstrip else text[begin:at])
            at += len(content)
            if self.tokens[content].rstrip and (space := _SPACE.match(text, at)):
                at = space.end()
            begin = at
        return [*found, text[begin:]]


def _what(method: str) -> str:
    called = {"render": "its chat template", "facts": "loading the tokenizer", "picture": "the processor"}
    return called.get(method, "the tokenizer")


def _forked(load: Callable[[], tuple[Any, str]]) -> tuple[int, int, int]:
    """A child that answers requests: its number, where to write them, where to read answers."""
    requests, ours = os.pipe()
    theirs, answers = os.pipe()
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    # Threads do not come along, and the library says so on stderr unless it is told.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        with warnings.catch_warnings():
            # Python warns of other threads. The child takes none of their locks: it tokenizes, and ends by _exit.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            _serve(load, requests, answers)
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before
    os.close(requests)
    os.close(answers)
    return pid, ours, theirs


def _end(owner: int, pid: int, *descriptors: int) -> int:
    """Let go of a child, which ends at once; its status."""
    if os.getpid() != owner:
        return 0
    for descriptor in descriptors:
        os.close(descriptor)
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _serve(load: Callable[[], tuple[Any, str]], requests: int, answers: int) -> Never:
    """Answer, in the child, until the parent is gone. Nothing is printed, nothing of the parent's is touched."""
    try:
        _let_go_of_all_but(requests, answers)
        # Ctrl-C reaches both; the parent decides. The timer's signal ends a process even within a library's loop.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        begun = _address_space()
        tokenizer: Any = None
        why_not = ""
        while True:
            (length,) = struct.unpack("<Q", _read(requests, 8))
            method, *arguments = json.loads(_read(requests, length))
            _limit(begun, length)
            try:
                if method == "facts":
                    tokenizer, why_not = load()
                    kind, answer = b"j", json.dumps([_facts(tokenizer), why_not]).encode()
                else:
                    kind, answer = _answer(tokenizer, method, arguments)
                if len(answer) > _longest(length):
                    raise MemoryError
            except MemoryError:
                kind, answer = (
                    b"e",
                    json.dumps(f"{_what(method)} needs more memory than it may have; {_ADVICE}").encode(),
                )
            except BaseException as error:
                # Its text may be as long as the text that it is about.
                given = "a picture" if method == "picture" else "a text"
                kind, answer = b"e", json.dumps(f"{_what(method)} fails on {given} ({first_line(error)})").encode()
            signal.setitimer(signal.ITIMER_PROF, 0)
            _write(answers, _HEAD.pack(kind, len(answer)) + answer)
    finally:
        os._exit(0)


def _let_go_of_all_but(*kept: int) -> None:
    """Point every other descriptor that the parent has open to nowhere.

    A pipe to another process, a lock or a socket would stay open as long as this child. Their numbers stay in use:
    objects of the parent that are collected here close them.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in {0, 1, 2, *(int(path.name) for path in Path("/dev/fd").iterdir())} - {nowhere, *kept}:
        with contextlib.suppress(OSError):
            os.dup2(nowhere, descriptor, inheritable=descriptor < 3)


def _address_space() -> int | None:
    """Bytes of this process's address space, where the system says."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    except (OSError, ValueError):
        return None


def _limit(begun: int | None, length: int) -> None:
    """Begin the time, and bound the memory, that one request of `length` characters may take."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS + length / _CHARACTERS_A_SECOND)
    if begun is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = begun + MEMORY + length * _MEMORY_A_CHARACTER
        resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _longest(length: int) -> int:
    """Bytes of the longest answer to a request of `length` characters."""
    return _LONGEST + length * _LONGEST_A_CHARACTER


def _facts(tokenizer: Any) -> dict[str, Any]:
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {
        "eos_token_id": getattr(tokenizer, "eos_token_id", None),
        "unk_token_id": getattr(tokenizer, "unk_token_id", None),
        "bos_token_id": getattr(tokenizer, "bos_token_id", None),
        "all_special_ids": list(getattr(tokenizer, "all_special_ids", ())),
        "is_fast": bool(getattr(tokenizer, "is_fast", False)),
        "chat_template": template,
        "control_tokens": [token.content for token in added.values() if token.special and token.content],
    }


def _answer(tokenizer: Any, method: str, arguments: list[Any]) -> tuple[bytes, bytes]:
    match method, arguments:
        case "ids", [text, special, as_text]:
            # verbose=False: a document may be longer than the context; it is cut later.
            found = tokenizer(text, add_special_tokens=special, split_special_tokens=as_text, verbose=False)
            return b"i", array("I", found["input_ids"]).tobytes()
        case "offsets", [text, special]:
            whole = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
            ids, places = whole["input_ids"], whole["offset_mapping"]
            return b"i", array("I", [*ids, *(begin for begin, _ in places), *(end for _, end in places)]).tobytes()
        case "example", [text, pair, most]:
            found = tokenizer(
                text, pair, truncation="longest_first", max_length=most, return_token_type_ids=True, verbose=False
            )
            return b"i", array("I", [*found["input_ids"], *found["token_type_ids"]]).tobytes()
        case "many", [texts]:
            backend = tokenizer.backend_tokenizer
            # A tokenizer.json may say how texts are cut and padded for a batch, which is not what they consist of.
            backend.no_truncation()
            backend.no_padding()
            encoded = backend.encode_batch(texts, add_special_tokens=False)
            return b"i", _joined([each.ids for each in encoded])
        case "words", [texts]:
            backend = tokenizer.backend_tokenizer
            added = _Added.of(backend)
            return b"j", json.dumps(Counter(word for text in texts for word in added.words(backend, text))).encode()
        case "cut", [texts]:
            return b"j", json.dumps([_words(tokenizer.backend_tokenizer, text) for text in texts]).encode()
        case "pieces", [words]:
            model = tokenizer.backend_tokenizer.model
            return b"i", _joined([[piece.id for piece in model.tokenize(word)] for word in words])
        case "vocabulary", []:
            return b"j", json.dumps(tokenizer.get_vocab()).encode()
        case "decode", [ids]:
            return b"j", json.dumps(tokenizer.decode(ids)).encode()
        case "picture", []:
            return b"t", safetensors.torch.save(with_picture(tokenizer))
        case "render", [turns, template, prompt, tools]:
            text = tokenizer.apply_chat_template(
                turns, tools=tools, tokenize=False, chat_template=template, add_generation_prompt=prompt
            )
            return b"j", json.dumps(text).encode()
    raise AssertionError(method)


def _write(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _read(descriptor: int, count: int) -> bytes:
    """Exactly `count` bytes. Raises EOFError's kin OSError where the other end is gone."""
    pieces = []
    while count:
        piece = os.read(descriptor, min(count, 1 << 20))
        if not piece:
            raise BrokenPipeError
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)
