"""The opening of a settled run: the output's tensors are checked, the texts read, and the trackers opened."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import INTEGRATION_TO_CALLBACK

from surgeon.anatomy.limits import context_of
from surgeon.checkpoint.folder import CheckpointFolder, digests_of
from surgeon.common import devices
from surgeon.common.distributed import Ranks
from surgeon.common.listener import Listener
from surgeon.data.documents import Corpus
from surgeon.errors import BadInput, printable
from surgeon.manifest.compose import BaseId, without_surgery
from surgeon.manifest.manifest import MANIFEST_FILE, Manifest, StoredTensor
from surgeon.manifest.moves import recorded_tensors
from surgeon.training.config.settings import settle
from surgeon.training.run import Prepared, Run
from surgeon.training.training_data import MOST_HELD, open_data, steps_of

# Where the config does not say how many held-out sequences are evaluated: one for so many of the run, and the fewest.
_RUN_TO_HELD, _FEWEST_HELD = 8, 8


def opened_run(prepared: Prepared, listener: Listener, *, imagined: Mapping[str, Corpus] | None = None) -> Run:
    """Open a run: read its texts, and open its trackers.

    Args:
        prepared: what `prepare` returned.
        listener: receives progress.
        imagined: by source, texts that the model has yet to write.

    Raises:
        BadInput: the run cannot be made; every problem is a line.
    """
    loaded, settings = prepared.loaded, prepared.settings
    ranks = Ranks.of_environment()
    say = listener.say if ranks.leads else lambda _: None
    if loaded.config.sharding == "fsdp" and not prepared.sharding:
        say("one process: nothing is sharded")
    device = devices.resolve(prepared.device)
    trackers = open_trackers(loaded.config.report_to, to=prepared.to, config=str(loaded.source))
    data = open_data(prepared, say, imagined or {})
    notes = prepared.notes
    if loaded.config.counts_text:
        steps, context = steps_of(data, prepared, say), context_of(prepared.out.config)
        operations = prepared.wanted.operations
        settings, more = settle(loaded, operations, context=context, processes=ranks.size, steps=steps)
        notes = [*notes, *more]
    if loaded.config.validation_sequences is None:
        most = max(_FEWEST_HELD, min(MOST_HELD, settings.steps * settings.batch // _RUN_TO_HELD))
        data.validation = {name: held[:most] for name, held in data.validation.items()}
    settled = {"settings": settings, "notes": notes, "device": device}
    return Run(
        **(vars(prepared) | settled),
        data=data,
        ranks=ranks,
        trackers=trackers,
        listener=listener,
        say=say,
    )


def check_as_left(out: CheckpointFolder, manifest: Manifest | None, listener: Listener) -> dict[str, str]:
    """Return the digests of all tensors of the output.

    Raises BadInput where a tensor differs from what surgery or training wrote. Without a manifest nothing is compared.
    """
    listener.begin("reading", sum(info.nbytes for info in out.tensors.values()))
    found = digests_of(out, out.tensors, listener.advance)
    if manifest is None:
        return found
    recorded = recorded_tensors(manifest, file=str(out.path / MANIFEST_FILE))
    changed = [
        name for name, digest in found.items() if recorded.get(name) != StoredTensor.of(out.tensors[name], digest)
    ]
    if changed:
        more = f" (and {len(changed) - 1} more tensors)" if len(changed) > 1 else ""
        raise BadInput(
            f"{printable(changed[0])}{more}: not what {MANIFEST_FILE} of {printable(str(out.path))} says, so it was"
            " changed since; train what apply or train wrote"
        )
    return found


def as_it_is(run: Run, digests: Mapping[str, str]) -> Manifest:
    """Make the manifest of a model without surgery, from its tensors' `digests` and the digests of its small files."""
    out = run.out
    names = out.side_files if out.own is None else {*out.side_files, *out.own.files}
    files = {name: hashlib.sha256(out.read_side_file(name)).hexdigest() for name in names}
    return without_surgery(out, BaseId(out.path.resolve().name), run.anatomy, digests=digests, files=files)


def open_trackers(names: Sequence[str], *, to: Path, config: str) -> list[TrainerCallback]:
    """Return the callbacks of trackers, given by transformers' names; `config` is the file that asks for them.

    `to` is the run's folder, next to which tensorboard logs where no other folder is set. Raises BadInput for a name
    that transformers does not know, and for a library that is not installed. A callback
    raises BadInput when its tracker cannot begin (no login, say).
    """
    opened = []
    for name in names:
        where = f"{printable(config)}: report_to: {printable(name)}"
        if name not in INTEGRATION_TO_CALLBACK:
            known = ", ".join(sorted(INTEGRATION_TO_CALLBACK))
            raise BadInput(f"{where}: no tracker that transformers knows; it knows {known}")
        try:
            callback = INTEGRATION_TO_CALLBACK[name]()
        except (RuntimeError, ImportError) as error:
            raise BadInput(f"{where}: {_line(error)}") from None
        if name == "tensorboard" and callback.logging_dir is None:
            # transformers' default is in the work folder, which is removed when the run is published.
            callback.logging_dir = str(to.with_name(f"{to.name}-tensorboard"))
        opened.append(_begun(callback, where))
    return opened


def _begun(callback: Any, where: str) -> TrainerCallback:
    """Return the callback, changed so that an error at its start is raised as BadInput, which the user can mend."""
    begin = callback.on_train_begin

    def on_train_begin(*arguments: Any, **named: Any) -> Any:
        """Begin the tracker. Raises BadInput for any error of it."""
        try:
            return begin(*arguments, **named)
        except Exception as error:
            raise BadInput(f"{where}: cannot begin ({type(error).__name__}: {_line(error)})") from error

    callback.on_train_begin = on_train_begin
    return callback


def _line(error: Exception) -> str:
    """Return an error's message as one line."""
    return printable(" ".join(str(error).split()), 500)
