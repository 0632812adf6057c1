"""What a PEFT adapter's config says of what it changes, read as PEFT reads it."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from surgeon.checkpoint.peft_folder import ADAPTER_CONFIG, AdapterFolder, matched, numbers_of
from surgeon.common.patterns import Matcher
from surgeon.errors import BadInput, printable
from surgeon.operations.operation import Spec

# From this release on PEFT reads a parameter of all experts as experts by outputs by inputs; before, the other way
# round, but for classes that say so themselves.
_OTHER_PACKING = (0, 19)
_RELEASE = re.compile(r"(\d{1,4})\.(\d{1,4})\.\d{1,4}(\.post\d+)?(\+.*|@.*)?", re.DOTALL)


class Settings(Spec):
    """What an adapter's config says of what it changes; lists of names are PEFT's.

    `targets` are None where a regular expression names them, `pattern`; so is `excluding` for `exclude_modules`, empty
    where these are a list. `layers_pattern` are names of lists of
    layers. `tokens` are ids by names of modules; by no name, of the embeddings. `parameters` are `target_parameters`,
    `saved_by` is the release of PEFT.
    """

    rank: Annotated[int, Field(ge=1)]
    rank_pattern: dict[str, float]
    targets: list[str] | None
    excluded: list[str]
    layers: list[int] | None
    layers_pattern: list[str] = []  # noqa: RUF012  # pydantic copies it
    pattern: str = ""
    excluding: str = ""
    dora: bool
    biases: Literal["none", "all", "lora_only"]
    own_bias: bool
    saved: list[str]
    tokens: dict[str, list[int]]
    parameters: list[str] = []  # noqa: RUF012  # pydantic copies it
    saved_by: str = ""

    def rank_of(self, module: str) -> int:
        """The rank at a module, or at one of `target_parameters`, by its path."""
        return int(matched(self.rank_pattern, module, self.rank, self._matcher))

    @cached_property
    def _matcher(self) -> Matcher:
        return Matcher(ADAPTER_CONFIG)

    def names(self, module: str) -> bool:
        """Whether `targets` or `pattern` name a module, as PEFT's `check_target_module_exists` reads them."""
        if self.excluding and self._matcher.whole(self.excluding, module):
            return False
        if any(ends(module, name) for name in self.excluded) or self.saves(module):
            return False
        if self.targets is None:
            return self._matcher.whole(self.pattern, module)
        if module in self.targets or not any(ends(module, name) for name in self.targets):
            return module in self.targets
        return not self.layers or self._number(module) in self.layers

    def _number(self, module: str) -> int | None:
        """The number of a module's layer: the first in its path, or the first behind one of `layers_pattern`."""
        steps = module.split(".")
        numbers = [at for at, step in enumerate(steps[:-1]) if at and step.isdecimal()]
        if not self.layers_pattern:
            return next((int(steps[at]) for at in numbers if at > 1), None)
        found = (at for name in self.layers_pattern for at in numbers if ends(".".join(steps[:at]), name))
        return next((int(steps[at]) for at in found), None)

    def saves(self, path: str) -> bool:
        """Whether `modules_to_save` name a module, or one around it: by the end of its name, as `norm` any norm."""
        return any(f"{name}." in f"{path}." for name in self.saved)

    def targets_parameter(self, path: str) -> bool:
        """Whether `target_parameters` name a parameter."""
        return any(ends(path, name) for name in self.parameters)

    @property
    def packs_outputs_first(self) -> bool | None:
        """Which way round its PEFT read parameters of all experts; None: its config does not say."""
        found = _RELEASE.fullmatch(self.saved_by)
        return None if found is None else (int(found[1]), int(found[2])) >= _OTHER_PACKING


def settings_of(folder: AdapterFolder) -> Settings:
    """An opened adapter's. Raises BadInput for values that are none."""
    config, shown = folder.config, folder.shown
    targets, layers, tokens = (
        config.get(k) for k in ("target_modules", "layers_to_transform", "trainable_token_indices")
    )
    excluded, stems = config.get("exclude_modules"), config.get("layers_pattern")
    try:
        return Settings(
            rank=config.get("r", 8),
            rank_pattern=numbers_of(config, "rank_pattern", shown),
            targets=None if isinstance(targets, str) else targets or [],
            pattern=targets if isinstance(targets, str) else "",
            excluded=[] if isinstance(excluded, str) else excluded or [],
            excluding=excluded if isinstance(excluded, str) else "",
            layers_pattern=[stems] if isinstance(stems, str) and stems else stems or [],
            layers=[layers] if type(layers) is int else layers,
            dora=config.get("use_dora") or False,
            biases=config.get("bias") or "none",
            own_bias=config.get("lora_bias") or False,
            saved=config.get("modules_to_save") or [],
            tokens={"": tokens} if isinstance(tokens, list) else tokens or {},
            parameters=config.get("target_parameters") or [],
            saved_by=config.get("peft_version") or "",
        )
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = printable(".".join(str(step) for step in problem["loc"]))
        raise BadInput(f"{shown}: {where}: {printable(problem['msg'])}; get the adapter's own file again") from None


def ends(path: str, name: str) -> bool:
    """Whether a path is a name, or ends in it."""
    return path == name or path.endswith(f".{name}")
