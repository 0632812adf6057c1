"""Names of what trains: on disk, as manifests and plans say them, and in the loaded model.

Most are the same. Of a mixture of experts a checkpoint may hold one tensor for each expert where the model has one for
all: transformers makes the one of the other when it loads, and the reverse when it saves; here it is asked for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from surgeon.errors import SurgeonError, printable
from surgeon.families.names import Made, made_of


class WrongSet(SurgeonError):
    """Other parameters would train than are to."""


class StoredNames:
    """Maps tensors on disk, called `names`, to those of a loaded `model`, and back."""

    def __init__(self, model: Any, names: Iterable[str]) -> None:
        self.model = model
        held = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        held |= {name for name, _ in model.named_buffers()}
        names = list(names)
        # Where names are the same, transformers is not asked.
        apart = [name for name in names if name not in held]
        self._made = {name: Made((name,), False) for name in names if name in held}
        self._made |= made_of(model, apart) if apart else {}
        self._sources: dict[str, list[str]] = {}
        for name, made in self._made.items():
            for target in made.names:
                self._sources.setdefault(target, []).append(name)

    def in_memory(self, names: Iterable[str]) -> list[str]:
        """The parameters that these tensors on disk make; buffers do not train.

        Raises WrongSet where one is made of others too.
        """
        wanted = set(names)
        buffers = {name for name, _ in self.model.named_buffers()}
        found = dict.fromkeys(target for name in wanted for target in self._made[name].names if target not in buffers)
        for target in found:
            if others := [name for name in self._sources[target] if name not in wanted]:
                raise WrongSet(
                    f"{printable(target)}: to train, yet it is made of {printable(others[0])} too, which is not;"
                    " nothing was trained"
                )
        return list(found)

    def targets(self, name: str) -> tuple[str, ...]:
        """The parameters, or buffers, that this tensor on disk is a part of."""
        return self._made[name].names

    def sources(self, target: str) -> list[str]:
        """The tensors on disk that make a parameter."""
        return self._sources.get(target, [])

    def alone(self, name: str) -> str | None:
        """The parameter that this tensor on disk makes alone, and as it is; None where it is converted."""
        made = self._made[name]
        if made.converted or len(made.names) != 1 or self._sources[made.names[0]] != [name]:
            return None
        return made.names[0]

    def on_disk(self, tensors: Mapping[str, Tensor], *, also: Iterable[str] = ()) -> dict[str, Tensor]:
        """Tensors by their names in memory as they are stored. Raises WrongSet where transformers stores others.

        Those of `also` that are other names of the same parameters get the same values (tied embeddings stored twice).
        """
        from transformers.core_model_loading import revert_weight_conversion

        plain: dict[str, Tensor] = {}
        same = {id(p): name for name, p in self.model.named_parameters() if name in tensors}
        every = dict(self.model.named_parameters(remove_duplicate=False))
        for name in also:
            if name in self._made and name not in tensors and name in every and id(every[name]) in same:
                plain[name] = tensors[same[id(every[name])]].clone()
        converted: dict[str, Tensor] = {}
        for target, value in tensors.items():
            first = self._sources[target][0]
            if self._made[first].converted:
                converted[target] = value
            else:
                plain[first] = value
        if not converted:
            return plain
        made = revert_weight_conversion(self.model, converted)
        wanted = {name for target in converted for name in self._sources[target]}
        if odd := wanted ^ made.keys():
            raise WrongSet(
                f"{printable(min(odd))}: transformers stores what trained under other names than the checkpoint has;"
                " save the base with this version of transformers once, and operate on that"
            )
        return plain | {name: value.contiguous() for name, value in made.items()}
