"""Which files beside the weights an output takes over from its base: an allow-list, nothing that can run."""

from __future__ import annotations

import re

MAX_SIDE_FILE_BYTES = 64_000_000

_EXACT = frozenset(
    {
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "vocab.txt",
        "chat_template.json",
        "chat_template.jinja",
        "preprocessor_config.json",
        "processor_config.json",
    }
)
# Plain names only: a letter, digit or underscore first, so nothing hidden. `*.model` are sentencepiece tokenizers.
_PATTERN = re.compile(
    r"[A-Za-z0-9_][A-Za-z0-9_.+-]*\.(model|tiktoken)"
    r"|(LICENSE|LICENCE|NOTICE|USE_POLICY)[A-Za-z0-9_-]*(\.md|\.txt)?"
    r"|additional_chat_templates/[A-Za-z0-9_][A-Za-z0-9_.-]*\.jinja"
)
TEMPLATES_FOLDER = "additional_chat_templates"


def is_side_file(name: str) -> bool:
    """Whether a file of this name (relative to the checkpoint's folder, `/` between parts) is carried along."""
    return name in _EXACT or _PATTERN.fullmatch(name) is not None
