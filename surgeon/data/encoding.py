"""Documents to tokens, and which tokens the loss is on."""

from __future__ import annotations

import re
from pathlib import Path

from surgeon.data.layouts import Document, Labelled, Message
from surgeon.errors import BadInput, printable
from surgeon.models.templates import no_template
from surgeon.models.tokenizer import open_tokenizer
from surgeon.models.tokens import check_ids

# Characters that texts should not hold (Unicode's private use).
_BEGIN, _END = "\uf8e0", "\uf8e1"
_GENERATION = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")
Encoded = tuple[list[int], list[bool]]


class Encoder:
    """The tokenizer of a checkpoint. `vocabulary` is the model's: a token beyond it is refused.

    `template` is how chats are written: the one that was given, else the checkpoint's own (None: it has none).
    """

    def __init__(self, folder: Path, *, vocabulary: int, template: str | None = None) -> None:
        """Load the folder's tokenizer without running code of the folder. Raises BadInput where none can be loaded."""
        self.folder = folder
        self.vocabulary = vocabulary
        found, why_not = open_tokenizer(folder)
        if found is None:
            raise BadInput(
                f"{printable(str(folder))}: no tokenizer that can be loaded ({why_not}); texts need one: copy the"
                " model's own tokenizer files here"
            )
        self.tokenizer = found
        self.template = template or found.chat_template

    def check_chat(self) -> None:
        """Raise BadInput where there is no chat template."""
        if not self.template:
            raise BadInput(no_template(self.folder))

    def encode(self, document: Document) -> Encoded:
        """Token ids, and for each whether the loss counts it. A text ends with the end-of-sequence token.

        Raises BadInput for a token that is no row of the embedding, for a chat template that cannot be masked or
        refuses the chat, and where template or tokenizer reach a limit of time or memory.
        """
        assert not isinstance(document, Labelled), "an ExampleEncoder's"
        ids, counted = self._text(document) if isinstance(document, str) else self._chat(document)
        check_ids(ids, self.tokenizer, rows=self.vocabulary)
        return ids, counted

    def _text(self, text: str) -> Encoded:
        ids = self.tokenizer.ids(text)
        end = self.tokenizer.eos_token_id
        if end is not None and (not ids or ids[-1] != end):
            ids.append(end)
        return ids, [True] * len(ids)

    def _chat(self, messages: tuple[Message, ...]) -> Encoded:
        """The template's tokens; the loss is on what the assistant says, to the end of its turn."""
        turns = [{"role": message.role, "content": message.content} for message in messages]
        template = self.template
        assert template is not None, "check_chat was not asked"
        if _GENERATION.search(template):
            return self._marked(turns, template)
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

    def _marked(self, turns: list[dict[str, str]], template: str) -> Encoded:
        """Mask by the template's own `{% generation %}` blocks, whose ends are marked in the text and removed again.

        transformers' mask runs to the end of the chat where a block ends in a character that no token covers.
        """
        template = _GENERATION.sub(lambda tag: f"{{{{{tag[1]} '{_END if tag[2] else _BEGIN}' {tag[3]}}}}}", template)
        marked = self.tokenizer.render(turns, template=template)
        spans: list[tuple[int, int]] = []
        text = ""
        for part in re.split(f"({_BEGIN}[^{_BEGIN}{_END}]*{_END})", marked):
            if part.startswith(_BEGIN):
                spans.append((len(text), len(text) + len(part) - 2))
                part = part[1:-1]
            text += part
        ids, offsets = self.tokenizer.offsets(text, special=False)
        counted = [any(begin < min(end, last) and first < end for first, last in spans) for begin, end in offsets]
        return ids, counted

    def _templated(self, turns: list[dict[str, str]], *, prompt: bool = False) -> list[int]:
        if not turns:
            return []
        return self.tokenizer.ids(self.tokenizer.render(turns, template=self.template, prompt=prompt), special=False)
