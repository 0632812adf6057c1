"""The training config of each run of a study, and settings that depend on the base.

The training config has the same keys as one that a person writes for `surgeon train`.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from surgeon import Checkpoint, GenerateSpec, LoadedPlan, parse_plan
from surgeon.common.installation import lacking
from surgeon.common.schema import NEW, ORIGINAL
from surgeon.errors import BadInput, printable
from surgeon.lab.studies.config.entries import MethodSpec, Partial, Remedy, StudyText
from surgeon.lab.studies.config.loading import LoadedStudy
from surgeon.lab.studies.config.schema import Study

RECALLED = "recalled"
# Share of the base's text that is held out where there is no original text to measure on.
_RECALLED_HELD_OUT = 0.2
# Share of replayed text that is held out where a domain gate chooses its threshold on it.
_HELD_OUT_OF_GATE = 0.1
# Every method has the same schedule; only the rate differs.
_OPTIMIZER: dict[str, Any] = {
    "schedule": "cosine",
    "warmup": 0.05,
    "betas": [0.9, 0.95],
    "weight_decay": 0.0,
    "clip": 1.0,
}
_FLOOR = 0.1
# Steps between checkpoints of longer runs, so that an interruption costs less than the whole run.
_CHECKPOINTS = 500
_MOST_RECALLED = 100_000
# More steps than any run has.
_NEVER = 10**9


def measured_names(loaded: LoadedStudy) -> tuple[list[str], list[str]]:
    """Return (names of the new texts, names of the original texts) on which losses are measured."""
    original = [text.called for text in loaded.texts("original")]
    return [text.called for text in loaded.texts("new")], original or [RECALLED]


def training_config(
    loaded: LoadedStudy, method: MethodSpec, remedy: Remedy, *, rate: float, seed: int, memory: str
) -> dict[str, Any]:
    """Return a run's training config as plain data; `memory` is the path of the base's text as the config names it.

    Raises BadInput where a method's domain gate has no original text on which it can be fitted.
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
        # A study measures losses after training, as `surgeon evaluate` does; the trainer's own losses are not used.
        "validation_sequences": 1,
    }


def _budget(study: Study) -> dict[str, Any]:
    """Return the keys for a run's length, checkpoints, evaluation and logs; evaluation happens only at the end."""
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
    """Return a training config's sources: new text, original text (which is always measured), and replayed text."""
    replay = remedy.replay
    share = 0.0 if replay is None else replay.share
    found = [_source(loaded, text, NEW, (1 - share) * (text.share or 0.0)) for text in loaded.texts("new")]
    original, replayed = loaded.texts("original"), loaded.texts("replayed")
    # Text that no run trains on is held out completely.
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
                "validation": 0.0 if original else _RECALLED_HELD_OUT,
            }
        )
    return found


def _sources_of_run(loaded: LoadedStudy, method: MethodSpec, remedy: Remedy, memory: str) -> list[dict[str, Any]]:
    """Return the sources of a run: all of `sources`; with a domain gate or `fisher`, only new and replayed text.

    A domain gate and `fisher` read every original source of a config, so text that is only measured must not be a
    source. Raises BadInput where a domain gate has no original source.
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
    """Return how the base writes text, and how much: by default as much as a run replays, at most 100,000 tokens."""
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
    """Parse a plan's `text` with the run's seed in place of its own; `source` names the plan in errors."""
    return parse_plan(text, source=source, overrides=[f"seed={seed}"])


def _source(loaded: LoadedStudy, text: StudyText, role: str, share: float) -> dict[str, Any]:
    """Return a text of a study as a source of a training config, with absolute paths."""
    validation: float | str = text.validation
    if isinstance(validation, str) and not validation.startswith("split:"):
        validation = str(loaded.resolve(validation).absolute())
    path = text.path if text.path.startswith("dataset:") else str(loaded.resolve(text.path).absolute())
    return {"name": text.called, "path": path, "share": share, "role": role, **text.reading, "validation": validation}


def _what(method: MethodSpec) -> dict[str, Any]:
    """Return the keys that choose what trains; no key for a plan, whose new tensors train by default."""
    if method.full is not None:
        return {"what": "base" if method.plan is None else "all"}
    if method.partial is not None:
        return {"what": {"layers": {"every": method.partial.every}}}
    if method.lora is not None:
        return {"lora": method.lora.model_dump(mode="json", exclude_none=True)}
    return {}


def suited(loaded: LoadedStudy, base: Checkpoint) -> LoadedStudy:
    """Return the study with LoRA targets and partial layers chosen for this base, where the file leaves them out.

    `notes` lists the differences from the usual choice. A LoRA that the file does not ask for is left out where the
    base has no linear module, or PEFT is not installed.
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
    """Return (the method adapted to this base, a note or ""); the method is None where the base cannot have it."""
    if method.partial is not None and "every" not in method.partial.model_fields_set:
        layers = base.layers
        if layers < method.partial.every:
            note = f"{method.words}: of the base's {layers} layers the last one trains (`partial: {{every: {layers}}}`)"
            return method.model_copy(update={"partial": Partial(every=layers)}), note
    if method.lora is not None and find_spec("peft") is None:
        return None, lacking(f"{method.words} is left out: it", "PEFT", "peft")
    if method.lora is not None and "targets" not in method.lora.model_fields_set:
        names, other = base.linear_modules()
        if other and not names:
            return None, f"{method.words} is left out: {printable(other)} and other matrices are in no linear module"
        if other:
            spec = method.lora.model_copy(update={"targets": names})
            note = f"{method.words}: on {', '.join(names)} (`targets: all` is not for {printable(other)} and the like)"
            return method.model_copy(update={"lora": spec}), note
    return method, ""
