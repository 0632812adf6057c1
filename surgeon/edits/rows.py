"""Code shared by operations that change embedding rows: the facts of new tokens, and the promise for old logits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from surgeon.blueprint.blueprint import Claim
from surgeon.blueprint.recipes import HEAD_BLOCK
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.tokenizer_files import TOKENIZER_FILE, TokenizerJson, without
from surgeon.common.check import Check
from surgeon.errors import BadInput, printable
from surgeon.operations.prepare import Facts, Scale, SideFile

if TYPE_CHECKING:
    from surgeon.edits.vocabulary.grow import Grown

# The most new tokens of a twin, and the most rows of a twin that no token uses.
_FEW = 16


class VocabularyFacts(Facts):
    """The facts of a vocabulary growth, by whichever operation: what surgery.json keeps about the new tokens.

    `rows` is the number of the base's embedding rows that tokens use, so the first new id. `made_of` has a line for
    each new token: the old ids into which the old tokenizer cuts it (empty: it cannot).
    """

    kind: str
    how: str
    rows: Annotated[int, Field(ge=1)]
    made_of: list[Annotated[str, Field(pattern=r"^([0-9]{1,9}( [0-9]{1,9}){0,1023})?$")]]

    @classmethod
    def of(cls, grown: Grown) -> VocabularyFacts:
        """Return the facts of a grown tokenizer."""
        return cls(
            kind=grown.kind,
            how=grown.how,
            rows=grown.rows,
            made_of=[" ".join(map(str, named)) for named in grown.made_of],
            side_files={name: SideFile(inserted=[*map(list, at)]) for name, at in grown.inserted.items()},
            texts=list(grown.measured),
        )

    @property
    def pieces(self) -> tuple[tuple[int, ...], ...]:
        """Return, for each new token, the old ids into which the old tokenizer cuts it."""
        return tuple(tuple(map(int, line.split())) for line in self.made_of)

    def small(self, scale: Scale) -> VocabularyFacts:
        """Return the facts for a twin: a few new tokens, made of the twin's own tokens.

        The twin has as many unused rows as the base, at most `_FEW`.
        """
        free = min(scale.base.sizes.vocabulary - self.rows, _FEW)
        rows = scale.twin.sizes.vocabulary - free
        pieces = [sorted({token % rows for token in named}) for named in self.pieces[: free or _FEW]]
        made_of = [" ".join(map(str, named)) for named in pieces]
        few = {"rows": rows, "made_of": made_of, "side_files": {}, "texts": []}
        return type(self)(**self.model_dump() | few)

    def check(self, file: str) -> None:
        """Raise BadInput where a new token is made of ids that the base does not have."""
        if any(token >= self.rows for named in self.pieces for token in named):
            raise BadInput(f"{printable(file)}: `made_of` names a token beyond the base's; was it edited by hand?")

    def checks(self, base: CheckpointFolder | None, out: CheckpointFolder) -> list[Check]:
        """Return the check that every id up to the last new one is used, and that no old token has a new id."""
        there = [name for name in self.side_files if name == TOKENIZER_FILE and name in out.side_files]
        wrong = [] if TOKENIZER_FILE not in self.side_files or there else [TOKENIZER_FILE]
        for name in there:
            content = out.read_side_file(name)
            try:
                before = TokenizerJson.parse(without(content, self.side_files[name].inserted)).ids
                after = TokenizerJson.parse(content).ids
            except BadInput:
                # The rest is no tokenizer: the output has other insertions than recorded.
                wrong.append(name)
                continue
            if after != {*range(self.rows + len(self.made_of))} or max(before) >= self.rows:
                wrong.append(name)
        kept = f"{len(self.made_of)} new tokens, with the ids behind the base's"
        return [Check.of("tokenizer", wrong, "not the base's with the new tokens inserted", kept)]


def bound_of_rows(rows: int, added: int) -> str:
    """Return words on how much `added` new rows of the output can raise the loss on an old token, in nats."""
    return (
        "new rows of the output are the mean of the old ones, so the loss on any old token rises by at most"
        f" log(1 + {added}/{rows}) = {math.log1p(added / rows):.4g} nats"
    )


def claim_of_rows(rows: int, added: int, new: int) -> Claim:
    """Return the claim for old logits where `added` rows are added, and `new` rows in all take from them."""
    bound = bound_of_rows(rows, new)
    tail = rows % HEAD_BLOCK if added else 0
    if not tail:
        return Claim("exact", f"old logits are bit-identical; {bound}")
    last = f"those of the last {tail} old tokens" if tail > 1 else "that of the last old token"
    return Claim(
        "rounding",
        f"old logits are bit-identical but for {last}: {rows} rows are no multiple of {HEAD_BLOCK}, and for a few"
        " positions at once in float32 (cached decoding) a processor sums these in another order than in a wider head;"
        f" {bound}",
        tail_alone=True,
    )
