"""The digests of `modeling_surgeon.py` by graft and model type: shipped-files.md."""

from __future__ import annotations

import hashlib

from surgeon._version import __version__
from surgeon.grafts.bundle import bundle
from surgeon.grafts.registry import GRAFTS
from surgeon.operations import OPERATIONS
from tests import tiny
from tests.runtime.grafting import alone, control, everything, joining, states

SHIPPED_HEAD = f"""\
# Shipped files

Outputs with grafts hold `modeling_surgeon.py`: the classes of transformers, with the grafts beside them.
Its bytes follow from `model_type`, `anatomy` and the grafts in `surgery` of config.json, and from surgeon's version.
It has the modules that these grafts need, whole.
`surgeon verify` compares them, and says whose file it is.

These are the files of surgeon {__version__} with one graft, and with all of them.
`control` is made by `control_llm`; of it each interpolator is a file of its own, and here it is `lerp`.
To compare one with your output: `sha256sum OUT/modeling_surgeon.py`.
To make the one that belongs to an output, for any type and any set of grafts:

```text
python - OUT/config.json <<'END' | sha256sum
import json, sys
from surgeon.grafts.bundle import bundle
sys.stdout.buffer.write(bundle(json.load(open(sys.argv[1]))))
END
```

`python -m tests.reference_pages` writes this page, and a test compares the two.

"""


def shipped_files_page() -> str:
    """What ships with each graft: lines and sha256, by model type."""
    surgeries = alone() | {"control": control("lerp"), "all together": everything()}
    parts = [SHIPPED_HEAD + _of_grafts()]
    for name, surgery in surgeries.items():
        families = [*tiny.FAMILIES, *(tiny.ENCODERS if name == "states" else ())]
        rows = [_row(family, states() if family in tiny.ENCODERS else surgery) for family in families]
        parts.append(f"## {name}\n\n| model type | lines | sha256 |\n|---|---:|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _of_grafts() -> str:
    """Which operations make which graft."""
    graft_of = {kind.key: name for name, rules in GRAFTS.items() for kind in rules.kinds}
    made: dict[str, list[str]] = {name: [] for name in GRAFTS}
    for op, operation in OPERATIONS.items():
        for name in dict.fromkeys(graft_of[key] for key in operation.grafts):
            made[name].append(f"`{op}`")
    rows = "\n".join(f"| [{name}](#{name}) | {', '.join(ops)} |" for name, ops in made.items())
    return f"| graft | operations |\n|---|---|\n{rows}\n"


def _row(family: str, surgery: object) -> str:
    content = bundle(joining(family, surgery))
    return f"| {family} | {len(content.splitlines()):,} | `{hashlib.sha256(content).hexdigest()}` |"
