"""What a study leaves open, as its base needs it: the matrices of LoRA, the layers of partial tuning.

And what of the ways to train the base as it is this base refuses: said before the first run, not between two.
"""

from __future__ import annotations

from dataclasses import replace

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.compare.config import LoadedStudy
from surgeon.compare.specs import MethodSpec, Partial
from surgeon.errors import printable
from surgeon.families.anatomy import Anatomy
from surgeon.families.dissect import dissect
from surgeon.train.trainable.lora_targets import linear_modules


def suited(loaded: LoadedStudy, base: CheckpointFolder) -> LoadedStudy:
    """The study with LoRA and partial tuning as this base allows them, where the file says no targets and no layers.

    What differs from other bases is in its `notes`. A LoRA that nobody asked for is left out where nothing is linear.
    """
    anatomy = dissect(base.config, base.tensors, base.own)
    asked = {method.called for method in loaded.config.methods}
    methods, notes = [], []
    for method in loaded.config.all_methods:
        fitting, note = _fitting(method, anatomy)
        if fitting is None and method.called in asked:
            fitting, note = method, ""
        methods += [] if fitting is None else [fitting]
        notes += [note] if note else []
    if not notes:
        return loaded
    config = loaded.config.model_copy(update={"methods": methods, "peers": False})
    return replace(loaded, config=config, notes=tuple(notes))


def _fitting(method: MethodSpec, anatomy: Anatomy) -> tuple[MethodSpec | None, str]:
    """The method for this base, and what is to be said of it; None where it cannot be."""
    if method.partial is not None and "every" not in method.partial.model_fields_set:
        layers = anatomy.sizes.layers
        if layers < method.partial.every:
            note = f"{method.words}: of the base's {layers} layers the last one trains (`partial: {{every: {layers}}}`)"
            return method.model_copy(update={"partial": Partial(every=layers)}), note
    if method.lora is not None and "targets" not in method.lora.model_fields_set:
        names, other = linear_modules(anatomy)
        if other and not names:
            return None, f"{method.words} is left out: {printable(other)} and other matrices are in no linear module"
        if other:
            spec = method.lora.model_copy(update={"targets": names})
            note = f"{method.words}: on {', '.join(names)} (`targets: all` is not for {printable(other)} and the like)"
            return method.model_copy(update={"lora": spec}), note
    return method, ""
