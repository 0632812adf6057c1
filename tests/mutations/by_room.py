"""Silent mistakes, at least one for each room, that the tests of that room alone must notice.

None of them raises an error or changes a type: a sign, another default, a check that is left out, a sum in a narrower
dtype, a wrong bound. What refuses to start is noticed anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.mutations.planting import Edit


@dataclass(frozen=True)
class Mistake:
    """A mistake in `room`, in a few words, and the edits that make it."""

    room: str
    words: str
    edits: tuple[Edit, ...]


def _mistake(room: str, words: str, file: str, old: str, new: str) -> Mistake:
    return Mistake(room, words, ((f"{room}/{file}", old, new),))


MISTAKES = (
    _mistake(
        "writing",
        "negative infinity passes for a number",
        "finiteness.py",
        "if largest_positive >= self._infinity or largest_negative >= self._infinity:",
        "if largest_positive >= self._infinity:",
    ),
    _mistake(
        "writing",
        "copies are not compared with their originals after the first",
        "readback.py",
        "if self._compare or not place.covered:",
        "if (self._compare and trusted is None) or not place.covered:",
    ),
    _mistake(
        "blueprint",
        "new shards are filled by half",
        "shards.py",
        "        room -= size\n",
        "        room -= 2 * size\n",
    ),
    _mistake(
        "blueprint",
        "a sum is taken in the dtype of its terms",
        "recipes/fused.py",
        "total = bench.working(self.terms[0]).mul_(self.factors[0])",
        "total = bench.compute(self.terms[0]).mul(self.factors[0])",
    ),
    _mistake(
        "blueprint",
        "α, where it is a tensor, is no input of what it interpolates",
        "recipes/fused.py",
        "return both if isinstance(self.alpha, float) else (*both, self.alpha)",
        "return both",
    ),
    _mistake(
        "cli",
        "--static compares logits, and without it none are compared",
        "spellings.py",
        'option="--static", off=True)',
        'option="--static")',
    ),
    _mistake(
        "checkpoint",
        "a header that changed since it was read is copied",
        "header.py",
        "if hashlib.sha256(found).hexdigest() != header.sha256:",
        "if len(found) != header.data_begin:",
    ),
    _mistake(
        "checkpoint",
        "a span of a span is read one byte further on",
        "pieces.py",
        "offset = inner.offset + part.offset - inner.at + begin\n",
        "offset = inner.offset + part.offset - inner.at + begin + 1\n",
    ),
    _mistake(
        "checkpoint",
        "a span of a span is one byte too short",
        "pieces.py",
        "yield Span(inner.tensor, offset, end - begin, part.at + begin, part",
        "yield Span(inner.tensor, offset, end - begin - 1, part.at + begin, part",
    ),
    _mistake(
        "checkpoint",
        "bytes of two tensors pass for those of the first",
        "pieces.py",
        'name in ("tensor", "count",',
        'name in ("count",',
    ),
    _mistake(
        "common",
        "attributes are not escaped",
        "page/markup.py",
        "    return text(value)",
        "    return str(value)",
    ),
    _mistake(
        "lab/studies",
        "a difference of frontiers has the other sign",
        "frontier.py",
        "return mean_height(one, shared) - mean_height(other, shared)",
        "return mean_height(other, shared) - mean_height(one, shared)",
    ),
    _mistake(
        "lab/studies",
        "the variance is divided by the number of seeds",
        "frontier.py",
        "for value in values) / (count - 1)",
        "for value in values) / count",
    ),
    _mistake(
        "lab/courses",
        "backward transfer leaves the last task out",
        "metrics.py",
        "for i in range(t + 1)) / (t + 1)",
        "for i in range(t)) / max(t, 1)",
    ),
    _mistake(
        "lab/courses",
        "earlier tasks are replayed as much as the task itself",
        "config/loading.py",
        "(replay if nth < number else 1.0)",
        "(1.0 if nth < number else 1.0)",
    ),
    _mistake(
        "data",
        "an interval's lower end lies above its value",
        "scores.py",
        "return float(value - reach), float(value + reach)",
        "return float(value + reach), float(value + reach)",
    ),
    _mistake(
        "data",
        "losses are computed in the model's dtype",
        "scoring.py",
        "F.cross_entropy(logits.float(), expected, ignore_index",
        "F.cross_entropy(logits, expected, ignore_index",
    ),
    _mistake(
        "lab/learning",
        "the demo compares with and without the remedy what does not replay",
        "demo.py",
        "share = _REPLAYED if way.kept else 0.0",
        "share = _REPLAYED",
    ),
    _mistake(
        "lab/evaluation",
        "a difference of accuracies has the other sign",
        "texts.py",
        "found.accuracy_difference(first)",
        "first.accuracy_difference(found)",
    ),
    _mistake(
        "anatomy",
        "a stack repeats after one period already",
        "kinds.py",
        "return next((p for p in range(2, len(pattern) // 2 + 1) if repeats(pattern, p)), None)",
        "return next((p for p in range(2, len(pattern)) if repeats(pattern, p)), None)",
    ),
    _mistake(
        "manifest",
        "spans are not looked for in the base",
        "reading.py",
        "or read > of.nbytes or lies",
        "or lies",
    ),
    _mistake(
        "manifest",
        "runs are written without where they lie",
        "manifest.py",
        "{span.count} {span.step} {span.every}",
        "{span.count} {span.step} {span.step}",
    ),
    _mistake(
        "manifest",
        "what a copy begins as passes for the tensor itself",
        "moves.py",
        "begins = of_graft(name) or each.is_copy",
        "begins = of_graft(name)",
    ),
    _mistake(
        "manifest",
        "a base tensor that was trained between two surgeries is taken for what it was",
        "lineage.py",
        "if there is None or (whole and there != then):",
        "if there is None:",
    ),
    _mistake(
        "models",
        "documents of a probe are joined without an end between them",
        "tokens.py",
        "if between and tokenizer.eos_token_id is not None:",
        "if False and tokenizer.eos_token_id is not None:",
    ),
    _mistake(
        "models",
        "biases are left out where rows lie apart",
        "stored_matrix.py",
        "return made if bias is None else made + bias",
        "return made",
    ),
    _mistake(
        "edits",
        "one silent layer among those that go makes the promise exact",
        "drop_layers.py",
        "silent = not merged and all(",
        "silent = not merged and any(",
    ),
    _mistake(
        "operations",
        "the middle of a stack ends one gap earlier",
        "selectors.py",
        "if n < 4 * i <= 3 * n]",
        "if n < 4 * i < 3 * n]",
    ),
    _mistake(
        "operations",
        "LoRA's α counts whole, whatever the rank",
        "pmoe_experts.py",
        "scale = 1.0 if self.alpha is None else self.alpha / self.rank",
        "scale = 1.0 if self.alpha is None else self.alpha",
    ),
    _mistake(
        "plan",
        "an operation that cannot be carried out is named by the line of the next",
        "plan.py",
        "        line = self.lines.get(place)\n",
        '        line = self.lines.get(("operations", number + 1))\n',
    ),
    _mistake(
        "lab/reports",
        "a run's losses begin at the first step whatever was before it",
        "curves.py",
        "        step += run.steps\n",
        "",
    ),
    _mistake(
        "rework",
        "a delta takes what is put together of the base from elsewhere in it",
        "apply_delta.py",
        "Copy(pieces.spans, made.dtype, tuple(made.shape))",
        "Copy(pieces.whole(pieces.tensors[0], pieces.nbytes).spans, made.dtype, tuple(made.shape))",
    ),
    _mistake(
        "rework",
        "a delta's tensors are not compared with their digests",
        "apply_delta.py",
        "if proof.digests[name] != tensor.sha256:",
        "if False and proof.digests[name] != tensor.sha256:",
    ),
    _mistake(
        "rework",
        "the base of a delta is not compared with its digests",
        "apply_delta.py",
        "if manifest.base.tensors[name] != StoredTensor.of(base.tensors[name], digest):",
        "if name not in manifest.base.tensors:",
    ),
    _mistake(
        "grafts",
        "an adapter's output matrix is born as those that read",
        "adapters.py",
        '"down_proj.weight": Birth((width, spec.size))',
        '"down_proj.weight": Birth((width, spec.size), std)',
    ),
    _mistake(
        "runtime",
        "routers' probabilities are those of the negative scores",
        "experts.py",
        "weights = F.softmax(known, dim=-1)",
        "weights = F.softmax(-known, dim=-1)",
    ),
    _mistake(
        "share",
        "an exported adapter takes the first slot's dropout",
        "export_slot.py",
        'for entry in entries if entry["slot"] == slot), 0.0)',
        "for entry in entries), 0.0)",
    ),
    _mistake(
        "training",
        "the base teaches on every token of original text and of new",
        "losses/preserving.py",
        'if self.spec.on == "original":',
        'if self.spec.on == "never":',
    ),
    _mistake(
        "training",
        "parameters of which a part is fixed decay",
        "steps/trainer.py",
        "set(self.get_decay_parameter_names(whole)) - self.parameters.fixed.keys()",
        "set(self.get_decay_parameter_names(whole))",
    ),
    _mistake(
        "transport",
        "column sums are taken in the working dtype",
        "passes.py",
        "column_sum_M = torch.zeros_like(v_M, dtype=torch.float64)",
        "column_sum_M = torch.zeros_like(v_M)",
    ),
    _mistake(
        "lab/learning",
        "text that the base predicts as well as its own is learned",
        "learn.py",
        "if bits[name] <= bits[OWN]:",
        "if bits[name] < bits[OWN]:",
    ),
    _mistake(
        "transport",
        "the entropy has the other sign",
        "sinkhorn.py",
        "entropy = -float(mass_M @ sums.u_N.log() + mass_N @ state.x_N) - shared",
        "entropy = float(mass_M @ sums.u_N.log() + mass_N @ state.x_N) + shared",
    ),
    _mistake(
        "verification",
        "parts of tensors are not compared with the base's",
        "base_bytes.py",
        "if name not in copied}",
        "if name in copied}",
    ),
    _mistake(
        "verification",
        "the first rows of a tensor pass for all of it",
        "base_bytes.py",
        "if pieces.is_all_of(base[name])",
        "if pieces == pieces.whole(name, pieces.nbytes)",
    ),
    _mistake(
        "verification",
        "files beside the base are not compared",
        "claims.py",
        "(claimed.files, found.files)",
        "(found.files, found.files)",
    ),
)
