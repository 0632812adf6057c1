"""The manifest as a claim: it and the files next to the weights are compared with what plan and base produce.

Fields that nothing can prove are not compared: the base's name (`base.id`, `base.revision`), comments of the plan,
reports of solvers and of training (`transport_maps`, losses, settings, sizes of changes), the digests of other models
that a plan took tensors from, the texts measured and tokens chosen when a vocabulary grew, measurements of layers
before some were removed, the changes by merges and the sizes of adapters, and the digest at birth of a computed tensor
that was trained since.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surgeon._version import __version__
from surgeon.blueprint.blueprint import Blueprint, Output
from surgeon.checkpoint.card_metadata import Metadata
from surgeon.checkpoint.folder import (
    CARD_FILE,
    CONFIG_FILE,
    MANIFEST_FILE,
    MAX_CARD_BYTES,
    RECORD_FILE,
    CheckpointFolder,
)
from surgeon.checkpoint.pieces import Pieces
from surgeon.checkpoint.source import MAX_SIDE_FILE_BYTES, is_side_file
from surgeon.checkpoint.strict_json import parse_json_strict
from surgeon.checkpoint.trust import strays
from surgeon.checkpoint.weights import INDEX_FILE, MAX_INDEX_BYTES, SINGLE_FILE
from surgeon.common.check import Check, some
from surgeon.common.json_results import same_json
from surgeon.common.plugins import any_installed
from surgeon.errors import printable
from surgeon.grafts.bundle import CODE_FILE
from surgeon.manifest.card import card
from surgeon.manifest.compose import Written, compose, plugins_of
from surgeon.manifest.manifest import Base, ChangeEntry, Manifest, ModelEntry
from surgeon.manifest.run_files import ADAPTER_FOLDER, KEPT_FOLDER
from surgeon.models.templates import TEMPLATE_FILE
from surgeon.operations.prepare import Facts
from surgeon.plan.plan import LoadedPlan

# Files that transformers looks for next to weights, whatever config.json contains: weights of other formats and
# adapters, code, and configs, indexes, vocabularies and templates by their names.
_LOADED = re.compile(
    r".*\.(py|safetensors|jinja)|(pytorch_model|tf_model|flax_model|adapter_)[^/]*|custom_generate/"
    r"|[^/]*(config|index|token|vocab|merges|chat_template|tekken)[^/]*\.(json|txt)",
    re.DOTALL | re.IGNORECASE,
)
# Used where the manifest lacks a merge's report on a tensor.
_NO_CHANGE = ChangeEntry(change=None, nearest=0.0, kept=0.0, guided=0)


def base_differences(claimed: Base, found: Base) -> list[str]:
    """Return the tensors and files in which the claimed and the actual base differ, in both directions."""
    wrong = [] if same_json(claimed.config, found.config) else [CONFIG_FILE]
    for said, there in ((claimed.tensors, found.tensors), (claimed.files, found.files)):
        wrong += [name for name in {**said, **there} if said.get(name) != there.get(name)]
    return wrong


def manifest_differences(
    manifest: Manifest, loaded: LoadedPlan, blueprint: Blueprint, facts: Mapping[int, Facts]
) -> list[str]:
    """Return the fields in which a manifest differs from what its plan makes of its base; see also `base_differences`.

    `facts` are the facts kept in the manifest, with which the blueprint was drawn.
    """
    native = str(manifest.base.config.get("model_type"))
    base = manifest.base.model_copy(update={"model_type": native, "layers": len(blueprint.layer_of_base)})
    made_of = (each for output in blueprint.outputs if output.new for each in output.recipe.walk())
    fits = dict.fromkeys(each.own_fit for each in made_of if each.own_fit is not None)
    expected = compose(
        loaded,
        blueprint,
        base,
        manifest.lineage,
        facts,
        Written(
            digests={o.name: _at_birth(o, manifest, base) for o in blueprint.outputs if o.new},
            files=manifest.files,
            reports={name: manifest.transport_maps.get(name, {}) for name in blueprint.couplings}
            | {name: manifest.fits[name].model_dump() for name in fits if name in manifest.fits}
            | {name: manifest.merged.get(name, _NO_CHANGE).model_dump() for name in blueprint.changes},
            models={n: manifest.models.get(n, ModelEntry(id=n, sha256="0" * 64)) for n in blueprint.taken},
        ),
    ).data()
    found = manifest.data()
    # Compared elsewhere: versions (a note, `check_origin`), training (with tensor bytes), lineages (with the bases').
    taken = {"sha256", "tool", "proven", "training", "lineage"}
    if expected["plugins"].keys() == found["plugins"].keys():
        taken.add("plugins")
    return [
        path
        for key in sorted({*expected, *found} - taken)
        for path in _differences(expected.get(key), found.get(key), key)
    ]


def _at_birth(output: Output, manifest: Manifest, base: Base) -> str:
    """Return a new tensor's digest at birth; for a computed tensor the manifest's digest (compared elsewhere)."""
    for sha256, lying in output.recipe.named_values:
        if lying.nbytes == output.nbytes:
            return sha256
    source = next(iter(output.pieces.tensors), "")
    original = base.tensors.get(source)
    if original is not None and output.pieces == Pieces.whole(source, original.nbytes):
        return original.sha256
    claimed = manifest.new_tensors.get(output.name)
    return "0" * 64 if claimed is None else claimed.sha256


def _differences(expected: Any, found: Any, path: str) -> Iterator[str]:
    """Yield the paths below `path` at which two values of JSON data differ."""
    if same_json(expected, found):
        return
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in sorted({*expected, *found}):
            if key in expected and key in found:
                yield from _differences(expected[key], found[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}"
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for number, (one, other) in enumerate(zip(expected, found, strict=True)):
            yield from _differences(one, other, f"{path}.{number}")
    else:
        yield path


def check_manifest(wrong: Sequence[str]) -> Check:
    """Return the check of a manifest against plan and base; `wrong` are the fields that differ."""
    kept = "every field follows from the plan and the base, as far as these determine it"
    changed = ", or a plugin has changed" if any_installed() else ""
    return Check.of("manifest", wrong, f"{MANIFEST_FILE} says otherwise than plan and base{changed}", kept)


def check_origin(manifest: Manifest, blueprint: Blueprint) -> list[Check]:
    """Return a note where the manifest names another version of surgeon or of a plugin, which nothing can prove."""
    here = {"surgeon": __version__} | plugins_of(blueprint)
    said = {"surgeon": manifest.tool.version} | manifest.plugins
    others = [f"{name} {version}" for name, version in said.items() if here.get(name) != version]
    return [Check("written by", True, f"{some(others)}, it says; this is another version", note=True)] if others else []


@dataclass(frozen=True)
class Beside:
    """The files that must be next to the weights of an output: config, `code`, and the files with the digests `known`.

    `grown` are tokenizer files that must equal the base's files (by these digests) except for the recorded insertions.
    """

    code: tuple[str, ...]
    known: Mapping[str, str]
    grown: Mapping[str, str]

    @classmethod
    def of(cls, blueprint: Blueprint, base: Base, manifest: Manifest) -> Beside:
        """Return the files that a plan makes of a base."""
        # Scripts other than surgeon's are code that the user trusts, for the model or only for a tokenizer.
        carried = {n: base.files[n] for n in base.files if is_side_file(n) or (n.endswith(".py") and n != CODE_FILE)}
        grown: dict[str, str] = {}
        for name, how in manifest.side_files.items():
            digest = carried.pop(name, None)
            if how.inserted:
                # Where the base lacks the file, nothing remains after removing the insertions.
                grown[name] = digest or ""
            elif how.sha256 is not None:
                carried[name] = how.sha256
        return cls(blueprint.code_files, carried, grown)

    @property
    def names(self) -> set[str]:
        """The names of all files that must be next to the weights."""
        return {CONFIG_FILE, *self.code, *self.known, *self.grown}


def check_files(manifest: Manifest, out: CheckpointFolder, beside: Beside, metadata: Metadata) -> list[Check]:
    """Check every file next to the weights: files of the manifest by digest, the index, the card, and unknown files."""
    found = digests_beside(out, manifest.files)
    # A record of measurements stays with the measured run: a reverted state lacks it.
    recorded = {name: digest for name, digest in manifest.files.items() if name != RECORD_FILE or name in found}
    wrong = [name for name, digest in recorded.items() if found.get(name) != digest]
    # A chat template added by a training run was in no base; only its digest is known.
    added = {TEMPLATE_FILE} if any(run.config.get("chat_template") for run in manifest.training) else set()
    wrong += [name for name in beside.names ^ manifest.files.keys() if name not in (RECORD_FILE, *added)]
    wrong += [name for name, digest in beside.known.items() if found.get(name) != digest]
    if SINGLE_FILE not in out.shards and not _index_fits(out):
        wrong.append(INDEX_FILE)
    kept = f"{len(found)} beside the weights, by digest"
    strangers = strange_files(manifest, out)
    loaded = [name for name in strangers if _LOADED.fullmatch(name) or is_side_file(name)]
    checks = [
        Check.of("files", sorted({*wrong}), "not as surgery left them", kept),
        check_beside(out, loaded),
        *_check_inserted(manifest, out, beside),
    ]
    if others := [name for name in strangers if name not in loaded]:
        checks.append(Check("other files", True, f"in no digest, and not loaded: {some(others)}", note=True))
    return [*checks, *_check_card(manifest, out, metadata)]


def _check_inserted(manifest: Manifest, out: CheckpointFolder, beside: Beside) -> list[Check]:
    """Check that grown side files are the base's files plus the recorded insertions; no check without grown files."""
    wrong: list[str] = []
    for name, digest in beside.grown.items():
        content = out.read_side_file(name) if name in out.side_files else None
        if content is None or not manifest.side_files[name].grew(content, digest):
            wrong.append(name)
    kept = f"the base's byte for byte, but for what was inserted: {some(list(beside.grown))}"
    return [Check.of("inserted", wrong, "not the base's but for what was inserted", kept)] if beside.grown else []


def digests_beside(out: CheckpointFolder, names: Iterable[str]) -> dict[str, str]:
    """Return the digests of those `names` that exist next to the weights. Raises BadInput where one cannot be read."""
    listing = out.source.listing()
    there = [name for name in names if name in listing]

    def content(name: str) -> bytes:
        """Return a file's content, as the folder provides it."""
        if name in out.side_files:
            return out.read_side_file(name)
        return out.source.small(name, max_bytes=MAX_SIDE_FILE_BYTES)

    return {name: hashlib.sha256(content(name)).hexdigest() for name in there}


def strange_files(manifest: Manifest, out: CheckpointFolder) -> list[str]:
    """Return the files and folders in the output that surgeon did not write."""
    known = {MANIFEST_FILE, CARD_FILE, *manifest.files, *out.shards}
    known |= {f"{KEPT_FOLDER}/"} if manifest.kept else set()
    known |= {f"{ADAPTER_FOLDER}/"} if manifest.adapter is not None else set()
    known.update(f"{name.partition('/')[0]}/" for name in manifest.files if "/" in name)
    if SINGLE_FILE not in out.shards:
        known.add(INDEX_FILE)
    return [name for name in out.source.listing() if name not in known]


def _index_fits(out: CheckpointFolder) -> bool:
    """Return whether the index agrees with the headers. Opening already checked that it has every tensor's shard."""
    content = out.source.small(INDEX_FILE, max_bytes=MAX_INDEX_BYTES)
    found = parse_json_strict(content, file=INDEX_FILE, max_bytes=MAX_INDEX_BYTES)
    infos = out.tensors.values()
    total = {"total_parameters": sum(i.numel for i in infos), "total_size": sum(i.nbytes for i in infos)}
    return bool(found == {"metadata": total, "weight_map": {info.name: info.file for info in infos}})


def _check_card(manifest: Manifest, out: CheckpointFolder, metadata: Metadata) -> list[Check]:
    """Return a note where the card differs from the one that the manifest and the base's card produce.

    Reasons are a push, or an edit, which anybody may make.
    """
    sizes = {name: info.numel for name, info in out.tensors.items()}
    there = CARD_FILE in out.source.listing()
    if there and out.source.small(CARD_FILE, max_bytes=MAX_CARD_BYTES) == card(manifest, out.config, sizes, metadata):
        return [Check("card", True, f"{CARD_FILE} says what the manifest does")]
    how = "is not as surgeon wrote it: pushed or edited since, or the base's is another" if there else "is not there"
    return [Check("card", True, f"{CARD_FILE} {how}", note=True)]


def check_beside(out: CheckpointFolder, more: Iterable[str] = ()) -> Check:
    """Check that the folder contains nothing that loaders read and surgeon never writes.

    Such files are adapters, other weights, and code that replaces `generate`. `more` are files of kinds that surgeon
    writes, but did not write here.
    """
    found = strays(out.source.listing(), out.shards)
    wrong = [f"{printable(name)} ({does})" for name, does in found.items()]
    wrong += [printable(name) for name in more if name not in found]
    kept = "nothing that a loader would take for a part of the model"
    return Check.of("beside the weights", wrong, "not an output's", kept)
