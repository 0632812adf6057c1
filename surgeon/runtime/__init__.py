"""The code that ships inside checkpoints, and the table of what to copy for which model type.

Every other file of this folder is copied verbatim beside the weights of a grafted model and imports torch and
transformers only. This file is not copied.
"""

from __future__ import annotations

from pathlib import Path

SHARED_FILES = (
    "surgeon_adapters.py",
    "surgeon_experts.py",
    "surgeon_frames.py",
    "surgeon_interpolators.py",
    "surgeon_layers.py",
    "surgeon_losses.py",
    "surgeon_low_rank.py",
    "surgeon_models.py",
    "surgeon_precision.py",
    "surgeon_sites.py",
    "surgeon_specs.py",
    "surgeon_states.py",
    "surgeon_surgery.py",
)

# Base model type → prefix of its upcycled classes.
CLASS_PREFIXES = {
    "llama": "UpcycledLlama",
    "mistral": "UpcycledMistral",
    "qwen2": "UpcycledQwen2",
    "qwen3": "UpcycledQwen3",
    "gemma": "UpcycledGemma",
    "gemma2": "UpcycledGemma2",
    "gemma3_text": "UpcycledGemma3Text",
    "olmo2": "UpcycledOlmo2",
    "phi3": "UpcycledPhi3",
}

# The same of encoders, which carry control states only.
ENCODER_PREFIXES = {
    "roberta": "UpcycledRoberta",
    "deberta": "UpcycledDeberta",
    "deberta-v2": "UpcycledDebertaV2",
}

# Heads that have an upcycled twin, and the auto class each is found by; "Model" is the base model.
HEADS = {
    "Model": "AutoModel",
    "ForCausalLM": "AutoModelForCausalLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
}
ENCODER_HEADS = {
    "Model": "AutoModel",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
}


def _modeling(family: str) -> str:
    """The module that holds a family's classes; a model type may have a hyphen, a module's name may not."""
    return f"modeling_surgeon_{family.replace('-', '_')}"


def _auto_map(family: str, prefix: str, heads: dict[str, str]) -> dict[str, str]:
    classes = {auto: f"{prefix}{head}" for head, auto in heads.items()}
    return {auto: f"{_modeling(family)}.{name}" for auto, name in ({"AutoConfig": f"{prefix}Config"} | classes).items()}


# Base model type → files to copy beside the weights.
RUNTIME_FILES: dict[str, tuple[str, ...]] = {
    family: (f"{_modeling(family)}.py", *SHARED_FILES) for family in CLASS_PREFIXES
} | {family: (f"{_modeling(family)}.py", "surgeon_encoders.py", *SHARED_FILES) for family in ENCODER_PREFIXES}

# Base model type → the output config's `auto_map`.
AUTO_MAP: dict[str, dict[str, str]] = {
    family: _auto_map(family, prefix, HEADS) for family, prefix in CLASS_PREFIXES.items()
} | {family: _auto_map(family, prefix, ENCODER_HEADS) for family, prefix in ENCODER_PREFIXES.items()}

_HERE = Path(__file__).resolve().parent


def shipped_code(name: str) -> bytes:
    """The content of one of `RUNTIME_FILES`, as it is copied."""
    return (_HERE / name).read_bytes()


def is_shipped_name(name: str) -> bool:
    """Whether a file that is shipped has this name."""
    return any(name in files for files in RUNTIME_FILES.values())


def is_shipped_code(name: str, content: bytes) -> bool:
    """Whether a file beside somebody's weights is, byte for byte, one that this version ships."""
    return is_shipped_name(name) and shipped_code(name) == content
