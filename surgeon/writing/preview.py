"""`surgeon preview`: what a plan would do to a base, from headers and config alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from surgeon.anatomy.anatomy import without_a_place
from surgeon.anatomy.anatomy_cache import keep, recalled
from surgeon.anatomy.dissect import dissect_folder
from surgeon.anatomy.format_depth import other_scale
from surgeon.anatomy.kinds import broken_pattern
from surgeon.blueprint.blueprint import Blueprint, Output
from surgeon.blueprint.recipes import Predicted
from surgeon.blueprint.shards import MAX_NEW_SHARD_BYTES, Shard, group_by_layer, lay_out
from surgeon.checkpoint.card_metadata import metadata_of
from surgeon.checkpoint.folder import CARD_FILE, MOST_AHEAD, CheckpointFolder
from surgeon.checkpoint.header import DTYPE_BITS
from surgeon.checkpoint.tokenizer_ids import disagreement
from surgeon.common.formatting import listed
from surgeon.common.listener import Listener, Quiet
from surgeon.errors import printable
from surgeon.manifest.lineage import Lineage
from surgeon.manifest.manifest import MANIFEST_FILE
from surgeon.manifest.reading import manifest_of
from surgeon.models.gguf_file import base_headers
from surgeon.operations.prepare import Facts, OpenedBase, TextCounts
from surgeon.plan.plan import LoadedPlan, draw, parse_plan, placed, prepare
from surgeon.plan.shipped import load_named
from surgeon.writing.job import mirrored_in, places_in, unchanged_among
from surgeon.writing.proofs import NOTHING_TO_PROVE, Proof, promised, prove
from surgeon.writing.shapes import check_shapes, check_taken, lost_divisors
from surgeon.writing.surgery import Drawing

# The memory of a process that only moves bytes, interpreter included.
_STREAMING_MEMORY = 90_000_000
_TORCH_MEMORY = 450_000_000


@dataclass(frozen=True)
class Preview:
    """What a plan would do to a base, from headers and config only.

    Parameters are counts of numbers; tied embeddings count once. Bytes are of tensor data. `bytes_holes` is the part of
    the output that is zeros and takes no room on disk. `bytes_unchanged` is the part in shards that equal the base's
    byte for byte: with `link` none of it is written. `peak_memory` is an estimate in bytes.
    """

    plan: LoadedPlan
    blueprint: Blueprint
    shards: tuple[Shard, ...]
    model_type: str
    parameters_before: int
    parameters_after: int
    parameters_new: int
    parameters_trainable: int
    bytes_to_read: int
    bytes_to_write: int
    bytes_holes: int
    bytes_unchanged: int
    peak_memory: int
    notes: tuple[str, ...]
    # The facts that operations gathered from the base, by the operation's number.
    facts: Mapping[int, Facts] = field(default_factory=dict)
    link: bool = False
    proof: Proof = NOTHING_TO_PROVE

    @property
    def drawing(self) -> Drawing:
        """Return the drawing that `apply` carries out."""
        return Drawing(self.plan, self.facts, self.blueprint, self.shards, self.proof.libraries)

    @property
    def notes_on_it(self) -> tuple[str, ...]:
        """Return the notes without the licence note, which matters only for `surgeon push`."""
        return tuple(note for note in self.notes if note != _NO_LICENSE)

    def __repr__(self) -> str:
        """Return model type, layers, parameters and promise in a line."""
        layers = f"{sum(e.base is not None for e in self.blueprint.layers)} → {len(self.blueprint.layers)} layers"
        return (
            f"Preview({self.model_type}, {layers}, {self.parameters_before:,} → {self.parameters_after:,} parameters,"
            f" {self.parameters_new:,} new, promise {self.blueprint.promise!r})"
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`.

        Keys:
            `model_type`: the base's model type
            `native`: true if the output needs no code of its own
            `promise`: `exact`, `rounding` or `none`
            `operations`: each with `op`, `matched` (in words), `promise`, `reason`, `trains` (`new`, `all`)
            `layers`: the output's, each with `layer`, `base` (its number there; null: new), `init`, `sources`, `grafts`
            `parameters`: `before`, `after`, `new`, `trainable`
            `bytes`: `read`, `written`, `holes` (zeros that take no room on disk); of those written, `unchanged` (in
                shards that are the base's) and `linked` (with `--link`, else 0)
            `shards`: each with `file`, `bytes`, `new`
            `proof`: `how` an exact promise is known (`proven` in this run, `cached` from an earlier one, `promised`:
                `apply` will prove it; `unproven`: transformers cannot load the base; `none`: less is promised), `text`
                in words, `libraries` and their versions
            `peak_memory`: an estimate in bytes
            `notes`: lines for the reader
            `texts`: where the vocabulary grows, each with `use`, `text`, `sha256`, `documents`, `unchanged`, `words`,
                and tokens `before` and `after`; else empty
            `figures`: what operations found out of the base, by their numbers: where adapters are merged `deltas`, by
                adapter and module ‖ΔW‖ (of LoRA; DoRA needs the weights)
        """
        blueprint = self.blueprint
        return {
            "model_type": self.model_type,
            "native": blueprint.native,
            "promise": blueprint.promise,
            "proof": self.proof.to_json(),
            "operations": [
                {
                    "op": r.op,
                    "matched": r.matched,
                    "promise": r.claim.promise,
                    "reason": r.claim.reason,
                    "trains": r.trains,
                }
                for r in blueprint.operations
            ],
            "layers": [
                {
                    "layer": e.index,
                    "base": e.base,
                    "init": e.init or None,
                    "sources": list(e.sources),
                    "grafts": [graft.text for graft in e.grafts],
                }
                for e in blueprint.layers
            ],
            "parameters": {
                "before": self.parameters_before,
                "after": self.parameters_after,
                "new": self.parameters_new,
                "trainable": self.parameters_trainable,
            },
            "bytes": {
                "read": self.bytes_to_read,
                "written": self.bytes_to_write,
                "holes": self.bytes_holes,
                "unchanged": self.bytes_unchanged,
                "linked": self.bytes_unchanged if self.link else 0,
            },
            "peak_memory": self.peak_memory,
            "shards": [{"file": s.file, "bytes": s.nbytes, "new": s.mirrored is None} for s in self.shards],
            "notes": list(self.notes),
            "texts": [text.model_dump() for text in self.measured],
            "figures": {str(number): each.figures() for number, each in self.facts.items() if each.figures()},
        }

    @property
    def measured(self) -> list[TextCounts]:
        """Return the counts of how a change of the vocabulary tokenises texts."""
        return [text for facts in self.facts.values() for text in facts.texts]


_NO_LICENSE = "no licence known: the base's README.md names none, so the card says unknown (`surgeon push --license`)"


def preview(
    plan: str | Path | LoadedPlan,
    base: str | Path,
    *,
    overrides: Sequence[str] = (),
    revision: str | None = None,
    link: bool = False,
    trust_remote_code: bool = False,
) -> Preview:
    """Return what `apply` would do (with `link`: link what it can), reading headers and config only.

    `plan` is a file, the name of a shipped plan, or the result of `parse_plan`, with values replaced by `overrides`
    (`operations.0.init.reg=0.1`); `base` a folder or a Hub id (whose weights are not downloaded). Raises BadInput for
    everything `apply` would refuse before writing.
    """
    loaded = loaded_plan(plan, overrides)
    folder = base_headers(base, revision=revision, trust_remote_code=trust_remote_code)
    opened = opened_for(loaded, folder, weights=False)
    return proved(preview_of(loaded, opened, link=link), opened)


def loaded_plan(plan: str | Path | LoadedPlan, overrides: Sequence[str] = ()) -> LoadedPlan:
    """Return the plan (a file, a shipped plan's name, or a parsed plan) with `overrides` applied. Raises BadInput."""
    if not isinstance(plan, LoadedPlan):
        return load_named(plan, overrides)
    return parse_plan(plan.text, source=plan.source, overrides=overrides) if overrides else plan


def opened_for(
    loaded: LoadedPlan,
    folder: CheckpointFolder,
    *,
    weights: bool = True,
    listener: Listener | None = None,
) -> OpenedBase:
    """Return a base in the form that a plan's operations use.

    Without `weights` only headers are read of other models on the Hub. Raises BadInput where the base's manifest cannot
    be read, or its layers are not known.
    """
    if folder.manifest is not None:
        # The output's lineage will include the base's surgeries: what cannot be read is refused before any work.
        Lineage.of(manifest_of(folder), file=str(folder.path / MANIFEST_FILE))
    anatomy = dissect_folder(folder, recalled)
    return OpenedBase(folder, anatomy, Path(loaded.source).parent, listener or Quiet(), weights)


def preview_of(
    loaded: LoadedPlan,
    base: OpenedBase,
    *,
    max_shard_bytes: int = MAX_NEW_SHARD_BYTES,
    link: bool = False,
) -> Preview:
    """Return the preview of a plan on an opened base, not yet proven (`proved` does that last, as it costs most).

    Raises BadInput where the plan cannot be carried out on the base.
    """
    folder, anatomy = base.folder, base.anatomy
    facts = prepare(loaded, base)
    blueprint = draw(loaded, anatomy, folder.config, facts)
    check_taken(blueprint, folder, base.models)
    with placed(loaded):
        check_shapes(blueprint, anatomy)
    shards = lay_out(blueprint.outputs, folder.tensors, max_new_shard_bytes=max_shard_bytes)
    outputs = blueprint.outputs
    new = sum(_new_numbers(output, folder) for output in outputs if output.new)
    # Copies of parts of old layers that new layers read and training does not change.
    fixed = sum(_new_numbers(output, folder) for output in outputs if output.new and output.kept.covered)
    after = sum(output.numel for output in outputs)
    trains_all = any(record.trains == "all" for record in blueprint.operations)
    unproven = promised(blueprint)
    runs_twin = unproven.how != "none"
    return Preview(
        plan=loaded,
        blueprint=blueprint,
        shards=shards,
        model_type=anatomy.family.model_type,
        parameters_before=sum(info.numel for info in folder.tensors.values()),
        parameters_after=after,
        parameters_new=new,
        parameters_trainable=after if trains_all else new - fixed,
        bytes_to_read=_bytes_to_read(blueprint, base),
        bytes_to_write=sum(output.nbytes for output in outputs if not output.is_hole),
        bytes_holes=sum(output.nbytes for output in outputs if output.is_hole),
        bytes_unchanged=_bytes_unchanged(shards, folder),
        peak_memory=peak_memory(blueprint, runs_twin=runs_twin),
        notes=tuple(_notes(blueprint, base)),
        facts=facts,
        link=link,
        proof=unproven,
    )


def _bytes_to_read(blueprint: Blueprint, base: OpenedBase) -> int:
    """Return the bytes of the base's tensors, and of other models' tensors, that the output is made of."""
    taken = [base.models[name].tensors[tensor].nbytes for name, of in blueprint.taken.items() for tensor in of]
    return sum(base.folder.tensors[name].nbytes for name in blueprint.sources) + sum(taken)


def _bytes_unchanged(shards: Iterable[Shard], folder: CheckpointFolder) -> int:
    """Return the bytes of the shards that equal the base's own, byte for byte."""
    found = unchanged_among(shards, places_in(folder.tensors, shards), mirrored_in(folder, shards))
    return sum(shard.nbytes for shard in shards if shard.file in found)


def _notes(blueprint: Blueprint, base: OpenedBase) -> Iterator[str]:
    """Yield notes on base and output that the view of the operations does not show."""
    folder, anatomy = base.folder, base.anatomy
    yield from folder.notes
    if differing := disagreement(folder):
        yield differing
    if anatomy.idle:
        yield without_a_place(anatomy.idle)
    yield anatomy.derivation.evidence
    if folder.own is not None:
        yield f"the base's own code goes along as it is: {', '.join(sorted(folder.own.files))}"
    # Git's own files need no note; nor does the card, because the output gets a card of its own.
    behind = [name for name in folder.left_behind if name != CARD_FILE and not name.startswith(".")]
    named = {word for note in folder.notes for word in re.split(r"[\s,:]+", note)}
    if behind := [name for name in behind if printable(name) not in named]:
        yield f"not carried along: {listed(behind)}"
    if blueprint.native:
        before = (folder.config, len(blueprint.layer_of_base)) if blueprint.dropped else None
        broken = broken_pattern(blueprint.config, [layer.base for layer in blueprint.layers], before)
        if broken is not None:
            mend = "take out whole periods to keep it" if before else "`where: {every_period: 1}` keeps the pattern"
            yield f"{broken}; {mend}"
        if (scaled := other_scale(blueprint.config)) is not None:
            yield scaled
    yield from lost_divisors(blueprint, anatomy, folder.config)
    yield from dict.fromkeys(base.notes)
    if metadata_of(folder).license is None:
        yield _NO_LICENSE


def proved(shown: Preview, base: OpenedBase) -> Preview:
    """Return the preview with its promise proven on a twin, now or before. Raises BadInput where it does not hold.

    What was learned about the base's classes is kept for later runs.
    """
    with placed(shown.plan):
        proof = prove(shown.drawing, base)
    keep(base.anatomy, base.folder.config, base.folder.tensors, base.folder.own)
    return replace(shown, proof=proof)


def _new_numbers(output: Output, folder: CheckpointFolder) -> int:
    """Return how many numbers of a new tensor are new; numbers copied from old layers and kept fixed are not."""
    kept = output.kept
    numbers = sum(span.nbytes for span in kept.spans) * 8 // DTYPE_BITS[output.recipe.dtype]
    return output.numel - min(numbers, sum(folder.tensors[name].numel for name in kept.tensors))


def peak_memory(blueprint: Blueprint, *, runs_twin: bool) -> int:
    """Estimate peak memory in bytes: the interpreter, and the largest working set of a recipe or of a twin."""
    computed = [output.recipe for output in blueprint.outputs if output.computed]
    if not computed:
        return _STREAMING_MEMORY if blueprint.native and not runs_twin else _TORCH_MEMORY
    # Two sources and a result in float32 and one in the tensor's dtype; transport adds the cost (rows × rows), the
    # lower source after T_in, and the map of the attention output that stays for gate and up.
    largest = max(recipe.working_set for recipe in computed)
    # Maps of whole heads have one number for each pair of heads.
    rows = [c.stop - c.start for c in blueprint.couplings.values() if c.whole_heads is None]
    maps = sorted((4 * n * n for n in rows), reverse=True)
    # One layer's sources, read ahead, and finished tensors that wait to be written.
    new = [[o for o in layer if o.computed] for layer in group_by_layer(blueprint.outputs)]
    ahead = min(2 * max(sum(o.nbytes for o in layer) for layer in new), MOST_AHEAD)
    waiting = ahead + 3 * max(o.nbytes for layer in new for o in layer)
    # U and the network of every predicted module are kept from one new layer to the next.
    networks = {r.network: r for r in computed if isinstance(r, Predicted)}
    kept = sum(recipe.network_memory for recipe in networks.values())
    return _TORCH_MEMORY + largest + kept + (2 * maps[0] if maps else 0) + waiting
