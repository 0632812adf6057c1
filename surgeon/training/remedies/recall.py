"""Sources with `generate`: text that the model writes itself before the run, and then trains on."""

from __future__ import annotations

from typing import Self

from surgeon.common.schema import BEGIN, TEMPLATE
from surgeon.training.places import memory_folder, written_source
from surgeon.training.run import Case, Remedy, Text


class Recall(Remedy):
    """Sources with `generate`, whose text the model writes before the run."""

    @classmethod
    def of(cls, case: Case) -> Self | None:
        """Return the remedy where a source has `generate`, else None."""
        return cls(case) if any(source.generate for source in case.loaded.config.sources) else None

    def texts(self) -> list[Text]:
        """Return the texts to write, one for each source with `generate`, with the source's settings."""
        loaded, found = self.case.loaded, []
        for source in loaded.config.sources:
            if source.generate is not None:
                prompts = source.prompts if source.prompts in (BEGIN, TEMPLATE) else str(loaded.resolve(source.prompts))
                spec = source.generate.model_copy(update={"prompts": prompts})
                file = written_source(memory_folder(self.case.to), source)
                found.append(Text(source.name, f"source {source.name}", spec, file))
        return found
