"""The model of a run, loaded with exactly the wanted parameters set to train, and the run's micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from surgeon.common.formatting import windows
from surgeon.data.packing import batches
from surgeon.errors import BadInput
from surgeon.manifest.lineage import Lineage
from surgeon.training.run import Run
from surgeon.training.trainable.trainable_set import TrainedParameters

if TYPE_CHECKING:
    from torch import Tensor

# The operation that makes a mixture of experts of a dense model.
UPCYCLE = "upcycle_experts"


def loaded_model(run: Run) -> tuple[Any, TrainedParameters]:
    """Load the model and set exactly the run's parameters to train; return (the model, the parameters).

    Raises BadInput where the model cannot be loaded or trained so, and WrongSet where other parameters would train.
    """
    config = run.loaded.config
    if config.attention == "flex_attention" and run.device == "cpu":
        raise BadInput(
            f"{run.loaded.where('attention')}flex_attention does not train on a CPU; leave `attention` out, or say sdpa"
        )
    model = run.objective.load(run, dtype=config.dtype, attention=config.attention, say=run.say)
    run.objective.isolate(run, model)
    parameters = run.target.attach(model, run.wanted)
    numbers = trained_numbers(model, parameters.fixed)
    texts = ", ".join(source.name for source in config.sources if source.share)
    step = f"{run.objective.step_units(run.settings):,} {run.objective.unit} a step"
    run.say(
        f"trains {len(parameters.names)} tensors, {numbers:,} numbers ({run.wanted.shown}), on {texts}: {step} in"
        f" {windows(run.settings.length)}"
    )
    model.config.use_cache = False
    if _spreads(run, model):
        model.config.output_router_logits = True
    if config.checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model, parameters


def batches_of(run: Run) -> Iterator[dict[str, Tensor]]:
    """Return this process's micro-batches, with each sequence's number among all sequences of the run."""
    make = partial(run.objective.batch, run)
    return batches(run.data.mixture, make, micro_batch=run.settings.micro_batch, ranks=run.ranks)


def _spreads(run: Run, model: Any) -> bool:
    """Return whether a surgery made this mixture of experts from a dense base and its config has a load-balancing loss.

    Such a model trains with the loss that spreads tokens over experts; other mixtures train as their config says.
    """
    if run.manifest is None or not getattr(model.config, "router_aux_loss_coef", None):
        return False
    surgeries = Lineage.of(run.manifest).since(0)
    return any(entry.op == UPCYCLE for surgery in surgeries for entry in surgery.operations)


def trained_numbers(model: Any, fixed: Mapping[str, int]) -> int:
    """Return how many numbers train, without fixed ones; `fixed` counts them by the parameter's name."""
    training = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    left = sum(fixed.get(name, 0) for name, _ in training)
    total: int = sum(p.numel() for _, p in training)
    return total - left
