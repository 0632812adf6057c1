"""How a plan's promise is known: proven on a twin now, proven before, or still to be proven by `apply`.

A proof is used again for the same config and tensors, the same plan and facts, the same versions and code of surgeon.
It is kept in the user's cache folder, so that only the first `apply` of a plan to models of a config takes the seconds
that torch and transformers need to start. Where plugins are installed nothing is kept.
"""

from __future__ import annotations

import datetime
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from surgeon.anatomy.anatomy_cache import found_with, versions
from surgeon.anatomy.compressed import cannot_be_loaded
from surgeon.blueprint.blueprint import Blueprint
from surgeon.common.cache import cache_folder, digest_of, read_entry, write_entry
from surgeon.common.plugins import any_installed
from surgeon.common.promises import CONDITION
from surgeon.grafts.bundle import bundle
from surgeon.operations.prepare import OpenedBase
from surgeon.writing.surgery import Drawing

# To be raised whenever proofs mean something else.
_FORMAT = 3
_KIND = "proofs"
_MOST = 1024
# The libraries that make and run a twin.
_LIBRARIES = ("transformers", "torch")

How = Literal["proven", "cached", "promised", "unproven", "none"]


@dataclass(frozen=True)
class Proof:
    """How a plan's promise is known to hold; `none` where it promises less than exactness.

    `seconds` is the time of a proof that is `proven` now, `day` the date of a `cached` one; `libraries` are the
    versions that it ran on. `why` says why transformers cannot load an `unproven` base for the comparison.
    """

    how: How
    seconds: float = 0.0
    day: datetime.date | None = None
    libraries: Mapping[str, str] = field(default_factory=dict)
    why: str = ""

    @property
    def text(self) -> str:
        """Describe the proof in words; empty where nothing is proven."""
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
        """Return plain data for `--json`."""
        return {"how": self.how, "text": self.text, "libraries": dict(self.libraries)}


NOTHING_TO_PROVE = Proof("none")


def promised(blueprint: Blueprint) -> Proof:
    """Return the proof of a blueprint before anything is run: `promised` where it is exact, else `none`."""
    return Proof("promised", libraries=_run_by()) if blueprint.promise == "exact" else NOTHING_TO_PROVE


def prove(drawn: Drawing, base: OpenedBase) -> Proof:
    """Prove on a twin that a plan keeps its promise, and that the shipped code has a place for every tensor.

    A proof for the same config, plan and versions is used again. A plan that promises nothing, takes no layer out and
    adds no graft needs no proof. Raises BadInput with the place where the twin of the output differs from the twin of
    the base.
    """
    blueprint, held = drawn.blueprint, Proof("none")
    promises = blueprint.promise != "none" or any(blueprint.dropped.values())
    promises = promises or any(record.claim.in_float32 for record in blueprint.operations)
    if promises and (why := cannot_be_loaded(base.folder.config, base.folder.tensors)):
        promises, held = False, Proof("unproven", why=why)
    if not promises and blueprint.native:
        return held
    folder, key = None if any_installed() else cache_folder(_KIND), _key(drawn, base)
    known = None if folder is None else read_entry(folder, key)
    seconds = _prove(drawn, base, promises=promises) if known is None else 0.0
    if known is None and folder is not None:
        write_entry(folder, key, datetime.date.today().isoformat().encode(), most=_MOST)
    if not promises or blueprint.promise != "exact":
        return held
    if known is None:
        return Proof("proven", seconds, libraries=_run_by())
    return Proof("cached", day=datetime.date.fromisoformat(known.decode()), libraries=_run_by())


def _prove(drawn: Drawing, base: OpenedBase, *, promises: bool) -> float:
    """Prove a plan now: on a twin where it `promises` something, and by its shipped code where it has grafts.

    Return the seconds of the proof on the twin.
    """
    # These import torch and transformers, which takes longer than the proof.
    from surgeon.writing.preflight import check_skeleton
    from surgeon.writing.small_run import prove_small

    began = time.perf_counter()
    if promises:
        prove_small(drawn, base)
    seconds = time.perf_counter() - began
    if not drawn.blueprint.native:
        check_skeleton(drawn.blueprint.config, drawn.blueprint.outputs)
    return seconds


def _run_by() -> dict[str, str]:
    """Return the versions of the libraries that make and run a twin."""
    found = versions()
    return {name: found[name] for name in _LIBRARIES}


def _key(drawn: Drawing, base: OpenedBase) -> str:
    """Return the key of a proof: config, plan and facts, the tensors' headers, libraries."""
    folder, blueprint = base.folder, drawn.blueprint
    tensors = sorted((info.name, info.dtype, info.shape) for info in folder.tensors.values())
    code = hashlib.sha256(bundle(blueprint.config)).hexdigest() if not blueprint.native else ""
    known = {str(number): found.model_dump(mode="json") for number, found in drawn.facts.items()}
    told = [dict(folder.config), code, tensors, drawn.plan.data(), known]
    return digest_of([_FORMAT, found_with(), *told])
