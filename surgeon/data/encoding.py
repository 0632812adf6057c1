"""Documents to tokens, and which tokens the loss is on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

from surgeon.data.chats import Chat
from surgeon.data.layouts import Document, Labelled
from surgeon.data.masking import Encoded, Written
from surgeon.data.specs import RowsSpec
from surgeon.errors import BadInput, printable
from surgeon.models.templates import no_template
from surgeon.models.tokenizer import open_tokenizer
from surgeon.models.tokens import check_ids


class Encoder:
    """The tokenizer of a checkpoint. `vocabulary` is the model's: a token beyond it is refused.

    `template` is how chats are written: the one that was given, else the checkpoint's own (None: it has none).
    `as_text`: control tokens that stand in a text are read as any other text.
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
        self.as_text = True

    def of(self, spec: RowsSpec, template: str | None = None) -> Encoder:
        """Return an encoder of a source's documents; `template` writes chats where there is no other."""
        other = copy.copy(self)
        other.template, other.as_text = self.template or template, spec.as_text
        return other

    @property
    def write(self) -> Callable[[Chat], Encoded] | None:
        """What writes chats, and raises BadInput for one that the template refuses; None without a template."""
        return self._chat if self.template else None

    def check_chat(self) -> None:
        """Raise BadInput where there is no chat template."""
        if not self.template:
            raise BadInput(no_template(self.folder))

    def encode(self, document: Document) -> Encoded:
        """Return token ids, and for each whether the loss counts it. A text ends with the end-of-sequence token.

        Raises BadInput for a token that is no row of the embedding, for a chat template that cannot be masked or
        refuses the chat, and where template or tokenizer reach a limit of time or memory.
        """
        assert not isinstance(document, Labelled), "an ExampleEncoder's"
        ids, counted = self._text(document) if isinstance(document, str) else self._chat(document)
        check_ids(ids, self.tokenizer, rows=self.vocabulary)
        return ids, counted

    def _text(self, text: str) -> Encoded:
        ids = self._ended(self.tokenizer.ids(text, as_text=self.as_text))
        return ids, [True] * len(ids)

    def _ended(self, ids: list[int]) -> list[int]:
        end = self.tokenizer.eos_token_id
        return [*ids, end] if end is not None and (not ids or ids[-1] != end) else ids

    def _chat(self, chat: Chat) -> Encoded:
        """Return the template's tokens; the loss is on what the assistant says, to the end of its turn.

        A template that writes nothing behind the last answer (GLM-4's) would not teach where to stop: there the
        end-of-sequence token stands and counts, as behind a text.
        """
        self.check_chat()
        assert self.template is not None
        written = Written(self.tokenizer, self.template, chat)
        found = written.counted()
        if found is not None:
            ids, counted = found
            last = chat.messages[-1]
            if last.answers and last.content.strip() and written.text.rstrip().endswith(last.content.rstrip()):
                ids = self._ended(ids)
            return ids, [*counted, *[True] * (len(ids) - len(counted))]
        shown = printable(str(self.folder))
        if written.has_blocks:
            raise BadInput(
                f"{shown}: its chat template's `{{% generation %}}` blocks are not one for each answer, so that those"
                " which do not count (`weight`, `train`) are not known; leave these chats out"
            )
        raise BadInput(
            f"{shown}: its chat template changes earlier turns once later ones follow, so that the assistant's words"
            " are not found in what it writes; put `{% generation %}` blocks around them"
        )
