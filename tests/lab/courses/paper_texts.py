"""A tiny base and texts for the tasks files of papers."""

from __future__ import annotations

import json
import re
from pathlib import Path

from surgeon.errors import BadInput
from surgeon.lab.courses.config.loading import load_tasks
from surgeon.plan.shipped import text_of
from tests import tiny
from tests.training.texts import CHAT_TEMPLATE, add_tokenizer, corpus, text


def base(room: Path) -> Path:
    """A tiny Llama of so many layers that every plan fits, with a chat template."""
    made = tiny.checkpoint(room / "base", "llama", num_hidden_layers=8, hidden_size=16)
    add_tokenizer(made, template=CHAT_TEMPLATE)
    return made


def lacking(name: str) -> list[str]:
    """The names of a shipped file's sources that have no path, as its refusal has them."""
    try:
        load_tasks(name)
    except BadInput as refused:
        lines = str(refused).splitlines()
    told = [re.search(r"\.yaml:\d+: source (\S+) has no `path`; add one, or --text \1=FILE$", line) for line in lines]
    assert all(told)
    return [found[1] for found in told if found]


def tasks_of(name: str) -> list[str]:
    """The tasks of a shipped file."""
    loaded = next(iter(load_tasks(name, texts=dict.fromkeys(lacking(name), "x")).values()))
    return [task.name for task in loaded.config.tasks]


def texts(room: Path, name: str) -> dict[str, Path | None]:
    """A file for each source of a shipped file that has no path."""
    written = text_of(name)
    given: dict[str, Path | None] = {}
    for number, source in enumerate(lacking(name)):
        file = given[source] = room / f"{source}.jsonl"
        if not re.search(rf"name: {source}(\n    sources: \[\{{|, )kind: chat", written):
            corpus(file, seed=number + 1, first=10 * number, count=8, documents=20)
            continue
        turns = [[("user", text(5, n)), ("assistant", text(3, n + 50))] for n in range(20)]
        chats = [{"messages": [{"role": role, "content": said} for role, said in each]} for each in turns]
        file.write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")
    return given
