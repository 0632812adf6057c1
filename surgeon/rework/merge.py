"""`surgeon merge`: merge each of Control LLM's pairs of branches into one layer, and measure the cost."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType

from surgeon.checkpoint.peft_folder import ADAPTER_CONFIG, AdapterFolder
from surgeon.common.json_results import plain_fields
from surgeon.common.listener import Listener
from surgeon.errors import BadInput, printable
from surgeon.plan.plan import LoadedPlan, parse_plan
from surgeon.verification.verification import Verification, verification_view
from surgeon.verification.verify import verify
from surgeon.writing.apply import Applied, applied_view, apply


@dataclass(frozen=True)
class Merged:
    """A finished merge: what was written, and a comparison of the merged model with the model with branches.

    For a merged adapter nothing is measured.
    """

    applied: Applied
    measured: Verification | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`.

        Keys:
            `applied`: the keys of `apply`
            `measured`: the keys of `verify`: the merged model against the one with branches; null for an adapter
        """
        return plain_fields(self)


def merge(
    out: str | Path,
    dest: str | Path,
    merged: str | Path | None = None,
    *,
    alpha: float | None = None,
    text: Path | None = None,
    window: int = 128,
    windows: int = 8,
    device: str = "auto",
    link: bool = False,
    listener: Listener | None = None,
) -> Merged:
    """Merge each control block of `out` into one layer, write the model to the new folder `dest`, and measure the cost.

    The method is Control LLM's Lerp8MSE0*M (Table 5): weights are interpolated by `alpha` (None: the α used at
    inference). This does not preserve the function, so both models are run on real tokens, as in `verify`. With `link`,
    unchanged shards are hard-linked and become read-only (`apply`). With `merged`, this merges an adapter instead, and
    measures nothing: `out` is a base, `dest` a PEFT adapter (a folder, or a Hub id), and `merged` is the new folder.
    Raises BadInput where an option does not fit the kind of merge, and as `apply` and `verify` do.
    """
    if merged is None and (Path(dest) / ADAPTER_CONFIG).is_file():
        raise BadInput(
            f"{printable(str(dest))}: a PEFT adapter; name the new folder behind it: surgeon merge BASE ADAPTER MERGED"
        )
    unfit = [option for option, given in (("--alpha", alpha), ("--text", text)) if given is not None]
    if merged is not None and unfit:
        raise BadInput(
            f"{' and '.join(unfit)}: for control blocks (surgeon merge OUT DEST); leave out where an adapter is"
            " merged: surgeon merge BASE ADAPTER MERGED"
        )
    if merged is not None:
        if Path(dest).exists():
            AdapterFolder.open(Path(dest), id="")
        plan = _plan("merge", {"op": "merge_adapter", "from": str(dest)})
        return Merged(apply(plan, str(out), merged, device=device, link=link, listener=listener))
    plan = _plan(str(out), {"op": "merge_branches"} | ({} if alpha is None else {"alpha": alpha}))
    applied = apply(plan, str(out), dest, device=device, link=link, listener=listener)
    return Merged(
        applied, verify(out, dest, text=text, window=window, windows=windows, device=device, listener=listener)
    )


def _plan(source: str, operation: Mapping[str, Any]) -> LoadedPlan:
    """Return a plan that the user did not write: errors name `source` instead of a file, and no line."""
    plan = {"surgeon": 1, "operations": [operation]}
    return replace(parse_plan(json.dumps(plan), source=source), lines={})


def merged_view(merged: Merged) -> RenderableType:
    """Return what was written, and what merging cost."""
    measured = [] if merged.measured is None else [verification_view(merged.measured)]
    return Group(applied_view(merged.applied), *measured)
