"""The marks of a user's turns: found in what each template writes, and only where control tokens show them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from surgeon.data.encoding import Encoder
from surgeon.data.turns import Turns
from surgeon.models.templates import MARKS, TEMPLATES, TemplateName

CONTROLS = [token for name in TEMPLATES for token in MARKS[name]]
WORDS = ["<unk>", "<s>", "</s>", "user", "assistant", "system", "model", *CONTROLS]


def encoder(folder: Path, template: str | None) -> Encoder:
    """Words of one token each; roles are words, the marks of all templates are control tokens."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=CONTROLS,
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    return Encoder(folder, vocabulary=len(WORDS))


@pytest.mark.parametrize(
    ("name", "marks"),
    [
        ("chatml", [("<|im_start|>", "user"), (None, "<|im_end|>"), ("<|im_start|>", "assistant")]),
        ("llama3", [("user", "<|end_header_id|>"), (None, "<|eot_id|>"), ("assistant", "<|end_header_id|>")]),
        ("gemma", [("<start_of_turn>", "user"), (None, "<end_of_turn>"), ("<start_of_turn>", "model")]),
        ("mistral", [(None, "[INST]"), (None, "[/INST]"), (None, "[/INST]")]),
        ("phi3", [(None, "<|user|>"), (None, "<|end|>"), (None, "<|assistant|>")]),
    ],
)
def test_the_marks_of_each_template(tmp_path: Path, name: TemplateName, marks: list[tuple[str | None, str]]) -> None:
    found = Turns.of(encoder(tmp_path, TEMPLATES[name]))
    assert found is not None
    ids = [(-1 if before is None else WORDS.index(before), WORDS.index(token)) for before, token in marks]
    assert [*found.marks] == ids
    # A turn between these ids is one that the marks find.
    turn = [*found.before, WORDS.index("system"), *found.after]
    places = [
        [at for at, token in enumerate(turn) if token == mark and before in (-1, turn[at - 1])] for before, mark in ids
    ]
    begin, word, end, answer = places[0][-1], len(found.before), places[1][-1], places[2][-1]
    assert begin < word < end <= answer
    assert {token for token in turn if WORDS[token] in CONTROLS} <= found.controls


@pytest.mark.parametrize("template", [None, TEMPLATES["alpaca"], "{{ raise_exception('no') }}"])
def test_where_no_control_token_shows_turns_there_are_none(tmp_path: Path, template: str | None) -> None:
    assert Turns.of(encoder(tmp_path, template)) is None
