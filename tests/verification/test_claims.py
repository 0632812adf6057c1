"""Every field of `surgery.json` edited once: alone, which its seal shows, and sealed anew, which the base shows.

The fields are those of the manifests that are found here, so that a new one is tried as soon as it is written.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from surgeon.checkpoint.folder import CheckpointFolder, digests_of
from surgeon.common.listener import Quiet
from surgeon.errors import BadInput
from surgeon.manifest.lineage import Lineage
from surgeon.manifest.manifest import Manifest
from surgeon.manifest.reading import parse
from surgeon.operations import OPERATIONS
from surgeon.verification import earlier, static
from surgeon.verification.verify import static_proof
from tests.manifest.edits import resealed
from tests.verification.outputs import Made

# What neither plan nor base nor bytes show, so that an edit of it, sealed anew, stands. None of it says what the
# output is made of: the name and version of who wrote it, how the base was called, what was measured on the way.
UNSEEN: dict[str, str] = {
    r"base\.(id|revision)": "how the base was called: the base is compared by what it holds",
    r"surgeon_manifest": "3.0 where 3 is meant",
    r"tool\.version": "a note names it, where it is not this version's",
    r"transport_maps\.\*(\..*)?": "what a solver reports of itself; the maps are those that the plan asks for",
    r"merged\.\*\.(change|nearest|kept|guided)": "what a merge reports of its rounding, an entry a tensor",
    r"facts\.0\.adapters\.\*\.facts\.(id|revision)": "how a merged adapter was called",
    r"facts\.0\.adapters\.\*\.facts\.tensors\.\*\.sha256": "a merged adapter's file is not at hand",
    r"proven(\..*)?": "the libraries by which apply proved the promise; verify proves it itself",
    r"facts\.0\.(id|revision)": "how the adapter was called",
    r"facts\.0\.(adapters\.\*\.facts\.)?alpha_pattern": "a pattern that no module of the adapter has",
    r"facts\.0\.tensors\.\*\.sha256": "the adapter's file is not at hand; what was imported is compared",
    r"models\.\*\.(id|sha256)": "how another model was called, and a digest of it; what was taken of it is compared",
    r"facts\.0\.texts(\..*)?": "what a change of the vocabulary measured of texts, which verify is not given",
    r"facts\.0\.text\.(sha256|scores)(\..*)?": "what was measured on a text, which verify is not given",
    r"training": "the same run, said twice",
    r"training\.\*\.(tool|config|settings|steps|tokens|losses|curves)(\..*)?": "what a run reports of itself",
    r"training\.\*\.tensors\.\*": "a tensor that trained and did not change, so that it is what it was at birth",
    r"training\.\*\.tensors\.\*\.(max_change|relative_change)": "what a run reports of itself",
    r"new_tensors\.\*\.sha256": "of a computed tensor that was trained since: its value at birth is gone",
    r"sha256": "the seal itself, which was computed anew",
}

Path_ = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class Opened:
    """Base and output, opened once; manifests are put beside the output's weights in memory."""

    base: CheckpointFolder
    out: CheckpointFolder

    @classmethod
    def of(cls, made: Made) -> Opened:
        return cls(CheckpointFolder.open(made.base), CheckpointFolder.open(made.out))

    def manifest(self) -> dict[str, Any]:
        return copy.deepcopy(self.out.manifest or {})

    def found(self, manifest: dict[str, Any]) -> bool:
        """Whether static verification refuses the output with this manifest, or says that a promise does not hold."""
        out = dataclasses.replace(self.out, manifest=manifest)
        try:
            return not all(check.holds for check in static_proof(self.base, out, Quiet()).checks)
        except BadInput:
            return True


@pytest.fixture
def _digests_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and plans do not change here: each is read once."""
    monkeypatch.setattr(static, "recorded_plan", functools.cache(static.recorded_plan))
    known = functools.cache(lambda folder: digests_of(CheckpointFolder.open(folder), _names(folder), lambda _: None))
    for module in (static, earlier):
        monkeypatch.setattr(module, "digests_of", lambda folder, _names, advance: dict(known(folder.path)))


def _names(folder: Path) -> list[str]:
    return list(CheckpointFolder.open(folder).tensors)


def places(value: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Every key, item and leaf of JSON data."""
    if path:
        yield path, value
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, held in below:
        yield from places(held, (*path, key))


def field_of(path: Path_) -> str:
    """The field that stands at a path: without numbers, names of tensors and files, and keys of configs."""
    steps = ["*" if isinstance(step, int) or re.search(r"[./-]", step) else step for step in path]
    at = next((number for number, step in enumerate(steps) if step in ("config", "settings")), len(steps))
    return ".".join(steps[: at + 1] + ["*"] * min(1, len(steps[at + 1 :])))


def edits(value: Any) -> Iterator[Any]:
    """Other values for a place: another leaf; a container with more in it, or nothing."""
    match value:
        case bool():
            yield not value
            yield int(value)
        case int() | float():
            yield value + 1
            yield float(value) if isinstance(value, int) else str(value)
        case str() if re.fullmatch("[0-9a-f]{64}", value):
            yield ("1" if value[0] == "0" else "0") + value[1:]
        case "new" | "all":
            yield "all" if value == "new" else "new"
        case "exact" | "rounding" | "none":
            yield "none" if value == "exact" else "exact"
        case str():
            yield f"{value}x"
        case None:
            yield 1
            yield "x"
        case dict():
            yield {**value, "more.of-it": copy.deepcopy(next(iter(value.values()), 1.5))}
            if value:
                yield {}
        case list():
            yield [*value, copy.deepcopy(value[-1]) if value else 1]
            if value:
                yield []


DELETE = object()


def edited(manifest: dict[str, Any], path: Path_, value: Any) -> dict[str, Any]:
    """A copy of the manifest with another value at a path, or without what stands there."""
    # Only what stands on the way to the edit is copied.
    changed: Any = dict(manifest)
    here = changed
    for step in path[:-1]:
        here[step] = copy.copy(here[step])
        here = here[step]
    if value is DELETE:
        del here[path[-1]]
    else:
        here[path[-1]] = value
    return cast("dict[str, Any]", changed)


def cases(
    manifest: dict[str, Any], seen: set[str], *, once: Collection[str] = ()
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field that was not seen yet, edited in every way; in one way what stands under a key of `once`."""
    for path, value in places(manifest):
        field = field_of(path)
        if field in seen:
            continue
        seen.add(field)
        for other in [*edits(value), DELETE][: 1 if path[0] in once else None]:
            yield field, edited(manifest, path, other)


def test_every_operation_is_among_the_outputs(outputs: dict[str, Made]) -> None:
    done: set[str] = set()
    for each in outputs.values():
        manifest = parse(CheckpointFolder.open(each.out).manifest, file="surgery.json")
        done |= {entry.op for surgery in (*manifest.lineage, manifest) for entry in surgery.operations}
    assert done == set(OPERATIONS)
    assert len(parse(Opened.of(outputs["three"]).manifest(), file="").lineage) == 2
    assert Opened.of(outputs["three"]).manifest()["training"]


@pytest.mark.usefixtures("_digests_once")
def test_every_output_verifies_and_a_field_edited_alone_does_not_even_parse(outputs: dict[str, Made]) -> None:
    seen: set[str] = set()
    for each in outputs.values():
        opened = Opened.of(each)
        assert not opened.found(opened.manifest())
        for field, manifest in cases(opened.manifest(), seen):
            with pytest.raises(BadInput, match=r"surgery\.json"):
                parse(manifest, file="surgery.json")
                pytest.fail(f"{field}: an edit passes unseen")


@pytest.mark.usefixtures("_digests_once")
def test_a_field_that_is_edited_and_sealed_anew_is_found_against_the_base(outputs: dict[str, Made]) -> None:
    used: set[str] = set()
    missed: list[str] = []
    seen: dict[bool, set[str]] = {True: set(), False: set()}
    for name, each in outputs.items():
        opened = Opened.of(each)
        # Against an earlier state it is another proof, so every field is tried anew, in one way, as fields are compared
        # by the same function; against the last base the lineage is compared as a whole.
        earlier = "first" in name
        whole = opened.manifest()
        for field, manifest in cases(whole, seen[earlier], once=whole.keys() if earlier else ["lineage"]):
            try:
                sealed = resealed(manifest)
            except (KeyError, TypeError, AttributeError, IndexError):
                continue  # no manifest any more: the test before has it
            if opened.found(sealed):
                continue
            # Of surgeries between an earlier state and the last, verify knows what it knows of the last.
            of_surgery = field.removeprefix("lineage.*.") if earlier else field
            of_surgery = "sha256" if field == "lineage.*.sha256" else of_surgery
            why = next((pattern for pattern in UNSEEN if re.fullmatch(pattern, of_surgery)), None)
            used.add(why or "")
            if why is None:
                missed.append(f"{name}: {field}")
    assert not missed, "\n".join(missed)
    assert used - {""} == UNSEEN.keys(), "reasons that nothing needs any more"


def test_the_digest_of_a_state_covers_all_that_revert_writes(outputs: dict[str, Made]) -> None:
    """Without a base nothing shows an edit that was sealed anew; with `--base-digest` nothing of the state escapes."""
    manifest = Opened.of(outputs["three"]).manifest()
    for number in range(3):
        state = manifest if number == 2 else manifest["lineage"][number]
        at: Path_ = () if number == 2 else ("lineage", number)
        digest = lineage_of(manifest).since(number)[0].base_digest
        for part in ("config", "tensors", "files"):
            fields: set[str] = set()
            for path, value in places(state["base"][part], (*at, "base", part)):
                if field_of(path) in fields:
                    continue
                fields.add(field_of(path))
                for other in edits(value):
                    changed = resealed(edited(manifest, path, other))
                    try:
                        assert lineage_of(changed).since(number)[0].base_digest != digest, path
                    except BadInput:
                        continue
        for before in range(number):
            changed = resealed(edited(manifest, ("lineage", before, "plan"), "surgeon: 1"))
            assert lineage_of(changed).since(number)[0].base_digest != digest


def lineage_of(manifest: dict[str, Any]) -> Lineage:
    last: Manifest = parse(manifest, file="surgery.json")
    return Lineage.of(last)
