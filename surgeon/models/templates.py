"""Chat templates by name, for bases that have none; a base's own template is found without loading its tokenizer.

Each writes turns as the models known for it do. None changes an earlier turn when later ones follow, so the loss mask
needs no `{% generation %}` blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.peft_folder import AdapterFolder
from surgeon.checkpoint.strict_json import json_object
from surgeon.errors import printable

TEMPLATE_FILE = "chat_template.jinja"
_FILES = (TEMPLATE_FILE, "chat_template.json")
_SETTINGS = "tokenizer_config.json"

TemplateName = Literal["chatml", "llama3", "gemma", "mistral", "phi3", "zephyr", "alpaca"]

# Gemma and Mistral have no role `system`: its text comes before the first user's text.
_SYSTEM_FIRST = (
    "{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\\n\\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set first = '' %}{% set turns = messages %}{% endif %}"
)

TEMPLATES: dict[TemplateName, str] = {
    "chatml": (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for message in messages %}"
        "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
        " + message['content'] | trim + '<|eot_id|>' }}"
        "{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
    ),
    "gemma": (
        "{{ bos_token }}" + _SYSTEM_FIRST + "{% for message in turns %}"
        "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n'"
        " + (first if loop.first else '') + message['content'] | trim + '<end_of_turn>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
    ),
    "mistral": (
        "{{ bos_token }}" + _SYSTEM_FIRST + "{% for message in turns %}{% if message['role'] == 'assistant' %}"
        "{{ ' ' + message['content'] | trim + eos_token }}{% else %}"
        "{{ '[INST] ' + (first if loop.first else '') + message['content'] | trim + ' [/INST]' }}"
        "{% endif %}{% endfor %}"
    ),
    "phi3": (
        "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
    ),
    "zephyr": (
        "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
    ),
    "alpaca": (
        "{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}"
        "{% elif message['role'] == 'assistant' %}{{ '### Response:\\n' + message['content'] + eos_token + '\\n\\n' }}"
        "{% else %}{{ '### Instruction:\\n' + message['content'] + '\\n\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}"
    ),
}

# The marks of each template that are single tokens in its models.
MARKS: dict[TemplateName, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "mistral": ("[INST]", "[/INST]"),
    "phi3": ("<|user|>", "<|assistant|>", "<|end|>"),
    "zephyr": (),
    "alpaca": (),
}


# Templates whose turns end with the tokenizer's end of sequence; turns of the others end with the last of their marks.
_ENDED_BY_TOKENIZER: tuple[TemplateName, ...] = ("mistral", "zephyr", "alpaca")


def unknown_marks(name: TemplateName, unknown: Sequence[str]) -> str:
    """Return the note on the marks of template `name` that a tokenizer splits into several tokens."""
    note = f"chat_template {name}: {', '.join(unknown)} are no tokens of this tokenizer, so each takes several"
    if name not in _ENDED_BY_TOKENIZER and MARKS[name][-1] in unknown:
        ways = "`alpaca`, `zephyr` or `mistral`, whose turns end with the tokenizer's end of sequence"
        note += f", and generation cannot stop at {unknown[-1]} by eos_token_id; it stops by itself with {ways}"
    return note


def no_template(folder: Path) -> str:
    """Return the error for chats where nothing defines how they are written."""
    return (
        f"{printable(str(folder))}: its tokenizer has no chat template, which chats need; add"
        " chat_template.jinja, say `chat_template: chatml` (or another one's name) in the training config, or use"
        " `kind: text`"
    )


def template_of(folder: CheckpointFolder | AdapterFolder) -> str | None:
    """Return the chat template (of several, the first) in a folder's files; None where there is none."""
    if TEMPLATE_FILE in folder.side_files:
        return folder.read_side_file(TEMPLATE_FILE).decode("utf-8", "replace")
    for name in (*_FILES[1:], _SETTINGS):
        if name not in folder.side_files:
            continue
        found = json_object(folder.read_side_file(name)).get("chat_template")
        if isinstance(found, list):
            found = next((one.get("template") for one in found if isinstance(one, dict)), None)
        if found:
            return str(found)
    return None
