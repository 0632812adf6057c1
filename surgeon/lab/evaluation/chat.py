"""`surgeon chat`: conversations with a model, and with its base beside it, each by its own chat template."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from surgeon import Checkpoint, EncodedPrompts, answer, encode_prompts, open_checkpoint
from surgeon.common import devices
from surgeon.common.listener import Listener
from surgeon.errors import BadInput, printable
from surgeon.lab.evaluation.evaluate import visible


@dataclass
class Speaker:
    """A loaded model in a conversation: the most `tokens` of an answer, the system's turn, and the turns so far.

    A model without a chat template continues the text of its turns. `encoded` is an encoding without prompts.
    """

    checkpoint: Checkpoint
    encoded: EncodedPrompts
    model: Any
    tokens: int
    system: str
    turns: list[Mapping[str, str]] = field(default_factory=list)

    @classmethod
    def load(
        cls, name: str, *, system: str, tokens: int, device: str, trust_remote_code: bool, listener: Listener
    ) -> Speaker:
        """Open and load a model.

        Raises BadInput where it cannot be loaded, predicts no next token, or lacks a tokenizer, or a chat template for
        the system's turn.
        """
        checkpoint = open_checkpoint(name, trust_remote_code=trust_remote_code)
        if checkpoint.is_encoder or checkpoint.is_classifier:
            raise BadInput(f"{printable(name)}: predicts no next token; chat with a causal language model")
        encoded = encode_prompts([], checkpoint)
        if not encoded.chat and system:
            raise BadInput(f"{printable(name)}: has no chat template, which --system needs; leave --system out")
        if not encoded.chat:
            listener.say(f"{name} has no chat template: it continues the text of the prompts")
        listener.say(f"loading {name}")
        model = checkpoint.load(device=devices.resolve(device), say=listener.say)
        return cls(checkpoint, encoded, model, tokens, system).begin()

    def begin(self) -> Speaker:
        """Forget all turns but the system's; return this speaker."""
        self.turns = [{"role": "system", "content": self.system}] if self.system else []
        return self

    def answer(self, prompt: str, show: Callable[[str], None]) -> None:
        """Answer a prompt after the turns so far; `show` receives the text as it is generated.

        SIGINT ends the answer. Raises BadInput, and forgets the prompt, where the context has no room for an answer.
        """
        encoded = encode_prompts(
            [prompt], self.checkpoint, tokens=self.tokens, before=self.turns, prompter=self.encoded.prompter
        )
        stream = _Stream(encoded, show)
        before = signal.signal(signal.SIGINT, stream.stop)
        try:
            [found] = answer(self.model, encoded, streamer=stream)
            text = stream.finish(found.text)
        except KeyboardInterrupt:
            text = stream.shown
        finally:
            signal.signal(signal.SIGINT, before)
        # Without a template the next prompt is a new line of the text.
        turns = {"user": prompt, "assistant": text if encoded.chat else f"{text}\n"}
        self.turns += [{"role": role, "content": content} for role, content in turns.items()]


class _Stream:
    """A receiver of generated tokens, which shows the text that they add."""

    def __init__(self, encoded: EncodedPrompts, show: Callable[[str], None]) -> None:
        self.encoded, self.show = encoded, show
        self.shown = ""
        self.ids: list[int] = []
        self.stopped = False

    def stop(self, *_: object) -> None:
        """Have the next token end the answer: an exception at once could leave a question to the tokenizer open."""
        self.stopped = True

    def put(self, value: Any) -> None:
        """Receive tokens, the prompt's first. Raises KeyboardInterrupt after `stop`."""
        if self.stopped:
            raise KeyboardInterrupt
        self.ids += value.flatten().tolist()
        answered = self.ids[len(self.encoded.ids[0]) :]
        self.finish(self.encoded.answer(0, answered, ended=False).text)

    def end(self) -> None:
        """Do nothing: `finish` shows what is left."""

    def finish(self, text: str) -> str:
        """Show what the text has beyond what was shown; return the text."""
        self.show(visible(text[len(self.shown) :]))
        self.shown = text
        return text
