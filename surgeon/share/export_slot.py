"""`surgeon export-slot`: write a slot of an output as a PEFT adapter for the base to which the slots were attached.

The shared LoRA of shallow layers and the slot in deep layers together compute, on that base, the output's function with
all of the router's mass on the slot. Matrices are copied as bytes.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from surgeon.anatomy.anatomy import Anatomy
from surgeon.anatomy.dissect import dissect_folder
from surgeon.anatomy.grafted_config import is_grafted
from surgeon.blueprint.grafts import grafts_of
from surgeon.blueprint.shards import Shard
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.header import TensorInfo
from surgeon.checkpoint.peft_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from surgeon.common.formatting import at_revision, show, size
from surgeon.common.json_results import plain_fields
from surgeon.common.listener import Listener, Quiet, Stopwatch
from surgeon.errors import BadInput, printable
from surgeon.manifest.lineage import Lineage
from surgeon.manifest.manifest import MANIFEST_FILE, Manifest
from surgeon.manifest.reading import manifest_of
from surgeon.operations import OPERATIONS
from surgeon.writing.job import Job, copied, places_in
from surgeon.writing.write import check_output, execute


@dataclass(frozen=True)
class Exported:
    """A slot that was written as a PEFT adapter for `base` (at `revision`).

    `layers` are the adapted layers of the base, `modules` the number of modules. `config` is its adapter_config.json.
    `notes` list parts of the output's function that it lacks.
    """

    path: Path
    slot: int
    base: str
    revision: str | None
    layers: tuple[int, ...]
    modules: int
    nbytes: int
    config: dict[str, Any]
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Exported({str(self.path)!r}, slot {self.slot} for {self.base!r}, {self.modules} modules)"

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`.

        Keys:
            `path`, `slot`: the adapter, and the slot's number
            `base`, `revision`: the base it fits, and its commit
            `layers`, `modules`, `bytes`: the base's adapted layers; the number of modules; the bytes written
            `config`: adapter_config.json
            `notes`: parts of the output's function that the adapter lacks
        """
        return plain_fields(self)


def export_slot(
    out: str | Path,
    slot: int,
    dest: str | Path,
    *,
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Exported:
    """Write a slot of an output as a PEFT LoRA adapter for the slots' base.

    `peft.PeftModel.from_pretrained(base, dest)` then computes the function of `out` with all of the router's mass on
    the slot; the shared LoRA of shallow layers is included. Matrices keep their bytes.

    Args:
        out: the output's folder
        slot: the slot's number, from 0
        dest: the new folder of the adapter
        trust_remote_code: run the output's own code
        listener: gets progress and notes

    Returns:
        the adapter's folder and config, and the parts of the output's function that it lacks

    Raises:
        BadInput: for a slot that does not exist or is in layers that the base lacks; `dest` then stays absent
    """
    listener = listener or Quiet()
    folder = CheckpointFolder.open(Path(out), trust_remote_code=trust_remote_code)
    for note in folder.notes:
        listener.say(note)
    manifest, target = manifest_of(folder), Path(dest)
    here = grafts_of(folder.config).values() if is_grafted(folder.config) else ()
    if not any(graft.kind == "expert_router" for grafts in here for graft in grafts):
        raise BadInput(f"{printable(str(folder.path))}: has no slots; give an output of pmoe_experts")
    anatomy = dissect_folder(folder)
    origin = origin_of(folder, manifest)
    pieces = pieces_of(folder, anatomy, origin, slot)
    config = peft_config(pieces, anatomy, origin, dropout=_dropout(folder, slot))
    job = exporting_job(folder, anatomy, pieces, config)
    check_output(job, folder.path, target)
    execute(job, target, listener, Stopwatch())
    exported = Exported(
        path=target,
        slot=slot,
        base=origin.id,
        revision=origin.revision,
        layers=tuple(sorted({piece.layer for piece in pieces})),
        modules=len(pieces),
        nbytes=job.bytes_to_write,
        config=config,
        notes=tuple(left_out(folder, origin)),
    )
    for note in exported.notes:
        listener.say(note)
    return exported


@dataclass(frozen=True)
class Origin:
    """The base to which the slots were attached: its name, its commit, and a map from output layers to its layers.

    `added` are the output's layers that the base lacks; `grafts` are the kinds of the base's own grafts.
    """

    id: str
    revision: str | None
    layers: Mapping[int, int]
    added: tuple[int, ...]
    grafts: frozenset[str]


@dataclass(frozen=True)
class Piece:
    """One module's LoRA: the base's layer, the path in the layer, rank, scale, and both matrices in the output."""

    layer: int
    target: str
    rank: int
    scale: float
    down: TensorInfo
    up: TensorInfo


def origin_of(out: CheckpointFolder, last: Manifest) -> Origin:
    """Return the base of the surgery that first attached slots. Raises BadInput where no surgery of the lineage did."""
    operations = [[entry.op for entry in surgery.operations] for surgery in (*last.lineage, last)]
    attaching = {op for op, known in OPERATIONS.items() if "experts" in known.grafts}
    first = next((number for number, named in enumerate(operations, 1) if attaching & set(named)), None)
    if first is None:
        raise BadInput(
            f"{printable(str(out.path / MANIFEST_FILE))}: no surgery in it attached slots; was it edited by hand?"
        )
    lineage = Lineage.of(last, file=str(out.path / MANIFEST_FILE))
    base = lineage.since(first - 1)[0].base
    layers = {place: layer for layer, place in lineage.layers(first - 1).items()}
    added = tuple(index for index in range(len(last.layers)) if index not in layers)
    return Origin(base.id, base.revision, layers, added, _kinds(base.config))


def left_out(out: CheckpointFolder, origin: Origin) -> list[str]:
    """Describe, for the user, parts of the output's function that come neither from the base nor from the slot."""
    notes = []
    if origin.added:
        notes.append(
            f"layers {show(list(origin.added))} of the output are not in {printable(origin.id)}; the adapter has"
            " nothing of what they compute"
        )
    if more := sorted(_kinds(out.config) - {"experts", "expert_router"} - origin.grafts):
        notes.append(
            f"the output has grafts that {printable(origin.id)} lacks ({', '.join(more)}); the adapter has nothing of"
            " what they compute"
        )
    return notes


def pieces_of(out: CheckpointFolder, anatomy: Anatomy, origin: Origin, slot: int) -> list[Piece]:
    """Return the slot's LoRAs in deep layers and the shared LoRAs below, sorted by layer and module.

    Raises BadInput for a slot that does not exist or has no LoRA, and for LoRAs in layers or branches that the base
    lacks.
    """
    shown = printable(str(out.path))
    grafts = grafts_of(out.config)
    slots = [c["slot"] for here in grafts.values() for g in here if g.kind == "expert_router" for c in g.entry["slots"]]
    if slot not in slots:
        has = f"slots {min(slots)}-{max(slots)}" if len(slots) > 1 else f"slot {slots[0]}"
        raise BadInput(f"{shown}: no slot {slot}; there is {has}")
    pieces: list[Piece] = []
    for index, here in sorted(grafts.items()):
        for graft in here:
            if graft.kind != "experts":
                continue
            for entry in graft.entry["slots"]:
                if graft.entry["routed"] and entry["slot"] != slot:
                    continue
                if graft.in_branch:
                    raise BadInput(
                        f"{shown}: slot {slot} is also in the side branch of layer {index}, which the base"
                        f" {printable(origin.id)} lacks; export it from the model as it was before that surgery"
                        " (`surgeon revert`)"
                    )
                if index not in origin.layers:
                    raise BadInput(
                        f"{shown}: slot {slot} is in layer {index}, which the base {printable(origin.id)} lacks:"
                        " a surgery inserted it; an adapter of that base cannot hold it"
                    )
                pieces += [_piece(anatomy, index, origin.layers[index], entry, target) for target in entry["targets"]]
    if not pieces:
        raise BadInput(f"{shown}: slot {slot} has no LoRA in any layer; choose another slot")
    return sorted(pieces, key=lambda piece: (piece.layer, piece.target))


def _is_alone(anatomy: Anatomy, target: str) -> bool:
    """Return whether, in every layer, `target` is the only linear module whose path ends in its last name.

    False where the model has further parts, such as an image tower, whose modules could have this name too.
    """
    if anatomy.derivation.path or anatomy.beyond:
        return False
    last = target.rpartition(".")[2]
    held = (anatomy.linear(index) for index in range(anatomy.sizes.layers))
    return all([name for name in modules if name.rpartition(".")[2] == last] == [target] for modules in held)


def peft_config(pieces: Sequence[Piece], anatomy: Anatomy, origin: Origin, *, dropout: float) -> dict[str, Any]:
    """Return the adapter_config.json with which PEFT creates these ranks and scales at exactly these modules."""
    kinds = {piece: (piece.rank, _alpha(piece.scale, piece.rank)) for piece in pieces}
    (rank, alpha), _ = Counter(kinds.values()).most_common(1)[0]
    paths = {piece: anatomy.module_name(piece.layer, piece.target) for piece in pieces}
    targets = Counter(piece.target for piece in pieces)
    # Use the last names where they match no other module, for example in an image tower.
    everywhere = all(count == len(origin.layers) and _is_alone(anatomy, target) for target, count in targets.items())
    names = [target.rpartition(".")[2] for target in targets] if everywhere else [paths[piece] for piece in pieces]
    # True where a module's matrix is stored as inputs × outputs (GPT-2's `Conv1D`).
    transposed = any(
        anatomy.layers[piece.layer][f"{piece.target}.weight"].shape != piece.up.shape[:1] + piece.down.shape[1:]
        for piece in pieces
    )
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": origin.id,
        "revision": origin.revision,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "use_rslora": False,
        "rank_pattern": _pattern({piece: kind[0] for piece, kind in kinds.items()}, rank, paths),
        "alpha_pattern": _pattern({piece: kind[1] for piece, kind in kinds.items()}, alpha, paths),
        "target_modules": names,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "init_lora_weights": True,
        "modules_to_save": None,
        "layers_to_transform": None,
        "layers_pattern": None,
    }


def exporting_job(out: CheckpointFolder, anatomy: Anatomy, pieces: Sequence[Piece], config: Mapping[str, Any]) -> Job:
    """Return the job that writes the adapter's folder: its matrices, with unchanged bytes, and its config."""
    tensors = {
        f"base_model.model.{anatomy.module_name(piece.layer, piece.target)}.lora_{matrix}.weight": info
        for piece in pieces
        for matrix, info in (("A", piece.down), ("B", piece.up))
    }
    shards = (Shard(ADAPTER_WEIGHTS, tuple(copied(name, info) for name, info in sorted(tensors.items())), None),)
    return Job(
        shards=shards,
        sources={"": out.source},
        places=places_in(out.tensors, shards),
        files={ADAPTER_CONFIG: (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()},
        finish=lambda _proof: {},
        identity={"what": "export", "out": out.identity()},
    )


def _kinds(config: Mapping[str, Any]) -> frozenset[str]:
    """Return the kinds of all grafts in a config."""
    return frozenset(str(graft.kind) for here in grafts_of(config).values() for graft in here)


def _piece(anatomy: Anatomy, index: int, layer: int, entry: Mapping[str, Any], target: str) -> Piece:
    """Return the LoRA of one module; `index` is its layer in the output, `layer` its layer in the base.

    Raises BadInput where a matrix is missing or has another shape than config.json requires.
    """
    rank = entry.get("ranks", {}).get(target, entry["rank"])
    scale = entry.get("scales", {}).get(target, entry.get("scale", 1.0))
    rows, columns = anatomy.linear(index)[target]
    found = []
    for matrix, shape in (("A", (rank, columns)), ("B", (rows, rank))):
        suffix = f"{target}.slots.{entry['slot']}.lora_{matrix}"
        info = anatomy.grafted[index].get(suffix)
        name = printable(anatomy.layer_name(index, suffix))
        if info is None:
            raise BadInput(f"{name}: config.json's `surgery` requires this tensor, no shard has it; download it again")
        if info.shape != shape:
            raise BadInput(f"{name}: shape {list(info.shape)}, config.json's `surgery` requires {list(shape)}")
        found.append(info)
    return Piece(layer, target, rank, scale, *found)


def _pattern(values: Mapping[Piece, float], usual: float, paths: Mapping[Piece, str]) -> dict[str, float]:
    """Return the values that differ from `usual`, by module, as PEFT's rank and alpha patterns need them.

    A module is named by its last name where its value is the same in all layers, else by its path.
    """
    by_target: dict[str, set[float]] = {}
    for piece, value in values.items():
        by_target.setdefault(piece.target, set()).add(value)
    return {
        piece.target.rpartition(".")[2] if len(by_target[piece.target]) == 1 else paths[piece]: value
        for piece, value in values.items()
        if value != usual
    }


def _dropout(out: CheckpointFolder, slot: int) -> float:
    """Return the slot's dropout; PEFT has one dropout for all modules."""
    entries = [
        entry
        for here in grafts_of(out.config).values()
        for graft in here
        if graft.kind == "experts" and graft.entry["routed"]
        for entry in graft.entry["slots"]
    ]
    return next((float(entry.get("dropout", 0.0)) for entry in entries if entry["slot"] == slot), 0.0)


def _alpha(scale: float, rank: int) -> float:
    """Return an α for which α / rank is exactly the scale, where one exists; an int where it is whole."""
    product = scale * rank
    candidates = (float(round(product)), product, math.nextafter(product, math.inf), math.nextafter(product, -math.inf))
    alpha = next((candidate for candidate in candidates if candidate / rank == scale), product)
    return int(alpha) if alpha.is_integer() else alpha


def exported_view(exported: Exported) -> RenderableType:
    """Return lines on the written slot, and the base to load it on."""
    base = printable(at_revision(exported.base, exported.revision))
    return Group(
        Text.assemble(
            ("done ", "bold green"),
            f"{printable(str(exported.path))}: slot {exported.slot} as a PEFT adapter for {base}",
            overflow="fold",
        ),
        Text(
            f"{exported.modules} modules in layers {show(list(exported.layers))}, {size(exported.nbytes)}", style="dim"
        ),
    )
