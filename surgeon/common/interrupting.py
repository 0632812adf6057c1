"""Handling of SIGINT and SIGTERM: both raise KeyboardInterrupt, in a way that shows that a signal raised it.

A plugin can raise KeyboardInterrupt too, and that is the plugin's error.
"""

from __future__ import annotations

import signal
from typing import NoReturn


def interrupt(_signal: int, _frame: object) -> NoReturn:
    """Raise KeyboardInterrupt; this is the signal handler."""
    raise KeyboardInterrupt


def is_interruption(error: BaseException) -> bool:
    """Return whether a signal raised the error; where SIGINT has another handler, every KeyboardInterrupt counts."""
    if not isinstance(error, KeyboardInterrupt):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    by_us = trace is not None and trace.tb_frame.f_code is interrupt.__code__
    return by_us or signal.getsignal(signal.SIGINT) is not interrupt
