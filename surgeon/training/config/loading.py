"""The loading of train.yaml: values checked by the schema, the line of each, and options that replace values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgeon.common.checked_yaml import Loaded, check_yaml, editor_schema
from surgeon.common.yaml import read_yaml
from surgeon.models.templates import TEMPLATES
from surgeon.training.config.schema import TrainConfig

_WHAT = "training config"

# By what stands here for them, the keys of a training file of transformers, TRL, PEFT, axolotl, LLaMA-Factory and
# unsloth, and former keys.
_HABITS = {
    "`optimizer.lr`": "learning_rate lr",
    "`epochs`": "num_train_epochs num_epochs",
    "`steps`": "max_steps total_steps num_steps",
    "`batch` (sequences a step, over all processes) and `micro_batch` (at a time in one process)": (
        "per_device_train_batch_size gradient_accumulation_steps micro_batch_size batch_size"
    ),
    "`length`": "max_seq_length max_length max_seq_len sequence_len cutoff_len block_size seq_length",
    "`optimizer.warmup`: steps, or below 1 a share of all steps": "warmup_ratio warmup_steps",
    "`optimizer.schedule`": "lr_scheduler_type lr_scheduler",
    "`optimizer.clip`": "max_grad_norm",
    "`optimizer.betas`: [0.9, 0.999]": "adam_beta1 adam_beta2",
    "`dtype`: auto, bfloat16 or float32": "bf16 fp16 torch_dtype",
    "`checkpointing`": "gradient_checkpointing",
    "`attention`": "attn_implementation flash_attention",
    "`packing`: isolated or joined": "sample_packing pack_sequences",
    "`sharding`: none or fsdp, under torchrun": "fsdp deepspeed",
    "`sources`: a list of {name: fr, share: 1.0, path: fr.jsonl}": "datasets dataset train_file train_data data",
    "`validation` of a source": "val_set_size eval_dataset validation_file",
    "`evaluate_every`: steps": "eval_steps eval_strategy evaluation_strategy",
    "`save_every`: steps": "save_steps save_strategy",
    "`log_every`": "logging_steps",
    "nothing: checkpoints are written between steps": "saving",
    "the command surgeon blend, after the run": "blend",
    "`keep_best`: the name of a source": "load_best_model_at_end metric_for_best_model",
    "`lora.rank`": "lora_r r lora_rank",
    "`lora.alpha`": "lora_alpha",
    "`lora.dropout`": "lora_dropout",
    "`lora.targets`": "target_modules lora_target_modules lora_target",
    "nothing: texts are read in the training process": "dataloader_num_workers",
    "the argument RUN of `surgeon train OUT TRAIN.YAML RUN`": "output_dir run_name",
    "the argument OUT of `surgeon train OUT TRAIN.YAML RUN`": "model base_model model_name_or_path model_name",
}
HABITS: Mapping[str, str] = {key: here for here, keys in _HABITS.items() for key in keys.split()}


@dataclass(frozen=True)
class LoadedConfig(Loaded[TrainConfig]):
    """A training config, the file it was read from, and the line of each value."""

    @property
    def template(self) -> str | None:
        """The chat template that `chat_template` names; None where it is left out."""
        named = self.config.chat_template
        return None if named is None else TEMPLATES[named]


def load_config(path: Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read and check a config file, after replacing values by `overrides` (`optimizer.lr=1e-4`).

    Raises BadInput, which names file and line.
    """
    document = read_yaml(
        path, what=_WHAT, needs="`surgeon_train: 1`, `steps:` (or `epochs:`, `bytes:` or `minutes:`) and `sources:`"
    )
    document.override(overrides, example="optimizer.lr=1e-4")
    return LoadedConfig(check_yaml(TrainConfig, document, HABITS), path, document.lines, document.given)


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of training configs, by which editors complete YAML."""
    return editor_schema(TrainConfig, "surgeon training config")
