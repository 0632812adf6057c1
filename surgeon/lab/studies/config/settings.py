"""What a study takes on its base: the training config of each run, and what the file leaves open.

The training config is what `surgeon train` is given, the same keys that a person would write.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from surgeon import Checkpoint, GenerateSpec, LoadedPlan, parse_plan
from surgeon.common.schema import NEW, ORIGINAL, TEMPLATE
from surgeon.errors import BadInput, printable
from surgeon.lab.studies.config.entries import MethodSpec, Partial, Remedy, StudyText
from surgeon.lab.studies.config.loading import LoadedStudy
from surgeon.lab.studies.config.schema import Study

RECALLED = "recalled"
# Of what the base writes, held out where there is no original text to measure on.
_RECALLED_HELD_OUT = 0.2
# Of what is replayed, held out where a domain gate chooses its threshold by it.
_HELD_OUT_OF_GATE = 0.1
# The same schedule for every method: what differs is the rate.
_OPTIMIZER: dict[str, Any] = {
    "schedule": "cosine",
    "warmup": 0.05,
    "betas": [0.9, 0.95],
    "weight_decay": 0.0,
    "clip": 1.0,
}
_FLOOR = 0.1
# Longer runs keep checkpoints, so that a kill costs less than the whole run.
_CHECKPOINTS = 500
_MOST_RECALLED = 100_000
# Steps that no run has.
_NEVER = 10**9


def measured_names(loaded: LoadedStudy) -> tuple[list[str], list[str]]:
    """The new texts and the original ones that losses are measured on, by name."""
    original = [text.called for text in loaded.texts("original")]
    return [text.called for text in loaded.texts("new")], original or [RECALLED]


def training_config(
    loaded: LoadedStudy, method: MethodSpec, remedy: Remedy, *, rate: float, seed: int, memory: str
) -> dict[str, Any]:
    """The config as plain data; `memory` is the file of what the base wrote, as the config names it.

    BadInput where a method's domain gate has no text to be fitted on.
    """
    study = loaded.config
    optimizer: dict[str, Any] = dict(_OPTIMIZER)
    settings: dict[str, Any] = {}
    for given in (study.train, method.train):
        settings |= given.given()
        optimizer |= given.given_optimizer()
    settings["optimizer"] = optimizer | {"lr": rate, "min_lr": float(f"{_FLOOR * rate:.6g}")}
    return {
        "surgeon_train": 1,
        **_budget(study),
        "seed": seed,
        "batch": study.batch,
        "length": study.length,
        **settings,
        **_what(method),
        **({"preserve": remedy.preserve.model_dump(mode="json", exclude_none=True)} if remedy.preserve else {}),
        "sources": _sources_of_run(loaded, method, remedy, memory),
        # Losses that are compared are measured by `surgeon evaluate`; the trainer's own are not looked at.
        "validation_sequences": 1,
    }


def _budget(study: Study) -> dict[str, Any]:
    """How long a run is, and when it keeps checkpoints and evaluates: in between not at all."""
    steps = study.run_steps
    if steps is None:
        return {"bytes": study.bytes, "save_every": _CHECKPOINTS, "evaluate_every": _NEVER, "log_every": _CHECKPOINTS}
    return {
        "steps": steps,
        "save_every": steps if steps <= 2 * _CHECKPOINTS else _CHECKPOINTS,
        "evaluate_every": steps,
        "log_every": max(10, steps // 10),
    }


def sources(loaded: LoadedStudy, remedy: Remedy, memory: str) -> list[dict[str, Any]]:
    """Sources of a training config: new text, original text (that is at least measured), and what is replayed."""
    replay = remedy.replay
    share = 0.0 if replay is None else replay.share
    found = [_source(loaded, text, NEW, (1 - share) * (text.share or 0.0)) for text in loaded.texts("new")]
    original, replayed = loaded.texts("original"), loaded.texts("replayed")
    # Text that no run trains on is measured as a whole.
    whole = bool(replayed) or not loaded.config.replays("text")
    from_text = replay is not None and replay.source == "text"
    for text in original:
        own = share * (text.share or 0.0) if from_text and not replayed else 0.0
        source = _source(loaded, text, ORIGINAL, own)
        if whole and "validation" not in text.model_fields_set and not text.path.startswith("dataset:"):
            source["validation"] = source["path"]
        found.append(source)
    if from_text:
        found += [
            _source(loaded, text, ORIGINAL, share * (text.share or 0.0)) | {"validation": 0.0} for text in replayed
        ]
    recalls = replay is not None and replay.source == "recall"
    if recalls or not original:
        found.append(
            {
                "name": RECALLED,
                "path": memory,
                "share": share if recalls else 0.0,
                "role": ORIGINAL,
                "kind": "chat" if recalled_by(loaded.config).prompts == TEMPLATE else "text",
                "validation": 0.0 if original else _RECALLED_HELD_OUT,
            }
        )
    return found


def _sources_of_run(loaded: LoadedStudy, method: MethodSpec, remedy: Remedy, memory: str) -> list[dict[str, Any]]:
    """Sources of a run. One that fits a domain gate, or `fisher`, knows the original domain by what is replayed alone.

    Both read every original source of a training config, so text that is only measured may not be one.
    """
    found, gated = sources(loaded, remedy, memory), method.called in loaded.gated
    if not gated and not remedy.fisher:
        return found
    replay = remedy.replay
    read = {RECALLED} if replay is not None and replay.source == "recall" else set[str]()
    if replay is not None and replay.source == "text":
        read = {text.called for text in loaded.texts("replayed") or loaded.texts("original")}
    found = [source for source in found if source["role"] == NEW or source["name"] in read]
    if not gated:
        return found
    originals = [source for source in found if source["role"] == ORIGINAL]
    if not originals:
        raise BadInput(
            f"its domain gate is fitted on original text too, and with the remedy {remedy.name} nothing is replayed;"
            " give the remedy `replay: {}`, or the method `remedies:` without it"
        )
    if all(source["validation"] == 0.0 for source in originals):
        for source in originals:
            source["validation"] = _HELD_OUT_OF_GATE
    return found


def recalled_by(study: Study) -> GenerateSpec:
    """How much the base writes, and how: by default what a run replays, at most 100,000 tokens."""
    if study.recall is not None:
        return study.recall
    shares = [remedy.replay.share for _, remedy in study.entries if remedy.replay is not None]
    # A text has at most as many tokens as bytes.
    wanted = int((study.run_tokens or study.bytes or 0) * max(shares, default=0.1))
    if not study.original:
        wanted = int(wanted / (1 - _RECALLED_HELD_OUT)) + 1
    least = max([20, *(remedy.fisher for remedy in study.remedies)]) * study.length
    return GenerateSpec(tokens=min(_MOST_RECALLED, max(wanted, least)), length=study.length)


def seeded_plan(text: str, source: str, seed: int) -> LoadedPlan:
    """A plan whose random numbers are those of a run's seed."""
    return parse_plan(text, source=source, overrides=[f"seed={seed}"])


def _source(loaded: LoadedStudy, text: StudyText, role: str, share: float) -> dict[str, Any]:
    validation: float | str = text.validation
    if isinstance(validation, str) and not validation.startswith("split:"):
        validation = str(loaded.resolve(validation).absolute())
    path = text.path if text.path.startswith("dataset:") else str(loaded.resolve(text.path).absolute())
    return {"name": text.called, "path": path, "share": share, "role": role, **text.reading, "validation": validation}


def _what(method: MethodSpec) -> dict[str, Any]:
    """What trains, in the words of a training config; of a plan what it added."""
    if method.full is not None:
        return {"what": "base" if method.plan is None else "all"}
    if method.partial is not None:
        return {"what": {"layers": {"every": method.partial.every}}}
    if method.lora is not None:
        return {"lora": method.lora.model_dump(mode="json", exclude_none=True)}
    return {}


def suited(loaded: LoadedStudy, base: Checkpoint) -> LoadedStudy:
    """The study with LoRA and partial tuning as this base allows them, where the file says no targets and no layers.

    What differs from other bases is in its `notes`. A LoRA that nobody asked for is left out where nothing is linear.
    """
    asked = {method.called for method in loaded.config.methods}
    methods, notes = [], []
    for method in loaded.config.all_methods:
        fitting, note = _fitting(method, base)
        if fitting is None and method.called in asked:
            fitting, note = method, ""
        methods += [] if fitting is None else [fitting]
        notes += [note] if note else []
    if not notes:
        return loaded
    config = loaded.config.model_copy(update={"methods": methods, "peers": False})
    return replace(loaded, config=config, notes=tuple(notes))


def _fitting(method: MethodSpec, base: Checkpoint) -> tuple[MethodSpec | None, str]:
    """The method for this base, and what is to be said of it; None where it cannot be."""
    if method.partial is not None and "every" not in method.partial.model_fields_set:
        layers = base.layers
        if layers < method.partial.every:
            note = f"{method.words}: of the base's {layers} layers the last one trains (`partial: {{every: {layers}}}`)"
            return method.model_copy(update={"partial": Partial(every=layers)}), note
    if method.lora is not None and "targets" not in method.lora.model_fields_set:
        names, other = base.linear_modules()
        if other and not names:
            return None, f"{method.words} is left out: {printable(other)} and other matrices are in no linear module"
        if other:
            spec = method.lora.model_copy(update={"targets": names})
            note = f"{method.words}: on {', '.join(names)} (`targets: all` is not for {printable(other)} and the like)"
            return method.model_copy(update={"lora": spec}), note
    return method, ""
