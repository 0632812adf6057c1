"""Trackers of a run, by the names that transformers gives them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import INTEGRATION_TO_CALLBACK

from surgeon.errors import BadInput, printable


def open_trackers(names: Sequence[str], *, target: Path, config: str) -> list[TrainerCallback]:
    """The trackers' callbacks, by the names that transformers gives them; `config` is the file that asks for them.

    Raises BadInput for a name that transformers does not know, and for a library that is not installed; so does a
    tracker that cannot begin (no login, say).
    """
    opened = []
    for name in names:
        where = f"{printable(config)}: report_to: {printable(name)}"
        if name not in INTEGRATION_TO_CALLBACK:
            close = difflib.get_close_matches(name, INTEGRATION_TO_CALLBACK, n=1)
            hint = f"did you mean `{close[0]}`?" if close else f"it knows {', '.join(sorted(INTEGRATION_TO_CALLBACK))}"
            raise BadInput(f"{where}: no tracker that transformers knows; {hint}")
        try:
            callback = INTEGRATION_TO_CALLBACK[name]()
        except (RuntimeError, ImportError) as error:
            raise BadInput(f"{where}: {_line(error)}") from None
        if name == "tensorboard" and callback.logging_dir is None:
            # transformers' own place is in the work folder, which goes when the run is published.
            callback.logging_dir = str(target.with_name(f"{target.name}-tensorboard"))
        opened.append(_begun(callback, where))
    return opened


def _begun(callback: Any, where: str) -> TrainerCallback:
    """The callback, whose trouble at the start is the user's to mend and not a bug."""
    begin = callback.on_train_begin

    def on_train_begin(*arguments: Any, **named: Any) -> Any:
        try:
            return begin(*arguments, **named)
        except Exception as error:
            raise BadInput(f"{where}: cannot begin ({type(error).__name__}: {_line(error)})") from error

    callback.on_train_begin = on_train_begin
    return callback


def _line(error: Exception) -> str:
    return printable(" ".join(str(error).split()), 500)
