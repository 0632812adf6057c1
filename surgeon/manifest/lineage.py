"""The surgeries that an output went through: its earlier states, and where their tensors stand now.

A surgery is one applied plan. After S of them an output has states 0 (the first base) to S (itself); its manifest
holds what every state held, by digests.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surgeon.blueprint.draft import Blueprint, Output
from surgeon.blueprint.recipes import Copy
from surgeon.checkpoint.folder import MAX_CODE_BYTES, CheckpointFolder
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import dissect, renumbered
from surgeon.families.grafted import is_grafted
from surgeon.manifest.manifest import MANIFEST_FILE, Manifest, digest_of, layers_of, parse
from surgeon.runtime.bundle import CODE_FILE, bundle
from surgeon.runtime.known import native_of

_CODE_NAME = re.compile(r"[A-Za-z0-9_]{1,100}\.py")


@dataclass(frozen=True)
class Earlier:
    """State `number` of an output after `surgeries` surgeries.

    `places` maps that state's tensors to their names in the output, `digests` to what they held. `manifest` is that
    state's own (None for state 0), `undone` those of the surgeries after it, oldest first. `code` are the files of
    code that lie beside its weights.
    """

    number: int
    surgeries: int
    manifest: Manifest | None
    undone: tuple[Manifest, ...]
    places: Mapping[str, str]
    digests: Mapping[str, str]
    config: dict[str, Any]
    code: Mapping[str, bytes]

    def blueprint(self, out: CheckpointFolder) -> Blueprint:
        """Every tensor copied from the output to its name of then."""
        held = [(name, out.tensors[place]) for name, place in self.places.items()]
        return Blueprint(
            seed=0,
            outputs=tuple(Output(name, Copy(info.name, info.dtype, info.shape), False, None) for name, info in held),
            couplings={},
            layers=(),
            operations=(),
            config=self.config,
            code_files=tuple(self.code),
        )


def find_state(out: CheckpointFolder, last: Manifest, number: int | None) -> Earlier:
    """State `number` of an output whose manifest is `last` (None: the one before its last surgery), from headers.

    Raises BadInput where there is no such state, or the output no longer holds it as far as headers and digests tell.
    """
    surgeries = len(last.lineage) + 1
    if number is None:
        number = surgeries - 1
    if not 0 <= number < surgeries:
        has = "1 surgery" if surgeries == 1 else f"{surgeries} surgeries"
        raise BadInput(
            f"{printable(str(out.path))} has {has}; --to {number}: N must be"
            f" {'0' if surgeries == 1 else f'between 0 and {surgeries - 1}'}"
        )
    undone = tuple(manifest_after(each, out, last) for each in range(number + 1, surgeries + 1))
    kept = manifest_after(number, out, last) if number else None
    config = undone[0].base.config
    if config is None:
        raise _too_old(out, undone[0], f"the config.json that surgery {number + 1} found")
    places = _places(undone, number)
    for name, place in places.items():
        if place not in out.tensors:
            raise BadInput(
                f"{_shown(name, place)}: no shard of {printable(str(out.path))} has it; {_instead(undone[0])}"
            )
    dissect(config, {name: dataclasses.replace(out.tensors[place], name=name) for name, place in places.items()})
    return Earlier(
        number=number,
        surgeries=surgeries,
        manifest=kept,
        undone=undone,
        places=places,
        digests=undone[0].base.tensors,
        config=config,
        code=_code(config, kept, out),
    )


def manifest_after(number: int, out: CheckpointFolder, last: Manifest) -> Manifest:
    """The manifest of surgery `number`, counted from 1; an ancestor's is checked by the digest that is kept of it."""
    if number == len(last.lineage) + 1:
        return last
    entry = last.lineage[number - 1]
    if entry.manifest is None:
        raise _too_old(out, last, f"the manifest of surgery {number}")
    assert out.manifest is not None
    # As the ancestor's file had it: the data as it was read, no default filled in.
    data = entry.manifest | {"lineage": out.manifest["lineage"][: number - 1]}
    file = f"{out.path / MANIFEST_FILE} (surgery {number})"
    if digest_of(data) != entry.sha256:
        raise BadInput(
            f"{printable(file)}: not what its sha256 says, so it was edited since surgeon wrote it; use the file as it"
            " was"
        )
    return parse(data, file=file)


def _places(undone: Sequence[Manifest], number: int) -> dict[str, str]:
    """Where the tensors before the first of these surgeries stand after the last."""
    found = undone[0].base.tensors
    places = {name: name for name in found}
    for nth, manifest in enumerate(undone, number + 1):
        layers = layers_of(manifest, file=f"{MANIFEST_FILE} (surgery {nth})")
        for name, place in places.items():
            digest = manifest.base.tensors.get(place)
            if digest != found[name]:
                how = "gone" if digest is None else "trained or edited"
                raise BadInput(
                    f"{_shown(name, place)}: {how} when surgery {nth} began, so what surgery {number + 1} found there"
                    f" is lost; {_instead(undone[0])}"
                )
            try:
                places[name] = renumbered(place, layers)
            except KeyError:
                raise BadInput(
                    f"{MANIFEST_FILE}: surgery {nth} found {printable(place)}, yet only {len(layers)} layers; was it"
                    " edited by hand?"
                ) from None
            made = manifest.new_tensors.get(places[name])
            # One that only trains on begins as what it was; whether it still is that its bytes will tell.
            if made is not None and made.recipe != {"copy": place}:
                raise BadInput(
                    f"{_shown(name, places[name])}: surgery {nth} ({_operation(manifest, made.operation)}) gave it"
                    f" another value, so what stood there is lost; {_instead(manifest)}"
                )
    return places


def _code(config: Mapping[str, Any], kept: Manifest | None, out: CheckpointFolder) -> dict[str, bytes]:
    """Files of code beside a grafted state's weights; this version's, or the output's own where those were kept."""
    if not is_grafted(config):
        return {}
    known = kept.code if kept else {}
    found: dict[str, bytes] = {}
    for name in known or (CODE_FILE,):
        if _CODE_NAME.fullmatch(name) is None:
            raise BadInput(f"{MANIFEST_FILE}: code of the name {printable(name)}; was it edited by hand?")
        content = _same(known.get(name), out.read_code(name), _shipped(name, config))
        if content is None or len(content) > MAX_CODE_BYTES:
            tool = kept.tool.version if kept else "(unknown)"
            raise BadInput(
                f"{printable(name)}: neither beside the weights nor in this version is the file that surgeon"
                f" {printable(tool)} put there; use that version"
            )
        found[name] = content
    return found


def _same(digest: str | None, *candidates: bytes | None) -> bytes | None:
    """The first content with this digest; of no known digest, the last candidate."""
    if digest is None:
        return candidates[-1]
    return next((c for c in candidates if c is not None and hashlib.sha256(c).hexdigest() == digest), None)


def _shipped(name: str, config: Mapping[str, Any]) -> bytes | None:
    return bundle(config) if name == CODE_FILE and native_of(config) is not None else None


def _shown(name: str, place: str) -> str:
    return printable(place) if name == place else f"{printable(place)} (then {printable(name)})"


def _operation(manifest: Manifest, number: int) -> str:
    return printable(manifest.operations[number].op) if 0 <= number < len(manifest.operations) else "unknown operation"


def _instead(manifest: Manifest) -> str:
    revision = f"@{manifest.base.revision}" if manifest.base.revision else ""
    return f"take the base of that surgery itself ({printable(manifest.base.id + revision)})"


def _too_old(out: CheckpointFolder, manifest: Manifest, what: str) -> BadInput:
    return BadInput(
        f"{printable(str(out.path / MANIFEST_FILE))}: does not hold {what}, since an older surgeon"
        f" ({printable(manifest.tool.version)}) wrote it; {_instead(manifest)}, or apply the plan again with this one"
    )
