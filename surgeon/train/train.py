"""`surgeon train`: train what a surgery made, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from surgeon.checkpoint.card_metadata import metadata_of
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.common.formatting import count, listed, size
from surgeon.common.listener import Listener, Quiet
from surgeon.common.plain import plain_fields
from surgeon.errors import printable
from surgeon.families.anatomy import layer_of
from surgeon.manifest.manifest import Manifest, manifest_of
from surgeon.rework.make_delta import make_delta_of


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
        return plain_fields(self, without=("manifest", "changes")) | {
            "losses": {name: {"before": before, "after": after} for name, (before, after) in self.losses.items()},
            "tensors": {
                name: {"max_change": largest, "relative_change": relative}
                for name, (largest, relative) in self.changes.items()
            },
            "unchanged": list(self.unchanged),
        }


def train(
    out: str | Path,
    config: str | Path,
    to: str | Path,
    *,
    delta_only: bool = False,
    device: str = "auto",
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Trained | None:
    """Train what surgery added to `out` by the config file `config`, and publish the run as the new folder `to`.

    `to` is absent or complete at any moment: every tensor that did not train is byte for byte that of `out`, which is
    checked. With `delta_only` it is the run's delta (`make_delta`), which `apply_delta` puts back onto the base. The
    same call continues a run that was cut off, from its last checkpoint. Under torchrun every process
    makes this call; None on all but the first. Raises BadInput for what cannot be trained, WrongSet where anything else
    would train, Diverged where the loss is no number any more.
    """
    from surgeon.train.config import load_config
    from surgeon.train.session import run_training

    loaded = load_config(Path(config))
    folder = CheckpointFolder.open(Path(out), trust_remote_code=trust_remote_code)
    hears = listener or Quiet()

    def as_delta(whole: Path) -> None:
        run = CheckpointFolder.open(whole, trust_remote_code=trust_remote_code)
        make_delta_of(run, Path(to), None, metadata_of(run), hears)

    finished = run_training(
        folder,
        manifest_of(folder),
        loaded,
        Path(to),
        device=device,
        trust_remote_code=trust_remote_code,
        listener=hears,
        deliver=as_delta if delta_only else None,
    )
    if finished.manifest is None:
        return None
    return Trained(
        out=Path(out),
        path=Path(to),
        manifest=finished.manifest,
        operations=finished.wanted.operations,
        settings=finished.settings.to_json(),
        parameters=finished.parameters,
        changes={name: (change.max_change, change.relative_change) for name, change in finished.changes.items()},
        losses=finished.losses,
        tokens=finished.tokens,
        log=finished.log,
        resumed_at=finished.resumed_at,
        seconds=finished.seconds,
        tokens_per_second=finished.tokens_per_second,
        peak_memory=finished.peak_memory,
    )


def trained_view(trained: Trained) -> RenderableType:
    """What was learned and forgotten, what changed by how much, and what it took."""
    losses = Table(box=None, pad_edge=False)
    for column in ("source", "before", "after", "change"):
        losses.add_column(column, justify="left" if column == "source" else "right")
    for name, (before, after) in trained.losses.items():
        style = "green" if after < before else "yellow"
        losses.add_row(name, f"{before:.4f}", f"{after:.4f}", Text(f"{after - before:+.4f}", style=style))
    groups: dict[str, list[tuple[float, float | None]]] = {}
    for name, change in trained.changes.items():
        place = layer_of(name)
        groups.setdefault(printable(name) if place is None else f"layer {place[1]}", []).append(change)
    tensors = Table(box=None, pad_edge=False)
    for column in ("tensors", "count", "max |Δ|", "‖Δ‖ / ‖before‖"):
        tensors.add_column(column, justify="left" if column == "tensors" else "right")
    for where, changes in groups.items():
        relative = [value for _, value in changes if value is not None]
        tensors.add_row(
            where,
            str(len(changes)),
            f"{max(largest for largest, _ in changes):.3g}",
            f"{min(relative):.3g} … {max(relative):.3g}" if relative else "from zero",
        )
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_row("trained", f"{count(trained.parameters)} in {len(trained.changes)} tensors")
    speed = f", {trained.tokens_per_second:,.0f} a second" if trained.tokens_per_second else ""
    facts.add_row("tokens", f"{trained.tokens:,}{speed}")
    facts.add_row("peak memory", size(trained.peak_memory))
    parts: list[RenderableType] = [losses, Text(), tensors, Text(), facts]
    if trained.unchanged:
        parts.append(Text(f"did not change: {listed(trained.unchanged)}", style="bold yellow"))
    done = Text(f"{printable(str(trained.path))} is complete; every other tensor is as it was, byte for byte")
    return Group(*parts, Text(), Text.assemble(done, style="bold green"))
