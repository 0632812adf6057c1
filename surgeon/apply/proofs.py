"""What is known of a plan's promise: proven on a twin now, proven before, or still to be proven by `apply`.

A proof counts again for the same config, the same plan as far as a twin shows it, the same versions and code of
surgeon and plugins. It is kept in the user's folder for caches, so that only the first `apply` of a plan to models of a
config takes the seconds that torch and transformers need to start.
"""

from __future__ import annotations

import datetime
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ConfigDict, ValidationError

from surgeon.apply.surgery import Drawing
from surgeon.blueprint.blueprint import Blueprint
from surgeon.checkpoint.strict_json import parse_json_strict
from surgeon.common.cache import MAX_ENTRY_BYTES, cache_folder, read_entry, write_entry
from surgeon.common.promises import CONDITION
from surgeon.common.schema import Bounded
from surgeon.errors import BadInput
from surgeon.families.anatomy_cache import digest_of, found_with, versions
from surgeon.families.compressed import cannot_be_loaded
from surgeon.operations.prepare import OpenedBase
from surgeon.runtime.bundle import bundle

# Raised whenever entries mean something else.
_FORMAT = 2
_KIND = "proofs"
_MOST = 1024
# What a twin is made and run by.
_LIBRARIES = ("transformers", "torch")

How = Literal["proven", "cached", "promised", "unproven", "none"]


class _Entry(Bounded):
    """One proof that held."""

    model_config = ConfigDict(strict=False)

    key: str
    day: datetime.date


@dataclass(frozen=True)
class Proof:
    """How the promise of a plan is known to hold; `none` where it promises less than exactness, so no twin is run.

    `seconds` is what the proof took where it was `proven` now, `day` when it was where it is `cached`; `libraries` are
    the versions that it ran on. `why` transformers cannot load an `unproven` base, to compare with.
    """

    how: How
    seconds: float = 0.0
    day: datetime.date | None = None
    libraries: Mapping[str, str] = field(default_factory=dict)
    why: str = ""

    @property
    def text(self) -> str:
        """In words; empty where nothing is proven."""
        shown = ", ".join(f"{name} {version}" for name, version in self.libraries.items())
        match self.how:
            case "proven":
                known = f"proven on a twin ({self.seconds:.1f} s)"
            case "cached":
                known = f"proven on a twin of this config before (cached {self.day}; {shown})"
            case "promised":
                known = "promised; apply proves it on a twin before it writes"
            case "unproven":
                return f"not proven: {self.why}"
            case _:
                return ""
        return f"{known}, {CONDITION}"

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`."""
        return {"how": self.how, "text": self.text, "libraries": dict(self.libraries)}


NOTHING_TO_PROVE = Proof("none")


def promised(blueprint: Blueprint) -> Proof:
    """What is known of a blueprint's promise where nobody has looked."""
    return Proof("promised", libraries=_run_by()) if blueprint.promise == "exact" else NOTHING_TO_PROVE


def known_proof(drawn: Drawing, base: OpenedBase) -> Proof:
    """What the cache knows of the promise of a plan on this base."""
    if (unproven := promised(drawn.blueprint)).how == "none":
        return unproven
    folder = cache_folder(_KIND)
    key = _key(drawn, base) if folder is not None else ""
    content = read_entry(folder, f"{key}.json") if folder is not None else None
    if content is None:
        return unproven
    try:
        entry = _Entry.model_validate(parse_json_strict(content, file=key, max_bytes=MAX_ENTRY_BYTES))
    except (BadInput, ValidationError):
        return unproven
    return Proof("cached" if entry.key == key else "promised", day=entry.day, libraries=_run_by())


def prove(drawn: Drawing, base: OpenedBase) -> Proof:
    """Prove on a twin that a plan keeps what it promises, and keep that in the cache where it promises exactness.

    A plan that promises nothing, and takes no layer out, waits for no proof. Raises BadInput, which says where the twin
    of the output differs from that of the base.
    """
    blueprint = drawn.blueprint
    asks = any(record.claim.in_float32 for record in blueprint.operations) or any(blueprint.dropped.values())
    if blueprint.promise == "none" and not asks:
        return NOTHING_TO_PROVE
    if why := cannot_be_loaded(base.folder.config, base.folder.tensors):
        return Proof("unproven", why=why)
    # Imports torch and transformers, which take longer than the proof.
    from surgeon.apply.small_run import prove_small

    began = time.perf_counter()
    prove_small(drawn, base)
    if blueprint.promise != "exact":
        return NOTHING_TO_PROVE
    if (folder := cache_folder(_KIND)) is not None:
        entry = _Entry(key=_key(drawn, base), day=datetime.date.today())
        write_entry(folder, f"{entry.key}.json", entry.model_dump_json().encode(), most=_MOST)
    return Proof("proven", time.perf_counter() - began, libraries=_run_by())


def _run_by() -> dict[str, str]:
    found = versions()
    return {name: found[name] for name in _LIBRARIES}


def _key(drawn: Drawing, base: OpenedBase) -> str:
    """What a proof follows from: config, plan and what was found for it, names and dtypes of tensors, libraries."""
    folder, blueprint = base.folder, drawn.blueprint
    tensors = sorted((info.name, info.dtype) for info in folder.tensors.values())
    code = hashlib.sha256(bundle(blueprint.config)).hexdigest() if not blueprint.native else ""
    known = {str(number): found.model_dump(mode="json") for number, found in drawn.facts.items()}
    told = [dict(folder.config), code, tensors, drawn.plan.data(), known]
    return digest_of([_FORMAT, found_with(), *told])
