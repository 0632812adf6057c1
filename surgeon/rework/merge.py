"""`surgeon merge`: fold Control LLM's branches back into one layer each, and measure what that costs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType

from surgeon.apply.apply import Applied, applied_view, apply
from surgeon.checkpoint.peft_folder import ADAPTER_CONFIG, check_adapter_files
from surgeon.checkpoint.source import LocalSource
from surgeon.common.json_results import plain_fields
from surgeon.common.listener import Listener
from surgeon.errors import BadInput, printable
from surgeon.plan.plan import LoadedPlan, parse_plan
from surgeon.verify.verification import Verification, verification_view
from surgeon.verify.verify import verify


@dataclass(frozen=True)
class Merged:
    """A finished merge: what was written, and what the merged model does beside the one with branches."""

    applied: Applied
    measured: Verification

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`.

        Keys:
            `applied`: the keys of `apply`
            `measured`: the keys of `verify`: the merged model against the one with branches
        """
        return plain_fields(self)


def merge(
    out: str | Path,
    dest: str | Path,
    *,
    alpha: float | None = None,
    text: Path | None = None,
    window: int = 128,
    windows: int = 8,
    device: str = "auto",
    link: bool = False,
    listener: Listener | None = None,
) -> Merged:
    """Fold the control blocks of `out` back into one layer each, into the new folder `dest`, and measure the cost.

    Control LLM's Lerp8MSE0*M (Table 5): weights are interpolated by `alpha` (None: the α used at inference). That does
    not preserve the function, so both models are run on real tokens, as in `verify`. With `link` shards that
    stay as they are get hard-linked and become read-only (`apply`). Raises BadInput.
    """
    merged = apply(_merging(alpha, str(out)), str(out), dest, device=device, link=link, listener=listener)
    return Merged(
        merged, verify(out, dest, text=text, window=window, windows=windows, device=device, listener=listener)
    )


def merging_adapter(adapter: Path, merged: Path | None, of_branches: Sequence[str]) -> LoadedPlan | None:
    """The plan that merges an adapter; None where branches are meant, as the second of two folders is new then.

    Raises BadInput, before anything is read but names of files, where the folders are not what their places ask for.
    """
    there = (adapter / ADAPTER_CONFIG).is_file()
    if merged is None:
        if there:
            raise BadInput(f"{printable(str(adapter))}: an adapter; say where the merged model goes, behind it")
        return None
    if of_branches:
        raise BadInput(f"--{of_branches[0]} is for control blocks, and an adapter is merged here; leave it out")
    if adapter.exists():
        source = LocalSource(adapter)
        check_adapter_files(source.listing(), source.shown, source.tree())
    plan = {"surgeon": 1, "operations": [{"op": "merge_adapter", "from": str(adapter)}]}
    return replace(parse_plan(json.dumps(plan), source="merge"), lines={})


def _merging(alpha: float | None, out: str) -> LoadedPlan:
    """The plan, which the user never wrote: errors name the model in its place, and no line."""
    share = "" if alpha is None else f"\n    alpha: {alpha!r}"
    loaded = parse_plan(f"surgeon: 1\noperations:\n  - op: merge_branches{share}\n")
    return replace(loaded, source=out, lines={})


def merged_view(merged: Merged) -> RenderableType:
    """What was written, and what merging cost."""
    return Group(applied_view(merged.applied), verification_view(merged.measured))
