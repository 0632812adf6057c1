"""Documents to tokens, and which tokens the loss is on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from surgeon.data.documents import Document, Message
from surgeon.errors import BadInput, printable
from surgeon.models.load import LOAD_FAILURES, first_line, quiet_transformers

# Characters that texts should not hold (Unicode's private use).
_BEGIN, _END = "\uf8e0", "\uf8e1"
_GENERATION = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")
Encoded = tuple[list[int], list[bool]]


class Encoder:
    """The tokenizer of a checkpoint. `vocabulary` is the model's: a token beyond it is refused."""

    def __init__(self, folder: Path, *, vocabulary: int) -> None:
        """Load the folder's tokenizer without running code of the folder. Raises BadInput where none can be loaded."""
        from transformers import AutoTokenizer

        self.folder = folder
        self.vocabulary = vocabulary
        try:
            with quiet_transformers():
                self.tokenizer: Any = AutoTokenizer.from_pretrained(
                    folder, trust_remote_code=False, local_files_only=True
                )
        except LOAD_FAILURES as error:
            raise BadInput(
                f"{printable(str(folder))}: no tokenizer that can be loaded ({first_line(error)}); texts need one"
            ) from None

    def check_chat(self) -> None:
        """Raise BadInput where the tokenizer has no chat template."""
        if not self.tokenizer.chat_template:
            raise BadInput(
                f"{printable(str(self.folder))}: its tokenizer has no chat template, which sources of the kind `chat`"
                " need; add chat_template.jinja, or use `kind: text`"
            )

    def encode(self, document: Document) -> Encoded:
        """Token ids, and for each whether the loss counts it. A text ends with the end-of-sequence token.

        Raises BadInput for a token beyond the model's vocabulary, and for a chat template that cannot be masked.
        """
        with quiet_transformers():
            ids, counted = self._text(document) if isinstance(document, str) else self._chat(document)
        if ids and max(ids) >= self.vocabulary:
            raise BadInput(
                f"{printable(str(self.folder))}: its tokenizer gives token {max(ids)}, but the model has only"
                f" {self.vocabulary} tokens; the tokenizer belongs to another model"
            )
        return ids, counted

    def _text(self, text: str) -> Encoded:
        # verbose=False: a document may be longer than the context; it is cut later.
        ids = list(self.tokenizer(text, verbose=False)["input_ids"])
        end = self.tokenizer.eos_token_id
        if end is not None and (not ids or ids[-1] != end):
            ids.append(end)
        return ids, [True] * len(ids)

    def _chat(self, messages: tuple[Message, ...]) -> Encoded:
        """The template's tokens; the loss is on what the assistant says, to the end of its turn."""
        turns = [{"role": message.role, "content": message.content} for message in messages]
        if _GENERATION.search(self.tokenizer.chat_template):
            return self._marked(turns)
        whole = self._templated(turns)
        counted = [False] * len(whole)
        for nth, turn in enumerate(turns):
            if turn["role"] != "assistant":
                continue
            before = self._templated(turns[:nth], prompt=True)
            upto = self._templated(turns[: nth + 1])
            if whole[: len(before)] != before or whole[: len(upto)] != upto:
                raise BadInput(
                    f"{printable(str(self.folder))}: its chat template changes earlier turns once later"
                    " ones follow, and has no `{% generation %}` blocks around the assistant's words; add them"
                )
            counted[len(before) : len(upto)] = [True] * (len(upto) - len(before))
        return whole, counted

    def _marked(self, turns: list[dict[str, str]]) -> Encoded:
        """Mask by the template's own `{% generation %}` blocks, whose ends are marked in the text and removed again.

        transformers' mask runs to the end of the chat where a block ends in a character that no token covers.
        """
        template = _GENERATION.sub(
            lambda tag: f"{{{{{tag[1]} '{_END if tag[2] else _BEGIN}' {tag[3]}}}}}", self.tokenizer.chat_template
        )
        marked = self.tokenizer.apply_chat_template(turns, tokenize=False, chat_template=template)
        spans: list[tuple[int, int]] = []
        text = ""
        for part in re.split(f"({_BEGIN}[^{_BEGIN}{_END}]*{_END})", marked):
            if part.startswith(_BEGIN):
                spans.append((len(text), len(text) + len(part) - 2))
                part = part[1:-1]
            text += part
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        counted = [
            any(begin < min(end, last) and first < end for first, last in spans)
            for begin, end in encoded["offset_mapping"]
        ]
        return list(encoded["input_ids"]), counted

    def _templated(self, turns: list[dict[str, str]], *, prompt: bool = False) -> list[int]:
        if not turns:
            return []
        text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt)
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
