"""The page of `--json`, from the docstrings of the results' `to_json`: json.md."""

from __future__ import annotations

import inspect
import re

from surgeon.cli.entries import ENTRIES
from surgeon.common.json_results import Result
from surgeon.data.recall import Recalled
from surgeon.lab.courses.results import Continued, ContinuedRows
from surgeon.lab.evaluation.blend import Blended
from surgeon.lab.evaluation.results import Evaluation
from surgeon.lab.learning.learn import Learned
from surgeon.lab.reports.families import Families, KnownBase
from surgeon.lab.reports.inspect import Inspection
from surgeon.lab.reports.report import Reported
from surgeon.lab.reports.routing_record import RoutingReport
from surgeon.lab.reports.transport import TransportReport
from surgeon.lab.studies.compare import Compared
from surgeon.lab.studies.findings import Findings
from surgeon.rework.apply_delta import AppliedDelta
from surgeon.rework.make_delta import MadeDelta
from surgeon.rework.merge import Merged
from surgeon.rework.refresh import Refreshed
from surgeon.rework.revert import Reverted
from surgeon.share.export_slot import Exported
from surgeon.share.gguf import WrittenGguf
from surgeon.share.push import Pushed
from surgeon.training.dry_run import Rehearsal
from surgeon.training.publishing import Trained
from surgeon.training.remedies.blend import Blend
from surgeon.verification.diff import Difference
from surgeon.verification.verification import Verification
from surgeon.writing.apply import Applied
from surgeon.writing.preview import Preview

HEAD = """\
# What --json prints

Each command prints one JSON object on stdout; in Python it is a result's `to_json()`.
`surgeon plans --json` prints a list of plans, and with a name the text of that plan.

- Sizes are in bytes, losses in nats a token, times in seconds.
- A number that is not finite is a text (`"inf"`, `"nan"`); what does not apply is null.
- Later versions may add keys; they rename or drop one only as [versions](versions.md) says.

```sh
surgeon preview llama-pro base-model --json
surgeon apply llama-pro base-model out --json
surgeon inspect out --json
surgeon families base-model --json
surgeon plans --json
```

`python -m tests.reference_pages` writes what follows from the docstrings, and tests compare it with real results.
"""

# By the function's name: what stands before each table, and the results whose keys are in it.
SECTIONS: dict[str, dict[str, tuple[type[Result], ...]]] = {
    "preview": {"": (Preview,)},
    "apply": {"All keys of [preview](#preview), and:": (Applied,)},
    "verify": {"": (Verification,)},
    "learn": {"": (Learned,)},
    "train": {"": (Trained,)},
    "rehearse": {"`surgeon train --dry-run`.": (Rehearsal,)},
    "recall": {"": (Recalled,)},
    "evaluate": {"": (Evaluation,)},
    "compare": {"": (Compared, Findings)},
    "continual": {"": (Continued,), "Of a tasks file with `rows`:": (ContinuedRows,)},
    "inspect": {"": (Inspection,)},
    "families": {"": (Families,), "With BASE:": (KnownBase,)},
    "diff": {"": (Difference,)},
    "report": {"": (Reported,)},
    "transport_report": {"": (TransportReport,)},
    "routing_report": {"Also the record that `--to` writes.": (RoutingReport,)},
    "revert": {"": (Reverted,)},
    "refresh": {"": (Refreshed,)},
    "merge": {"": (Merged,)},
    "blend": {"": (Blended,)},
    "write_blend": {"": (Blend,)},
    "make_delta": {"`surgeon delta`.": (MadeDelta,)},
    "apply_delta": {"`surgeon apply --delta`.": (AppliedDelta,)},
    "export_slot": {"": (Exported,)},
    "write_gguf": {"`surgeon gguf`.": (WrittenGguf,)},
    "push": {"": (Pushed,)},
}


def json_page() -> str:
    """A table of keys for each command, by its function's name."""
    assert {entry.function for entry in ENTRIES.values()} - {""} <= set(SECTIONS)
    parts = [HEAD]
    for function, tables in SECTIONS.items():
        parts.append(f"## {function}\n")
        for before, results in tables.items():
            rows = [row for result in results for row in _rows(result)]
            parts += [f"{before}\n"] * bool(before) + ["\n".join(["| key | |", "|---|---|", *rows]) + "\n"]
    return "\n".join(parts)


def _rows(result: type[Result]) -> list[str]:
    """The list `Keys:` of a docstring: an entry begins with its keys in backticks."""
    _, _, listed = (inspect.getdoc(result.to_json) or "").partition("\n\nKeys:\n")
    entries = re.split(r"\n(?=    `)", listed)
    cells = [" ".join(entry.split()).partition(": ") for entry in entries]
    assert all(re.fullmatch(r"`\w+`(, `\w+`)*", keys) and text for keys, _, text in cells), result
    return [f"| {keys} | {text} |" for keys, _, text in cells]
