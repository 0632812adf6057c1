"""train.yaml, read: values as the schema has them, the line of each, and the options that replaced some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surgeon.common.checked_yaml import check_yaml, editor_schema, where
from surgeon.common.yaml import Place, override, parse_yaml, read_text
from surgeon.errors import printable
from surgeon.train.config.habits import HABITS
from surgeon.train.config.schema import TrainConfig

_WHAT = "training config"


@dataclass(frozen=True)
class LoadedConfig:
    """A config and the file it came from; relative paths in it start at the file's folder.

    `lines` are those of its keys, `given` the options that set some of them instead.
    """

    config: TrainConfig
    source: Path
    lines: Mapping[Place, int] = field(default_factory=dict)
    given: Mapping[Place, str] = field(default_factory=dict)

    def where(self, *place: str | int) -> str:
        """How an error about a key begins: the file and line, or the option that set it."""
        if not self.lines and place not in self.given:
            return f"{printable(str(self.source))}: "
        return where(place, self.lines, str(self.source), self.given)

    def resolve(self, path: str) -> Path:
        """A path that the config names."""
        return self.source.parent / path


def load_config(path: Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read and check a config file, with `overrides` (`optimizer.lr=1e-4`) in it; BadInput names file and line."""
    text = read_text(path, what=_WHAT)
    data, lines = parse_yaml(
        text, str(path), what=_WHAT, needs="`surgeon_train: 1`, `steps:` (or `epochs:`, or `bytes:`) and `sources:`"
    )
    given = override(data, overrides, example="optimizer.lr=1e-4")
    config = check_yaml(TrainConfig, data, lines, str(path), what=_WHAT, habits=HABITS, given=given)
    return LoadedConfig(config, path, lines, given)


def json_schema() -> dict[str, Any]:
    """The JSON schema of training configs, for editors that complete YAML by it."""
    return editor_schema(TrainConfig, "surgeon training config")
