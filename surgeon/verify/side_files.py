"""What lies beside an output's weights and would change what a loader makes of it."""

from __future__ import annotations

from collections.abc import Iterable

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.trust import strays
from surgeon.errors import printable
from surgeon.verify.check import Check


def check_beside(out: CheckpointFolder, more: Iterable[str] = ()) -> Check:
    """Whether loaders find nothing in the folder that surgeon never writes: adapters, other weights, `generate`.

    `more` are files that surgeon does write, and did not write here.
    """
    found = strays(out.source.listing(), out.shards)
    wrong = [f"{printable(name)} ({does})" for name, does in found.items()]
    wrong += [printable(name) for name in more if name not in found]
    kept = "nothing that a loader would take for a part of the model"
    return Check.of("beside the weights", wrong, "not an output's", kept)
