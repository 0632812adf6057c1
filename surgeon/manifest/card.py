"""The model card: README.md of an output, for the Hub and for readers of the folder.

The card depends only on the manifest, the tensors' sizes and the base's card, so the same surgery gives the same bytes.
Anybody can write a manifest or a base: their texts are put into code spans and blocks that they cannot close.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from surgeon.anatomy.format_depth import other_scale
from surgeon.anatomy.kinds import broken_pattern
from surgeon.blueprint.blueprint import Layer
from surgeon.checkpoint.card_metadata import Metadata, block_of
from surgeon.checkpoint.header import DTYPE_BITS
from surgeon.common.promises import CONDITION, PROMISE_STYLES
from surgeon.errors import printable
from surgeon.manifest.manifest import MANIFEST_FILE, LayerEntry, Manifest, NewTensor
from surgeon.manifest.moves import has_other_names
from surgeon.operations import papers_of
from surgeon.operations.prepare import TextCounts

LayerT = TypeVar("LayerT", LayerEntry, Layer)

HUB_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}")
_COMMIT = re.compile(r"[0-9a-f]{40}")

# Auto class → the Hub's name for its task.
_TASKS = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
}

_LONGEST_PLAN = 20_000  # characters
_MOST_ROWS = 200
_MOST_NAMED = 12


def card(
    manifest: Manifest,
    config: Mapping[str, Any],
    sizes: Mapping[str, int],
    metadata: Metadata,
    *,
    repo_id: str | None = None,
    verified: Iterable[str] = (),
    delta: bool = False,
) -> bytes:
    """Return the card's text. `config` is the output's; `sizes` maps tensors to numbers of parameters.

    `verified` are lines on what was checked. With `repo_id` (`user/name`) the code examples load from the Hub, else
    from a folder. The card of a `delta` states which tensors the delta lacks and how to restore the output; `sizes`
    then covers the tensors of the delta.
    """
    base_model, auto = base_model_of(manifest, metadata), _auto_class(config)
    done = [_done(manifest), _proof(manifest, list(verified))]
    if delta:
        body = [*_delta(manifest, base_model, auto, sizes), *done]
    else:
        loading = [_loading(manifest, config, repo_id, auto), _training(manifest, repo_id), _undoing(manifest)]
        body = [_sizes(manifest, sizes), *done, *loading]
    head = [_block(manifest, metadata, base_model, auto, delta=delta), _title(manifest, base_model, repo_id)]
    return "\n".join(part for part in [*head, *body, _license(metadata), _papers(manifest)] if part).encode()


def _delta(manifest: Manifest, base_model: str | None, auto: str, sizes: Mapping[str, int]) -> list[str]:
    """Return the part of a delta's card on what the delta lacks and how to restore the output."""
    base = base_model if manifest.base.revision and base_model == manifest.base.id else "BASE"
    commit = manifest.base.revision or ""
    pinned = f" --revision {commit}" if base != "BASE" and _COMMIT.fullmatch(commit) else ""
    at = f" at {_code(commit)}" if commit else ""
    trust = ", trust_remote_code=True" if manifest.code else ""
    load = f'from transformers import {auto}\n\nmodel = {auto}.from_pretrained("OUT"{trust})'
    earlier = " It is itself an output of surgeon, of earlier surgeries." if manifest.lineage else ""
    return [
        f"**This is a delta**: {len(sizes)} tensors ({sum(sizes.values()):,} parameters) that the base lacks. It does"
        " not load by itself.\n",
        "## How to put it back\n",
        _fenced(f"surgeon apply --delta THIS {base} OUT{pinned}", "sh") + "\n",
        f"The base is what the last surgery found: {_code(manifest.base.id)}{at}.{earlier} Each of its"
        f" {len(manifest.base.tensors)} tensors is compared with its sha256 in `{MANIFEST_FILE}`; OUT is the output"
        " byte for byte, or is not written. Then:\n",
        _fenced(load, "python") + "\n",
    ]


def base_model_of(manifest: Manifest, metadata: Metadata) -> str | None:
    """Return the Hub id that the card names as base model; None where none is known.

    Where the base was a folder, this is the id in the base's card. Else it is the nearest base in the lineage that was
    read from the Hub at a known commit.
    """
    if metadata.base_model is not None and manifest.base.revision is None:
        return metadata.base_model
    nearest = [(manifest.base.id, manifest.base.revision)]
    nearest += [(ancestor.base.id, ancestor.base.revision) for ancestor in reversed(manifest.lineage)]
    return next((name for name, commit in nearest if commit and HUB_ID.fullmatch(name)), None)


def _block(manifest: Manifest, metadata: Metadata, base_model: str | None, auto: str, *, delta: bool = False) -> str:
    """Return the card's metadata block: library, base model, licence, languages, data sets and tags."""
    operations = dict.fromkeys(name for entry in _history(manifest) for name in entry)
    tags = (re.sub(r"[^a-z0-9]+", "-", name.lower())[:60].strip("-") for name in operations)
    return block_of(
        {
            "library_name": "surgeon" if delta else "transformers",
            "pipeline_tag": _TASKS.get(auto),
            "base_model": base_model,
            # The Hub knows four relations (adapter, finetune, merge, quantized); "finetune" fits a grown model best.
            "base_model_relation": ("adapter" if delta else "finetune") if base_model else None,
            "license": metadata.license,
            "license_name": metadata.license_name,
            "license_link": metadata.license_link,
            "language": list(metadata.languages),
            "datasets": list(metadata.datasets),
            "tags": ["surgeon", *(["model-expansion"] if operations else []), *(["delta"] if delta else []), *tags],
        }
    )


def _title(manifest: Manifest, base_model: str | None, repo_id: str | None) -> str:
    """Return the card's title, and one line on the base and how the output was made from it."""
    base = _code(manifest.base.id)
    if base_model is not None and manifest.base.id == base_model and _COMMIT.fullmatch(manifest.base.revision or ""):
        base = f"[{base_model}](https://huggingface.co/{base_model}/tree/{manifest.base.revision})"
    elif base_model is not None:
        base += f" (from [{base_model}](https://huggingface.co/{base_model}))"
    how = "grown" if any(_history(manifest)) else "trained"
    name = repo_id.partition("/")[2] if repo_id else f"{_code(manifest.base.id)}, {how}"
    return f"# {name}\n\n{base}, {how} by surgeon {_code(manifest.tool.version)}.\n"


def _sizes(manifest: Manifest, sizes: Mapping[str, int]) -> str:
    """Return a line on the numbers of layers, of parameters and of new parameters."""
    new = sum(sizes.get(name, 0) - _kept_numbers(manifest, made) for name, made in manifest.new_tensors.items())
    return (
        f"{len(manifest.layers)} layers (the base: {manifest.base.layers}), {sum(sizes.values()):,} parameters,"
        f" {new:,} of them new.\n"
    )


def _kept_numbers(manifest: Manifest, made: NewTensor) -> int:
    """Return how many numbers of a new tensor are the base's."""
    kept = made.kept
    numbers = sum(span.nbytes for span in kept.spans) * 8 // DTYPE_BITS[made.dtype]
    # The same base tensor may be copied more than once: count its numbers only once.
    return min(numbers, sum(math.prod(manifest.base.tensors[name].shape) for name in kept.tensors))


def _done(manifest: Manifest) -> str:
    """Return the card's section on operations, training runs, merges, layers and the plan."""
    lines = ["## What was done", ""]
    for entry in manifest.operations:
        lines.append(f"- {_code(entry.op)}: {_code(entry.matched)}")
    if manifest.lineage:
        lines += ["", "Before that, oldest first:", ""]
        for ancestor in manifest.lineage[-_MOST_NAMED:]:
            done = ", ".join(entry.op for entry in ancestor.operations) or "training"
            lines.append(f"- {_code(done)} on {_code(ancestor.base.id)}")
    if not manifest.operations:
        lines.append("- nothing was added: the base was trained as it is")
    if manifest.training:
        changed = len(manifest.changed_of_base)
        what = f"{changed} base tensor{'s' * (changed != 1)} changed by training" if changed else ""
        lines += ["", f"Trained since, {what or 'only what the surgeries made'}:", ""]
        for run in manifest.training[-_MOST_NAMED:]:
            by_source = [
                f"{_code(name)} {values[0]:.4f} → {values[-1]:.4f}" for name, values in run.losses.items() if values
            ]
            losses = f"; loss by source, first and last: {', '.join(by_source[:_MOST_NAMED])}" if by_source else ""
            lines.append(
                f"- {_code(run.blend) if run.blend else f'{run.steps:,} steps on {run.tokens:,} tokens'}{losses}"
            )
            lines += [f"  - {_code(note)}" for note in run.notes[:_MOST_NAMED]]
            lines += [f"  - answers {run.answers.text}"] if run.answers is not None else []
            lines += _gate(run.gate)
    lines += _measured(manifest.measured)
    if manifest.fits:
        lines += ["", f"Matrices were predicted (LESA): {manifest.fit_text}."]
    if manifest.merged:
        lines += ["", f"Adapters were merged: {manifest.merge_text}."]
    lines += ["", "The layers, top of the stack first:", "", _fenced("\n".join(_stack(manifest.layers)), "text")]
    plan = manifest.plan
    cut = len(plan) > _LONGEST_PLAN
    shown = "\n".join(printable(line, 400) for line in plan[:_LONGEST_PLAN].splitlines())
    lines += ["", "The plan" + (f" (its beginning; whole in `{MANIFEST_FILE}`):" if cut else ":"), ""]
    return "\n".join([*lines, _fenced(shown, "yaml"), ""])


def _measured(texts: Sequence[TextCounts]) -> list[str]:
    """Return a table of texts before and after a change of the vocabulary; empty where no text was measured."""
    if not texts:
        return []
    rows = [
        f"| {_code(text.use)} | {_code(text.text)} | {text.fertility[0]:.3f} |"
        f" {text.fertility[1]:.3f} | {text.unchanged:,} of {text.documents:,} |"
        for text in texts[:_MOST_NAMED]
    ]
    columns = "| use | text | tokens a word before | after | documents that tokenise as before |"
    return ["", columns, "|---|---|---|---|---|", *rows]


def _stack(layers: list[LayerEntry]) -> list[str]:
    """Return one line for each run of layers: base layers, output layers, description."""
    rows = [("base", "", "output", "")]
    end_of_run = len(layers)
    for run in reversed(layer_runs(layers)):
        first, last, begin, end = end_of_run - len(run), end_of_run - 1, run[0], run[-1]
        end_of_run = first
        kept = begin.base is not None and end.base is not None
        what = (begin.init or "kept") if kept else f"new: {begin.init}"
        if not kept and begin.sources:
            what += f" of {' and '.join(map(str, begin.sources))}" if len(run) == 1 else ""
        what += "".join(f" + {graft.text}" for graft in begin.grafts)
        here = f"{begin.base}-{end.base}" if first != last else f"{begin.base}"
        there = f"{first}-{last}" if first != last else f"{first}"
        rows.append((here if kept else "", "->" if kept else "+", there, printable(what)))
    if len(rows) > _MOST_ROWS:
        rows = [*rows[:_MOST_ROWS], ("", "", "", f"and {len(rows) - _MOST_ROWS} rows more in {MANIFEST_FILE}")]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [f"{a:>{widths[0]}} {b:<{widths[1]}} {c:>{widths[2]}}  {d}".rstrip() for a, b, c, d in rows]


def layer_runs(layers: Iterable[LayerT]) -> list[list[LayerT]]:
    """Group consecutive layers that the card shows as one line.

    Neighbours in the base form a run where their grafts and descriptions are equal, and so do new layers of one
    operation.
    """
    runs: list[list[LayerT]] = []
    for layer in layers:
        if runs and _joins(runs[-1][-1], layer):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return runs


def _joins(below: LayerEntry | Layer, above: LayerEntry | Layer) -> bool:
    """Return whether a layer is shown in one run with the layer below it (`layer_runs`)."""
    if below.grafts != above.grafts or below.init != above.init:
        return False
    if below.base is not None and above.base is not None:
        return above.base == below.base + 1
    return below.base is above.base is None and below.operation == above.operation


def _on_twin(manifest: Manifest) -> str:
    """Return a sentence that the promise was proven before the weights were written, if the manifest records this."""
    if not manifest.proven:
        return ""
    shown = ", ".join(_code(f"{name} {version}") for name, version in manifest.proven.items())
    return (
        " Before the weights were written, the plan was carried out on a tiny model of the same config with random"
        f" weights, and its logits stayed the same to the bit ({shown})."
    )


def _proof(manifest: Manifest, verified: list[str]) -> str:
    """Return the card's section on what the surgery promises, why, and how it was checked."""
    lines = ["## What is promised, and the proof", ""]
    if not manifest.operations:
        lines.append("Before its training this was its base, and nothing else.")
    elif manifest.promise == "exact":
        grown = any(made.grown_from is not None for made in manifest.new_tensors.values())
        of = " of the base's tokens" if grown else ""
        lines.append(
            f"At birth, before any training, this model computes what its base computes: every logit{of} bit-identical,"
            f" in the checkpoint's dtype, with and without cache, {CONDITION}.{_on_twin(manifest)} Why:"
        )
    elif manifest.promise == "rounding":
        lines.append(
            "At birth, before any training, this model computes the function of its base in another order, so logits"
            " may differ by rounding. Why:"
        )
    else:
        lines.append("This surgery does **not** preserve the base's function. What each operation says:")
    lines.append("")
    for entry in manifest.operations:
        promise = PROMISE_STYLES[entry.promise].plain
        lines.append(f"- {_code(entry.op)}, {promise}: {_code(entry.reason)}")
    if manifest.changed_of_base:
        lines += [
            *([""] if manifest.operations else []),
            f"Training changed {len(manifest.changed_of_base)} of the base's tensors since, so the base is no longer"
            f" within: `{MANIFEST_FILE}` names them, with their digests before and after.",
        ]
    lines += [
        "",
        f"`{MANIFEST_FILE}` holds the sha256 of each of the base's {len(manifest.base.tensors)} tensors, of each of"
        f" the {len(manifest.new_tensors)} new ones at birth, and of every file beside the weights but this card. It is"
        " a claim: `surgeon verify BASE THIS` makes it again from plan and base and compares, bytes first, then logits."
        f" The base's digest: `{manifest.base_digest}`.",
    ]
    if verified:
        lines += ["", "Checked before this was pushed:", "", *(f"- {_code(line)}" for line in verified)]
    return "\n".join([*lines, ""])


def _is_converted(manifest: Manifest) -> bool:
    """Return whether the output is of another transformers class, which has other names for the base's tensors."""
    return manifest.native and has_other_names(manifest)


def _loading(manifest: Manifest, config: Mapping[str, Any], repo_id: str | None, auto: str) -> str:
    """Return the card's section on loading the output; `auto` is its auto class, `repo_id` None a local folder."""
    name = repo_id or "path/to/this/folder"
    options = ["trust_remote_code=True"] if manifest.code else []
    fewer = len(manifest.layers) < manifest.base.layers
    own = f"It is the base's own class with {'fewer' if fewer else 'more'} layers"
    if not any(surgery.operations for surgery in (*manifest.lineage, manifest)):
        own = "It is the base's own class"
    note = f"{own}, so whatever runs the base runs this: no custom code.\n"
    if _is_converted(manifest):
        note = f"It is a {_code(config.get('model_type'))} of transformers, without custom code.\n"
    before = (manifest.base.config, manifest.base.layers) if manifest.dropped else None
    broken = broken_pattern(config, [layer.base for layer in manifest.layers], before) if manifest.native else None
    scaled = other_scale(config) if manifest.native else None
    if but := [each for each in (broken, scaled) if each is not None]:
        note = f"{own}: no custom code. But {'; '.join(but)}.\n"
    files = ", ".join(map(_code, manifest.code))
    if manifest.native and manifest.code:
        note = (
            f"{own}. The code beside the weights ({files}; sha256 in"
            f" `{MANIFEST_FILE}`) is the base's, byte for byte: read it before you let it run.\n"
        )
    elif not manifest.native:
        note = (
            f"The code beside the weights ({files}; sha256 in `{MANIFEST_FILE}`) imports torch"
            " and transformers only; surgeon need not be installed.\n"
        )
    if repo_id:
        options.append("revision=revision")
        note += (
            "\nPin `revision` to a commit hash of this repository (`surgeon push` printed it; the page's *Files and"
            " versions* has it)"
            + (", so that no later change of the code runs unseen" if manifest.code else "")
            + ".\n"
        )
    arguments = ", ".join([f'"{name}"', *options])
    pinned = 'revision = "main"  # better: the commit hash\n' if repo_id else ""
    code = f"from transformers import {auto}\n\n{pinned}model = {auto}.from_pretrained({arguments})"
    return f"## How to load it\n\n{_fenced(code, 'python')}\n\n{note}"


def _gate(figures: Mapping[str, Any] | None) -> list[str]:
    """Return lines on a fitted domain gate's measurements; empty where the file's figures are not numbers."""
    shares = [(figures or {}).get(key) for key in ("new", "original")]
    new, original = (share if isinstance(share, float) else None for share in shares)
    if new is None or original is None:
        return []
    return [
        f"- a domain gate, fitted before it: open on {new:.1%} of held-out new tokens and {original:.1%} of original"
        " ones; where it is closed from a document's beginning on, logits are the base's, bit for bit"
    ]


def _training(manifest: Manifest, repo_id: str | None) -> str:
    """Return the card's section on which tensors to train, with code that selects them where surgeon does not."""
    head = "## How to train on\n\n"
    if not manifest.operations or (manifest.left_behind and not manifest.dropped):
        return head + "As the base: every parameter, some layers, or a LoRA (`surgeon train`).\n"
    if any(entry.trains == "all" for entry in manifest.operations):
        return head + "Every parameter: the surgery is meant to be healed by training the whole model.\n"
    made = manifest.new_tensors
    rows = {name: each.grown_from for name, each in made.items() if each.grown_from is not None}
    if _is_converted(manifest):
        code = (
            "for name, parameter in model.named_parameters():\n"
            '    parameter.requires_grad_(any(part in name for part in (".experts.", ".gate.", ".router.")))'
        )
        return f"{head}Experts and routers, so that the rest stays the base's:\n\n{_fenced(code, 'python')}\n"
    if rows:
        return f"{head}`surgeon train` trains what is new: of {_listed(rows)} the rows from {max(rows.values())} on.\n"
    if not manifest.native:
        code = "model.freeze_base()  # leaves exactly the last surgery's tensors trainable"
        return (
            f"{head}{_fenced(code, 'python')}\n\nAuxiliary losses, where the grafts have some, are part of"
            " `output.loss` when labels are given in training mode.\n"
        )
    file = f'"path/to/this/folder/{MANIFEST_FILE}"'
    imports, fetched = "import json\n", file
    if repo_id:
        imports += "from huggingface_hub import hf_hub_download\n"
        fetched = f'hf_hub_download("{repo_id}", "{MANIFEST_FILE}", revision=revision)'
    # A tensor with a part for each layer also contains the base's layers.
    stays = any(each.stays for each in made.values())
    frozen = 'new = {name for name, made in new.items() if made.get("holds") != "kept"}\n' if stays else ""
    code = (
        f"{imports}\nwith open({fetched}) as manifest:\n    new = json.load(manifest)"
        f'["new_tensors"]\n{frozen}for name, parameter in model.named_parameters():\n'
        "    parameter.requires_grad_(name in new)"
    )
    return f"{head}Only what is new, so that the base stays what it is:\n\n{_fenced(code, 'python')}\n"


def _listed(names: Iterable[str]) -> str:
    """Return the names as code spans, joined by commas."""
    return ", ".join(map(_code, names))


def _undoing(manifest: Manifest) -> str:
    """Return the card's section on reverting the surgeries."""
    code = "surgeon revert THIS BASE --to 0    # the first base, byte for byte"
    if manifest.lineage:
        code = f"surgeon revert THIS EARLIER        # without the last surgery\n{code}"
    return (
        f"## How to undo it\n\n{_fenced(code, 'sh')}\n\nTHIS is this folder. Where a base tensor was trained, merged"
        " away or left behind, and not kept in it, revert says which, and writes nothing.\n"
    )


def _license(metadata: Metadata) -> str:
    """Return the card's section on the licence."""
    if metadata.license is None:
        return "## Licence\n\nUnknown: the base's card names none. The terms of the base apply to what came from it.\n"
    name = metadata.license_name if metadata.license == "other" and metadata.license_name else metadata.license
    return f"## Licence\n\n{_code(name)}. What came from the base stays under the base's terms.\n"


def _papers(manifest: Manifest) -> str:
    """Return the card's section with the papers behind all operations."""
    done: list[tuple[str, list[str]]] = []
    for known in (*manifest.lineage, manifest):
        made = [layer for layer in known.layers if layer.base is None]
        for number, entry in enumerate(known.operations):
            done.append((entry.op, [layer.init for layer in made if layer.operation == number]))
    papers = papers_of(done)
    if not papers:
        return ""
    return f"## Papers\n\n{_fenced(chr(10).join(paper.bibtex for paper in papers), 'bibtex')}\n"


def _history(manifest: Manifest) -> list[list[str]]:
    """Return the operations' names of every surgery, oldest first."""
    return [[entry.op for entry in surgery.operations] for surgery in (*manifest.lineage, manifest)]


def _auto_class(config: Mapping[str, Any]) -> str:
    """Return the auto class of a checkpoint, by the head that its config names."""
    names = config.get("architectures")
    named = str(names[0]) if isinstance(names, list) and names else ""
    return next((auto for auto in _TASKS if named.endswith(auto.removeprefix("AutoModel"))), "AutoModel")


def _code(text: Any) -> str:
    """Return a Markdown code span that its content cannot close."""
    shown = printable(str(text), 400)
    fence = "`" * (_longest_run(shown) + 1)
    pad = " " if shown.startswith("`") or shown.endswith("`") or not shown.strip() else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def _fenced(text: str, language: str) -> str:
    """Return a Markdown code block that its content cannot close."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _longest_run(text: str) -> int:
    """Return the length of the longest run of backquotes in a text."""
    return max((len(run) for run in re.findall("`+", text)), default=0)
