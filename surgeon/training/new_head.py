"""A classification head for an encoder that has none, added by a surgery that `train` carries out before it trains.

So the run's manifest records the head like every tensor that a surgery made: by digest. `verify` draws it again, and
`revert` removes it. The encoder with its head is stored next to RUN while the run lasts.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from surgeon.anatomy.dissect import dissect_folder
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.common.disk_space import writing
from surgeon.common.formatting import listed
from surgeon.common.listener import Listener
from surgeon.common.work_folders import WorkFolder
from surgeon.data.examples import labelled
from surgeon.data.sources import open_source
from surgeon.errors import BadInput, printable
from surgeon.manifest.reading import manifest_of
from surgeon.plan.plan import head_plan
from surgeon.training.config.loading import LoadedConfig
from surgeon.training.config.schema import MOST_LABELS
from surgeon.training.places import headed_folder
from surgeon.training.run import Prepared
from surgeon.training.self_generated import by_the_first
from surgeon.writing.apply import apply


@contextlib.contextmanager
def headed(
    prepared: Prepared, folder: Path | None, *, trust_remote_code: bool, listener: Listener
) -> Iterator[Prepared]:
    """Write the encoder with a classification head for the config's labels, and yield the run of that encoder.

    The config's seed draws the head, which trains in addition to the run's target. The first of several processes
    writes, and its error is raised in all. The folder is removed at the end of the context.

    Args:
        prepared: the run of the encoder without a head.
        folder: where the encoder with a head is written; None: next to the run.
        trust_remote_code: run the code that the encoder brings, as in `apply`.
        listener: receives a line about the new head.

    Raises:
        BadInput: the data's labels are not names or numbers of classes; and as `apply`.
    """
    out, place = prepared.out, folder or headed_folder(prepared.to)
    # The folder has the name of `out`, because the run's manifest names its base by it.
    made = place / (out.path.resolve().name or "encoder")
    with contextlib.ExitStack() as stack:

        def make() -> None:
            """Write the encoder with a head to the folder, which is locked, and removed once the run is over."""
            stack.enter_context(writing(place))
            # Remove what an interrupted run left there; the same values are drawn again.
            stack.enter_context(WorkFolder(place, target=prepared.to)).clear()
            stack.callback(shutil.rmtree, place, ignore_errors=True)
            labels, seed = labels_of(prepared.loaded), prepared.loaded.config.seed
            apply(head_plan(labels, seed=seed), out.path, made, device="cpu", trust_remote_code=trust_remote_code)
            listener.say(
                f"{printable(str(out.path))} has no classification head: made one for {len(labels)} labels"
                f" ({listed([printable(name, 40) for name in labels])}), drawn by seed {seed}"
            )

        by_the_first(prepared.device, make)
        grown = CheckpointFolder.open(made, trust_remote_code=trust_remote_code)
        manifest, anatomy = manifest_of(grown), dissect_folder(grown)
        target = replace(prepared.target, out=grown, manifest=manifest, anatomy=anatomy)
        wanted = prepared.objective.trained(target, prepared.wanted)
        yield replace(prepared, out=grown, manifest=manifest, anatomy=anatomy, target=target, wanted=wanted)


def labels_of(loaded: LoadedConfig) -> list[str]:
    """Return the names of the labels in the order of their numbers: the config's, else the sorted names in the texts.

    Held-out texts count too. Numeric labels are named as in transformers: LABEL_0, LABEL_1, … Raises BadInput where
    texts mix names and numbers, a number is below 0, there are fewer than two labels or too many, or the texts have
    names or more labels where the config gives a number of labels.
    """
    labels = loaded.config.labels
    if isinstance(labels, list):
        return labels
    found: set[str | int] = set()
    for source in loaded.config.sources:
        opened = open_source(source, loaded)
        for corpus in (opened.text, opened.held_out):
            if corpus is not None:
                found |= {labelled(corpus, number).label for number in range(len(corpus))}
    names = {label for label in found if isinstance(label, str)}
    numbers = {label for label in found if isinstance(label, int)}
    where = loaded.where("sources")
    if names and numbers:
        raise BadInput(
            f"{where}some texts have names as labels ({printable(repr(min(names)), 40)}), others numbers"
            f" ({min(numbers)}), so which is which is not known; give the names in their order, `labels: [NAME, …]`"
        )
    if numbers and min(numbers) < 0:
        raise BadInput(f"{where}a text has the label {min(numbers)}; classes are numbered from 0")
    count = len(names) if names else max(numbers) + 1
    if count > MOST_LABELS:
        raise BadInput(
            f"{where}the texts have {count:,} labels, at most {MOST_LABELS:,} are learned; are they classes? Amounts"
            " are not trained"
        )
    if count < 2:
        (only,) = names or numbers
        raise BadInput(
            f"{where}every text has the label {printable(repr(only), 40)}; there is nothing to tell apart: add texts"
            " with others"
        )
    if labels is not None and (names or count > labels):
        has = f"{count} names" if names else f"the label {count - 1}"
        raise BadInput(
            f"{loaded.where('labels')}`labels` is {labels}, and the texts have {has}; "
            + ("leave it out, or name them all" if names else f"labels are numbered from 0, so use {count} at least")
        )
    return sorted(names) if names else [f"LABEL_{number}" for number in range(labels or count)]
