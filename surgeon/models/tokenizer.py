"""A checkpoint's tokenizer, chat template and processor, in a separate process with limits of time and memory.

A base brings them, and they are programs (`surgeon.common.child`). So is the code that makes pixels of a picture, whose
settings may ask for any size.

A model that reads images is compared on a prompt with a picture, as its processor prepares it. The picture is drawn
here, the same everywhere: gradients, waves, a disc and a frame, so that no two patches are equal.
"""

from __future__ import annotations

import base64
import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from surgeon.common.child import Child, Failed, Limited
from surgeon.common.library import LOAD_FAILURES, quiet_transformers
from surgeon.errors import BadInput, printable
from surgeon.models.load import find_processor, find_tokenizer
from surgeon.models.view import PROCESSOR_FILES, TOKENIZER_FILES

_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")


class Tokenizer:
    """The tokenizer or processor of a folder, which `load` loads in the child process.

    `why_not` is the reason if there is none. Every method raises BadInput, in one line that names the file, where a
    limit was reached, the process ended, or the template or tokenizer rejects its input.
    """

    def __init__(self, folder: Path, load: Callable[[Path], tuple[Any, str]]) -> None:
        self.folder = folder
        self._child = Child(lambda: partial(_answer, *load(folder)))
        facts, self.why_not = self._ask("facts")
        self.eos_token_id: int | None = facts["eos_token_id"]
        self.unk_token_id: int | None = facts["unk_token_id"]
        self.bos_token_id: int | None = facts["bos_token_id"]
        self.all_special_ids: list[int] = facts["all_special_ids"]
        self.is_fast: bool = facts["is_fast"]
        self.chat_template: str | None = facts["chat_template"]
        self._control_tokens: set[str] = {*facts["control_tokens"]}

    def control_tokens(self, text: str) -> Counter[str]:
        """Count the control tokens that occur in a text."""
        lengths = sorted({len(token) for token in self._control_tokens}, reverse=True)
        found: Counter[str] = Counter()
        for first in {token[0] for token in self._control_tokens}:
            for rest in text.split(first)[1:]:
                ahead = (first + rest[: length - 1] for length in lengths)
                found.update([token for token in ahead if token in self._control_tokens][:1])
        return found

    def ids(self, text: str, *, special: bool = True, as_text: bool = False) -> list[int]:
        """Return the tokens of a text; with `special`, including those that the tokenizer adds at beginning and end.

        With `as_text` control tokens that occur in the text are tokenised like other text.
        """
        found: list[int] = self._ask("ids", text, special, as_text and bool(self.control_tokens(text)))
        return found

    def offsets(self, text: str, *, special: bool = True) -> tuple[list[int], list[tuple[int, int]]]:
        """Return (tokens of a text, (begin, end) of the characters that each covers). Only where `is_fast`."""
        ids, places = self._ask("offsets", text, special)
        return ids, [(begin, end) for begin, end in places]

    def example(self, text: str, pair: str | None, most: int) -> tuple[list[int], list[int]]:
        """Return (tokens of a text or of a pair, the number of the text to which each token belongs: 0 or 1).

        The tokenizer joins a pair and adds its special tokens. There are at most `most` tokens; the longer text is
        truncated first.
        """
        ids, types = self._ask("example", text, pair, most)
        return ids, types

    def many(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of many texts, without those that the tokenizer adds. Only where `is_fast`."""
        found: list[list[int]] = self._ask("many", list(texts))
        return found

    def words(self, texts: Sequence[str]) -> dict[str, int]:
        """Count the pieces into which texts are split before the tokenizer's model, as its vocabulary writes them.

        Only where `is_fast`.
        """
        found: dict[str, int] = self._ask("words", list(texts))
        return found

    def cut(self, texts: Sequence[str]) -> list[list[str]]:
        """Split each text into pieces as before the tokenizer's model, written as in `words`. Only where `is_fast`."""
        found: list[list[str]] = self._ask("cut", list(texts))
        return found

    def pieces(self, words: Sequence[str]) -> list[list[int]]:
        """Return the tokens that the tokenizer's model makes of words as `words` returns them. Only where `is_fast`."""
        found: list[list[int]] = self._ask("pieces", list(words))
        return found

    def vocabulary(self) -> dict[str, int]:
        """Return every token as the vocabulary writes it, added tokens included, with its id."""
        found: dict[str, int] = self._ask("vocabulary")
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens."""
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
        """Write a chat with the chat template.

        Args:
            turns: its messages.
            template: None: the tokenizer's own.
            prompt: whether to end with the beginning of an answer.
            tools: those that the assistant may call, each as a JSON schema.
        """
        found: str = self._ask("render", list(turns), template or self.chat_template, prompt, list(tools) or None)
        return found

    def with_picture(self) -> dict[str, Tensor]:
        """Return a model's inputs for a prompt with a picture. Only for a processor."""
        found: dict[str, Tensor] = safetensors.torch.load(base64.b64decode(self._ask("picture")))
        return found

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Return the child process's answer. Raises BadInput naming the file where a limit is reached or it fails."""
        # The file to name in the error of a method.
        names = {"render": _TEMPLATE_FILES, "picture": PROCESSOR_FILES}.get(method, TOKENIZER_FILES)
        name = next((name for name in names if (self.folder / name).is_file()), names[-1])
        what = {"render": "its chat template", "facts": "loading the tokenizer", "picture": "the processor"}
        where = f"{printable(str(self.folder / name))}: {what.get(method, 'the tokenizer')}"
        try:
            return self._child.ask(method, *arguments)
        except Limited as error:
            raise BadInput(f"{where} {error}; {_ADVICE}") from None
        except Failed as error:
            given = "a picture" if method == "picture" else "a text"
            raise BadInput(f"{where} fails on {given} ({error})") from None


_ADVICE = "no honest one does that: look at the file, or take the original model's"


def open_tokenizer(folder: Path) -> tuple[Tokenizer | None, str]:
    """Return (tokenizer, "") for `folder`, or (None, the reason in words). Never runs code from the folder.

    Raises BadInput for one that reaches a limit while it is loaded.
    """
    # Imported here, so that child processes do not have to import them (1 to 3 seconds each): configurations are
    # checked against the names of activations.
    import transformers.activations
    import transformers.models.auto.tokenization_auto
    import transformers.tokenization_utils_tokenizers  # noqa: F401

    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None, "there is no tokenizer in the folder"
    found = Tokenizer(folder, find_tokenizer)
    return (None, found.why_not) if found.why_not else (found, "")


def open_processor(folder: Path) -> tuple[Tokenizer | None, str]:
    """Return (processor of images and text, "") for `folder`, or (None, the reason in words).

    Never runs the folder's code. Raises BadInput for one that reaches a limit while it is loaded.
    """
    # Imported here, so that child processes do not have to import it.
    import transformers.models.auto.processing_auto  # noqa: F401

    found = Tokenizer(folder, find_processor)
    return (None, found.why_not) if found.why_not else (found, "")


# A word as SentencePiece writes it, with the mark ▁ for the white space before it.
_MARKED = re.compile("▁*[^▁]+|▁+")


def _words(backend: Any, text: str) -> list[str]:
    """Return the pieces that a fast tokenizer's model gets; where nothing splits a text, its words by their marks."""
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    cut = [text] if backend.pre_tokenizer is None else [w for w, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    return [word for whole in cut for word in (_MARKED.findall(whole) if "▁" in whole[1:] else [whole])]


_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class _Added:
    """The added tokens of a tokenizer by content; texts are split at them before any other processing.

    `first` matches their first characters; `lengths` are their lengths, the longest first.
    """

    tokens: dict[str, Any]
    first: re.Pattern[str] | None
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, backend: Any) -> _Added:
        """Return the added tokens of a fast tokenizer's backend."""
        tokens = {token.content: token for token in backend.get_added_tokens_decoder().values() if token.content}
        first = "".join(re.escape(each) for each in sorted({content[0] for content in tokens}))
        lengths = sorted({len(content) for content in tokens}, reverse=True)
        return cls(tokens, re.compile(f"[{first}]") if first else None, tuple(lengths))

    def words(self, backend: Any, text: str) -> Iterator[str]:
        """Yield the words of a text between added tokens."""
        for nth, part in enumerate(self._parts(text)):
            words = _words(backend, part) if part else []
            yield from words
            if nth and words and words[0].startswith("▁") and not part[0].isspace() and len(words[0]) > 1:
                # Some tokenizers put a mark only before the first part, others before every part.
                yield words[0][1:]

    def _parts(self, text: str) -> list[str]:
        """Split a text at added tokens; return the parts between them, without the spaces that they strip."""
        found: list[str] = []
        # `begin`: where the present part starts; `at`: from where the next added token is looked for. `first` finds
        # characters with which one may start, and `lengths` are descending, so that the longest one counts.
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


def _facts(tokenizer: Any) -> dict[str, Any]:
    """Return what `Tokenizer` keeps of a tokenizer: special ids, template, control tokens, whether it is fast."""
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


def _answer(tokenizer: Any, why_not: str, method: str, *arguments: Any) -> Any:
    """Return the answer of a loaded tokenizer, or of a processor, to a method of `Tokenizer`; runs in the child."""
    match method, arguments:
        case "facts", []:
            return _facts(tokenizer), why_not
        case "ids", [text, special, as_text]:
            # verbose=False: a document may be longer than the context; it is cut later.
            found = tokenizer(text, add_special_tokens=special, split_special_tokens=as_text, verbose=False)
            return found["input_ids"]
        case "offsets", [text, special]:
            whole = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
            return whole["input_ids"], whole["offset_mapping"]
        case "example", [text, pair, most]:
            found = tokenizer(
                text, pair, truncation="longest_first", max_length=most, return_token_type_ids=True, verbose=False
            )
            return found["input_ids"], found["token_type_ids"]
        case "many", [texts]:
            backend = tokenizer.backend_tokenizer
            # A tokenizer.json may define truncation and padding for a batch, which would change the tokens of a text.
            backend.no_truncation()
            backend.no_padding()
            return [each.ids for each in backend.encode_batch(texts, add_special_tokens=False)]
        case "words", [texts]:
            backend = tokenizer.backend_tokenizer
            added = _Added.of(backend)
            return Counter(word for text in texts for word in added.words(backend, text))
        case "cut", [texts]:
            return [_words(tokenizer.backend_tokenizer, text) for text in texts]
        case "pieces", [words]:
            model = tokenizer.backend_tokenizer.model
            return [[piece.id for piece in model.tokenize(word)] for word in words]
        case "vocabulary", []:
            return tokenizer.get_vocab()
        case "decode", [ids]:
            return tokenizer.decode(ids)
        case "picture", []:
            return base64.b64encode(safetensors.torch.save(with_picture(tokenizer))).decode()
        case "render", [turns, template, prompt, tools]:
            return tokenizer.apply_chat_template(
                turns, tools=tools, tokenize=False, chat_template=template, add_generation_prompt=prompt
            )
    raise AssertionError(method)


_QUESTION = "what is in this picture, and which colours does it have?"
# Height and width where the processor names none, and their maximum: a setting may ask for any size.
_SIZE = (224, 320)
_LARGEST = 1024


def drawn(height: int, width: int) -> Any:
    """Draw the picture, in RGB. Raises ImportError where Pillow is not installed."""
    from PIL import Image

    rows, columns = np.mgrid[0:height, 0:width].astype(np.float64)
    down, across = rows / height, columns / width
    red, green, blue = 255 * across, 255 * down, 127.5 + 127.5 * np.sin((rows + 2 * columns) / 7)
    disc = (down - 0.4) ** 2 + (across - 0.6) ** 2 < 0.05
    frame = (abs(down - 0.5) > 0.45) | (abs(across - 0.5) > 0.46)
    pixels = np.stack([np.where(disc, 250, red), np.where(disc, 220, green), np.where(frame, 20, blue)], axis=-1)
    return Image.fromarray(pixels.astype(np.uint8))


def with_picture(processor: Any) -> dict[str, Tensor]:
    """Return a model's inputs for one prompt with the picture: ids, pixels, and other outputs of the processor.

    Raises the processor's exception where it rejects every form of such a prompt.
    """
    # This runs in a forked process, which has no other torch threads.
    torch.set_num_threads(1)
    picture = drawn(*_wanted(processor))
    failure: BaseException = ValueError("it makes no pixels of a picture")
    with quiet_transformers():
        for number, text in enumerate(_prompts(processor)):
            try:
                made = processor(images=[picture], text=[text], return_tensors="pt")
            except LOAD_FAILURES as error:
                # The first form is the one that the processor was made for.
                failure = error if number == 0 else failure
                continue
            inputs = {name: value for name, value in made.items() if isinstance(value, Tensor)}
            if any(value.is_floating_point() for value in inputs.values()) and _has_placeholder(processor, inputs):
                return {name: value.contiguous() for name, value in inputs.items()}
    raise failure


def _wanted(processor: Any) -> tuple[int, int]:
    """Return the (height, width) that the processor makes of any picture; `_SIZE` where it states none."""
    size = getattr(processor.image_processor, "size", None)
    found = [size[key] for key in ("height", "width") if key in size] if isinstance(size, Mapping) else []
    if len(found) != 2 or not all(type(each) is int and 0 < each <= _LARGEST for each in found):
        return _SIZE
    return found[0], found[1]


def _prompts(processor: Any) -> Iterator[str]:
    """Yield texts to try in turn: the chat template's, the question after a placeholder, only the question."""
    if getattr(processor, "chat_template", None):
        content = [{"type": "image"}, {"type": "text", "text": _QUESTION}]
        rendered = None
        # A template may be made only for texts, and fail.
        with contextlib.suppress(*LOAD_FAILURES):
            rendered = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        if isinstance(rendered, str):
            yield rendered
    for name in ("boi_token", "image_token"):
        if isinstance(token := getattr(processor, name, None), str):
            yield f"{token}{_QUESTION}"
    yield _QUESTION


def _has_placeholder(processor: Any, inputs: Mapping[str, Tensor]) -> bool:
    """Return whether the prompt has a token that the image replaces; True where the processor names no such tokens."""
    tokens = [token for token in getattr(processor, "image_token_ids", None) or () if isinstance(token, int)]
    return not tokens or bool(torch.isin(inputs["input_ids"], torch.tensor(tokens)).any())
