"""Remedies, which keep a model near its base while it learns: one file each.

`blend` is applied after training. It is no part of a run, but a command of its own.
"""

from __future__ import annotations

from surgeon.training.remedies.fisher import Fisher
from surgeon.training.remedies.gate import Gate
from surgeon.training.remedies.kl import Kl
from surgeon.training.remedies.recall import Recall
from surgeon.training.run import Remedy

# In the order in which a run calls them and messages show them.
REMEDIES: tuple[type[Remedy], ...] = (Recall, Gate, Kl, Fisher)
