"""A domain gate that a surgery added: it is fitted before the first step, and closed on text that the base knows.

It is fitted on text of both domains. Where no original source has `generate`, the model also writes text for the fit:
its text is of all the kinds that the base knows, while the user may have given only one kind. That text is no source:
nothing trains on it, and no loss is measured on it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from surgeon.anatomy.limits import context_of
from surgeon.common.schema import BEGIN, ORIGINAL, TEMPLATE
from surgeon.data.specs import GenerateSpec, RowsSpec
from surgeon.errors import bad_input, printable
from surgeon.manifest.manifest import Manifest
from surgeon.models.templates import template_of
from surgeon.training.config.schema import originals_of
from surgeon.training.places import memory_folder
from surgeon.training.run import Case, Remedy, Run, Text

if TYPE_CHECKING:
    from surgeon.data.layouts import Document

# Tokens of the longest document that the model writes for the gate: many short documents show more of what the model
# knows than a few long ones.
_LENGTH = 256


def gate_of(manifest: Manifest | None) -> int | None:
    """Return the number of the operation in the last surgery that added a gate; None: no operation did."""
    operations = [] if manifest is None else manifest.operations
    return next((number for number, operation in enumerate(operations) if operation.trains == "fitted"), None)


class Gate(Remedy):
    """The domain gate of the last surgery, which this run fits unless an earlier run did."""

    @classmethod
    def of(cls, case: Case) -> Self | None:
        """Return the remedy where the last surgery added a gate, else None."""
        return None if gate_of(case.manifest) is None else cls(case)

    @property
    def fitted(self) -> tuple[str, ...]:
        """The gate's tensors where this run fits them; else empty."""
        return self.case.wanted.fitted

    def check_sources(self) -> None:
        """Raise BadInput where the gate is to be fitted and a domain has no source, or no held-out text."""
        from surgeon.training.negatives import languages

        loaded, wrong = self.case.loaded, []
        sources, kept = loaded.config.sources, loaded.config.keep_for_gate
        for number, code in enumerate(kept or ()):
            if code not in languages():
                wrong.append(
                    f"{loaded.where('keep_for_gate', number)}`{printable(code)}` is none of the languages of which the"
                    f" package has passages ({', '.join(languages())}); give a text of it as a source with"
                    " `role: original`"
                )
        for role, original in (("original", True), ("new", False)) if self.fitted else ():
            held = [number for number, source in enumerate(sources) if (source.role == ORIGINAL) is original]
            if not held:
                wrong.append(
                    f"{loaded.where('sources')}the plan's domain gate is fitted on text of both domains, and no source"
                    f" has the role `{role}`; add one (`share: 0` fits the gate without training on it)"
                )
            elif not any(sources[number].validation for number in held):
                wrong.append(
                    f"{loaded.where('sources', held[0], 'validation')}source {sources[held[0]].name}: `validation` is"
                    " 0, and the domain gate's threshold is chosen on held-out text; hold some out"
                )
        if wrong:
            raise bad_input(wrong)

    def notes(self) -> list[str]:
        """Warn where the base's own tensors train, as the gate then reads other states than it was fitted on."""
        if not self.case.wanted.of_base:
            return []
        return [
            "the base's own tensors train, so the model on original text is no longer the base,"
            " and the domain gate comes to read other states than it was fitted on"
        ]

    def texts(self) -> list[Text]:
        """Return the text that the model writes for the fit; none where an original source has `generate`."""
        loaded, out = self.case.loaded, self.case.out
        tokens = loaded.config.recall_for_gate
        if not self.fitted or not tokens or any(source.generate for source in originals_of(loaded.config)):
            return []
        length = min(_LENGTH, context_of(out.config) or _LENGTH)
        # A model with a chat template was trained on chats, and writes little else well.
        prompts = TEMPLATE if template_of(out) else BEGIN
        spec = GenerateSpec(tokens=max(tokens, length), length=length, prompts=prompts)
        without = (
            "  the domain gate is fitted without what the model writes ({}): kinds of text that no source has keep the"
            " base less often"
        )
        # No source can have this file's name.
        file = memory_folder(self.case.to) / "gate.recalled.jsonl"
        return [Text("(recalled)", "for the domain gate", spec, file, without)]

    def fit(self, run: Run, model: Any) -> Sequence[str]:
        """Fit the gate on the run's sources; return the names of its tensors in memory (none: already fitted).

        Raises BadInput where the gate cannot separate the domains.
        """
        if not self.fitted:
            return ()

        from surgeon.models.load import stored_dtype
        from surgeon.training.gate_fitting import fit_gate
        from surgeon.training.trainable.trainable_set import StoredNames

        stored = StoredNames(model, (*run.out.tensors, *self.fitted))
        dtypes, names = {}, []
        for name in self.fitted:
            in_memory = stored.alone(name)
            assert in_memory is not None, name
            names.append(in_memory)
            dtypes[in_memory.rpartition(".")[2]] = stored_dtype(run.out.tensors[name].dtype)
        fit_gate(model, run, dtypes, self._recalled())
        return names

    def _recalled(self) -> Sequence[Document]:
        """Return the documents that the model wrote for the fit; empty where it wrote none."""
        from surgeon.data.documents import Documents
        from surgeon.data.rows import Rows

        found: list[Document] = []
        for text in self.texts():
            if text.file.is_file():
                documents = Documents(text.file, Rows(RowsSpec()))
                found += [documents.read(number) for number in range(len(documents))]
        return found

    def after(self, run: Run) -> dict[str, Any]:
        """Return the gate's figures on held-out text, for the manifest; empty where this run did not fit it."""
        if not self.fitted:
            return {}

        from surgeon.training.gate_fitting import FIGURES_FILE

        return {"gate": json.loads((run.work / FIGURES_FILE).read_text(encoding="utf-8"))}
