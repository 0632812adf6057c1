"""The manifest as a claim: what it says, and the files that lie beside the weights, against what plan and base make.

What nothing shows is left out, and named here: how the base was called (`base.id`, `base.revision`), comments of the
plan, what solvers and training report of themselves (`transport_maps`, losses, settings, sizes of changes), the digest
of the text that a plan had the base run on, and of other models that it took tensors from, what a growth of the
vocabulary measured of texts and made its tokens of, what was measured of layers before some were taken out, what
merges changed and how large adapters are, and at birth of a computed tensor that was trained since.
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
from surgeon.errors import printable
from surgeon.grafts.bundle import CODE_FILE
from surgeon.manifest.card import card
from surgeon.manifest.compose import Written, compose, plugins_of
from surgeon.manifest.manifest import Base, ChangeEntry, Manifest, ModelEntry
from surgeon.manifest.run_files import ADAPTER_FOLDER, KEPT_FOLDER
from surgeon.models.templates import TEMPLATE_FILE
from surgeon.operations.prepare import Facts
from surgeon.plan.plan import LoadedPlan

# What transformers looks for beside weights, whatever config.json says: weights of other formats and adapters, code,
# and configs, indexes, vocabularies and templates by their names.
_LOADED = re.compile(
    r".*\.(py|safetensors|jinja)|(pytorch_model|tf_model|flax_model|adapter_)[^/]*|custom_generate/"
    r"|[^/]*(config|index|token|vocab|merges|chat_template|tekken)[^/]*\.(json|txt)",
    re.DOTALL | re.IGNORECASE,
)
# In the place of what a merge reported of a tensor, where the manifest has nothing of it.
_NO_CHANGE = ChangeEntry(change=None, nearest=0.0, kept=0.0, guided=0)


def base_differences(claimed: Base, found: Base) -> list[str]:
    """Names of tensors and files of the base that are not what the manifest says, both ways."""
    wrong = [] if same_json(claimed.config, found.config) else [CONFIG_FILE]
    for said, there in ((claimed.tensors, found.tensors), (claimed.files, found.files)):
        wrong += [name for name in {**said, **there} if said.get(name) != there.get(name)]
    return wrong


def manifest_differences(
    manifest: Manifest, loaded: LoadedPlan, blueprint: Blueprint, facts: Mapping[int, Facts]
) -> list[str]:
    """Return where a manifest says something else than its plan makes of its base; see `base_differences`.

    `facts` are those that the manifest keeps, by which the blueprint was drawn.
    """
    native = str(manifest.base.config.get("model_type"))
    base = manifest.base.model_copy(update={"model_type": native, "layers": len(blueprint.layer_of_base)})
    texts = [coupling.support.text for coupling in blueprint.couplings.values() if coupling.support is not None]
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
            texts={name: manifest.texts.get(name, "0" * 64) for name in texts},
            models={n: manifest.models.get(n, ModelEntry(id=n, sha256="0" * 64)) for n in blueprint.taken},
        ),
    ).data()
    found = manifest.data()
    # Versions are noted (`check_origin`), what training left is compared with the tensors' bytes, lineages with bases'.
    taken = {"sha256", "tool", "proven", "training", "lineage"}
    if expected["plugins"].keys() == found["plugins"].keys():
        taken.add("plugins")
    return [
        path
        for key in sorted({*expected, *found} - taken)
        for path in _differences(expected.get(key), found.get(key), key)
    ]


def _at_birth(output: Output, manifest: Manifest, base: Base) -> str:
    """The digest of a new tensor at birth; of a computed one what the manifest says, which is compared elsewhere."""
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
    """Paths below `path` at which two values of JSON data differ."""
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
    """Whether a manifest says what plan and base make; `wrong` are the fields where it does not."""
    kept = "every field follows from the plan and the base, as far as these determine it"
    return Check.of("manifest", wrong, f"{MANIFEST_FILE} says otherwise than plan and base", kept)


def check_origin(manifest: Manifest, blueprint: Blueprint) -> list[Check]:
    """A note where another version of surgeon or of a plugin is said to have written it, which nothing shows."""
    here = {"surgeon": __version__} | plugins_of(blueprint)
    said = {"surgeon": manifest.tool.version} | manifest.plugins
    others = [f"{name} {version}" for name, version in said.items() if here.get(name) != version]
    return [Check("written by", True, f"{some(others)}, it says; this is another version", note=True)] if others else []


@dataclass(frozen=True)
class Beside:
    """What must lie beside the weights of an output: config, `code`, and the files of these digests.

    `grown` are tokenizer files that are the base's, of these digests, but for what the manifest says was inserted.
    """

    code: tuple[str, ...]
    known: Mapping[str, str]
    grown: Mapping[str, str]

    @classmethod
    def of(cls, blueprint: Blueprint, base: Base, manifest: Manifest) -> Beside:
        """What a plan makes of a base."""
        # Scripts beside surgeon's are those that the user trusts: of the model, or of a tokenizer alone.
        carried = {n: base.files[n] for n in base.files if is_side_file(n) or (n.endswith(".py") and n != CODE_FILE)}
        grown: dict[str, str] = {}
        for name, how in manifest.side_files.items():
            digest = carried.pop(name, None)
            if how.inserted:
                # Of a file that the base has not, nothing is a rest.
                grown[name] = digest or ""
            elif how.sha256 is not None:
                carried[name] = how.sha256
        return cls(blueprint.code_files, carried, grown)

    @property
    def names(self) -> set[str]:
        """The names of all of them."""
        return {CONFIG_FILE, *self.code, *self.known, *self.grown}


def check_files(manifest: Manifest, out: CheckpointFolder, beside: Beside, metadata: Metadata) -> list[Check]:
    """Every file beside the weights: those of the manifest by digest, the index, the card, and those that it lacks."""
    found = digests_beside(out, manifest.files)
    # A record of measurements stays with the run that was measured: a state taken back is without it.
    recorded = {name: digest for name, digest in manifest.files.items() if name != RECORD_FILE or name in found}
    wrong = [name for name, digest in recorded.items() if found.get(name) != digest]
    # A run's chat template is known by its digest, as it was in no base.
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
    """Nothing where no side file grew; else whether these are the base's but for what was inserted."""
    wrong: list[str] = []
    for name, digest in beside.grown.items():
        content = out.read_side_file(name) if name in out.side_files else None
        if content is None or not manifest.side_files[name].grew(content, digest):
            wrong.append(name)
    kept = f"the base's byte for byte, but for what was inserted: {some(list(beside.grown))}"
    return [Check.of("inserted", wrong, "not the base's but for what was inserted", kept)] if beside.grown else []


def digests_beside(out: CheckpointFolder, names: Iterable[str]) -> dict[str, str]:
    """Digests of those of the files `names` that lie beside the weights. Raises BadInput where one cannot be read."""
    listing = out.source.listing()
    there = [name for name in names if name in listing]

    def content(name: str) -> bytes:
        if name in out.side_files:
            return out.read_side_file(name)
        return out.source.small(name, max_bytes=MAX_SIDE_FILE_BYTES)

    return {name: hashlib.sha256(content(name)).hexdigest() for name in there}


def strange_files(manifest: Manifest, out: CheckpointFolder) -> list[str]:
    """Files and folders in the output that surgeon did not write."""
    known = {MANIFEST_FILE, CARD_FILE, *manifest.files, *out.shards}
    known |= {f"{KEPT_FOLDER}/"} if manifest.kept else set()
    known |= {f"{ADAPTER_FOLDER}/"} if manifest.adapter is not None else set()
    known.update(f"{name.partition('/')[0]}/" for name in manifest.files if "/" in name)
    if SINGLE_FILE not in out.shards:
        known.add(INDEX_FILE)
    return [name for name in out.source.listing() if name not in known]


def _index_fits(out: CheckpointFolder) -> bool:
    """Whether the index says what the headers do; that it names every tensor's shard was checked at opening."""
    content = out.source.small(INDEX_FILE, max_bytes=MAX_INDEX_BYTES)
    found = parse_json_strict(content, file=INDEX_FILE, max_bytes=MAX_INDEX_BYTES)
    infos = out.tensors.values()
    total = {"total_parameters": sum(i.numel for i in infos), "total_size": sum(i.nbytes for i in infos)}
    return bool(found == {"metadata": total, "weight_map": {info.name: info.file for info in infos}})


def _check_card(manifest: Manifest, out: CheckpointFolder, metadata: Metadata) -> list[Check]:
    """A note where the card is not what the manifest and the base's card make: pushed, or edited, as anybody may."""
    sizes = {name: info.numel for name, info in out.tensors.items()}
    there = CARD_FILE in out.source.listing()
    if there and out.source.small(CARD_FILE, max_bytes=MAX_CARD_BYTES) == card(manifest, out.config, sizes, metadata):
        return [Check("card", True, f"{CARD_FILE} says what the manifest does")]
    how = "is not as surgeon wrote it: pushed or edited since, or the base's is another" if there else "is not there"
    return [Check("card", True, f"{CARD_FILE} {how}", note=True)]


def check_beside(out: CheckpointFolder, more: Iterable[str] = ()) -> Check:
    """Whether loaders find nothing in the folder that surgeon never writes: adapters, other weights, `generate`.

    `more` are files that surgeon does write, and did not write here.
    """
    found = strays(out.source.listing(), out.shards)
    wrong = [f"{printable(name)} ({does})" for name, does in found.items()]
    wrong += [printable(name) for name in more if name not in found]
    kept = "nothing that a loader would take for a part of the model"
    return Check.of("beside the weights", wrong, "not an output's", kept)
