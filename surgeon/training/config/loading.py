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

_OUT, _RUN = (
    "the argument OUT of `surgeon train OUT TRAIN.YAML RUN`",
    "the argument RUN of `surgeon train OUT TRAIN.YAML RUN`",
)
_BATCH = "`batch` (sequences a step, over all processes) and `micro_batch` (at a time in one process)"

# What transformers, TRL, PEFT, axolotl, LLaMA-Factory and unsloth call the keys of a training file, and former keys.
HABITS: Mapping[str, str] = {
    **dict.fromkeys(("learning_rate", "lr"), "`optimizer.lr`"),
    **dict.fromkeys(("num_train_epochs", "num_epochs"), "`epochs`"),
    **dict.fromkeys(("max_steps", "total_steps", "num_steps"), "`steps`"),
    **dict.fromkeys(
        ("per_device_train_batch_size", "gradient_accumulation_steps", "micro_batch_size", "batch_size"), _BATCH
    ),
    **dict.fromkeys(
        ("max_seq_length", "max_length", "max_seq_len", "sequence_len", "cutoff_len", "block_size", "seq_length"),
        "`length`",
    ),
    **dict.fromkeys(("warmup_ratio", "warmup_steps"), "`optimizer.warmup`: steps, or below 1 a share of all steps"),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler"), "`optimizer.schedule`"),
    "max_grad_norm": "`optimizer.clip`",
    **dict.fromkeys(("adam_beta1", "adam_beta2"), "`optimizer.betas`: [0.9, 0.999]"),
    **dict.fromkeys(("bf16", "fp16", "torch_dtype"), "`dtype`: auto, bfloat16 or float32"),
    "gradient_checkpointing": "`checkpointing`",
    **dict.fromkeys(("attn_implementation", "flash_attention"), "`attention`"),
    **dict.fromkeys(("sample_packing", "pack_sequences"), "`packing`: isolated or joined"),
    **dict.fromkeys(("fsdp", "deepspeed"), "`sharding`: none or fsdp, under torchrun"),
    **dict.fromkeys(
        ("datasets", "dataset", "train_file", "train_data", "data"),
        "`sources`: a list of {name: fr, share: 1.0, path: fr.jsonl}",
    ),
    **dict.fromkeys(("val_set_size", "eval_dataset", "validation_file"), "`validation` of a source"),
    **dict.fromkeys(("eval_steps", "eval_strategy", "evaluation_strategy"), "`evaluate_every`: steps"),
    **dict.fromkeys(("save_steps", "save_strategy"), "`save_every`: steps"),
    "logging_steps": "`log_every`",
    "saving": "nothing: checkpoints are written between steps",
    "blend": "the command surgeon blend, after the run",
    **dict.fromkeys(("load_best_model_at_end", "metric_for_best_model"), "`keep_best`: the name of a source"),
    **dict.fromkeys(("lora_r", "r", "lora_rank"), "`lora.rank`"),
    "lora_alpha": "`lora.alpha`",
    "lora_dropout": "`lora.dropout`",
    **dict.fromkeys(("target_modules", "lora_target_modules", "lora_target"), "`lora.targets`"),
    "dataloader_num_workers": "nothing: texts are read in the training process",
    **dict.fromkeys(("output_dir", "run_name"), _RUN),
    **dict.fromkeys(("model", "base_model", "model_name_or_path", "model_name"), _OUT),
}


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
