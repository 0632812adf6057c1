"""The model of a run, with exactly what is wanted set to train, its head, and the base that teaches it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from surgeon.common.library import first_line
from surgeon.data.documents import Documents
from surgeon.data.layouts import Document
from surgeon.data.rows import Rows
from surgeon.data.specs import RowsSpec
from surgeon.errors import BadInput, printable
from surgeon.manifest.lineage import Lineage
from surgeon.models.load import load_model, stored_dtype
from surgeon.models.outputs import check_window, load_encoder
from surgeon.training.gate_fitting import fit_gate
from surgeon.training.isolation import probe
from surgeon.training.losses.cached_teacher import CachedTeacher
from surgeon.training.losses.cross_entropy import FusedHead, choose
from surgeon.training.losses.fisher import Anchored, fisher_of
from surgeon.training.losses.preserving import Preserving
from surgeon.training.opening import Run
from surgeon.training.processes.sharding import gathered
from surgeon.training.self_generated import gate_text
from surgeon.training.steps.by_document import by_document
from surgeon.training.steps.packed import builds_no_mask, give_masks_positions, implementation_of, run_in_one_row
from surgeon.training.trainable.trainable_set import StoredNames, TrainedParameters, check_set, hold_fixed, unfreeze

# The operation that makes a mixture of experts of a dense model.
UPCYCLE = "upcycle_experts"


def loaded_model(run: Run) -> tuple[Any, TrainedParameters]:
    """Load the model and let exactly the run's parameters train. Raises BadInput, WrongSet."""
    config = run.loaded.config
    if config.attention == "flex_attention" and run.device == "cpu":
        raise BadInput(
            f"{run.loaded.where('attention')}flex_attention does not train on a CPU; leave `attention` out, or say sdpa"
        )
    options: dict[str, Any] = {"dtype": config.dtype, "attention": config.attention, "say": run.say}
    if run.auto is None:
        model = load_model(run.out, **options)
    else:
        model = load_encoder(run.out, auto=run.auto, **options)
        check_window(model, run.settings.length)
    _isolate(run, model)
    fixed: dict[str, int] = {}
    if config.lora is not None:
        # PEFT is an extra.
        from surgeon.training.trainable.lora import attach

        names = attach(
            model,
            config.lora,
            run.wanted.names,
            beside=run.wanted.beside,
            base_names=run.out.tensors,
            seed=config.seed,
        )
        check_set(model, names)
    else:
        names = unfreeze(model, run.wanted, base_names=run.out.tensors)
        for name in names:
            # Loaded weights may be mapped from the file.
            parameter = model.get_parameter(name)
            parameter.data = parameter.data.clone()
        fixed = hold_fixed(model, run.wanted, tensors=run.out.tensors)
    run.say(f"trains {len(names)} tensors, {trained_numbers(model, fixed):,} numbers: {run.wanted.shown}")
    model.config.use_cache = False
    if _spreads(run, model):
        model.config.output_router_logits = True
    if config.checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model, TrainedParameters(tuple(names), fixed)


def _isolate(run: Run, model: Any) -> None:
    """Have a model keep packed documents apart: by its masks, or where its attention takes none in one row."""
    if run.examples is not None or run.loaded.config.packing == "joined":
        return
    if builds_no_mask(model):
        run_in_one_row(model)
    else:
        give_masks_positions(model)


def check_isolation(run: Run, model: Any) -> None:
    """Measure whether packed documents see each other, and report it. Raises BadInput where they do and must not.

    `model` is as it will train, on its device; all processes call.
    """
    config, settings = run.loaded.config, run.settings
    if run.examples is not None:
        return
    how = f"({printable(implementation_of(model))}), {settings.length} tokens a sequence"
    if config.packing == "joined":
        run.say(f"documents packed one after the other, attention across them {how}, as `packing: joined` asks")
        return
    special = {*run.encoder.tokenizer.all_special_ids}
    ids = [token for token in range(model.config.get_text_config().vocab_size) if token not in special]
    try:
        found = probe(
            model,
            length=settings.length,
            micro_batch=settings.micro_batch,
            packing=config.packing,
            ids=ids,
            device=run.device,
        )
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, ImportError, NameError) as error:
        raise BadInput(
            f"{run.loaded.where('attention')}the model does not run on packed documents with the attention {how}:"
            f" {first_line(error)}; say another `attention`, or another `dtype`"
        ) from error
    if not (found.isolates or found.by_grafts):
        where = "" if found.layer is None else f", first in {found.layer}"
        raise BadInput(
            f"{run.loaded.where('packing')}packed documents see each other under the attention {how}{where}:"
            f" {found.shown}. Say `packing: joined`, so that they are meant to, or another `attention`: flash attention"
            " also hands boundaries to layers that carry a state, for which they need kernels of their own"
        )
    run.say(f"documents packed without attention across them {how}; {found.shown}")
    if found.by_grafts:
        run.say(
            "what was added reads more than one document, as its operation says: with it a document's states change by"
            f" {found.change:.2g} where other documents change"
        )


def _spreads(run: Run, model: Any) -> bool:
    """Whether a surgery made this mixture of a dense base, to train with the loss that spreads tokens over experts.

    Other mixtures train as their config says.
    """
    if run.manifest is None or not getattr(model.config, "router_aux_loss_coef", None):
        return False
    surgeries = Lineage.of(run.manifest).since(0)
    return any(entry.op == UPCYCLE for surgery in surgeries for entry in surgery.operations)


def fit(run: Run, model: Any) -> list[str]:
    """Fit what gets its values before the first step; its names in the model."""
    if not run.wanted.fitted:
        return []
    stored = StoredNames(model, dict.fromkeys((*run.out.tensors, *run.wanted.fitted)))
    dtypes: dict[str, torch.dtype] = {}
    for name in run.wanted.fitted:
        target = stored.alone(name)
        assert target is not None, name
        dtypes[target] = stored_dtype(run.out.tensors[name].dtype)
    fit_gate(
        model,
        run.data.mixture,
        run.data.held,
        work=run.work,
        dtypes=dtypes,
        seed=run.loaded.config.seed,
        device=run.device,
        leads=run.ranks.leads,
        say=run.say,
        recalled=_recalled(run),
    )
    return list(dtypes)


def _recalled(run: Run) -> Sequence[Document]:
    """What the model wrote for its gate; nothing where it wrote none."""
    path = gate_text(run.target)
    if not path.is_file():
        return ()
    documents = Documents(path, Rows(RowsSpec()))
    return [documents.read(number) for number in range(len(documents))]


def fused_head(run: Run, model: Any) -> FusedHead | None:
    """The head that computes cross-entropy without all logits at once; None where torch's own does."""
    if run.examples is not None:
        return None
    vocabulary = int(model.config.get_text_config().vocab_size)
    tokens = run.settings.micro_batch * run.settings.length
    kind = choose(run.loaded.config.cross_entropy, tokens=tokens, vocabulary=vocabulary, device=run.device)
    if kind == "torch":
        # What teaches needs what the head reads.
        return None if run.within is None else FusedHead(model, kind)
    run.say(f"cross-entropy: {kind}, without all {tokens:,} × {vocabulary:,} logits at once")
    return FusedHead(model, kind)


def preserving_by(run: Run, model: Any, fused: FusedHead | None) -> Preserving | None:
    """The base within the model that teaches it through the head `fused`; None where none does."""
    if run.within is None or run.loaded.config.preserve is None:
        return None
    assert fused is not None
    spec, config = run.loaded.config.preserve, run.loaded.config
    copy: FusedHead | None = None
    if run.within.apart and spec.cached is None:
        frozen = load_model(run.out, dtype=config.dtype, attention=config.attention).requires_grad_(False)
        frozen.config.use_cache = False
        _isolate(run, frozen)
        copy = FusedHead(frozen if run.sharding is not None else frozen.to(run.device), "torch")
    base = run.within.shown
    how = f"{base} within" if copy is None else f"a frozen copy of {base}"
    if spec.cached is not None:
        how = f"what {base} said before the first step"
    found = Preserving(model, spec, run.within, fused, copy=copy)
    run.say(f"{how} teaches: {spec.taught} on {spec.on} text, weight {found.weight:g}")
    return found


def anchored_by(run: Run, model: Any, fused: FusedHead | None, device: torch.device) -> Anchored | None:
    """What trains, pulled back to its values at birth by the Fisher information; None where the config has none."""
    spec = run.loaded.config.preserve
    if spec is None or not spec.fisher:
        return None
    weight = spec.weight_of("fisher")
    run.say(f"fisher: estimated from at most {spec.fisher} sequences of original text; weight {weight:g}")
    with by_document():
        fisher = fisher_of(
            model, run.data.mixture, sequences=spec.fisher, work=run.work, fused=fused, device=device, ranks=run.ranks
        )
    if not any(bool(gathered(each.any())) for each in fisher.values()):
        run.say(
            "fisher: it is 0 everywhere, as nothing that trains takes part in original text, so it keeps nothing; leave"
            " it out"
        )
    return Anchored(model, fisher, weight)


def cached_teacher(run: Run) -> CachedTeacher | None:
    """Return the base's predictions on disk; None where it predicts during training, or not at all."""
    spec, settings = run.loaded.config.preserve, run.settings
    if run.within is None or spec is None or spec.cached is None:
        return None
    sequences = settings.steps * settings.batch
    return CachedTeacher(run.work, spec.cached, spec.on, run.data.mixture, sequences, settings.length)


def trained_numbers(model: Any, fixed: Mapping[str, int]) -> int:
    """How many numbers train, without those that are fixed."""
    training = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    left = sum(fixed.get(name, 0) for name, _ in training)
    total: int = sum(p.numel() for _, p in training)
    return total - left
