"""Sources with `generate`: text that the model writes itself before the run, and then trains on."""

from __future__ import annotations

from typing import Self

from surgeon.common.schema import BEGIN, TEMPLATE
from surgeon.errors import BadInput
from surgeon.models.templates import template_of
from surgeon.training.places import memory_folder, written_source
from surgeon.training.run import Case, Remedy, Text


class Recall(Remedy):
    """Sources with `generate`, whose text the model writes before the run."""

    @classmethod
    def of(cls, case: Case) -> Self | None:
        """Return the remedy where a source has `generate`, else None. Raises BadInput where it would write chats to a
        source of texts."""
        loaded = case.loaded
        written = [(number, source) for number, source in enumerate(loaded.config.sources) if source.generate]
        for number, source in written:
            if source.kind == "text" and source.prompts != BEGIN and template_of(case.out):
                raise BadInput(
                    f"{loaded.where('sources', number, 'kind')}source {source.name}: the model has a chat template, so"
                    " it answers `prompts` in chats; leave `kind: text` out"
                )
        return cls(case) if written else None

    def texts(self) -> list[Text]:
        """Return the texts to write, one for each source with `generate`, with the source's settings."""
        loaded, found = self.case.loaded, []
        for source in loaded.config.sources:
            if source.generate is not None:
                prompts = source.prompts
                if prompts not in (None, BEGIN, TEMPLATE):
                    prompts = str(loaded.resolve(prompts))
                spec = source.generate.model_copy(update={"prompts": prompts})
                file = written_source(memory_folder(self.case.to), source)
                found.append(Text(source.name, f"source {source.name}", spec, file))
        return found
