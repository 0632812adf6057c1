"""What the API's functions give back: typed results, each with its plain data for `--json`. No logic of surgery."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from surgeon.blueprint import Blueprint
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.families.anatomy import Anatomy
from surgeon.layout import Shard
from surgeon.manifest import Manifest
from surgeon.plan.loading import LoadedPlan
from surgeon.tasks.metrics import Measurement, backward_transfer, general_ability_delta, overall_performance

if TYPE_CHECKING:
    from surgeon.evaluation.scores import Ratio
    from surgeon.findings.gathering import Findings
    from surgeon.verification.encoders import OutputComparison
    from surgeon.verification.logits import LogitComparison
    from surgeon.verification.static import Check
    from surgeon.verification.streaming import FirstDifference, StreamedComparison


@dataclass(frozen=True)
class Preview:
    """What a plan would do to a base, from headers and config alone.

    Parameters are counts of numbers; tied embeddings count once. Bytes are of tensor data; `bytes_holes` is
    the part of the output that is zeros and takes no room on disk. `peak_memory` is an estimate in bytes.
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
    peak_memory: int
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        layers = f"{sum(e.base is not None for e in self.blueprint.layers)} → {len(self.blueprint.layers)} layers"
        return (
            f"Preview({self.model_type}, {layers}, {self.parameters_before:,} → {self.parameters_after:,} parameters,"
            f" {self.parameters_new:,} new, promise {self.blueprint.promise!r})"
        )

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`."""
        blueprint = self.blueprint
        return {
            "model_type": self.model_type,
            "native": blueprint.native,
            "promise": blueprint.promise,
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
            "bytes": {"read": self.bytes_to_read, "written": self.bytes_to_write, "holes": self.bytes_holes},
            "peak_memory": self.peak_memory,
            "shards": [{"file": s.file, "bytes": s.nbytes, "new": s.twin is None} for s in self.shards],
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Applied:
    """A finished surgery: where the output lies, its manifest, what the preview said, and seconds by stage.

    `left_behind` are files of the base that were not carried along.
    """

    path: Path
    manifest: Manifest
    preview: Preview
    left_behind: tuple[str, ...]
    seconds: dict[str, float]
    read_back: bool = True

    def __repr__(self) -> str:
        manifest = self.manifest
        told = f"{len(manifest.layers)} layers, {len(manifest.new_tensors)} new tensors, promise {manifest.promise!r}"
        return f"Applied({str(self.path)!r}, {told})"

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`."""
        return {
            "path": str(self.path),
            "left_behind": list(self.left_behind),
            "seconds": self.seconds,
            **self.preview.to_json(),
        }


@dataclass(frozen=True)
class Verification:
    """Whether an output keeps its manifest's promises.

    `checks` are the static ones, `comparisons` those by logits. `holds` is true when every promise holds;
    where none was made (`promise` none), differing logits are as promised, and so they are where the output was
    `trained` since the surgery.
    """

    promise: str
    checks: list[Check]
    comparisons: list[LogitComparison | OutputComparison] = field(default_factory=list)
    streamed: list[StreamedComparison] = field(default_factory=list)
    tokens: str = ""
    trained: bool = False

    def __repr__(self) -> str:
        checks = f"{sum(check.holds for check in self.checks)} of {len(self.checks)} checks hold"
        return f"Verification(holds={self.holds}, promise {self.promise!r}, identical={self.identical}, {checks})"

    @property
    def identical(self) -> bool | None:
        """Whether all compared logits (and hidden states) were bit-identical; None when none were compared."""
        if not self.comparisons:
            return None
        return self.first_difference is None and all(c.identical for c in self.comparisons)

    @property
    def first_difference(self) -> FirstDifference | None:
        """The first base layer after which hidden states differ, where the comparison went layer by layer."""
        return next((s.first_difference for s in self.streamed if s.first_difference is not None), None)

    @property
    def holds(self) -> bool:
        """Whether every promise of the manifest holds."""
        kept = self.promise == "none" or self.trained or self.identical is not False
        return kept and all(check.holds for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`."""
        return {
            "promise": self.promise,
            "trained": self.trained,
            "holds": self.holds,
            "identical": self.identical,
            "checks": [asdict(check) for check in self.checks],
            "tokens": self.tokens,
            # JSON knows no infinity, which is what logits that are not numbers count as.
            "comparisons": [
                {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(c).items()}
                for c in self.comparisons
            ],
            "first_difference": asdict(self.first_difference) if self.first_difference else None,
        }


@dataclass(frozen=True)
class Merged:
    """A finished merge: what was written, and what the merged model does beside the one with branches."""

    applied: Applied
    measured: Verification

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`."""
        return {"applied": self.applied.to_json(), "measured": self.measured.to_json()}


@dataclass(frozen=True)
class Upload:
    """A file of a push: its size in bytes, and whether the repository lacks it, holds another, or holds just this."""

    name: str
    nbytes: int
    state: Literal["new", "changed", "there"]


@dataclass(frozen=True)
class Pushed:
    """A push, or with `dry_run` what one would do.

    `revision` is the branch asked for, None for main. `stale` are files of the repository that are taken out, as they
    would be loaded beside these; `left_behind` those of the folder that do not go up. `checks` were made before, by
    the output's own manifest (`verification` None) or against its base. `commit` is the hash to pin, that of the
    repository as it was where nothing had to be sent; None in a dry run.
    """

    path: Path
    repo_id: str
    revision: str | None
    dry_run: bool
    files: tuple[Upload, ...]
    stale: tuple[str, ...]
    left_behind: tuple[str, ...]
    checks: tuple[Check, ...]
    verification: Verification | None
    license: str | None
    commit: str | None
    url: str | None
    pull_request: str | None
    delta: bool = False

    def __repr__(self) -> str:
        told = "would send" if self.dry_run else "sent"
        where = f"{self.repo_id!r}, commit {self.commit}" if self.commit else repr(self.repo_id)
        return f"Pushed({where}, {told} {len(self.sent)} of {len(self.files)} files)"

    @property
    def sent(self) -> tuple[Upload, ...]:
        """The files that the repository lacked or held otherwise."""
        return tuple(file for file in self.files if file.state != "there")

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`."""
        return {
            "path": str(self.path),
            "repo_id": self.repo_id,
            "revision": self.revision,
            "dry_run": self.dry_run,
            "files": [{"name": file.name, "bytes": file.nbytes, "state": file.state} for file in self.files],
            "stale": list(self.stale),
            "left_behind": list(self.left_behind),
            "checks": [asdict(check) for check in self.checks],
            "verification": self.verification.to_json() if self.verification else None,
            "license": self.license,
            "commit": self.commit,
            "url": self.url,
            "pull_request": self.pull_request,
            "delta": self.delta,
        }


@dataclass(frozen=True)
class MadeDelta:
    """A delta of `out` that was written: `tensors` of the output's `whole` are in it, the rest `base` (of the output's
    last surgery) brings, as it does the small files `from_base`."""

    out: Path
    path: Path
    base: str
    revision: str | None
    tensors: int
    whole: int
    nbytes: int
    whole_nbytes: int
    from_base: tuple[str, ...]
    seconds: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`."""
        return {
            "out": str(self.out),
            "path": str(self.path),
            "base": self.base,
            "revision": self.revision,
            "tensors": self.tensors,
            "whole": self.whole,
            "bytes": self.nbytes,
            "whole_bytes": self.whole_nbytes,
            "from_base": list(self.from_base),
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class AppliedDelta:
    """A delta that was put back: `tensors` of the output's `whole` came from it, the rest from the base."""

    path: Path
    base: str
    manifest: Manifest
    tensors: int
    whole: int
    nbytes: int
    seconds: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`."""
        return {
            "path": str(self.path),
            "base": self.base,
            "tensors": self.tensors,
            "whole": self.whole,
            "bytes": self.nbytes,
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class Reverted:
    """An earlier state that was written: state `to` of an output of `surgeries` surgeries.

    `undone` are the operations of the surgeries taken back, oldest first; `base` says what the state was called when
    the first of them began. `manifest` is the state's own, None for the first base. `tensors` it has, `dropped` are
    those of the output that it has not.
    """

    path: Path
    to: int
    surgeries: int
    base: str
    undone: tuple[tuple[str, ...], ...]
    manifest: Manifest | None
    tensors: int
    dropped: int
    nbytes: int
    left_behind: tuple[str, ...]
    seconds: dict[str, float]

    def __repr__(self) -> str:
        return f"Reverted({str(self.path)!r}, {self.to} of {self.surgeries} surgeries left, {self.tensors} tensors)"

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`."""
        return {
            "path": str(self.path),
            "to": self.to,
            "surgeries": self.surgeries,
            "base": self.base,
            "undone": [list(operations) for operations in self.undone],
            "tensors": self.tensors,
            "dropped": self.dropped,
            "bytes": self.nbytes,
            "left_behind": list(self.left_behind),
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class Exported:
    """A slot that was written as a PEFT adapter for `base` (at `revision`).

    `layers` are the base's that it adapts, in `modules` modules; `config` is its adapter_config.json, `notes` tell what
    of the output's function it does not hold.
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
        """As plain data for `--json`."""
        return {
            "path": str(self.path),
            "slot": self.slot,
            "base": self.base,
            "revision": self.revision,
            "layers": list(self.layers),
            "modules": self.modules,
            "bytes": self.nbytes,
            "config": self.config,
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Difference:
    """What became of checkpoint `a` in checkpoint `b`.

    `changed` and `moved` map names in `a` to names in `b`: other bytes (perhaps in another layer), and the same bytes
    in another layer. `config` holds the keys of config.json that differ, with both values (None: absent); `sizes` the
    bytes of every tensor of each. `told` is the one of the two that was not read: the other's manifest says what it
    held. None: both were read.
    """

    a: Path
    b: Path
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: dict[str, str]
    moved: dict[str, str]
    same: tuple[str, ...]
    config: dict[str, tuple[Any, Any]]
    sizes: tuple[dict[str, int], dict[str, int]]
    told: Path | None

    def __repr__(self) -> str:
        kinds = ("same", "moved", "changed", "removed", "added")
        counts = ", ".join(f"{len(getattr(self, kind))} {kind}" for kind in kinds)
        return f"Difference({str(self.a)!r}, {str(self.b)!r}, {counts}, {len(self.config)} keys of config.json)"

    @property
    def identical(self) -> bool:
        """Whether every tensor and the config are the same."""
        return not (self.added or self.removed or self.changed or self.moved or self.config)

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`."""
        return {
            "a": str(self.a),
            "b": str(self.b),
            "identical": self.identical,
            "not_read": str(self.told) if self.told is not None else None,
            "added": list(self.added),
            "removed": list(self.removed),
            "changed": [{"a": a, "b": b} for a, b in self.changed.items()],
            "moved": [{"a": a, "b": b} for a, b in self.moved.items()],
            "same": list(self.same),
            "config": {key: {"a": a, "b": b} for key, (a, b) in self.config.items()},
        }


@dataclass(frozen=True)
class Trained:
    """A finished training run of `out`, published at `path`.

    `changes` maps every tensor that trained to max |Δ| and ‖Δ‖ / ‖before‖ (None: it was zero before); `unchanged` are
    those that are what they were. `losses` maps sources to their held-out losses in nats a token, before and after.
    `log` are the trainer's entries. `seconds` and `tokens_per_second` are of the steps since `resumed_at`; peak memory
    is in bytes, of the GPU where there is one.
    """

    out: Path
    path: Path
    manifest: Manifest
    operations: tuple[str, ...]
    settings: dict[str, Any]
    parameters: int
    changes: dict[str, tuple[float, float | None]]
    losses: dict[str, list[float]]
    tokens: int
    log: list[dict[str, Any]]
    resumed_at: int
    seconds: float
    tokens_per_second: float | None
    peak_memory: int

    def __repr__(self) -> str:
        losses = ", ".join(f"{name} {before:.4g} → {after:.4g}" for name, (before, after) in self.losses.items())
        told = f"{self.parameters:,} parameters in {len(self.changes)} tensors, {self.tokens:,} tokens"
        return f"Trained({str(self.path)!r}, {told}, loss {losses or 'not measured'})"

    @property
    def unchanged(self) -> tuple[str, ...]:
        """Tensors that trained and did not change."""
        return tuple(name for name, (largest, _) in self.changes.items() if largest == 0)

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`."""
        return {
            "out": str(self.out),
            "path": str(self.path),
            "operations": list(self.operations),
            "settings": self.settings,
            "parameters": self.parameters,
            "losses": {name: {"before": before, "after": after} for name, (before, after) in self.losses.items()},
            "tensors": {
                name: {"max_change": largest, "relative_change": relative}
                for name, (largest, relative) in self.changes.items()
            },
            "unchanged": list(self.unchanged),
            "tokens": self.tokens,
            "tokens_per_second": self.tokens_per_second,
            "seconds": self.seconds,
            "resumed_at": self.resumed_at,
            "peak_memory": self.peak_memory,
            "log": self.log,
        }


@dataclass(frozen=True)
class Continued:
    """What a continual run made of a base, task by task.

    `rows[0]` is what was measured of the base, on every task and general source, `rows[t]` after the t-th task, on the
    tasks so far and the general sources. Performance is token accuracy on held-out labels, where the paper has
    benchmark scores. `trainings` are the tasks' (settings, steps, tokens, losses), `kept` is the folder of the earlier
    tasks' runs where they were kept, `config` the tasks file.
    """

    path: Path
    base: str
    tasks: tuple[str, ...]
    general: tuple[str, ...]
    rows: tuple[Measurement, ...]
    trainings: tuple[dict[str, Any], ...]
    config: dict[str, Any]
    fingerprint: str
    resumed_after: int = 0
    kept: Path | None = None

    def __repr__(self) -> str:
        delta = "" if self.delta[-1] is None else f", ΔR {self.delta[-1]:+.4f}"
        told = f"OP {self.overall[-1]:.4f}, BWT {self.backward[-1]:+.4f}{delta}"
        return f"Continued({str(self.path)!r}, {len(self.tasks)} tasks, {told})"

    @property
    def matrix(self) -> list[list[float]]:
        """R[t][i]: performance on task i after training on task t, i ≤ t, from 0."""
        return [[row[name].accuracy for name in self.tasks[: number + 1]] for number, row in enumerate(self.rows[1:])]

    @property
    def overall(self) -> list[float]:
        """OP after each task."""
        return [overall_performance(self.matrix, t) for t in range(len(self.tasks))]

    @property
    def backward(self) -> list[float]:
        """BWT after each task."""
        return [backward_transfer(self.matrix, t) for t in range(len(self.tasks))]

    @property
    def delta(self) -> list[float | None]:
        """ΔR after each task; None where there are no general sources."""
        before, *after = ([row[name].accuracy for name in self.general] for row in self.rows)
        return [general_ability_delta(before, row) for row in after]

    def record(self) -> dict[str, Any]:
        """As plain data: what `continual.json` of the run holds."""
        return {
            "surgeon_continual": 1,
            "base": self.base,
            "tasks": list(self.tasks),
            "general": list(self.general),
            "performance": "token accuracy on held-out labels",
            "base_accuracy": {name: found.accuracy for name, found in self.rows[0].items()},
            "matrix": self.matrix,
            "overall_performance": self.overall,
            "backward_transfer": self.backward,
            "general_ability_delta": self.delta,
            "measured": [
                {
                    name: found.to_json() | {"accuracy": found.accuracy, "loss": found.loss}
                    for name, found in row.items()
                }
                for row in self.rows
            ],
            "trainings": list(self.trainings),
            "config": self.config,
            "fingerprint": self.fingerprint,
        }

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`."""
        return {
            "path": str(self.path),
            "kept": None if self.kept is None else str(self.kept),
            "resumed_after": self.resumed_after,
            **self.record(),
        }


@dataclass(frozen=True)
class SourceScores:
    """One model on one source. Losses are in nats a token, bits per byte of UTF-8, accuracy is greedy decoding's.

    Each has its 95 % confidence interval, over documents. The differences are to the first model, paired by document
    (None: this is the first; of losses also where the tokens are other ones).
    """

    source: str
    documents: int
    tokens: int
    nbytes: int
    loss: Ratio
    perplexity: Ratio
    bits_per_byte: Ratio
    accuracy: Ratio
    loss_difference: Ratio | None
    bits_difference: Ratio | None


@dataclass(frozen=True)
class ModelScores:
    """One model on all sources; `same_tokens` says whether its tokens are the first model's."""

    model: str
    same_tokens: bool
    sources: tuple[SourceScores, ...]


@dataclass(frozen=True)
class Evaluation:
    """Models beside each other on the same held-out text, the first one the one to compare with.

    `length` is the most tokens a window has; `notes` tell what the numbers do not.
    """

    models: tuple[ModelScores, ...]
    length: int
    dtype: str
    device: str
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        shown = "; ".join(
            f"{row.model}: " + ", ".join(f"{found.source} {found.loss.value:.4f}" for found in row.sources[:4])
            for row in self.models[:4]
        )
        return f"Evaluation({len(self.models)} models, {shown})"

    def of(self, model: str, source: str) -> SourceScores:
        """One cell; KeyError where there is none."""
        for row in self.models:
            for found in row.sources:
                if (row.model, found.source) == (model, source):
                    return found
        raise KeyError(f"{model}, {source}")

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`; a number that is none or infinite is its name."""
        ratios = ("loss", "perplexity", "bits_per_byte", "accuracy", "loss_difference", "bits_difference")
        return {
            "length": self.length,
            "dtype": self.dtype,
            "device": self.device,
            "confidence": 0.95,
            "models": [
                {
                    "model": row.model,
                    "same_tokens": row.same_tokens,
                    "sources": {
                        found.source: {
                            "documents": found.documents,
                            "tokens": found.tokens,
                            "bytes": found.nbytes,
                            **{name: _ratio(getattr(found, name)) for name in ratios},
                        }
                        for found in row.sources
                    },
                }
                for row in self.models
            ],
            "notes": list(self.notes),
        }


def _ratio(found: Ratio | None) -> dict[str, Any] | None:
    if found is None:
        return None
    low, high = found.interval or (None, None)
    return {"value": _number(found.value), "low": _number(low), "high": _number(high)}


def _number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


@dataclass(frozen=True)
class Inspection:
    """What a checkpoint folder is: its base facts and, if it is an output of surgeon, its manifest."""

    path: Path
    folder: CheckpointFolder
    anatomy: Anatomy
    manifest: Manifest | None
    parameters: int

    def __repr__(self) -> str:
        surgery = "no surgery" if self.manifest is None else ", ".join(o.op for o in self.manifest.operations)
        family, layers = self.anatomy.family.model_type, self.anatomy.sizes.layers
        return f"Inspection({str(self.path)!r}, {family}, {layers} layers, {self.parameters:,} parameters, {surgery})"

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`."""
        return {
            "path": str(self.path),
            "model_type": self.anatomy.family.model_type,
            "layers": self.anatomy.sizes.layers,
            "parameters": self.parameters,
            "tied_embeddings": self.anatomy.tied,
            "shards": list(self.folder.shards),
            "surgery": self.manifest.model_dump() if self.manifest else None,
        }


@dataclass(frozen=True)
class RouterChoices:
    """PMoE's router on one text: mean weight of each slot, share of tokens it is the largest for, and some tokens.

    `examples` are (token, its slot of largest weight).
    """

    mean: tuple[float, ...]
    largest: tuple[float, ...]
    examples: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class GateChoices:
    """A gate on one text: its mean value (α of an interpolator), and the share of tokens for which it is zero.

    `loudness` is the mean of what an adapter adds, ‖·‖₁ over the width; None for an interpolator.
    """

    mean: float
    closed: float
    loudness: float | None


@dataclass(frozen=True)
class TextChoices:
    """Everything chosen on one text of `tokens` tokens.

    `states[s][k]` is the weight that site s gave control state k, mean over tokens; rows are in the order of
    `RoutingReport.sites`. `gates` are by the layer's number and what stands there (`3.adapter`, `3.interpolator`).
    """

    tokens: int
    router: RouterChoices | None
    states: tuple[tuple[float, ...], ...]
    gates: dict[str, GateChoices]


@dataclass(frozen=True)
class RoutingReport:
    """What was chosen, text by text.

    `sites` are (layer, block) of the control states, `router_layer` is how many layers lie below PMoE's router.
    """

    model: str
    slots: int
    router_layer: int | None
    sites: tuple[tuple[int, str], ...]
    texts: dict[str, TextChoices] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"RoutingReport({self.model!r}, {self.slots} slots, {len(self.sites)} sites, texts {list(self.texts)})"

    def to_json(self) -> dict[str, Any]:
        """As plain data: the file's content and `--json`."""
        return {
            "surgeon_routing": 1,
            "model": self.model,
            "router": None if self.router_layer is None else {"layer": self.router_layer, "slots": self.slots},
            "sites": [list(site) for site in self.sites],
            "texts": {
                name: {
                    "tokens": text.tokens,
                    "router": None
                    if text.router is None
                    else {
                        "mean": list(text.router.mean),
                        "largest": list(text.router.largest),
                        "examples": [list(example) for example in text.router.examples],
                    },
                    "states": [list(row) for row in text.states],
                    "gates": {
                        gate: {"mean": told.mean, "closed": told.closed, "loudness": told.loudness}
                        for gate, told in text.gates.items()
                    },
                }
                for name, text in self.texts.items()
            },
        }


# Of a report's findings, what is plain data as it stands.
_TOLD = (
    "name",
    "model_type",
    "dtypes",
    "budget",
    "maps",
    "spectra",
    "heat_maps",
    "probing",
    "runs",
    "curves",
    "notes",
)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Reported:
    """What a report wrote, and what it tells."""

    html: Path | None
    pictures: tuple[Path, ...]
    findings: Findings

    def __repr__(self) -> str:
        return f"Reported({str(self.html) if self.html else None!r}, {len(self.pictures)} pictures)"

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`: the files, and every number they show."""
        held = self.findings
        return {
            "html": None if self.html is None else str(self.html),
            "pictures": [str(path) for path in self.pictures],
            "layers": [asdict(layer) for layer in held.history.layers],
            "promise": held.manifest.promise,
            "verification": held.verification and held.verification.to_json(),
            "routing": held.routing and held.routing.to_json(),
            **{name: _plain(getattr(held, name)) for name in _TOLD},
        }
