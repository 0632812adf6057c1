"""The model of a run, with exactly what is wanted set to train, and its head."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from surgeon.common.library import first_line
from surgeon.data.examples import batch_of_examples
from surgeon.data.packing import Batches, batch_of
from surgeon.errors import BadInput, printable
from surgeon.manifest.lineage import Lineage
from surgeon.models.load import load_model
from surgeon.models.outputs import check_window, load_encoder
from surgeon.training.isolation import probe
from surgeon.training.losses.cross_entropy import FusedHead, choose
from surgeon.training.losses.preserving import NUMBERS
from surgeon.training.run import Run
from surgeon.training.steps.packed import builds_no_mask, give_masks_positions, implementation_of, run_in_one_row
from surgeon.training.trainable.trainable_set import TrainedParameters

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
    if run.target.auto is None:
        model = load_model(run.out, **options)
    else:
        model = load_encoder(run.out, auto=run.target.auto, **options)
        check_window(model, run.settings.length)
    isolate(run, model)
    parameters = run.target.attach(model, run.wanted)
    numbers = trained_numbers(model, parameters.fixed)
    run.say(f"trains {len(parameters.names)} tensors, {numbers:,} numbers: {run.wanted.shown}")
    model.config.use_cache = False
    if _spreads(run, model):
        model.config.output_router_logits = True
    if config.checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model, parameters


def isolate(run: Run, model: Any) -> None:
    """Have a model keep packed documents apart: by its masks, or where its attention takes none in one row."""
    if run.examples is not None or run.loaded.config.packing == "joined":
        return
    if builds_no_mask(model):
        run_in_one_row(model)
    else:
        give_masks_positions(model)


def batches_of(run: Run, *, process: int, processes: int) -> Batches[Any]:
    """Return a process's micro-batches; those of text have the numbers of their sequences among all of the run."""
    if run.pad is None:
        return Batches(run.data.mixture, run.settings.micro_batch, process, processes, batch_of, NUMBERS)
    make = partial(batch_of_examples, pad=run.pad)
    return Batches(run.data.mixture, run.settings.micro_batch, process, processes, make)


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


def fused_head(run: Run, model: Any) -> FusedHead | None:
    """The head that computes cross-entropy without all logits at once; None where torch's own does."""
    if run.examples is not None:
        return None
    vocabulary = int(model.config.get_text_config().vocab_size)
    tokens = run.settings.micro_batch * run.settings.length
    kind = choose(run.loaded.config.cross_entropy, tokens=tokens, vocabulary=vocabulary, device=run.device)
    if kind == "torch":
        return FusedHead(model, kind) if any(remedy.reads_head for remedy in run.remedies) else None
    run.say(f"cross-entropy: {kind}, without all {tokens:,} × {vocabulary:,} logits at once")
    return FusedHead(model, kind)


def trained_numbers(model: Any, fixed: Mapping[str, int]) -> int:
    """How many numbers train, without those that are fixed."""
    training = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    left = sum(fixed.get(name, 0) for name, _ in training)
    total: int = sum(p.numel() for _, p in training)
    return total - left
