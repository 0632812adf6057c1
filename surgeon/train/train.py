"""`surgeon train`: train what a surgery made, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from surgeon.checkpoint.card_metadata import metadata_of
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.common.distributed import Ranks
from surgeon.common.formatting import by_number, count, listed, size
from surgeon.common.listener import Listener, Quiet
from surgeon.common.tables import FittedTable
from surgeon.errors import printable
from surgeon.families.anatomy import layer_of
from surgeon.manifest.manifest import manifest_of
from surgeon.train.config import load_config

if TYPE_CHECKING:
    from surgeon.train.publishing import Change, Trained


def train(
    out: str | Path,
    config: str | Path,
    to: str | Path,
    *,
    overrides: Sequence[str] = (),
    delta_only: bool = False,
    device: str = "auto",
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Trained | None:
    """Train what surgery added to `out` by the config file `config`, and publish the run as the new folder `to`.

    `overrides` are values that replace the file's: `optimizer.lr=1e-4`, `sources.NAME.share=0.5`.

    `to` is absent or complete at any moment: every tensor that did not train is byte for byte that of `out`, which is
    checked. With `delta_only` it is the run's delta (`make_delta`), which `apply_delta` applies to the base. The
    same call continues a run that was cut off, from its last checkpoint. Under torchrun every process
    makes this call; None on all but the first. Raises BadInput for what cannot be trained, WrongSet where anything else
    would train, Diverged where the loss is no number any more.
    """
    loaded = load_config(Path(config), overrides)

    from surgeon.train.preparing import prepare

    folder = CheckpointFolder.open(Path(out), trust_remote_code=trust_remote_code)
    listener = listener or Quiet()
    manifest, target = manifest_of(folder), Path(to)
    processes = Ranks.of_environment().size
    prepared = prepare(folder, manifest, loaded, target, device=device, processes=processes)

    from surgeon.train.session import run_training

    def as_delta(whole: Path) -> None:
        from surgeon.rework.make_delta import make_delta_of

        run = CheckpointFolder.open(whole, trust_remote_code=trust_remote_code)
        make_delta_of(run, target, None, metadata_of(run), listener)

    return run_training(
        folder,
        manifest,
        loaded,
        target,
        device=device,
        listener=listener,
        prepared=prepared,
        deliver=as_delta if delta_only else None,
    )


def trained_view(trained: Trained) -> RenderableType:
    """What was learned and forgotten, what changed by how much, and what it took."""
    losses = FittedTable("source")
    for column in ("before", "after", "change"):
        losses.add_column(column)
    for name, (before, after) in trained.losses.items():
        style = "green" if after < before else "yellow"
        losses.add_row(name, f"{before:.4f}", f"{after:.4f}", Text(f"{after - before:+.4f}", style=style))
    groups: dict[str, list[Change]] = {}
    for name, change in sorted(trained.changes.items(), key=lambda entry: by_number(entry[0])):
        place = layer_of(name)
        groups.setdefault(printable(name) if place is None else f"layer {place[1]}", []).append(change)
    tensors = FittedTable("tensors")
    for column in ("count", "max |Δ|", "‖Δ‖ / ‖before‖"):
        tensors.add_column(column)
    for where, changes in groups.items():
        relative = [change.relative_change for change in changes if change.relative_change is not None]
        tensors.add_row(
            where,
            str(len(changes)),
            f"{max(change.max_change for change in changes):.3g}",
            f"{min(relative):.3g} … {max(relative):.3g}" if relative else "from zero",
        )
    facts = FittedTable(headings=False)
    facts.add_row("trained", f"{count(trained.parameters)} in {len(trained.changes)} tensors")
    speed = f", {trained.tokens_per_second:,.0f} a second" if trained.tokens_per_second else ""
    facts.add_row("tokens", f"{trained.tokens:,}{speed}")
    facts.add_row("peak memory", size(trained.peak_memory))
    parts: list[RenderableType] = [losses, Text()] if trained.losses else []
    parts += [tensors, Text(), facts]
    if trained.unchanged:
        parts.append(Text(f"did not change: {listed(trained.unchanged)}", style="bold yellow"))
    done = Text(f"{printable(str(trained.path))} is complete; every other tensor is as it was, byte for byte")
    return Group(*parts, Text(), Text.assemble(done, style="bold green"))
